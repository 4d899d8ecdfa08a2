// Package blobtest says, as tests, what every store of blobs outside the host
// database must do. A new store passes RunStore and is then good for a sweep.
package blobtest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/alkblobs/gc-agent/blob"
)

// Store is a place of blobs that is listed by page and deleted from in batches.
type Store interface {
	// List returns at most n objects after the cursor, in the order of the keys'
	// bytes; n is at least 1. What is put or deleted while the pages are read may
	// or may not be listed; everything else is listed exactly once. A page that
	// can't be read completely is an error.
	List(ctx context.Context, after blob.Cursor, n int) (blob.Page, error)
	// Stat returns those of the keys that exist, each once, in key order, whatever
	// the order of keys. A key that doesn't exist, or can't be one of the pool's,
	// is left out.
	Stat(ctx context.Context, keys []blob.Key) ([]blob.Object, error)
	// Delete removes the objects that still have the version seen, and says what
	// became of each, in the order of seen. Removing what isn't there is no error.
	// A key that fails, or can't be one of the pool's, stops no other. An error
	// comes with the answers that are sure, the first so many of them; of the
	// other objects none, some or all may be gone. It is safe to ask again.
	Delete(ctx context.Context, seen []blob.Object) ([]blob.Deletion, error)
}

// Fixture is an empty store of a test's own, and the ways to fill it.
type Fixture struct {
	Store Store
	// Key returns the i-th of at least 100 keys. They rise with i.
	Key func(i int) blob.Key
	// Put stores a blob of so many bytes, or replaces the one that is there.
	Put func(key blob.Key, size int64)
	// PutForeign stores a few things that can't be blobs of the pool, before,
	// between and after the keys where the store can, and returns how many.
	PutForeign func() int
}

// RunStore runs every test of what a store must do; each asks for a fixture of
// its own.
func RunStore(t *testing.T, start func(t *testing.T) Fixture) {
	t.Helper()
	tests := []struct {
		name string
		run  func(t *testing.T, f Fixture)
	}{
		{"empty", testEmpty},
		{"list in key order", testOrder},
		{"list by page", testPages},
		{"list refuses what it can't do", testListRefuses},
		{"put between pages", testPutBetweenPages},
		{"delete between pages", testDeleteBetweenPages},
		{"foreign is counted", testForeign},
		{"stat", testStat},
		{"delete", testDelete},
		{"delete what isn't there", testDeleteAbsent},
		{"delete keeps a changed version", testDeleteChanged},
		{"delete keeps a version that nobody saw", testDeleteUnseen},
		{"delete goes on after a failure", testDeleteFailure},
		{"delete twice in one call", testDeleteTwice},
		{"context ends", testContext},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tt.run(t, start(t))
		})
	}
}

func testEmpty(t *testing.T, f Fixture) {
	if got := f.list(t, 10); len(got) != 0 {
		t.Errorf("an empty store lists %v", got)
	}
	if got := f.stat(t, f.Key(0)); len(got) != 0 {
		t.Errorf("an empty store has %v", got)
	}
	if got := f.stat(t); len(got) != 0 {
		t.Errorf("stat of no keys: %v", got)
	}
	if got := f.delete(t); len(got) != 0 {
		t.Errorf("delete of no objects: %v", got)
	}
}

func testOrder(t *testing.T, f Fixture) {
	for _, i := range []int{3, 0, 4, 1, 2} {
		f.Put(f.Key(i), int64(10*i))
	}
	got := f.list(t, 100)
	if diff := cmp.Diff(f.keys(0, 1, 2, 3, 4), keysOf(got)); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	for i, o := range got {
		if o.Size != int64(10*i) {
			t.Errorf("object %d has %d bytes, want %d", i, o.Size, 10*i)
		}
		if o.Version == "" {
			t.Errorf("object %d has no version", i)
		}
	}
}

