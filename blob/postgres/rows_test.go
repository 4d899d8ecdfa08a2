package postgres_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/postgres"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

func lock(ctx context.Context, t testing.TB, tx pgx.Tx, table *postgres.Table, keys ...blob.Key) []blob.Hold {
	t.Helper()
	holds, err := table.Lock(ctx, tx, keys)
	if err != nil {
		t.Fatal(err)
	}
	return holds
}

func remove(ctx context.Context, t testing.TB, tx pgx.Tx, table *postgres.Table, keys ...blob.Key) []blob.Deletion {
	t.Helper()
	deleted, err := table.Delete(ctx, tx, keys)
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(deleted, func(a, b blob.Deletion) int { return cmp.Compare(a.Key, b.Key) })
	return deleted
}

// begin opens a transaction of the application's, which the test's end rolls back.
func (w *world) begin(t testing.TB, sql string) pgx.Tx {
	t.Helper()
	tx, err := pgtest.Connect(t, w.url).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	pgtest.Exec(t, tx, sql)
	return tx
}

func commit(t testing.TB, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

var (
	held = func(size int64) blob.Hold { return blob.Hold{State: blob.Held, Size: size} }
	busy = blob.Hold{State: blob.Busy}
	gone = blob.Hold{State: blob.Absent}
)

// Whatever an open transaction of the application's does to a row, Lock doesn't
// wait for it.
func TestLockUnderContention(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, sql string
		want      blob.Hold
		committed blob.Hold // once the application has committed
	}{
		{"untouched", "SELECT", held(5), held(5)},
		{"read", "SELECT * FROM blobs", held(5), held(5)},
		{"locked for update", "SELECT FROM blobs WHERE k = 'a' FOR UPDATE", busy, held(5)},
		{"locked for share", "SELECT FROM blobs WHERE k = 'a' FOR SHARE", busy, held(5)},
		{"locked for key share", "SELECT FROM blobs WHERE k = 'a' FOR KEY SHARE", busy, held(5)},
		{"a new reference", "INSERT INTO refs VALUES ('a')", busy, held(5)},
		{"updated", "UPDATE blobs SET size = 6 WHERE k = 'a'", busy, held(6)},
		{"deleted", "DELETE FROM blobs WHERE k = 'a'", busy, gone},
		{"renamed", "UPDATE blobs SET k = 'z' WHERE k = 'a'", busy, gone},
		{"deleted and put again", "DELETE FROM blobs WHERE k = 'a'; INSERT INTO blobs VALUES ('a', 7)", busy, held(7)},
		{"put", "INSERT INTO blobs VALUES ('new', 8)", gone, held(8)},
		{"another row", "SELECT FROM blobs WHERE k = 'b' FOR UPDATE", held(5), held(5)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, `CREATE TABLE blobs (k text PRIMARY KEY, size int); CREATE TABLE refs (b text REFERENCES blobs); INSERT INTO blobs VALUES ('a', 5), ('b', 9)`)
			table := w.table(t, "blobs", "k", "size")
			key := blob.Key("a")
			if tt.name == "put" {
				key = "new"
			}
			app := w.begin(t, tt.sql)
			w.tx(t, func(ctx context.Context, tx pgx.Tx) {
				if got := lock(ctx, t, tx, table, key)[0]; got != tt.want {
					t.Errorf("%+v, want %+v", got, tt.want)
				}
			})
			commit(t, app)
			w.tx(t, func(ctx context.Context, tx pgx.Tx) {
				if got := lock(ctx, t, tx, table, key)[0]; got != tt.committed {
					t.Errorf("after the commit: %+v, want %+v", got, tt.committed)
				}
			})
		})
	}
}

