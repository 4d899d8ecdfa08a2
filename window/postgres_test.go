package window_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/window"
	"github.com/alkblobs/gc-agent/window/windowtest"
)

func TestPostgres(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	var schemas atomic.Int64
	windowtest.Run(t, func(*testing.T) windowtest.Target {
		// A name that needs its quotes, and means something to Sprintf.
		schema := fmt.Sprintf(`Pool "%d" %%s.x`, schemas.Add(1))
		return windowtest.Target{
			Open:  func(t *testing.T) windowtest.Engine { return window.NewPostgres(pgtest.Connect(t, url), schema) },
			Steps: 8,
			Database: &windowtest.Database{
				InTx: func(t *testing.T, fn func(windowtest.Engine)) {
					inTx(t, connect(t, url, pgdb.Timeouts{}), func(_ context.Context, tx pgx.Tx) error {
						fn(window.NewPostgres(tx, schema))
						return nil
					})
				},
				Relations:     func(t *testing.T) []string { return relations(t, pgtest.Connect(t, url), schema) },
				WantRelations: []string{"gc_window", "gc_window_pkey", "gc_window_visible_after"},
				NoTable:       func(err error) bool { return pgdb.Code(err) == pgdb.UndefinedTable },
			},
		}
	})
}

// The second of two takers waits for the first and, whatever that one's end,
// returns a full batch: of the rows behind it, or of the same ones.
func TestPostgresTakersOverlap(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	first, second, observer := pgtest.Connect(t, url), pgtest.Connect(t, url), pgtest.Connect(t, url)
	w := ensured(t, observer)
	all := []window.Row{{Key: "d", VisibleAfter: 1}, {Key: "c", VisibleAfter: 2}, {Key: "b", VisibleAfter: 3}, {Key: "a", VisibleAfter: 4}}
	older, newer := []window.Row{all[1], all[0]}, []window.Row{all[3], all[2]}
	for range 10 {
		for _, commits := range []bool{true, false} {
			check(t, w.Stage(t.Context(), all))
			tx := begin(t, first)
			taken, err := window.NewPostgres(tx, schema).Take(t.Context(), 10, 2)
			check(t, err)
			equal(t, taken, older)

			var got []window.Row
			wait := inBackground(t, observer, second, func() (err error) {
				got, err = window.NewPostgres(second, schema).Take(t.Context(), 10, 2)
				return err
			})
			if commits {
				check(t, tx.Commit(t.Context()))
			} else {
				check(t, tx.Rollback(t.Context()))
			}
			check(t, wait())

			left := newer
			if commits {
				equal(t, got, newer)
				left = nil
			} else {
				equal(t, got, older)
			}
			rest, err := w.Take(t.Context(), 10, 0)
			check(t, err)
			equal(t, rest, left)
		}
	}
}

// A row that gets a later deadline while a taker waits for it isn't due any more.
func TestPostgresTakeSeesTheNewDeadline(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	stager, taker, observer := pgtest.Connect(t, url), pgtest.Connect(t, url), pgtest.Connect(t, url)
	w := ensured(t, observer)
	check(t, w.Stage(t.Context(), []window.Row{{Key: "a", VisibleAfter: 1}, {Key: "b", VisibleAfter: 2}, {Key: "c", VisibleAfter: 3}}))
	tx := begin(t, stager)
	check(t, window.NewPostgres(tx, schema).Stage(t.Context(), []window.Row{{Key: "a", VisibleAfter: 11}, {Key: "b", VisibleAfter: 9}}))
	var got []window.Row
	wait := inBackground(t, observer, taker, func() (err error) {
		got, err = window.NewPostgres(taker, schema).Take(t.Context(), 10, 0)
		return err
	})
	check(t, tx.Commit(t.Context()))
	check(t, wait())
	equal(t, got, []window.Row{{Key: "b", VisibleAfter: 9}, {Key: "c", VisibleAfter: 3}})
	left, err := w.List(t.Context(), "", 0)
	check(t, err)
	equal(t, left, []window.Row{{Key: "a", VisibleAfter: 11}})
}

// Neither a role's search_path nor temporary objects decide what is read.
func TestPostgresQualifiesEverything(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	pgtest.Exec(t, conn, `
		CREATE TEMP TABLE gc_window (key bytea PRIMARY KEY, visible_after bigint NOT NULL);
		INSERT INTO gc_window VALUES ('decoy', 0);
		CREATE TEMP TABLE pg_class (oid oid, relname name, relnamespace oid);
		CREATE TEMP TABLE pg_namespace (oid oid, nspname name);
		CREATE TEMP TABLE pg_attribute (attrelid oid);
		CREATE TEMP TABLE pg_constraint (conrelid oid)`)
	w := ensured(t, conn)
	check(t, w.EnsureSchema(t.Context()))
	check(t, w.Stage(t.Context(), []window.Row{{Key: "a", VisibleAfter: 1}}))
	taken, err := w.Take(t.Context(), blob.MaxInstant, 0)
	check(t, err)
	equal(t, taken, []window.Row{{Key: "a", VisibleAfter: 1}})
	equal(t, relations(t, conn, schema), []string{"gc_window", "gc_window_pkey", "gc_window_visible_after"})
}

