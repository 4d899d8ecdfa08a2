package agent_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/jackc/pgx/v5"
)

// Each race is run with its interleaving forced, on real Postgres: with every
// protection on, nobody who was told yes has lost anything; with the one that it is
// about left out, somebody has. docs/races.md lists them all, those of package fleet
// and of package liveness too.

// race says whether somebody who was told yes has lost a blob.
type race func(t *testing.T, without agent.Omit) (lost bool)

// races are those that a switch makes lose a blob, by the name of the switch.
var races = map[string]map[string]race{
	"RowLocks": {
		"reference, cascade":                  between("", "blob text REFERENCES blobs (id) ON DELETE CASCADE", "blob"),
		"reference, cascade, repeatable read": between("REPEATABLE READ", "blob text REFERENCES blobs (id) ON DELETE CASCADE", "blob"),
		"reference, cascade, serializable":    between("SERIALIZABLE", "blob text REFERENCES blobs (id) ON DELETE CASCADE", "blob"),
		"reference, set null":                 between("", "blob text REFERENCES blobs (id) ON DELETE SET NULL", "blob"),
		"reference to another column":         between("", "other text REFERENCES blobs (other) ON DELETE CASCADE", "other"),
	},
	"LocksFirst":   {"reference uncommitted at the check": uncommitted},
	"Settle":       {"reference uncommitted at the look": uncommittedUnderSettle},
	"OneStatement": {"reference moves to another table": movesBetweenTables},
	"AskAgain":     {"reference moves to another database": movesBetweenDatabases},
	"OneSession":   {"sweeper stopped past everything": stoppedPastEverything},
	"Lease":        {"lease lost, session alive": leaseLost},
	"Keeper":       {"pin in another daemon's memory": pinnedByAnotherDaemon},
}

// Every switch has its races, each of which loses a blob by it and none without it.
func TestRaces(t *testing.T) {
	t.Parallel()
	switches := reflect.TypeFor[agent.Omit]()
	for i := range switches.NumField() {
		name := switches.Field(i).Name
		var without agent.Omit
		reflect.ValueOf(&without).Elem().Field(i).SetBool(true)
		if len(races[name]) == 0 {
			t.Errorf("no race is lost without %s", name)
		}
		for what, run := range races[name] {
			for how, c := range map[string]agent.Omit{"protected": {}, "without " + name: without} {
				t.Run(what+"/"+how, func(t *testing.T) {
					t.Parallel()
					if lost, want := run(t, c), c != (agent.Omit{}); lost != want {
						t.Errorf("somebody has lost a blob: %t, want %t", lost, want)
					}
				})
			}
		}
	}
}

