package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

const (
	// upgradeGrace is for how much longer than usual pins are renewed when the agent
	// stops: another one has that long to take over.
	upgradeGrace = 5 * time.Minute
	// lastRenewal is how much of the time that a stop may take is the last renewal's.
	lastRenewal = 6 * time.Second
	// lastRetry is the wait before it is tried again.
	lastRetry = 250 * time.Millisecond
)

// renewer renews pins where they are kept.
type renewer interface {
	// renewOwners moves the expiry of the owners' live pins to ttl from now, never to
	// an earlier time, in batches, in key order. Those that it finds expired stay so;
	// lost counts the ones of them that a renewal in time would have saved, each once.
	// After an error some may have been renewed, and lost is 0: the next call counts.
	// An owner that is left out of a call isn't alive: what it loses isn't lost.
	renewOwners(ctx context.Context, owners []fleet.Owner, ttl time.Duration) (renewed, lost int, err error)
	// close gives back what it holds. It may be used again.
	close(ctx context.Context)
}

// renewal keeps the pins of a pool's owners live for as long as the owners are.
type renewal struct {
	pool    *Pool
	pins    renewer
	probers []*prober
	ttl     time.Duration

	// behind says that the last renewal failed.
	behind        atomic.Bool
	renewed, lost atomic.Int64
}

// PinCounts counts pins since the agent was made.
type PinCounts struct {
	// Renewed counts renewals: a pin that was renewed twice counts twice.
	Renewed int64
	// Lost counts the pins that expired because the agent came too late, although
	// their owner was alive.
	Lost int64
}

// PinCounts returns how many pins of its owners the agent has renewed, and lost.
func (p *Pool) PinCounts() PinCounts {
	if p.renewal == nil {
		return PinCounts{}
	}
	return PinCounts{Renewed: p.renewal.renewed.Load(), Lost: p.renewal.lost.Load()}
}

// addRenewal gives the pool what renews its owners' pins, where it has owners. A
// pool that only observes changes nothing.
func (a *Agent) addRenewal(p *Pool) error {
	if len(p.cfg.Pins.Owners) == 0 || p.cfg.Mode != config.ModeEnforce {
		return nil
	}
	pins, err := a.newRenewer(p)
	if err != nil || pins == nil {
		return err
	}
	p.renewal = &renewal{pool: p, pins: pins, ttl: p.cfg.Pins.TTL}
	for _, owner := range p.cfg.Pins.Owners {
		p.renewal.probers = append(p.renewal.probers, newProber(owner, p.cfg.Pins.TTL))
	}
	return nil
}

// newRenewer returns the one for where the pool's pins are, nil where it has none.
func (a *Agent) newRenewer(p *Pool) (renewer, error) {
	switch _, onPostgres := p.host.(*postgresHost); {
	case p.local != nil:
		return &localRenewer{pool: p, due: map[fleet.Owner]time.Time{}}, nil
	case onPostgres && p.cfg.Fleet:
		return a.databases.renewer(p)
	default:
		return nil, nil
	}
}

// interval is the time between two renewals.
func (r *renewal) interval() time.Duration { return r.ttl / 3 }

