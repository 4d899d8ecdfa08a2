// Package windowtest is what every engine of the delete window has to pass.
package windowtest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/window"
)

// Engine is everything that a window can do.
type Engine interface {
	EnsureSchema(ctx context.Context) error
	Stage(ctx context.Context, rows []window.Row) error
	StageKeepFirst(ctx context.Context, rows []window.Row) (int, error)
	Take(ctx context.Context, now blob.Instant, limit int) ([]window.Row, error)
	Peek(ctx context.Context, now blob.Instant, limit int) ([]window.Row, error)
	List(ctx context.Context, from blob.Key, limit int) ([]window.Row, error)
	Unstage(ctx context.Context, keys []blob.Key) (int, error)
	Count(ctx context.Context) (int64, error)
}

// Target is one place, new and without a schema, for one window.
type Target struct {
	// Open returns an engine on a connection of its own.
	Open func(t *testing.T) Engine
	// Database is nil where there is no database, and so no schema.
	Database *Database
	// Steps is the longest run of the state machine.
	Steps int
}

// Database is what a target has beyond its engines where it is a database.
type Database struct {
	// InTx runs fn with an engine in a transaction, which commits.
	InTx func(t *testing.T, fn func(Engine))
	// Relations reads the names of the schema's relations from the catalogue.
	Relations func(t *testing.T) []string
	// WantRelations are the table and its indexes, sorted.
	WantRelations []string
	// NoTable says whether err is the database's own for a table that isn't there.
	NoTable func(err error) bool
}

// Run runs the suite, each test on a target of its own.
func Run(t *testing.T, newTarget func(t *testing.T) Target) {
	for name, test := range map[string]func(*testing.T, Target){
		"StageUpdates":       testStageUpdates,
		"StageRepeated":      testStageRepeated,
		"StageKeepFirst":     testStageKeepFirst,
		"StageLongKey":       testStageLongKey,
		"TakeExactSet":       testTakeExactSet,
		"TakeBoundary":       testTakeBoundary,
		"TakeLimit":          testTakeLimit,
		"TwoTakers":          testTwoTakers,
		"Instants":           testInstants,
		"Keys":               testKeys,
		"ListPages":          testListPages,
		"Unstage":            testUnstage,
		"Cancelled":          testCancelled,
		"EnsureSchemaTwice":  testEnsureSchemaTwice,
		"StateMachine":       testStateMachine,
		"VirginReads":        needsDatabase(testVirginReads),
		"VirginWrites":       needsDatabase(testVirginWrites),
		"VirginTransaction":  needsDatabase(testVirginTransaction),
		"SchemaHoldsExactly": needsDatabase(testSchemaHoldsExactly),
		"EnsureSchemaRaced":  needsDatabase(testEnsureSchemaRaced),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newTarget(t))
		})
	}
}

func needsDatabase(test func(*testing.T, Target)) func(*testing.T, Target) {
	return func(t *testing.T, target Target) {
		if target.Database == nil {
			t.Skip("a window without a schema")
		}
		test(t, target)
	}
}

// open returns an engine whose schema is there.
func open(t *testing.T, target Target) Engine {
	t.Helper()
	e := target.Open(t)
	check(t, e.EnsureSchema(t.Context()))
	return e
}

func testStageUpdates(t *testing.T, target Target) {
	e := open(t, target)
	check(t, e.Stage(t.Context(), rows("a", 10, "b", 20)))
	check(t, e.Stage(t.Context(), rows("a", 10, "b", 20)))
	wantAll(t, e, rows("a", 10, "b", 20))
	check(t, e.Stage(t.Context(), rows("b", 5, "c", 30)))
	check(t, e.Stage(t.Context(), rows("a", 11)))
	wantAll(t, e, rows("a", 11, "b", 5, "c", 30))
	check(t, e.Stage(t.Context(), nil))
	wantAll(t, e, rows("a", 11, "b", 5, "c", 30))
}

func testStageRepeated(t *testing.T, target Target) {
	e := open(t, target)
	given := rows("b", 1, "a", 3, "b", 2, "a", 2)
	check(t, e.Stage(t.Context(), given))
	wantAll(t, e, rows("a", 2, "b", 2))
	want(t, given, rows("b", 1, "a", 3, "b", 2, "a", 2)) // the caller's rows stay his
}

