package fleet

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/owntable"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// DefaultTTL is how long a pin lives unless somebody says otherwise; MaxTTL is
// the longest that it may be asked to live.
const (
	DefaultTTL = time.Minute
	MaxTTL     = 24 * time.Hour
)

func checkTTL(ttl time.Duration) error {
	if ttl < time.Microsecond || ttl > MaxTTL {
		return fmt.Errorf("a pin's time to live is above 0 and at most %s, not %s", MaxTTL, ttl)
	}
	return nil
}

// renewalLock is how a renewal locks rows of pins.
const renewalLock = "FOR NO KEY UPDATE"

// renewedSQL begins a statement that renews the live ones of some pins, up to the
// CTEs held, all of them, clock, with their number and the time, and renewed,
// with a row for each that was.
//
// The rows are locked before the clock is read. Otherwise a renewal that found
// its pin live could wait for an arbitration that found it expired, and go on
// once the blob is deleted.
func renewedSQL(schema, which, lock, ttl string) string {
	return strings.NewReplacer("{pins}", pgdb.Ident(schema, pinsTable), "{now}", pgdb.Now, "{which}", which, "{ttl}", ttl, "{lock}", lock).Replace(`
	WITH held AS MATERIALIZED (
		SELECT h.key, h.owner, h.expiry FROM {pins} AS h WHERE {which} {lock}
	), clock AS MATERIALIZED (
		SELECT pg_catalog.count(*) AS held, {now} AS now FROM held
	), renewed AS (
		UPDATE {pins} AS p SET expiry = greatest(p.expiry, clock.now + {ttl})
		FROM held, clock
		WHERE p.key = held.key AND p.owner = held.owner AND held.expiry > clock.now
		RETURNING 1
	)`)
}

// PinRenew moves the expiry of a live pin to ttl from now, and says whether
// there was one: an expired pin, or none, stays what it is. It never shortens.
// Whether that lasts is known once q's transaction has committed, which fails
// with SQLSTATE 40001 if the pin has expired again by then.
func PinRenew(ctx context.Context, q pgdb.Querier, schema string, key blob.Key, owner Owner, ttl time.Duration) (bool, error) {
	return pinRenew(ctx, q, schema, key, owner, ttl, omit{})
}

