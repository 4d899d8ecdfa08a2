package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

var (
	contendedKey = fleet.Verdict{}
	referenced   = fleet.Verdict{Decision: fleet.Referenced}
	dead         = fleet.Verdict{Decision: fleet.Dead}
)

func pinnedUntil(until blob.Instant) fleet.Verdict {
	return fleet.Verdict{Decision: fleet.Pinned, Until: until}
}

func arbitrate(t *testing.T, tx pgx.Tx, keys []blob.Key) []fleet.Verdict {
	t.Helper()
	verdicts, err := fleet.ArbitrateBatch(t.Context(), tx, schema, keys, refs{})
	check(t, err)
	return verdicts
}

func TestVerdictZeroValueKeeps(t *testing.T) {
	t.Parallel()
	equal(t, fleet.Verdict{}.Decision, fleet.Contended)
	equal(t, fmt.Sprint(fleet.Contended, fleet.Referenced, fleet.Pinned, fleet.Dead), "contended referenced pinned dead")
}

// One answer over the pins and the application's own table, for a batch in its
// order, and for one key the same. The tables are left as they were.
func TestArbitrate(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	pgtest.Exec(t, conn, "INSERT INTO refs VALUES ('referred'), ('both'), (NULL)")
	agedPin(t, conn, "pinned", "a", future)
	agedPin(t, conn, "pinned", "b", past)
	agedPin(t, conn, "both", "a", future)
	agedPin(t, conn, "expired", "a", past)
	agedPin(t, conn, "for ever", "a", blob.MaxInstant)
	keys := []blob.Key{"pinned", "dead", "both", "expired", "referred", "dead", "for ever"}
	want := []fleet.Verdict{pinnedUntil(future), dead, referenced, dead, referenced, dead, pinnedUntil(blob.MaxInstant)}
	objects := relations(t, conn)
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		equal(t, arbitrate(t, tx, keys), want)
		equal(t, arbitrate(t, tx, nil), nil)
		for i, key := range keys {
			verdict, err := fleet.Arbitrate(ctx, tx, schema, key, refs{})
			check(t, err)
			equal(t, verdict, want[i])
		}
		return nil
	})
	equal(t, countPins(t, conn), 5)
	equal(t, relations(t, conn), objects)

	// The table is the application's: it may do with it what it wants.
	pgtest.Exec(t, conn, "DELETE FROM refs WHERE blob = 'both'; INSERT INTO refs VALUES ('dead')")
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		equal(t, arbitrate(t, tx, []blob.Key{"both", "dead", "referred"}), []fleet.Verdict{pinnedUntil(future), referenced, referenced})
		return nil
	})
}

// A key that is being pinned, or whose pin is being changed, is contended and no
// other; what refers to it counts all the same.
func TestArbitrateContended(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	writer := connect(t, url, patient)
	pgtest.Exec(t, conn, "INSERT INTO refs VALUES ('referred')")
	agedPin(t, conn, "renewed", "me", past)
	agedPin(t, conn, "live", "me", future)
	held, err := writer.Begin(t.Context())
	check(t, err)
	for _, key := range []blob.Key{"new", "referred", "live"} {
		pinKey(t, held, key, "you", time.Minute)
	}
	pgtest.Exec(t, held, "UPDATE "+table+" SET expiry = $1 WHERE key = 'renewed'", int64(future))
	keys := []blob.Key{"dead", "live", "new", "referred", "renewed"}
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		equal(t, arbitrate(t, tx, keys), []fleet.Verdict{dead, contendedKey, contendedKey, referenced, contendedKey})
		return nil
	})
	check(t, held.Rollback(t.Context()))
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		equal(t, arbitrate(t, tx, keys), []fleet.Verdict{dead, pinnedUntil(future), dead, referenced, dead})
		return nil
	})
}

// A call that pins very many keys holds up the whole pool; another pool goes on.
func TestArbitratePoolContended(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	writer := connect(t, url, patient)
	held, err := writer.Begin(t.Context())
	check(t, err)
	_, err = call[[]bool](t.Context(), held, pinAll, pgdb.Bytes(keysNamed("k", 501)), []byte("me"), time.Minute)
	check(t, err)
	pgtest.Exec(t, conn, "INSERT INTO refs VALUES ('referred')")
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		equal(t, arbitrate(t, tx, []blob.Key{"other", "referred"}), []fleet.Verdict{contendedKey, referenced})
		verdict, err := fleet.Arbitrate(ctx, tx, "another", "other", refs{})
		check(t, err)
		equal(t, verdict, dead)
		return nil
	})
	check(t, held.Rollback(t.Context()))
}

