package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"

	"github.com/jackc/pgx/v5"
)

// What the pins of one pool may take of the daemon's memory.
const (
	mostPins     = 100_000
	mostPinBytes = 16 << 20
)

// localPins are the pins of a pool that are kept in the daemon's memory: those of
// a pool without fleet: true, where the configuration has a control socket to take
// them through. A nil one has none and keeps nobody.
type localPins struct {
	store  *fleet.InProcess
	ttl    time.Duration // the longest that one lives
	socket string
	clock  Clock

	// keeping is for whoever has put something into it, and guards the next four.
	keeping chan struct{}
	mark    pinMark // nil while this process isn't the keeper
	epoch   int     // how often it became the keeper
	unkept  bool    // it isn't, which was logged

	mu      sync.Mutex
	started bool      // this process is the daemon
	since   time.Time // since when it has the mark; zero before it had it
	again   bool      // it has lost it before
}

// newLocalPins returns nil for a pool whose pins, if any, are in its database.
func newLocalPins(cfg *config.Validated, pool config.Pool, clock Clock) *localPins {
	socket := cfg.Admin().Socket
	if socket == "" || pool.Fleet {
		return nil
	}
	opts := fleet.InProcessOptions{Now: clock.Now, MaxTTL: pool.Pins.TTL, Rows: mostPins, Bytes: mostPinBytes}
	return &localPins{store: fleet.NewInProcess(opts), ttl: pool.Pins.TTL, socket: socket, clock: clock, keeping: make(chan struct{}, 1)}
}

// start says that from now on this process gives pins.
func (l *localPins) start() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.started = true
}

// gives says whether this process is the one that gives pins, while it has the mark.
func (l *localPins) gives() bool {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.started
}

// holdup says why nothing may be deleted right now: pins that an earlier daemon
// gave may be live, and nobody knows them any more.
func (l *localPins) holdup() string {
	if l == nil {
		return ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	since := l.since
	if !l.started {
		return fmt.Sprintf("pins that a daemon gave through %s may be live, and only a daemon knows its pins: "+
			"start it (gc-agent run), and this command goes through it; or remove admin.socket from the configuration, once no pin can be live any more", l.socket)
	}
	// The difference is of monotonic readings: nobody who sets the clock ends it early.
	if l.clock.Now().Sub(since) >= l.ttl {
		return ""
	}
	before := "the daemon's start"
	if l.again {
		before = "the daemon took back the mark of pins in memory, which it had lost,"
	}
	return fmt.Sprintf("pins from before %s may be live until %s, pins.ttl (%s) after it",
		before, since.Add(l.ttl).UTC().Format(time.RFC3339), l.ttl)
}

// keys returns what is pinned now.
func (l *localPins) keys() []blob.Key {
	if l == nil {
		return nil
	}
	return l.store.Keys()
}

// unpinned takes what is pinned off the fresh ones of keys.
func (l *localPins) unpinned(keys []blob.Key, fresh []bool) {
	if l == nil {
		return
	}
	for i, pin := range l.store.LivePins(keys) {
		fresh[i] = fresh[i] && pin.State == fleet.Unprotected
	}
}

// tidy drops the pins that have run out.
func (l *localPins) tidy() {
	if l != nil {
		l.store.DeleteExpired()
	}
}

// begin returns the key locks of a batch, nil where there are no pins.
func (l *localPins) begin() *fleet.BatchLocks {
	if l == nil {
		return nil
	}
	return l.store.Begin()
}

// pinned says what the pins in memory say of keys: under the locks of the batch,
// within one, and else as things stand.
func (s *sweep) pinned(keys []blob.Key) []fleet.LivePin {
	switch {
	case s.pool.local == nil:
		return nil
	case s.locks != nil:
		return s.locks.Check(keys)
	default:
		return s.pool.local.store.LivePins(keys)
	}
}

// foldPinned folds pins in memory into verdicts. A reference that is seen is the
// answer that lasts longest, as it is for pins in the database.
func (s *sweep) foldPinned(ctx context.Context, verdicts []verdict, pins []fleet.LivePin) error {
	var now blob.Instant
	for i, pin := range pins {
		v := &verdicts[i]
		switch {
		case v.cause != causeDead && v.cause != causePinned || pin.State == fleet.Unprotected:
		case pin.State == fleet.Protected:
			if now == 0 {
				var err error
				if now, err = s.session.Now(ctx); err != nil {
					return fmt.Errorf("read the host clock: %w", err)
				}
			}
			until, err := now.Add(pin.Left)
			if err != nil {
				return err
			}
			*v = pinned(max(until, v.until))
		default:
			*v = verdict{cause: causeLocked, why: "somebody is pinning it right now"}
		}
	}
	return nil
}

// lookTimeout bounds how long a look waits for a lock of a batch's.
const lookTimeout = 10 * time.Second

// exists says whether a tier of the pool has the blobs of keys. It sees all that
// was committed before it was called.
func (h *sqliteHost) exists(ctx context.Context, keys []blob.Key) (there []bool, err error) {
	conn, err := h.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		// It has only read.
		_ = conn.Close()
	}()
	s := &sqliteSession{pool: h.pool, cfg: h.pool.cfg, conn: conn, dry: true}
	err = conn.InTx(ctx, sqlitedb.Read, func(ctx context.Context, q sqlitedb.Querier) error {
		found, err := s.resolveTiers(ctx, q)
		if err := unresolved(h.pool, found, len(s.tiers), err); err != nil {
			return err
		}
		tiers := newTierSet[sqlitedb.Querier](s.tiers)
		holds, err := tiers.look(ctx, q, keys)
		there = holdsThere(holds)
		return err
	})
	return there, err
}

