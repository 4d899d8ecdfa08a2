package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

const appConfig = `
databases: {app: {url: %q}}
pools:
  - name: parts
    database: app
    mode: enforce
    schedule: "@every 1s"
    window: %s
    blobs: [{type: table, table: parts, column: id}]
    liveness: [{name: msgs, table: msgs, column: part_id, guard: %s}]
`

const appSchema = `
CREATE TABLE parts (id INTEGER PRIMARY KEY);
CREATE TABLE msgs (part_id INTEGER);
CREATE INDEX msgs_part ON msgs (part_id);
INSERT INTO parts VALUES (1), (2);
INSERT INTO msgs VALUES (1);`

// writeApp makes an SQLite application with the blobs 1, live, and 2, dead, and
// returns its directory.
func writeApp(t *testing.T, window string) string {
	t.Helper()
	dir := writeConfig(t, "sqlite:app.db", window)
	query(t, dir, appSchema+"; SELECT 0")
	return dir
}

// writeConfig makes a directory with the configuration for such an application.
func writeConfig(t *testing.T, url, window string) string {
	t.Helper()
	dir, guard := t.TempDir(), "serial"
	if strings.HasPrefix(url, "postgres") {
		guard = "settle"
	}
	text := fmt.Appendf(nil, appConfig, url, window, guard)
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// query returns a number.
func query(t *testing.T, dir, text string) (n int) {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "app.db")+"?_pragma=busy_timeout(5000)")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := db.QueryRowContext(t.Context(), text).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// process is a running gc-agent.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	out  output
	ends chan error
}

// output is what a process has written so far.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// patience is for a machine that is busy.
const patience = 30 * time.Second

func start(t *testing.T, dir string, args ...string) *process {
	t.Helper()
	return startAs(t, dir, nil, args...)
}

// startAs starts it as another user, nil for the test's own.
func startAs(t *testing.T, dir string, as *syscall.Credential, args ...string) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{t: t, cmd: exec.CommandContext(ctx, "gc-agent", args...), ends: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(), "GORACE="+raceAtOnce)
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, &p.out, &p.out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	if err := p.cmd.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		p.ends <- p.cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return p
}

// until polls until ok, and fails the test when that takes too long.
func (p *process) until(what string, ok func() bool) {
	p.t.Helper()
	deadline, tick := time.After(patience), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case err := <-p.ends:
			p.t.Fatalf("ended before %s: %v\n%s", what, err, &p.out)
		case <-deadline:
			p.t.Fatalf("%s: not after %s\n%s", what, patience, &p.out)
		}
	}
}

func (p *process) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// status waits for the end.
func (p *process) status() int {
	p.t.Helper()
	var exit *exec.ExitError
	select {
	case err := <-p.ends:
		if err != nil && !errors.As(err, &exit) {
			p.t.Fatal(err)
		}
	case <-time.After(patience):
		p.t.Fatalf("doesn't end\n%s", &p.out)
	}
	return p.cmd.ProcessState.ExitCode()
}

func TestDaemonSweepsUntilItIsTold(t *testing.T) {
	t.Parallel()
	dir := writeApp(t, "0")
	p := start(t, dir, "run")
	p.until("the dead blob is deleted", func() bool { return query(t, dir, `SELECT count(*) FROM parts`) == 1 })
	p.until("it is logged", func() bool { return strings.Contains(p.out.String(), `"deleted":1`) })
	p.signal(syscall.SIGTERM)
	if got := p.status(); got != 0 {
		t.Errorf("exit status %d, want 0\n%s", got, &p.out)
	}
	if got := query(t, dir, `SELECT id FROM parts`); got != 1 {
		t.Errorf("blob %d is left, want 1", got)
	}
	for _, want := range []string{`"pools":"parts"`, `"version":"`, `"config":"config.yaml"`, "gc-agent is starting", "stopping", "gc-agent has stopped"} {
		if !strings.Contains(p.out.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, &p.out)
		}
	}
}

