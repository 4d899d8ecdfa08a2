package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"

	"github.com/rs/zerolog"
)

// SweepOptions are what one sweep may be told.
type SweepOptions struct {
	// DryRun writes nothing and reports what would have been done.
	DryRun bool
	// Override lets this one sweep pass the brakes that it names.
	Override []config.Brake
	// Stop, when it is closed, ends the sweep after the batch at hand. What was
	// done stays done and is reported. Nil never stops.
	Stop <-chan struct{}
	// Progress is called after every page and batch. It may be nil.
	Progress func(Progress)
	// Decided is called for every overdue key after its batch was committed. It may
	// be nil.
	Decided func(Decision)
}

// Progress is how far a sweep has come.
type Progress struct {
	Pool  string
	Phase string // mark, execute or stage
	// Done counts keys of the phase so far.
	Done int64
}

// Decision is what became of one overdue key.
type Decision struct {
	Key   blob.Key
	Cause string
	// Detail names the source, the error or the like behind the cause.
	Detail string
}

// sweep is one sweep of one pool.
type sweep struct {
	pool      *Pool
	opts      SweepOptions
	clock     Clock
	log       zerolog.Logger
	session   session
	elsewhere []oracle
	pace      pace
	locks     *fleet.BatchLocks // of the batch at hand, nil without one

	// slow says that the last batch ran into a time limit.
	slow bool

	cutoff     blob.Instant
	candidates int64
	rep        Report
}

// errStopped ends a sweep between two transactions, on request. What was done
// stays done; the rest waits for the next sweep.
var errStopped = errors.New("stopped on request before the sweep was through")

// dry says that nothing may be written.
func (s *sweep) dry() bool { return s.opts.DryRun || s.pool.cfg.Mode != config.ModeEnforce }

// run sweeps and reports. An abort is data: it ends up in the report. An error is
// a fault; what had been done before it stays counted.
func (s *sweep) run(ctx context.Context) (Report, error) {
	s.rep = Report{
		Pool: s.pool.cfg.Name, Form: s.pool.host.form(), Mode: string(s.pool.cfg.Mode), DryRun: s.dry(),
		StartedAt: s.clock.Now().UTC(),
	}
	err := s.underLease(ctx)
	var a *abort
	switch {
	case errors.As(err, &a):
		s.rep.Aborted, s.rep.Detail, err = &a.cause, a.detail, nil
	case errors.Is(err, errStopped):
		s.rep.Detail, err = errStopped.Error(), nil
	}
	s.rep.FinishedAt = s.clock.Now().UTC()
	return s.rep, err
}

// underLease is the protocol.
func (s *sweep) underLease(ctx context.Context) (err error) {
	why := write
	if s.dry() {
		why = preview
	}
	session, ok, err := s.pool.host.open(ctx, why)
	if err != nil {
		return fmt.Errorf("open pool %s: %w", s.pool.cfg.Name, err)
	}
	if !ok {
		return s.pool.taken(ctx)
	}
	s.pool.starved.end()
	s.session = session
	defer func() {
		if closeErr := session.Close(ctx); closeErr != nil && err == nil {
			err = fmt.Errorf("release the lease of pool %s: %w", s.pool.cfg.Name, closeErr)
		}
	}()
	if s.cutoff, err = session.Now(ctx); err != nil {
		return fmt.Errorf("read the host clock: %w", err)
	}
	defer func() { s.closeElsewhere(ctx) }()
	if err := s.consult(ctx); err != nil {
		return err
	}
	if err := s.mark(ctx); err != nil {
		return err
	}
	markEnd, err := session.Now(ctx)
	if err != nil {
		return fmt.Errorf("read the host clock: %w", err)
	}
	if err := s.brake(ctx); err != nil {
		return err
	}
	if s.rep.Form == Inline {
		return s.stageThenExecute(ctx, markEnd)
	}
	if err := s.execute(ctx); err != nil {
		return err
	}
	if err := s.stage(ctx, markEnd); err != nil || s.dry() {
		return err
	}
	s.pool.local.tidy()
	if err := session.Tidy(ctx); err != nil {
		return fmt.Errorf("tidy pool %s: %w", s.pool.cfg.Name, err)
	}
	return nil
}

// stageThenExecute is the inline form: the window is in memory, so the sweep
// that stages has to stay for the length of the window and execute too.
func (s *sweep) stageThenExecute(ctx context.Context, markEnd blob.Instant) error {
	if err := s.stage(ctx, markEnd); err != nil {
		return err
	}
	if s.dry() {
		// A preview doesn't wait: as things stand, all that is staged would be deleted.
		s.rep.Overdue, s.rep.Deleted = s.candidates, s.candidates
		return nil
	}
	if err := s.wait(ctx, s.pool.cfg.Window); err != nil {
		return err
	}
	var err error
	if s.cutoff, err = s.session.Now(ctx); err != nil {
		return fmt.Errorf("read the host clock: %w", err)
	}
	return s.execute(ctx)
}

// wait sleeps for d, in pieces short enough that a stop is noticed.
func (s *sweep) wait(ctx context.Context, d time.Duration) error {
	const piece = time.Second
	for ; d > 0; d -= piece {
		if err := s.sleep(ctx, min(d, piece)); err != nil {
			return err
		}
	}
	return nil
}

// sleep sleeps for d, unless the sweep was told to stop.
func (s *sweep) sleep(ctx context.Context, d time.Duration) error {
	if s.stopped() {
		return errStopped
	}
	return s.clock.Sleep(ctx, d)
}

// stage puts the spooled candidates into the window. A key that is there
// already keeps its first deadline: sweeping often must postpone nothing.
func (s *sweep) stage(ctx context.Context, markEnd blob.Instant) error {
	if s.dry() {
		s.rep.CandidatesStaged = s.candidates
		return nil
	}
	deadline, err := markEnd.Add(s.pool.cfg.Window)
	if err != nil {
		return fmt.Errorf("stage candidates of pool %s: %w", s.pool.cfg.Name, err)
	}
	for more := true; more; {
		if s.stopped() {
			return errStopped
		}
		var staged int
		began := s.clock.Now()
		err := s.timed(func() (err error) {
			staged, more, err = s.session.StagePage(ctx, deadline)
			return err
		})
		if err != nil {
			return fmt.Errorf("stage candidates of pool %s: %w", s.pool.cfg.Name, err)
		}
		s.rep.CandidatesStaged += int64(staged)
		s.progress("stage", s.rep.CandidatesStaged)
		if err := s.clock.Sleep(ctx, s.pace.pause(s.clock.Now().Sub(began))); err != nil {
			return err
		}
	}
	return nil
}

// inTx runs one step, timed.
func (s *sweep) inTx(ctx context.Context, step step, fn func(context.Context, tx) error) error {
	return s.timed(func() error { return s.session.InTx(ctx, step, fn) })
}

// timed notes how long a transaction took.
func (s *sweep) timed(fn func() error) error {
	began := s.clock.Now()
	err := fn()
	s.rep.LongestTxMS = max(s.rep.LongestTxMS, s.clock.Now().Sub(began).Milliseconds())
	return err
}

func (s *sweep) stopped() bool {
	select {
	case <-s.opts.Stop:
		return true
	default:
		return false
	}
}

func (s *sweep) progress(phase string, done int64) {
	if s.opts.Progress != nil {
		s.opts.Progress(Progress{Pool: s.pool.cfg.Name, Phase: phase, Done: done})
	}
}
