package agent_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
)

// A process that sweeps is killed before and after each of its statements in
// turn. Whatever the instant, nothing that is referred to or pinned is gone, no
// overdue key is lost, and the next sweep ends where an undisturbed one does.
func TestKilledAtEveryStatement(t *testing.T) {
	eachCrashApp(t, func(t *testing.T, c *crashApp) {
		want := c.undisturbed()
		for n := 1; ; n++ {
			c.reset()
			killed := c.sweepKilledAt(n)
			c.waitForSessionsToEnd()
			what := fmt.Sprintf("killed at event %d", n)
			c.checkNothingLost(what)
			if !killed {
				c.wantState("never killed", want)
				t.Logf("%d events", n-1)
				return
			}
			c.sweepAgain(what, want)
		}
	})
}

// The same with the server's half: the session of the sweep is terminated before
// each statement in turn, and the agent lives on.
func TestSessionTerminatedBeforeEveryStatement(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	term := &terminator{db: a}
	c := newCrashApp(t, a, agent.Options{PostgresTracer: term})
	want := c.undisturbed()
	for n := int64(1); ; n++ {
		c.reset()
		term.left.Store(n)
		rep, err := c.pool.Sweep(t.Context(), agent.SweepOptions{})
		struck := term.left.Swap(0) <= 0
		what := fmt.Sprintf("terminated before statement %d", n)
		c.waitForSessionsToEnd()
		c.checkNothingLost(what)
		if err == nil && rep.Aborted == nil {
			// Only the lease was left to give back, if anything.
			c.wantState(what+", and reported as done", want)
		}
		if !struck {
			t.Logf("%d statements", n-1)
			return
		}
		c.sweepAgain(what, want)
	}
}

// terminator ends the session of the statement that counts left down to 0,
// before it is sent.
type terminator struct {
	db   *app
	left atomic.Int64
}

func (k *terminator) TraceQueryStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	if k.left.Add(-1) == 0 {
		// It waits until the session has ended.
		k.db.exec(fmt.Sprintf(`SELECT pg_terminate_backend(%d, 10000)`, conn.PgConn().PID()))
	}
	return ctx
}

func (k *terminator) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// crashApp is an application with a little of everything that a sweep can meet.
type crashApp struct {
	*app
	cfg  poolYAML
	pool *agent.Pool
	seed string
	// recovered holds the states from which a sweep has reached the right end.
	recovered map[string]bool
}

func eachCrashApp(t *testing.T, test func(t *testing.T, c *crashApp)) {
	eachEngine(t, func(t *testing.T, a *app) {
		test(t, newCrashApp(t, a, agent.Options{}))
	})
}

// Deadlines. Of the rows that a sweep stages only this is known: they are others.
const (
	crashWait = 4_000_000_000_000_000_000
	crashPin  = 4_000_000_000_000_000_001
)

const crashBlobs = `live-1 live-2 dead-1 dead-2 dead-3 back-1 wait-1 again-1 again-2 pinned-1 overdue-1 overdue-2 overdue-3 overdue-4 overdue-5`