func testPages(t *testing.T, f Fixture) {
	const count = 25
	f.fill(count)
	for _, n := range []int{1, 2, 5, count - 1, count, count + 1} {
		if diff := cmp.Diff(f.first(count), keysOf(f.list(t, n))); diff != "" {
			t.Errorf("pages of %d (-want +got):\n%s", n, diff)
		}
	}
	one := f.page(t, "", 5)
	if diff := cmp.Diff(one, f.page(t, "", 5)); diff != "" {
		t.Errorf("the first page, read again (-first +second):\n%s", diff)
	}
	two := f.page(t, one.Next, 5)
	if diff := cmp.Diff(two, f.page(t, one.Next, 5)); diff != "" {
		t.Errorf("the second page, read again (-first +second):\n%s", diff)
	}
}

func testListRefuses(t *testing.T, f Fixture) {
	f.fill(3)
	for _, n := range []int{0, -1} {
		if _, err := f.Store.List(t.Context(), "", n); err == nil {
			t.Errorf("a page of %d objects is no error", n)
		}
	}
}

func testPutBetweenPages(t *testing.T, f Fixture) {
	for i := 1; i < 20; i += 2 {
		f.Put(f.Key(i), 1)
	}
	got := f.listWith(t, 4, func(page blob.Page) {
		last := slices.Index(f.first(20), page.Objects[len(page.Objects)-1].Key)
		f.Put(f.Key(0), 1)
		f.Put(f.Key(last+1), 1)
	})
	if !slices.IsSorted(keysOf(got)) {
		t.Errorf("keys aren't in order: %q", keysOf(got))
	}
	if len(slices.Compact(keysOf(got))) != len(got) {
		t.Errorf("a key is listed twice: %q", keysOf(got))
	}
	for i := 1; i < 20; i += 2 {
		if !slices.Contains(keysOf(got), f.Key(i)) {
			t.Errorf("key %d was there throughout and isn't listed", i)
		}
	}
	// A listing that begins after a put has it.
	f.Put(f.Key(20), 1)
	again := keysOf(f.list(t, 4))
	for _, key := range append(keysOf(got), f.Key(0), f.Key(20)) {
		if !slices.Contains(again, key) {
			t.Errorf("key %q was put before the listing began and isn't listed", key)
		}
	}
}

func testDeleteBetweenPages(t *testing.T, f Fixture) {
	const count = 12
	f.fill(count)
	// The key at the cursor goes, and so does one that is yet to come.
	got := f.listWith(t, 4, func(page blob.Page) {
		if slices.Contains(keysOf(page.Objects), f.Key(3)) {
			f.delete(t, f.stat(t, f.Key(3), f.Key(5))...)
		}
	})
	keys := keysOf(got)
	keys = slices.DeleteFunc(keys, func(key blob.Key) bool { return key == f.Key(5) })
	want := slices.Delete(f.first(count), 5, 6)
	if diff := cmp.Diff(want, keys); diff != "" {
		t.Errorf("keys, save the one that was deleted before its page (-want +got):\n%s", diff)
	}
}

func testForeign(t *testing.T, f Fixture) {
	f.fill(6)
	want := f.PutForeign()
	for _, n := range []int{1, 2, 100} {
		var foreign int
		got := f.listAll(t, n, func(page blob.Page) { foreign += page.Foreign })
		if diff := cmp.Diff(f.first(6), keysOf(got)); diff != "" {
			t.Errorf("pages of %d: keys (-want +got):\n%s", n, diff)
		}
		if foreign != want {
			t.Errorf("pages of %d: %d foreign, want %d", n, foreign, want)
		}
	}
}

func testStat(t *testing.T, f Fixture) {
	f.fill(4)
	listed := f.list(t, 10)
	got := f.stat(t, f.Key(3), f.Key(9), f.Key(1), f.Key(3), tooLong)
	if diff := cmp.Diff([]blob.Object{listed[1], listed[3]}, got); diff != "" {
		t.Errorf("stat differs from list (-list +stat):\n%s", diff)
	}
}