func testStageKeepFirst(t *testing.T, target Target) {
	e := open(t, target)
	for _, step := range []struct {
		stage  []window.Row
		staged int
		all    []window.Row
	}{
		{rows("b", 10), 1, rows("b", 10)},
		{rows("c", 30, "b", 99, "a", 20), 2, rows("a", 20, "b", 10, "c", 30)},
		{rows("a", 1, "b", 1, "c", 1), 0, rows("a", 20, "b", 10, "c", 30)},
		{rows("d", 7, "d", 8), 1, rows("a", 20, "b", 10, "c", 30, "d", 7)},
		{nil, 0, rows("a", 20, "b", 10, "c", 30, "d", 7)},
	} {
		staged, err := e.StageKeepFirst(t.Context(), step.stage)
		check(t, err)
		want(t, staged, step.staged)
		wantAll(t, e, step.all)
	}
}

// A key that no btree could hold stages nothing, on any engine.
func testStageLongKey(t *testing.T, target Target) {
	e := open(t, target)
	tooLong := window.Row{Key: blob.Key(strings.Repeat("k", blob.MaxKeyLen+1))}
	if err := e.Stage(t.Context(), append(rows("a", 1), tooLong)); err == nil {
		t.Error("Stage took a key that is too long")
	}
	if _, err := e.StageKeepFirst(t.Context(), append(rows("a", 1), tooLong)); err == nil {
		t.Error("StageKeepFirst took a key that is too long")
	}
	wantAll(t, e, nil)
}

// Peek returns what Take does, and the rows that aren't due stay.
func testTakeExactSet(t *testing.T, target Target) {
	e := open(t, target)
	check(t, e.Stage(t.Context(), rows("d", 5, "a", 9, "c", 10, "b", 11, "e", -3)))
	for _, limit := range []int{0, -1} {
		due, err := e.Peek(t.Context(), 10, limit)
		check(t, err)
		want(t, due, rows("a", 9, "c", 10, "d", 5, "e", -3))
	}
	wantTaken(t, e, 10, 0, rows("a", 9, "c", 10, "d", 5, "e", -3))
	wantTaken(t, e, 10, 0, nil)
	wantAll(t, e, rows("b", 11))
	wantTaken(t, e, 11, -1, rows("b", 11))
	wantAll(t, e, nil)
}

func testTakeBoundary(t *testing.T, target Target) {
	e := open(t, target)
	const now = blob.Instant(1_700_000_000_123_456_789)
	check(t, e.Stage(t.Context(), rows("before", now-1, "equal", now, "later", now+1)))
	wantTaken(t, e, now, 0, rows("before", now-1, "equal", now))
	wantTaken(t, e, now, 0, nil)
	wantTaken(t, e, now+1, 0, rows("later", now+1))
}

// A batch is the oldest deadlines, ties by key, and comes in key order.
func testTakeLimit(t *testing.T, target Target) {
	e := open(t, target)
	check(t, e.Stage(t.Context(), rows("a", 30, "z", 10, "m", 20, "k", 20, "y", 20, "b", 99)))
	for _, batch := range [][]window.Row{
		rows("k", 20, "z", 10),
		rows("m", 20, "y", 20),
		rows("a", 30),
		nil,
	} {
		due, err := e.Peek(t.Context(), 50, 2)
		check(t, err)
		want(t, due, batch)
		wantTaken(t, e, 50, 2, batch)
	}
	wantAll(t, e, rows("b", 99))
}

// Two takers on two connections share the overdue rows out: none comes twice and
// none is left. Each stops at its first batch that isn't full, which therefore
// means that nothing overdue is left.
func testTwoTakers(t *testing.T, target Target) {
	const rounds, keys, batch = 40, 23, 3
	e := open(t, target)
	takers := []Engine{target.Open(t), target.Open(t)}
	for range rounds {
		var staged []window.Row
		for i := range keys {
			staged = append(staged, window.Row{Key: blob.Key(fmt.Sprint(i)), VisibleAfter: blob.Instant(i * 7 % 10)})
		}
		check(t, e.Stage(t.Context(), staged))
		taken := make([][]window.Row, len(takers))
		together(t, len(takers), func(i int) error {
			for {
				rows, err := takers[i].Take(t.Context(), 10, batch)
				taken[i] = append(taken[i], rows...)
				if err != nil || len(rows) < batch {
					return err
				}
			}
		})
		want(t, sorted(slices.Concat(taken...)), sorted(staged))
		wantAll(t, e, nil)
	}
}