// Two arbitrations at once: the second gets no key, and waits for none.
func TestArbitrateTwice(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	other := connect(t, url, pgdb.Timeouts{Lock: time.Millisecond})
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		equal(t, arbitrate(t, tx, []blob.Key{"a"}), []fleet.Verdict{dead})
		inTx(t, other, func(_ context.Context, second pgx.Tx) error {
			equal(t, arbitrate(t, second, []blob.Key{"a", "b"}), []fleet.Verdict{contendedKey, contendedKey})
			return nil
		})
		return nil
	})
}

// The sources are read after the pins: a writer that refers and unpins in one
// transaction is seen by one or the other.
func TestArbitrateReadsSourcesLast(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	writer := connect(t, url, patient)
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		verdict, err := fleet.Arbitrate(ctx, tx, schema, "a", sourceFunc(func(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]bool, error) {
			pgtest.Exec(t, writer, "INSERT INTO refs VALUES ('a')")
			return refs{}.Unreferenced(ctx, q, keys)
		}))
		check(t, err)
		equal(t, verdict, referenced)
		return nil
	})
}

// When sources fail, or answer for other keys than they were asked about, nothing
// is known of any key.
func TestArbitrateSourcesFail(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	broken := errors.New("broken")
	for _, answer := range []func() ([]bool, error){
		func() ([]bool, error) { return []bool{true, true}, broken },
		func() ([]bool, error) { return []bool{true}, nil },
		func() ([]bool, error) { return []bool{true, true, true}, nil },
	} {
		inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
			verdicts, err := fleet.ArbitrateBatch(ctx, tx, schema, []blob.Key{"a", "b"}, sourceFunc(func(context.Context, pgdb.Querier, []blob.Key) ([]bool, error) {
				return answer()
			}))
			if verdicts != nil || err == nil {
				t.Errorf("got %v and error %v", verdicts, err)
			}
			return nil
		})
	}
}

// The sources' statement may take two seconds, or less where the transaction says
// so; the transaction's own limit is there again afterwards.
func TestArbitrateLimitsScan(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	for limit, want := range map[time.Duration]string{
		0: "2s", time.Minute: "2s", 1500 * time.Millisecond: "1500ms", 2 * time.Second: "2s", 48 * time.Hour: "2s",
	} {
		conn := connect(t, url, pgdb.Timeouts{Statement: limit})
		inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
			before := ask[string](t, tx, "SHOW statement_timeout")
			_, err := fleet.Arbitrate(ctx, tx, schema, "a", sourceFunc(func(_ context.Context, q pgdb.Querier, _ []blob.Key) ([]bool, error) {
				equal(t, ask[string](t, q, "SHOW statement_timeout"), want)
				return []bool{true}, nil
			}))
			check(t, err)
			equal(t, ask[string](t, tx, "SHOW statement_timeout"), before)
			return nil
		})
	}
}

// When the session of an arbitration ends its locks end, and so does what it was
// about to delete.
func TestArbitrateDiesWithItsSession(t *testing.T) {
	t.Parallel()
	url, observer := newPool(t)
	conn := connect(t, url, patient)
	putBlob(t, observer, "a")
	tx, err := conn.Begin(t.Context())
	check(t, err)
	equal(t, arbitrate(t, tx, []blob.Key{"a"}), []fleet.Verdict{dead})
	pgtest.Exec(t, tx, `DELETE FROM public."Blobs" WHERE "Id" = 'a'`)
	terminate(t, observer, conn)
	equal(t, pinKey(t, observer, "a", "me", time.Minute), true)
	if err := tx.Commit(t.Context()); err == nil {
		t.Error("the delete of a session that has ended was committed")
	}
	equal(t, hasBlob(t, observer, "a"), true)
}

func TestPinCheck(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	renewer := connect(t, url, patient)
	agedPin(t, conn, "live", "a", past)
	agedPin(t, conn, "live", "b", future)
	agedPin(t, conn, "expired", "a", past)
	pinCheck := func(key blob.Key) fleet.PinState {
		state, err := fleet.PinCheck(t.Context(), conn, schema, key)
		check(t, err)
		return state
	}
	all := func() string { return fmt.Sprint(pinCheck("live"), pinCheck("expired"), pinCheck("absent")) }
	equal(t, all(), "protected unprotected unprotected")
	// A row that somebody has locked isn't a third answer.
	renewal, err := renewer.Begin(t.Context())
	check(t, err)
	pgtest.Exec(t, renewal, "UPDATE "+table+" SET expiry = $1", int64(future))
	equal(t, all(), "protected unprotected unprotected")
	check(t, renewal.Commit(t.Context()))
	equal(t, all(), "protected protected unprotected")

	state, err := fleet.PinCheck(t.Context(), conn, "elsewhere", "a")
	code(t, err, pgdb.UndefinedTable)
	equal(t, state, fleet.Locked)
}

type sourceFunc func(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]bool, error)

func (f sourceFunc) Unreferenced(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]bool, error) {
	return f(ctx, q, keys)
}
