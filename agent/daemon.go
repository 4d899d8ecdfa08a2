package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/alkblobs/gc-agent/internal/finding"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"
)

const (
	// stopWithin is how long a batch may still take once the daemon is told to stop.
	stopWithin = 9 * time.Second
	firstWait  = time.Second
	mostWait   = time.Minute
)

// Run keeps every pool on its schedule until stop is closed or ctx ends. Closing
// stop lets the batches at hand finish, for a few seconds at most; the end of ctx
// cuts them off, which loses nothing. It returns nil either way.
func (a *Agent) Run(ctx context.Context, stop <-chan struct{}) error {
	a.StartPins(ctx)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stopped := make(chan struct{})
	go func() {
		select {
		case <-stop:
			// A timer of its own: a test's clock must not decide how long a stop takes.
			if err := (SystemClock{}).Sleep(ctx, stopWithin); err == nil {
				cancel()
			}
		case <-stopped:
		}
	}()
	var group errgroup.Group
	for _, p := range a.pools {
		d := daemon{agent: a, pool: p, stop: stop}
		group.Go(func() error { return d.run(ctx) })
		if p.local != nil {
			group.Go(func() error { return d.keepMark(ctx) })
		}
		if p.renewal != nil {
			group.Go(func() error { return d.renewPins(ctx) })
		}
	}
	err := group.Wait()
	close(stopped)
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errStopped) {
		return nil
	}
	return err
}

// daemon keeps one pool on its schedule. One goroutine a pool means that two
// sweeps of it never meet.
type daemon struct {
	agent *Agent
	pool  *Pool
	stop  <-chan struct{}
}

func (d *daemon) run(ctx context.Context) error {
	if err := d.greet(ctx); err != nil {
		return err
	}
	for {
		now := d.pool.clock.Now()
		next := d.pool.cfg.Schedule.Next(now)
		if next.IsZero() {
			d.pool.log.Warn().Str("schedule", d.pool.cfg.Schedule.Spec).Msg("the schedule never comes up; the pool is not swept")
			return nil
		}
		if err := d.sleep(ctx, next.Sub(now)); err != nil {
			return err
		}
		// What goes wrong within a sweep is logged, and the next tick tries again.
		if _, err := d.agent.Sweep(ctx, d.pool, SweepOptions{Stop: d.stop}); errors.Is(err, errNotBegun) {
			return err
		}
	}
}