// A migration can't add a foreign key, which a delete might cascade along, between
// the lock and the end of the transaction. One that has the table first is not
// waited for.
func TestLockKeepsForeignKeysAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE blobs (k text PRIMARY KEY, size int); CREATE TABLE refs (b text); INSERT INTO blobs VALUES ('a', 5)`)
	table := w.table(t, "blobs", "k", "size")
	const migration = "ALTER TABLE refs ADD FOREIGN KEY (b) REFERENCES blobs ON DELETE CASCADE"
	w.tx(t, func(ctx context.Context, tx pgx.Tx) {
		if got := lock(ctx, t, tx, table, "a")[0]; got != held(5) {
			t.Fatalf("%+v", got)
		}
		app := w.begin(t, "SET LOCAL lock_timeout = '50ms'")
		if _, err := app.Exec(ctx, migration); pgdb.Code(err) != pgdb.LockNotAvailable {
			t.Errorf("err = %v, want the migration to wait", err)
		}
	})
	app := w.begin(t, migration)
	w.tx(t, func(ctx context.Context, tx pgx.Tx) {
		if _, err := table.Lock(ctx, tx, []blob.Key{"a"}); !errors.Is(err, postgres.ErrTableHeld) {
			t.Errorf("err = %v while the table is being changed", err)
		}
		if _, err := tx.Exec(ctx, "SELECT"); err != nil {
			t.Errorf("the transaction is broken: %v", err)
		}
	})
	commit(t, app)
}

func TestLockOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE blobs (k int PRIMARY KEY, size bigint); INSERT INTO blobs SELECT n, n * 10 FROM generate_series(-5, 1000) n; UPDATE blobs SET size = NULL WHERE k = 7`)
	table := w.table(t, "blobs", "k", "size")
	w.begin(t, "SELECT FROM blobs WHERE k IN (3, -4) FOR UPDATE")
	keys := []blob.Key{"9", "3", "2000", "-5", "7", "-4", "9223372036854775807", "0"}
	want := []blob.Hold{held(90), busy, gone, held(-50), held(0), busy, gone, held(0)}
	w.tx(t, func(ctx context.Context, tx pgx.Tx) {
		if diff := gocmp.Diff(want, lock(ctx, t, tx, table, keys...)); diff != "" {
			t.Errorf("holds (-want +got):\n%s", diff)
		}
		// Others that ask now find what this transaction holds.
		other := connect(t, w.url)
		err := other.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
			if got := lock(ctx, t, tx, table, "9", "8")[0]; got != busy {
				t.Errorf("a row that is held: %+v", got)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		if got := lock(ctx, t, tx, table, "9")[0]; got != held(90) {
			t.Errorf("a row that this transaction holds already: %+v", got)
		}
		if got := lock(ctx, t, tx, table); len(got) != 0 {
			t.Errorf("no keys: %v", got)
		}
		look, err := table.Look(ctx, tx, keys)
		if err != nil {
			t.Fatal(err)
		}
		want[1], want[5] = held(30), held(-40)
		if diff := gocmp.Diff(want, look); diff != "" {
			t.Errorf("look (-want +got):\n%s", diff)
		}
	})
}

