package agent_test

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
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