// racing is an application of three blobs, of which the first is referred to, and a
// pool of it. fn is called once, before the first statement of an armed sweep that
// contains all of parts.
func racing(t *testing.T, without agent.Omit, liveness []string, fn func(a *app), parts []string, schema ...string) (*app, *agent.Pool, *once) {
	t.Helper()
	a := newPostgresApp(t)
	a.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, other text UNIQUE, size integer)`)
	a.exec(schema...)
	a.fill("blobs", 3)
	a.exec(`UPDATE blobs SET other = 'o' || id`, `INSERT INTO refs VALUES (`+firstRef(liveness)+`)`)
	o := before(func() { fn(a) }, parts...)
	p := a.poolWith(poolYAML{liveness: liveness, extra: "limits: {settle_timeout: 50ms}"}, o.options())
	p.Omit(without)
	sweep(t, p)
	return a, p, o
}

func firstRef(liveness []string) string {
	if strings.Contains(liveness[0], "column: other") {
		return "'ob1'"
	}
	return "'b1'"
}

// afterAnswers is part of the batch's first statement after it has asked whether
// anything refers.
const afterAnswers = "set_config('statement_timeout', $1, true)"

// deleting are parts of the statement that deletes blobs.
var deleting = []string{stmtTake, `"blobs"`}

// danglingB2 says whether what refers to b2, or did, has no blob.
func (a *app) danglingB2() bool {
	return a.number(`SELECT count(*) FROM refs r JOIN blobs b ON b.id = 'b2' AND r::text IN ('(b2)', '(ob2)')`) == 0
}

// between: a reference is written between the check and the delete, under a foreign
// key whose delete would take it along.
func between(level, definition, column string) race {
	return func(t *testing.T, without agent.Omit) bool {
		ended := make(chan error, 1)
		value := map[string]string{"blob": "b2", "other": "ob2"}[column]
		return raced(t, without, []string{"{name: refs, table: refs, column: " + column + "}"}, func(a *app) {
			// The snapshot is older than the delete, in which the row is there.
			writer := a.session(strings.TrimSuffix("BEGIN ISOLATION LEVEL "+level, " ISOLATION LEVEL "), `SELECT count(*) FROM blobs`)
			go func() {
				_, err := writer.Exec(t.Context(), `INSERT INTO refs VALUES ('`+value+`'); COMMIT`)
				ended <- err
			}()
			a.untilBlockedOrEnded(writer.PgConn().PID(), ended)
		}, func(a *app) bool {
			err := <-ended
			if err != nil && !containsCode([]string{pgdb.ForeignKeyViolation, pgdb.SerializationFailure}, err) {
				t.Errorf("the writer got %v, want an error that it can retry", err)
			}
			return err == nil && a.danglingB2()
		}, deleting, `CREATE TABLE refs (`+definition+`)`, `CREATE INDEX ON refs (`+column+`)`)
	}
}

// raced runs a race: fn at its moment in the second sweep, then what was lost.
func raced(t *testing.T, without agent.Omit, liveness []string, fn func(*app), lost func(*app) bool, parts []string, schema ...string) bool {
	t.Helper()
	a, p, o := racing(t, without, liveness, fn, parts, schema...)
	o.armed = true
	rep := sweep(t, p)
	if !o.done {
		t.Fatalf("the moment hasn't come: %+v", rep)
	}
	return lost(a)
}

// untilBlockedOrEnded waits until the session waits for a lock, or what it does has
// ended, which ended then still tells.
func (a *app) untilBlockedOrEnded(pid uint32, ended chan error) {
	a.t.Helper()
	for len(ended) == 0 {
		if a.number(fmt.Sprintf(`SELECT count(*) FROM pg_stat_activity WHERE pid = %d AND wait_event_type = 'Lock'`, pid)) > 0 {
			return
		}
	}
}

// uncommitted: a reference is written before the check and committed after it.
func uncommitted(t *testing.T, without agent.Omit) bool {
	a, p, o := racing(t, without, linkedRefs(), nil, []string{afterAnswers},
		`CREATE TABLE refs (blob text REFERENCES blobs (id) ON DELETE CASCADE)`, `CREATE INDEX ON refs (blob)`)
	writer := a.session("BEGIN", `INSERT INTO refs VALUES ('b2')`)
	o.fn = func() { pgtest.Exec(t, writer, "COMMIT") }
	o.armed = true
	rep := sweep(t, p)
	if !o.done || !without.LocksFirst && (rep.Deleted != 1 || rep.CancelledBy.Locked != 1) {
		t.Errorf("%+v", rep)
	}
	return a.danglingB2()
}

// uncommittedUnderSettle is the same without a foreign key.
func uncommittedUnderSettle(t *testing.T, without agent.Omit) bool {
	a, p, o := racing(t, without, []string{"{name: refs, table: refs, column: blob, guard: settle}"}, nil, deleting,
		`CREATE TABLE refs (blob text)`, `CREATE INDEX ON refs (blob)`)
	writer := a.session("BEGIN", `INSERT INTO refs VALUES ('b2')`)
	o.fn = func() { pgtest.Exec(t, writer, "COMMIT") }
	o.armed = true
	rep := sweep(t, p)
	if !o.done {
		if !strings.Contains(rep.Detail, "settle") {
			t.Errorf("held up by nobody: %+v", rep)
		}
		o.fn()
		if rep := sweep(t, p); rep.Deleted != 1 || rep.CancelledBy.Live != 1 {
			t.Errorf("once it has ended: %+v", rep)
		}
	}
	return a.danglingB2()
}

// movesBetweenTables: a reference is first in one table, then in another, and always
// in one.
func movesBetweenTables(t *testing.T, without agent.Omit) bool {
	a := newPostgresApp(t)
	a.library(3)
	a.exec(`CREATE TABLE old_refs (blob text)`, `CREATE INDEX ON old_refs (blob)`, `INSERT INTO old_refs VALUES ('b1')`)
	asked, executing := 0, false
	p := a.poolWith(poolYAML{liveness: append(a.refs(), "{name: old, table: old_refs, column: blob, guard: settle}")}, onStatement(func(sql string) {
		if !executing || !strings.Contains(sql, stmtAnswers) {
			return
		}
		if asked++; asked == 2 {
			a.exec(`WITH moved AS (DELETE FROM old_refs WHERE blob = 'b2' RETURNING blob) INSERT INTO refs SELECT blob FROM moved`)
		}
	}))
	p.Omit(without)
	sweep(t, p)
	a.exec(`INSERT INTO old_refs VALUES ('b2')`)
	sweepWith(t, p, agent.SweepOptions{Progress: func(g agent.Progress) { executing = g.Phase == "mark" }})
	if want := map[bool]int{false: 1, true: 2}[without.OneStatement]; asked != want {
		t.Errorf("%d questions, want %d", asked, want)
	}
	return a.number(`SELECT count(*) FROM blobs WHERE id = 'b2'`) == 0
}

// movesBetweenDatabases: the same where no statement sees both. The host has been
// asked, the other database has not.
func movesBetweenDatabases(t *testing.T, without agent.Omit) bool {
	a, elsewhere := newPostgresApp(t), newPostgresApp(t)
	a.library(3)
	elsewhere.exec(`CREATE TABLE refs (blob text)`, `CREATE INDEX ON refs (blob)`, `INSERT INTO refs VALUES ('b1')`)
	o := before(func() {
		a.exec(`INSERT INTO refs VALUES ('b2')`)
		elsewhere.exec(`DELETE FROM refs WHERE blob = 'b2'`)
	}, afterAnswers)
	p := a.poolWith(poolYAML{
		databases: map[string]string{"one": elsewhere.url},
		liveness:  append(a.refs(), "{name: elsewhere, database: one, table: refs, column: blob, guard: settle}"),
	}, o.options())
	p.Omit(without)
	sweep(t, p)
	elsewhere.exec(`INSERT INTO refs VALUES ('b2')`)
	o.armed = true
	sweep(t, p)
	if !o.done {
		t.Error("the moment hasn't come")
	}
	return a.number(`SELECT count(*) FROM blobs WHERE id = 'b2'`) == 0
}

// stoppedPastEverything: a sweeper stops between its check and its delete and loses
// its session; another one deletes everything; the application uploads it again and
// refers to it; the first one goes on. TestStoppedPastEverything of cmd/gc-agent stops
// a process.
func stoppedPastEverything(t *testing.T, without agent.Omit) bool {
	a := newPostgresApp(t)
	a.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer)`, `CREATE TABLE refs (blob text REFERENCES blobs (id) ON DELETE CASCADE)`, `CREATE INDEX ON refs (blob)`)
	a.fill("blobs", 3)
	a.exec(`INSERT INTO refs VALUES ('b1')`)
	two := a.pool(poolYAML{liveness: linkedRefs()})
	var lease uint32
	done := false
	one := a.poolWith(poolYAML{liveness: linkedRefs()}, agent.Options{PostgresTracer: postgresHook(func(conn *pgx.Conn, data pgx.TraceQueryStartData) {
		switch {
		case containsAll(data.SQL, stmtTake, "gc_window", "visible_after <= $1"):
			lease = conn.PgConn().PID()
		case !done && containsAll(data.SQL, deleting...):
			done = true
			a.exec(fmt.Sprintf(`SELECT pg_terminate_backend(%d, 30000)`, lease))
			if rep := sweep(t, two); rep.Deleted != 2 {
				t.Errorf("the second sweeper: %+v", rep)
			}
			a.exec(`INSERT INTO blobs VALUES ('b2', 10), ('b3', 10)`, `INSERT INTO refs VALUES ('b2')`)
		}
	})})
	one.Omit(without)
	sweep(t, one)
	if _, err := sweepError(t, one); !done || err == nil {
		t.Errorf("the stopped sweeper noticed nothing")
	}
	return a.danglingB2()
}

