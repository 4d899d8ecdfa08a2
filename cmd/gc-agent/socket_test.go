package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// socketApp is an application of which the daemon gives pins.
type socketApp struct {
	t      *testing.T
	dir    string
	socket string
}

// writeSocketApp makes an application with the blobs 1, live, and 2, dead, in an
// SQLite file, or where url leads. Nothing is swept on a schedule, and pins live
// for a second at most, or as extra says.
func writeSocketApp(t *testing.T, url, extra string) *socketApp {
	t.Helper()
	dir, err := os.MkdirTemp("", "gc-agent-") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	a := &socketApp{t: t, dir: dir, socket: filepath.Join(dir, "s")}
	if url == "" {
		url = "sqlite:app.db"
		query(t, dir, appSchema+"; SELECT 0")
	}
	a.configure(url, extra)
	return a
}

func (a *socketApp) configure(url, extra string) {
	a.t.Helper()
	guard := "serial"
	if strings.HasPrefix(url, "postgres") {
		guard = "settle"
	}
	text := fmt.Sprintf(appConfig, url, "0", guard)
	text = strings.Replace(text, `"@every 1s"`, `"@every 24h"`, 1) + "    " + extra + "\nadmin: {socket: " + a.socket + "}\n"
	if err := os.WriteFile(filepath.Join(a.dir, "config.yaml"), []byte(text), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

func (a *socketApp) daemon() *process {
	a.t.Helper()
	p := start(a.t, a.dir, "run")
	p.until("the socket is open", func() bool { return strings.Contains(p.out.String(), "the control socket is open") })
	return p
}

// wants runs a command and compares its exit status and a part of what it prints.
func (a *socketApp) wants(status int, want string, args ...string) string {
	a.t.Helper()
	p := start(a.t, a.dir, args...)
	got := p.status()
	if got != status || !strings.Contains(p.out.String(), want) {
		a.t.Errorf("%v: exit status %d, want %d and %q\n%s", args, got, status, want, &p.out)
	}
	return p.out.String()
}

// Commands go through the daemon where one runs. It alone knows its pins.
func TestCommandsThroughTheDaemon(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ postgres, fleet bool }{"sqlite": {}, "postgres": {postgres: true}, "fleet": {true, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, extra := "", "pins: {ttl: 30s}"
			if c.postgres {
				url = pgtest.Database(t)
				pgtest.Exec(t, pgtest.Connect(t, url), appSchema)
			}
			if c.fleet {
				extra = "pins: {ttl: 10m}\n    fleet: true"
			}
			a := writeSocketApp(t, url, extra)
			d := a.daemon()
			a.wants(0, "\n  staged      1\n", "sweep")
			longest := "30s"
			if c.fleet {
				longest = "9m"
			}
			if got, want := a.wants(0, "", "pins", "add", "parts", "2", "3", "--owner", "me", "--ttl", longest),
				"pinned, and there: 2\npinned; no such blob yet: 3\n"; got != want {
				t.Errorf("printed %q, want %q", got, want)
			}
			a.wants(0, `{"key":"1","exists":true}`, "pins", "add", "--json", "parts", "1", "--owner", "you")
			if c.fleet {
				a.wants(0, "  me                    2\n", "pins", "list", "parts", "--owner", "me")
				a.wants(0, `{"key":"1","key_hex":"31","owner":"you","owner_hex":"796f75","expires_in_ms":`, "pins", "list", "--json", "parts")
				a.wants(0, "1 pinned", "sweep")
				a.wants(0, "removed 1 pin of pool parts; not there: 1", "pins", "remove", "parts", "3", "4", "--owner", "me")
			}
			a.wants(0, "dropped 1 key from the window of pool parts; not in it: 1\n", "window", "drop", "parts", "2", "9")
			a.wants(0, `{"pool":"parts","dropped":0}`, "window", "drop", "--json", "parts", "--all")
			a.wants(0, "looked at in", "sweep", "--dry-run", "--override", "empty_source")
			a.wants(2, "isn't hex", "pins", "add", "parts", `\xzz`, "x", "--owner", "me")
			a.wants(2, "impossible pin", "pins", "add", "parts", "1", "--owner", "me", "--ttl", "48h")
			d.signal(syscall.SIGTERM)
			if got := d.status(); got != 0 {
				t.Errorf("run: exit status %d\n%s", got, &d.out)
			}
			if _, err := os.Lstat(a.socket); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the socket is there still: %v", err)
			}
			if !strings.Contains(d.out.String(), `"message":"swept"`) {
				t.Errorf("it didn't sweep:\n%s", &d.out)
			}
		})
	}
}

