package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/alkblobs/gc-agent/fleet"

	"github.com/rs/zerolog"
)

// A pool that was left to the same holder of its lease at this many ticks in a row, over
// at least this time, may wait for one that is stopped or cut off. A long sweep looks the
// same, so that this is a warning and nothing else.
const (
	starvedTicks = 10
	starvedFor   = 10 * time.Minute
)

// holder is who has the lease that a sweep didn't get; empty where that isn't known.
type holder struct {
	id     string // unlike any other's
	detail string
	advice string // how to free the lease
}

// holding is a host that can say who has the pool's lease.
type holding interface {
	holder(ctx context.Context) (holder, error)
}

// holder asks on a connection of its own: that of the sweep is closed.
func (h *postgresHost) holder(ctx context.Context) (holder, error) {
	conn, err := h.db.Dedicated(ctx)
	if err != nil {
		return holder{}, err
	}
	// It was only to ask.
	defer func() { _ = conn.Close(ctx) }()
	found, ok, err := fleet.FindLeaseHolder(ctx, conn, h.pool.cfg.Schema)
	if err != nil || !ok {
		return holder{}, err
	}
	return holder{
		id: fmt.Sprint(found.PID, found.Since), detail: found.String(),
		advice: fmt.Sprintf("if that agent doesn't work any more, end its process, or run SELECT pg_terminate_backend(%d), which rolls back what it was about", found.PID),
	}, nil
}

func (h *sqliteHost) holder(context.Context) (holder, error) {
	pid, ok := fleet.FileLockPID(h.db.Path())
	if !ok {
		return holder{}, nil
	}
	return holder{
		id: fmt.Sprint(pid), detail: fmt.Sprintf("pid %d, by the lock file, has the lease or had it last", pid),
		advice: fmt.Sprintf("if process %d doesn't work any more, end it", pid),
	}, nil
}

// taken is the abort of a sweep that another one keeps out.
func (p *Pool) taken(ctx context.Context) *abort {
	a := &abort{CauseSweeperLock, "another agent is sweeping this pool"}
	var by holder
	if h, ok := p.host.(holding); ok {
		var err error
		if by, err = h.holder(ctx); err != nil {
			// The report is only less exact without.
			p.log.Debug().Err(err).Msg("who has the lease can't be found out")
		}
	}
	if by.detail != "" {
		a.detail += ": " + by.detail
	}
	p.starved.note(by, p.clock.Now())
	return a
}

// starved remembers for how long a pool was left to the same holder of its lease.
type starved struct {
	mu    sync.Mutex
	by    holder
	since time.Time
	ticks int
	warn  time.Duration // not before this much of it
}

func (s *starved) note(by holder, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ticks == 0 || s.by.id != by.id {
		s.by, s.since, s.ticks, s.warn = by, now, 0, starvedFor
	}
	s.ticks++
}

// end notes that the lease was to be had.
func (s *starved) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ticks = 0
}

// log warns of a long wait, once, and again each time it is twice as long.
func (s *starved) log(log *zerolog.Logger, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	waited := now.Sub(s.since)
	if s.ticks < starvedTicks || waited < s.warn {
		return
	}
	s.warn = 2 * waited
	log.Warn().Int64("held_ms", waited.Milliseconds()).Int("ticks", s.ticks).Str("holder", s.by.detail).Str("advice", s.by.advice).
		Msg("the pool isn't swept by this agent: the same holder has had its lease at every tick")
}
