package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

const (
	past   = blob.Instant(1_000_000_000_000_000_000) // 2001
	future = blob.Instant(4_000_000_000_000_000_000) // 2096
)

var (
	locked      = fleet.Pin{State: fleet.Locked}
	unprotected = fleet.Pin{State: fleet.Unprotected}
)

func protected(until blob.Instant) fleet.Pin {
	return fleet.Pin{State: fleet.Protected, Until: until}
}

func TestPinsZeroValueKeeps(t *testing.T) {
	t.Parallel()
	equal(t, fleet.Pin{}, locked)
	equal(t, fmt.Sprint(fleet.Locked, fleet.Unprotected, fleet.Protected), "locked unprotected protected")
}

// Each key has the answer of its own rows, in the order of the keys.
func TestPins(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn := connect(t, url, patient)
	check(t, fleet.EnsureSchema(t.Context(), conn, schema))
	for _, p := range []struct {
		key    blob.Key
		owner  string
		expiry blob.Instant
	}{
		{"live", "a", future},
		{"expired", "a", past},
		{"before 1970", "a", -1},
		{"one of two", "a", past},
		{"one of two", "b", future},
		{"both", "a", future + 1},
		{"both", "b", future},
		{"", "", blob.MaxInstant},
		{"\x00\xff", "a", future},
		{"never", "a", blob.MinInstant},
		{"not asked for", "a", future},
	} {
		pin(t, conn, p.key, p.owner, p.expiry)
	}
	keys := []blob.Key{"expired", "live", "absent", "both", "one of two", "", "before 1970", "\x00\xff", "live", "never"}
	want := []fleet.Pin{
		unprotected, protected(future), unprotected, protected(future + 1), protected(future), protected(blob.MaxInstant),
		unprotected, protected(future), protected(future), unprotected,
	}
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		for _, ask := range []asker{fleet.CheckPins, fleet.LivePins} {
			equal(t, answers(t, ask, tx, keys), want)
			equal(t, answers(t, ask, tx, nil), nil)
		}
		return nil
	})
	// Looking writes nothing, not even a lock.
	check(t, conn.InTx(t.Context(), pgdb.ReadOnly, func(_ context.Context, tx pgx.Tx) error {
		equal(t, answers(t, fleet.LivePins, tx, keys), want)
		return nil
	}))
}

// Where there is no table nobody has pinned anything, and the transaction in
// which that was found goes on.
func TestPinsWithoutTable(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		for _, ask := range []asker{fleet.CheckPins, fleet.LivePins} {
			equal(t, answers(t, ask, tx, []blob.Key{"a", "b"}), []fleet.Pin{unprotected, unprotected})
		}
		return fleet.EnsureSchema(ctx, tx, schema)
	})
	equal(t, relations(t, conn), []string{"gc_pins", "gc_pins_pkey"})
}

// Pins that the role may not see aren't absent.
func TestPinsForbidden(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	check(t, fleet.EnsureSchema(t.Context(), connect(t, url, patient), schema))
	_, roleURL := pgtest.Role(t, url, "")
	conn := connect(t, roleURL, patient)
	for _, ask := range []asker{fleet.CheckPins, fleet.LivePins} {
		pins, err := ask(t.Context(), conn, schema, []blob.Key{"a"})
		if pins != nil || pgdb.Code(err) != pgdb.InsufficientPrivilege {
			t.Errorf("got pins %v and error %v, want that of the missing privilege", pins, err)
		}
	}
}

// A row that another transaction has locked makes its key locked: of an expired
// pin, it may be the renewal that is about to commit.
func TestPinsLockedByAnother(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn, renewer := connect(t, url, patient), connect(t, url, patient)
	check(t, fleet.EnsureSchema(t.Context(), conn, schema))
	pin(t, conn, "renewed", "a", past)
	pin(t, conn, "one of two", "a", past)
	pin(t, conn, "one of two", "b", past)
	pin(t, conn, "other", "a", past)
	keys := []blob.Key{"one of two", "other", "renewed", "absent"}

	renewal, err := renewer.Begin(t.Context())
	check(t, err)
	pgtest.Exec(t, renewal, "UPDATE "+table+" SET expiry = $1 WHERE key = 'renewed' OR owner = 'b'", int64(future))
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		equal(t, answers(t, fleet.CheckPins, tx, keys), []fleet.Pin{locked, unprotected, locked, unprotected})
		equal(t, answers(t, fleet.LivePins, tx, keys), []fleet.Pin{unprotected, unprotected, unprotected, unprotected})
		return nil
	})
	check(t, renewal.Commit(t.Context()))
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		equal(t, answers(t, fleet.CheckPins, tx, keys), []fleet.Pin{protected(future), unprotected, protected(future), unprotected})
		return nil
	})
}