func testDelete(t *testing.T, f Fixture) {
	f.fill(5)
	got := f.delete(t, f.stat(t, f.Key(1))[0], f.stat(t, f.Key(0))[0])
	want := []blob.Deletion{
		{Key: f.Key(1), Size: sizeOf(1), Outcome: blob.Deleted},
		{Key: f.Key(0), Size: sizeOf(0), Outcome: blob.Deleted},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("deletions (-want +got):\n%s", diff)
	}
	f.wantKeys(t, f.keys(2, 3, 4))
}

func testDeleteAbsent(t *testing.T, f Fixture) {
	f.fill(3)
	seen := f.list(t, 10)
	f.delete(t, seen[1])
	got := f.delete(t, seen...)
	want := []blob.Deletion{
		{Key: f.Key(0), Size: sizeOf(0), Outcome: blob.Deleted},
		{Key: f.Key(1), Outcome: blob.Vanished},
		{Key: f.Key(2), Size: sizeOf(2), Outcome: blob.Deleted},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("deletions (-want +got):\n%s", diff)
	}
	f.wantKeys(t, nil)
}

func testDeleteChanged(t *testing.T, f Fixture) {
	f.fill(3)
	seen := f.list(t, 10)
	f.Put(f.Key(1), 4711)
	// A blob that was deleted and uploaded again isn't the one that was seen.
	f.delete(t, seen[2])
	f.Put(f.Key(2), 4712)
	got := f.delete(t, seen...)
	want := []blob.Deletion{
		{Key: f.Key(0), Size: sizeOf(0), Outcome: blob.Deleted},
		{Key: f.Key(1), Outcome: blob.Changed},
		{Key: f.Key(2), Outcome: blob.Changed},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("deletions (-want +got):\n%s", diff)
	}
	left := f.list(t, 10)
	if len(left) != 2 || left[0].Size != 4711 || left[1].Size != 4712 {
		t.Errorf("left: %v, want the two that were put since", left)
	}
}

func testDeleteUnseen(t *testing.T, f Fixture) {
	f.fill(2)
	got := f.delete(t, blob.Object{Key: f.Key(0), Size: sizeOf(0)})
	if len(got) != 1 || got[0].Outcome == blob.Deleted || got[0].Size != 0 {
		t.Errorf("deleting without a version: %v", got)
	}
	f.wantKeys(t, f.first(2))
}

func testDeleteFailure(t *testing.T, f Fixture) {
	f.fill(2)
	seen := f.list(t, 10)
	got := f.delete(t, seen[0], blob.Object{Key: tooLong, Version: seen[0].Version}, seen[1])
	var outcomes []blob.Outcome
	for _, d := range got {
		outcomes = append(outcomes, d.Outcome)
		if (d.Err != nil) != (d.Outcome == blob.Failed) {
			t.Errorf("key %q: outcome %s, error %v", blob.Shorten(string(d.Key)), d.Outcome, d.Err)
		}
	}
	if diff := cmp.Diff([]blob.Outcome{blob.Deleted, blob.Failed, blob.Deleted}, outcomes); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s", diff)
	}
	f.wantKeys(t, nil)
}

func testDeleteTwice(t *testing.T, f Fixture) {
	f.fill(1)
	seen := f.list(t, 10)[0]
	var freed int64
	for _, d := range f.delete(t, seen, seen) {
		freed += d.Size
		if d.Outcome != blob.Deleted && d.Outcome != blob.Vanished {
			t.Errorf("outcome %s, error %v", d.Outcome, d.Err)
		}
	}
	if freed != sizeOf(0) {
		t.Errorf("%d bytes are free, want %d: counted once", freed, sizeOf(0))
	}
	f.wantKeys(t, nil)
}