// After its start a daemon deletes nothing before pins from before it have run
// out; without one nothing is deleted at all, and it is said what to do.
func TestNothingIsDeletedBeforePinsHaveRunOut(t *testing.T) {
	t.Parallel()
	a := writeSocketApp(t, "", "pins: {ttl: 1s}")
	a.wants(0, "\n  staged      1\n", "sweep")
	a.wants(0, "start it (gc-agent run)", "sweep")
	a.wants(1, "none answers on "+a.socket+"; start it with gc-agent run", "pins", "list", "parts")
	a.wants(1, "none answers", "pins", "add", "parts", "2", "--owner", "me")
	d := a.daemon()
	d.until("what is dead is deleted", func() bool { a.wants(0, "", "sweep"); return query(t, a.dir, `SELECT count(*) FROM parts`) == 1 })
	d.signal(os.Interrupt)
	if got := d.status(); got != 0 {
		t.Errorf("run: exit status %d\n%s", got, &d.out)
	}

	a = writeSocketApp(t, "", "pins: {ttl: 1h}")
	a.daemon()
	a.wants(0, "", "sweep")
	var rep struct{ Detail string }
	if err := json.Unmarshal([]byte(a.wants(0, "", "sweep", "--json")), &rep); err != nil || !strings.Contains(rep.Detail, "may be live until") {
		t.Errorf("detail %q, err = %v", rep.Detail, err)
	}
	a.wants(0, "held up, and what is overdue is left", "sweep", "--dry-run")
	a.wants(0, "pool parts has no live pins\n", "pins", "list", "parts")
}

// A daemon of another configuration is not asked to do what this one says.
func TestDaemonOfAnotherConfiguration(t *testing.T) {
	t.Parallel()
	a := writeSocketApp(t, "", "pins: {ttl: 1s}")
	a.daemon()
	a.configure("sqlite:app.db", "pins: {ttl: 2s}")
	for _, args := range [][]string{{"sweep"}, {"window", "drop", "parts", "--all"}, {"pins", "list", "parts"}, {"pins", "add", "parts", "1", "--owner", "me"}} {
		if got, want := a.wants(2, "", args...), "gc-agent: the daemon runs with another configuration of this pool: restart it, or give the command the daemon's configuration\n"; got != want {
			t.Errorf("%v: printed %q", args, got)
		}
	}
	a.wants(2, `there is no pool "nope"`, "pins", "list", "nope")
	// A second daemon leaves the socket to the first.
	a.wants(1, "control socket "+a.socket+": another daemon has it", "run")
	a.wants(0, "the window of pool parts is empty", "window", "list", "parts") // which needs no daemon
}

// A daemon that was killed leaves its socket behind; the next one takes its place.
func TestDaemonAfterAKill(t *testing.T) {
	t.Parallel()
	a := writeSocketApp(t, "", "pins: {ttl: 1s}")
	d := a.daemon()
	info, err := os.Lstat(a.socket)
	if err != nil || info.Mode() != fs.ModeSocket|0o660 {
		t.Fatalf("mode %v, err = %v", info, err)
	}
	d.signal(syscall.SIGKILL)
	d.status()
	if _, err := os.Lstat(a.socket); err != nil {
		t.Fatal(err)
	}
	a.wants(1, "none answers", "pins", "list", "parts")
	a.daemon()
	a.wants(0, "no live pins", "pins", "list", "parts")
}