func pinRenew(ctx context.Context, q pgdb.Querier, schema string, key blob.Key, owner Owner, ttl time.Duration, without omit) (renewed bool, err error) {
	if err = checkTTL(ttl); err == nil {
		lock := renewalLock
		if without.RenewalLock {
			lock = ""
		}
		sql := renewedSQL(schema, "h.key = $1 AND h.owner = $2", lock, "$3::bigint") + " SELECT pg_catalog.count(*) > 0 FROM renewed"
		err = q.QueryRow(ctx, sql, []byte(key), []byte(owner), ttl.Nanoseconds()).Scan(&renewed)
	}
	if err != nil {
		return false, fmt.Errorf("renew pin in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	return renewed, nil
}

// Renewal is an owner whose pins are to be renewed.
type Renewal struct {
	Owner Owner
	// Due is when that should have been done: a pin that was live then and has
	// expired since is lost.
	Due blob.Instant
}

// Renewed counts what a renewal did, in pins.
type Renewed struct {
	Renewed int
	// Lost have expired since their renewal was due. They stay expired.
	Lost int
	// Locked were passed over, because somebody else had them locked for longer
	// than lock_timeout. They are as they were.
	Locked int
}

// RenewOwners is PinRenew for all pins of the owners, in key order, a transaction
// for each batch of them. It waits for an arbitration, or a writer, that has a pin
// locked, but runs into lock_timeout only once: from then on it passes over what
// is locked, so that one such pin costs no other its renewal. After an error the
// counts are those of the batches before it.
func RenewOwners(ctx context.Context, conn *pgdb.Conn, schema string, owners []Renewal, ttl time.Duration, batch int) (Renewed, error) {
	var all Renewed
	r := newRenewing(schema, owners, ttl, batch)
	err := checkTTL(ttl)
	for more := true; more && err == nil; {
		var n Renewed
		if n, more, err = r.next(ctx, conn); err == nil {
			all = Renewed{all.Renewed + n.Renewed, all.Lost + n.Lost, all.Locked + n.Locked}
		}
	}
	if err != nil {
		return all, fmt.Errorf("renew pins in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	return all, nil
}

// renewing is a walk over the pins of some owners.
type renewing struct {
	schema     string
	owners     [][]byte
	due        []int64
	ttl        time.Duration
	batch      int
	impatient  bool
	key, owner []byte // where the next batch begins
}

func newRenewing(schema string, owners []Renewal, ttl time.Duration, batch int) *renewing {
	r := &renewing{schema: schema, ttl: ttl, batch: max(1, batch), key: []byte{}, owner: []byte{}}
	for _, o := range owners {
		r.owners, r.due = append(r.owners, []byte(o.Owner)), append(r.due, int64(o.Due))
	}
	return r
}

// next renews a batch; more is false after the last.
func (r *renewing) next(ctx context.Context, conn *pgdb.Conn) (n Renewed, more bool, err error) {
	for {
		err = conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) (err error) {
			n, more, err = r.renew(ctx, tx)
			return err
		})
		if code := pgdb.Code(err); r.impatient || code != pgdb.LockNotAvailable && code != pgdb.DeadlockDetected {
			return n, more, err
		}
		r.impatient = true
	}
}

// renew renews a batch in a transaction. The walk goes on behind it, unless there
// is an error.
func (r *renewing) renew(ctx context.Context, q pgdb.Querier) (n Renewed, more bool, err error) {
	lock := renewalLock
	if r.impatient {
		lock += " SKIP LOCKED"
	}
	const which = "h.owner = ANY($1::bytea[]) AND (h.key, h.owner) >= ($2::bytea, $3::bytea) ORDER BY h.key, h.owner LIMIT $4"
	sql := renewedSQL(r.schema, which, lock, "$5::bigint") + `
		SELECT clock.held, (SELECT pg_catalog.count(*) FROM renewed), last.key, last.owner,
			(SELECT pg_catalog.count(*) FROM held
				JOIN unnest($1::bytea[], $6::bigint[]) AS o (owner, due) ON o.owner = held.owner
				WHERE held.expiry <= clock.now AND held.expiry > o.due)
		FROM clock LEFT JOIN (SELECT key, owner FROM held ORDER BY key DESC, owner DESC LIMIT 1) AS last ON true`
	var held int
	var key, owner []byte
	err = q.QueryRow(ctx, sql, r.owners, r.key, r.owner, r.batch, r.ttl.Nanoseconds(), r.due).
		Scan(&held, &n.Renewed, &key, &owner, &n.Lost)
	if err != nil {
		return Renewed{}, false, err
	}
	more = held >= r.batch
	if r.impatient {
		if n.Locked, err = r.passedOver(ctx, q, held, more, key, owner); err != nil {
			return Renewed{}, false, err
		}
	}
	if more {
		// The next in the order of bytes.
		r.key, r.owner = key, append(owner, 0)
	}
	return n, more, nil
}

// passedOver returns how many pins there are up to the last of the batch, or up
// to the end, beside those that were held.
func (r *renewing) passedOver(ctx context.Context, q pgdb.Querier, held int, more bool, key, owner []byte) (n int, err error) {
	sql := "SELECT pg_catalog.count(*) FROM " + pgdb.Ident(r.schema, pinsTable) +
		" WHERE owner = ANY($1::bytea[]) AND (key, owner) >= ($2::bytea, $3::bytea) AND (NOT $4 OR (key, owner) <= ($5::bytea, $6::bytea))"
	err = q.QueryRow(ctx, sql, r.owners, r.key, r.owner, more, key, owner).Scan(&n)
	// It is younger than the batch: a pin may have gone or come since.
	return max(0, n-held), err
}

// LatestExpiry returns the last expiry of any pin, live or not, that isn't after
// the bound; false without such a pin, and without the table. It reads them all.
func LatestExpiry(ctx context.Context, q pgdb.Querier, schema string, bound blob.Instant) (blob.Instant, bool, error) {
	there, err := owntable.HasTable(ctx, q, schema, pinsTable)
	var latest *int64
	if err == nil && there {
		err = q.QueryRow(ctx, "SELECT pg_catalog.max(expiry) FROM "+pgdb.Ident(schema, pinsTable)+" WHERE expiry <= $1", int64(bound)).Scan(&latest)
	}
	if err != nil {
		return 0, false, fmt.Errorf("read the latest expiry in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	if latest == nil {
		return 0, false, nil
	}
	return blob.Instant(*latest), true, nil
}

// DeleteExpired removes expired pins, at most limit of them, the lower keys
// first, and returns how many. It waits for nobody: a pin that somebody is
// writing stays, and so does one that has been renewed by the time its row is
// locked. After an error nothing was removed; outside a transaction it may not be
// known.
func DeleteExpired(ctx context.Context, q pgdb.Querier, schema string, limit int) (int, error) {
	// The condition is repeated so that it holds under the lock.
	tag, err := q.Exec(ctx, strings.NewReplacer("{pins}", pgdb.Ident(schema, pinsTable), "{now}", pgdb.Now).Replace(`
		WITH old AS MATERIALIZED (
			SELECT key, owner FROM {pins} WHERE expiry <= {now} ORDER BY key, owner LIMIT $1 FOR UPDATE SKIP LOCKED
		)
		DELETE FROM {pins} AS p USING old WHERE p.key = old.key AND p.owner = old.owner AND p.expiry <= {now}`), limit)
	if err != nil {
		return 0, fmt.Errorf("delete expired pins in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	return int(tag.RowsAffected()), nil
}
