package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/rs/zerolog"
)

// A host clock that has gone on by more than the agent's monotonic one, beyond
// this much and this part of it, has jumped. Clocks that drift apart, or are
// slewed, stay within it.
const (
	jumpSlack = time.Second
	jumpDrift = 1000 // a thousandth
)

// narrowReading is within what time a reading of the host clock should be there.
// One that took longer is repeated, so that a slow network is no jump.
const (
	narrowReading = 100 * time.Millisecond
	mostReadings  = 4
)

// hostClock is a Postgres host's clock as a pool's readings show it, of whatever
// connection. When it jumps ahead, pins expire that have not lived as long as
// was asked for, all at once; so nothing may be executed until they would have
// expired by themselves. What the clock did before the first reading isn't known.
type hostClock struct {
	own    Clock
	log    zerolog.Logger
	schema string
	ttl    time.Duration
	blind  bool // sees no jump; only tests set it

	mu   sync.Mutex
	last reading // zero before the first
	// anchor is the older reading that drift is measured from, and next the one that will
	// be it: each is between half a pin's usual life and a whole one older than the next.
	anchor, next reading
	// jumped is by how much the clock has jumped without it being known yet how
	// long that matters.
	jumped time.Duration
	until  time.Time // on the agent's clock: nothing is executed before
}

// reading is what the host's clock said between two readings of the agent's.
type reading struct {
	host          blob.Instant
	before, after time.Time
}

func (r reading) width() time.Duration { return r.after.Sub(r.before) }

// read reads the host's clock and notices when it has jumped.
func (c *hostClock) read(ctx context.Context, q pgdb.Querier) (blob.Instant, error) {
	best, err := c.look(ctx, q)
	for n := 1; n < mostReadings && err == nil && best.width() > narrowReading; n++ {
		var next reading
		if next, err = c.look(ctx, q); err == nil && next.width() < best.width() {
			best = next
		}
	}
	if err != nil {
		return 0, err
	}
	c.note(best)
	return best.host, nil
}

func (c *hostClock) look(ctx context.Context, q pgdb.Querier) (r reading, err error) {
	r.before = c.own.Now()
	err = q.QueryRow(ctx, "SELECT "+pgdb.Now).Scan((*int64)(&r.host))
	r.after = c.own.Now()
	return r, err
}

// note compares a reading with the one before, and with one that is about as old as a
// pin's usual life: a clock that runs too fast is within what is allowed from one reading
// to the next. What isn't certain counts against the clock. A clock that has gone back only
// makes everything last longer.
func (c *hostClock) note(r reading) {
	c.mu.Lock()
	defer c.mu.Unlock()
	last := c.last
	c.last = r
	if last.after.IsZero() || c.blind {
		c.anchor, c.next = r, r
		return
	}
	ahead := max(r.ahead(last), r.ahead(c.anchor))
	switch {
	case ahead > 0:
		c.jumped += ahead
		c.anchor, c.next = r, r // what was gained until here is counted
	case r.before.Sub(c.next.after) >= c.ttl/2:
		c.anchor, c.next = c.next, r
	}
}

// ahead is by how much the host's clock has gone on more than the agent's since an
// earlier reading; 0 where that is within what is allowed.
func (r reading) ahead(earlier reading) time.Duration {
	elapsed := r.before.Sub(earlier.after)
	ahead := time.Duration(r.host-earlier.host) - elapsed
	if ahead > jumpSlack+max(0, elapsed)/jumpDrift {
		return ahead
	}
	return 0
}

// steady reads the clock and fails, with errHeldUp, while a jump of it keeps
// anything from being executed. In a transaction that goes by the clock it belongs
// at the end, so that the transaction's own reading is the earlier one.
func (c *hostClock) steady(ctx context.Context, q pgdb.Querier) error {
	if _, err := c.read(ctx, q); err != nil {
		return fmt.Errorf("read the host clock: %w", err)
	}
	if why := c.holdup(); why != "" {
		return heldUp(why)
	}
	return nil
}

// readAndMeasure is read, after which it is known how long a jump matters.
func (c *hostClock) readAndMeasure(ctx context.Context, q pgdb.Querier) (blob.Instant, error) {
	now, err := c.read(ctx, q)
	if err == nil {
		err = c.measure(ctx, q)
	}
	return now, err
}

// measure finds out how long a jump matters: until the last pin, of those that
// have expired too, would have expired without it, and for a pin's usual life in
// any case. Pins written since the jump can't be told apart and prolong it. q must
// not be a transaction that has removed some.
func (c *hostClock) measure(ctx context.Context, q pgdb.Querier) error {
	c.mu.Lock()
	jumped, last := c.jumped, c.last
	c.mu.Unlock()
	if jumped == 0 {
		return nil
	}
	// What lives longer, by the clock before the jump, was written since, or by hand
	// to last beyond it.
	bound := last.host + blob.Instant(max(0, fleet.MaxTTL-jumped))
	expiry, found, err := fleet.LatestExpiry(ctx, q, c.schema, bound)
	if err != nil {
		return err
	}
	hold := c.ttl
	if found {
		hold = max(hold, min(time.Duration(expiry-last.host)+jumped, fleet.MaxTTL))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.jumped -= jumped
	if until := c.own.Now().Add(hold); until.After(c.until) {
		c.until = until
	}
	c.log.Error().Int64("jumped_ms", jumped.Milliseconds()).Int64("held_up_ms", hold.Milliseconds()).
		Msg("the host's clock has jumped ahead of the agent's: nothing is deleted until every pin would have expired without that")
	return nil
}

// holdup says why nothing may be executed now; it is empty when something may.
func (c *hostClock) holdup() string {
	if c == nil {
		return ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	left := c.until.Sub(c.own.Now())
	switch {
	case c.jumped > 0:
		return fmt.Sprintf("the host's clock has jumped ahead by %s", c.jumped.Round(time.Second))
	case c.until.IsZero() || left <= 0:
		return ""
	default:
		return fmt.Sprintf("the host's clock has jumped ahead, so that pins expired too early; for another %s nothing is deleted", left.Round(time.Second))
	}
}