// Who has no right to ask the daemon is told so, and sweeps nothing beside it.
func TestNoRightToTheSocket(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root can be somebody else")
	}
	a := writeSocketApp(t, "", "pins: {ttl: 1s}")
	a.daemon()
	program, err := exec.LookPath("gc-agent")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{a.dir, filepath.Join(a.dir, "config.yaml"), filepath.Dir(filepath.Dir(program)), filepath.Dir(program)} {
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	p := startAs(t, a.dir, &syscall.Credential{Uid: 65534, Gid: 65534}, "sweep")
	if got := p.status(); got != 1 || !strings.Contains(p.out.String(), "this user may not connect to the daemon's control socket "+a.socket) {
		t.Errorf("exit status %d\n%s", got, &p.out)
	}
}

// The first signal asks the daemon to stop the sweep, and the report is printed.
func TestSignalStopsTheDaemonsSweep(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn := pgtest.Connect(t, url)
	pgtest.Exec(t, conn, appSchema)
	a := writeSocketApp(t, url, "fleet: true\n    limits: {settle_timeout: 1h}")
	d := a.daemon()
	a.wants(0, "staged      1", "sweep")
	pgtest.Exec(t, conn, "BEGIN")
	pgtest.Exec(t, conn, "INSERT INTO msgs VALUES (1)") // which the batch waits for
	p := start(t, a.dir, "sweep")
	watch := pgtest.Connect(t, url)
	p.until("the daemon waits for the writer", func() bool {
		var n int
		err := watch.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'gc-agent' AND query ~ 'backend_xid' AND state = 'idle'`).Scan(&n)
		return err == nil && n > 0
	})
	p.signal(os.Interrupt)
	if got := p.status(); got != 1 || !strings.Contains(p.out.String(), "stopped on request") {
		t.Errorf("exit status %d\n%s", got, &p.out)
	}
	pgtest.Exec(t, conn, "COMMIT")
	d.signal(os.Interrupt)
	if got := d.status(); got != 0 {
		t.Errorf("run: exit status %d\n%s", got, &d.out)
	}
}

// Pins of a fleet are in the database, daemon or not.
func TestPinsWithoutADaemon(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	pgtest.Exec(t, pgtest.Connect(t, url), appSchema)
	a := writeSocketApp(t, url, "fleet: true")
	a.wants(1, "run gc-agent schema ensure", "pins", "add", "parts", "2", "--owner", "me")
	a.wants(0, "", "schema", "ensure")
	a.wants(0, "pool parts has no live pins\n", "pins", "list", "parts")
	a.wants(0, "pinned, and there: 2\n", "pins", "add", "parts", "2", "--owner", "me", "--ttl", "10m")
	a.wants(0, `"owner":"me"`, "pins", "list", "--json", "parts")
	a.wants(0, "no live pins", "pins", "list", "parts", "--owner", "you")
	a.wants(0, "staged      0", "sweep")
	a.wants(0, `{"pool":"parts","removed":1}`, "pins", "remove", "--json", "parts", "2", "--owner", "me")
	a.wants(2, `--ttl "x"`, "pins", "add", "parts", "2", "--owner", "me", "--ttl", "x")
	a.wants(2, "impossible pin", "pins", "add", "parts", "2", "--owner", "me", "--ttl", "48h")
	a.wants(2, `required flag(s) "owner" not set`, "pins", "add", "parts", "2")
	a.wants(2, "pins remove takes the name of a pool, then keys", "pins", "remove", "parts", "--owner", "me")

	b := writeApp(t, "0") // which has no place for pins
	p := start(t, b, "pins", "list", "parts")
	if got := p.status(); got != 2 || !strings.Contains(p.out.String(), "it has no pins: set fleet: true") {
		t.Errorf("exit status %d\n%s", got, &p.out)
	}
}
