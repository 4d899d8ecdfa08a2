package fleet_test

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

func renew(t *testing.T, q pgdb.Querier, key blob.Key, owner fleet.Owner, ttl time.Duration) bool {
	t.Helper()
	renewed, err := fleet.PinRenew(t.Context(), q, schema, key, owner, ttl)
	check(t, err)
	return renewed
}

// A live pin moves, an expired or absent one isn't written, nothing is shortened.
func TestPinRenew(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	pinKey(t, conn, "live", "me", 10*time.Second)
	pinKey(t, conn, "live", "you", 10*time.Second)
	agedPin(t, conn, "expired", "me", past)
	agedPin(t, conn, "for ever", "me", blob.MaxInstant)

	yours := expiryOf(t, conn, "live", "you")
	before := hostNow(t, conn)
	equal(t, renew(t, conn, "live", "me", fleet.DefaultTTL), true)
	long := expiryOf(t, conn, "live", "me")
	lives(t, long, before, hostNow(t, conn), time.Minute)
	equal(t, renew(t, conn, "live", "me", time.Second), true)
	equal(t, expiryOf(t, conn, "live", "me"), long)
	equal(t, expiryOf(t, conn, "live", "you"), yours)
	equal(t, renew(t, conn, "for ever", "me", time.Hour), true)
	equal(t, expiryOf(t, conn, "for ever", "me"), blob.MaxInstant)

	version := ask[string](t, conn, "SELECT xmin || ' ' || ctid FROM "+table+" WHERE key = 'expired'")
	equal(t, renew(t, conn, "expired", "me", time.Hour), false)
	equal(t, ask[string](t, conn, "SELECT xmin || ' ' || ctid FROM "+table+" WHERE key = 'expired'"), version)
	equal(t, renew(t, conn, "expired", "you", time.Hour), false)
	equal(t, renew(t, conn, "absent", "me", time.Hour), false)
	equal(t, countPins(t, conn), 4)
}

func TestPinRenewRefused(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	for _, ttl := range []time.Duration{0, -time.Second, time.Nanosecond, fleet.MaxTTL + 1} {
		if renewed, err := fleet.PinRenew(t.Context(), conn, schema, "a", "me", ttl); renewed || err == nil {
			t.Errorf("for %s: got %t and error %v", ttl, renewed, err)
		}
		if _, err := fleet.RenewOwners(t.Context(), conn, schema, renewals("me"), ttl, 10); err == nil {
			t.Errorf("all for %s: got no error", ttl)
		}
	}
	// No table, no tolerance.
	_, err := fleet.PinRenew(t.Context(), conn, "elsewhere", "a", "me", time.Minute)
	code(t, err, pgdb.UndefinedTable)
}

// renewals are the owners, with their renewal due for ever.
func renewals(owners ...fleet.Owner) []fleet.Renewal {
	all := make([]fleet.Renewal, len(owners))
	for i, owner := range owners {
		all[i] = fleet.Renewal{Owner: owner, Due: math.MinInt64}
	}
	return all
}

