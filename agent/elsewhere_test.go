package agent_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/memory"

	"github.com/jackc/pgx/v5"
)

// apart is an application whose blobs and references are in two databases.
type apart struct {
	*app       // of the blobs
	other *app // of the references
	cfg   poolYAML
}

// eachPair runs a test of what any two engines promise together.
func eachPair(t *testing.T, test func(t *testing.T, a *apart)) {
	t.Parallel()
	open := map[string]func(testing.TB) *app{"postgres": newPostgresApp, "sqlite": newSQLiteApp}
	for host, openHost := range open {
		for other, openOther := range open {
			t.Run(host+" and "+other, func(t *testing.T) {
				t.Parallel()
				test(t, newApart(openHost(t), openOther(t)))
			})
		}
	}
}

// newApart makes b1 to b4, all but b1 due, and b1 referred to in the other
// database alone.
func newApart(host, other *app) *apart {
	host.t.Helper()
	host.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer)`)
	host.fill("blobs", 4)
	other.exec(`CREATE TABLE refs (blob text)`, `CREATE INDEX refs_blob ON refs (blob)`, `INSERT INTO refs VALUES ('b1')`)
	a := &apart{app: host, other: other, cfg: poolYAML{
		databases: map[string]string{"other": other.url},
		liveness:  []string{"{name: far, database: other, table: refs, column: blob, guard: settle}"},
	}}
	return a
}

func TestSourceElsewhere(t *testing.T) {
	eachPair(t, func(t *testing.T, a *apart) {
		p := a.pool(a.cfg)
		dry := sweepWith(t, p, agent.SweepOptions{DryRun: true})
		want := agent.Report{Scanned: 4, Referenced: 1, CandidatesStaged: 3}
		wantCounts(t, dry, want)
		wantCounts(t, sweep(t, p), want)
		a.other.exec(`INSERT INTO refs VALUES ('b2')`)
		want = agent.Report{Scanned: 4, Referenced: 2, Overdue: 3, Deleted: 2, BytesReclaimed: 20, Cancelled: 1, CancelledBy: agent.CancelledBy{Live: 1}}
		wantCounts(t, sweepWith(t, p, agent.SweepOptions{DryRun: true}), want)
		d := decided{}
		wantCounts(t, sweepWith(t, p, d.options()), want)
		if got := d["b2"]; got.Detail != "source far" {
			t.Errorf("b2 is kept by %q", got.Detail)
		}
		a.wantBlobs("b1", "b2")
		if a.other.hasWindow() {
			t.Error("a source's database got a window")
		}
	})
}

// Sources here and there: what either refers to stays, and leaves the window.
func TestSourcesHereAndElsewhere(t *testing.T) {
	eachPair(t, func(t *testing.T, a *apart) {
		a.exec(`CREATE TABLE near (blob text)`, `INSERT INTO near VALUES ('b2')`)
		a.cfg.liveness = append(a.cfg.liveness, "{name: near, table: near, column: blob, allow_empty: true, guard: "+a.settle()+"}")
		a.cfg.window = "1h"
		p := a.pool(a.cfg)
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 4, Referenced: 2, CandidatesStaged: 2})
		a.wantWindow("b3", "b4")
		a.other.exec(`INSERT INTO refs VALUES ('b3')`)
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 4, Referenced: 3, Unstaged: 1})
		a.exec(`DELETE FROM near`)
		a.age(time.Hour)
		wantCounts(t, sweep(t, p), agent.Report{Scanned: 4, Referenced: 2, CandidatesStaged: 1, Overdue: 1, Deleted: 1, BytesReclaimed: 10})
		a.wantBlobs("b1", "b2", "b3")
		a.wantWindow("b2")
	})
}

// A database that can't be reached when the sweep begins protects everything.
func TestElsewhereOutOfReach(t *testing.T) {
	t.Parallel()
	for _, host := range []string{"postgres", "sqlite"} {
		t.Run(host, func(t *testing.T) {
			t.Parallel()
			a := newApart(map[string]func(testing.TB) *app{"postgres": newPostgresApp, "sqlite": newSQLiteApp}[host](t), newPostgresApp(t))
			proxy, through := newProxy(t, a.other.url)
			a.cfg.databases["other"] = through
			proxy.start()
			p := a.pool(a.cfg)
			sweep(t, p)
			proxy.stop()
			a.unchanged(func() { wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed) })
			proxy.start()
			if rep := sweep(t, p); rep.Deleted != 3 {
				t.Errorf("once it is back: %+v", rep)
			}
		})
	}
}

// It goes away while the sweep executes: the batch at hand deletes nothing, what
// was done before stays counted.
func TestElsewhereGoesAwayDuringExecution(t *testing.T) {
	t.Parallel()
	for _, host := range []string{"postgres", "sqlite"} {
		t.Run(host, func(t *testing.T) {
			t.Parallel()
			a := newApart(map[string]func(testing.TB) *app{"postgres": newPostgresApp, "sqlite": newSQLiteApp}[host](t), newPostgresApp(t))
			proxy, through := newProxy(t, a.other.url)
			proxy.start()
			a.cfg.databases["other"] = through
			a.cfg.extra = "limits: {batch: 1}"
			database := a.other.column(`SELECT current_database()`)[0]
			deleted, cut := 0, false
			p := a.poolWith(a.cfg, agent.Options{PostgresTracer: postgresHook(func(conn *pgx.Conn, data pgx.TraceQueryStartData) {
				if deleted == 1 && !cut && conn.Config().Database == database && strings.Contains(data.SQL, stmtAnswers) {
					cut = true
					proxy.stop()
				}
			})})
			sweep(t, p)
			rep, err := p.Sweep(t.Context(), agent.SweepOptions{Decided: func(agent.Decision) { deleted++ }})
			if err == nil || rep.Deleted != 1 || rep.Overdue != 1 {
				t.Errorf("err = %v, %+v", err, rep)
			}
			a.wantBlobs("b1", "b3", "b4")
			a.wantWindow("b3", "b4")
			proxy.start()
			if rep := sweep(t, p); rep.Deleted != 2 {
				t.Errorf("once it is back: %+v", rep)
			}
		})
	}
}

// What changes there between the look and the batch deletes nothing here.
func TestElsewhereChangedSinceConsult(t *testing.T) {
	for name, change := range map[string]string{
		"column renamed": `ALTER TABLE refs RENAME COLUMN blob TO other`,
		"table dropped":  `DROP TABLE refs`,
		"made anew":      `DROP TABLE refs; CREATE TABLE refs (n integer, blob text); INSERT INTO refs VALUES (1, 'b1')`,
	} {
		t.Run(name, func(t *testing.T) {
			eachPair(t, func(t *testing.T, a *apart) {
				sweep(t, a.pool(a.cfg))
				hook := beforeExecute(t, func() { a.other.exec(change) })
				a.cfg.extra = hook.extra()
				p := a.pool(a.cfg)
				a.unchanged(func() { wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed) })
			})
		})
	}
}

// A table that is emptied there after the look protects everything.
func TestElsewhereEmptiedSinceConsult(t *testing.T) {
	eachPair(t, func(t *testing.T, a *apart) {
		sweep(t, a.pool(a.cfg))
		hook := beforeExecute(t, func() { a.other.exec(`DELETE FROM refs`) })
		a.cfg.extra = hook.extra()
		if rep := sweep(t, a.pool(a.cfg)); rep.Deleted != 0 || rep.CancelledBy.Live != 3 {
			t.Errorf("%+v", rep)
		}
		a.wantBlobs(names(1, 4)...)
	})
}

// Settle looks at the writers where the source is.
func TestElsewhereSettles(t *testing.T) {
	t.Parallel()
	for _, host := range []string{"postgres", "sqlite"} {
		t.Run(host, func(t *testing.T) {
			t.Parallel()
			a := newApart(map[string]func(testing.TB) *app{"postgres": newPostgresApp, "sqlite": newSQLiteApp}[host](t), newPostgresApp(t))
			a.cfg.extra = "limits: {settle_timeout: 50ms}"
			p := a.pool(a.cfg)
			sweep(t, p)
			writer := a.other.session("BEGIN", `INSERT INTO refs VALUES ('b2')`)
			a.unchanged(func() {
				rep := sweep(t, p)
				if want := fmt.Sprint("pid ", writer.PgConn().PID()); rep.Overdue != 0 || !strings.Contains(rep.Detail, want) {
					t.Errorf("%+v, want a detail that names %s", rep, want)
				}
			})
		})
	}
}

// A writer of the other file that doesn't end holds the batch up for no longer
// than settle may take.
func TestElsewhereSettlesOnSQLite(t *testing.T) {
	t.Parallel()
	a := newApart(newSQLiteApp(t), newSQLiteApp(t))
	a.cfg.extra = "limits: {settle_timeout: 50ms}"
	p := a.pool(a.cfg)
	sweep(t, p)
	conn, err := a.other.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}()
	for _, sql := range []string{"BEGIN IMMEDIATE", `INSERT INTO refs VALUES ('b2')`} {
		if _, err := conn.ExecContext(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	a.unchanged(func() {
		if rep := sweep(t, p); rep.Overdue != 0 || !strings.Contains(rep.Detail, "settle") {
			t.Errorf("%+v", rep)
		}
	})
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	if _, err := conn.ExecContext(t.Context(), "COMMIT"); err != nil {
		t.Fatal(err)
	}
	if rep := sweep(t, p); rep.Deleted != 2 || rep.CancelledBy.Live != 1 {
		t.Errorf("once it has ended: %+v", rep)
	}
}

// Nothing but settle guards a source in another database, and somebody has to
// accept what that leaves open.
func TestElsewhereSilentSettleIsRefused(t *testing.T) {
	eachPair(t, func(t *testing.T, a *apart) {
		a.cfg.liveness = []string{"{name: far, database: other, table: refs, column: blob}"}
		_, err := a.pool(a.cfg).Sweep(t.Context(), agent.SweepOptions{})
		wantMisconfigured(t, err, "pools[0].liveness[0].guard", "guard: settle")
		a.cfg.mode = "observe"
		sweep(t, a.pool(a.cfg))
	})
}

// Another file takes the place of the one that was looked at.
func TestSQLiteFileReplaced(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		host     func(testing.TB) *app
		replaced func(a *apart) *app
	}{
		"of the blobs":                      {newSQLiteApp, func(a *apart) *app { return a.app }},
		"of a source":                       {newSQLiteApp, func(a *apart) *app { return a.other }},
		"of a source, the host is Postgres": {newPostgresApp, func(a *apart) *app { return a.other }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newApart(c.host(t), newSQLiteApp(t))
			sweep(t, a.pool(a.cfg))
			path := strings.TrimPrefix(c.replaced(a).url, "sqlite:")
			hook := beforeExecute(t, func() {
				c.replaced(a).exec(`PRAGMA wal_checkpoint(TRUNCATE)`)
				data, err := os.ReadFile(path)
				if err != nil {
					t.Error(err)
				}
				if err := os.Rename(path, path+".old"); err != nil {
					t.Error(err)
				}
				if err := os.WriteFile(path, data, 0o600); err != nil {
					t.Error(err)
				}
			})
			a.cfg.extra = hook.extra()
			// Both files are whole, and the application has the old one open.
			a.unchanged(func() {
				rep := wantAbort(t, a.pool(a.cfg), agent.SweepOptions{}, agent.CauseProtectFailed)
				if !strings.Contains(rep.Detail, "file") {
					t.Errorf("detail = %q", rep.Detail)
				}
			})
		})
	}
}

// A file that isn't there is never made: an empty database would make every blob
// unreferenced.
func TestSQLiteFileMissing(t *testing.T) {
	t.Parallel()
	for name, host := range map[string]func(testing.TB) *app{"postgres": newPostgresApp, "sqlite": newSQLiteApp} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newApart(host(t), newSQLiteApp(t))
			sweep(t, a.pool(a.cfg))
			path := strings.TrimPrefix(a.other.url, "sqlite:") + ".missing"
			a.cfg.databases["other"] = "sqlite:" + path
			a.unchanged(func() {
				rep := wantAbort(t, a.pool(a.cfg), agent.SweepOptions{}, agent.CauseProtectFailed)
				if !strings.Contains(rep.Detail, path) {
					t.Errorf("detail = %q", rep.Detail)
				}
			})
			if _, err := os.Stat(path); err == nil {
				t.Error("the file was made")
			}
		})
	}
}

// A row moves from one database to another while the sweep asks them one by one.
// Whichever way it goes, one of the answers has it.
func TestReferenceMovesBetweenDatabases(t *testing.T) {
	t.Parallel()
	ids := []string{"host", "one", "two"}
	for from := range ids {
		for to := range ids {
			if from == to {
				continue
			}
			t.Run(ids[from]+" to "+ids[to], func(t *testing.T) {
				t.Parallel()
				m := newMover(t, from, to)
				// Before each of the questions of the batch in turn.
				for m.question = 1; m.sweepOnce(); m.question++ {
					if t.Failed() {
						t.Fatalf("moved before question %d", m.question)
					}
				}
			})
		}
	}
}

// mover is an application with references in three databases, that moves one
// while it is swept. The host's has to take writes meanwhile, as SQLite doesn't.
type mover struct {
	*app
	from, to *app
	pool     *agent.Pool

	question  int // before which one it moves, from 1
	executing bool
	asked     int
}

func newMover(t *testing.T, from, to int) *mover {
	dbs := []*app{newPostgresApp(t), newSQLiteApp(t), newSQLiteApp(t)}
	m := &mover{app: dbs[0], from: dbs[from], to: dbs[to]}
	cfg := poolYAML{databases: map[string]string{"one": dbs[1].url, "two": dbs[2].url}}
	for i, db := range dbs {
		db.exec(`CREATE TABLE refs (blob text)`, `CREATE INDEX refs_blob ON refs (blob)`, `INSERT INTO refs VALUES ('b1')`)
		source := fmt.Sprintf("{name: refs%d, database: %s, table: refs, column: blob, guard: settle}", i, []string{"app", "one", "two"}[i])
		cfg.liveness = append(cfg.liveness, source)
	}
	m.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer)`)
	m.pool = m.poolWith(cfg, onStatement(m.see))
	return m
}