// greet looks at the pool once, so that what is wrong is said at the start and
// not at the first sweep, and waits for a database that isn't up yet.
func (d *daemon) greet(ctx context.Context) error {
	for wait := firstWait; ; wait = min(2*wait, mostWait) {
		check, err := d.pool.Check(ctx)
		if err == nil {
			d.logCheck(check)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		d.pool.log.Error().Err(err).Int64("retry_in_ms", wait.Milliseconds()).Msg("the pool can't be looked at yet")
		if err := d.sleep(ctx, wait); err != nil {
			return err
		}
	}
}

func (d *daemon) logCheck(check PoolCheck) {
	for _, f := range check.Findings {
		level := zerolog.ErrorLevel
		if f.Severity == finding.Warning {
			level = zerolog.WarnLevel
		}
		d.pool.log.WithLevel(level).Str("path", f.Path).Msg(f.Message)
	}
	for _, o := range check.Against {
		d.pool.log.Warn().Str("path", o.Path).Str("cause", string(o.Cause)).Msg(o.Message)
	}
	d.pool.log.Info().Str("mode", check.Mode).Str("schedule", check.Schedule).Time("next", check.Next).
		Int64("window_ms", check.Window.Milliseconds()).Bool("ready", !check.Bad()).Msg("pool is on its schedule")
}

// StartPins says that this process is the daemon, which from now on gives pins and
// knows them all. Until the longest of those that one before it may have given has
// run out, counted from when it has the mark of who keeps a pool's pins, nothing is
// deleted in the pools whose pins are in memory. Run calls it; whoever serves a
// control socket calls it before the first request. It takes the marks, which Close
// gives back; one that it can't have is tried for again by whatever needs it. It may
// be repeated.
func (a *Agent) StartPins(ctx context.Context) {
	var group sync.WaitGroup
	for _, p := range a.pools {
		if p.local == nil {
			continue
		}
		p.local.start()
		group.Go(func() {
			// What is wrong was logged.
			_, _ = p.keepPins(ctx, true)
		})
	}
	group.Wait()
}

// errNotBegun is the error of a sweep that found no place before it was to end.
var errNotBegun = errors.New("the sweep wasn't begun")

// Sweep sweeps a pool once it is one of max_concurrent_sweeps, and logs how it
// ended. See Pool.Sweep.
func (a *Agent) Sweep(ctx context.Context, p *Pool, opts SweepOptions) (rep Report, err error) {
	select {
	case a.slots <- struct{}{}:
	case <-opts.Stop:
		return rep, fmt.Errorf("%w: %w", errNotBegun, errStopped)
	case <-ctx.Done():
		return rep, fmt.Errorf("%w: %w", errNotBegun, ctx.Err())
	}
	defer func() { <-a.slots }()
	rep, err = p.Sweep(ctx, opts)
	logSweep(&p.log, rep, err)
	if rep.Skipped() {
		p.starved.log(&p.log, p.clock.Now())
	}
	return rep, err
}

// logSweep logs how a sweep ended: what nobody has to look at is no warning.
func logSweep(log *zerolog.Logger, rep Report, err error) {
	switch {
	case err != nil:
		logReport(log.Error().Err(err), rep).Msg("sweep failed; the next tick tries again")
	case rep.Skipped():
		logReport(log.Info().Str("aborted", string(*rep.Aborted)), rep).Msg("sweep skipped: another agent is sweeping this pool")
	case rep.Aborted != nil:
		logReport(log.Warn().Str("aborted", string(*rep.Aborted)), rep).Msg("sweep aborted: nothing was deleted")
	case rep.HeldUp():
		logReport(log.Warn(), rep).Msg("sweep held up: what is overdue is left for the next one")
	case rep.Stopped():
		logReport(log.Info(), rep).Msg("sweep stopped")
	case rep.DryRun:
		logReport(log.Info(), rep).Msg("swept dry: nothing was changed")
	default:
		logReport(log.Info(), rep).Msg("swept")
	}
}

// Skipped says whether the sweep left everything to another agent's.
func (r Report) Skipped() bool { return r.Aborted != nil && *r.Aborted == CauseSweeperLock }

// HeldUp says whether overdue keys were left for the next sweep, for the reason
// that Detail gives.
func (r Report) HeldUp() bool { return r.Aborted == nil && r.Detail != "" && !r.Stopped() }

// Stopped says whether the sweep ended early because it was told to.
func (r Report) Stopped() bool { return r.Aborted == nil && r.Detail == errStopped.Error() }

func logReport(e *zerolog.Event, rep Report) *zerolog.Event {
	return e.Str("mode", rep.Mode).Bool("dry_run", rep.DryRun).Str("detail", rep.Detail).
		Int64("scanned", rep.Scanned).Int64("referenced", rep.Referenced).Int64("foreign", rep.Foreign).
		Int64("candidates_staged", rep.CandidatesStaged).Int64("unstaged", rep.Unstaged).
		Int64("overdue", rep.Overdue).Int64("deleted", rep.Deleted).Int64("cancelled", rep.Cancelled).
		Interface("cancelled_by", rep.CancelledBy).Int64("bytes_reclaimed", rep.BytesReclaimed).
		Int64("longest_tx_ms", rep.LongestTxMS).Int64("took_ms", rep.FinishedAt.Sub(rep.StartedAt).Milliseconds())
}

// sleep waits for dur on the pool's clock, less when the daemon stops.
func (d *daemon) sleep(ctx context.Context, dur time.Duration) error {
	ctx, end := d.running(ctx)
	defer end()
	if err := d.pool.clock.Sleep(ctx, dur); err != nil {
		return context.Cause(ctx)
	}
	return nil
}

// running returns a context that ends when the daemon stops, with errStopped as
// its cause; end gives it back.
func (d *daemon) running(ctx context.Context) (_ context.Context, end func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		select {
		case <-d.stop:
			cancel(errStopped)
		case <-done:
		}
	}()
	return ctx, func() {
		close(done)
		cancel(nil)
	}
}