// A window that the role may not look into isn't an empty one.
func TestPostgresForbiddenIsNotEmpty(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	ensured(t, pgtest.Connect(t, url))
	_, roleURL := pgtest.Role(t, url, "")
	w := window.NewPostgres(pgtest.Connect(t, roleURL), schema)
	if _, err := w.Peek(t.Context(), 1, 0); pgdb.Code(err) != pgdb.InsufficientPrivilege {
		t.Errorf("Peek: got error %v, want that of the missing privilege", err)
	}
	if _, err := w.Count(t.Context()); pgdb.Code(err) != pgdb.InsufficientPrivilege {
		t.Errorf("Count: got error %v, want that of the missing privilege", err)
	}
}

func TestPostgresEnsureSchemaRights(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	admin := pgtest.Connect(t, url)
	role, roleURL := pgtest.Role(t, url, "")
	w := window.NewPostgres(pgtest.Connect(t, roleURL), schema)
	if err := w.EnsureSchema(t.Context()); pgdb.Code(err) != pgdb.InsufficientPrivilege {
		t.Fatalf("without rights and schema: got error %v, want that of the missing privilege", err)
	}

	// In a schema that is there, a role needs no right to make schemas.
	pgtest.Exec(t, admin, "CREATE SCHEMA "+pgdb.Ident(schema))
	pgtest.Exec(t, admin, fmt.Sprintf("GRANT USAGE, CREATE ON SCHEMA %s TO %s", pgdb.Ident(schema), pgdb.Ident(role)))
	check(t, w.EnsureSchema(t.Context()))

	// Where the table is there, it needs none to make anything.
	pgtest.Exec(t, admin, fmt.Sprintf("REVOKE CREATE ON SCHEMA %s FROM %s", pgdb.Ident(schema), pgdb.Ident(role)))
	check(t, w.EnsureSchema(t.Context()))
	check(t, w.Stage(t.Context(), []window.Row{{Key: "a", VisibleAfter: 1}}))
}

// A relation of the same name that isn't the window's is named and left alone,
// and the transaction in which it was met goes on.
func TestPostgresEnsureSchemaForeignTable(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	pgtest.Exec(t, conn, "CREATE SCHEMA s")
	for _, c := range []struct{ ddl, differs string }{
		{"CREATE TABLE s.gc_window (key text PRIMARY KEY, visible_after bigint NOT NULL)", "missing: key bytea NOT NULL; unexpected: key text NOT NULL"},
		{"CREATE TABLE s.gc_window (key bytea PRIMARY KEY, visible_after bigint)", "missing: visible_after bigint NOT NULL; unexpected: visible_after bigint"},
		{"CREATE TABLE s.gc_window (key bytea PRIMARY KEY, visible_after timestamptz NOT NULL)", "unexpected: visible_after timestamp with time zone NOT NULL"},
		{"CREATE TABLE s.gc_window (key bytea NOT NULL UNIQUE, visible_after bigint NOT NULL)", "missing: PRIMARY KEY (key); unexpected: UNIQUE (key)"},
		{"CREATE TABLE s.gc_window (key bytea PRIMARY KEY DEFERRABLE, visible_after bigint NOT NULL)", "unexpected: PRIMARY KEY (key) DEFERRABLE"},
		{"CREATE TABLE s.gc_window (key bytea PRIMARY KEY, visible_after bigint NOT NULL, tier text)", "unexpected: tier text"},
		{"CREATE TABLE s.gc_window (key bytea PRIMARY KEY)", "missing: visible_after bigint NOT NULL"},
		{"CREATE UNLOGGED TABLE s.gc_window (key bytea PRIMARY KEY, visible_after bigint NOT NULL)", "missing: ordinary table; unexpected: unlogged table"},
		{"CREATE TABLE s.gc_window (key bytea PRIMARY KEY, visible_after bigint NOT NULL) PARTITION BY HASH (key)", "unexpected: partitioned table"},
		{"CREATE VIEW s.gc_window AS SELECT ''::bytea AS key, 0::bigint AS visible_after", "unexpected: view"},
		{"CREATE SEQUENCE s.gc_window", "unexpected: relation of kind S"},
	} {
		t.Run(c.differs, func(t *testing.T) {
			tx := begin(t, conn)
			pgtest.Exec(t, tx, c.ddl)
			before := relations(t, tx, "s")
			err := window.NewPostgres(tx, "s").EnsureSchema(t.Context())
			if err == nil || !strings.Contains(err.Error(), c.differs) || !strings.Contains(err.Error(), `"s"."gc_window"`) {
				t.Errorf("got error %v, want one that names the table and says %q", err, c.differs)
			}
			equal(t, relations(t, tx, "s"), before)
			check(t, tx.Rollback(t.Context()))
		})
	}
}

