package agent_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
)

// due makes a library of which all but b1 is due, and b5 dead and not staged.
func (a *app) due(p poolYAML) {
	a.t.Helper()
	a.library(4)
	sweep(a.t, a.pool(p))
	a.exec(`INSERT INTO blobs VALUES ('b5', 10)`)
}

func TestNoLivenessSources(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.due(poolYAML{liveness: a.refs()})
		p := a.pool(poolYAML{})
		a.unchanged(func() { wantAbort(t, p, agent.SweepOptions{}, agent.CauseNoLivenessSources) })
		a.unchanged(func() { wantAbort(t, p, agent.SweepOptions{DryRun: true}, agent.CauseNoLivenessSources) })
	})
}

// Without a source nobody makes a schema either.
func TestAbortMakesNoSchema(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(4)
		hook := newProtector(t)
		hook.reply = func(_ int64, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusConflict) }
		a.unchanged(func() {
			wantAbort(t, a.pool(poolYAML{}), agent.SweepOptions{}, agent.CauseNoLivenessSources)
			wantAbort(t, a.pool(poolYAML{liveness: a.refs(), extra: hook.extra()}), agent.SweepOptions{}, agent.CauseProtectFailed)
		})
	})
}

// Another agent on another connection, in this process or another, has the lease.
func TestSweeperLock(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		cfg := poolYAML{liveness: a.refs()}
		a.due(cfg)
		one, two := a.pool(cfg), a.pool(cfg)
		tried := false
		rep := sweepWith(t, one, agent.SweepOptions{Progress: func(g agent.Progress) {
			if g.Phase != "mark" || tried {
				return
			}
			tried = true
			a.unchanged(func() {
				wantAbort(t, two, agent.SweepOptions{}, agent.CauseSweeperLock)
				wantAbort(t, two, agent.SweepOptions{DryRun: true}, agent.CauseSweeperLock)
				if rep, err := two.Sweep(t.Context(), agent.SweepOptions{}); err != nil || !strings.Contains(rep.Detail, ": pid ") {
					t.Errorf("who has the lease isn't said: %q, %v", rep.Detail, err)
				}
				wantAbort(t, one, agent.SweepOptions{}, agent.CauseSweeperLock)
			})
		}})
		if !tried || rep.Deleted != 3 {
			t.Errorf("%+v", rep)
		}
		if rep := sweep(t, two); rep.Deleted != 1 {
			t.Errorf("once the lease is free: %+v", rep)
		}
	})
}

// Whatever the hook says but yes, nothing is changed: at the beginning, and when
// it is asked again before the first batch.
func TestProtectHook(t *testing.T) {
	type reply func(w http.ResponseWriter, r *http.Request)
	status := func(code int) reply { return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) } }
	for name, no := range map[string]reply{
		"error":     status(http.StatusInternalServerError),
		"forbidden": status(http.StatusForbidden),
		"unchanged": status(http.StatusNotModified),
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/yes" {
				return
			}
			http.Redirect(w, r, "/yes", http.StatusFound)
		},
		"cut": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		for _, at := range []int64{1, 2} {
			t.Run(fmt.Sprintf("%s at call %d", name, at), func(t *testing.T) {
				eachEngine(t, func(t *testing.T, a *app) {
					a.due(poolYAML{liveness: a.refs()})
					hook := newProtector(t)
					hook.reply = func(call int64, w http.ResponseWriter, r *http.Request) {
						if call == at {
							no(w, r)
						}
					}
					p := a.pool(poolYAML{liveness: a.refs(), extra: hook.extra()})
					a.unchanged(func() { wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed) })
					if n := hook.calls.Load(); n != at {
						t.Errorf("the hook was asked %d times, want %d", n, at)
					}
					if rep := sweep(t, p); rep.Deleted != 3 || rep.CandidatesStaged != 1 {
						t.Errorf("once it says yes: %+v", rep)
					}
				})
			})
		}
	}
}

// Where nothing is due the hook is asked once, in a dry run too.
func TestProtectHookIsAskedOnce(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(2)
		hook := newProtector(t)
		p := a.pool(poolYAML{liveness: a.refs(), extra: hook.extra()})
		sweep(t, p)
		sweepWith(t, p, agent.SweepOptions{DryRun: true})
		if n := hook.calls.Load(); n != 2 {
			t.Errorf("asked %d times", n)
		}
		sweep(t, p)
		if n := hook.calls.Load(); n != 4 {
			t.Errorf("asked %d times, where something is due", n)
		}
	})
}

func TestProtectHookOutOfReach(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.due(poolYAML{liveness: a.refs()})
		hook := newProtector(t)
		hook.Close()
		secret := strings.Replace(hook.URL, "http://", "http://user:hunter2@", 1)
		p := a.pool(poolYAML{liveness: a.refs(), extra: fmt.Sprintf("protect: {http: %q}", secret+"/?token=hunter2")})
		a.unchanged(func() {
			rep := wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed)
			if strings.Contains(rep.Detail, "hunter2") || !strings.Contains(rep.Detail, "hook") {
				t.Errorf("detail = %q", rep.Detail)
			}
		})
	})
}

// A hook that doesn't answer is waited for as long as it may take, and no longer.
func TestSlowProtectHook(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("it takes 10 s")
	}
	a := newSQLiteApp(t)
	a.due(poolYAML{liveness: a.refs()})
	hook := newProtector(t)
	hook.reply = func(_ int64, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	p := a.pool(poolYAML{liveness: a.refs(), extra: hook.extra()})
	a.unchanged(func() { wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed) })
}

