package agent_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
)

// At window zero one sweep stages N and the next one executes exactly N.
func TestNothingStagedIsExecutedBySameSweep(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(5)
		p := a.pool(poolYAML{liveness: a.refs(), extra: "limits: {batch: 2, page: 2}"})
		rep := sweep(t, p)
		wantCounts(t, rep, agent.Report{Scanned: 5, Referenced: 1, CandidatesStaged: 4})
		a.wantWindow(names(2, 5)...)

		a.exec(`INSERT INTO blobs VALUES ('b6', 7)`)
		d := decided{}
		rep = sweepWith(t, p, d.options())
		wantCounts(t, rep, agent.Report{Scanned: 6, Referenced: 1, CandidatesStaged: 1, Overdue: 4, Deleted: 4, BytesReclaimed: 40})
		d.want(t, map[string][]string{"deleted": names(2, 5)})
		a.wantBlobs("b1", "b6")
		a.wantWindow("b6")

		rep = sweep(t, p)
		wantCounts(t, rep, agent.Report{Scanned: 2, Referenced: 1, Overdue: 1, Deleted: 1, BytesReclaimed: 7})
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 1, Referenced: 1})
	})
}

// wantCounts compares the counts of a report, and nothing else of it.
func wantCounts(t testing.TB, got, want agent.Report) {
	t.Helper()
	if diff := cmp.Diff(counts(want), counts(got)); diff != "" {
		t.Errorf("report -want +got:\n%s\n%s", diff, got.Detail)
	}
}

func counts(r agent.Report) agent.Report {
	return agent.Report{
		Scanned: r.Scanned, Referenced: r.Referenced, Foreign: r.Foreign,
		CandidatesStaged: r.CandidatesStaged, Unstaged: r.Unstaged,
		Overdue: r.Overdue, Deleted: r.Deleted, Cancelled: r.Cancelled, CancelledBy: r.CancelledBy,
		BytesReclaimed: r.BytesReclaimed,
	}
}

func TestSweepingOftenPostponesNothing(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		p := a.pool(poolYAML{liveness: a.refs(), window: "1h"})
		sweep(t, p)
		was := a.rows(`SELECT * FROM ` + a.windowTable())
		for range 3 {
			wantCounts(t, sweep(t, p), agent.Report{Scanned: 3, Referenced: 1})
		}
		if diff := cmp.Diff(was, a.rows(`SELECT * FROM `+a.windowTable())); diff != "" {
			t.Errorf("the window has changed -was +is:\n%s", diff)
		}
		a.age(time.Hour)
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 3, Referenced: 1, Overdue: 2, Deleted: 2, BytesReclaimed: 20})
	})
}

// A window of 3 s and a sweep every second, on real clocks: a dead blob is gone
// within 5 s and not before 3 s.
func TestStarvation(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(2)
		p := a.pool(poolYAML{liveness: a.refs(), window: "3s"})
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for began := time.Now(); ; <-tick.C {
			rep := sweep(t, p)
			after := time.Since(began)
			switch {
			case rep.Deleted > 0 && after < 3*time.Second:
				t.Fatalf("deleted after %s, within the window", after)
			case rep.Deleted > 0:
				t.Logf("deleted after %s", after)
				return
			case after > 5*time.Second:
				t.Fatalf("still there after %s", after)
			}
		}
	})
}

func TestReferencedAgainDuringWindow(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		p := a.pool(poolYAML{liveness: a.refs(), window: "1h"})
		sweep(t, p)
		first, other := a.deadline("b2"), a.deadline("b3")

		a.exec(`INSERT INTO refs VALUES ('b2')`)
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 3, Referenced: 2, Unstaged: 1})
		a.wantWindow("b3")

		// It is dead again: its window begins anew.
		a.exec(`DELETE FROM refs WHERE blob = 'b2'`)
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 3, Referenced: 1, CandidatesStaged: 1})
		if again := a.deadline("b2"); again <= first {
			t.Errorf("staged again at %d, no later than at first, %d", again, first)
		}
		if d := a.deadline("b3"); d != other {
			t.Errorf("the deadline of b3 went from %d to %d", other, d)
		}

		// Seen alive and dead again by no sweep: nobody knows, and it stays.
		a.exec(`INSERT INTO refs VALUES ('b3')`, `DELETE FROM refs WHERE blob = 'b3'`)
		sweep(t, p)
		a.age(time.Hour)
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 3, Referenced: 1, Overdue: 2, Deleted: 2, BytesReclaimed: 20})
	})
}

