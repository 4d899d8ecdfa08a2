// Package memory is a tier that holds its blobs' names and sizes in the memory
// of the process. It keeps no bytes and outlives nothing.
package memory

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/alkblobs/gc-agent/blob"
)

// Tier holds blobs in memory. It is safe for concurrent use: each object is
// listed or deleted as a whole, and a call sees every Put that returned before
// it began.
type Tier struct {
	name string
	kind blob.Kind

	mu sync.Mutex
	// objects holds foreign ones too.
	objects map[blob.Key]blob.Object
	// order is the keys of objects, sorted; nil since one was added or removed.
	order []blob.Key
	puts  uint64
}

// New returns an empty tier whose keys are of the given kind. Its name stands in
// errors.
func New(name string, kind blob.Kind) *Tier {
	return &Tier{name: name, kind: kind, objects: map[blob.Key]blob.Object{}}
}

// Name returns the name that the tier was made with.
func (t *Tier) Name() string { return t.name }

// Kind returns the kind of the tier's keys.
func (t *Tier) Kind() blob.Kind { return t.kind }

// Put stores a blob of so many bytes, or replaces the one under the same key.
// Either way it has a version that no blob of this tier ever had. A key that
// isn't of the tier's kind is foreign: List counts it, nothing else knows it.
func (t *Tier) Put(key blob.Key, size int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.puts++
	if _, replaces := t.objects[key]; !replaces {
		t.order = nil
	}
	t.objects[key] = blob.Object{Key: key, Size: size, Version: strconv.FormatUint(t.puts, 10)}
}

// afterKey begins every cursor but the first, so that the place after the empty
// key isn't the beginning.
const afterKey = "after "

// List returns the n objects after a cursor, in key order. A blob that is put or
// deleted between two pages is listed or not; every other one is listed once.
func (t *Tier) List(ctx context.Context, after blob.Cursor, n int) (blob.Page, error) {
	if err := ctx.Err(); err != nil {
		return blob.Page{}, fmt.Errorf("list tier %s: %w", t.name, err)
	}
	if n < 1 {
		return blob.Page{}, fmt.Errorf("list tier %s: a page of %d objects", t.name, n)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.order == nil {
		t.order = slices.Sorted(maps.Keys(t.objects))
	}
	i, err := t.resume(after)
	if err != nil {
		return blob.Page{}, fmt.Errorf("list tier %s: %w", t.name, err)
	}
	var page blob.Page
	for ; i < len(t.order) && len(page.Objects) < n; i++ {
		if t.foreign(t.order[i]) {
			page.Foreign++
		} else {
			page.Objects = append(page.Objects, t.objects[t.order[i]])
		}
	}
	if page.More = i < len(t.order); page.More {
		page.Next = blob.Cursor(afterKey + string(t.order[i-1]))
	}
	return page, nil
}

// Stat returns those of the keys that exist, each once, in key order.
func (t *Tier) Stat(ctx context.Context, keys []blob.Key) ([]blob.Object, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("stat tier %s: %w", t.name, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var found []blob.Object
	for _, key := range slices.Compact(slices.Sorted(slices.Values(keys))) {
		if o, ok := t.objects[key]; ok && !t.foreign(key) {
			found = append(found, o)
		}
	}
	return found, nil
}

// Delete removes each object that is still the version seen, and answers for
// each of them in the order of seen. A foreign key is Failed and stops no other.
// The error is the context's, and comes with what was done before it ended.
func (t *Tier) Delete(ctx context.Context, seen []blob.Object) ([]blob.Deletion, error) {
	done := make([]blob.Deletion, 0, len(seen))
	for _, o := range seen {
		if err := ctx.Err(); err != nil {
			return done, fmt.Errorf("delete from tier %s: %w", t.name, err)
		}
		done = append(done, t.remove(o))
	}
	return done, nil
}

func (t *Tier) remove(seen blob.Object) blob.Deletion {
	d := blob.Deletion{Key: seen.Key}
	if err := t.kind.Valid(seen.Key); err != nil {
		d.Err = fmt.Errorf("delete from tier %s: %w", t.name, err)
		return d
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	o, found := t.objects[seen.Key]
	switch {
	case !found:
		d.Outcome = blob.Vanished
	case o.Version != seen.Version:
		d.Outcome = blob.Changed
	default:
		d.Outcome, d.Size = blob.Deleted, o.Size
		delete(t.objects, seen.Key)
		t.order = nil
	}
	return d
}

// resume returns the index of the first key after a cursor.
func (t *Tier) resume(after blob.Cursor) (int, error) {
	if after == "" {
		return 0, nil
	}
	key, ok := strings.CutPrefix(string(after), afterKey)
	if !ok {
		return 0, fmt.Errorf("cursor %q isn't one of this tier's", blob.Shorten(string(after)))
	}
	i, found := slices.BinarySearch(t.order, blob.Key(key))
	if found {
		i++
	}
	return i, nil
}

func (t *Tier) foreign(key blob.Key) bool { return t.kind.Valid(key) != nil }
