package fleet_test

import (
	"context"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// Each race is run with its interleaving forced. With the protections on, no
// writer is told yes for a blob that is gone then. With the one that it is about
// left out, one is: the protection is what makes the difference.

// raceKey is the blob that all races are about. Nothing refers to it.
const raceKey blob.Key = "raced"

// arena is where a race takes place: a sweep, a writer, somebody who watches.
type arena struct {
	url             string
	sweep, observer *pgdb.Conn
}

func newArena(t *testing.T) arena {
	t.Helper()
	url, observer := newPool(t)
	putBlob(t, observer, raceKey)
	return arena{url: url, sweep: connect(t, url, patient), observer: observer}
}

// arbitrateAndDelete is the sweep's transaction: it decides, lets the writer get
// ahead, and deletes what it found dead. It locks no row of the application's, as
// it can't for blobs that aren't rows.
func (a arena) arbitrateAndDelete(t *testing.T, without fleet.Omit, between func()) {
	t.Helper()
	inTx(t, a.sweep, func(_ context.Context, tx pgx.Tx) error {
		a.deleteIfDead(t, tx, without)(between)
		return nil
	})
}

func (a arena) deleteIfDead(t *testing.T, tx pgx.Tx, without fleet.Omit) func(between func()) {
	t.Helper()
	verdicts, err := fleet.ArbitrateOmitting(t.Context(), tx, schema, []blob.Key{raceKey}, refs{}, without)
	check(t, err)
	return func(between func()) {
		between()
		if verdicts[0].Decision == fleet.Dead {
			pgtest.Exec(t, tx, `DELETE FROM public."Blobs" WHERE "Id" = $1`, string(raceKey))
		}
	}
}

// lost says whether a writer that was told yes has no blob. That it must try
// again is no yes.
func (a arena) lost(t *testing.T, writer outcome) bool {
	t.Helper()
	if writer.err != nil && pgdb.Code(writer.err) != pgdb.SerializationFailure {
		t.Fatal(writer.err)
	}
	return writer.err == nil && writer.told && !hasBlob(t, a.observer, raceKey)
}

// bothWays runs a race without its protection, where it must lose the blob, and
// with it.
func bothWays(t *testing.T, without fleet.Omit, race func(t *testing.T, without fleet.Omit) (lost bool)) {
	t.Helper()
	for name, c := range map[string]struct {
		omit fleet.Omit
		lost bool
	}{"protected": {fleet.Omit{}, false}, "unprotected": {without, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := race(t, c.omit)
			if got != c.lost {
				t.Errorf("the blob is lost: %t, want %t", got, c.lost)
			}
			if got && c.lost {
				raced.Store(without, true)
			}
		})
	}
}

// raced are the switches by which a race has lost its blob.
var raced sync.Map

// unraced returns the switches by which none has.
func unraced() (names []string) {
	switches := reflect.TypeFor[fleet.Omit]()
	for i := range switches.NumField() {
		var without fleet.Omit
		reflect.ValueOf(&without).Elem().Field(i).SetBool(true)
		if _, ok := raced.Load(without); !ok {
			names = append(names, switches.Field(i).Name)
		}
	}
	return names
}

// upload is a writer that pins, looks, uploads if need be, and commits.
func upload(ctx context.Context, conn *pgdb.Conn, keys []blob.Key) (bool, error) {
	err := conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) (err error) {
		var there bool
		if len(keys) == 1 {
			there, err = call[bool](ctx, tx, pinOne, []byte(keys[0]), []byte("me"), time.Minute)
		} else {
			var all []bool
			all, err = call[[]bool](ctx, tx, pinAll, pgdb.Bytes(keys), []byte("me"), time.Minute)
			there = err == nil && all[0]
		}
		if err == nil && !there {
			_, err = tx.Exec(ctx, `INSERT INTO public."Blobs" VALUES ($1)`, string(keys[0]))
		}
		return err
	})
	return true, err
}

