package fleet_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// keyLock is the number of a key's lock, computed here once more.
func keyLock(schema string, key blob.Key) int64 {
	sum := sha256.Sum256([]byte("gc-agent key lock\x00" + schema + "\x00" + string(key)))
	return int64(binary.BigEndian.Uint64(sum[:]))
}

// The server numbers the locks as described, whatever the bytes and the session's
// settings, and no two alike.
func TestKeyLockNumber(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	pgtest.Exec(t, conn, "SET standard_conforming_strings = off; SET bytea_output = escape")
	seen := map[int64]bool{}
	for _, s := range []string{schema, "gc_agent", `a\'b`, "ä", "s\x01"} {
		for _, key := range []blob.Key{"", "a", "\x00", "\xff\x00", `\x61`, "ä", blob.Key(strings.Repeat("k", 1500))} {
			got := ask[int64](t, conn, "SELECT "+fleet.KeyLockSQL(s, "$1::bytea"), []byte(key))
			equal(t, got, keyLock(s, key))
			if seen[got] {
				t.Errorf("the lock of schema %q and key %q is another's", s, key)
			}
			seen[got] = true
		}
	}
	if fleet.PoolLock("a") == fleet.PoolLock("b") || seen[fleet.PoolLock(schema)] {
		t.Error("a pool's lock is that of something else")
	}
}

// What a transaction gets nobody else does, exclusively or shared, until it ends.
// What others have it doesn't get, and waits for nobody.
func TestLockKeys(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn, other := connect(t, url, patient), connect(t, url, patient)
	keys := []blob.Key{"b", "\xff", "a", "b", ""}
	free := func(key blob.Key) bool {
		return ask[bool](t, other, "SELECT pg_try_advisory_xact_lock_shared($1)", keyLock(schema, key))
	}
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		equal(t, lock(t, tx, keys), []bool{true, true, true, true, true})
		equal(t, lock(t, tx, keys[:1]), []bool{true})
		equal(t, lock(t, tx, nil), nil)
		for _, key := range keys {
			equal(t, free(key), false)
		}
		equal(t, free("c"), true)
		equal(t, ask[bool](t, other, "SELECT pg_try_advisory_xact_lock_shared($1)", fleet.PoolLock(schema)), false)
		return nil
	})
	equal(t, free("a"), true)

	held, err := other.Begin(t.Context())
	check(t, err)
	pgtest.Exec(t, held, "SELECT pg_advisory_xact_lock_shared($1)", keyLock(schema, "b"))
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		equal(t, lock(t, tx, keys), []bool{false, true, true, false, true})
		return nil
	})
	pgtest.Exec(t, held, "SELECT pg_advisory_xact_lock_shared($1)", fleet.PoolLock(schema))
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		equal(t, lock(t, tx, keys), make([]bool, len(keys)))
		equal(t, ask[int](t, tx, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"), 0)
		return nil
	})
	check(t, held.Rollback(t.Context()))
}

// In a transaction that has failed nothing is known of any key.
func TestLockKeysFails(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	tx, err := conn.Begin(t.Context())
	check(t, err)
	if _, err := tx.Exec(t.Context(), "SELECT 1/0"); err == nil {
		t.Fatal("the statement succeeded")
	}
	if got, err := fleet.LockKeys(t.Context(), tx, schema, []blob.Key{"a"}); got != nil || err == nil {
		t.Errorf("got %v and error %v", got, err)
	}
	check(t, tx.Rollback(t.Context()))
}

// A transaction whose snapshot may be older than the locks is refused.
func TestLockKeysIsolation(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		tx, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		check(t, err)
		got, err := fleet.LockKeys(t.Context(), tx, schema, []blob.Key{"a"})
		if got != nil || err == nil || !strings.Contains(err.Error(), string(level)) {
			t.Errorf("%s: got %v and error %v", level, got, err)
		}
		check(t, tx.Rollback(t.Context()))
	}
}

func TestMaxBatch(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	n, err := fleet.MaxBatch(t.Context(), conn)
	check(t, err)
	equal(t, n, ask[int](t, conn, `SELECT current_setting('max_locks_per_transaction')::int
		* (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int) / 4`))
	if n < 1 {
		t.Errorf("a batch may lock %d keys", n)
	}
}

func lock(t *testing.T, tx pgx.Tx, keys []blob.Key) []bool {
	t.Helper()
	locked, err := fleet.LockKeys(t.Context(), tx, schema, keys)
	check(t, err)
	return locked
}
