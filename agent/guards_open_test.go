package agent_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/jackc/pgx/v5"
)

// dangling returns what is referred to and isn't there.
func (a *app) dangling() []string {
	a.t.Helper()
	return a.column(`SELECT blob FROM refs r WHERE blob IS NOT NULL AND NOT EXISTS (SELECT 1 FROM blobs b WHERE b.id = r.blob)`)
}

// wantOpen checks what `check` says that the guard leaves open, and that it says
// what would close it.
func wantOpen(t *testing.T, p *agent.Pool, open string) {
	t.Helper()
	check, err := p.Check(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info := check.Sources[0]; !strings.Contains(info.LeavesOpen, open) || info.WouldClose == "" {
		t.Errorf("check says that %s leaves open %q, closed by %q; want it to say %q", info.Guard, info.LeavesOpen, info.WouldClose, open)
	}
}

func guardedRefs(guard string) []string {
	return []string{"{name: refs, table: refs, column: blob, guard: " + guard + "}"}
}

// A writer begins once the agent has waited for those that were open, and commits
// its reference after the check. It is what settle leaves open; every other guard
// closes it.
func TestWriterAfterTheWait(t *testing.T) {
	t.Parallel()
	const beforeTake = "visible_after <= $1"
	for guard, c := range map[string]struct {
		parts []string
		open  string
	}{
		"settle":      {[]string{stmtTake, beforeTake}, "starts writing after the wait and commits after the check"},
		"trigger":     {[]string{stmtTake, beforeTake}, "while the trigger is disabled"},
		"foreign_key": {[]string{stmtTake, beforeTake}, "while the foreign key's triggers are off"},
		"table_lock":  {[]string{"LOCK TABLE"}, "goes on after the delete"},
	} {
		t.Run(guard, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			if guard == "foreign_key" {
				a.linkedLibrary(3)
			} else {
				a.library(3)
			}
			var writer *pgx.Conn
			o := before(func() { writer = a.session("BEGIN", `INSERT INTO refs VALUES ('b2')`) }, c.parts...)
			p := a.poolWith(poolYAML{liveness: guardedRefs(guard)}, o.options())
			if guard == "trigger" {
				a.install(p, agent.GuardOptions{})
			}
			wantOpen(t, p, c.open)
			sweep(t, p)
			o.armed = true
			rep := sweep(t, p)
			if !o.done {
				t.Fatalf("it never came to it: %+v", rep)
			}
			pgtest.Exec(t, writer, "COMMIT")
			want := []string(nil)
			switch guard {
			case "settle":
				want = []string{"b2"}
			case "table_lock":
				if who := fmt.Sprint("pid ", writer.PgConn().PID()); rep.Overdue != 0 || !strings.Contains(rep.Detail, who) || !strings.Contains(rep.Detail, `"public"."refs"`) {
					t.Errorf("%+v, want it held up by %s", rep, who)
				}
				a.wantWindow("b2", "b3")
			}
			if d := a.dangling(); !slices.Equal(d, want) {
				t.Errorf("dangling: %v, want %v", d, want)
			}
			if guard == "settle" {
				return
			}
			if rep := sweep(t, p); rep.CancelledBy.Live != 1 {
				t.Errorf("once it is through: %+v", rep)
			}
			a.wantBlobs("b1", "b2")
		})
	}
}

// "A writer that waits for the lock goes on after the delete, and leaves its
// reference dangling without an error": what table_lock leaves open.
func TestTableLockLeavesOpen(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	ended := make(chan error, 1)
	o := before(func() {
		writer := a.session()
		go func() {
			_, err := writer.Exec(t.Context(), `INSERT INTO refs VALUES ('b2')`)
			ended <- err
		}()
		a.waitUntilBlocked(writer.PgConn().PID(), ended)
	}, stmtTake, `"blobs"`)
	p := a.poolWith(poolYAML{liveness: guardedRefs("table_lock")}, o.options())
	wantOpen(t, p, "leaves its reference dangling without an error")
	sweep(t, p)
	o.armed = true
	if rep := sweep(t, p); !o.done || rep.Deleted != 2 {
		t.Errorf("%+v", rep)
	}
	if err := <-ended; err != nil {
		t.Errorf("the writer got %v", err)
	}
	if d := a.dangling(); !slices.Equal(d, []string{"b2"}) {
		t.Errorf("dangling: %v", d)
	}
}

