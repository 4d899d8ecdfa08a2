package agent_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/jackc/pgx/v5"
)

// A reference that is written between the check and the delete waits for the
// delete, and then gets an error that its writer can retry.
func TestForeignKeyGuard(t *testing.T) {
	t.Parallel()
	for level, want := range map[string][]string{
		"READ COMMITTED":  {pgdb.ForeignKeyViolation},
		"REPEATABLE READ": {pgdb.SerializationFailure, pgdb.ForeignKeyViolation},
		"SERIALIZABLE":    {pgdb.SerializationFailure, pgdb.ForeignKeyViolation},
	} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			a.linkedLibrary(3)
			ended := make(chan error, 1)
			o := before(func() {
				// The snapshot is older than the delete, in which the row is there.
				writer := a.session("BEGIN ISOLATION LEVEL "+level, `SELECT count(*) FROM blobs`)
				go func() {
					_, err := writer.Exec(t.Context(), `INSERT INTO refs VALUES ('b2')`)
					ended <- err
				}()
				a.waitUntilBlocked(writer.PgConn().PID(), ended)
			}, stmtTake, `"blobs"`)
			p := a.poolWith(poolYAML{liveness: linkedRefs()}, o.options())
			sweep(t, p)
			o.armed = true
			rep := sweep(t, p)
			if !o.done || rep.Deleted != 2 || rep.Overdue != 2 {
				t.Errorf("%+v", rep)
			}
			if err := <-ended; !containsCode(want, err) {
				t.Errorf("the writer got %v, want one of %v", err, want)
			}
			a.wantBlobs("b1")
		})
	}
}

func containsCode(codes []string, err error) bool {
	code := pgdb.Code(err)
	for _, c := range codes {
		if c == code {
			return true
		}
	}
	return false
}

// A reference that is committed at any instant before the check is seen: between
// the take and the lock, and between the lock and the check where no foreign key
// makes its writer wait.
func TestReferenceBeforeTheCheck(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		linked bool
		parts  []string
	}{
		"foreign key, before the lock": {true, []string{stmtLock}},
		"settle, before the take":      {false, []string{stmtTake, "visible_after <= $1"}},
		"settle, before the lock":      {false, []string{stmtLock}},
		"settle, before the check":     {false, []string{stmtAnswers}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			p := poolYAML{}
			if c.linked {
				a.linkedLibrary(3)
				p.liveness = linkedRefs()
			} else {
				a.library(3)
				p.liveness = a.refs()
			}
			o := before(func() { a.exec(`INSERT INTO refs VALUES ('b2')`) }, c.parts...)
			pool := a.poolWith(p, o.options())
			sweep(t, pool)
			d := decided{}
			// The statement that asks the sources is also the mark's: the window is
			// looked through before.
			opts := d.options()
			opts.Progress = func(g agent.Progress) { o.armed = g.Phase == "mark" }
			rep := sweepWith(t, pool, opts)
			if !o.done || rep.Deleted != 1 || rep.CancelledBy.Live != 1 {
				t.Errorf("%+v", rep)
			}
			d.want(t, map[string][]string{"live": {"b2"}, "deleted": {"b3"}})
			a.wantBlobs("b1", "b2")
		})
	}
}

// A transaction that has written a reference, and hasn't ended, holds up the
// batch: nothing is deleted, and the report says who it is.
func TestSettle(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		begin, end string
		who        func(conn *pgx.Conn) string
	}{
		"open transaction":     {"", "COMMIT", func(conn *pgx.Conn) string { return fmt.Sprint("pid ", conn.PgConn().PID()) }},
		"prepared transaction": {"PREPARE TRANSACTION 'gc-agent-%s'", "COMMIT PREPARED 'gc-agent-%s'", func(*pgx.Conn) string { return "prepared transaction gc-agent-" }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			a.library(4)
			p := a.pool(poolYAML{liveness: a.refs(), extra: "limits: {settle_timeout: 50ms}"})
			sweep(t, p)
			writer := a.session("BEGIN", `INSERT INTO refs VALUES ('b2')`)
			id := a.column(`SELECT current_database()`)[0] // names of prepared transactions are the server's
			if c.begin != "" {
				pgtest.Exec(t, writer, fmt.Sprintf(c.begin, id))
			}
			a.unchanged(func() {
				rep := sweep(t, p)
				wantCounts(t, rep, agent.Report{Scanned: 4, Referenced: 1})
				if !strings.Contains(rep.Detail, c.who(writer)) {
					t.Errorf("detail = %q, want it to name %q", rep.Detail, c.who(writer))
				}
			})
			end := c.end
			if strings.Contains(end, "%s") {
				end = fmt.Sprintf(end, id)
			}
			pgtest.Exec(t, writer, end)
			if rep := sweep(t, p); rep.Deleted != 2 || rep.CancelledBy.Live != 1 {
				t.Errorf("once it has ended: %+v", rep)
			}
			a.wantBlobs("b1", "b2")
		})
	}
}