func testInstants(t *testing.T, target Target) {
	e := open(t, target)
	all := rows("a", blob.MinInstant, "b", blob.MinInstant+1, "c", -1, "d", 0, "e", 1, "f", blob.MaxInstant-1, "g", blob.MaxInstant)
	check(t, e.Stage(t.Context(), all))
	wantAll(t, e, all)
	for _, row := range all {
		wantTaken(t, e, row.VisibleAfter, 0, []window.Row{row})
	}
	before1970, err := blob.InstantOf(time.Date(1969, 7, 20, 20, 17, 40, 123456789, time.UTC))
	check(t, err)
	staged, err := e.StageKeepFirst(t.Context(), rows("moon", before1970))
	check(t, err)
	want(t, staged, 1)
	wantTaken(t, e, before1970-1, 0, nil)
	wantTaken(t, e, before1970, 0, rows("moon", before1970))
}

// Keys are bytes: empty, with every value, in the order of bytes, up to the
// longest.
func testKeys(t *testing.T, target Target) {
	e := open(t, target)
	keys := []blob.Key{"", "\x00", "\x00\x00", "a", "a\x00", "A", "é", "\xff\xff", "'; --", `\x61`, "{}", ",", `"`}
	for b := range 256 {
		keys = append(keys, blob.Key([]byte{byte(b), 'x'}))
	}
	var every []byte
	for b := range blob.MaxKeyLen {
		every = append(every, byte(b*7))
	}
	keys = append(keys, blob.Key(every), blob.Key(strings.Repeat("\xff", blob.MaxKeyLen)))
	var all []window.Row
	for i, key := range keys {
		all = append(all, window.Row{Key: key, VisibleAfter: blob.Instant(i)})
	}
	check(t, e.Stage(t.Context(), all))
	wantAll(t, e, sorted(all))
	removed, err := e.Unstage(t.Context(), keys)
	check(t, err)
	want(t, removed, len(keys))
	staged, err := e.StageKeepFirst(t.Context(), all)
	check(t, err)
	want(t, staged, len(all))
	wantTaken(t, e, blob.MaxInstant, 0, sorted(all))
}

// Pages follow each other whatever their size, also after the empty key.
func testListPages(t *testing.T, target Target) {
	e := open(t, target)
	all := rows("", 5, "\x00", 4, "\x00\x00", 9, "a", 1, "a\x00", 3, "a\x00\x00", 2, "b", 7)
	check(t, e.Stage(t.Context(), all))
	for n := 1; n <= len(all)+1; n++ {
		var listed []window.Row
		from := blob.Key("")
		for {
			page, err := e.List(t.Context(), from, n)
			check(t, err)
			listed = append(listed, page...)
			if len(page) < n {
				break
			}
			from = window.After(page[n-1].Key)
		}
		want(t, listed, all)
	}
	page, err := e.List(t.Context(), "a", 0)
	check(t, err)
	want(t, page, all[3:])
	page, err = e.List(t.Context(), "c", -1)
	check(t, err)
	want(t, page, nil)
}

func testUnstage(t *testing.T, target Target) {
	e := open(t, target)
	check(t, e.Stage(t.Context(), rows("a", 1, "b", 2, "c", 3)))
	for _, step := range []struct {
		keys    []blob.Key
		removed int
		left    []window.Row
	}{
		{nil, 0, rows("a", 1, "b", 2, "c", 3)},
		{[]blob.Key{"x", "", "aa"}, 0, rows("a", 1, "b", 2, "c", 3)},
		{[]blob.Key{"c", "x", "a", "c"}, 2, rows("b", 2)},
		{[]blob.Key{"c", "b"}, 1, nil},
		{[]blob.Key{"b"}, 0, nil},
	} {
		removed, err := e.Unstage(t.Context(), step.keys)
		check(t, err)
		want(t, removed, step.removed)
		wantAll(t, e, step.left)
	}
}

