package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"

	"github.com/rs/zerolog"
)

// Pool is one application store under collection.
type Pool struct {
	cfg       config.Pool
	host      host
	elsewhere []func(context.Context) (oracle, error)
	pace      pace
	clock     Clock
	log       zerolog.Logger
	failures  failures
	starved   starved
	// firstOnHost says that no pool before it has its window in the same database.
	firstOnHost bool
	hostClock   *hostClock // of a Postgres host, else nil
	renewal     *renewal   // where the agent renews pins of the pool, else nil
	without     omit
	local       *localPins // nil where no pin is in memory

	mu   sync.Mutex
	kind blob.Kind // of the keys; known once the tiers were resolved
}

// Name returns the pool's name.
func (p *Pool) Name() string { return p.cfg.Name }

// Sweep sweeps the pool once. Another sweep of the same pool, in this process
// or elsewhere, makes it abort with CauseSweeperLock. The report is good even
// with an error: it counts what was done before the fault.
func (p *Pool) Sweep(ctx context.Context, opts SweepOptions) (rep Report, err error) {
	defer p.recovered(&err)
	s := &sweep{pool: p, opts: opts, clock: p.clock, log: p.log, pace: p.pace}
	return s.run(ctx)
}

// recovered turns a panic into an error: one pool's trouble must not end the
// sweeps of the others. The transaction at hand was rolled back on the way.
func (p *Pool) recovered(err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("pool %s: internal error, please report it: %v", p.cfg.Name, r)
	}
}

// setKind notes the kind of the pool's keys once the tiers are resolved.
func (p *Pool) setKind(kind blob.Kind) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kind = kind
}

// Kind returns the kind of the pool's keys, 0 before anything resolved it.
func (p *Pool) Kind() blob.Kind {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.kind
}

func (p *Pool) display(key blob.Key) string { return p.Kind().Display(key) }

// validKeys makes a window row that can't be a key of the pool fatal: somebody
// else writes into this window, or the pool's key column became another one.
func (p *Pool) validKeys(keys []blob.Key) error {
	for _, key := range keys {
		if err := p.Kind().Valid(key); err != nil {
			return fmt.Errorf("the window of pool %s holds what it can't: %w; see `gc-agent window drop`", p.cfg.Name, err)
		}
	}
	return nil
}

const protectTimeout = 10 * time.Second

// protect asks the hook whether this sweep may go on. Anything but a 2xx answer
// means no.
func (p *Pool) protect(ctx context.Context) error {
	url := p.cfg.Protect.HTTP.Reveal()
	if url == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, protectTimeout)
	defer cancel()
	// Errors of the client quote the URL, which may hold credentials.
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return errors.New("the protect hook's URL isn't one")
	}
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		return errors.New("the protect hook can't be reached")
	}
	// Only its status counts.
	_ = resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("the protect hook answered %s", resp.Status)
	}
	return nil
}

// failures remembers how often a key's delete was rejected in a row, so that
// the wait grows. It is memory alone: a restart tries everything again, sooner.
type failures struct {
	mu     sync.Mutex
	counts map[blob.Key]uint
}

const (
	firstRetry  = time.Minute
	longestWait = 24 * time.Hour
	// mostFailures bounds the memory; beyond it a key waits for the first retry.
	mostFailures = 10_000
)

// next returns how long the key waits after one more failure.
func (f *failures) next(key blob.Key) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d := firstRetry << min(f.counts[key], 16); d < longestWait {
		return d
	}
	return longestWait
}

func (f *failures) add(key blob.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.counts == nil {
		f.counts = map[blob.Key]uint{}
	}
	if _, known := f.counts[key]; known || len(f.counts) < mostFailures {
		f.counts[key]++
	}
}

func (f *failures) forget(key blob.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.counts, key)
}
