package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// Errors of pins that callers tell apart.
var (
	// ErrPinsElsewhere means that the pool's pins are in the memory of a daemon, and
	// this process isn't it.
	ErrPinsElsewhere = errors.New("its pins are in the memory of the daemon")
	// ErrNoPins means that the configuration gives the pool no place for pins.
	ErrNoPins = errors.New("it has no pins: set fleet: true (on Postgres), or admin.socket for pins in the memory of the daemon")
	// ErrPinBusy means that a batch had a key locked for longer than was waited, or
	// that the database didn't answer in time: nothing is known to be pinned, and the
	// same call may be made again.
	ErrPinBusy = errors.New("the keys are locked, or the database is busy; try again")
	// ErrBadPin means that what was asked for can't be.
	ErrBadPin = errors.New("impossible pin")
)

// PinsInProcess says whether the pool's pins are in the memory of the daemon.
func (p *Pool) PinsInProcess() bool { return p.local != nil }

// PinTTL is how long a pin lives unless whoever takes it says otherwise.
func (p *Pool) PinTTL() time.Duration { return p.cfg.Pins.TTL }

// Pin pins keys for an owner and says for each, in their order, whether its blob
// is there. When it returns the pins are in force; after an error they may be, and
// run out by themselves. It waits for a batch that has one of the keys locked, as
// long as ctx lasts.
func (p *Pool) Pin(ctx context.Context, keys []blob.Key, owner fleet.Owner, ttl time.Duration) (there []bool, err error) {
	if err := p.checkPin(ctx, keys, ttl); err != nil {
		return nil, err
	}
	err = p.usePins(ctx, func(local *fleet.InProcess) error {
		there, err = local.Pin(ctx, keys, owner, ttl, p.host.exists)
		return err
	}, func(ctx context.Context, tx pgx.Tx) error {
		there, err = fleet.PinKeys(ctx, tx, p.cfg.Schema, keys, owner, ttl)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("pool %s: %w", p.cfg.Name, err)
	}
	return there, nil
}

func (p *Pool) checkPin(ctx context.Context, keys []blob.Key, ttl time.Duration) error {
	if err := p.ResolveKind(ctx); err != nil {
		return err
	}
	for _, key := range keys {
		if err := p.Kind().Valid(key); err != nil {
			return fmt.Errorf("pool %s: %w: %w", p.cfg.Name, ErrBadPin, err)
		}
	}
	return p.checkPinTTL(ttl)
}

func (p *Pool) checkPinTTL(ttl time.Duration) error {
	most, why := fleet.MaxTTL, ""
	if p.local != nil {
		most, why = p.cfg.Pins.TTL, " (pins.ttl)"
	}
	if ttl < time.Microsecond || ttl > most {
		return fmt.Errorf("pool %s: %w: the time to live is above 0 and at most %s%s, not %s", p.cfg.Name, ErrBadPin, most, why, ttl)
	}
	return nil
}

// Unpin takes an owner's pins back and says for each key, in their order, whether
// there was one.
func (p *Pool) Unpin(ctx context.Context, keys []blob.Key, owner fleet.Owner) (removed []bool, err error) {
	err = p.usePins(ctx, func(local *fleet.InProcess) error {
		removed = local.Unpin(keys, owner)
		return nil
	}, func(ctx context.Context, tx pgx.Tx) error {
		removed, err = fleet.UnpinKeys(ctx, tx, p.cfg.Schema, keys, owner)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("pool %s: %w", p.cfg.Name, err)
	}
	return removed, nil
}

// pinBatch is how many pins are renewed by one statement.
const pinBatch = 1000

// RenewPins moves the expiry of an owner's live pins to ttl from now, never to an
// earlier time, and says how many there were, and how many have run out before.
// What has run out is never brought back.
func (p *Pool) RenewPins(ctx context.Context, owner fleet.Owner, ttl time.Duration) (renewed, lost int, err error) {
	if err := p.checkPinTTL(ttl); err != nil {
		return 0, 0, err
	}
	host, err := p.pinHost()
	switch {
	case err != nil:
	case host == nil:
		err = p.underMark(ctx, func(local *fleet.InProcess) error {
			renewed, lost, err = local.RenewOwner(owner, time.Time{}, ttl)
			return err
		})
	default:
		renewed, lost, err = host.renewPins(ctx, owner, ttl)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("pool %s: %w", p.cfg.Name, err)
	}
	return renewed, lost, nil
}

// Pins returns live pins in the order of their keys and owners.
func (p *Pool) Pins(ctx context.Context, filter fleet.PinFilter) (rows []fleet.PinRow, err error) {
	err = p.usePins(ctx, func(local *fleet.InProcess) error {
		rows = local.List(filter)
		return nil
	}, func(ctx context.Context, tx pgx.Tx) error {
		rows, err = fleet.ListPins(ctx, tx, p.cfg.Schema, filter)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("pool %s: %w", p.cfg.Name, err)
	}
	return rows, nil
}

// usePins runs the one of the two that fits where the pool's pins are.
func (p *Pool) usePins(ctx context.Context, inProcess func(*fleet.InProcess) error, inDatabase func(context.Context, pgx.Tx) error) error {
	host, err := p.pinHost()
	switch {
	case err != nil:
		return err
	case host == nil:
		return notInTime(p.underMark(ctx, inProcess))
	default:
		return notInTime(host.usePins(ctx, inDatabase))
	}
}

// pinHost returns the host that has the pool's pins, nil where they are in this
// process.
func (p *Pool) pinHost() (*postgresHost, error) {
	host, onPostgres := p.host.(*postgresHost)
	switch {
	case p.local != nil && !p.local.gives():
		return nil, ErrPinsElsewhere
	case p.local != nil:
		return nil, nil
	case !p.cfg.Fleet || !onPostgres:
		return nil, ErrNoPins
	}
	return host, nil
}

// usePins runs fn in a transaction of its own. What a conflict with another one
// has rolled back is run again.
func (h *postgresHost) usePins(ctx context.Context, fn func(context.Context, pgx.Tx) error) error {
	return h.db.Use(ctx, func(ctx context.Context, conn *pgdb.Conn) error {
		for attempt := 0; ; attempt++ {
			err := conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
				if err := waitLonger(ctx, tx); err != nil {
					return err
				}
				return fn(ctx, tx)
			})
			if code := pgdb.Code(err); code != pgdb.SerializationFailure && code != pgdb.DeadlockDetected || attempt >= conflictRetries {
				return h.noPinsYet(err)
			}
		}
	})
}

// renewPins renews an owner's pins, each batch of them in a transaction of its
// own.
func (h *postgresHost) renewPins(ctx context.Context, owner fleet.Owner, ttl time.Duration) (renewed, lost int, err error) {
	err = h.db.Use(ctx, func(ctx context.Context, conn *pgdb.Conn) error {
		n, err := fleet.RenewOwners(ctx, conn, h.pool.cfg.Schema, []fleet.Renewal{{Owner: owner, Due: blob.MinInstant}}, ttl, pinBatch)
		if err == nil && n.Locked > 0 {
			err = fmt.Errorf("%w: others have %d of the pins locked", ErrPinBusy, n.Locked)
		}
		renewed, lost = n.Renewed, n.Lost
		return h.noPinsYet(err)
	})
	return renewed, lost, notInTime(err)
}

// noPinsYet says what to do about a schema that isn't there.
func (h *postgresHost) noPinsYet(err error) error {
	if !slices.Contains([]string{undefinedFunction, invalidSchemaName, pgdb.UndefinedTable}, pgdb.Code(err)) {
		return err
	}
	return fmt.Errorf("what pins are taken by isn't in schema %s yet: run gc-agent schema ensure, or let a sweep in mode enforce make it: %w", h.pool.cfg.Schema, err)
}

// https://www.postgresql.org/docs/15/errcodes-appendix.html
const (
	undefinedFunction = "42883"
	invalidSchemaName = "3F000"
)

// notInTime marks an error that came of waiting.
func notInTime(err error) error {
	code := pgdb.Code(err)
	if errors.Is(err, context.DeadlineExceeded) || code == pgdb.LockNotAvailable || code == pgdb.QueryCanceled ||
		code == pgdb.SerializationFailure || code == pgdb.DeadlockDetected {
		return fmt.Errorf("%w: %w", ErrPinBusy, err)
	}
	return err
}

// unresolved is the error of tiers that can't be looked into.
func unresolved(p *Pool, found finding.List, tiers int, err error) error {
	switch {
	case err != nil:
		return err
	case found.Worst() == finding.Misconfigured || tiers == 0:
		return &MisconfiguredError{Pool: p.cfg.Name, Findings: found}
	case found.Worst() == finding.Unreadable:
		return errors.New(found.Of(finding.Unreadable))
	}
	return nil
}