// A call whose time is over does nothing.
func testCancelled(t *testing.T, target Target) {
	e := open(t, target)
	check(t, e.Stage(t.Context(), rows("a", 1)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	late := target.Open(t)
	_, takeErr := late.Take(ctx, 5, 0)
	_, countErr := late.Count(ctx)
	for _, err := range []error{takeErr, countErr, late.Stage(ctx, rows("b", 1))} {
		if err == nil {
			t.Error("a call with an ended context succeeded")
		}
	}
	wantAll(t, e, rows("a", 1))
}

func testEnsureSchemaTwice(t *testing.T, target Target) {
	e := open(t, target)
	check(t, e.Stage(t.Context(), rows("a", 1, "b", 2)))
	check(t, e.EnsureSchema(t.Context()))
	check(t, target.Open(t).EnsureSchema(t.Context()))
	wantAll(t, e, rows("a", 1, "b", 2))
}

// Reads of a database where nobody has made the schema find an empty window.
func testVirginReads(t *testing.T, target Target) {
	wantEmpty(t, target.Open(t))
	want(t, target.Database.Relations(t), nil)
}

// Writes there fail, and make nothing.
func testVirginWrites(t *testing.T, target Target) {
	e := target.Open(t)
	if err := e.Stage(t.Context(), rows("a", 1)); !target.Database.NoTable(err) {
		t.Errorf("Stage: got error %v, want the database's", err)
	}
	staged, err := e.StageKeepFirst(t.Context(), rows("a", 1))
	if !target.Database.NoTable(err) {
		t.Errorf("StageKeepFirst: got error %v, want the database's", err)
	}
	want(t, staged, 0)
	want(t, target.Database.Relations(t), nil)
}

// Finding no table must not spoil the transaction that the window is asked in.
func testVirginTransaction(t *testing.T, target Target) {
	target.Database.InTx(t, func(e Engine) {
		wantEmpty(t, e)
		check(t, e.EnsureSchema(t.Context()))
		check(t, e.Stage(t.Context(), rows("a", 1, "b", 9)))
		check(t, e.EnsureSchema(t.Context()))
		wantTaken(t, e, 5, 0, rows("a", 1))
	})
	wantAll(t, target.Open(t), rows("b", 9))
}

func testSchemaHoldsExactly(t *testing.T, target Target) {
	open(t, target)
	want(t, target.Database.Relations(t), target.Database.WantRelations)
}

func testEnsureSchemaRaced(t *testing.T, target Target) {
	engines := make([]Engine, 8)
	for i := range engines {
		engines[i] = target.Open(t)
	}
	together(t, len(engines), func(i int) error { return engines[i].EnsureSchema(t.Context()) })
	want(t, target.Database.Relations(t), target.Database.WantRelations)
	for i, e := range engines {
		check(t, e.Stage(t.Context(), rows("a", blob.Instant(i))))
	}
	wantAll(t, engines[0], rows("a", 7))
}

// together runs fn n times, all from the same moment.
func together(t *testing.T, n int, fn func(i int) error) {
	t.Helper()
	var wg sync.WaitGroup
	start := make(chan struct{})
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() {
			<-start
			errs[i] = fn(i)
		})
	}
	close(start)
	wg.Wait()
	for _, err := range errs {
		check(t, err)
	}
}

// rows makes rows of alternating keys and deadlines.
func rows(pairs ...any) []window.Row {
	var out []window.Row
	for pair := range slices.Chunk(pairs, 2) {
		row := window.Row{Key: blob.Key(pair[0].(string))}
		switch at := pair[1].(type) {
		case int:
			row.VisibleAfter = blob.Instant(at)
		case blob.Instant:
			row.VisibleAfter = at
		default:
			panic(fmt.Sprintf("deadline of type %T", at))
		}
		out = append(out, row)
	}
	return out
}

func sorted(rows []window.Row) []window.Row {
	return slices.SortedFunc(slices.Values(rows), func(a, b window.Row) int {
		return strings.Compare(string(a.Key), string(b.Key))
	})
}

func wantTaken(t *testing.T, e Engine, now blob.Instant, limit int, rows []window.Row) {
	t.Helper()
	taken, err := e.Take(t.Context(), now, limit)
	check(t, err)
	want(t, taken, rows)
}

// wantAll compares with everything that the window holds.
func wantAll(t *testing.T, e Engine, rows []window.Row) {
	t.Helper()
	all, err := e.List(t.Context(), "", 0)
	check(t, err)
	want(t, all, rows)
	n, err := e.Count(t.Context())
	check(t, err)
	want(t, n, int64(len(rows)))
}

// wantEmpty asks in every way there is.
func wantEmpty(t *testing.T, e Engine) {
	t.Helper()
	wantAll(t, e, nil)
	wantTaken(t, e, blob.MaxInstant, 0, nil)
	wantTaken(t, e, blob.MaxInstant, 5, nil)
	due, err := e.Peek(t.Context(), blob.MaxInstant, 0)
	check(t, err)
	want(t, due, nil)
	removed, err := e.Unstage(t.Context(), []blob.Key{"a"})
	check(t, err)
	want(t, removed, 0)
}

func want[T any](t *testing.T, got, want T) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
