package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// ErrLeaseLost says that a session doesn't hold the lease: whatever it has not
// committed must be rolled back.
var ErrLeaseLost = errors.New("the sweep lease is lost")

// ErrPooled says that a connection leads to a pooler, in whichever mode.
var ErrPooled = errors.New("the connection goes through a pooler, where a lock of the session can't be relied on, whatever the pooler's mode: " +
	"give the agent a URL that leads to the Postgres server itself, past the pooler")

const releaseTimeout = 5 * time.Second

// Lease is the exclusive right to sweep the pool of a schema, for as long as the
// session of its connection lives and until it is released. Only
// SweepLockAcquire makes one that is held.
type Lease struct {
	id     leaseID
	schema string

	mu       sync.Mutex
	released bool
}

// leaseID is a lock on a session.
type leaseID struct {
	conn *pgx.Conn
	key  int64
}

// leases are those of this process. A session gets its own locks again and again:
// whether it has one already is for the process to know. Locks of different
// sessions are for the server to tell apart.
var leases = struct {
	sync.Mutex
	held map[leaseID]bool
}{held: make(map[leaseID]bool)}

func (id leaseID) enter() bool {
	leases.Lock()
	defer leases.Unlock()
	if leases.held[id] {
		return false
	}
	leases.held[id] = true
	return true
}

func (id leaseID) leave() {
	leases.Lock()
	defer leases.Unlock()
	delete(leases.held, id)
}

// SweepLockAcquire takes the lease of the pool whose schema this is, without
// waiting. It returns false, and no error, while anybody holds it, the caller
// included. The lease lives on conn, which should do the sweep's deletes too and
// must not be shared; closing it ends the lease. After an error it isn't held.
//
// A connection through a pooler is refused with ErrPooled: the next statement may
// run on another session than the one that has the lock.
func SweepLockAcquire(ctx context.Context, conn *pgdb.Conn, schema string) (*Lease, bool, error) {
	l := &Lease{id: leaseID{conn: conn.Conn, key: leaseKey(schema)}, schema: schema}
	if err := CheckSession(conn); err != nil {
		return nil, false, fmt.Errorf("acquire sweep lease of schema %s: %w", pgdb.Ident(schema), err)
	}
	if !l.id.enter() {
		return nil, false, nil
	}
	held, err := l.lock(ctx)
	if err != nil {
		// The lock may have been taken before the error. Where this fails too the
		// connection is broken, and its session ends with it.
		_ = l.unlock(ctx)
		err = fmt.Errorf("acquire sweep lease of schema %s: %w", pgdb.Ident(schema), err)
	}
	if err != nil || !held {
		l.id.leave()
		return nil, false, err
	}
	return l, true, nil
}

// leaseKey is where the agents that sweep one schema of one database meet.
func leaseKey(schema string) int64 { return lockID("sweep lease", schema) }

// CheckSession returns ErrPooled for a connection that can't have a lease. It asks
// nobody.
func CheckSession(conn *pgdb.Conn) error {
	if conn.Pooled() {
		return ErrPooled
	}
	return nil
}

func (l *Lease) lock(ctx context.Context) (held bool, err error) {
	err = l.id.conn.QueryRow(ctx, "SELECT pg_catalog.pg_try_advisory_lock($1)", l.id.key).Scan(&held)
	return held, err
}

// Verify says, by asking the server, whether the session of q holds the lease.
// In the transaction of a batch it is one statement before the commit that makes
// sure of what the batch relies on. ErrLeaseLost is that it doesn't, or that the
// session is gone; any other error leaves it open and must be taken for the same.
func (l *Lease) Verify(ctx context.Context, q pgdb.Querier) error {
	// The two halves of the key stand in two columns; 1 in the third says that
	// they are one number.
	const query = `SELECT EXISTS (
		SELECT FROM pg_catalog.pg_locks
		WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid()
			AND (classid::bigint << 32) | objid::bigint = $1 AND objsubid = 1
			AND mode = 'ExclusiveLock' AND granted)`
	var held bool
	err := q.QueryRow(ctx, query, l.id.key).Scan(&held)
	switch {
	case err != nil && pgdb.ConnectionLost(err):
		err = fmt.Errorf("%w: %w", ErrLeaseLost, err)
	case err == nil && !held:
		err = ErrLeaseLost
	}
	if err != nil {
		return fmt.Errorf("verify sweep lease of schema %s: %w", pgdb.Ident(l.schema), err)
	}
	return nil
}

// Release gives the lease up. It may be repeated, and where the connection is
// dead there is nothing to do: the server has released it with the session. It
// works within a short time even when ctx has ended, but not inside a transaction
// that has failed. After an error the lease is still held, and Release can be
// tried again.
func (l *Lease) Release(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released {
		return nil
	}
	if err := l.unlock(ctx); err != nil && !l.id.conn.IsClosed() {
		return fmt.Errorf("release sweep lease of schema %s: %w", pgdb.Ident(l.schema), err)
	}
	l.released = true
	l.id.leave()
	return nil
}

func (l *Lease) unlock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	_, err := l.id.conn.Exec(ctx, "SELECT pg_catalog.pg_advisory_unlock($1)", l.id.key)
	return err
}

// LeaseHolder is the session that has a lease.
type LeaseHolder struct {
	PID         int32
	Application string // "" where it names none
	Address     string // of its client, "" for a local socket or where the role may not know
	// Since is when the session began; zero where the role may not know.
	Since time.Time
}

// String describes it for people.
func (h LeaseHolder) String() string {
	text := fmt.Sprintf("pid %d", h.PID)
	if h.Application != "" {
		text += ", application " + h.Application
	}
	if h.Address != "" {
		text += ", from " + h.Address
	}
	if !h.Since.IsZero() {
		text += ", connected since " + h.Since.UTC().Format(time.RFC3339)
	}
	return text
}

// FindLeaseHolder says who has the lease of the pool whose schema this is; false if
// nobody has. It is for people to read: the answer may be out of date when it arrives.
func FindLeaseHolder(ctx context.Context, q pgdb.Querier, schema string) (LeaseHolder, bool, error) {
	return findHolder(ctx, q, "ExclusiveLock", leaseKey(schema), "the sweep lease of schema "+pgdb.Ident(schema))
}

// findHolder finds the session, other than the own, that has an advisory lock in a
// mode, the oldest of several.
func findHolder(ctx context.Context, q pgdb.Querier, mode string, key int64, what string) (h LeaseHolder, ok bool, err error) {
	const query = `
		SELECT l.pid, coalesce(a.application_name, ''), coalesce(pg_catalog.host(a.client_addr), ''), a.backend_start
		FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
		WHERE l.locktype = 'advisory' AND l.granted AND l.mode = $1 AND l.pid <> pg_catalog.pg_backend_pid()
			AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
			AND (l.classid::bigint << 32) | l.objid::bigint = $2 AND l.objsubid = 1
		ORDER BY a.backend_start, l.pid LIMIT 1`
	var since *time.Time
	err = q.QueryRow(ctx, query, mode, key).Scan(&h.PID, &h.Application, &h.Address, &since)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return LeaseHolder{}, false, nil
	case err != nil:
		return LeaseHolder{}, false, fmt.Errorf("find the holder of %s: %w", what, err)
	}
	if since != nil {
		h.Since = *since
	}
	return h, true, nil
}
