package window_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/alkblobs/gc-agent/internal/sqlitedb"
	"github.com/alkblobs/gc-agent/window"
	"github.com/alkblobs/gc-agent/window/windowtest"
)

func TestSQLite(t *testing.T) {
	t.Parallel()
	for _, journal := range []string{"wal", "delete"} {
		t.Run(journal, func(t *testing.T) {
			t.Parallel()
			windowtest.Run(t, func(t *testing.T) windowtest.Target {
				db := openSQLite(t)
				sqliteExec(t, connSQLite(t, db), "PRAGMA journal_mode = "+journal)
				return windowtest.Target{
					Open:  func(t *testing.T) windowtest.Engine { return window.NewSQLite(connSQLite(t, db)) },
					Steps: 20,
					Database: &windowtest.Database{
						InTx: func(t *testing.T, fn func(windowtest.Engine)) {
							err := connSQLite(t, db).InTx(t.Context(), sqlitedb.Write, func(_ context.Context, q sqlitedb.Querier) error {
								fn(window.NewSQLite(q))
								return nil
							})
							if err != nil {
								t.Fatal(err)
							}
						},
						Relations:     func(t *testing.T) []string { return sqliteNames(t, connSQLite(t, db)) },
						WantRelations: []string{"gc_window", "gc_window_visible_after", "sqlite_autoindex_gc_window_1"},
						NoTable:       func(err error) bool { return err != nil && strings.Contains(err.Error(), "no such table: gc_window") },
					},
				}
			})
		})
	}
}

// A savepoint of EnsureSchema's must not end the transaction around it.
func TestSQLiteEnsureSchemaRollsBackWithItsTransaction(t *testing.T) {
	t.Parallel()
	conn := connSQLite(t, openSQLite(t))
	changedMind := errors.New("changed its mind")
	err := conn.InTx(t.Context(), sqlitedb.Write, func(ctx context.Context, q sqlitedb.Querier) error {
		if err := window.NewSQLite(q).EnsureSchema(ctx); err != nil {
			return err
		}
		return changedMind
	})
	if !errors.Is(err, changedMind) {
		t.Fatal(err)
	}
	if names := sqliteNames(t, conn); len(names) > 0 {
		t.Errorf("after a rollback there are %v", names)
	}
}

// A table of the same name that isn't the window's is named and left alone.
func TestSQLiteEnsureSchemaForeignTable(t *testing.T) {
	t.Parallel()
	for ddl, differs := range map[string]string{
		"CREATE TABLE gc_window (key TEXT PRIMARY KEY NOT NULL, visible_after INTEGER NOT NULL)": "missing: key BLOB NOT NULL; unexpected: key TEXT NOT NULL",
		"CREATE TABLE gc_window (key BLOB NOT NULL, visible_after INTEGER NOT NULL)":             "missing: PRIMARY KEY (key)",
		"CREATE TABLE GC_Window (key BLOB PRIMARY KEY NOT NULL, visible_after INTEGER)":          "missing: visible_after INTEGER NOT NULL; unexpected: visible_after INTEGER",
		"CREATE TABLE gc_window (key BLOB, visible_after INTEGER NOT NULL, x, PRIMARY KEY (key, visible_after))": "missing: key BLOB NOT NULL, PRIMARY KEY (key); " +
			"unexpected: key BLOB, x , PRIMARY KEY (key, visible_after)",
		"CREATE VIEW gc_window AS SELECT 1 AS key": "unexpected: view",
	} {
		t.Run(differs, func(t *testing.T) {
			t.Parallel()
			conn := connSQLite(t, openSQLite(t))
			sqliteExec(t, conn, ddl)
			before := sqliteNames(t, conn)
			err := window.NewSQLite(conn).EnsureSchema(t.Context())
			if err == nil || !strings.Contains(err.Error(), differs) {
				t.Errorf("got error %v, want one that says %q", err, differs)
			}
			if diff := cmp.Diff(before, sqliteNames(t, conn)); diff != "" {
				t.Errorf("the schema changed: %s", diff)
			}
		})
	}
}

// Nothing of a table and its index is left where one can't be made.
func TestSQLiteEnsureSchemaAllOrNothing(t *testing.T) {
	t.Parallel()
	conn := connSQLite(t, openSQLite(t))
	// SQLite refuses an index that is named like a table, IF NOT EXISTS or not.
	sqliteExec(t, conn, "CREATE TABLE gc_window_visible_after (x)")
	if err := window.NewSQLite(conn).EnsureSchema(t.Context()); err == nil {
		t.Error("EnsureSchema succeeded")
	}
	if diff := cmp.Diff([]string{"gc_window_visible_after"}, sqliteNames(t, conn)); diff != "" {
		t.Errorf("the schema changed: %s", diff)
	}
	sqliteExec(t, conn, "BEGIN") // fails in a transaction that was left open
	sqliteExec(t, conn, "COMMIT")
}

func openSQLite(t *testing.T) *sqlitedb.DB {
	t.Helper()
	path := filepath.Join(t.TempDir(), "app.db")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := sqlitedb.Open(path, sqlitedb.Options{BusyTimeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func connSQLite(t *testing.T, db *sqlitedb.DB) *sqlitedb.Conn {
	t.Helper()
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

func sqliteExec(t *testing.T, conn *sqlitedb.Conn, query string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), query); err != nil {
		t.Fatal(err)
	}
}

// sqliteNames reads everything that the file's schema holds.
func sqliteNames(t *testing.T, conn *sqlitedb.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), "SELECT name FROM sqlite_master ORDER BY name")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var names []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return names
}