// A writer dedups its put while the sweep is between the check and the delete: it
// finds the blob there. Whatever it pins with, it must wait.
func TestRaceDedupPut(t *testing.T) {
	t.Parallel()
	keys := append([]blob.Key{raceKey}, keysNamed("k", 500)...)
	uploading := func(keys []blob.Key) func(context.Context, *pgdb.Conn) (bool, error) {
		return func(ctx context.Context, conn *pgdb.Conn) (bool, error) { return upload(ctx, conn, keys) }
	}
	for name, c := range map[string]struct {
		without fleet.Omit
		write   func(context.Context, *pgdb.Conn) (bool, error)
	}{
		"joint put": {fleet.Omit{KeyLock: true}, func(ctx context.Context, conn *pgdb.Conn) (bool, error) {
			return jointPutRaced(ctx, conn, fleet.Omit{})
		}},
		"pin":              {fleet.Omit{KeyLock: true}, uploading(keys[:1])},
		"pin of several":   {fleet.Omit{KeyLock: true}, uploading(keys[:9])},
		"pin of very many": {fleet.Omit{PoolLock: true}, uploading(keys)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothWays(t, c.without, func(t *testing.T, without fleet.Omit) bool {
				a := newArena(t)
				writer := connect(t, a.url, patient)
				var done <-chan outcome
				a.arbitrateAndDelete(t, without, func() {
					done = start(func() (bool, error) { return c.write(t.Context(), writer) })
					untilBlocked(t, a.observer, writer, done)
				})
				got := <-done
				told(t, got, true)
				return a.lost(t, got)
			})
		})
	}
}

func jointPutRaced(ctx context.Context, conn *pgdb.Conn, without fleet.Omit) (bool, error) {
	jt, err := fleet.BeginJointTx(ctx, conn, schema)
	if err != nil {
		return false, err
	}
	jt.Omit(without)
	if _, err := fleet.JointPut(ctx, jt, entry(raceKey, ""), "me", time.Minute); err != nil {
		return false, err
	}
	return true, fleet.PinCommit(ctx, jt)
}

// A writer that puts first and locks the key only when it pins: the sweep comes in
// between, and the entry that was found there is gone.
func TestRacePutBeforePin(t *testing.T) {
	t.Parallel()
	bothWays(t, fleet.Omit{EntryLock: true}, func(t *testing.T, without fleet.Omit) bool {
		a := newArena(t)
		inserted := false
		conn := connectTraced(t, a.url, func(ctx context.Context, _ int, before bool, sql string) context.Context {
			switch {
			case before && inserted:
				inserted = false
				a.arbitrateAndDelete(t, fleet.Omit{}, func() {})
			case !before:
				inserted = len(sql) > 6 && sql[:6] == "INSERT"
			}
			return ctx
		})
		ok, err := jointPutRaced(t.Context(), conn, without)
		told(t, outcome{ok, err}, true)
		return a.lost(t, outcome{ok, err})
	})
}

// An application that puts before it pins is told by the pin that its blob has
// gone: it can upload it again in the same transaction.
func TestRacePutBeforePinInSQL(t *testing.T) {
	t.Parallel()
	a := newArena(t)
	writer := connect(t, a.url, patient)
	inTx(t, writer, func(ctx context.Context, tx pgx.Tx) error {
		const insert = `INSERT INTO public."Blobs" VALUES ($1) ON CONFLICT DO NOTHING`
		tag, err := tx.Exec(ctx, insert, string(raceKey))
		check(t, err)
		equal(t, tag.RowsAffected(), 0)
		a.arbitrateAndDelete(t, fleet.Omit{}, func() {})
		equal(t, pinKey(t, tx, raceKey, "me", time.Minute), false)
		pgtest.Exec(t, tx, insert, string(raceKey))
		return nil
	})
	a.arbitrateAndDelete(t, fleet.Omit{}, func() {})
	equal(t, hasBlob(t, a.observer, raceKey), true)
}

