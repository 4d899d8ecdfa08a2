package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/sqlite"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"

	"github.com/google/go-cmp/cmp"
)

// database makes a file with the application's tables and opens it as the agent
// does.
func database(t *testing.T, ddl ...string) *sqlitedb.Conn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "app.db")
	app, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	for _, stmt := range append(ddl, `CREATE TABLE other (x)`) {
		if _, err := app.Exec(stmt); err != nil {
			t.Fatalf("%s: %v", stmt, err)
		}
	}
	if err := app.Close(); err != nil {
		t.Fatal(err)
	}
	db, err := sqlitedb.Open(path, sqlitedb.Options{BusyTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

func resolve(t *testing.T, q sqlitedb.Querier, cfg sqlite.Config) *sqlite.Table {
	t.Helper()
	table, found, err := sqlite.Resolve(t.Context(), q, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if len(found) > 0 || table == nil {
		t.Fatalf("findings: %v", found)
	}
	return table
}

func TestResolveAccepts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ddl  string
		kind blob.Kind
	}{
		{`CREATE TABLE blobs (id INTEGER PRIMARY KEY, x)`, blob.KindInt},
		{`CREATE TABLE blobs (id INTEGER PRIMARY KEY AUTOINCREMENT, x)`, blob.KindInt},
		{`CREATE TABLE blobs (id BIGINT NOT NULL UNIQUE, x)`, blob.KindInt},
		{`CREATE TABLE blobs (id BLOB PRIMARY KEY NOT NULL)`, blob.KindBytes},
		{`CREATE TABLE blobs (id NOT NULL UNIQUE)`, blob.KindBytes},
		{`CREATE TABLE blobs (id TEXT PRIMARY KEY) WITHOUT ROWID`, blob.KindText},
		{`CREATE TABLE blobs (id TEXT PRIMARY KEY, x ANY) STRICT, WITHOUT ROWID`, blob.KindText},
		{`CREATE TABLE blobs (a, id VARCHAR(64) NOT NULL, PRIMARY KEY (a, id), UNIQUE (id))`, blob.KindText},
		{`CREATE TABLE blobs (id UUID NOT NULL PRIMARY KEY)`, blob.KindText},
		{`CREATE TABLE "Blobs" ("ID" text NOT NULL UNIQUE)`, blob.KindText},
	} {
		t.Run(c.ddl, func(t *testing.T) {
			t.Parallel()
			q := database(t, c.ddl)
			table := resolve(t, q, sqlite.Config{Path: "pools[0].blobs[0]", Table: "blobs", Column: "id"})
			if table.Kind() != c.kind {
				t.Errorf("kind %s, want %s", table.Kind(), c.kind)
			}
		})
	}
}

func TestResolveRefuses(t *testing.T) {
	t.Parallel()
	const unique = `CREATE UNIQUE INDEX u ON blobs (id)`
	for _, c := range []struct {
		name string
		ddl  []string
		cfg  sqlite.Config
		want string
	}{
		{"no table", nil, sqlite.Config{}, "there is no table blobs"},
		{"no column", []string{`CREATE TABLE blobs (x)`}, sqlite.Config{}, `has no column "id"`},
		{"view", []string{`CREATE VIEW blobs AS SELECT 1 AS id`}, sqlite.Config{}, "is a view"},
		{"broken view", []string{`CREATE VIEW blobs AS SELECT * FROM gone`}, sqlite.Config{}, "can't be read"},
		{"virtual table", []string{`CREATE VIRTUAL TABLE blobs USING fts5 (id)`}, sqlite.Config{}, "is a virtual table"},
		{"shadow table", []string{`CREATE VIRTUAL TABLE docs USING fts5 (id)`}, sqlite.Config{Table: "docs_data"}, "is a shadow table"},
		{"own table", []string{`CREATE TABLE GC_Window (key BLOB PRIMARY KEY NOT NULL)`}, sqlite.Config{Table: "gc_window", Column: "key"}, "isn't the application's"},
		{"system table", []string{`CREATE TABLE t (id INTEGER PRIMARY KEY AUTOINCREMENT)`}, sqlite.Config{Table: "sqlite_sequence", Column: "name"}, "isn't the application's"},
		{"real", []string{`CREATE TABLE blobs (id REAL NOT NULL UNIQUE)`}, sqlite.Config{}, "is declared REAL"},
		{"numeric", []string{`CREATE TABLE blobs (id DECIMAL(20) NOT NULL UNIQUE)`}, sqlite.Config{}, "is declared DECIMAL(20)"},
		{"unknown type", []string{`CREATE TABLE blobs (id STRING NOT NULL UNIQUE)`}, sqlite.Config{}, "is declared STRING"},
		{"nullable", []string{`CREATE TABLE blobs (id TEXT PRIMARY KEY)`}, sqlite.Config{}, "may be NULL"},
		{"nullable descending", []string{`CREATE TABLE blobs (id INTEGER PRIMARY KEY DESC)`}, sqlite.Config{}, "may be NULL"},
		{"not unique", []string{`CREATE TABLE blobs (id TEXT NOT NULL)`, `CREATE INDEX i ON blobs (id)`}, sqlite.Config{}, "isn't unique"},
		{"part of a key", []string{`CREATE TABLE blobs (id TEXT NOT NULL, v NOT NULL, UNIQUE (id, v))`}, sqlite.Config{}, "isn't unique"},
		{"partial index", []string{`CREATE TABLE blobs (id TEXT NOT NULL, v)`, unique + ` WHERE v`}, sqlite.Config{}, "isn't unique"},
		{"expression index", []string{`CREATE TABLE blobs (id TEXT NOT NULL)`, `CREATE UNIQUE INDEX u ON blobs (id || '')`}, sqlite.Config{}, "isn't unique"},
		{"nocase", []string{`CREATE TABLE blobs (id TEXT NOT NULL PRIMARY KEY COLLATE NOCASE)`}, sqlite.Config{}, "in the collation NOCASE"},
		{"nocase index", []string{`CREATE TABLE blobs (id TEXT NOT NULL)`, `CREATE UNIQUE INDEX u ON blobs (id COLLATE NOCASE)`}, sqlite.Config{}, "in the collation NOCASE"},
		{"rtrim", []string{`CREATE TABLE blobs (id TEXT NOT NULL UNIQUE COLLATE RTRIM)`}, sqlite.Config{}, "in the collation RTRIM"},
		{"nocase column, binary index", []string{`CREATE TABLE blobs (id TEXT NOT NULL COLLATE NOCASE)`, `CREATE UNIQUE INDEX u ON blobs (id COLLATE BINARY)`}, sqlite.Config{}, "(NOCASE or RTRIM)"},
		{"rtrim column, binary index", []string{`CREATE TABLE blobs (id TEXT NOT NULL COLLATE RTRIM)`, `CREATE UNIQUE INDEX u ON blobs (id COLLATE BINARY)`}, sqlite.Config{}, "(NOCASE or RTRIM)"},
		{"blob among texts", []string{`CREATE TABLE blobs (id TEXT NOT NULL UNIQUE)`, `INSERT INTO blobs VALUES ('a'), (x'62')`}, sqlite.Config{}, "holds X'62', stored as blob"},
		{"number among uuids", []string{`CREATE TABLE blobs (id UUID NOT NULL UNIQUE)`, `INSERT INTO blobs VALUES ('a'), ('12')`}, sqlite.Config{}, "holds 12, stored as integer"},
		{"text among blobs", []string{`CREATE TABLE blobs (id BLOB NOT NULL UNIQUE)`, `INSERT INTO blobs VALUES (x'61'), ('b')`}, sqlite.Config{}, "holds 'b', stored as text"},
		{"number among blobs", []string{`CREATE TABLE blobs (id NOT NULL UNIQUE)`, `INSERT INTO blobs VALUES (x'61'), (7)`}, sqlite.Config{}, "holds 7, stored as integer"},
		{"text among integers", []string{`CREATE TABLE blobs (id INT NOT NULL UNIQUE)`, `INSERT INTO blobs VALUES (1), ('b')`}, sqlite.Config{}, "holds 'b', stored as text"},
		{"fraction among integers", []string{`CREATE TABLE blobs (id INT NOT NULL UNIQUE)`, `INSERT INTO blobs VALUES (1), (1.5), (2)`}, sqlite.Config{}, "holds 1.5, stored as real"},
		{"UTF-16", []string{`PRAGMA encoding = 'UTF-16le'`, `CREATE TABLE blobs (id TEXT NOT NULL UNIQUE)`}, sqlite.Config{}, "only UTF-8"},
		{"no size", []string{`CREATE TABLE blobs (id INTEGER PRIMARY KEY)`}, sqlite.Config{Size: "bytes"}, `no column "bytes"`},
		{"size as text", []string{`CREATE TABLE blobs (id INTEGER PRIMARY KEY, bytes TEXT)`}, sqlite.Config{Size: "bytes"}, `is declared "TEXT"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			q := database(t, c.ddl...)
			cfg := c.cfg
			cfg.Path = "pools[0].blobs[0]"
			if cfg.Table == "" {
				cfg.Table = "blobs"
			}
			if cfg.Column == "" {
				cfg.Column = "id"
			}
			table, found, err := sqlite.Resolve(t.Context(), q, cfg)
			if err != nil {
				t.Fatal(err)
			}
			if table != nil && table.Kind() == 0 || found.Worst() != finding.Misconfigured || !strings.Contains(found.Of(finding.Misconfigured), c.want) {
				t.Errorf("table %v, findings %v; want one that contains %q", table, found, c.want)
			}
			if !strings.HasPrefix(found[0].Path, cfg.Path) {
				t.Errorf("path %q doesn't begin with %q", found[0].Path, cfg.Path)
			}
		})
	}
}

// The look for oddly stored keys goes by the index: it runs before every sweep.
func TestResolveReadsNoWholeTable(t *testing.T) {
	t.Parallel()
	q := database(t, `CREATE TABLE blobs (id TEXT NOT NULL UNIQUE)`)
	for _, cond := range []string{"p.id < ''", "p.id >= x''"} {
		if plan := explain(t, q, `SELECT 1 FROM main.blobs p WHERE `+cond+` LIMIT 1`); !strings.HasPrefix(plan, "SEARCH p USING COVERING INDEX") {
			t.Errorf("%s: %s", cond, plan)
		}
	}
}

func explain(t *testing.T, q sqlitedb.Querier, query string, args ...any) string {
	t.Helper()
	details, err := sqlitedb.Collect(t.Context(), q, func(rows *sql.Rows) (string, error) {
		var id, parent, unused int
		var detail string
		err := rows.Scan(&id, &parent, &unused, &detail)
		return detail, err
	}, "EXPLAIN QUERY PLAN "+query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return strings.Join(details, "\n")
}

// One table a kind, each with keys that are easily mistaken for others.
var kinds = []struct {
	name string
	ddl  []string
	keys []blob.Key
}{
	{
		"bytes",
		[]string{`CREATE TABLE blobs (k BLOB PRIMARY KEY NOT NULL, n INTEGER)`, `INSERT INTO blobs VALUES (x'', 1), (x'00', 2), (x'6100', 3), (x'61', NULL), (x'ff', 'x')`},
		[]blob.Key{"", "\x00", "a", "a\x00", "\xff"},
	},
	{
		"texts",
		[]string{`CREATE TABLE blobs (k TEXT NOT NULL UNIQUE, n INTEGER)`, `INSERT INTO blobs VALUES ('', 1), ('1', 2), ('01', 3), ('1.0', NULL), ('A', 'x'), ('a', 6), ('ä', 7)`},
		[]blob.Key{"", "01", "1", "1.0", "A", "a", "ä"},
	},
	{
		"uuids",
		[]string{`CREATE TABLE blobs (k UUID NOT NULL UNIQUE, n INTEGER)`, `INSERT INTO blobs VALUES ('0b7e7dee-87ea-4b6c-b1c5-0a1b2c3d4e5f', 1), ('FFFFFFFF-87ea-4b6c-b1c5-0a1b2c3d4e5f', 2)`},
		[]blob.Key{"0b7e7dee-87ea-4b6c-b1c5-0a1b2c3d4e5f", "FFFFFFFF-87ea-4b6c-b1c5-0a1b2c3d4e5f"},
	},
	{
		"integers",
		[]string{`CREATE TABLE blobs (k INTEGER PRIMARY KEY, n INTEGER)`, `INSERT INTO blobs VALUES (-9223372036854775808, 1), (-1, 2), (0, 3), (9223372036854775807, NULL)`},
		[]blob.Key{"-9223372036854775808", "-1", "0", "9223372036854775807"},
	},
	{
		"unique integers",
		[]string{`CREATE TABLE blobs (k INT NOT NULL UNIQUE, n INTEGER) STRICT`, `INSERT INTO blobs VALUES (2, 1), (10, 2)`},
		[]blob.Key{"2", "10"},
	},
}

func TestLockAndDelete(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			q := database(t, k.ddl...)
			table := resolve(t, q, sqlite.Config{Table: "BLOBS", Column: "K", Size: "N"})
			absent := blob.Key("77")
			keys := append([]blob.Key{absent}, k.keys...)
			inTx(t, q, func(ctx context.Context, q sqlitedb.Querier) error {
				holds, err := table.Lock(ctx, q, keys)
				if err != nil {
					return err
				}
				for i, key := range keys {
					want := blob.Held
					if key == absent {
						want = blob.Absent
					}
					if holds[i].State != want {
						t.Errorf("%q: %v, want %v", key, holds[i].State, want)
					}
				}
				deleted, err := table.Delete(ctx, q, keys[:2])
				if want := []blob.Deletion{{Key: keys[1], Size: holds[1].Size, Outcome: blob.Deleted}}; err != nil || !cmp.Equal(deleted, want) {
					t.Errorf("deleted %v (%v), want %v", deleted, err, want)
				}
				return nil
			})
			if left := pages(t, q, table, 10); !slices.Equal(left, sorted(k.keys[1:])) {
				t.Errorf("left: %q", left)
			}
		})
	}
}

func TestSizes(t *testing.T) {
	t.Parallel()
	q := database(t, kinds[0].ddl...)
	table := resolve(t, q, sqlite.Config{Table: "blobs", Column: "k", Size: "n"})
	holds, err := table.Look(t.Context(), q, kinds[0].keys)
	if err != nil {
		t.Fatal(err)
	}
	var sizes []int64
	for _, h := range holds {
		sizes = append(sizes, h.Size)
	}
	if want := []int64{1, 2, 0, 3, 0}; !slices.Equal(sizes, want) { // NULL and a text count as nothing
		t.Errorf("sizes %v, want %v", sizes, want)
	}
}

func TestInvalidKey(t *testing.T) {
	t.Parallel()
	q := database(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`)
	table := resolve(t, q, sqlite.Config{Table: "blobs", Column: "id"})
	if _, err := table.Lock(t.Context(), q, []blob.Key{"01"}); err == nil || !strings.Contains(err.Error(), "key 01") {
		t.Errorf("lock: %v", err)
	}
	if _, err := table.Delete(t.Context(), q, []blob.Key{"x"}); err == nil || !strings.Contains(err.Error(), "key x") {
		t.Errorf("delete: %v", err)
	}
}

// A trigger that ignores the delete leaves the row out of what was deleted, one
// that refuses it fails it.
func TestDeleteTriggers(t *testing.T) {
	t.Parallel()
	q := database(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `INSERT INTO blobs VALUES (1), (2), (3), (4)`,
		`CREATE TRIGGER keep BEFORE DELETE ON blobs WHEN old.id = 2 BEGIN SELECT RAISE(IGNORE); END`,
		`CREATE TRIGGER refuse BEFORE DELETE ON blobs WHEN old.id = 4 BEGIN SELECT RAISE(ABORT, 'no'); END`)
	table := resolve(t, q, sqlite.Config{Table: "blobs", Column: "id"})
	deleted, err := table.Delete(t.Context(), q, []blob.Key{"1", "2"})
	if want := []blob.Deletion{{Key: "1", Outcome: blob.Deleted}}; err != nil || !cmp.Equal(deleted, want) {
		t.Errorf("deleted %v (%v), want %v", deleted, err, want)
	}
	if deleted, err := table.Delete(t.Context(), q, []blob.Key{"3", "4"}); !sqlitedb.Constraint(err) {
		t.Errorf("deleted %v (%v), want a constraint's error", deleted, err)
	}
	if left := pages(t, q, table, 10); !slices.Equal(left, []blob.Key{"2", "3", "4"}) {
		t.Errorf("left: %q", left)
	}
}

func TestDeleteForeignKey(t *testing.T) {
	t.Parallel()
	q := database(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `CREATE TABLE refs (id REFERENCES blobs)`, `INSERT INTO blobs VALUES (1)`, `INSERT INTO refs VALUES (1)`)
	table := resolve(t, q, sqlite.Config{Table: "blobs", Column: "id"})
	if deleted, err := table.Delete(t.Context(), q, []blob.Key{"1"}); !sqlitedb.Constraint(err) {
		t.Errorf("deleted %v (%v), want a constraint's error", deleted, err)
	}
}

// A page's SQL shows every row once, in the spans' order, whatever their size.
func TestPages(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		for n := 1; n <= len(k.keys)+1; n++ {
			t.Run(fmt.Sprintf("%s by %d", k.name, n), func(t *testing.T) {
				t.Parallel()
				q := database(t, k.ddl...)
				table := resolve(t, q, sqlite.Config{Table: "blobs", Column: "k"})
				if got := pages(t, q, table, n); !slices.Equal(got, sorted(k.keys)) {
					t.Errorf("got %q, want %q", got, sorted(k.keys))
				}
			})
		}
	}
}

func TestPagePlan(t *testing.T) {
	t.Parallel()
	q := database(t, `CREATE TABLE blobs (k TEXT NOT NULL UNIQUE, data)`)
	table := resolve(t, q, sqlite.Config{Table: "blobs", Column: "k"})
	p := table.Page(sqlite.Span{From: "a", To: "b"})
	plan := explain(t, q, `SELECT `+p.Canon+` FROM `+p.Table+` WHERE `+p.Where, p.Args...)
	if !strings.Contains(plan, "USING COVERING INDEX") || !strings.Contains(plan, "k>? AND k<?") {
		t.Error(plan)
	}
}

func TestForeign(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", blob.MaxKeyLen)
	q := database(t, `CREATE TABLE blobs (k TEXT NOT NULL UNIQUE)`,
		`INSERT INTO blobs VALUES ('good'), ('`+long+`'), ('`+long+`y'), ('a' || char(0) || 'b'), (CAST(x'ff' AS TEXT))`)
	table := resolve(t, q, sqlite.Config{Table: "blobs", Column: "k"})
	p := table.Page(sqlite.Span{})
	keys, err := sqlitedb.Collect(t.Context(), q, func(rows *sql.Rows) (string, error) {
		var key string
		err := rows.Scan(&key)
		return key, err
	}, `SELECT `+p.Key+` FROM `+p.Table+` WHERE `+p.Where+` AND NOT `+p.Foreign)
	slices.Sort(keys)
	if want := []string{"good", long}; err != nil || !slices.Equal(keys, want) {
		t.Errorf("got %q (%v)", keys, err)
	}
}

func TestSame(t *testing.T) {
	t.Parallel()
	q := database(t, `CREATE TABLE blobs (k TEXT NOT NULL UNIQUE)`)
	table := resolve(t, q, sqlite.Config{Table: "blobs", Column: "k"})
	for _, step := range []struct {
		stmt string
		want bool
	}{
		{`CREATE INDEX i ON blobs (k)`, true},
		{`ALTER TABLE blobs ADD COLUMN x`, false},
		{`ALTER TABLE blobs DROP COLUMN x`, true},
		{`ALTER TABLE blobs RENAME TO old`, false},
		{`CREATE VIEW blobs AS SELECT * FROM old`, false},
	} {
		if _, err := q.Exec(t.Context(), step.stmt); err != nil {
			t.Fatal(err)
		}
		if same, err := table.Same(t.Context(), q); err != nil || same != step.want {
			t.Errorf("after %s: same is %t (%v)", step.stmt, same, err)
		}
	}
}

func inTx(t *testing.T, conn *sqlitedb.Conn, fn func(context.Context, sqlitedb.Querier) error) {
	t.Helper()
	if err := conn.InTx(t.Context(), sqlitedb.Write, fn); err != nil {
		t.Fatal(err)
	}
}

// pages reads the table in pages of at most n rows.
func pages(t *testing.T, q sqlitedb.Querier, table *sqlite.Table, n int) []blob.Key {
	t.Helper()
	var keys []blob.Key
	for span, last := (sqlite.Span{}), false; !last; {
		var err error
		if span, last, err = table.NextSpan(t.Context(), q, span, n); err != nil {
			t.Fatal(err)
		}
		p := table.Page(span)
		page, err := sqlitedb.Collect(t.Context(), q, func(rows *sql.Rows) (blob.Key, error) {
			var key []byte
			err := rows.Scan(&key)
			return blob.Key(key), err
		}, `SELECT `+p.Canon+` FROM `+p.Table+` WHERE `+p.Where, p.Args...)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) > n {
			t.Errorf("a page of %d has %d rows", n, len(page))
		}
		keys = append(keys, page...)
	}
	return sorted(keys)
}

func sorted(keys []blob.Key) []blob.Key { return slices.Sorted(slices.Values(keys)) }