// A check keeps every pin of its keys from being renewed until its transaction
// ends, expired ones too; looking keeps nobody.
func TestPinsLocksRows(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn, other := connect(t, url, patient), connect(t, url, patient)
	check(t, fleet.EnsureSchema(t.Context(), conn, schema))
	pin(t, conn, "expired", "a", past)
	pin(t, conn, "live", "a", future)
	pin(t, conn, "not asked for", "a", future)
	lockable := func(key string) bool {
		_, err := other.Exec(t.Context(), "SELECT FROM "+table+" WHERE key = convert_to($1, 'UTF8') FOR UPDATE NOWAIT", key)
		if err != nil && pgdb.Code(err) != pgdb.LockNotAvailable {
			t.Fatal(err)
		}
		return err == nil
	}
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		answers(t, fleet.LivePins, tx, []blob.Key{"expired", "live"})
		equal(t, lockable("expired"), true)
		answers(t, fleet.CheckPins, tx, []blob.Key{"live", "expired"})
		equal(t, lockable("expired"), false)
		equal(t, lockable("live"), false)
		equal(t, lockable("not asked for"), true)
		return nil
	})
	equal(t, lockable("expired"), true)
}

// What commits between the locks and the reading is seen: the answer is younger
// than the locks. Here a pin appears, and one that another had locked is live.
func TestPinsReadAfterLocking(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn, other := connect(t, url, patient), connect(t, url, patient)
	check(t, fleet.EnsureSchema(t.Context(), conn, schema))
	pin(t, conn, "renewed", "a", past)
	renewal, err := other.Begin(t.Context())
	check(t, err)
	pgtest.Exec(t, renewal, "UPDATE "+table+" SET expiry = $1", int64(future))
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		between := &interrupted{Querier: tx, at: 2, fn: func() {
			check(t, renewal.Commit(t.Context()))
			pin(t, other, "new", "a", future)
		}}
		equal(t, answers(t, fleet.CheckPins, between, []blob.Key{"new", "renewed"}), []fleet.Pin{locked, locked})
		equal(t, between.queries, 2)
		return nil
	})
}

// The clock is the wall's, not that of the transaction's beginning.
func TestPinsClock(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn, other := connect(t, url, patient), connect(t, url, patient)
	check(t, fleet.EnsureSchema(t.Context(), conn, schema))
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		var began, expiry int64
		check(t, tx.QueryRow(ctx, "SELECT (extract(epoch FROM now()) * 1000000000)::bigint").Scan(&began))
		check(t, other.QueryRow(ctx, "SELECT "+pgdb.Now).Scan(&expiry))
		if expiry <= began {
			t.Fatal("the clock stands still")
		}
		pin(t, other, "a", "just expired", blob.Instant(expiry))
		inAnHour, err := blob.Instant(expiry).Add(time.Hour)
		check(t, err)
		pin(t, other, "b", "for an hour", inAnHour)
		equal(t, answers(t, fleet.CheckPins, tx, []blob.Key{"a", "b"}), []fleet.Pin{unprotected, protected(inAnHour)})
		return nil
	})
}