// expiring makes a pin that is live still and expires soon, and calls fn, which
// says whether it was soon enough itself; otherwise it gets more time.
func (a arena) expiring(t *testing.T, fn func(expiry blob.Instant) bool) {
	t.Helper()
	for soon := 250 * time.Millisecond; ; soon *= 2 {
		pgtest.Exec(t, a.observer, "DELETE FROM "+table)
		expiry, err := hostNow(t, a.observer).Add(soon)
		check(t, err)
		agedPin(t, a.observer, raceKey, "me", expiry)
		if fn(expiry) {
			return
		}
	}
}

// A pin is renewed just before it expires, and the renewal's commit is slow: the
// sweep sees an expired pin that is about to be live.
func TestRaceRenewalCommitsLate(t *testing.T) {
	t.Parallel()
	bothWays(t, fleet.Omit{PinRows: true}, func(t *testing.T, without fleet.Omit) bool {
		a := newArena(t)
		writer := connect(t, a.url, patient)
		var done outcome
		a.expiring(t, func(expiry blob.Instant) bool {
			tx, err := writer.Begin(t.Context())
			check(t, err)
			if !renew(t, tx, raceKey, "me", time.Hour) {
				check(t, tx.Rollback(t.Context()))
				return false
			}
			pass(t, a.observer, expiry)
			a.arbitrateAndDelete(t, without, func() {})
			done = outcome{true, tx.Commit(t.Context())}
			return true
		})
		told(t, done, true)
		return a.lost(t, done)
	})
}

// The sweep has locked the pin while it was live, and a renewal waits for that
// lock. Then the pin expires, and the sweep finds it so.
func TestRaceRenewalWaits(t *testing.T) {
	t.Parallel()
	bothWays(t, fleet.Omit{RenewalLock: true}, func(t *testing.T, without fleet.Omit) bool {
		a := newArena(t)
		writer := connect(t, a.url, patient)
		var done <-chan outcome
		a.expiring(t, func(expiry blob.Instant) (inTime bool) {
			inTx(t, a.sweep, func(_ context.Context, tx pgx.Tx) error {
				// The third query reads the pins, the second has locked them.
				hooked := &hookedTx{Tx: tx, at: 3, fn: func() {
					done = start(func() (bool, error) {
						return fleet.PinRenewOmitting(t.Context(), writer, schema, raceKey, "me", time.Hour, without)
					})
					inTime = untilBlocked(t, a.observer, writer, done) && hostNow(t, a.observer) < expiry
					pass(t, a.observer, expiry)
				}}
				conclude := a.deleteIfDead(t, hooked, fleet.Omit{})
				if inTime {
					conclude(func() {})
				}
				return nil
			})
			if !inTime {
				<-done
			}
			return inTime
		})
		return a.lost(t, <-done)
	})
}

// A transaction pins for a short while, takes longer than that, and its commit
// would tell its writer that the blob is safe now.
func TestRacePinOutlived(t *testing.T) {
	t.Parallel()
	bothWays(t, fleet.Omit{CommitCheck: true}, func(t *testing.T, without fleet.Omit) bool {
		a := newArena(t)
		pgtest.Exec(t, a.observer, "DROP TRIGGER gc_pins_expired ON "+table)
		for _, statement := range fleet.FunctionsDDLOmitting(schema, []fleet.PinTier{tier}, without) {
			pgtest.Exec(t, a.observer, statement)
		}
		writer := connect(t, a.url, patient)
		tx, err := writer.Begin(t.Context())
		check(t, err)
		there := pinKey(t, tx, raceKey, "me", time.Millisecond)
		pass(t, a.observer, expiryOf(t, tx, raceKey, "me"))
		done := outcome{there, tx.Commit(t.Context())}
		if without == (fleet.Omit{}) {
			code(t, done.err, pgdb.SerializationFailure)
		}
		a.arbitrateAndDelete(t, fleet.Omit{}, func() {})
		return a.lost(t, done)
	})
}