// renewPins keeps the pool's pins until the daemon stops, and renews them once
// more then. It goes on whatever becomes of sweeps.
func (d *daemon) renewPins(ctx context.Context) error {
	r := d.pool.renewal
	defer r.pins.close(ctx)
	for {
		began := d.pool.clock.Now()
		wait, err := d.renewOnce(ctx)
		if err == nil {
			err = d.sleep(ctx, wait-d.pool.clock.Now().Sub(began))
		}
		// Pins in memory end with the process: whoever comes next waits for them.
		if errors.Is(err, errStopped) && d.pool.local == nil {
			r.renewLast(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// renewOnce returns how long after its beginning the next renewal is due. One
// that failed is tried again soon: a pin lives for three intervals. An error is
// that the daemon stops.
func (d *daemon) renewOnce(ctx context.Context) (time.Duration, error) {
	r := d.pool.renewal
	running, end := d.running(ctx)
	defer end()
	// A timer of its own, as for a stop: the network's time isn't a test's.
	attempt, cancel := context.WithTimeout(running, max(r.interval(), time.Second))
	defer cancel()
	err := r.renew(attempt, r.ttl)
	if running.Err() != nil {
		return 0, context.Cause(running)
	}
	switch failed := err != nil; {
	case failed && !r.behind.Swap(true):
		r.pool.log.Error().Err(err).Msg("pins can't be renewed; it is tried again and again")
	case !failed && r.behind.Swap(false):
		r.pool.log.Info().Msg("pins are renewed again")
	}
	if err != nil {
		return r.interval() / 4, nil
	}
	return r.interval(), nil
}

// renew renews the pins of the owners that are alive. The time to live counts
// from before they were asked, so that no pin outlives its owner for longer.
func (r *renewal) renew(ctx context.Context, ttl time.Duration) (err error) {
	defer r.pool.recovered(&err)
	began := r.pool.clock.Now()
	owners := r.alive(ctx)
	if err := ctx.Err(); err != nil {
		return err
	}
	renewed, lost, err := r.pins.renewOwners(ctx, owners, ttl-r.pool.clock.Now().Sub(began))
	r.renewed.Add(int64(renewed))
	if lost > 0 {
		r.lost.Add(int64(lost))
		r.pool.log.Error().Int("pins", lost).Msg("pins of owners that are alive have expired before they were renewed; what they protected may be deleted")
	}
	return err
}

// alive asks about all owners at once, and says when the answer has changed.
func (r *renewal) alive(ctx context.Context) (owners []fleet.Owner) {
	answers := make([]error, len(r.probers))
	var group sync.WaitGroup
	for i, p := range r.probers {
		group.Go(func() {
			defer r.pool.recovered(&answers[i])
			answers[i] = p.ask(ctx)
		})
	}
	group.Wait()
	if ctx.Err() != nil {
		return nil // they were cut short
	}
	for i, p := range r.probers {
		why := answers[i]
		if dead := why != nil; dead != p.dead || !p.asked {
			p.dead, p.asked = dead, true
			r.logChange(p.cfg.Name, why)
		}
		if why == nil {
			owners = append(owners, fleet.Owner(p.cfg.Name))
		}
	}
	return owners
}

func (r *renewal) logChange(owner string, why error) {
	if why != nil {
		r.pool.log.Warn().Str("owner", owner).Str("why", why.Error()).Msg("the owner isn't alive: its pins are left to expire")
		return
	}
	r.pool.log.Info().Str("owner", owner).Msg("the owner is alive: its pins are renewed")
}

// renewLast renews the pins for long enough that the agent can be upgraded.
func (r *renewal) renewLast(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lastRenewal)
	defer cancel()
	ttl := min(r.ttl+upgradeGrace, fleet.MaxTTL)
	err := r.renew(ctx, ttl)
	for err != nil && (SystemClock{}).Sleep(ctx, lastRetry) == nil {
		err = r.renew(ctx, ttl)
	}
	if err != nil {
		r.pool.log.Error().Err(err).Msg("pins can't be renewed for the time of an upgrade")
		return
	}
	r.pool.log.Info().Int64("ttl_ms", ttl.Milliseconds()).Msg("pins are renewed for the time of an upgrade")
}

// A renewal waits for arbitrations, which a sweep's own locks never do, but not
// into the time of the next one.
const (
	leastLockWait = 500 * time.Millisecond
	mostLockWait  = 5 * time.Second
)

// renewer opens a database for renewals. They have a connection of their own, so
// that they go on while a sweep runs.
func (d *databases) renewer(p *Pool) (renewer, error) {
	cfg, ok := d.cfg.Database(p.cfg.Host)
	if !ok {
		return nil, fmt.Errorf("pool %s: there is no database %q", p.cfg.Name, p.cfg.Host)
	}
	lock := min(max(p.cfg.Pins.TTL/12, leastLockWait), mostLockWait)
	statement := lock + p.cfg.Limits.StatementTimeout
	db, err := pgdb.Open(cfg.URL.Reveal(), pgdb.Options{
		Timeouts: pgdb.Timeouts{Lock: lock, Statement: statement, Idle: statement},
		Tracer:   d.opts.PostgresTracer,
	})
	if err != nil {
		return nil, fmt.Errorf("database %s: %w", p.cfg.Host, err)
	}
	d.opened = append(d.opened, database{postgres: db})
	return &postgresRenewer{pool: p, db: db, due: map[fleet.Owner]blob.Instant{}}, nil
}

// postgresRenewer renews pins that are rows of gc_pins.
type postgresRenewer struct {
	pool *Pool
	db   *pgdb.DB

	conn *pgdb.Conn // nil while there is none
	// due is when the next renewal of each owner is, by the host's clock, for owners
	// that were alive at the last one.
	due    map[fleet.Owner]blob.Instant
	locked bool // the last one had to pass pins over
}

func (p *postgresRenewer) close(ctx context.Context) {
	if p.conn != nil {
		// A session that can't be told to end ends with its connection.
		_ = p.conn.Close(ctx)
	}
	p.conn = nil
}

func (p *postgresRenewer) renewOwners(ctx context.Context, owners []fleet.Owner, ttl time.Duration) (renewed, lost int, err error) {
	began := p.pool.clock.Now()
	renewals := p.renewals(owners)
	if p.conn == nil {
		if p.conn, err = p.db.Dedicated(ctx); err != nil {
			return 0, 0, err
		}
	}
	defer func() {
		if err != nil {
			p.close(ctx)
		}
	}()
	now, err := p.pool.hostClock.readAndMeasure(ctx, p.conn)
	if err != nil {
		return 0, 0, fmt.Errorf("read the host clock: %w", err)
	}
	// It comes with the first sweep.
	if there, err := fleet.CheckSchema(ctx, p.conn, p.pool.cfg.Schema); err != nil || !there {
		return 0, 0, err
	}
	n, err := fleet.RenewOwners(ctx, p.conn, p.pool.cfg.Schema, renewals, ttl-p.pool.clock.Now().Sub(began), p.pool.cfg.Limits.Batch)
	if err != nil {
		return n.Renewed, 0, err
	}
	wasLocked := p.locked
	if p.locked = n.Locked > 0; p.locked && !wasLocked {
		p.pool.log.Warn().Int("pins", n.Locked).Msg("pins that other transactions have locked are not renewed")
	}
	clear(p.due)
	for _, owner := range owners {
		p.due[owner] = now + blob.Instant(p.pool.cfg.Pins.TTL/3)
	}
	return n.Renewed, n.Lost, nil
}

// renewals forgets the owners that aren't alive. Of one that wasn't at the last
// renewal, nothing was due.
func (p *postgresRenewer) renewals(owners []fleet.Owner) []fleet.Renewal {
	for owner := range p.due {
		if !slices.Contains(owners, owner) {
			delete(p.due, owner)
		}
	}
	all := make([]fleet.Renewal, len(owners))
	for i, owner := range owners {
		due, known := p.due[owner]
		if !known {
			due = blob.MaxInstant
		}
		all[i] = fleet.Renewal{Owner: owner, Due: due}
	}
	return all
}

// localRenewer renews pins in the daemon's memory.
type localRenewer struct {
	pool *Pool
	due  map[fleet.Owner]time.Time // as of postgresRenewer, on the agent's clock
}

func (l *localRenewer) close(context.Context) {}

func (l *localRenewer) renewOwners(_ context.Context, owners []fleet.Owner, ttl time.Duration) (renewed, lost int, err error) {
	now := l.pool.clock.Now()
	next := map[fleet.Owner]time.Time{}
	for _, owner := range owners {
		due, known := l.due[owner]
		if !known {
			due = now
		}
		n, gone, err := l.pool.local.store.RenewOwner(owner, due, ttl)
		if err != nil {
			return renewed, 0, err
		}
		renewed, lost, next[owner] = renewed+n, lost+gone, now.Add(l.pool.cfg.Pins.TTL/3)
	}
	l.due = next
	return renewed, lost, nil
}
