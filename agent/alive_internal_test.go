package agent

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
)

func proberOf(alive config.Alive, ttl time.Duration) *prober {
	return newProber(config.PinOwner{Name: "me", Alive: alive}, ttl)
}

// wantAnswer asks, and looks for a part of what speaks against the owner; none
// means that it is alive.
func wantAnswer(t *testing.T, p *prober, part string) {
	t.Helper()
	err := p.ask(t.Context())
	if (err == nil) != (part == "") || err != nil && !strings.Contains(err.Error(), part) {
		t.Errorf("%+v: %v, want %q", p.cfg.Alive, err, part)
	}
}

func TestAliveByHTTP(t *testing.T) {
	t.Parallel()
	hung := make(chan struct{})
	mux := http.NewServeMux()
	for path, status := range map[string]int{"/ok": 200, "/accepted": 202, "/broken": 500, "/moved": 302, "/absent": 404} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/ok")
			w.WriteHeader(status)
		})
	}
	mux.HandleFunc("/hangs", func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-hung:
		case <-r.Context().Done():
		}
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(hung) })
	base := strings.Replace(server.URL, "http://", "http://user:secret@", 1)
	for path, part := range map[string]string{
		"/ok": "", "/accepted": "", "/broken": "500", "/moved": "302", "/absent": "404", "/hangs": "can't be reached",
	} {
		p := proberOf(config.Alive{HTTP: config.NewSecret(base + path)}, time.Second)
		wantAnswer(t, p, part)
		if err := p.ask(t.Context()); err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error holds credentials: %v", path, err)
		}
	}
	server.Close()
	p := proberOf(config.Alive{HTTP: config.NewSecret(base + "/ok")}, time.Minute)
	wantAnswer(t, p, "can't be reached")
	if p.timeout > 3*time.Second {
		t.Errorf("it may take %s", p.timeout)
	}
}

func TestAliveByUnixSocket(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	p := proberOf(config.Alive{Unix: path}, time.Minute)
	wantAnswer(t, p, "no such file")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	wantAnswer(t, p, "")
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	wantAnswer(t, p, "refused")
}

func TestAliveByPIDFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "pid")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p := proberOf(config.Alive{PIDFile: path}, time.Minute)
	wantAnswer(t, p, "no such file")
	for _, text := range []string{"", "\n", "me", "0", "-1", "12 13", "99999999999999999999", strings.Repeat("1", 40)} {
		write(text)
		wantAnswer(t, p, "holds no process id")
	}
	cmd := exec.Command("cat")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	write(fmt.Sprintf(" %d\n", cmd.Process.Pid))
	wantAnswer(t, p, "")
	wantAnswer(t, p, "")
	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	// It is a zombie until somebody has waited for it.
	for p.ask(t.Context()) == nil {
		if err := t.Context().Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Kill(cmd.Process.Pid, 0); err != nil {
		t.Errorf("it isn't a zombie: %v", err)
	}
	wantAnswer(t, p, "has ended")
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	wantAnswer(t, p, "no such process")
	// The first process, somebody else's unless this is run as root.
	write("1")
	wantAnswer(t, p, "")
}

// The number of a process that has ended may be given to another one.
func TestAliveByRecycledPID(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "pid")
	if err := os.WriteFile(path, fmt.Append(nil, os.Getpid()), 0o600); err != nil {
		t.Fatal(err)
	}
	p := proberOf(config.Alive{PIDFile: path}, time.Minute)
	wantAnswer(t, p, "")
	p.process.started = "1" // as if another one had been seen
	wantAnswer(t, p, "is another one by now")
	wantAnswer(t, p, "is another one by now")
	// An owner that starts again writes the file again.
	if err := os.Chtimes(path, time.Time{}, time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	wantAnswer(t, p, "")
}

func TestAliveAlways(t *testing.T) {
	t.Parallel()
	wantAnswer(t, proberOf(config.Alive{Always: true}, time.Minute), "")
	wantAnswer(t, proberOf(config.Alive{}, time.Minute), "no way to find out")
}