// A writer whose snapshot is older than the delete still sees the blob. Pinning it
// locks its row, which finds that out.
func TestRaceOldSnapshot(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for name, keys := range map[string][]blob.Key{"pin": {raceKey}, "pin of several": {raceKey, "k1", "k2"}} {
			t.Run(string(level)+", "+name, func(t *testing.T) {
				t.Parallel()
				bothWays(t, fleet.Omit{BlobRow: true}, func(t *testing.T, without fleet.Omit) bool {
					a := newArena(t)
					for _, statement := range fleet.FunctionsDDLOmitting(schema, []fleet.PinTier{tier}, without) {
						pgtest.Exec(t, a.observer, statement)
					}
					writer := connect(t, a.url, patient)
					tx, err := writer.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
					check(t, err)
					equal(t, hasBlob(t, tx, raceKey), true) // its snapshot is taken
					a.arbitrateAndDelete(t, fleet.Omit{}, func() {})
					there, err := pinned(t.Context(), tx, keys)
					if err == nil {
						err = tx.Commit(t.Context())
					}
					return a.lost(t, outcome{there, err})
				})
			})
		}
	}
}

// pinned pins keys, by one call or the other, and says whether the first one's blob is
// there.
func pinned(ctx context.Context, q pgdb.Querier, keys []blob.Key) (bool, error) {
	if len(keys) == 1 {
		return call[bool](ctx, q, pinOne, []byte(keys[0]), []byte("me"), time.Minute)
	}
	all, err := call[[]bool](ctx, q, pinAll, pgdb.Bytes(keys), []byte("me"), time.Minute)
	return err == nil && all[0], err
}

// A writer replaces its pin by a reference, in one transaction, while the sweep reads
// one after the other.
func TestRacePinBecomesReference(t *testing.T) {
	t.Parallel()
	bothWays(t, fleet.Omit{PinsFirst: true}, func(t *testing.T, without fleet.Omit) bool {
		a := newArena(t)
		writer := connect(t, a.url, patient)
		equal(t, pinKey(t, writer, raceKey, "me", time.Hour), true)
		moved := false
		move := func() {
			moved = true
			inTx(t, writer, func(ctx context.Context, tx pgx.Tx) error {
				pgtest.Exec(t, tx, `INSERT INTO public.refs VALUES ($1)`, string(raceKey))
				_, err := call[bool](ctx, tx, "unpin($1::bytea, $2::bytea)", []byte(raceKey), []byte("me"))
				return err
			})
		}
		inTx(t, a.sweep, func(_ context.Context, tx pgx.Tx) error {
			// The second query locks the pins, or, where the sources come first, asks them;
			// the third is before what comes after either.
			hooked := &hookedTx{Tx: tx, at: 3, fn: move}
			if without == (fleet.Omit{}) {
				// The pins' rows are locked by then: the writer would wait for the end.
				hooked.at = 2
			}
			a.deleteIfDead(t, hooked, without)(func() {})
			return nil
		})
		return moved && !hasBlob(t, a.observer, raceKey)
	})
}

// A sweep whose transaction isn't READ COMMITTED, as the role's default may be, has a
// snapshot that is older than its locks. It refuses to decide; and what begins the
// agent's transactions doesn't let it come to that.
func TestRaceDefaultIsolation(t *testing.T) {
	t.Parallel()
	bothWays(t, fleet.Omit{Isolation: true}, func(t *testing.T, without fleet.Omit) bool {
		a := newArena(t)
		pgtest.Exec(t, a.sweep, `SET default_transaction_isolation = 'repeatable read'`)
		refer := func() { pgtest.Exec(t, a.observer, `INSERT INTO public.refs VALUES ($1)`, string(raceKey)) }
		tx, err := a.sweep.Begin(t.Context())
		check(t, err)
		equal(t, hasBlob(t, tx, raceKey), true) // its snapshot is taken
		refer()
		verdicts, err := fleet.ArbitrateOmitting(t.Context(), tx, schema, []blob.Key{raceKey}, refs{}, without)
		if without == (fleet.Omit{}) {
			if err == nil {
				t.Errorf("it has decided: %v", verdicts)
			}
			check(t, tx.Rollback(t.Context()))
			pgtest.Exec(t, a.observer, `DELETE FROM public.refs`)
			inTx(t, a.sweep, func(_ context.Context, tx pgx.Tx) error {
				equal(t, hasBlob(t, tx, raceKey), true)
				refer()
				a.deleteIfDead(t, tx, without)(func() {})
				return nil
			})
		} else {
			check(t, err)
			equal(t, verdicts[0].Decision, fleet.Dead)
			pgtest.Exec(t, tx, `DELETE FROM public."Blobs" WHERE "Id" = $1`, string(raceKey))
			check(t, tx.Commit(t.Context()))
		}
		return !hasBlob(t, a.observer, raceKey)
	})
}