// exists waits for the end of a delete whose session the agent has lost.
func (h *postgresHost) exists(ctx context.Context, keys []blob.Key) (there []bool, err error) {
	s := &postgresSession{pool: h.pool, cfg: h.pool.cfg, dry: true}
	err = h.db.Use(ctx, func(ctx context.Context, conn *pgdb.Conn) error {
		return conn.InTx(ctx, pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) error {
			found, err := s.resolveTiers(ctx, tx)
			if err := unresolved(h.pool, found, len(s.tiers), err); err != nil {
				return err
			}
			if err := waitLonger(ctx, tx); err != nil {
				return err
			}
			if err := fleet.ShareKeys(ctx, tx, h.pool.cfg.Schema, keys); err != nil {
				return err
			}
			tiers := newTierSet[pgdb.Querier](s.tiers)
			holds, err := tiers.look(ctx, tx, keys)
			there = holdsThere(holds)
			return err
		})
	})
	return there, err
}

// waitLonger lets the rest of the transaction wait for a batch, not only as long
// as the application may have to wait for the agent.
func waitLonger(ctx context.Context, tx pgx.Tx) error {
	const set = "SELECT pg_catalog.set_config('lock_timeout', $1, true)"
	if _, err := tx.Exec(ctx, set, fmt.Sprint(lookTimeout.Milliseconds())); err != nil {
		return fmt.Errorf("set lock_timeout: %w", err)
	}
	return nil
}

func (h *inlineHost) exists(ctx context.Context, keys []blob.Key) ([]bool, error) {
	objects, err := h.tier.Stat(ctx, keys)
	if err != nil {
		return nil, fmt.Errorf("look at objects: %w", err)
	}
	found := make(map[blob.Key]bool, len(objects))
	for _, o := range objects {
		found[o.Key] = true
	}
	there := make([]bool, len(keys))
	for i, key := range keys {
		there[i] = found[key]
	}
	return there, nil
}

func holdsThere(holds []blob.Hold) []bool {
	there := make([]bool, len(holds))
	for i, h := range holds {
		there[i] = h.State != blob.Absent
	}
	return there
}