func (m *mover) see(sql string) {
	if !m.executing || !strings.Contains(sql, stmtAnswers) {
		return
	}
	if m.asked++; m.asked == m.question {
		m.to.exec(`INSERT INTO refs VALUES ('b2')`)
		m.from.exec(`DELETE FROM refs WHERE blob = 'b2'`)
	}
}

// sweepOnce says whether the batch had so many questions.
func (m *mover) sweepOnce() bool {
	m.executing, m.asked = false, 0
	m.exec(`DELETE FROM blobs`)
	m.fill("blobs", 3)
	m.from.exec(`DELETE FROM refs WHERE blob = 'b2'`)
	m.to.exec(`DELETE FROM refs WHERE blob = 'b2'`)
	sweep(m.t, m.pool)
	m.from.exec(`INSERT INTO refs VALUES ('b2')`)
	rep := sweepWith(m.t, m.pool, agent.SweepOptions{Progress: func(g agent.Progress) { m.executing = g.Phase == "mark" }})
	if rep.Aborted != nil || rep.Deleted != 1 || rep.CancelledBy.Live != 1 {
		m.t.Errorf("%+v", rep)
	}
	m.wantBlobs("b1", "b2")
	return m.asked >= m.question
}

// The same without a host: the store's pool asks two databases.
func TestReferenceMovesBetweenDatabasesOfAnInlinePool(t *testing.T) {
	t.Parallel()
	for from := range 2 {
		t.Run(fmt.Sprintf("from %d", from), func(t *testing.T) {
			t.Parallel()
			for question := 1; moveInlineBefore(t, from, question); question++ {
				if t.Failed() {
					t.Fatalf("moved before question %d", question)
				}
			}
		})
	}
}