func testContext(t *testing.T, f Fixture) {
	f.fill(2)
	seen := f.list(t, 10)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, listErr := f.Store.List(ctx, "", 10)
	_, statErr := f.Store.Stat(ctx, f.first(2))
	_, deleteErr := f.Store.Delete(ctx, seen)
	for name, err := range map[string]error{"list": listErr, "stat": statErr, "delete": deleteErr} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s in a context that has ended: %v", name, err)
		}
	}
}

// tooLong can't be a key of any pool.
var tooLong = blob.Key(strings.Repeat("7", blob.MaxKeyLen+1))

func sizeOf(i int) int64 { return int64(100 + i) }

func (f Fixture) fill(count int) {
	for i := range count {
		f.Put(f.Key(i), sizeOf(i))
	}
}

func (f Fixture) first(count int) []blob.Key {
	keys := make([]blob.Key, count)
	for i := range keys {
		keys[i] = f.Key(i)
	}
	return keys
}

func (f Fixture) keys(at ...int) []blob.Key {
	keys := make([]blob.Key, len(at))
	for i, a := range at {
		keys[i] = f.Key(a)
	}
	return keys
}

func (f Fixture) page(t *testing.T, after blob.Cursor, n int) blob.Page {
	t.Helper()
	page, err := f.Store.List(t.Context(), after, n)
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	if len(page.Objects) > n {
		t.Fatalf("a page of at most %d objects has %d", n, len(page.Objects))
	}
	if page.More && page.Next == after {
		t.Fatalf("the page after cursor %q ends where it begins", after)
	}
	return page
}

func (f Fixture) list(t *testing.T, n int) []blob.Object {
	t.Helper()
	return f.listAll(t, n, func(blob.Page) {})
}

// listWith lists everything and calls between after each page that has objects
// and a page after it.
func (f Fixture) listWith(t *testing.T, n int, between func(blob.Page)) []blob.Object {
	t.Helper()
	return f.listAll(t, n, func(page blob.Page) {
		if page.More && len(page.Objects) > 0 {
			between(page)
		}
	})
}

func (f Fixture) listAll(t *testing.T, n int, each func(blob.Page)) []blob.Object {
	t.Helper()
	var all []blob.Object
	var after blob.Cursor
	// An endless listing must fail, not hang: no test has so many pages.
	for range 1000 {
		page := f.page(t, after, n)
		all = append(all, page.Objects...)
		each(page)
		if !page.More {
			return all
		}
		after = page.Next
	}
	t.Fatalf("list: no end after 1000 pages of %d", n)
	return nil
}

func (f Fixture) stat(t *testing.T, keys ...blob.Key) []blob.Object {
	t.Helper()
	objects, err := f.Store.Stat(t.Context(), keys)
	if err != nil {
		t.Fatalf("stat: %v", err)
	}
	return objects
}

// delete deletes, and checks that each object is answered for in its place.
func (f Fixture) delete(t *testing.T, seen ...blob.Object) []blob.Deletion {
	t.Helper()
	deletions, err := f.Store.Delete(t.Context(), seen)
	if err != nil {
		t.Fatalf("delete: %v", err)
	}
	if len(deletions) != len(seen) {
		t.Fatalf("delete of %d objects answers for %d", len(seen), len(deletions))
	}
	for i, d := range deletions {
		if d.Key != seen[i].Key {
			t.Fatalf("deletion %d is of key %q, want %q", i, d.Key, seen[i].Key)
		}
	}
	return deletions
}

// wantKeys checks which keys are left, both ways of asking.
func (f Fixture) wantKeys(t *testing.T, want []blob.Key) {
	t.Helper()
	if diff := cmp.Diff(want, keysOf(f.list(t, 10)), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("keys left in the listing (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, keysOf(f.stat(t, f.first(10)...)), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("keys left by stat (-want +got):\n%s", diff)
	}
}

func keysOf(objects []blob.Object) []blob.Key {
	keys := make([]blob.Key, len(objects))
	for i, o := range objects {
		keys[i] = o.Key
	}
	return keys
}