func TestPinsEnsureSchemaRaced(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conns := make([]*pgdb.Conn, 8)
	for i := range conns {
		conns[i] = connect(t, url, pgdb.Timeouts{Lock: time.Millisecond})
	}
	errs := make([]error, len(conns))
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i, conn := range conns {
		wg.Go(func() {
			<-start
			errs[i] = fleet.EnsureSchema(t.Context(), conn, schema)
		})
	}
	close(start)
	wg.Wait()
	check(t, errors.Join(errs...))
	equal(t, relations(t, conns[0]), []string{"gc_pins", "gc_pins_pkey"})
	pin(t, conns[0], "a", "b", future)
	check(t, fleet.EnsureSchema(t.Context(), conns[1], schema))
	inTx(t, conns[2], func(_ context.Context, tx pgx.Tx) error {
		equal(t, answers(t, fleet.CheckPins, tx, []blob.Key{"a"}), []fleet.Pin{protected(future)})
		return nil
	})
}

// A table that isn't that of the pins is named and left alone. One that a crash
// would empty isn't that of the pins.
func TestPinsEnsureSchemaForeignTable(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	pgtest.Exec(t, conn, "CREATE SCHEMA "+pgdb.Ident(schema))
	for _, c := range []struct{ ddl, differs string }{
		{"CREATE UNLOGGED TABLE %s (key bytea, owner bytea, expiry bigint NOT NULL, PRIMARY KEY (key, owner))", "missing: ordinary table; unexpected: unlogged table"},
		{"CREATE TABLE %s (key bytea PRIMARY KEY, owner bytea NOT NULL, expiry bigint NOT NULL)", "missing: PRIMARY KEY (key, owner); unexpected: PRIMARY KEY (key)"},
		{
			"CREATE TABLE %s (key bytea, owner text, expiry timestamptz NOT NULL, PRIMARY KEY (key, owner))",
			"missing: owner bytea NOT NULL, expiry bigint NOT NULL; unexpected: owner text NOT NULL, expiry timestamp with time zone NOT NULL",
		},
		{"CREATE VIEW %s AS SELECT 1 AS key", "unexpected: view"},
	} {
		tx, err := conn.Begin(t.Context())
		check(t, err)
		pgtest.Exec(t, tx, fmt.Sprintf(c.ddl, table))
		before := relations(t, tx)
		if err := fleet.EnsureSchema(t.Context(), tx, schema); err == nil || !strings.Contains(err.Error(), c.differs) {
			t.Errorf("got error %v, want one that says %q", err, c.differs)
		}
		equal(t, relations(t, tx), before)
		check(t, tx.Rollback(t.Context()))
	}
}

// What is printed for people to run makes what EnsureSchema makes, and can be
// run again.
func TestPinsDDL(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	pgtest.Exec(t, conn, "CREATE SCHEMA "+pgdb.Ident(schema))
	for range 2 {
		for _, statement := range fleet.PinsDDL(schema) {
			pgtest.Exec(t, conn, statement)
		}
	}
	check(t, fleet.EnsureSchema(t.Context(), conn, schema))
	equal(t, relations(t, conn), []string{"gc_pins", "gc_pins_pkey"})
}

var table = pgdb.Ident(schema, "gc_pins")

type asker func(ctx context.Context, q pgdb.Querier, schema string, keys []blob.Key) ([]fleet.Pin, error)

func answers(t *testing.T, ask asker, q pgdb.Querier, keys []blob.Key) []fleet.Pin {
	t.Helper()
	pins, err := ask(t.Context(), q, schema, keys)
	check(t, err)
	return pins
}

func pin(t *testing.T, q pgdb.Querier, key blob.Key, owner string, expiry blob.Instant) {
	t.Helper()
	pgtest.Exec(t, q, "INSERT INTO "+table+" VALUES ($1, $2, $3)", []byte(key), []byte(owner), int64(expiry))
}

// interrupted runs fn before the query of the number at.
type interrupted struct {
	pgdb.Querier
	at      int
	fn      func()
	queries int
}

func (q *interrupted) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if q.queries++; q.queries == q.at {
		q.fn()
	}
	return q.Querier.Query(ctx, sql, args...)
}

// relations reads the names of everything in the schema that pg_class knows.
func relations(t *testing.T, q pgdb.Querier) []string {
	t.Helper()
	rows, err := q.Query(t.Context(), `SELECT c.relname::text FROM pg_catalog.pg_class c
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 ORDER BY c.relname`, schema)
	check(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	check(t, err)
	return names
}