// What is held up executes nothing but stages as ever.
func TestSettleStopsNoStaging(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	p := a.pool(poolYAML{liveness: a.refs(), extra: "limits: {settle_timeout: 50ms}"})
	sweep(t, p)
	a.exec(`INSERT INTO blobs VALUES ('b4', 10)`)
	a.session("BEGIN", `CREATE TABLE of_its_own (n integer)`)
	wantCounts(t, sweep(t, p), agent.Report{Scanned: 4, Referenced: 1, CandidatesStaged: 1})
}

// The sweep waits for a transaction that ends in time, and sees what it wrote.
// One that began after the wait did is none of those it waits for.
func TestSettleWaits(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	var writer *pgx.Conn
	looks := 0
	p := a.poolWith(poolYAML{liveness: a.refs()}, onStatement(func(sql string) {
		if writer == nil || !strings.Contains(sql, "pg_stat_activity") {
			return
		}
		switch looks++; looks {
		case 2:
			a.session("BEGIN", `CREATE TABLE of_its_own (n integer)`)
		case 3:
			pgtest.Exec(t, writer, "COMMIT")
		}
	}))
	sweep(t, p)
	writer = a.session("BEGIN", `INSERT INTO refs VALUES ('b2')`)
	rep := sweep(t, p)
	if looks != 3 || rep.Deleted != 1 || rep.CancelledBy.Live != 1 {
		t.Errorf("after %d looks: %+v", looks, rep)
	}
}

// A role without any right to look at others sees their transactions all the
// same.
func TestSettleThroughAPlainRole(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	role, roleURL := pgtest.Role(t, a.url, "NOSUPERUSER")
	a.exec(`GRANT SELECT, UPDATE, DELETE ON blobs TO `+role, `GRANT SELECT ON refs TO `+role, `CREATE SCHEMA gc_agent AUTHORIZATION `+role)
	plain := *a
	plain.url = roleURL
	p := plain.pool(poolYAML{liveness: a.refs(), extra: "limits: {settle_timeout: 50ms}"})
	sweep(t, p)
	writer := a.session("BEGIN", `INSERT INTO refs VALUES ('b2')`)
	rep := sweep(t, p)
	if want := fmt.Sprint("pid ", writer.PgConn().PID()); rep.Overdue != 0 || !strings.Contains(rep.Detail, want) {
		t.Errorf("%+v, want a detail that names %s", rep, want)
	}
	pgtest.Exec(t, writer, "COMMIT")
	if rep := sweep(t, p); rep.Deleted != 1 || rep.CancelledBy.Live != 1 {
		t.Errorf("%+v", rep)
	}
}

// A source without a guard collects nothing until somebody says that settle is
// enough; to look it needs no guard.
func TestSilentSettleIsRefused(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	silent := []string{"{name: refs, table: refs, column: blob}"}
	a.unchanged(func() {
		_, err := a.pool(poolYAML{liveness: silent}).Sweep(t.Context(), agent.SweepOptions{})
		wantMisconfigured(t, err, "pools[0].liveness[0].guard", "foreign key", "guard: settle")

		rep := sweep(t, a.pool(poolYAML{liveness: silent, mode: "observe"}))
		wantCounts(t, rep, agent.Report{Scanned: 3, Referenced: 1, CandidatesStaged: 2})
	})
	a.exec(`ALTER TABLE refs ADD FOREIGN KEY (blob) REFERENCES blobs (id)`)
	sweep(t, a.pool(poolYAML{liveness: silent}))
}

// A batch whose session has lost the lease deletes and stages nothing.
func TestLostLease(t *testing.T) {
	t.Parallel()
	for name, parts := range map[string][]string{
		"before the batch":     {"ORDER BY visible_after, key LIMIT", "SELECT key, visible_after"},
		"before the candidate": {"INSERT INTO pg_temp"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			a.library(3)
			armed := false
			p := a.poolWith(poolYAML{liveness: a.refs()}, agent.Options{PostgresTracer: postgresHook(func(conn *pgx.Conn, data pgx.TraceQueryStartData) {
				if armed && containsAll(data.SQL, parts...) {
					armed = false
					// On its own session, as if it were another's by now.
					if err := conn.PgConn().Exec(t.Context(), "SELECT pg_advisory_unlock_all()").Close(); err != nil {
						t.Error(err)
					}
				}
			})})
			sweep(t, p)
			if name == "before the candidate" {
				a.exec(`DELETE FROM gc_agent.gc_window`)
			}
			armed = true
			a.unchanged(func() {
				_, err := sweepError(t, p)
				if armed || !errors.Is(err, fleet.ErrLeaseLost) {
					t.Errorf("err = %v, want a lost lease", err)
				}
			})
			sweep(t, p)
		})
	}
}

