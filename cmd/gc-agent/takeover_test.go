package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/jackc/pgx/v5"
)

// Two agents work on one pool. The moment at which the first one is struck is the
// middle of its batch: the delete of one blob waits for a gate that the test keeps.

// gatedSchema: blobs 1 to 20, of which the first five are referred to. Number 12
// isn't deleted while somebody keeps the gate closed.
const gatedSchema = `
CREATE TABLE parts (id integer PRIMARY KEY);
CREATE TABLE msgs (part_id integer REFERENCES parts);
CREATE INDEX msgs_part ON msgs (part_id);
INSERT INTO parts SELECT generate_series(1, 20);
INSERT INTO msgs SELECT generate_series(1, 5);
CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	PERFORM pg_catalog.pg_advisory_lock_shared(4711);
	PERFORM pg_catalog.pg_advisory_unlock_shared(4711);
	RETURN old;
END $$;
CREATE TRIGGER gate BEFORE DELETE ON parts FOR EACH ROW WHEN (old.id = 12) EXECUTE FUNCTION gate();`

// The limits are such that no agent gives up by itself.
const gatedConfig = `
databases: {app: {url: %q}}
pools:
  - name: parts
    database: app
    mode: enforce
    schedule: "@every 1s"
    window: 0
    brakes: {off: [max_dead_ratio]}
    limits: {lock_timeout: 10m, statement_timeout: 10m}
    blobs: [{type: table, table: parts, column: id}]
    liveness: [{name: msgs, table: msgs, column: part_id}]
`

// gated is such an application.
type gated struct {
	t        *testing.T
	url, dir string
	conn     *pgx.Conn
}

func newGated(t *testing.T) *gated {
	t.Helper()
	url := pgtest.Database(t)
	conn := pgtest.Connect(t, url)
	pgtest.Exec(t, conn, gatedSchema)
	return &gated{t: t, url: url, dir: gatedDir(t, url), conn: conn}
}

// gatedDir makes a directory with a configuration that leads to url.
func gatedDir(t *testing.T, url string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), fmt.Appendf(nil, gatedConfig, url), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (g *gated) close() { pgtest.Exec(g.t, g.conn, `SELECT pg_advisory_lock(4711)`) }
func (g *gated) open()  { pgtest.Exec(g.t, g.conn, `SELECT pg_advisory_unlock(4711)`) }

func (g *gated) number(query string, args ...any) (n int) {
	g.t.Helper()
	if err := g.conn.QueryRow(g.t.Context(), query, args...).Scan(&n); err != nil {
		g.t.Fatal(err)
	}
	return n
}

// sweeps runs the command to its end.
func (g *gated) sweeps() {
	g.t.Helper()
	if p := start(g.t, g.dir, "sweep"); p.status() != 0 {
		g.t.Fatalf("sweep failed\n%s", &p.out)
	}
}

// inBatch waits until the agent's batch has come to the gate, and returns the
// process of its session.
func (g *gated) inBatch(p *process) (session int) {
	g.t.Helper()
	p.until("its batch waits at the gate", func() bool {
		session = g.number(`SELECT coalesce(max(pid), 0) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event = 'advisory' AND application_name = 'gc-agent'`)
		return session != 0
	})
	return session
}