func TestDaemonGoesOnWithoutItsDatabase(t *testing.T) {
	t.Parallel()
	dir := writeApp(t, "0")
	db := filepath.Join(dir, "app.db")
	if err := os.Rename(db, db+".away"); err != nil {
		t.Fatal(err)
	}
	p := start(t, dir, "run")
	p.until("the failure is logged", func() bool { return strings.Contains(p.out.String(), "can't be looked at yet") })
	if err := os.Rename(db+".away", db); err != nil {
		t.Fatal(err)
	}
	p.until("the dead blob is deleted", func() bool { return query(t, dir, `SELECT count(*) FROM parts`) == 1 })
	p.signal(os.Interrupt)
	if got := p.status(); got != 0 {
		t.Errorf("exit status %d, want 0\n%s", got, &p.out)
	}
}

func TestDemoRunsUntilItIsTold(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := start(t, dir, "demo", "--dir", "d")
	p.until("a sweep has deleted something", func() bool { return strings.Contains(p.out.String(), ", freed ") })
	p.signal(os.Interrupt)
	if got := p.status(); got != 0 {
		t.Errorf("exit status %d, want 0\n%s", got, &p.out)
	}
	if !strings.Contains(p.out.String(), "Everything that is referred to is there.") {
		t.Errorf("the end isn't told:\n%s", &p.out)
	}
}

func TestSecondAgentLeavesAnSQLitePoolAlone(t *testing.T) {
	t.Parallel()
	dir := writeApp(t, "0")
	lease, ok, err := fleet.FileLockAcquire(filepath.Join(dir, "app.db"))
	if err != nil || !ok {
		t.Fatalf("no lease: %v", err)
	}
	leavesAlone(t, dir, lease.Release)
}

func TestSecondAgentLeavesAPostgresPoolAlone(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	pgtest.Exec(t, pgtest.Connect(t, url), appSchema)
	dir := writeConfig(t, url, "0")
	conn := pgtest.Session(t, url, pgdb.Options{})
	lease, ok, err := fleet.SweepLockAcquire(t.Context(), conn, "gc_agent")
	if err != nil || !ok {
		t.Fatalf("no lease: %v", err)
	}
	leavesAlone(t, dir, func(ctx context.Context) error {
		return errors.Join(lease.Release(ctx), conn.Close(ctx))
	})
}