// What is due is executed, not unstaged, so that the counts of the executed set
// are exact.
func TestReferencedAgainWhenDue(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(4)
		p := a.pool(poolYAML{liveness: a.refs()})
		sweep(t, p)
		a.exec(`INSERT INTO refs VALUES ('b2')`, `DELETE FROM blobs WHERE id = 'b3'`)
		d := decided{}
		rep := sweepWith(t, p, d.options())
		wantCounts(t, rep, agent.Report{
			Scanned: 3, Referenced: 2, Overdue: 3, Deleted: 1, BytesReclaimed: 10, Cancelled: 2,
			CancelledBy: agent.CancelledBy{Live: 1, Vanished: 1},
		})
		d.want(t, map[string][]string{"live": {"b2"}, "vanished": {"b3"}, "deleted": {"b4"}})
		if got := d["b2"].Detail; got != "source refs" {
			t.Errorf("b2 is kept by %q", got)
		}
		a.wantWindow()
	})
}

func TestPinned(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(4)
	p := a.pool(poolYAML{liveness: a.refs()})
	if err := p.EnsureSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	pin := func(key, owner string, expiry int64) {
		a.exec(fmt.Sprintf(`INSERT INTO gc_agent.gc_pins VALUES (%s, '%s', %d)`, a.literal(key), owner, expiry))
	}
	const far = 4_000_000_000_000_000_000
	pin("b2", "one", far-1)
	wantCounts(t, sweep(t, p), agent.Report{Scanned: 4, Referenced: 1, CandidatesStaged: 2})
	a.wantWindow("b3", "b4")

	pin("b3", "one", far-1)
	pin("b3", "two", far)
	pin("b3", "three", 1)
	pin("b4", "one", 1) // expired
	d := decided{}
	rep := sweepWith(t, p, d.options())
	wantCounts(t, rep, agent.Report{
		Scanned: 4, Referenced: 1, Overdue: 2, Deleted: 1, BytesReclaimed: 10, Cancelled: 1, CancelledBy: agent.CancelledBy{Pinned: 1},
	})
	a.wantBlobs("b1", "b2", "b3")
	if got := a.deadline("b3"); got != far {
		t.Errorf("back at %d, want the last expiry, %d", got, int64(far))
	}

	// Its pins expire, and so does its second wait. A reference beats a pin.
	a.exec(`UPDATE gc_agent.gc_pins SET expiry = 1`)
	a.age(time.Duration(far))
	wantCounts(t, sweep(t, p), agent.Report{Scanned: 3, Referenced: 1, CandidatesStaged: 1, Overdue: 1, Deleted: 1, BytesReclaimed: 10})
	a.wantBlobs("b1", "b2")
	a.exec(`UPDATE gc_agent.gc_pins SET expiry = `+fmt.Sprint(int64(far)), `INSERT INTO refs VALUES ('b2')`)
	if rep := sweep(t, p); rep.CancelledBy.Live != 1 {
		t.Errorf("referred to and pinned: %+v", rep.CancelledBy)
	}
}

// A row that somebody else has locked isn't waited for: its key is back at the
// cutoff and a nanosecond, and everything else goes.
func TestLocked(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ setup, hold string }{
		"blob":      {hold: `SELECT 1 FROM blobs WHERE id = 'b2' FOR UPDATE`},
		"reference": {hold: `INSERT INTO refs VALUES ('b2')`}, // FOR KEY SHARE, by the foreign key
		"update":    {hold: `UPDATE blobs SET size = 11 WHERE id = 'b2'`},
		"pin": {
			setup: `INSERT INTO gc_agent.gc_pins VALUES ('b2', 'one', 1)`,
			hold:  `UPDATE gc_agent.gc_pins SET expiry = 4000000000000000000`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			a.linkedLibrary(4)
			var cutoff int64
			p := a.poolWith(poolYAML{liveness: linkedRefs()}, agent.Options{
				PostgresTracer: postgresHook(func(_ *pgx.Conn, data pgx.TraceQueryStartData) {
					if len(data.Args) == 2 && containsAll(data.SQL, "visible_after <= $1", "DELETE FROM") {
						cutoff, _ = data.Args[0].(int64)
					}
				}),
			})
			sweep(t, p)
			if c.setup != "" {
				a.exec(c.setup)
			}
			holder := a.session("BEGIN", c.hold)
			d := decided{}
			rep := sweepWith(t, p, d.options())
			if rep.Deleted != 2 || rep.CancelledBy.Locked != 1 || rep.Overdue != 3 || d["b2"].Cause != "locked" {
				t.Fatalf("%+v, b2 is %+v", rep, d["b2"])
			}
			if got := a.deadline("b2"); got != cutoff+1 {
				t.Errorf("back at %d, want %d", got, cutoff+1)
			}
			if _, err := holder.Exec(t.Context(), "ROLLBACK"); err != nil {
				t.Fatal(err)
			}
			if rep := sweep(t, p); rep.Deleted != 1 {
				t.Errorf("once nobody holds it: %+v", rep)
			}
			a.wantBlobs("b1")
		})
	}
}

