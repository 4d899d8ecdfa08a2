package agent_test

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// Agents with configurations of their own meet only in the database.
func TestWindowOfAnotherPool(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(4)
	a.exec(`CREATE TABLE other (id text PRIMARY KEY, size integer)`, `INSERT INTO other VALUES ('b2', 1)`)
	mine := poolYAML{liveness: a.refs(), window: "1h"}
	sweep(t, a.pool(mine))
	a.wantWindow("b2", "b3", "b4")

	theirs := mine
	theirs.name, theirs.window = "q", "0s"
	theirs.blobs = "{type: table, table: other, column: id, size: size}"
	_, err := a.pool(theirs).Sweep(t.Context(), agent.SweepOptions{})
	wantMisconfigured(t, err, "belongs to pool p", "public.blobs", "schema of its own")
	a.wantWindow("b2", "b3", "b4")

	// The same name alone doesn't make it the same pool.
	theirs.name = ""
	_, err = a.pool(theirs).Sweep(t.Context(), agent.SweepOptions{})
	wantMisconfigured(t, err, "belongs to pool p", "COMMENT ON TABLE")
	theirs.name = "q"

	theirs.extra = "schema: elsewhere"
	sweep(t, a.pool(theirs))

	// A pool may be renamed, and may change its tiers.
	renamed := mine
	renamed.name = "renamed"
	sweep(t, a.pool(renamed))
	a.wantWindow("b2", "b3", "b4")
}

// Two pools over one table, which their configurations name differently.
func TestTableOfAnotherPool(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.exec(`CREATE TABLE blobs (id text PRIMARY KEY, size integer) PARTITION BY HASH (id)`,
		`CREATE TABLE blobs_0 PARTITION OF blobs FOR VALUES WITH (MODULUS 2, REMAINDER 0)`,
		`CREATE TABLE blobs_1 PARTITION OF blobs FOR VALUES WITH (MODULUS 2, REMAINDER 1)`,
		`CREATE TABLE refs (blob text)`, `INSERT INTO refs VALUES ('b1')`)
	a.fill("blobs", 4)
	whole := poolYAML{liveness: a.refs(), window: "1h"}
	sweep(t, a.pool(whole))
	for name, table := range map[string]string{"the same table": "blobs", "a partition of it": "blobs_0"} {
		second := whole
		second.name, second.extra = "q", "schema: second"
		second.blobs = "{type: table, table: " + table + ", column: id}"
		_, err := a.pool(second).Sweep(t.Context(), agent.SweepOptions{})
		if err == nil {
			t.Fatalf("%s: it was swept", name)
		}
		wantMisconfigured(t, err, "pool p", "gc_agent", "public.blobs")
	}
	// Anybody may write a comment. It counts where its author could collect.
	role, _ := pgtest.Role(t, a.url, "NOSUPERUSER")
	a.exec(`CREATE SCHEMA mallory AUTHORIZATION `+role, `CREATE TABLE mallory.gc_window (x int)`, `ALTER TABLE mallory.gc_window OWNER TO `+role,
		`COMMENT ON TABLE mallory.gc_window IS 'gc-agent pool x: public.blobs'`)
	sweep(t, a.pool(whole))
	both := whole
	both.blobs += "{type: table, table: blobs, column: id}\n      - {type: table, table: blobs_1, column: id}"
	_, err := a.pool(both).Sweep(t.Context(), agent.SweepOptions{})
	wantMisconfigured(t, err, "public.blobs", "public.blobs_1", "share rows")
}

// A staged blob that the application removes leaves the window, so that one that
// is uploaded again under its key waits for a whole window of its own.
func TestUploadedAgain(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		p := a.pool(poolYAML{liveness: a.refs(), window: "1h"})
		sweep(t, p)
		a.exec(`DELETE FROM blobs WHERE id = 'b2'`)
		if rep := sweepWith(t, p, agent.SweepOptions{DryRun: true}); rep.Unstaged != 1 {
			t.Errorf("dry run: %+v", rep)
		}
		if rep := sweep(t, p); rep.Unstaged != 1 {
			t.Errorf("%+v", rep)
		}
		a.wantWindow("b3")
		a.age(time.Hour)
		a.exec(`INSERT INTO blobs (id, size) VALUES ('b2', 1)`)
		if rep := sweep(t, p); rep.Deleted != 1 || rep.CandidatesStaged != 1 {
			t.Errorf("%+v", rep)
		}
		a.wantBlobs("b1", "b2")
	})
}

// A look leaves nothing behind, not even the lock file of a sweep.
func TestPreviewMakesNoLockFile(t *testing.T) {
	t.Parallel()
	a := newSQLiteApp(t)
	a.library(3)
	p := a.pool(poolYAML{liveness: a.refs()})
	lock := strings.TrimPrefix(a.url, "sqlite:") + ".gc-agent.lock"
	sweepWith(t, p, agent.SweepOptions{DryRun: true})
	sweep(t, a.pool(poolYAML{liveness: a.refs(), mode: "observe"}))
	if _, err := os.Lstat(lock); !os.IsNotExist(err) {
		t.Errorf("%s: %v, want none", lock, err)
	}
	sweep(t, p)
	if _, err := os.Lstat(lock); err != nil {
		t.Errorf("a sweep has no lock file: %v", err)
	}
}

