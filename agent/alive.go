package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
)

// prober finds out whether one owner of pins is alive. It belongs to one
// goroutine at a time.
type prober struct {
	cfg     config.PinOwner
	timeout time.Duration

	dead, asked bool // what the last answer was, and whether there was one
	process     process
}

// longestProbe leaves most of a renewal's time to the renewal.
const longestProbe = 3 * time.Second

func newProber(cfg config.PinOwner, ttl time.Duration) *prober {
	return &prober{cfg: cfg, timeout: min(ttl/10, longestProbe)}
}

// ask returns nil if the owner is alive, and otherwise what speaks against it.
// What can't be found out in time does.
func (p *prober) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	switch alive := p.cfg.Alive; {
	case alive.Always:
		return nil
	case alive.HTTP.Reveal() != "":
		return askHTTP(ctx, alive.HTTP.Reveal())
	case alive.Unix != "":
		return askUnix(ctx, alive.Unix)
	case alive.PIDFile != "":
		return p.askProcess(alive.PIDFile)
	default:
		return errors.New("there is no way to find out")
	}
}

// askHTTP: errors of the client quote the URL, which may hold credentials.
func askHTTP(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return errors.New("its URL isn't one")
	}
	client := http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		// A connection that was kept says nothing about who takes new ones.
		Transport: &http.Transport{DisableKeepAlives: true, Proxy: http.ProxyFromEnvironment},
	}
	resp, err := client.Do(req)
	if err != nil {
		return errors.New("its URL can't be reached")
	}
	// Only its status counts.
	_ = resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("its URL answered %s", resp.Status)
	}
	return nil
}

func askUnix(ctx context.Context, path string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	// That there was one is all that counts.
	_ = conn.Close()
	return nil
}

// process is whom a pid file has named.
type process struct {
	pid     int
	written time.Time
	started string // as the kernel counts it; empty where it doesn't say
}

// askProcess: where the process of an unchanged file has another start than at
// the last look, its owner has ended and the number was given away again. At the
// first look that can't be seen, and only keeps blobs for longer.
func (p *prober) askProcess(path string) error {
	now, err := readProcess(path)
	if err != nil {
		return err
	}
	if was := p.process; was.pid == now.pid && was.written.Equal(now.written) && was.started != now.started && was.started != "" && now.started != "" {
		return fmt.Errorf("the process %d of %s is another one by now", now.pid, path)
	}
	p.process = now
	return nil
}

// readProcess returns the process that a pid file names, if it runs.
func readProcess(path string) (p process, err error) {
	file, err := os.Open(path)
	if err != nil {
		return p, err
	}
	// It was only read.
	defer func() { _ = file.Close() }()
	var text [32]byte
	n, err := file.Read(text[:])
	if err != nil {
		return p, fmt.Errorf("%s holds no process id", path)
	}
	if p.pid, err = strconv.Atoi(strings.TrimSpace(string(text[:n]))); err != nil || p.pid <= 0 {
		return p, fmt.Errorf("%s holds no process id", path)
	}
	info, err := file.Stat()
	if err != nil {
		return p, err
	}
	p.written = info.ModTime()
	// Somebody else's process is one, too.
	if err := syscall.Kill(p.pid, 0); err != nil && !errors.Is(err, syscall.EPERM) {
		return p, fmt.Errorf("the process %d of %s: %w", p.pid, path, err)
	}
	var state string
	if state, p.started = readStat(p.pid); state == "Z" || state == "X" {
		return p, fmt.Errorf("the process %d of %s has ended", p.pid, path)
	}
	return p, nil
}

// readStat returns a process's state and when it started; both are empty where
// the kernel doesn't say.
func readStat(pid int) (state, started string) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", ""
	}
	// The second field is the name, in parentheses, of whatever characters.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	const stateAt, startedAt = 0, 19 // fields 3 and 22 of proc_pid_stat(5)
	if len(fields) <= startedAt {
		return "", ""
	}
	return fields[stateAt], fields[startedAt]
}