// Clients that pin very many keys, each before the last one has ended, leave the sweep
// its turn: it queues, and whoever comes later comes after it.
func TestPoolLockQueue(t *testing.T) {
	t.Parallel()
	for name, timeout := range map[string]string{"queueing": "10s", "only trying": "0"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newArena(t)
			many := pgdb.Bytes(keysNamed("k", 501))
			pinMany := func(ctx context.Context, q pgdb.Querier, owner string) error {
				_, err := call[[]bool](ctx, q, pinAll, many, []byte(owner), time.Minute)
				return err
			}
			one, two := connect(t, a.url, patient), connect(t, a.url, patient)
			first, err := one.Begin(t.Context())
			check(t, err)
			check(t, pinMany(t.Context(), first, "one"))
			holder, ok, err := fleet.FindPoolHolder(t.Context(), a.observer, schema)
			check(t, err)
			equal(t, ok, true)
			equal(t, uint32(holder.PID), one.PgConn().PID())

			var second <-chan outcome
			tx, err := a.sweep.Begin(t.Context())
			check(t, err)
			pgtest.Exec(t, tx, "SET LOCAL lock_timeout = '"+timeout+"'")
			sweep := start(func() (bool, error) {
				verdicts, err := fleet.ArbitrateBatch(t.Context(), tx, schema, []blob.Key{raceKey}, refs{})
				return err == nil && verdicts[0].Decision == fleet.Dead, err
			})
			queued := untilBlocked(t, a.observer, a.sweep, sweep)
			equal(t, queued, timeout != "0")
			second = start(func() (bool, error) { return true, pinMany(t.Context(), two, "two") })
			equal(t, untilBlocked(t, a.observer, two, second), queued) // one that only tries delays nobody
			check(t, first.Commit(t.Context()))
			told(t, <-sweep, queued)
			check(t, tx.Commit(t.Context()))
			told(t, <-second, true)
		})
	}
}

// Who has the pool's lock and waits for a blob's row that the sweep has locked makes a
// circle with the sweep, which ends it: the keys are contended, and the transaction goes on.
func TestPoolLockCircle(t *testing.T) {
	t.Parallel()
	a := newArena(t)
	writer := connect(t, a.url, patient)
	tx, err := a.sweep.Begin(t.Context())
	check(t, err)
	pgtest.Exec(t, tx, `SELECT FROM public."Blobs" WHERE "Id" = '`+string(raceKey)+`' FOR UPDATE; SET LOCAL lock_timeout = '50ms'`)
	done := start(func() (bool, error) {
		_, err := call[[]bool](t.Context(), writer, pinAll, pgdb.Bytes(append(keysNamed("k", 501), raceKey)), []byte("me"), time.Minute)
		return true, err
	})
	equal(t, untilBlocked(t, a.observer, writer, done), true)
	verdicts, err := fleet.ArbitrateBatch(t.Context(), tx, schema, []blob.Key{raceKey}, refs{})
	check(t, err)
	equal(t, verdicts[0].Decision, fleet.Contended)
	check(t, tx.Commit(t.Context()))
	told(t, <-done, true)
}
