package fleet

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// PinKeys calls the schema's function pin for keys and returns, in their order,
// whether their blobs are there. The pins are in force once tx has committed, which
// fails with SQLSTATE 40001 if one has expired by then; so may the call itself. It
// waits for arbitrations that have a key locked, no longer than lock_timeout.
func PinKeys(ctx context.Context, tx pgx.Tx, schema string, keys []blob.Key, owner Owner, ttl time.Duration) ([]bool, error) {
	var there []bool
	sql := "SELECT " + pgdb.Ident(schema) + ".pin($1::bytea[], $2::bytea, $3::interval)"
	if err := tx.QueryRow(ctx, sql, pgdb.Bytes(keys), []byte(owner), ttl).Scan(&there); err != nil {
		return nil, fmt.Errorf("pin in schema %s: %w", pgdb.Ident(schema), err)
	}
	if len(there) != len(keys) {
		return nil, fmt.Errorf("pin in schema %s: %d keys, %d answers", pgdb.Ident(schema), len(keys), len(there))
	}
	return there, nil
}

// UnpinKeys removes an owner's pins and says for each key, in the order of keys,
// whether there was one. It waits for an arbitration that has a pin locked, no
// longer than lock_timeout.
func UnpinKeys(ctx context.Context, tx pgx.Tx, schema string, keys []blob.Key, owner Owner) ([]bool, error) {
	// Locked in key order, so that two calls can't deadlock.
	sql := fmt.Sprintf(`
		WITH held AS MATERIALIZED (
			SELECT key FROM %[1]s WHERE key = ANY($1::bytea[]) AND owner = $2 ORDER BY key FOR UPDATE
		), removed AS (
			DELETE FROM %[1]s AS p USING held WHERE p.key = held.key AND p.owner = $2 RETURNING p.key
		)
		SELECT r.key IS NOT NULL FROM unnest($1::bytea[]) WITH ORDINALITY AS k (key, ord)
		LEFT JOIN removed r ON r.key = k.key ORDER BY k.ord`, pgdb.Ident(schema, pinsTable))
	rows, err := tx.Query(ctx, sql, pgdb.Bytes(keys), []byte(owner))
	if err != nil {
		return nil, fmt.Errorf("unpin in schema %s: %w", pgdb.Ident(schema), err)
	}
	removed, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	if err != nil {
		return nil, fmt.Errorf("unpin in schema %s: %w", pgdb.Ident(schema), err)
	}
	return removed, nil
}

// ListPins returns live pins in the order of their keys and owners. It locks
// nothing.
func ListPins(ctx context.Context, q pgdb.Querier, schema string, f PinFilter) ([]PinRow, error) {
	sql := fmt.Sprintf(`
		SELECT p.key, p.owner, p.expiry - c.now FROM %s AS p, (SELECT %s AS now) AS c
		WHERE p.expiry > c.now AND ($1::bytea IS NULL OR p.key = $1) AND ($2::bytea IS NULL OR p.owner = $2)
			AND ($3::bytea IS NULL OR (p.key, p.owner) > ($3::bytea, $4::bytea))
		ORDER BY p.key, p.owner LIMIT $5`, pgdb.Ident(schema, pinsTable), pgdb.Now)
	var key, owner, afterKey, afterOwner []byte
	if f.Key != nil {
		key = append([]byte{}, *f.Key...)
	}
	if f.Owner != nil {
		owner = append([]byte{}, *f.Owner...)
	}
	if f.After != nil {
		afterKey, afterOwner = append([]byte{}, f.After.Key...), append([]byte{}, f.After.Owner...)
	}
	rows, err := q.Query(ctx, sql, key, owner, afterKey, afterOwner, f.Limit)
	if err != nil {
		return nil, fmt.Errorf("list pins in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	var found []PinRow
	var foundKey, foundOwner []byte
	var left int64
	_, err = pgx.ForEachRow(rows, []any{&foundKey, &foundOwner, &left}, func() error {
		found = append(found, PinRow{Key: blob.Key(foundKey), Owner: Owner(foundOwner), Left: time.Duration(left)})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list pins in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	return found, nil
}

// ShareKeys takes the locks that a pin takes, and waits for arbitrations that have
// them, no longer than lock_timeout. Whatever is read in later statements of the
// transaction, which is READ COMMITTED, sees what those have deleted. It is for
// whoever keeps pins elsewhere and looks for blobs here: the session of a delete
// can outlive the agent's connection to it.
func ShareKeys(ctx context.Context, tx pgx.Tx, schema string, keys []blob.Key) error {
	var err error
	if len(keys) > mostKeyLocks {
		_, err = tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock_shared($1)", poolLock(schema))
	} else {
		_, err = tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock_shared("+keyLockSQL(schema, "k.key")+
			") FROM (SELECT u.key FROM unnest($1::bytea[]) AS u (key) ORDER BY u.key) k", pgdb.Bytes(keys))
	}
	if err != nil {
		return fmt.Errorf("share the locks of %d keys of schema %s: %w", len(keys), pgdb.Ident(schema), err)
	}
	return nil
}