// ended waits until the server has given the session up.
func (g *gated) ended(p *process, session int) {
	g.t.Helper()
	p.until("the server gives the session of the first agent up", func() bool {
		return g.number(`SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, session) == 0
	})
}

// state is what the application and the agents have left of it.
func (g *gated) state() (state string) {
	g.t.Helper()
	err := g.conn.QueryRow(g.t.Context(), `SELECT concat(
		'blobs ', (SELECT string_agg(id::text, ' ' ORDER BY id) FROM parts),
		'; references ', (SELECT string_agg(part_id::text, ' ' ORDER BY part_id) FROM msgs),
		'; staged ', (SELECT string_agg(convert_from(key, 'UTF8'), ' ' ORDER BY key) FROM gc_agent.gc_window),
		'; pins ', (SELECT count(*) FROM gc_agent.gc_pins))`).Scan(&state)
	if err != nil {
		g.t.Fatal(err)
	}
	return state
}

// undisturbed is where two sweeps that nobody disturbs end.
func undisturbed(t *testing.T) string {
	t.Helper()
	g := newGated(t)
	g.sweeps()
	g.sweeps()
	return g.state()
}

const skipped = "sweep skipped: another agent is sweeping this pool"

// takesOver lets the second agent find the pool taken, has the first one struck in the
// middle of its batch, and wants the second to end the work once the server has given
// the first one's session up. first is where the first agent's configuration is.
func (g *gated) takesOver(first string, strike func(one *process)) {
	g.t.Helper()
	want := undisturbed(g.t)
	g.close()
	one := start(g.t, first, "run")
	session := g.inBatch(one)
	two := start(g.t, g.dir, "run")
	two.until("it finds the pool taken", func() bool { return strings.Contains(two.out.String(), skipped) })
	if got := g.number(`SELECT count(*) FROM parts`); got != 20 {
		g.t.Fatalf("%d blobs are left while the batch is open", got)
	}
	began := time.Now()
	strike(one)
	g.ended(two, session)
	g.t.Logf("the session ended %s after", time.Since(began).Round(time.Millisecond))
	if g.number(`SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'`) > 0 {
		g.open()
	}
	two.until("it ends the work", func() bool { return g.state() == want })
	two.signal(syscall.SIGTERM)
	if got := two.status(); got != 0 || strings.Contains(two.out.String(), `"level":"error"`) {
		g.t.Errorf("the second agent: exit status %d, want 0 and no error\n%s", got, &two.out)
	}
	if got := g.state(); got != want {
		g.t.Errorf("got  %s\nwant %s", got, want)
	}
}

// The first agent is killed. The server, which is in the middle of its statement,
// notices that by looking: the gate stays closed until it has.
func TestTakeoverAfterKill(t *testing.T) {
	t.Parallel()
	g := newGated(t)
	g.takesOver(g.dir, func(one *process) { one.signal(syscall.SIGKILL) })
}

// The first agent is stopped in the middle of its batch and loses its session. The
// second one sweeps everything, and the application uploads it all again. When the
// first one goes on, it deletes nothing of that.
func TestStoppedPastEverything(t *testing.T) {
	t.Parallel()
	g := newGated(t)
	g.sweeps()
	g.close()
	one := start(t, g.dir, "sweep")
	session := g.inBatch(one)
	one.signal(syscall.SIGSTOP)
	g.open()
	two := start(t, g.dir, "sweep")
	if got := two.status(); got != 0 || !strings.Contains(two.out.String(), "another agent is sweeping") {
		t.Errorf("while the first has its lease: exit status %d, want 0 and to be skipped\n%s", got, &two.out)
	}
	if g.number(`SELECT pg_terminate_backend($1, 30000)::int`, session) != 1 {
		t.Fatal("the session didn't end")
	}
	g.sweeps()
	if got := g.number(`SELECT count(*) FROM parts`); got != 5 {
		t.Fatalf("the second agent has left %d blobs, want the 5 that are referred to", got)
	}
	pgtest.Exec(t, g.conn, `INSERT INTO parts SELECT generate_series(6, 20)`)
	pgtest.Exec(t, g.conn, `INSERT INTO msgs SELECT generate_series(6, 12)`)
	want := g.state()

	one.signal(syscall.SIGCONT)
	if got := one.status(); got != 1 || !strings.Contains(one.out.String(), "pool parts: failed: ") {
		t.Errorf("the first agent: exit status %d, want 1 and a line that says why\n%s", got, &one.out)
	}
	if got := g.state(); got != want {
		t.Errorf("the first agent went on, and left\n%s\nwant\n%s", got, want)
	}
}