// A table that was looked at isn't the one that the batch meets: nothing is
// deleted, and the next sweep looks again.
func TestChangedSinceConsult(t *testing.T) {
	const remake = `DROP TABLE %[1]s; CREATE TABLE %[1]s (%[2]s); INSERT INTO %[1]s %[3]s`
	for name, c := range map[string]struct {
		engine, change, names string
		stays                 bool // misconfigured from then on
	}{
		"column renamed":       {"both", `ALTER TABLE refs RENAME COLUMN blob TO other`, "refs", true},
		"table renamed":        {"both", `ALTER TABLE refs RENAME TO others`, "refs", true},
		"table dropped":        {"both", `DROP TABLE refs`, "refs", true},
		"made anew":            {"postgres", fmt.Sprintf(remake, "refs", "blob text", "VALUES ('b1')"), "refs", false},
		"made anew otherwise":  {"both", fmt.Sprintf(remake, "refs", "n integer, blob text", "VALUES (1, 'b1')"), "refs", false},
		"another type":         {"postgres", `ALTER TABLE refs ALTER COLUMN blob TYPE varchar`, "refs", false},
		"another collation":    {"postgres", `ALTER TABLE refs ALTER COLUMN blob TYPE text COLLATE "C"`, "refs", false},
		"blobs dropped":        {"both", `DROP TABLE blobs`, "blobs", true},
		"blobs made anew":      {"postgres", `CREATE TABLE copy AS SELECT * FROM blobs; ` + fmt.Sprintf(remake, "blobs", "id text PRIMARY KEY, size integer", "SELECT * FROM copy"), "blobs", false},
		"blobs of other shape": {"both", `CREATE TABLE copy AS SELECT id, size FROM blobs; ` + fmt.Sprintf(remake, "blobs", "size integer, id text PRIMARY KEY NOT NULL", "SELECT size, id FROM copy"), "blobs", false},
	} {
		t.Run(name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				if c.engine != "both" && c.engine != a.engine {
					t.Skip("not a change for this engine")
				}
				a.due(poolYAML{liveness: a.refs()})
				hook := beforeExecute(t, func() { a.exec(c.change) })
				p := a.pool(poolYAML{liveness: a.refs(), extra: hook.extra()})
				rep := wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed)
				if !strings.Contains(rep.Detail, c.names) {
					t.Errorf("detail = %q, want %s named", rep.Detail, c.names)
				}
				a.wantWindow(names(2, 4)...)
				if c.stays {
					return
				}
				a.wantBlobs(names(1, 5)...)
				if rep := sweep(t, p); rep.Deleted != 3 || rep.CandidatesStaged != 1 {
					t.Errorf("the next sweep: %+v", rep)
				}
			})
		})
	}
}

// Between the look at the catalogue and the question, within one batch, another
// table takes the place of the one that refers.
func TestSourceReplacedWithinABatch(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.due(poolYAML{liveness: a.refs()})
	a.exec(`INSERT INTO refs VALUES ('b2')`)
	o := before(func() {
		a.exec(`BEGIN; ALTER TABLE refs RENAME TO refs_old; CREATE TABLE refs (blob text); INSERT INTO refs VALUES ('b1'); COMMIT`)
	}, stmtAnswers)
	p := a.poolWith(poolYAML{liveness: a.refs()}, o.options())
	rep, err := p.Sweep(t.Context(), agent.SweepOptions{Progress: func(g agent.Progress) { o.armed = g.Phase == "mark" }})
	if err != nil || rep.Aborted == nil || *rep.Aborted != agent.CauseProtectFailed {
		t.Errorf("err = %v, %+v", err, rep)
	}
	if !o.done {
		t.Error("the sweep asked nothing")
	}
	a.wantBlobs(names(1, 5)...)
}

// A source that can't be read, for whatever reason, protects everything.
func TestUnreadableSource(t *testing.T) {
	for name, c := range map[string]struct{ engine, spoil, mend string }{
		"table gone":  {"both", `ALTER TABLE refs RENAME TO away`, `ALTER TABLE away RENAME TO refs`},
		"column gone": {"both", `ALTER TABLE refs RENAME COLUMN blob TO away`, `ALTER TABLE refs RENAME COLUMN away TO blob`},
		"view that fails": {
			"postgres", `ALTER TABLE refs RENAME TO away; CREATE VIEW refs AS SELECT blob, 1 / (length(blob) - 2) FROM away WHERE 1 / (length(blob) - 2) > 0`,
			`DROP VIEW refs; ALTER TABLE away RENAME TO refs`,
		},
		"read-only server": {"postgres", `ALTER DATABASE %s SET default_transaction_read_only = on`, `BEGIN READ WRITE; ALTER DATABASE %s RESET default_transaction_read_only; COMMIT`},
	} {
		t.Run(name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				if c.engine != "both" && c.engine != a.engine {
					t.Skip("not for this engine")
				}
				a.due(poolYAML{liveness: a.refs()})
				spoil, mend := c.spoil, c.mend
				if strings.Contains(spoil, "%s") {
					database := a.column(`SELECT current_database()`)[0]
					spoil, mend = fmt.Sprintf(spoil, database), fmt.Sprintf(mend, database)
				}
				a.exec(spoil)
				for _, opts := range []agent.SweepOptions{{}, {DryRun: true}} {
					p := a.pool(poolYAML{liveness: a.refs()})
					a.unchanged(func() { wantAbort(t, p, opts, agent.CauseProtectFailed) })
				}
				a.exec(mend)
				if rep := sweep(t, a.pool(poolYAML{liveness: a.refs()})); rep.Deleted != 3 {
					t.Errorf("once it can be read: %+v", rep)
				}
			})
		})
	}
}