func moveInlineBefore(t *testing.T, from, question int) bool {
	dbs := []*app{newSQLiteApp(t), newSQLiteApp(t)}
	y := poolYAML{databases: map[string]string{"app": "sqlite:/nowhere/app.db"}}
	for i, db := range dbs {
		db.exec(`CREATE TABLE refs (blob text)`, `INSERT INTO refs VALUES ('b1')`)
		name := fmt.Sprint("db", i)
		y.databases[name] = db.url
		y.liveness = append(y.liveness, fmt.Sprintf("{name: %s, database: %s, table: refs, column: blob, guard: settle}", name, name))
	}
	s := &shop{app: dbs[0], tier: memory.New("shop", blob.KindText), clock: newStepClock()}
	executing, questions := false, 0
	s.pool = inlinePool(t, y, s, onStatement(func(sql string) {
		if !executing || !strings.Contains(sql, stmtAnswers) {
			return
		}
		if questions++; questions == question {
			dbs[1-from].exec(`INSERT INTO refs VALUES ('b2')`)
			dbs[from].exec(`DELETE FROM refs WHERE blob = 'b2'`)
		}
	}), nil)
	s.put("b1", "b2", "b3")
	rep := sweepWith(t, s.pool, agent.SweepOptions{Progress: func(g agent.Progress) {
		if g.Phase == "stage" && !executing {
			executing = true
			dbs[from].exec(`INSERT INTO refs VALUES ('b2')`)
		}
	}})
	if rep.Deleted != 1 || rep.CancelledBy.Live != 1 {
		t.Errorf("%+v", rep)
	}
	s.wantBlobs("b1", "b2")
	return questions >= question
}
