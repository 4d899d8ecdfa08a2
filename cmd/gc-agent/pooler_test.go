package main

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/jackc/pgx/v5"
)

// Through PgBouncer, in whichever mode, every command that needs the pool says at
// once why it can't work and what to do, and leaves nothing behind: no schema, and no
// setting on a session that the pooler then gives to the application.
func TestPoolerIsRefused(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"transaction", "session", "statement"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			direct := pgtest.Database(t)
			conn := pgtest.Connect(t, direct)
			pgtest.Exec(t, conn, appSchema)
			through := newPooler(t, direct, mode)
			dir := writeConfig(t, through, "0")
			const line = `config.yaml:5: pools[0].database: database app: the connection goes through a pooler, ` +
				`where a lock of the session can't be relied on, whatever the pooler's mode: ` +
				`give the agent a URL that leads to the Postgres server itself, past the pooler`
			for _, args := range [][]string{{"check"}, {"sweep"}, {"sweep", "--dry-run"}, {"schema", "ensure"}, {"window", "list", "parts"}} {
				p := start(t, dir, args...)
				if got := p.status(); got != 2 || strings.Count(p.out.String(), line) != 1 {
					t.Errorf("%v: exit status %d, want 2 and to be told once\n%s", args, got, &p.out)
				}
				if args[0] != "check" && p.out.String() != line+"\n" {
					t.Errorf("%v: more is said than why:\n%s", args, &p.out)
				}
			}
			var schemas int
			if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname = 'gc_agent'`).Scan(&schemas); err != nil || schemas != 0 {
				t.Errorf("%d schemas were made: %v", schemas, err)
			}
			wantUntouchedSession(t, through)

			p := start(t, writeConfig(t, direct, "0"), "sweep")
			if got := p.status(); got != 0 {
				t.Errorf("past the pooler: exit status %d, want 0\n%s", got, &p.out)
			}
		})
	}
}

// wantUntouchedSession looks at the session that the pooler has given the agent.
func wantUntouchedSession(t *testing.T, through string) {
	t.Helper()
	cfg, err := pgx.ParseConfig(through)
	if err != nil {
		t.Fatal(err)
	}
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := conn.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	var changed string
	err = conn.QueryRow(t.Context(), `SELECT coalesce(string_agg(name, ', '), '') FROM pg_settings
		WHERE source = 'session' AND name NOT IN ('application_name', 'client_encoding')`).Scan(&changed)
	if err != nil || changed != "" {
		t.Errorf("the session has been given other settings: %s (%v)", changed, err)
	}
}

const poolerConfig = `
[databases]
%s = host=%s port=%d user=%s%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = %s
default_pool_size = 1
logfile = %s
`

// newPooler starts PgBouncer in front of the server, in the given mode, and returns
// the URL that leads through it.
func newPooler(t *testing.T, direct, mode string) (through string) {
	t.Helper()
	binary, err := exec.LookPath("pgbouncer")
	if err != nil {
		if binary, err = exec.LookPath("/usr/sbin/pgbouncer"); err != nil {
			t.Skip("there is no pgbouncer: run make test, which installs it")
		}
	}
	cfg, err := pgx.ParseConfig(direct)
	if err != nil {
		t.Fatal(err)
	}
	password := ""
	if cfg.Password != "" {
		password = " password='" + strings.ReplaceAll(cfg.Password, "'", "''") + "'"
	}
	dir := poolerDir(t)
	port := freePort(t)
	ini := filepath.Join(dir, "pgbouncer.ini")
	text := fmt.Sprintf(poolerConfig, cfg.Database, cfg.Host, cfg.Port, cfg.User, password, port, mode, filepath.Join(dir, "log"))
	if err := os.WriteFile(ini, []byte(text), 0o644); err != nil { // another user reads it
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), binary, "-q", ini)
	cmd.Dir = dir
	asNobody(t, cmd, dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		for range ended { // until it is closed
		}
	})
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	awaitListener(t, address, ended, filepath.Join(dir, "log"))
	u := url.URL{Scheme: "postgres", User: url.User(cfg.User), Host: address, Path: "/" + cfg.Database, RawQuery: "sslmode=disable"}
	return u.String()
}

// poolerDir is one that any user can reach, as those of the tests aren't.
func poolerDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gc-agent-pooler-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func freePort(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().(*net.TCPAddr).Port
}

// asNobody: PgBouncer refuses to run as root.
func asNobody(t *testing.T, cmd *exec.Cmd, dir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		return
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	uid, errUID := strconv.ParseUint(nobody.Uid, 10, 32)
	gid, errGID := strconv.ParseUint(nobody.Gid, 10, 32)
	if err := errors.Join(errUID, errGID, os.Chown(dir, int(uid), int(gid))); err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
}

// awaitListener returns once somebody listens.
func awaitListener(t *testing.T, address string, ended <-chan error, log string) {
	t.Helper()
	deadline, tick := time.After(patience), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			_ = conn.Close()
			return
		}
		select {
		case <-tick.C:
		case err := <-ended:
			text, _ := os.ReadFile(log)
			t.Fatalf("pgbouncer ended: %v\n%s", err, text)
		case <-deadline:
			t.Fatalf("nobody listens at %s: %v", address, err)
		}
	}
}
