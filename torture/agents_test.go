package torture_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/bench"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// agentProcess is one of the agents: a process that is started again whenever it
// has ended. Each connects as a role of its own, so that its sessions can be told.
type agentProcess struct {
	run    *run
	name   string
	role   string
	args   []string
	daemon bool

	mu      sync.Mutex
	process *os.Process // nil between two
	killed  bool        // the process at hand, by the torture
	peak    float64     // of memory, in MiB, of any so far
}

// restart is how long an agent that was killed stays away: another has the time to
// take over.
const restart = 300 * time.Millisecond

// between is how long a command that has swept waits before it sweeps again: a
// lease that is always held is only ever refused.
const between = 100 * time.Millisecond

func (r *run) newAgent(name string, args ...string) *agentProcess {
	role, url := pgtest.Role(r.t, r.url, "SUPERUSER")
	path := filepath.Join(r.t.TempDir(), name+".yaml")
	if err := os.WriteFile(path, []byte(configuration(url, r.pools)), 0o600); err != nil {
		r.t.Fatal(err)
	}
	return &agentProcess{run: r, name: name, role: role, args: append(args, "--config", path), daemon: args[0] == "run"}
}

// keep keeps the agent running until stop is closed, and then ends it.
func (p *agentProcess) keep(ctx context.Context, stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		if err := p.once(ctx, stop); err != nil {
			return fmt.Errorf("agent %s: %w", p.name, err)
		}
	}
}

// once runs the agent to its end.
func (p *agentProcess) once(ctx context.Context, stop <-chan struct{}) error {
	cmd := exec.CommandContext(ctx, string(p.run.binary), p.args...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.started(cmd.Process)
	ended := make(chan struct{})
	go p.endWith(cmd.Process, stop, ended)
	var last tail
	var reading sync.WaitGroup
	reading.Go(func() { p.read(stdout, &last) })
	reading.Go(func() { p.read(stderr, &last) })
	reading.Wait()
	err = cmd.Wait()
	close(ended)
	if p.ended() {
		return pause(ctx, restart)
	}
	if err := p.judge(err, stop, &last); err != nil {
		return err
	}
	return pause(ctx, between)
}

// endWith ends a daemon when the run ends: gently, which it must heed.
func (p *agentProcess) endWith(process *os.Process, stop, ended <-chan struct{}) {
	select {
	case <-ended:
	case <-stop:
		// A process that has just ended by itself has nothing to be told.
		_ = process.Signal(syscall.SIGTERM)
	}
}

// judge says whether a process that nobody killed may end as it did.
func (p *agentProcess) judge(err error, stop <-chan struct{}, last *tail) error {
	var exit *exec.ExitError
	switch stopping := closed(stop); {
	case err == nil && (!p.daemon || stopping):
		return nil
	case !p.daemon && errors.As(err, &exit) && (exit.ExitCode() == 1 || exit.ExitCode() == 3):
		return nil // a sweep failed or aborted, which its report has said
	}
	return errors.Join(errors.New("ended by itself"), err, errors.New(last.String()))
}

func (p *agentProcess) started(process *os.Process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.process, p.killed = process, false
}

// ended says whether the torture killed the process.
func (p *agentProcess) ended() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.process = nil
	return p.killed
}

// signal sends a signal to the process at hand, if there is one.
func (p *agentProcess) signal(signal syscall.Signal) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process == nil {
		return false
	}
	p.measure()
	p.killed = p.killed || signal == syscall.SIGKILL
	// It may have ended just now, and is about to be started again.
	return p.process.Signal(signal) == nil
}

// look measures the process at hand.
func (p *agentProcess) look() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process != nil {
		p.measure()
	}
}

func (p *agentProcess) measure() {
	// A process that has ended, or a system without /proc, has no peak to read.
	if mib, err := bench.PeakMemory(p.process.Pid); err == nil {
		p.peak = max(p.peak, mib)
	}
}

// event is a line about a sweep: a report of the command's, or of a daemon's log,
// which has other times.
type event struct {
	agent.Report
	Level   string `json:"level"`
	Message string `json:"message"`
	Error   string `json:"error"`
	TookMS  *int64 `json:"took_ms"`
}

// began is when the sweep began.
func (e event) began() time.Time {
	if !e.StartedAt.IsZero() {
		return e.StartedAt
	}
	return time.Now().Add(-time.Duration(*e.TookMS) * time.Millisecond)
}

// read takes in what an agent prints, until it has ended.
func (p *agentProcess) read(r io.Reader, last *tail) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		last.add(lines.Text())
		var e event
		if json.Unmarshal(lines.Bytes(), &e) == nil && (e.TookMS != nil || !e.StartedAt.IsZero()) {
			p.run.swept(p, e)
		}
	}
}

// tail is the end of what a process has printed.
type tail struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *tail) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.b.Len() > 8<<10 {
		l.b.Next(l.b.Len() / 2)
	}
	l.b.WriteString(line + "\n")
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