// Look locks nothing.
func TestLookWritesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE blobs (k int PRIMARY KEY); INSERT INTO blobs VALUES (1)`)
	table := w.table(t, "blobs", "k", "")
	err := w.agent.InTx(t.Context(), pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := table.Look(ctx, tx, []blob.Key{"1"}); err != nil {
			return err
		}
		pgtest.Exec(t, w.app, "SET lock_timeout = 1; SELECT FROM blobs FOR UPDATE NOWAIT")
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// A new reference waits for the transaction that holds the blob, and fails when
// that has deleted it.
func TestLockHoldsNewReferencesUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE blobs (k text PRIMARY KEY, id int UNIQUE); CREATE TABLE refs (b text REFERENCES blobs); CREATE TABLE ids (b int REFERENCES blobs (id));
		INSERT INTO blobs VALUES ('a', 1), ('b', 2)`)
	table := w.table(t, "blobs", "k", "")
	for _, insert := range []string{"INSERT INTO refs VALUES ('a')", "INSERT INTO ids VALUES (1)"} {
		writer := pgtest.Connect(t, w.url)
		written := make(chan error, 1)
		w.dry(t, func(ctx context.Context, tx pgx.Tx) {
			lock(ctx, t, tx, table, "a")
			pgtest.Exec(t, writer, "SET lock_timeout = '50ms'")
			if _, err := writer.Exec(ctx, insert); pgdb.Code(err) != pgdb.LockNotAvailable {
				t.Errorf("%s beside the lock: %v", insert, err)
			}
		})
		w.dry(t, func(ctx context.Context, tx pgx.Tx) {
			lock(ctx, t, tx, table, "b")
			pgtest.Exec(t, writer, insert) // another blob's lock is no matter
			pgtest.Exec(t, writer, strings.Replace(strings.Replace(insert, "INSERT INTO", "DELETE FROM", 1), "VALUES", "WHERE b =", 1))
		})
		pgtest.Exec(t, writer, "SET lock_timeout = '30s'")
		w.tx(t, func(ctx context.Context, tx pgx.Tx) {
			lock(ctx, t, tx, table, "a")
			go func() {
				_, err := writer.Exec(context.WithoutCancel(ctx), insert)
				written <- err
			}()
			waitForLock(t, w.app, writer)
			remove(ctx, t, tx, table, "a")
		})
		if err := <-written; pgdb.Code(err) != pgdb.ForeignKeyViolation {
			t.Errorf("%s after the delete: %v", insert, err)
		}
		pgtest.Exec(t, w.app, "INSERT INTO blobs VALUES ('a', 1)")
	}
}

// waitForLock returns once the session waits for another's lock.
func waitForLock(t testing.TB, conn *pgx.Conn, waiter *pgx.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for {
		var waits bool
		if err := conn.QueryRow(ctx, "SELECT cardinality(pg_blocking_pids($1)) > 0", waiter.PgConn().PID()).Scan(&waits); err != nil {
			t.Fatalf("the session doesn't wait: %v", err)
		}
		if waits {
			return
		}
	}
}

func TestDelete(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE blobs (k bytea PRIMARY KEY, size int); INSERT INTO blobs VALUES ('\x00', 1), ('\xff', 2), ('', 3), ('\x01', NULL), ('\x02', 9)`)
	table := w.table(t, "blobs", "k", "size")
	w.tx(t, func(ctx context.Context, tx pgx.Tx) {
		want := []blob.Deletion{{Key: "", Size: 3, Outcome: blob.Deleted}, {Key: "\x00", Size: 1, Outcome: blob.Deleted}, {Key: "\x01", Outcome: blob.Deleted}, {Key: "\xff", Size: 2, Outcome: blob.Deleted}}
		if diff := gocmp.Diff(want, remove(ctx, t, tx, table, "\xff", "", "\x00", "absent", "\x01")); diff != "" {
			t.Errorf("deletions (-want +got):\n%s", diff)
		}
		if again := remove(ctx, t, tx, table, "\xff", ""); len(again) != 0 {
			t.Errorf("deleted again: %v", again)
		}
		if none := remove(ctx, t, tx, table); len(none) != 0 {
			t.Errorf("nothing to delete: %v", none)
		}
	})
	if got := count(t, w.app, "SELECT count(*) FROM blobs"); got != 1 {
		t.Errorf("%d rows left, want 1", got)
	}
}

func count(t testing.TB, conn *pgx.Conn, sql string) (n int) {
	t.Helper()
	if err := conn.QueryRow(t.Context(), sql).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// What isn't deleted isn't among the deletions.
func TestDeleteSuppressed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE blobs (k int PRIMARY KEY); INSERT INTO blobs VALUES (1), (2), (3);
		CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS 'BEGIN IF OLD.k = 2 THEN RETURN NULL; END IF; RETURN OLD; END';
		CREATE TRIGGER keep BEFORE DELETE ON blobs FOR EACH ROW EXECUTE FUNCTION keep()`)
	table := w.table(t, "blobs", "k", "")
	w.tx(t, func(ctx context.Context, tx pgx.Tx) {
		want := []blob.Deletion{{Key: "1", Outcome: blob.Deleted}, {Key: "3", Outcome: blob.Deleted}}
		if diff := gocmp.Diff(want, remove(ctx, t, tx, table, "1", "2", "3")); diff != "" {
			t.Errorf("deletions (-want +got):\n%s", diff)
		}
	})
}