// All pins of the owners are renewed, in batches of any size; those that have
// expired are counted and left alone. The SQL function does it for one owner.
func TestRenewOwners(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	setUp := func() {
		pgtest.Exec(t, conn, "DELETE FROM "+table)
		for _, key := range keysNamed("k", 10) {
			for _, owner := range []fleet.Owner{"", "a", "a\x00", "b", "other"} {
				pinKey(t, conn, key, owner, 10*time.Second)
			}
		}
		pinKey(t, conn, "", "", 10*time.Second)
		pinKey(t, conn, "long", "a", 5*time.Hour)
		for _, key := range []blob.Key{"k", "k5\x00", "\xff"} {
			agedPin(t, conn, key, "a", past)
		}
		agedPin(t, conn, "old", "other", past)
	}
	// renewed, with the pins left at ten seconds
	sum := func(before, after blob.Instant, ttl time.Duration) (n int) {
		return ask[int](t, conn, "SELECT count(*) FROM "+table+" WHERE expiry BETWEEN $1 AND $2", int64(before)+int64(ttl), int64(after)+int64(ttl))
	}
	for _, batch := range []int{-1, 1, 2, 7, 1000} {
		setUp()
		before := hostNow(t, conn)
		n, err := fleet.RenewOwners(t.Context(), conn, schema, renewals("a", "", "a\x00"), time.Hour, batch)
		check(t, err)
		equal(t, n, fleet.Renewed{Renewed: 32, Lost: 3})
		equal(t, sum(before, hostNow(t, conn), time.Hour), 31) // and one that is longer
		equal(t, countPins(t, conn), 56)
	}
	setUp()
	before := hostNow(t, conn)
	equal(t, ask[int](t, conn, "SELECT "+pgdb.Ident(schema)+".renew('a')"), 11)
	equal(t, sum(before, hostNow(t, conn), time.Minute), 10)
	equal(t, ask[int](t, conn, "SELECT "+pgdb.Ident(schema)+".renew('nobody', '1 h')"), 0)
	n, err := fleet.RenewOwners(t.Context(), conn, schema, nil, time.Hour, 10)
	check(t, err)
	equal(t, n, fleet.Renewed{})
}

// Lost is what was live when its renewal was due, for each owner its own time.
func TestRenewOwnersCountsWhatWasLost(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	for i, key := range keysNamed("k", 5) {
		agedPin(t, conn, key, "a", past+blob.Instant(i))
		agedPin(t, conn, key, "b", past+blob.Instant(i))
	}
	pinKey(t, conn, "live", "a", time.Minute)
	owners := []fleet.Renewal{{Owner: "a", Due: past + 1}, {Owner: "b", Due: past + 3}}
	for _, batch := range []int{1, 3, 100} {
		n, err := fleet.RenewOwners(t.Context(), conn, schema, owners, time.Minute, batch)
		check(t, err)
		equal(t, n, fleet.Renewed{Renewed: 1, Lost: 4})
	}
}

// Pins that somebody keeps locked are passed over, and cost no other its renewal.
func TestRenewOwnersPassesOverTheLocked(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	other := connect(t, url, pgdb.Timeouts{Lock: 10 * time.Millisecond})
	for _, key := range keysNamed("k", 20) {
		pinKey(t, conn, key, "me", time.Minute)
	}
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		_, err := fleet.CheckPins(ctx, tx, schema, []blob.Key{"k3", "k7", "k11", "k12"})
		check(t, err)
		for _, batch := range []int{1, 3, 16, 17, 100} {
			n, err := fleet.RenewOwners(ctx, other, schema, renewals("me"), time.Hour, batch)
			check(t, err)
			equal(t, n, fleet.Renewed{Renewed: 16, Locked: 4})
		}
		return nil
	})
	equal(t, ask[int](t, conn, "SELECT count(*) FROM "+table+" WHERE expiry > "+pgdb.Now+" + 3000000000000"), 16)
}

// The counts of batches before an error are known.
func TestRenewOwnersFails(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	for _, key := range []blob.Key{"a", "b", "c"} {
		pinKey(t, conn, key, "me", time.Minute)
	}
	pgtest.Exec(t, conn, `CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON `+table+` FOR EACH ROW WHEN (new.key = 'c') EXECUTE FUNCTION public.refuse()`)
	n, err := fleet.RenewOwners(t.Context(), conn, schema, renewals("me"), time.Hour, 1)
	code(t, err, "P0001")
	equal(t, n, fleet.Renewed{Renewed: 2})
}

// A renewal is READ COMMITTED, whatever the role's default: a pin that was pinned
// again while it waited is no conflict.
func TestRenewOwnersIsReadCommitted(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	other, observer := connect(t, url, patient), connect(t, url, patient)
	pgtest.Exec(t, other, "SET default_transaction_isolation = 'repeatable read'")
	pinKey(t, conn, "a", "me", time.Minute)
	var done <-chan outcome
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		pinKey(t, tx, "a", "me", 2*time.Minute)
		done = start(func() (bool, error) {
			n, err := fleet.RenewOwners(t.Context(), other, schema, renewals("me"), time.Hour, 10)
			return n.Renewed == 1, err
		})
		equal(t, untilBlocked(t, observer, other, done), true)
		return nil
	})
	told(t, <-done, true)
}

