package fleet

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/alkblobs/gc-agent/blob"
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

// renewedSQL begins a statement that renews the live ones of some pins, up to the
// CTEs held, all of them, clock, with their number and the time, and renewed,
// with a row for each that was.
//
// The rows are locked before the clock is read. Otherwise a renewal that found
// its pin live could wait for an arbitration that found it expired, and go on
// once the blob is deleted.
func renewedSQL(schema, which, ttl string, without omit) string {
	lock := "FOR NO KEY UPDATE"
	if without.RenewalLock {
		lock = ""
	}
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
		sql := renewedSQL(schema, "h.key = $1 AND h.owner = $2", "$3::bigint", without) + " SELECT pg_catalog.count(*) > 0 FROM renewed"
		err = q.QueryRow(ctx, sql, []byte(key), []byte(owner), ttl.Nanoseconds()).Scan(&renewed)
	}
	if err != nil {
		return false, fmt.Errorf("renew pin in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	return renewed, nil
}

// RenewOwners is PinRenew for all pins of the owners, in key order, a statement
// for each batch of them, and says how many were renewed and how many lost: found
// expired, and left so, to be found again until they are deleted. On a connection
// each batch is a transaction of its own. It waits for an arbitration that has a
// pin locked, no longer than lock_timeout. After an error the counts are those of
// the batches before it.
func RenewOwners(ctx context.Context, q pgdb.Querier, schema string, owners []Owner, ttl time.Duration, batch int) (renewed, lost int, err error) {
	names := make([][]byte, len(owners))
	for i, owner := range owners {
		names[i] = []byte(owner)
	}
	from := pinID{key: []byte{}, owner: []byte{}}
	err = checkTTL(ttl)
	for more := true; more && err == nil; {
		var r renewal
		if r, err = renewBatch(ctx, q, schema, names, ttl, from, max(1, batch)); err == nil {
			renewed, lost = renewed+r.renewed, lost+r.held-r.renewed
			// The next in the order of bytes.
			from, more = pinID{key: r.last.key, owner: append(r.last.owner, 0)}, r.held >= max(1, batch)
		}
	}
	if err != nil {
		return renewed, lost, fmt.Errorf("renew pins in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	return renewed, lost, nil
}

type pinID struct{ key, owner []byte }

type renewal struct {
	held, renewed int
	last          pinID
}

func renewBatch(ctx context.Context, q pgdb.Querier, schema string, owners [][]byte, ttl time.Duration, from pinID, batch int) (r renewal, err error) {
	which := "h.owner = ANY($1::bytea[]) AND (h.key, h.owner) >= ($2::bytea, $3::bytea) ORDER BY h.key, h.owner LIMIT $4"
	sql := renewedSQL(schema, which, "$5::bigint", omit{}) + `
		SELECT clock.held, (SELECT pg_catalog.count(*) FROM renewed), last.key, last.owner
		FROM clock LEFT JOIN (SELECT key, owner FROM held ORDER BY key DESC, owner DESC LIMIT 1) AS last ON true`
	row := q.QueryRow(ctx, sql, owners, from.key, from.owner, batch, ttl.Nanoseconds())
	err = row.Scan(&r.held, &r.renewed, &r.last.key, &r.last.owner)
	return r, err
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
