package fleet

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// lockID names an advisory lock of a schema. Postgres keeps those of different
// databases apart.
func lockID(what, schema string) int64 {
	sum := sha256.Sum256([]byte("gc-agent " + what + "\x00" + schema))
	return int64(binary.BigEndian.Uint64(sum[:]))
}

// poolLock is the lock of all keys of the pool at once.
func poolLock(schema string) int64 { return lockID("pool lock", schema) }

// keyLockSQL is the number of the lock of one key, given as SQL of a bytea: the
// first eight bytes of a hash over the schema and the key. A schema's name has no
// NUL, so no two pairs are hashed alike. The prefix is decoded from hex because a
// literal with a backslash depends on the session's settings.
//
// Pins and arbitration must name the same lock, so nothing else computes it.
func keyLockSQL(schema, key string) string {
	prefix := hex.EncodeToString([]byte("gc-agent key lock\x00" + schema + "\x00"))
	return `('x' || pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(` +
		`pg_catalog.decode('` + prefix + `', 'hex') || ` + key + `), 1, 8), 'hex'))::bit(64)::bigint`
}

// LockKeys tries to take the key lock of each key for the rest of the
// transaction, and says, in the order of keys, which it got. A key whose lock it didn't
// get is being pinned right now, and it waits for none of those. For the pool's lock,
// which comes first and which whoever pins very many keys at once shares, it waits, as
// long as lock_timeout says, and not at all where that is 0: one that only tried would
// never get it from clients whose turns overlap. Where it can't be had, it got none.
//
// What is read in later statements of the transaction is younger than the locks;
// one that isn't READ COMMITTED, where that isn't so, is refused. After an error
// nothing is known of any key. MaxBatch says for how many keys the server has room.
func LockKeys(ctx context.Context, tx pgx.Tx, schema string, keys []blob.Key) ([]bool, error) {
	return lockKeysOmitting(ctx, tx, schema, keys, omit{})
}

func lockKeysOmitting(ctx context.Context, tx pgx.Tx, schema string, keys []blob.Key, without omit) ([]bool, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	const query = `SELECT pg_catalog.pg_try_advisory_xact_lock($1), pg_catalog.current_setting('transaction_isolation'),
		pg_catalog.current_setting('lock_timeout') <> '0'`
	var pool, bounded bool
	var isolation string
	err := tx.QueryRow(ctx, query, poolLock(schema)).Scan(&pool, &isolation, &bounded)
	if err == nil && !pool && bounded {
		pool, err = waitForPool(ctx, tx, schema)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("lock pool of schema %s: %w", pgdb.Ident(schema), err)
	case isolation != "read committed" && !without.Isolation:
		return nil, fmt.Errorf("lock pool of schema %s: the transaction is %s, not read committed", pgdb.Ident(schema), isolation)
	case !pool:
		return make([]bool, len(keys)), nil
	default:
		return lockEach(ctx, tx, schema, keys)
	}
}

// waitForPool queues for the pool's lock, so that whoever wants to share it from now on
// comes later. Rows of blobs are locked by then, and who shares the lock may wait for
// one: that ends with lock_timeout, or as a deadlock, and is contention like any other.
func waitForPool(ctx context.Context, tx pgx.Tx, schema string) (bool, error) {
	err := pgx.BeginFunc(ctx, tx, func(sub pgx.Tx) error {
		_, err := sub.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock($1)", poolLock(schema))
		return err
	})
	if code := pgdb.Code(err); code == pgdb.LockNotAvailable || code == pgdb.DeadlockDetected {
		return false, nil
	}
	return err == nil, err
}

// FindPoolHolder says which session pins so many keys that it has the whole pool
// locked, the oldest of several; false if none has. It is for people to read: the
// answer may be out of date when it arrives.
func FindPoolHolder(ctx context.Context, q pgdb.Querier, schema string) (LeaseHolder, bool, error) {
	return findHolder(ctx, q, "ShareLock", poolLock(schema), "the pool's lock of schema "+pgdb.Ident(schema))
}

func lockEach(ctx context.Context, tx pgx.Tx, schema string, keys []blob.Key) ([]bool, error) {
	// The order stands in a subquery, so that the locks are taken after the sort.
	rows, err := tx.Query(ctx, `
		SELECT k.ord - 1, pg_catalog.pg_try_advisory_xact_lock(`+keyLockSQL(schema, "k.key")+`)
		FROM (
			SELECT u.key, u.ord FROM unnest($1::bytea[]) WITH ORDINALITY AS u (key, ord) ORDER BY u.key
		) k`, pgdb.Bytes(keys))
	if err != nil {
		return nil, fmt.Errorf("lock keys of schema %s: %w", pgdb.Ident(schema), err)
	}
	locked := make([]bool, len(keys))
	var ord int64
	var got bool
	_, err = pgx.ForEachRow(rows, []any{&ord, &got}, func() error {
		locked[ord] = got
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("lock keys of schema %s: %w", pgdb.Ident(schema), err)
	}
	return locked, nil
}

// MaxBatch returns how many keys one transaction may lock at most: a quarter of
// what the server's lock table is sized for, since everybody shares it, and at
// least 1.
func MaxBatch(ctx context.Context, q pgdb.Querier) (int, error) {
	const query = `SELECT greatest(1, current_setting('max_locks_per_transaction')::bigint
		* (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 4)`
	var n int
	if err := q.QueryRow(ctx, query).Scan(&n); err != nil {
		return 0, fmt.Errorf("ask for the size of the lock table: %w", err)
	}
	return n, nil
}
