package fleet_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// tier is the application's table of blobs; refs refers to it, by no foreign key.
var tier = fleet.PinTier{Table: `"public"."Blobs"`, KeyColumn: "Id", Kind: blob.KindText}

// newPool makes an application's tables and the pool's schema beside them, and
// returns the database's URL and the agent's connection.
func newPool(t *testing.T) (url string, agent *pgdb.Conn) {
	t.Helper()
	url = pgtest.Database(t)
	agent = connect(t, url, patient)
	pgtest.Exec(t, agent, `CREATE TABLE "Blobs" ("Id" text PRIMARY KEY, data text); CREATE TABLE refs (blob text)`)
	check(t, fleet.EnsureSchema(t.Context(), agent, schema))
	check(t, fleet.EnsureFunctions(t.Context(), agent, schema, []fleet.PinTier{tier}))
	return url, agent
}

func putBlob(t *testing.T, q pgdb.Querier, keys ...blob.Key) {
	t.Helper()
	for _, key := range keys {
		pgtest.Exec(t, q, `INSERT INTO public."Blobs" VALUES ($1, 'data')`, string(key))
	}
}

func hasBlob(t *testing.T, q pgdb.Querier, key blob.Key) bool {
	t.Helper()
	return ask[bool](t, q, `SELECT EXISTS (SELECT FROM public."Blobs" WHERE "Id" = $1)`, string(key))
}

func countPins(t *testing.T, q pgdb.Querier) int {
	t.Helper()
	return ask[int](t, q, "SELECT count(*) FROM "+table)
}

// ask runs a query for one value.
func ask[T any](t *testing.T, q pgdb.Querier, query string, args ...any) T {
	t.Helper()
	var v T
	if err := q.QueryRow(t.Context(), query, args...).Scan(&v); err != nil {
		t.Fatalf("query %q: %v", query, err)
	}
	return v
}

// call calls a function of the pool's schema.
func call[T any](ctx context.Context, q pgdb.Querier, expr string, args ...any) (v T, err error) {
	err = q.QueryRow(ctx, "SELECT "+pgdb.Ident(schema)+"."+expr, args...).Scan(&v)
	return v, err
}

const (
	pinOne = "pin($1::bytea, $2::bytea, $3::interval)"
	pinAll = "pin($1::bytea[], $2::bytea, $3::interval)"
)

func pinKey(t *testing.T, q pgdb.Querier, key blob.Key, owner fleet.Owner, ttl time.Duration) bool {
	t.Helper()
	there, err := call[bool](t.Context(), q, pinOne, []byte(key), []byte(owner), ttl)
	check(t, err)
	return there
}

// agedPin writes a pin whatever its expiry, past the trigger.
func agedPin(t *testing.T, q pgdb.Querier, key blob.Key, owner fleet.Owner, expiry blob.Instant) {
	t.Helper()
	pgtest.Exec(t, q, fmt.Sprintf(`BEGIN; ALTER TABLE %[1]s DISABLE TRIGGER gc_pins_expired;
		INSERT INTO %[1]s VALUES ('\x%[2]x', '\x%[3]x', %[4]d);
		ALTER TABLE %[1]s ENABLE ALWAYS TRIGGER gc_pins_expired; COMMIT`, table, string(key), string(owner), int64(expiry)))
}

func hostNow(t *testing.T, q pgdb.Querier) blob.Instant {
	t.Helper()
	return blob.Instant(ask[int64](t, q, "SELECT "+pgdb.Now))
}

func expiryOf(t *testing.T, q pgdb.Querier, key blob.Key, owner fleet.Owner) blob.Instant {
	t.Helper()
	return blob.Instant(ask[int64](t, q, "SELECT expiry FROM "+table+" WHERE key = $1 AND owner = $2", []byte(key), []byte(owner)))
}