// The latest expiry is that of any pin, up to the bound.
func TestLatestExpiry(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	latest := func(schema string, bound blob.Instant) string {
		at, ok, err := fleet.LatestExpiry(t.Context(), conn, schema, bound)
		check(t, err)
		return fmt.Sprint(int64(at), ok)
	}
	equal(t, latest(schema, blob.MaxInstant), "0 false")
	equal(t, latest("elsewhere", blob.MaxInstant), "0 false")
	agedPin(t, conn, "a", "me", past+1)
	agedPin(t, conn, "b", "me", past)
	equal(t, latest(schema, blob.MaxInstant), fmt.Sprint(int64(past)+1, true))
	equal(t, latest(schema, past+1), fmt.Sprint(int64(past)+1, true))
	equal(t, latest(schema, past), fmt.Sprint(int64(past), true))
	equal(t, latest(schema, past-1), "0 false")
}

// Two renewals of the same pins, each in another order of the owners, don't
// deadlock: the second waits for the first.
func TestRenewOwnersOrder(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	other, observer := connect(t, url, patient), connect(t, url, patient)
	for _, key := range keysNamed("k", 50) {
		pinKey(t, conn, key, "a", time.Minute)
		pinKey(t, conn, key, "b", time.Minute)
	}
	var done <-chan outcome
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		check(t, fleet.RenewAll(ctx, tx, schema, renewals("a", "b"), time.Hour, 30))
		done = start(func() (bool, error) {
			n, err := fleet.RenewOwners(t.Context(), other, schema, renewals("b", "a"), time.Hour, 40)
			return n.Renewed == 100, err
		})
		equal(t, untilBlocked(t, observer, other, done), true)
		return nil
	})
	told(t, <-done, true)
}

// Expired pins go, the lower keys first and no more than asked for; live ones and
// those that somebody is writing stay.
func TestDeleteExpired(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	other := connect(t, url, patient)
	for i, key := range []blob.Key{"c", "a", "b", "d", "e"} {
		agedPin(t, conn, key, "me", past+blob.Instant(i))
	}
	pinKey(t, conn, "live", "me", time.Minute)
	agedPin(t, conn, "live", "you", past)
	left := func() string {
		return ask[string](t, conn, "SELECT coalesce(string_agg(convert_from(key || '.' || owner, 'UTF8'), ' ' ORDER BY key, owner), '') FROM "+table)
	}
	remove := func(limit int) int {
		n, err := fleet.DeleteExpired(t.Context(), conn, schema, limit)
		check(t, err)
		return n
	}
	equal(t, remove(0), 0)
	equal(t, remove(2), 2)
	equal(t, left(), "c.me d.me e.me live.me live.you")

	held, err := other.Begin(t.Context())
	check(t, err)
	pgtest.Exec(t, held, "UPDATE "+table+" SET expiry = $1 WHERE key = 'd'", int64(future))
	equal(t, remove(2), 2)
	equal(t, left(), "d.me live.me live.you")
	equal(t, remove(100), 1)
	check(t, held.Commit(t.Context()))
	equal(t, remove(100), 0)
	equal(t, left(), "d.me live.me")

	_, err = fleet.DeleteExpired(t.Context(), conn, "elsewhere", 1)
	code(t, err, pgdb.UndefinedTable)
}

// A pin that was renewed while the rows were being locked is live and stays.
func TestDeleteExpiredRenewedMeanwhile(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	other := connect(t, url, patient)
	agedPin(t, conn, "a", "me", past)
	// The snapshot is older than the renewal.
	tx, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	check(t, err)
	equal(t, countPins(t, tx), 1)
	pgtest.Exec(t, other, "UPDATE "+table+" SET expiry = $1", int64(future))
	_, err = fleet.DeleteExpired(t.Context(), tx, schema, 10)
	code(t, err, pgdb.SerializationFailure)
	check(t, tx.Rollback(t.Context()))
	equal(t, countPins(t, conn), 1)
}