// A daemon that is told to stop renews the pins of its owners for long enough that
// another one can take over.
func TestStoppedDaemonLeavesPinsThatLast(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn := pgtest.Connect(t, url)
	pgtest.Exec(t, conn, appSchema)
	dir := writeConfig(t, url, "0")
	config := filepath.Join(dir, "config.yaml")
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, "    fleet: true\n    pins: {ttl: 30s, owners: [{name: me, alive: {always: true}}]}\n"...)
	if err := os.WriteFile(config, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if p := start(t, dir, "schema", "ensure"); p.status() != 0 {
		t.Fatalf("schema ensure failed\n%s", &p.out)
	}
	pgtest.Exec(t, conn, `SELECT gc_agent.pin('2'::bytea, 'me'::bytea, interval '60 seconds')`)
	p := start(t, dir, "run")
	p.until("the owner is asked", func() bool { return strings.Contains(p.out.String(), "the owner is alive") })
	p.signal(syscall.SIGTERM)
	if got := p.status(); got != 0 || !strings.Contains(p.out.String(), "pins are renewed for the time of an upgrade") {
		t.Errorf("exit status %d, want 0 and the renewal to be told\n%s", got, &p.out)
	}
	var left float64
	const query = `SELECT expiry / 1e9 - extract(epoch FROM clock_timestamp()) FROM gc_agent.gc_pins`
	if err := conn.QueryRow(t.Context(), query).Scan(&left); err != nil || left < 200 || left > 330 {
		t.Errorf("the pin lives for %f s, want about 330: %v", left, err)
	}
	var there bool
	if err := conn.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM parts WHERE id = 2)`).Scan(&there); err != nil || !there {
		t.Errorf("the pinned blob is gone: %v", err)
	}
}

// leavesAlone runs commands while somebody has the pool's lease, and once it is
// released.
func leavesAlone(t *testing.T, dir string, release func(context.Context) error) {
	t.Helper()
	p := start(t, dir, "schema", "ensure")
	if got := p.status(); got != 0 {
		t.Fatalf("schema ensure: exit status %d, want 0\n%s", got, &p.out)
	}
	p = start(t, dir, "sweep")
	if got := p.status(); got != 0 {
		t.Errorf("sweep: exit status %d, want 0", got)
	}
	if got, want := p.out.String(), "pool parts: skipped: another agent is sweeping this pool: pid "; !strings.HasPrefix(got, want) {
		t.Errorf("sweep: printed %q, want %q and more", got, want)
	}
	p = start(t, dir, "run")
	p.until("a sweep is skipped", func() bool {
		return strings.Contains(p.out.String(), `"message":"sweep skipped: another agent is sweeping this pool"`)
	})
	p.signal(os.Interrupt)
	// The tests' server has no role but a superuser's.
	if got := p.status(); got != 0 || strings.Count(p.out.String(), `"level":"warn"`) > strings.Count(p.out.String(), "role is a superuser") {
		t.Errorf("run: exit status %d, want 0 and no warning\n%s", got, &p.out)
	}
	p = start(t, dir, "window", "drop", "parts", "--all")
	if got := p.status(); got != 1 || !strings.Contains(p.out.String(), "another agent is sweeping") {
		t.Errorf("window drop: exit status %d, want 1\n%s", got, &p.out)
	}
	p = start(t, dir, "window", "list", "parts")
	if got := p.status(); got != 0 {
		t.Errorf("window list: exit status %d, want 0\n%s", got, &p.out)
	}
	if err := release(t.Context()); err != nil {
		t.Fatal(err)
	}
	p = start(t, dir, "sweep")
	if got := p.status(); got != 0 || !strings.Contains(p.out.String(), "pool parts: swept in ") {
		t.Errorf("sweep: exit status %d, want 0\n%s", got, &p.out)
	}
}

// Who holds a sweep up is named, and that something overdue was left is said.
func TestHeldUpSweepSaysSo(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn := pgtest.Connect(t, url)
	pgtest.Exec(t, conn, appSchema)
	dir := writeConfig(t, url, "0")
	if p := start(t, dir, "sweep"); p.status() != 0 {
		t.Fatalf("the first sweep failed\n%s", &p.out)
	}
	pgtest.Exec(t, conn, "BEGIN")
	pgtest.Exec(t, conn, "INSERT INTO msgs VALUES (1)")
	p := start(t, dir, "sweep")
	if got := p.status(); got != 0 || !strings.Contains(p.out.String(), "\n  held up, and what is overdue is left for the next sweep: ") {
		t.Errorf("sweep: exit status %d, want 0 and to be told\n%s", got, &p.out)
	}
	p = start(t, dir, "run")
	p.until("it is logged", func() bool {
		return strings.Contains(p.out.String(), `"message":"sweep held up: what is overdue is left for the next one"`)
	})
	pgtest.Exec(t, conn, "COMMIT")
	p.until("the dead blob is deleted", func() bool { return strings.Contains(p.out.String(), `"deleted":1`) })
	p.signal(os.Interrupt)
	if got := p.status(); got != 0 {
		t.Errorf("run: exit status %d, want 0\n%s", got, &p.out)
	}
}

func TestSecondSignalCutsOff(t *testing.T) {
	t.Parallel()
	dir := writeApp(t, "0")
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "app.db")+"?_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(t.Context(), nil) // nobody else may write
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(tx.Rollback(), db.Close()); err != nil {
			t.Error(err)
		}
	})
	p := start(t, dir, "sweep")
	p.until("it has the lease", func() bool {
		_, err := os.Stat(filepath.Join(dir, "app.db.gc-agent.lock"))
		return err == nil
	})
	p.signal(syscall.SIGINT)
	p.signal(syscall.SIGTERM)
	if got := p.status(); got != 1 {
		t.Errorf("exit status %d, want 1\n%s", got, &p.out)
	}
	if strings.Count(p.out.String(), "cut off by a second signal") != 1 {
		t.Errorf("it isn't said why:\n%s", &p.out)
	}
}
