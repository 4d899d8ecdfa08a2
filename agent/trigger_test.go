package agent_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// softRefs is a source that leaves rows out.
func softRefs(guard string) []string {
	return []string{`{name: refs, table: refs, column: blob, where: "NOT gone", guard: ` + guard + `}`}
}

// softLibrary is a library of three, in which b1 is referred to and b2 was.
func (a *app) softLibrary() {
	a.t.Helper()
	a.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer)`, `CREATE TABLE refs (blob text, gone boolean NOT NULL DEFAULT false)`, `CREATE INDEX refs_blob ON refs (blob)`)
	a.fill("blobs", 3)
	a.exec(`INSERT INTO refs VALUES ('b1', false), ('b2', true)`)
}

// install makes the pool's guard triggers.
func (a *app) install(p *agent.Pool, opts agent.GuardOptions) {
	a.t.Helper()
	guards, err := p.InstallGuards(a.t.Context(), opts)
	if err != nil {
		a.t.Fatal(err)
	}
	for _, g := range guards {
		if g.Err != nil || g.Skipped != "" {
			a.t.Fatalf("%+v", g)
		}
	}
}

// weaken takes a part out of the function of the only guard trigger.
func (a *app) weaken(part, instead string) {
	a.t.Helper()
	def := a.column(`SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.proname LIKE 'gc_guard_%'`)
	if len(def) != 1 || !strings.Contains(def[0], part) {
		a.t.Fatalf("no %q in %v", part, def)
	}
	a.exec(strings.ReplaceAll(def[0], part, instead))
}

// triggerRace is a writer that refers to b2 while the batch that deletes it has
// checked, and hasn't committed. The source is soft.
type triggerRace struct {
	level      string
	write      string
	deferrable bool
	// weaken, where it isn't empty, is what is taken out of the trigger, which the
	// sweep is then not told of.
	weaken string
}

// run returns what the writer got.
func (r triggerRace) run(t *testing.T) (a *app, got error) {
	a = newPostgresApp(t)
	a.softLibrary()
	guard := "trigger"
	if r.weaken != "" {
		guard = "settle"
	}
	ended := make(chan error, 1)
	o := before(func() {
		// Its snapshot is older than the delete.
		writer := a.session("BEGIN ISOLATION LEVEL "+r.level, `SELECT count(*) FROM blobs`)
		go func() {
			_, err := writer.Exec(t.Context(), r.write)
			if err == nil {
				_, err = writer.Exec(t.Context(), "COMMIT")
			}
			ended <- err
		}()
		if r.weaken == "" {
			a.waitUntilBlocked(writer.PgConn().PID(), ended)
		} else if err := <-ended; err != nil {
			t.Errorf("it was to go through, and got %v", err)
		}
	}, stmtTake, `"blobs"`)
	p := a.poolWith(poolYAML{liveness: softRefs(guard)}, o.options())
	a.install(p, agent.GuardOptions{Source: "refs", Deferrable: r.deferrable})
	if r.weaken != "" {
		a.weaken(r.weaken, "")
	}
	sweep(t, p)
	o.armed = true
	if rep := sweep(t, p); !o.done || rep.Deleted != 2 {
		t.Errorf("%+v", rep)
	}
	if r.weaken == "" {
		got = <-ended
	}
	a.wantBlobs("b1")
	return a, got
}

const (
	insertRef   = `INSERT INTO refs VALUES ('b2')`
	updateRef   = `UPDATE refs SET blob = 'b2' WHERE blob = 'b1'`
	undeleteRef = `UPDATE refs SET gone = false WHERE blob = 'b2'`
)

// A reference that is written between the check and the delete waits for the
// delete and gets an error that can be retried, whatever wrote it.
func TestTriggerGuard(t *testing.T) {
	t.Parallel()
	for level, want := range map[string]string{
		"READ COMMITTED":  pgdb.ForeignKeyViolation,
		"REPEATABLE READ": pgdb.SerializationFailure,
		"SERIALIZABLE":    pgdb.SerializationFailure,
	} {
		for name, write := range map[string]string{"insert": insertRef, "update": updateRef, "undelete": undeleteRef} {
			for _, deferrable := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, deferrable %t", level, name, deferrable), func(t *testing.T) {
					t.Parallel()
					a, err := triggerRace{level: level, write: write, deferrable: deferrable}.run(t)
					if pgdb.Code(err) != want {
						t.Errorf("the writer got %v, want %s", err, want)
					}
					if d := a.column(`SELECT blob FROM refs WHERE NOT gone AND blob <> 'b1'`); len(d) > 0 {
						t.Errorf("dangling: %v", d)
					}
				})
			}
		}
	}
}

// The lock is what the reference would be left dangling without.
func TestTriggerWithoutLock(t *testing.T) {
	t.Parallel()
	for _, deferrable := range []bool{false, true} {
		t.Run(fmt.Sprintf("deferrable %t", deferrable), func(t *testing.T) {
			t.Parallel()
			a, _ := triggerRace{level: "READ COMMITTED", write: insertRef, weaken: " FOR KEY SHARE", deferrable: deferrable}.run(t)
			if d := a.column(`SELECT blob FROM refs WHERE NOT gone AND blob <> 'b1'`); len(d) != 1 {
				t.Errorf("dangling: %v", d)
			}
		})
	}
}

// A row that was left out held nothing, whatever it named. A trigger that takes it
// for one that did leaves the reference dangling when the row counts again.
func TestTriggerUndelete(t *testing.T) {
	t.Parallel()
	for _, weakened := range []bool{false, true} {
		t.Run(fmt.Sprintf("weakened %t", weakened), func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			a.softLibrary()
			p := a.pool(poolYAML{liveness: softRefs("settle")})
			a.install(p, agent.GuardOptions{Source: "refs"})
			if weakened {
				a.weaken("(SELECT OLD.*) s WHERE true AND (NOT gone\n)", "(SELECT OLD.*) s WHERE true")
			}
			sweep(t, p)
			sweep(t, p)
			a.wantBlobs("b1")
			_, err := a.db.ExecContext(t.Context(), undeleteRef)
			if weakened != (err == nil) || !weakened && pgdb.Code(err) != pgdb.ForeignKeyViolation {
				t.Errorf("err = %v", err)
			}
		})
	}
}

// A writer that comes first has the blob's row: its key is put back, the others
// go, and once it has committed it is seen.
func TestTriggerWriterFirst(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"} {
		for name, write := range map[string]string{"insert": insertRef, "undelete": undeleteRef} {
			t.Run(level+", "+name, func(t *testing.T) {
				t.Parallel()
				a := newPostgresApp(t)
				a.softLibrary()
				p := a.pool(poolYAML{liveness: softRefs("auto")})
				a.install(p, agent.GuardOptions{})
				sweep(t, p)
				writer := a.session("BEGIN ISOLATION LEVEL "+level, write)
				if rep := sweep(t, p); rep.Deleted != 1 || rep.CancelledBy.Locked != 1 {
					t.Errorf("while it is open: %+v", rep)
				}
				pgtest.Exec(t, writer, "COMMIT")
				if rep := sweep(t, p); rep.Deleted != 0 || rep.CancelledBy.Live != 1 {
					t.Errorf("once it is through: %+v", rep)
				}
				a.wantBlobs("b1", "b2")
			})
		}
	}
}

// The trigger fires where a session takes itself for a replica, as what applies
// rows of another server does. One that is enabled as usual doesn't, and is no
// guard.
func TestTriggerFiresForReplicas(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(2)
	p := a.pool(poolYAML{liveness: []string{"{name: refs, table: refs, column: blob, guard: trigger}"}})
	a.install(p, agent.GuardOptions{})
	replica := a.session("SET session_replication_role = replica")
	const dangling = `INSERT INTO refs VALUES ('gone')`
	if _, err := replica.Exec(t.Context(), dangling); pgdb.Code(err) != pgdb.ForeignKeyViolation {
		t.Errorf("err = %v", err)
	}
	sweep(t, p)
	a.exec(`ALTER TABLE refs ENABLE TRIGGER ` + a.column(`SELECT tgname FROM pg_trigger WHERE NOT tgisinternal`)[0])
	pgtest.Exec(t, replica, dangling)
	_, err := p.Sweep(t.Context(), agent.SweepOptions{})
	wantMisconfigured(t, err, "pools[0].liveness[0].guard", "isn't ENABLE ALWAYS", "gc-agent guard install p --source refs", "guard: settle")
}

// What becomes of the trigger between two looks of one batch ends it.
func TestTriggerGoesDuringTheSweep(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"disabled": `ALTER TABLE refs DISABLE TRIGGER USER`,
		"replaced": `CREATE OR REPLACE FUNCTION %s RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			a.library(3)
			o := before(func() {
				function := a.column(`SELECT oid::regprocedure::text FROM pg_proc WHERE proname LIKE 'gc_guard_%'`)[0]
				if strings.Contains(change, "%s") {
					change = fmt.Sprintf(change, function)
				}
				a.exec(change)
			}, stmtLock)
			p := a.poolWith(poolYAML{liveness: []string{"{name: refs, table: refs, column: blob}"}}, o.options())
			a.install(p, agent.GuardOptions{})
			sweep(t, p)
			o.armed = true
			rep := wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed)
			if !strings.Contains(rep.Detail, "gc_guard_refs_") {
				t.Errorf("detail: %s", rep.Detail)
			}
			a.wantBlobs("b1", "b2", "b3")
		})
	}
}