// leaseLost: the lease is gone, though its session isn't, before the batch. Another
// agent may be sweeping by then, whose brakes and counts hold for one sweeper alone:
// whatever is deleted now is lost.
func leaseLost(t *testing.T, without agent.Omit) bool {
	a := newPostgresApp(t)
	a.library(3)
	armed := false
	p := a.poolWith(poolYAML{liveness: a.refs()}, agent.Options{PostgresTracer: postgresHook(func(conn *pgx.Conn, data pgx.TraceQueryStartData) {
		if armed && containsAll(data.SQL, "ORDER BY visible_after, key LIMIT", "SELECT key, visible_after") {
			armed = false
			if err := conn.PgConn().Exec(t.Context(), "SELECT pg_advisory_unlock_all()").Close(); err != nil {
				t.Error(err)
			}
		}
	})})
	p.Omit(without)
	sweep(t, p)
	armed = true
	if _, err := p.Sweep(t.Context(), agent.SweepOptions{}); !without.Lease && !errors.Is(err, fleet.ErrLeaseLost) {
		t.Errorf("err = %v, want a lost lease", err)
	}
	return a.number(`SELECT count(*) FROM blobs`) < 3
}

// A role, or a database, whose transactions are REPEATABLE READ unless somebody says
// otherwise. The agent says so: what is committed between its locks and its check is
// seen. Without that it refuses to decide.
func TestDefaultIsolation(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			a.library(4)
			a.exec(`ALTER DATABASE ` + a.column(`SELECT current_database()`)[0] + ` SET default_transaction_isolation = '` + level + `'`)
			o := before(func() { a.exec(`INSERT INTO refs VALUES ('b2')`) }, stmtAnswers)
			taken := false
			p := a.poolWith(poolYAML{liveness: a.refs()}, agent.Options{PostgresTracer: postgresHook(func(conn *pgx.Conn, data pgx.TraceQueryStartData) {
				o.see(data.SQL)
				if taken && strings.Contains(data.SQL, "'row_security', 'off'") {
					// The first statement of the transaction, which the level is set before.
					if err := conn.PgConn().Exec(t.Context(), "SET TRANSACTION ISOLATION LEVEL "+level).Close(); err != nil {
						t.Error(err)
					}
				}
			})})
			sweep(t, p)
			taken = true
			a.unchanged(func() { _, _ = sweepError(t, p, "not read committed") })
			taken = false
			rep := sweepWith(t, p, agent.SweepOptions{Progress: func(g agent.Progress) { o.armed = g.Phase == "mark" }})
			if !o.done || rep.Deleted != 2 || rep.CancelledBy.Live != 1 {
				t.Errorf("%+v", rep)
			}
			a.wantBlobs("b1", "b2")
		})
	}
}