// What can't be made whole isn't made, and the transaction around goes on.
func TestPostgresEnsureSchemaAllOrNothing(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn := pgtest.Connect(t, url)
	pgtest.Exec(t, conn, `CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no index'; END $$;
		CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('CREATE INDEX') EXECUTE FUNCTION refuse()`)
	inTx(t, connect(t, url, pgdb.Timeouts{}), func(ctx context.Context, tx pgx.Tx) error {
		if err := window.NewPostgres(tx, schema).EnsureSchema(ctx); err == nil {
			t.Error("EnsureSchema in a transaction succeeded")
		}
		_, err := tx.Exec(ctx, "SELECT")
		return err
	})
	if err := window.NewPostgres(conn, schema).EnsureSchema(t.Context()); err == nil {
		t.Error("EnsureSchema succeeded")
	}
	var schemas int
	check(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_namespace WHERE nspname = $1", schema).Scan(&schemas))
	equal(t, schemas, 0)
}

// The short lock_timeout that spares the application doesn't make one agent fail
// because another is making the schema, and is back in force afterwards.
func TestPostgresEnsureSchemaWaits(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	first, observer := pgtest.Connect(t, url), pgtest.Connect(t, url)
	tx := begin(t, first)
	check(t, window.NewPostgres(tx, schema).EnsureSchema(t.Context()))
	second := connect(t, url, pgdb.Timeouts{Lock: time.Millisecond})
	var lockTimeout string
	wait := inBackground(t, observer, second.Conn, func() error {
		return second.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
			if err := window.NewPostgres(tx, schema).EnsureSchema(ctx); err != nil {
				return err
			}
			return tx.QueryRow(ctx, "SHOW lock_timeout").Scan(&lockTimeout)
		})
	})
	check(t, tx.Commit(t.Context()))
	check(t, wait())
	equal(t, lockTimeout, "1ms")
}

func TestPostgresEnsureSchemaOnEveryQuerier(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	pool, err := pgxpool.New(t.Context(), url)
	check(t, err)
	t.Cleanup(pool.Close)
	check(t, window.NewPostgres(pool, "by_pool").EnsureSchema(t.Context()))
	check(t, window.NewPostgres(connect(t, url, pgdb.Timeouts{}), "by_conn").EnsureSchema(t.Context()))
	statementsOnly := struct{ pgdb.Querier }{pool}
	if err := window.NewPostgres(statementsOnly, "by_statements").EnsureSchema(t.Context()); err == nil {
		t.Error("EnsureSchema succeeded without a transaction")
	}
	for schema, want := range map[string]int{"by_pool": 3, "by_conn": 3, "by_statements": 0} {
		equal(t, len(relations(t, pool, schema)), want)
	}
}

// What is printed for people to run makes what EnsureSchema makes, and can be
// run again.
func TestPostgresDDL(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	for range 2 {
		for _, statement := range window.PostgresDDL(schema) {
			pgtest.Exec(t, conn, statement)
		}
	}
	check(t, window.NewPostgres(conn, schema).EnsureSchema(t.Context()))
	equal(t, relations(t, conn, schema), []string{"gc_window", "gc_window_pkey", "gc_window_visible_after"})
}

const schema = `Gc "Agent"`

func ensured(t *testing.T, q pgdb.Querier) *window.Postgres {
	t.Helper()
	w := window.NewPostgres(q, schema)
	check(t, w.EnsureSchema(t.Context()))
	return w
}

func connect(t *testing.T, url string, timeouts pgdb.Timeouts) *pgdb.Conn {
	t.Helper()
	return pgtest.Session(t, url, pgdb.Options{Timeouts: timeouts})
}

func inTx(t *testing.T, conn *pgdb.Conn, fn func(context.Context, pgx.Tx) error) {
	t.Helper()
	check(t, conn.InTx(t.Context(), pgdb.ReadWrite, fn))
}

// begin begins a transaction that the test ends.
func begin(t *testing.T, conn *pgx.Conn) pgx.Tx {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	check(t, err)
	return tx
}

// inBackground starts fn, returns once conn waits for a lock in it, and hands out
// a function that returns fn's error. Where fn ends without a wait, it is that
// error which tells.
func inBackground(t *testing.T, observer, conn *pgx.Conn, fn func() error) (wait func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- fn() }()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for waiting := false; !waiting; {
		select {
		case err := <-done:
			return func() error { return errors.Join(err, errors.New("nothing made it wait")) }
		default:
		}
		const query = "SELECT wait_event_type IS NOT DISTINCT FROM 'Lock' FROM pg_stat_activity WHERE pid = $1"
		check(t, observer.QueryRow(ctx, query, conn.PgConn().PID()).Scan(&waiting))
	}
	return func() error { return <-done }
}

// relations reads the names of everything in the schema that pg_class knows.
func relations(t *testing.T, q pgdb.Querier, schema string) []string {
	t.Helper()
	rows, err := q.Query(t.Context(), `SELECT c.relname::text FROM pg_catalog.pg_class c
		JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 ORDER BY c.relname`, schema)
	check(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	check(t, err)
	return names
}

func equal[T any](t *testing.T, got, want T) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
