package agent_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
)

// poison makes the application refuse the delete of one blob.
func (a *app) poison(key string) {
	a.t.Helper()
	if a.engine == "postgres" {
		a.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$`,
			`CREATE TRIGGER poison BEFORE DELETE ON blobs FOR EACH ROW WHEN (old.id = '`+key+`') EXECUTE FUNCTION refuse()`)
		return
	}
	a.exec(`CREATE TRIGGER poison BEFORE DELETE ON blobs WHEN old.id = '` + key + `' BEGIN SELECT RAISE(ABORT, 'not this one'); END`)
}

func (a *app) cure() {
	a.t.Helper()
	if a.engine == "postgres" {
		a.exec(`DROP TRIGGER poison ON blobs`)
		return
	}
	a.exec(`DROP TRIGGER poison`)
}

// One poison among 2,000: the others are gone after one sweep, and the culprit is
// named and tried again, ever less often.
func TestOnePoisonStopsNoOther(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(2001)
		a.poison("b1234")
		p := a.pool(poolYAML{liveness: a.refs()})
		sweep(t, p)
		d := decided{}
		rep := sweepWith(t, p, d.options())
		if rep.Deleted != 1999 || rep.CancelledBy.Failed != 1 || rep.Overdue != 2000 || rep.BytesReclaimed != 19990 {
			t.Errorf("%+v", rep)
		}
		if got := d["b1234"]; got.Cause != "failed" || !strings.Contains(got.Detail, "not this one") {
			t.Errorf("b1234 is %+v", got)
		}
		a.wantBlobs("b1", "b1234")
		a.wantBack(rep, "b1234", time.Minute)

		for _, wait := range []time.Duration{2 * time.Minute, 4 * time.Minute, 8 * time.Minute} {
			if rep := sweep(t, p); rep.Overdue != 0 || rep.CandidatesStaged != 0 {
				t.Errorf("before its time: %+v", rep)
			}
			a.age(wait)
			rep := sweep(t, p)
			if rep.CancelledBy.Failed != 1 || rep.Overdue != 1 {
				t.Errorf("%+v", rep)
			}
			a.wantBack(rep, "b1234", wait)
		}

		// Once it can be deleted it is, and its failures are forgotten.
		a.cure()
		a.age(time.Hour)
		if rep := sweep(t, p); rep.Deleted != 1 {
			t.Errorf("once it is let go: %+v", rep)
		}
		a.exec(`INSERT INTO blobs VALUES ('b1234', 10)`)
		a.poison2("b1234")
		sweep(t, p)
		rep = sweep(t, p)
		a.wantBack(rep, "b1234", time.Minute)
	})
}

// poison2 is poison where its function is there already.
func (a *app) poison2(key string) {
	a.t.Helper()
	if a.engine == "postgres" {
		a.exec(`DROP FUNCTION refuse()`)
	}
	a.poison(key)
}

// wantBack wants the key back in the window at the sweep's cutoff and wait.
func (a *app) wantBack(rep agent.Report, key string, wait time.Duration) {
	a.t.Helper()
	got := time.Unix(0, a.deadline(key))
	if got.Before(rep.StartedAt.Add(wait)) || got.After(rep.FinishedAt.Add(wait)) {
		a.t.Errorf("%s is back %s after the sweep began, want %s", key, got.Sub(rep.StartedAt), wait)
	}
}

// Several ways in which an application refuses a delete.
func TestRefusals(t *testing.T) {
	type refusal struct{ engine, sql, why string }
	const function = `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN %s END $$;
		CREATE %s TRIGGER poison %s DELETE ON blobs %s FOR EACH ROW WHEN (old.id = 'b3') EXECUTE FUNCTION refuse()`
	for name, c := range map[string]refusal{
		"postgres: suppressed":     {"postgres", fmt.Sprintf(function, "RETURN NULL;", "", "BEFORE", ""), "no effect"},
		"postgres: after":          {"postgres", fmt.Sprintf(function, "RAISE 'too late';", "", "AFTER", ""), "too late"},
		"postgres: deferred":       {"postgres", fmt.Sprintf(function, "RAISE 'at last';", "CONSTRAINT", "AFTER", "DEFERRABLE INITIALLY DEFERRED"), "at last"},
		"postgres: division":       {"postgres", fmt.Sprintf(function, "PERFORM 1 / (SELECT 0); RETURN old;", "", "BEFORE", ""), "division by zero"},
		"postgres: not its right":  {"postgres", fmt.Sprintf(function, "RAISE insufficient_privilege;", "", "BEFORE", ""), "42501"},
		"postgres: no such table":  {"postgres", fmt.Sprintf(function, "DELETE FROM nowhere; RETURN old;", "", "BEFORE", ""), "nowhere"},
		"sqlite: ignored":          {"sqlite", `CREATE TRIGGER poison BEFORE DELETE ON blobs WHEN old.id = 'b3' BEGIN SELECT RAISE(IGNORE); END`, "no effect"},
		"sqlite: failed":           {"sqlite", `CREATE TRIGGER poison AFTER DELETE ON blobs WHEN old.id = 'b3' BEGIN SELECT RAISE(FAIL, 'too late'); END`, "too late"},
		"sqlite: rolled back":      {"sqlite", `CREATE TRIGGER poison BEFORE DELETE ON blobs WHEN old.id = 'b3' BEGIN SELECT RAISE(ROLLBACK, 'all of it'); END`, "all of it"},
		"sqlite: check constraint": {"sqlite", `CREATE TABLE tally (n CHECK (n > 5)); CREATE TRIGGER poison BEFORE DELETE ON blobs WHEN old.id = 'b3' BEGIN INSERT INTO tally VALUES (1); END`, "CHECK"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			open := map[string]func(testing.TB) *app{"postgres": newPostgresApp, "sqlite": newSQLiteApp}[c.engine]
			a := open(t)
			a.library(5)
			a.exec(c.sql)
			p := a.pool(poolYAML{liveness: a.refs()})
			sweep(t, p)
			d := decided{}
			rep := sweepWith(t, p, d.options())
			if rep.Deleted != 3 || rep.CancelledBy.Failed != 1 || rep.Overdue != 4 {
				t.Errorf("%+v", rep)
			}
			if got := d["b3"]; got.Cause != "failed" || !strings.Contains(got.Detail, c.why) {
				t.Errorf("b3 is %+v, want %q", got, c.why)
			}
			a.wantBlobs("b1", "b3")
			a.wantBack(rep, "b3", time.Minute)
		})
	}
}

// A table that refers to the blobs appears between the look at the catalogue and
// the batch.
func TestForeignKeyMadeDuringSweep(t *testing.T) {
	for name, action := range map[string]string{"plain": "", "cascade": " ON DELETE CASCADE"} {
		t.Run(name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				a.library(4)
				hook := beforeExecute(t, func() {
					a.exec(`CREATE TABLE holders (blob text REFERENCES blobs (id)`+action+`)`, `INSERT INTO holders VALUES ('b3')`)
				})
				p := a.pool(poolYAML{liveness: a.refs(), extra: hook.extra()})
				sweep(t, p)
				hook.calls.Store(0)
				rep := wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed)
				if !strings.Contains(rep.Detail, "foreign key") {
					t.Errorf("detail = %q, want the foreign key named", rep.Detail)
				}
				wantColumn(t, a, `SELECT blob FROM holders`, "b3")
				a.wantBlobs(names(1, 4)...)
				_, err := p.Sweep(t.Context(), agent.SweepOptions{})
				wantMisconfigured(t, err, "holders")
			})
		})
	}
}

// A trigger of the application's that waits for a row which somebody holds costs
// every key its lock_timeout. No transaction waits for more than a few of them.
func TestDeleteThatMeetsALock(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(41)
	a.exec(`CREATE TABLE tally (n integer)`, `INSERT INTO tally VALUES (0)`,
		`CREATE FUNCTION count_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN UPDATE public.tally SET n = n + 1; RETURN old; END $$`,
		`CREATE TRIGGER tally BEFORE DELETE ON blobs FOR EACH ROW EXECUTE FUNCTION count_it()`)
	p := a.pool(poolYAML{liveness: a.refs(), extra: "limits: {lock_timeout: 50ms}"})
	sweep(t, p)
	a.session("BEGIN", `LOCK TABLE tally IN EXCLUSIVE MODE`) // without a transaction id, for settle would wait for it
	rep := sweepWith(t, p, agent.SweepOptions{})
	if rep.Deleted != 0 || rep.Overdue != 40 || rep.Cancelled != 40 {
		t.Errorf("%+v", rep)
	}
	// 40 keys in one transaction would wait for 40 * 50 ms at least.
	if rep.LongestTxMS >= 40*50 {
		t.Errorf("a transaction took %d ms", rep.LongestTxMS)
	}
}

// A delete that runs into statement_timeout counts against its key, not against
// those that wait behind it.
func TestDeleteThatTakesTooLong(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(6)
	a.exec(`CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(30); RETURN old; END $$`,
		`CREATE TRIGGER dawdle BEFORE DELETE ON blobs FOR EACH ROW WHEN (old.id = 'b2') EXECUTE FUNCTION dawdle()`)
	p := a.pool(poolYAML{liveness: a.refs(), extra: "limits: {statement_timeout: 200ms}"})
	sweep(t, p)
	rep, err := p.Sweep(t.Context(), agent.SweepOptions{})
	if err != nil {
		t.Errorf("sweep: %v", err)
	}
	if rep.Deleted != 4 || rep.CancelledBy.Failed != 1 {
		t.Errorf("%+v", rep)
	}
	a.wantBlobs("b1", "b2")
}

// With a canceled context nothing is decided, and it isn't taken for a source
// that can't be read.
func TestCanceled(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		ctx, cancel := context.WithCancel(t.Context())
		o := before(cancel, `"blobs"`)
		p := a.poolWith(poolYAML{liveness: a.refs()}, o.options())
		sweep(t, p)
		o.armed = true
		rep, err := p.Sweep(ctx, agent.SweepOptions{})
		if !o.done || err == nil || rep.Aborted != nil || !errors.Is(err, ctx.Err()) {
			t.Errorf("err = %v, report %+v", err, rep)
		}
		if rep := sweep(t, p); rep.Deleted != 2 {
			t.Errorf("the next sweep: %+v", rep)
		}
	})
}
