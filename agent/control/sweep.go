package control

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/words"
)

// SweepLine is a line of the stream that answers a sweep: how far it is, or, on
// the last, what it did.
type SweepLine struct {
	Progress *SweepProgress `json:"progress,omitempty"`
	Report   *agent.Report  `json:"report,omitempty"`
	// Error is what kept the sweep from its end; the report counts what was done
	// before.
	Error string `json:"error,omitempty"`
	// Misconfigured is why the pool was refused for its configuration.
	Misconfigured []Finding `json:"misconfigured,omitempty"`
}

// SweepProgress is how far a sweep has come.
type SweepProgress struct {
	Phase string `json:"phase"`
	Done  int64  `json:"done"`
}

// Finding is one thing that is wrong, and where in the configuration.
type Finding struct {
	Path    string `json:"path"`
	Message string `json:"message"`
}

// StopAnswer says how many sweeps, begun through the socket, were told to stop.
type StopAnswer struct {
	Stopping int `json:"stopping"`
}

// progressEvery is how often a stream says how far the sweep is.
const progressEvery = 100 * time.Millisecond

// sweeping is a sweep that was begun through the socket.
type sweeping struct {
	once sync.Once
	stop chan struct{}
}

func (sw *sweeping) end() { sw.once.Do(func() { close(sw.stop) }) }

// sweep sweeps a pool, and streams. When whoever asked goes away the sweep stops
// after the batch at hand.
func (s *Server) sweep(w http.ResponseWriter, r *http.Request) {
	p, body, err := s.begin(w, r)
	var req SweepRequest
	if err == nil {
		err = decode(body, &req)
	}
	opts := agent.SweepOptions{DryRun: req.DryRun}
	if err == nil {
		opts.Override, err = parseBrakes(req.Override)
	}
	if err != nil {
		s.fail(w, err)
		return
	}
	sw := &sweeping{stop: make(chan struct{})}
	defer s.enter(p.Name(), sw)()
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	go s.watch(ctx, r.Context(), sw, cancel)
	lines := &stream{w: w, broken: sw.end}
	w.Header().Set("Content-Type", "application/x-ndjson")
	opts.Stop, opts.Progress = sw.stop, lines.progress
	rep, err := s.opts.Agent.Sweep(ctx, p, opts)
	rep.Pool = p.Name()
	lines.write(s.lastLine(rep, err))
}

// watch tells a sweep to stop, and cuts it off, when it is time to.
func (s *Server) watch(ctx, client context.Context, sw *sweeping, cut func()) {
	gone, stopping := client.Done(), s.stopping
	for {
		select {
		case <-gone:
			sw.end()
			gone = nil
		case <-stopping:
			sw.end()
			stopping = nil
		case <-s.cut:
			cut()
			return
		case <-ctx.Done():
			return
		}
	}
}

func (s *Server) lastLine(rep agent.Report, err error) SweepLine {
	last := SweepLine{Report: &rep}
	if err == nil {
		return last
	}
	last.Error = words.OneLine(s.opts.Explain(err).Error())
	var misconfigured *agent.MisconfiguredError
	if errors.As(err, &misconfigured) {
		for _, f := range misconfigured.Lines() {
			last.Misconfigured = append(last.Misconfigured, Finding{f.Path, f.Message})
		}
	}
	return last
}

// err is the error that the last line of a stream tells of, nil for none.
func (l SweepLine) err() error {
	switch {
	case len(l.Misconfigured) > 0:
		misconfigured := &agent.MisconfiguredError{Pool: l.Report.Pool}
		for _, f := range l.Misconfigured {
			misconfigured.Findings.Add(finding.Misconfigured, f.Path, "%s", f.Message)
		}
		return misconfigured
	case l.Error != "":
		return errors.New(l.Error)
	}
	return nil
}

// enter notes a sweep for as long as it runs.
func (s *Server) enter(pool string, sw *sweeping) (leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sweeps[pool] == nil {
		s.sweeps[pool] = map[*sweeping]struct{}{}
	}
	s.sweeps[pool][sw] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.sweeps[pool], sw)
	}
}

func (s *Server) stopSweep(_ context.Context, p *agent.Pool, r request) (any, error) {
	if err := decode(r.body, &struct{}{}); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for sw := range s.sweeps[p.Name()] {
		sw.end()
	}
	return StopAnswer{len(s.sweeps[p.Name()])}, nil
}

// stream writes lines, each within a time of its own. It belongs to one goroutine.
type stream struct {
	w      http.ResponseWriter
	broken func()
	last   time.Time
	failed bool
}

func (l *stream) progress(p agent.Progress) {
	now := agent.SystemClock{}.Now() // of the connection, not of the sweep
	if now.Sub(l.last) < progressEvery {
		return
	}
	l.last = now
	l.write(SweepLine{Progress: &SweepProgress{p.Phase, p.Done}})
}

func (l *stream) write(line SweepLine) {
	if l.failed {
		return
	}
	control := http.NewResponseController(l.w)
	err := errors.Join(
		control.SetWriteDeadline(agent.SystemClock{}.Now().Add(lineTimeout)),
		json.NewEncoder(l.w).Encode(line), control.Flush())
	if err != nil {
		// Nobody reads it: what was begun for them stops.
		l.failed = true
		l.broken()
	}
}