// lives fails unless the instant lies ttl after a moment between two.
func lives(t *testing.T, got, before, after blob.Instant, ttl time.Duration) {
	t.Helper()
	if got < before+blob.Instant(ttl) || got > after+blob.Instant(ttl) {
		t.Errorf("the expiry is %s after the call began, want %s", time.Duration(got-before), ttl)
	}
}

// pass returns once the host's clock is past the instant.
func pass(t *testing.T, q pgdb.Querier, at blob.Instant) {
	t.Helper()
	for hostNow(t, q) <= at {
		pgtest.Exec(t, q, "SELECT pg_sleep($1)", time.Duration(at-hostNow(t, q)).Seconds())
	}
}

// refs is the application's other table, as a source.
type refs struct{}

func (refs) Unreferenced(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]bool, error) {
	rows, err := q.Query(ctx, `
		SELECT NOT EXISTS (SELECT FROM public.refs r WHERE convert_to(r.blob, 'UTF8') = k.key)
		FROM unnest($1::bytea[]) WITH ORDINALITY AS k (key, ord) ORDER BY k.ord`, pgdb.Bytes(keys))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[bool])
}

// hookedTx calls fn before its query number at.
type hookedTx struct {
	pgx.Tx
	at, queries int
	fn          func()
}

func (tx *hookedTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if tx.queries++; tx.queries == tx.at {
		tx.fn()
	}
	return tx.Tx.Query(ctx, sql, args...)
}

// tracer calls fn with the number of each statement, from 1, and its SQL, before
// and after it. The context that fn returns is the statement's.
type tracer struct {
	n  int
	fn func(ctx context.Context, n int, before bool, sql string) context.Context
}

type statement struct{}

func (tr *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	tr.n++
	return tr.fn(context.WithValue(ctx, statement{}, data.SQL), tr.n, true, data.SQL)
}

func (tr *tracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	sql, _ := ctx.Value(statement{}).(string)
	tr.fn(ctx, tr.n, false, sql)
}

// connectTraced opens a connection whose statements are counted from here on.
func connectTraced(t *testing.T, url string, fn func(ctx context.Context, n int, before bool, sql string) context.Context) *pgdb.Conn {
	t.Helper()
	ready := false
	tr := &tracer{}
	tr.fn = func(ctx context.Context, n int, before bool, sql string) context.Context {
		if !ready {
			return ctx
		}
		return fn(ctx, n, before, sql)
	}
	conn := pgtest.Session(t, url, pgdb.Options{Timeouts: patient, Tracer: tr})
	tr.n, ready = 0, true
	return conn
}

// outcome is what a writer that ran beside the test was told.
type outcome struct {
	told bool
	err  error
}

func start(fn func() (bool, error)) <-chan outcome {
	done := make(chan outcome, 1)
	go func() {
		told, err := fn()
		done <- outcome{told, err}
	}()
	return done
}

// untilBlocked returns once conn waits for a lock, or what runs on it has ended.
func untilBlocked(t *testing.T, observer pgdb.Querier, conn *pgdb.Conn, done <-chan outcome) (blocked bool) {
	t.Helper()
	for len(done) == 0 {
		if ask[bool](t, observer, "SELECT cardinality(pg_blocking_pids($1)) > 0", conn.PgConn().PID()) {
			return true
		}
	}
	return false
}

// told fails unless the writer was told so, without an error.
func told(t *testing.T, got outcome, want bool) {
	t.Helper()
	check(t, got.err)
	equal(t, got.told, want)
}

func code(t *testing.T, err error, want string) {
	t.Helper()
	if pgdb.Code(err) != want {
		t.Errorf("got error %v, want SQLSTATE %s", err, want)
	}
}

// keysNamed returns n keys in an order that isn't that of bytes.
func keysNamed(prefix string, n int) []blob.Key {
	keys := make([]blob.Key, n)
	for i := range keys {
		keys[i] = blob.Key(fmt.Sprint(prefix, i))
	}
	slices.Reverse(keys)
	return keys
}