// The tables are locked before anything else is, in the order of their names, each
// once, also those that a query reads.
func TestTableLockComesFirst(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	a.exec(`CREATE TABLE albums (cover text, hidden text)`, `CREATE TABLE "Zoo" (blob text)`, `CREATE VIEW shown AS SELECT blob FROM refs`,
		`INSERT INTO albums VALUES ('b1')`, `INSERT INTO "Zoo" VALUES ('b1')`)
	var locks []string
	armed := false
	p := a.poolWith(poolYAML{liveness: []string{
		guardedRefs("table_lock")[0],
		`{name: albums, query: 'SELECT a.cover FROM public.albums a JOIN public."Zoo" z ON z.blob = a.cover UNION SELECT blob FROM public.shown', format: "{text}", guard: table_lock}`,
	}}, onStatement(func(sql string) {
		for _, kind := range []string{"LOCK TABLE", "pg_try_advisory_xact_lock", stmtLock} {
			if armed && strings.Contains(sql, kind) {
				locks = append(locks, strings.TrimSuffix(sql, " IN SHARE MODE"))
			}
		}
		if armed && containsAll(sql, stmtTake, "visible_after <= $1") {
			locks = append(locks, "take")
		}
	}))
	sweep(t, p)
	armed = true
	if rep := sweep(t, p); rep.Deleted != 2 {
		t.Errorf("%+v", rep)
	}
	want := []string{`LOCK TABLE "public"."Zoo"`, `LOCK TABLE "public"."albums"`, `LOCK TABLE "public"."refs"`, "take"}
	if len(locks) < len(want) || !slices.Equal(locks[:len(want)], want) {
		t.Errorf("locked\n%s", strings.Join(locks, "\n"))
	}
}

// "An application that looks for the blob in one transaction and refers to it in a
// later one": what serial leaves open.
func TestSerialLeavesOpen(t *testing.T) {
	t.Parallel()
	a := newSQLiteApp(t)
	a.library(3)
	p := a.pool(poolYAML{liveness: guardedRefs("serial")})
	wantOpen(t, p, "looks for the blob in one transaction and refers to it in a later one")
	sweep(t, p)
	if n := a.number(`SELECT count(*) FROM blobs WHERE id = 'b2'`); n != 1 {
		t.Fatal("b2 isn't there to be found")
	}
	if rep := sweep(t, p); rep.Deleted != 2 {
		t.Errorf("%+v", rep)
	}
	a.exec(`INSERT INTO refs VALUES ('b2')`)
	if d := a.dangling(); !slices.Equal(d, []string{"b2"}) {
		t.Errorf("dangling: %v", d)
	}
}

// A row that was left out by where and counts again had its blob all along, where
// a foreign key holds it; one that would take such rows along is refused, and
// nothing goes.
func TestUndeleteUnderForeignKey(t *testing.T) {
	t.Parallel()
	for action, refused := range map[string]bool{"NO ACTION": false, "RESTRICT": false, "CASCADE": true, "SET NULL": true, "SET DEFAULT": true} {
		t.Run(action, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			a.softLibrary()
			a.exec(`ALTER TABLE refs ADD FOREIGN KEY (blob) REFERENCES blobs ON DELETE ` + action)
			p := a.pool(poolYAML{liveness: softRefs("auto")})
			if refused {
				a.unchanged(func() {
					_, err := p.Sweep(t.Context(), agent.SweepOptions{})
					wantMisconfigured(t, err, "pools[0].liveness[0].where", "takes its rows along", "leave where out")
				})
			} else {
				sweep(t, p)
				if rep := sweep(t, p); rep.Deleted != 1 {
					t.Errorf("%+v", rep)
				}
			}
			a.exec(undeleteRef)
			if d := a.dangling(); len(d) > 0 {
				t.Errorf("dangling: %v", d)
			}
		})
	}
}

// A reference through another unique column of the blobs' table waits for the
// delete as well.
func TestForeignKeyToAnotherColumn(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer, other text UNIQUE GENERATED ALWAYS AS ('o' || id) STORED)`,
		`CREATE TABLE refs (blob text REFERENCES blobs (other))`, `CREATE INDEX refs_blob ON refs (blob)`)
	a.fill("blobs", 3)
	a.exec(`INSERT INTO refs VALUES ('ob1')`)
	ended := make(chan error, 1)
	o := before(func() {
		writer := a.session()
		go func() {
			_, err := writer.Exec(t.Context(), `INSERT INTO refs VALUES ('ob2')`)
			ended <- err
		}()
		a.waitUntilBlocked(writer.PgConn().PID(), ended)
	}, stmtTake, `"blobs"`)
	p := a.poolWith(poolYAML{liveness: linkedRefs()}, o.options())
	sweep(t, p)
	o.armed = true
	if rep := sweep(t, p); !o.done || rep.Deleted != 2 {
		t.Errorf("%+v", rep)
	}
	if err := <-ended; !containsCode([]string{"23503"}, err) {
		t.Errorf("the writer got %v", err)
	}
	a.wantBlobs("b1")
}

// A where that turns true by itself has no other guard than settle, and no other
// than that is taken.
func TestWhereThatTurnsTrueByItself(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	a.exec(`ALTER TABLE refs ADD until timestamptz`)
	for guard, want := range map[string]string{"auto": "can turn true without a write", "trigger": "can turn true without a write", "table_lock": "can turn true without a write", "settle": ""} {
		p := a.pool(poolYAML{liveness: []string{`{name: refs, table: refs, column: blob, where: "until IS NULL OR until < now()", guard: ` + guard + `}`}})
		if want == "" {
			sweep(t, p)
			continue
		}
		_, err := p.Sweep(t.Context(), agent.SweepOptions{})
		wantMisconfigured(t, err, "pools[0].liveness[0].guard", want, "guard: settle")
	}
}