// stopping stops the sweep at its first wait.
type stopping struct {
	agent.SystemClock
	stop func()
}

func (c stopping) Sleep(context.Context, time.Duration) error {
	c.stop()
	return nil
}

// The wait for writers ends when the sweep is told to stop.
func TestStopWhileSettling(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	stop := make(chan struct{})
	clock := stopping{stop: sync.OnceFunc(func() { close(stop) })}
	p := a.poolWith(poolYAML{liveness: a.refs(), extra: "limits: {settle_timeout: 1h}"}, agent.Options{Clock: clock})
	sweep(t, p)
	a.session("BEGIN", `INSERT INTO refs VALUES ('b3')`)
	if rep := sweepWith(t, p, agent.SweepOptions{Stop: stop}); rep.Overdue != 0 || !strings.Contains(rep.Detail, "stopped") {
		t.Errorf("%+v, want it stopped", rep)
	}
}

// What the agent makes is in the catalogue, and nothing else is.
func TestSchemaHoldsExactly(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		everything := map[string]string{
			"postgres": `SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
				WHERE c.relkind <> 'i' AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') AND n.nspname NOT LIKE 'pg_t%'
				UNION ALL SELECT 'function ' || p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'gc_agent'`,
			"sqlite": `SELECT name FROM sqlite_schema WHERE type <> 'index'`,
		}[a.engine]
		before := a.column(everything)
		p := a.pool(poolYAML{liveness: a.refs()})
		sweep(t, p)
		sweep(t, p)
		own := map[string][]string{"postgres": {"gc_agent.gc_pins", "gc_agent.gc_window"}, "sqlite": {"gc_window"}}[a.engine]
		wantColumn(t, a, everything, append(before, own...)...)
	})
}

// Tiers whose keys sort differently share a pool.
func TestTiersOfTwoCollations(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	a.exec(`CREATE TABLE more (id text COLLATE "POSIX" PRIMARY KEY, size integer)`, `INSERT INTO more VALUES ('b3', 1), ('b4', 1)`)
	p := a.pool(poolYAML{liveness: a.refs(), blobs: "{type: table, table: blobs, column: id, size: size}\n      - {type: table, table: more, column: id}"})
	if rep := sweepWith(t, p, agent.SweepOptions{DryRun: true}); rep.CandidatesStaged != 3 {
		t.Errorf("dry run: %+v", rep)
	}
	if rep := sweep(t, p); rep.CandidatesStaged != 3 {
		t.Errorf("%+v", rep)
	}
}

// While an index is built, or a table is otherwise kept from being changed, what is
// overdue waits where it is.
func TestTableHeld(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	p := a.pool(poolYAML{liveness: a.refs()})
	sweep(t, p)
	building := a.session("BEGIN", `LOCK TABLE blobs IN SHARE MODE`)
	rep := sweepWith(t, p, agent.SweepOptions{})
	if rep.Overdue != 0 || !strings.Contains(rep.Detail, "public.blobs") || !rep.HeldUp() {
		t.Errorf("%+v, want it held up", rep)
	}
	a.wantWindow("b2", "b3")
	pgtest.Exec(t, building, "COMMIT")
	if rep := sweep(t, p); rep.Deleted != 2 {
		t.Errorf("%+v", rep)
	}
}

// A source that takes longer to read than a batch may, however small the batch is,
// holds the overdue up and nothing else.
func TestSourceTooSlowForABatch(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	a.exec(`CREATE TABLE knob (slow boolean)`, `INSERT INTO knob VALUES (false)`,
		`CREATE FUNCTION slowly() RETURNS SETOF text LANGUAGE plpgsql AS $$ BEGIN
			PERFORM pg_sleep(30) FROM public.knob WHERE slow; RETURN QUERY SELECT blob FROM public.refs; END $$`)
	hook := beforeExecute(t, func() { a.exec(`UPDATE knob SET slow = true`) })
	p := a.pool(poolYAML{
		liveness: []string{`{name: slowly, query: "SELECT public.slowly()", guard: settle}`},
		extra:    hook.extra() + "\n    limits: {statement_timeout: 200ms}",
	})
	sweep(t, p)
	hook.calls.Store(0)
	rep := sweepWith(t, p, agent.SweepOptions{})
	if !rep.HeldUp() || rep.Overdue != 0 || !strings.Contains(rep.Detail, "takes longer") {
		t.Errorf("%+v, want it held up", rep)
	}
	a.wantBlobs("b1", "b2", "b3")
}

// A sweep that finds nothing to do doesn't ask SQLite for the write lock, however
// much is staged: a writer of the application's may have it all the while.
func TestNothingToDoNeedsNoWriteLock(t *testing.T) {
	t.Parallel()
	a := newSQLiteApp(t)
	a.library(4)
	p := a.pool(poolYAML{liveness: a.refs(), window: "1h"})
	sweep(t, p)
	writer, err := a.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := writer.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := writer.ExecContext(t.Context(), "BEGIN IMMEDIATE"); err != nil {
		t.Fatal(err)
	}
	wantCounts(t, sweep(t, p), agent.Report{Scanned: 4, Referenced: 1})
	if _, err := writer.ExecContext(t.Context(), "ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	a.wantWindow("b2", "b3", "b4")
}