// A batch is bounded in keys and in bytes, and holds at least one key.
func TestBatchLimits(t *testing.T) {
	for name, c := range map[string]struct {
		limits string
		want   []int64
	}{
		"keys":                {"batch: 3", []int64{3, 6, 8}},
		"one":                 {"batch: 1", []int64{1, 2, 3, 4, 5, 6, 7, 8}},
		"bytes":               {"batch: 5, batch_bytes: 25", []int64{2, 4, 6, 8}},
		"bytes exactly":       {"batch: 5, batch_bytes: 30", []int64{3, 6, 8}},
		"fewer than one blob": {"batch_bytes: 9", []int64{1, 2, 3, 4, 5, 6, 7, 8}},
	} {
		t.Run(name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				a.library(9)
				// A clock that stands still leaves the pace alone.
				p := a.poolWith(poolYAML{liveness: a.refs(), extra: "limits: {" + c.limits + "}"}, agent.Options{Clock: newStepClock()})
				p.IgnoreClockJumps() // the real one goes on while this one stands still
				sweep(t, p)
				var done []int64
				rep := sweepWith(t, p, agent.SweepOptions{Progress: func(g agent.Progress) {
					if g.Phase == "execute" {
						done = append(done, g.Done)
					}
				}})
				if rep.Deleted != 8 || rep.Overdue != 8 {
					t.Errorf("%+v", rep)
				}
				if diff := cmp.Diff(c.want, done); diff != "" {
					t.Errorf("batches -want +got:\n%s", diff)
				}
				a.wantBlobs("b1")
				a.wantWindow()
			})
		})
	}
}

// Somebody else writes into the window: what can't be a key of the pool stops
// the sweep, due or not, and is named.
func TestWindowRowThatIsNoKey(t *testing.T) {
	for name, deadline := range map[string]int64{"due": 1, "waiting": 4_000_000_000_000_000_000} {
		t.Run(name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				a.exec(`CREATE TABLE blobs (id integer PRIMARY KEY NOT NULL, size integer)`, `CREATE TABLE refs (blob integer)`,
					`INSERT INTO blobs VALUES (1, 1), (2, 1)`, `INSERT INTO refs VALUES (1)`)
				p := a.pool(poolYAML{liveness: a.refs()})
				sweep(t, p)
				a.exec(fmt.Sprintf(`INSERT INTO %s VALUES (%s, %d)`, a.windowTable(), a.literal("7up"), deadline))
				a.unchanged(func() { _, _ = sweepError(t, p, "7up", "window drop") })
				if n, err := p.DropKeys(t.Context(), keys("7up")); n != 1 || err != nil {
					t.Fatalf("drop it: %d, %v", n, err)
				}
				if rep := sweep(t, p); rep.Deleted != 1 {
					t.Errorf("%+v", rep)
				}
			})
		})
	}
}

// A stop ends the sweep after the batch at hand. What was done is reported, what
// is left waits for the next sweep.
func TestStopBetweenBatches(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(6)
		p := a.pool(poolYAML{liveness: a.refs(), extra: "limits: {batch: 2}"})
		sweep(t, p)
		stop := make(chan struct{})
		rep := sweepWith(t, p, agent.SweepOptions{Stop: stop, Progress: func(g agent.Progress) {
			if g.Phase == "execute" && g.Done == 2 {
				close(stop)
			}
		}})
		if rep.Aborted != nil || rep.Deleted != 2 || rep.Detail == "" {
			t.Errorf("%+v", rep)
		}
		if n := len(a.window()); n != 3 {
			t.Errorf("%d keys wait, want 3", n)
		}
		if rep := sweep(t, p); rep.Deleted != 3 {
			t.Errorf("the next sweep: %+v", rep)
		}
	})
}

// What is too long to be a key is counted and never touched.
func TestForeignKeysAreKept(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(2)
		a.exec(`CREATE TABLE long (id text PRIMARY KEY NOT NULL, size integer)`)
		for _, n := range []int{1500, 1501} {
			if _, err := a.db.ExecContext(t.Context(), `INSERT INTO long VALUES ($1, 1)`, fmt.Sprintf("%0*d", n, 0)); err != nil {
				t.Fatal(err)
			}
		}
		p := a.pool(poolYAML{liveness: a.refs(), blobs: "{type: table, table: blobs, column: id, size: size}\n      - {type: table, table: long, column: id, size: size}"})
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 4, Referenced: 1, Foreign: 1, CandidatesStaged: 2})
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 4, Referenced: 1, Foreign: 1, Overdue: 2, Deleted: 2, BytesReclaimed: 11})
		if n := a.number(`SELECT length(id) FROM long`); n != 1501 {
			t.Errorf("a key of %d bytes is left", n)
		}
	})
}
