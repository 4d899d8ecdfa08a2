package agent_test

import (
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

// wantInstall installs the only source's trigger and wants an error that says all
// of the parts, or none.
func wantInstall(t *testing.T, p *agent.Pool, parts ...string) {
	t.Helper()
	guards, err := p.InstallGuards(t.Context(), agent.GuardOptions{Source: "refs"})
	if err != nil || len(guards) != 1 {
		t.Fatalf("%+v, %v", guards, err)
	}
	switch got := guards[0].Err; {
	case got == nil && len(parts) > 0, got != nil && (len(parts) == 0 || !containsAll(got.Error(), parts...)):
		t.Errorf("err = %v, want %q", got, parts)
	}
}

// Who may not make the trigger is told who may, or what to grant; what was granted
// is enough, and the sweep's role needs none of it.
func TestInstallRights(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	owner, ownerURL := pgtest.Role(t, a.url, "")
	stranger, strangerURL := pgtest.Role(t, a.url, "")
	a.exec(`ALTER TABLE refs OWNER TO `+owner, `GRANT SELECT ON refs, blobs TO `+stranger, `GRANT SELECT ON blobs TO `+owner)
	as := func(url string) *agent.Pool {
		other := *a
		other.url = url
		return other.pool(poolYAML{liveness: guardedRefs("trigger")})
	}
	wantInstall(t, as(strangerURL), stranger, "doesn't own public.refs", owner+", who does", "gc-agent guard sql p --source refs")
	// The function is to be the owner's, whoever makes it.
	wantInstall(t, as(a.url), "the owner of public.refs ("+owner+") may not lock rows of public.blobs", `GRANT UPDATE ("id") ON "public"."blobs" TO `+owner)
	wantInstall(t, as(ownerURL), owner, `may not create schema "gc_agent"`, "GRANT CREATE ON DATABASE")
	a.exec(`CREATE SCHEMA gc_agent`)
	wantInstall(t, as(ownerURL), `GRANT CREATE, USAGE ON SCHEMA "gc_agent" TO `+owner)
	a.exec(`GRANT CREATE, USAGE ON SCHEMA gc_agent TO ` + owner)
	wantInstall(t, as(ownerURL), `GRANT UPDATE ("id") ON "public"."blobs" TO `+owner)
	a.exec(`GRANT UPDATE (id) ON blobs TO ` + owner)
	wantInstall(t, as(ownerURL))
	// The function acts as its owner: who writes needs no right on the blobs.
	a.exec(`GRANT INSERT ON refs TO ` + stranger)
	writer := pgtest.Connect(t, strangerURL)
	pgtest.Exec(t, writer, `INSERT INTO refs VALUES ('b1')`)
	if _, err := writer.Exec(t.Context(), `INSERT INTO refs VALUES ('gone')`); err == nil || !strings.Contains(err.Error(), "23503") {
		t.Errorf("err = %v", err)
	}
	p := a.pool(poolYAML{liveness: guardedRefs("trigger")})
	sweep(t, p)
	if rep := sweep(t, p); rep.Deleted != 2 {
		t.Errorf("%+v", rep)
	}
	guards, err := as(strangerURL).RemoveGuards(t.Context(), "")
	if err != nil || len(guards) != 1 || guards[0].Err == nil || !strings.Contains(guards[0].Err.Error(), "have the owner") {
		t.Errorf("removed by a stranger: %+v, %v", guards, err)
	}
}

// A table in use isn't waited for beyond lock_timeout, and nothing is left halfway.
func TestInstallWhileInUse(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	p := a.pool(poolYAML{liveness: guardedRefs("trigger"), extra: "limits: {lock_timeout: 50ms}"})
	writer := a.session("BEGIN", `INSERT INTO refs VALUES ('b2')`)
	wantInstall(t, p, `"public"."refs" is in use`, "lock_timeout")
	wantColumn(t, a, `SELECT proname FROM pg_proc WHERE proname LIKE 'gc_guard%'`)
	pgtest.Exec(t, writer, "COMMIT")
	wantInstall(t, p)
	pgtest.Exec(t, writer, "BEGIN; SELECT FROM refs")
	guards, err := p.RemoveGuards(t.Context(), "refs")
	if err != nil || len(guards) != 1 || guards[0].Err == nil || !strings.Contains(guards[0].Err.Error(), "is in use") {
		t.Errorf("%+v, %v", guards, err)
	}
	if trigger := a.column(`SELECT tgname FROM pg_trigger WHERE NOT tgisinternal`); len(trigger) != 1 {
		t.Errorf("triggers: %v", trigger)
	}
}

// What is removed is what was made, of this pool alone.
func TestRemoveGuards(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	a.exec(`CREATE SCHEMA other`, `CREATE FUNCTION other.gc_guard_x() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`,
		`CREATE TRIGGER gc_guard_x AFTER INSERT ON refs FOR EACH ROW EXECUTE FUNCTION other.gc_guard_x()`)
	was := a.dump()
	p := a.pool(poolYAML{liveness: guardedRefs("trigger")})
	a.exec(`CREATE SCHEMA gc_agent`)
	a.install(p, agent.GuardOptions{})
	// The source has another name by now.
	renamed := a.pool(poolYAML{liveness: []string{"{name: links, table: refs, column: blob, guard: trigger}"}})
	guards, err := renamed.RemoveGuards(t.Context(), "")
	if err != nil || len(guards) != 1 || guards[0].Err != nil || guards[0].Name != liveness.TriggerName("gc_agent", "refs") {
		t.Errorf("%+v, %v", guards, err)
	}
	a.exec(`DROP SCHEMA gc_agent`)
	if is := a.dump(); is != was {
		t.Errorf("%s\nis now\n%s", was, is)
	}
	wantColumn(t, a, `SELECT tgname FROM pg_trigger WHERE NOT tgisinternal`, "gc_guard_x")
}

// On SQLite, where one writer waits for another, there is nothing to make.
func TestGuardsOnSQLite(t *testing.T) {
	t.Parallel()
	a := newSQLiteApp(t)
	a.library(2)
	p := a.pool(poolYAML{liveness: a.refs()})
	a.unchanged(func() {
		for _, opts := range []agent.GuardOptions{{}, {Source: "refs"}} {
			planned, err := p.GuardSQL(t.Context(), opts)
			if err != nil || len(planned) > 0 {
				t.Errorf("%+v, %v", planned, err)
			}
			made, err := p.InstallGuards(t.Context(), opts)
			if err != nil || len(made) > 0 {
				t.Errorf("%+v, %v", made, err)
			}
		}
	})
}