// A constraint is checked by Delete, deferred or not, so that its caller can
// tell whose fault it is.
func TestDeleteChecksConstraints(t *testing.T) {
	t.Parallel()
	for _, deferred := range []string{"", "DEFERRABLE", "DEFERRABLE INITIALLY DEFERRED"} {
		w := newWorld(t, `CREATE TABLE blobs (k int PRIMARY KEY); INSERT INTO blobs VALUES (1), (2); CREATE TABLE refs (b int REFERENCES blobs `+deferred+`); INSERT INTO refs VALUES (1)`)
		table := w.table(t, "blobs", "k", "")
		w.dry(t, func(ctx context.Context, tx pgx.Tx) {
			deleted, err := table.Delete(ctx, tx, []blob.Key{"1", "2"})
			if pgdb.Code(err) != pgdb.ForeignKeyViolation || len(deleted) != 0 {
				t.Errorf("%s: %v, %v", deferred, deleted, err)
			}
		})
	}
}

// A key that can't be one of the tier's is an error that names it, and nothing
// is done.
func TestForeignKeysAreRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE blobs (k uuid PRIMARY KEY)`)
	table := w.table(t, "blobs", "k", "")
	w.tx(t, func(ctx context.Context, tx pgx.Tx) {
		keys := []blob.Key{"00000000-0000-0000-0000-000000000000", "00000000-0000-0000-0000-00000000000A"}
		_, lockErr := table.Lock(ctx, tx, keys)
		_, lookErr := table.Look(ctx, tx, keys)
		_, deleteErr := table.Delete(ctx, tx, keys)
		for _, err := range []error{lockErr, lookErr, deleteErr} {
			if err == nil || !strings.Contains(err.Error(), "00000000000A") {
				t.Errorf("%v", err)
			}
		}
	})
}

// kinds of key columns, and how the i-th key of at least 300 is written in SQL.
var kinds = []struct{ column, key string }{
	{"bytea", `decode(lpad(to_hex(n * 7919 % 65536), 4, '0') || repeat('00', n % 3), 'hex')`},
	{"text", `chr(97 + n % 26) || upper(chr(97 + n % 7)) || n || chr(228)`},
	{`text COLLATE "C"`, `chr(97 + n % 26) || upper(chr(97 + n % 7)) || n || chr(228)`},
	{`text COLLATE "en-x-icu"`, `(ARRAY['a', 'A', 'ä', 'Ä', 'b', 'a b', 'a-b', 'ß', 'ss', ''])[n % 10 + 1] || n / 10`},
	{`varchar(40) COLLATE "de-x-icu"`, `(ARRAY['z', 'Z', 'ö', 'o', ' ', '_', '%', chr(10), '''', '\'])[n % 10 + 1] || n / 10`},
	{"uuid", `md5(n::text)::uuid`},
	{"int2", `(n * 97 % 65536 - 32768)::int2`},
	{"int4", `n * 7919 - 1000000`},
	{"int8", `n::bigint * 30744573456182586 * (CASE WHEN n % 2 = 0 THEN 1 ELSE -1 END)`},
}

// Every key is on exactly one page, whatever kind it is of, however many fit.
func TestPagesHaveEveryKeyOnce(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		w := newWorld(t, `CREATE TABLE blobs (k `+kind.column+` PRIMARY KEY)`)
		table := w.table(t, "blobs", "k", "")
		for _, rows := range []int{0, 1, 9, 10, 11, 300} {
			pgtest.Exec(t, w.app, fmt.Sprintf("TRUNCATE blobs; INSERT INTO blobs SELECT %s FROM generate_series(1, %d) n", kind.key, rows))
			for _, size := range []int{1, 10, 1000} {
				if size == 1 && rows > 11 {
					continue
				}
				seen := map[blob.Key]int{}
				pages := w.pages(t, table, size, func(_ int, keys []blob.Key) {
					if len(keys) > size {
						t.Errorf("%s: a page of %d keys, at most %d wanted", kind.column, len(keys), size)
					}
					for _, key := range keys {
						seen[key]++
					}
				})
				if len(seen) != rows {
					t.Errorf("%s: %d keys of %d in pages of %d", kind.column, len(seen), rows, size)
				}
				for key, n := range seen {
					if n != 1 {
						t.Errorf("%s: key %q is on %d pages", kind.column, key, n)
					}
				}
				if want := rows/size + 1; pages != want {
					t.Errorf("%s: %d pages of %d for %d rows, want %d", kind.column, pages, size, rows, want)
				}
			}
		}
	}
}

// pages walks the table, each page in a transaction of its own, and returns how
// many there were.
func (w *world) pages(t testing.TB, table *postgres.Table, size int, each func(page int, keys []blob.Key)) int {
	t.Helper()
	var span postgres.Span
	for n := 0; n < 10_000; n++ {
		var last bool
		var keys []blob.Key
		w.dry(t, func(ctx context.Context, tx pgx.Tx) {
			var err error
			if span, last, err = table.NextSpan(ctx, tx, span, size); err != nil {
				t.Fatal(err)
			}
			keys = pageKeys(ctx, t, tx, table.Page(span))
		})
		each(n, keys)
		if last {
			return n + 1
		}
	}
	t.Fatal("the walk has no end")
	return 0
}

func pageKeys(ctx context.Context, t testing.TB, tx pgx.Tx, p postgres.Page) []blob.Key {
	t.Helper()
	sql := "SELECT " + p.Canon + " FROM " + p.Table + " WHERE " + p.Where
	for _, bound := range []string{p.Lo, p.Hi} {
		if bound != "" {
			sql += " AND " + bound + " IS NOT NULL"
		}
	}
	rows, err := tx.Query(ctx, sql, p.Args...)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (blob.Key, error) {
		var b []byte
		err := row.Scan(&b)
		return blob.Key(b), err
	})
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// The canonical bytes are those that blob.Kind takes, and lead back to the row.
func TestCanonicalKeys(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		w := newWorld(t, `CREATE TABLE blobs (k `+kind.column+` PRIMARY KEY); INSERT INTO blobs SELECT `+kind.key+` FROM generate_series(1, 300) n`)
		table := w.table(t, "blobs", "k", "")
		w.tx(t, func(ctx context.Context, tx pgx.Tx) {
			keys := pageKeys(ctx, t, tx, table.Page(postgres.Span{}))
			for _, key := range keys {
				if err := table.Kind().Valid(key); err != nil {
					t.Errorf("%s: %v", kind.column, err)
				}
			}
			for i, hold := range lock(ctx, t, tx, table, keys...) {
				if hold.State != blob.Held {
					t.Errorf("%s: key %q: %+v", kind.column, keys[i], hold)
				}
			}
			if deleted := remove(ctx, t, tx, table, keys...); len(deleted) != len(keys) {
				t.Errorf("%s: %d of %d keys deleted", kind.column, len(deleted), len(keys))
			}
		})
	}
}

// Rows come and go between the pages: each that was there throughout is on
// exactly one.
func TestPagesWhileRowsComeAndGo(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		w := newWorld(t, `CREATE TABLE blobs (k `+kind.column+` PRIMARY KEY, stays boolean);
			INSERT INTO blobs SELECT `+kind.key+`, n % 3 = 0 FROM generate_series(1, 300) n WHERE n % 3 <> 1`)
		table := w.table(t, "blobs", "k", "")
		random := rand.New(rand.NewPCG(1, 2))
		seen := map[blob.Key]int{}
		w.pages(t, table, 7, func(_ int, keys []blob.Key) {
			for _, key := range keys {
				seen[key]++
			}
			// The row at the page's end goes, too.
			for range 5 {
				n := random.IntN(100) * 3
				pgtest.Exec(t, w.app, fmt.Sprintf("INSERT INTO blobs SELECT %s, false FROM (VALUES (%d)) v (n) ON CONFLICT DO NOTHING", kind.key, n+1))
				pgtest.Exec(t, w.app, fmt.Sprintf("DELETE FROM blobs WHERE NOT stays AND k = (SELECT %s FROM (VALUES (%d)) v (n))", kind.key, n+2))
			}
		})
		for key, n := range seen {
			if n != 1 {
				t.Errorf("%s: key %q is on %d pages", kind.column, key, n)
			}
		}
		w.dry(t, func(ctx context.Context, tx pgx.Tx) {
			p := table.Page(postgres.Span{})
			p.Where += " AND p.stays"
			stay := pageKeys(ctx, t, tx, p)
			missing := slices.DeleteFunc(stay, func(key blob.Key) bool { return seen[key] == 1 })
			if diff := gocmp.Diff([]blob.Key(nil), missing, cmpopts.EquateEmpty()); diff != "" || len(seen) < 100 {
				t.Errorf("%s: keys that no page has (-want +got):\n%s", kind.column, diff)
			}
		})
	}
}

// The row that a page ended at is deleted: the next page begins where it was.
func TestPageAfterADeletedRow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE blobs (k int PRIMARY KEY); INSERT INTO blobs SELECT generate_series(1, 10)`)
	table := w.table(t, "blobs", "k", "")
	var got []string
	w.pages(t, table, 3, func(page int, keys []blob.Key) {
		got = append(got, fmt.Sprint(keys))
		pgtest.Exec(t, w.app, "DELETE FROM blobs WHERE k <= $1", (page+1)*3)
		pgtest.Exec(t, w.app, "INSERT INTO blobs VALUES ($1)", -page)
	})
	if want := []string{"[1 2 3]", "[4 5 6]", "[7 8 9]", "[10]"}; !slices.Equal(got, want) {
		t.Errorf("pages: %q, want %q", got, want)
	}
}

// A partitioned table is walked, locked and deleted from as one.
func TestPartitionedTable(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE blobs (k int PRIMARY KEY, size int) PARTITION BY HASH (k);
		CREATE TABLE blobs_0 PARTITION OF blobs FOR VALUES WITH (modulus 2, remainder 0); CREATE TABLE blobs_1 PARTITION OF blobs FOR VALUES WITH (modulus 2, remainder 1);
		INSERT INTO blobs SELECT n, n FROM generate_series(1, 100) n`)
	table := w.table(t, "blobs", "k", "size")
	seen := 0
	w.pages(t, table, 10, func(_ int, keys []blob.Key) { seen += len(keys) })
	if seen != 100 {
		t.Errorf("%d keys, want 100", seen)
	}
	w.begin(t, "SELECT FROM blobs WHERE k = 2 FOR UPDATE")
	w.tx(t, func(ctx context.Context, tx pgx.Tx) {
		if diff := gocmp.Diff([]blob.Hold{held(1), busy, held(3), gone}, lock(ctx, t, tx, table, "1", "2", "3", "101")); diff != "" {
			t.Errorf("holds (-want +got):\n%s", diff)
		}
		if got := remove(ctx, t, tx, table, "1", "3"); len(got) != 2 || got[1].Size != 3 {
			t.Errorf("deleted: %v", got)
		}
	})
}

// Locking and deleting a batch costs what the batch costs, not what the table
// does.
func TestRowPlans(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds[:7] {
		if kind.column == "int2" {
			continue
		}
		w := newWorld(t, `CREATE TABLE blobs (k `+strings.Replace(kind.column, "(40)", "", 1)+` PRIMARY KEY, pad text)`)
		key := strings.NewReplacer("n * 7919 % 65536), 4", "n), 8", "n / 10", "n").Replace(kind.key)
		pgtest.Exec(t, w.app, `INSERT INTO blobs SELECT `+key+`, repeat('x', 300) FROM generate_series(1, 50000) n`)
		pgtest.Exec(t, w.app, "VACUUM ANALYZE blobs")
		table := w.table(t, "blobs", "k", "")
		w.dry(t, func(ctx context.Context, tx pgx.Tx) {
			span, _, err := table.NextSpan(ctx, tx, postgres.Span{}, 200)
			if err != nil {
				t.Fatal(err)
			}
			keys := pageKeys(ctx, t, tx, table.Page(span))
			before := scans(ctx, t, tx)
			lock(ctx, t, tx, table, keys...)
			if _, err := table.Look(ctx, tx, keys); err != nil {
				t.Fatal(err)
			}
			remove(ctx, t, tx, table, keys...)
			if _, _, err := table.NextSpan(ctx, tx, span, 200); err != nil {
				t.Fatal(err)
			}
			if after := scans(ctx, t, tx); after != before {
				t.Errorf("%s: the table was read from end to end %d times", kind.column, after-before)
			}
		})
	}
}

// scans returns how many times this transaction has read the table whole.
func scans(ctx context.Context, t testing.TB, tx pgx.Tx) (n int) {
	t.Helper()
	if err := tx.QueryRow(ctx, "SELECT pg_stat_get_xact_numscans('public.blobs'::regclass)").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// Many batches at once, each with some keys of the others: nobody waits for
// anybody, and each row is deleted once.
func TestConcurrentBatches(t *testing.T) {
	t.Parallel()
	const rows, workers = 200, 4
	w := newWorld(t, fmt.Sprintf(`CREATE TABLE blobs (k int PRIMARY KEY); INSERT INTO blobs SELECT generate_series(0, %d)`, rows-1))
	table := w.table(t, "blobs", "k", "")
	deleted := make(chan blob.Key, rows*workers)
	errs := make(chan error, workers)
	for n := range workers {
		conn := connect(t, w.url)
		go func() {
			random := rand.New(rand.NewPCG(uint64(n), 0))
			var err error
			for i := 0; i < 40 && err == nil; i++ {
				var keys []blob.Key
				for _, k := range random.Perm(rows)[:40] {
					keys = append(keys, blob.Key(strconv.Itoa(k)))
				}
				err = conn.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
					return lockAndDelete(ctx, tx, table, keys, deleted)
				})
			}
			errs <- err
		}()
	}
	for range workers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	close(deleted)
	seen := map[blob.Key]bool{}
	for key := range deleted {
		if seen[key] {
			t.Errorf("key %s was deleted twice", key)
		}
		seen[key] = true
	}
	if left := count(t, w.app, "SELECT count(*) FROM blobs"); left+len(seen) != rows {
		t.Errorf("%d deleted, %d left, of %d", len(seen), left, rows)
	}
}

func lockAndDelete(ctx context.Context, tx pgx.Tx, table *postgres.Table, keys []blob.Key, deleted chan<- blob.Key) error {
	holds, err := table.Lock(ctx, tx, keys)
	if err != nil {
		return err
	}
	var mine []blob.Key
	for i, hold := range holds {
		if hold.State == blob.Held {
			mine = append(mine, keys[i])
		}
	}
	deletions, err := table.Delete(ctx, tx, mine)
	if err == nil && len(deletions) != len(mine) {
		err = fmt.Errorf("%d held, %d deleted", len(mine), len(deletions))
	}
	for _, d := range deletions {
		deleted <- d.Key
	}
	return err
}