// newCrashApp makes the tables, and with a first sweep those of the agent.
func newCrashApp(t *testing.T, a *app, opts agent.Options) *crashApp {
	t.Helper()
	a.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer)`,
		`CREATE TABLE refs (blob text REFERENCES blobs (id))`, `CREATE TABLE docs (blob text)`,
		`CREATE INDEX refs_blob ON refs (blob)`, `CREATE INDEX docs_blob ON docs (blob)`,
		`INSERT INTO blobs VALUES ('live', 1)`, `INSERT INTO refs VALUES ('live')`, `INSERT INTO docs VALUES ('live')`)
	c := &crashApp{app: a, recovered: map[string]bool{}, cfg: poolYAML{
		window: "1h", extra: "limits: {batch: 2, page: 8}",
		liveness: []string{"{name: refs, table: refs, column: blob}", "{name: docs, table: docs, column: blob, guard: " + a.settle() + "}"},
	}}
	p, ok := a.agent(c.cfg, opts).Pool("p")
	if !ok {
		t.Fatal("no pool p")
	}
	c.pool = p
	sweep(t, p)
	c.seed = c.seedSQL()
	return c
}

// seedSQL is one text, so that a reset is one round trip.
func (c *crashApp) seedSQL() string {
	w, key := c.windowTable(), "CAST('%s' AS BLOB)"
	sql := []string{`DELETE FROM refs`, `DELETE FROM docs`, `DELETE FROM blobs`, `DELETE FROM ` + w}
	if c.engine == "postgres" {
		key = "'%s'::bytea"
		sql = append(sql, `DELETE FROM gc_agent.gc_pins`, fmt.Sprintf(`INSERT INTO gc_agent.gc_pins VALUES ('pinned-1', 'someone', %d)`, crashPin))
	} else {
		// Without pins a reference keeps it.
		sql = append(sql, `INSERT INTO docs VALUES ('pinned-1')`)
	}
	for _, id := range strings.Fields(crashBlobs) {
		sql = append(sql, fmt.Sprintf(`INSERT INTO blobs VALUES ('%s', 1)`, id))
	}
	sql = append(sql, `INSERT INTO refs VALUES ('live-1'), ('again-1'), ('back-1')`, `INSERT INTO docs VALUES ('live-2'), ('again-2')`)
	stage := func(deadline int64, id string) {
		sql = append(sql, fmt.Sprintf(`INSERT INTO `+w+` VALUES (`+key+`, %d)`, id, deadline))
	}
	for i, id := range strings.Fields(`overdue-1 again-1 overdue-2 gone-1 overdue-3 pinned-1 overdue-4 again-2 overdue-5`) {
		stage(int64(i), id)
	}
	stage(crashWait, "back-1")
	stage(crashWait, "wait-1")
	return "BEGIN; " + strings.Join(sql, "; ") + "; COMMIT"
}

func (c *crashApp) reset() {
	c.t.Helper()
	c.exec(c.seed)
}

// sweepAgain is what comes after a crash. One sweep from a state is enough: what
// a crash may leave beside it, a lease above all, meets the next round's sweep.
func (c *crashApp) sweepAgain(what string, want crashState) {
	c.t.Helper()
	left := fmt.Sprint(c.state())
	if c.recovered[left] {
		return
	}
	c.recovered[left] = true
	sweep(c.t, c.pool)
	c.wantState(what+" and swept again", want)
}

// undisturbed returns where a sweep that nobody disturbs ends.
func (c *crashApp) undisturbed() crashState {
	c.t.Helper()
	c.reset()
	sweep(c.t, c.pool)
	want := crashState{
		Blobs:  strings.Fields(`again-1 again-2 back-1 dead-1 dead-2 dead-3 live-1 live-2 pinned-1 wait-1`),
		Window: []string{"dead-1 staged", "dead-2 staged", "dead-3 staged", "pinned-1 pin", "wait-1 wait"},
	}
	if c.engine == "sqlite" {
		want.Window = slices.DeleteFunc(want.Window, func(row string) bool { return row == "pinned-1 pin" })
	}
	c.wantState("undisturbed", want)
	return want
}

// crashState is what a sweep leaves behind.
type crashState struct {
	Blobs, Window []string
}

func (c *crashApp) state() crashState {
	c.t.Helper()
	key := "CAST(key AS TEXT)"
	if c.engine == "postgres" {
		key = "convert_from(key, 'UTF8')"
	}
	return crashState{Blobs: c.column(`SELECT id FROM blobs`), Window: c.column(fmt.Sprintf(
		`SELECT %s || CASE WHEN visible_after < 100 THEN ' past' WHEN visible_after = %d THEN ' wait' WHEN visible_after = %d THEN ' pin' ELSE ' staged' END
		FROM %s`, key, crashWait, crashPin, c.windowTable()))}
}

func (c *crashApp) wantState(what string, want crashState) {
	c.t.Helper()
	if diff := cmp.Diff(want, c.state()); diff != "" {
		c.t.Errorf("%s: -want +got:\n%s", what, diff)
	}
}

// checkNothingLost holds at every instant of a sweep.
func (c *crashApp) checkNothingLost(what string) {
	c.t.Helper()
	s := c.state()
	for _, id := range strings.Fields(crashBlobs) {
		stands := slices.Contains(s.Blobs, id)
		due := slices.Contains(s.Window, id+" past")
		switch {
		case strings.HasPrefix(id, "overdue") && stands != due:
			c.t.Errorf("%s: overdue blob %s: stands %t, in the window %t; want the two together", what, id, stands, due)
		case !strings.HasPrefix(id, "overdue") && !stands:
			c.t.Errorf("%s: %s is gone", what, id)
		}
	}
	if !slices.Contains(s.Window, "wait-1 wait") {
		c.t.Errorf("%s: wait-1 has lost its place in the window: %v", what, s.Window)
	}
	if c.engine == "postgres" && !slices.Contains(s.Window, "pinned-1 past") && !slices.Contains(s.Window, "pinned-1 pin") {
		c.t.Errorf("%s: pinned-1 has lost its place in the window: %v", what, s.Window)
	}
}

// waitForSessionsToEnd waits until the server has noticed that a client is gone.
func (c *crashApp) waitForSessionsToEnd() {
	c.t.Helper()
	if c.engine != "postgres" {
		return
	}
	poll := time.NewTicker(2 * time.Millisecond)
	defer poll.Stop()
	for deadline := time.Now().Add(30 * time.Second); ; <-poll.C {
		// The agent's own pool of connections is idle between sweeps.
		n := c.number(`SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
			WHERE d.datname = current_database() AND l.pid <> pg_backend_pid()`)
		if n == 0 {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%d locks are still held by a session whose client is dead", n)
		}
	}
}

// crashVariable makes a process of this binary a child that sweeps, and says what.
const crashVariable = "GC_AGENT_TEST_CRASH"

type crashSpec struct {
	Config string
	KillAt int64
}

// sweepKilledAt sweeps in a child process that kills itself at its n-th event,
// and says whether it came to that.
func (c *crashApp) sweepKilledAt(n int) (killed bool) {
	c.t.Helper()
	c.cfg.databases = map[string]string{"app": c.url}
	spec, err := json.Marshal(crashSpec{Config: c.cfg.String(), KillAt: int64(n)})
	if err != nil {
		c.t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.CommandContext(c.t.Context(), exe)
	cmd.Env = append(os.Environ(), crashVariable+"="+string(spec))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGKILL {
			return true
		}
	}
	if err != nil {
		c.t.Fatalf("sweep in a child process: %v\n%s", err, out)
	}
	return false
}

// crashChild is the child's part.
func crashChild(text string) (err error) {
	var spec crashSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return err
	}
	cfg, err := config.Parse("test.yaml", []byte(spec.Config), config.OSEnv())
	if err != nil {
		return err
	}
	k := &killer{}
	k.left.Store(spec.KillAt)
	ag, err := agent.New(cfg, agent.Options{PostgresTracer: postgresKiller{k}, SQLiteTracer: k})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ag.Close()) }()
	rep, err := ag.Pools()[0].Sweep(context.Background(), agent.SweepOptions{})
	if err == nil && rep.Aborted != nil {
		err = fmt.Errorf("aborted: %s: %s", *rep.Aborted, rep.Detail)
	}
	return err
}

// killer kills its own process at an event: before or after a statement.
type killer struct{ left atomic.Int64 }

func (k *killer) event() {
	if k.left.Add(-1) == 0 {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // a signal to oneself is as good as never late, but nothing says so
	}
}

func (k *killer) Before(string) { k.event() }
func (k *killer) After(string)  { k.event() }

type postgresKiller struct{ *killer }

func (k postgresKiller) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	k.event()
	return ctx
}

func (k postgresKiller) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) { k.event() }