// The lease and the delete are on one session: when it ends before the commit,
// nothing has happened.
func TestSessionEndsBeforeCommit(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	deleting, ended := false, false
	p := a.poolWith(poolYAML{liveness: a.refs()}, agent.Options{PostgresTracer: postgresHook(func(conn *pgx.Conn, data pgx.TraceQueryStartData) {
		switch {
		case containsAll(data.SQL, stmtTake, `"blobs"`):
			deleting = true
		case deleting && !ended && strings.EqualFold(data.SQL, "commit"):
			ended = true
			a.exec(fmt.Sprintf(`SELECT pg_terminate_backend(%d, 10000)`, conn.PgConn().PID()))
		}
	})})
	sweep(t, p)
	a.unchanged(func() {
		if rep, _ := sweepError(t, p, "commit"); rep.Deleted != 0 {
			t.Errorf("%+v", rep)
		}
	})
	if rep := sweep(t, p); rep.Deleted != 2 {
		t.Errorf("the next sweep: %+v", rep)
	}
}

// The table of references is emptied at each statement of a sweep in turn, and
// loaded again a little later. Whatever is due, no blob that it referred to goes.
func TestSourceEmptiedAtEveryStatement(t *testing.T) {
	for _, pause := range []int{1, 3} {
		t.Run(fmt.Sprintf("for %d statements", pause), func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				e := newEmptier(a, pause)
				for e.at = 1; e.sweepOnce(); e.at++ {
					if t.Failed() {
						t.Fatalf("emptied before statement %d", e.at)
					}
				}
			})
		})
	}
}

// emptier is a library whose references are away for some statements of a sweep.
type emptier struct {
	*app
	pool      *agent.Pool
	at, pause int

	statements int
	emptied    bool
}

const loadRefs = `INSERT INTO refs VALUES ('b1'), ('b2'), ('b3')`

func newEmptier(a *app, pause int) *emptier {
	a.library(6)
	e := &emptier{app: a, pause: pause}
	e.pool = a.poolWith(poolYAML{liveness: a.refs()}, onStatement(e.see))
	sweep(a.t, e.pool)
	return e
}

func (e *emptier) see(string) {
	e.statements++
	if e.statements == e.at {
		e.emptied = e.try(map[string]string{"postgres": `TRUNCATE refs`, "sqlite": `DELETE FROM refs`}[e.engine])
	} else if e.emptied && e.statements >= e.at+e.pause {
		e.emptied = !e.try(loadRefs)
	}
}

// sweepOnce says whether the sweep had so many statements.
func (e *emptier) sweepOnce() bool {
	sql := []string{`BEGIN`, `DELETE FROM blobs`, `DELETE FROM refs`, `DELETE FROM ` + e.windowTable(), loadRefs}
	for _, key := range names(1, 6) {
		sql = append(sql, fmt.Sprintf(`INSERT INTO blobs VALUES ('%s', 10)`, key), fmt.Sprintf(`INSERT INTO %s VALUES (%s, 1)`, e.windowTable(), e.literal(key)))
	}
	e.exec(strings.Join(append(sql, `COMMIT`), ";"))
	e.statements, e.emptied = 0, false
	rep, err := e.pool.Sweep(e.t.Context(), agent.SweepOptions{})
	if e.emptied {
		e.exec(loadRefs)
	}
	if err != nil {
		e.t.Errorf("sweep: %v", err)
	}
	checkCounts(e.t, rep)
	wantColumn(e.t, e.app, `SELECT id FROM blobs WHERE id IN ('b1', 'b2', 'b3')`, "b1", "b2", "b3")
	return e.statements >= e.at
}

// try runs a statement that gives up at once where it would have to wait for the
// agent, and says whether it ran.
func (a *app) try(statement string) bool {
	a.t.Helper()
	conn, err := a.db.Conn(a.t.Context())
	if err != nil {
		a.t.Fatal(err)
	}
	defer func() {
		if err := conn.Close(); err != nil {
			a.t.Error(err)
		}
	}()
	limit, lift := `SET lock_timeout = 1`, `RESET lock_timeout`
	if a.engine == "sqlite" {
		limit, lift = `PRAGMA busy_timeout = 0`, `PRAGMA busy_timeout = 5000`
	}
	exec := func(sql string) error {
		_, err := conn.ExecContext(a.t.Context(), sql)
		return err
	}
	if err := exec(limit); err != nil {
		a.t.Fatal(err)
	}
	tried := exec(statement)
	if err := exec(lift); err != nil {
		a.t.Fatal(err)
	}
	return tried == nil
}
