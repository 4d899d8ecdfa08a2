package window

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/owntable"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
)

// SQLite is the window in an SQLite file. It does what it does on the connection
// that it was made with, in its transaction if it has one open, and isn't safe
// for concurrent use.
type SQLite struct {
	q sqlitedb.Querier
}

// NewSQLite returns the window of the database that q is connected to. It asks
// the database nothing.
func NewSQLite(q sqlitedb.Querier) *SQLite { return &SQLite{q: q} }

// SQLiteDDL returns the statements that make the window, in their order. Each
// may be run again.
func SQLiteDDL() []string {
	return []string{
		"CREATE TABLE IF NOT EXISTS gc_window (key BLOB PRIMARY KEY NOT NULL, visible_after INTEGER NOT NULL)",
		// It holds the order in which Take goes through the overdue rows.
		"CREATE INDEX IF NOT EXISTS gc_window_visible_after ON gc_window (visible_after, key)",
	}
}

// sqliteShape is what sqliteShapeSQL says of the window's table.
var sqliteShape = []string{"ordinary table", "key BLOB NOT NULL", "visible_after INTEGER NOT NULL", "PRIMARY KEY (key)"}

const sqliteShapeSQL = `
	SELECT CASE type WHEN 'table' THEN 'ordinary table' WHEN 'virtual' THEN 'virtual table' ELSE type END
		FROM pragma_table_list('gc_window') WHERE schema = 'main'
	UNION ALL
	SELECT name || ' ' || upper(type) || iif("notnull", ' NOT NULL', '')
		FROM pragma_table_xinfo('gc_window', 'main')
	UNION ALL
	SELECT 'PRIMARY KEY (' || group_concat(name, ', ') || ')'
		FROM (SELECT name FROM pragma_table_xinfo('gc_window', 'main') WHERE pk > 0 ORDER BY pk)
		HAVING count(*) > 0`

// EnsureSchema is as Postgres.EnsureSchema. A file that stays busy beyond the
// connection's timeout is an error that sqlitedb.Busy knows.
func (w *SQLite) EnsureSchema(ctx context.Context) error {
	there, err := w.CheckSchema(ctx)
	if err == nil && !there {
		if err = w.create(ctx); err == nil {
			// Somebody else's table may have come first.
			_, err = w.CheckSchema(ctx)
		}
	}
	return named("ensure schema of", err)
}

// CheckSchema is as Postgres.CheckSchema.
func (w *SQLite) CheckSchema(ctx context.Context) (bool, error) {
	shape, err := sqlitedb.Collect(ctx, w.q, func(rows *sql.Rows) (line string, err error) {
		return line, rows.Scan(&line)
	}, sqliteShapeSQL)
	if err != nil || len(shape) == 0 {
		return false, err
	}
	if diff := owntable.Differences(sqliteShape, shape); diff != "" {
		return false, owntable.Different(tableName, diff)
	}
	return true, nil
}

const rollbackTimeout = 5 * time.Second

// create makes table and index in one step. A savepoint is that within a
// transaction and without one. Its first statement writes: one that read first
// could find another's write in its way with nothing to do but to fail.
func (w *SQLite) create(ctx context.Context) (err error) {
	if _, err = w.q.Exec(ctx, "SAVEPOINT gc_window"); err != nil {
		return err
	}
	defer func() {
		if err == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		// They fail where SQLite has rolled back by itself already, which is the
		// state that is wanted.
		_, _ = w.q.Exec(ctx, "ROLLBACK TO gc_window")
		_, _ = w.q.Exec(ctx, "RELEASE gc_window")
	}()
	for _, statement := range SQLiteDDL() {
		if _, err = w.q.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	_, err = w.q.Exec(ctx, "RELEASE gc_window")
	return err
}

// Stage is as Postgres.Stage.
func (w *SQLite) Stage(ctx context.Context, rows []Row) error {
	// WHERE true tells SQLite's parser that ON belongs to no join.
	_, err := w.insert(ctx, `
		INSERT INTO gc_window (key, visible_after)
		SELECT unhex(key), value FROM json_each(?) WHERE true
		ON CONFLICT (key) DO UPDATE SET visible_after = excluded.visible_after
			WHERE visible_after <> excluded.visible_after`, rows, lastCounts)
	return named("stage in", err)
}

// StageKeepFirst is as Postgres.StageKeepFirst.
func (w *SQLite) StageKeepFirst(ctx context.Context, rows []Row) (staged int, err error) {
	staged, err = w.insert(ctx, `
		INSERT INTO gc_window (key, visible_after)
		SELECT unhex(key), value FROM json_each(?) WHERE true
		ON CONFLICT (key) DO NOTHING`, rows, firstCounts)
	return staged, named("stage in", err)
}

// Take is as Postgres.Take.
func (w *SQLite) Take(ctx context.Context, now blob.Instant, limit int) ([]Row, error) {
	rows, err := w.read(ctx, `
		DELETE FROM gc_window WHERE key IN (
			SELECT key FROM gc_window WHERE visible_after <= ? ORDER BY visible_after, key LIMIT ?
		)
		RETURNING key, visible_after`, int64(now), sqliteLimit(limit))
	return rows, named("take from", err)
}

// Peek is as Postgres.Peek.
func (w *SQLite) Peek(ctx context.Context, now blob.Instant, limit int) ([]Row, error) {
	rows, err := w.read(ctx, `
		SELECT key, visible_after FROM gc_window WHERE visible_after <= ?
		ORDER BY visible_after, key LIMIT ?`, int64(now), sqliteLimit(limit))
	return rows, named("peek into", err)
}

// List is as Postgres.List.
func (w *SQLite) List(ctx context.Context, from blob.Key, limit int) ([]Row, error) {
	rows, err := w.read(ctx, `
		SELECT key, visible_after FROM gc_window WHERE key >= ? ORDER BY key LIMIT ?`, []byte(from), sqliteLimit(limit))
	return rows, named("list", err)
}

// Unstage is as Postgres.Unstage.
func (w *SQLite) Unstage(ctx context.Context, keys []blob.Key) (removed int, err error) {
	param, err := sqlitedb.KeyParam(keys)
	if err != nil {
		return 0, named("unstage from", err)
	}
	rows, err := w.read(ctx, `
		DELETE FROM gc_window WHERE key IN (SELECT canon FROM `+sqlitedb.KeyList+`)
		RETURNING key, visible_after`, param)
	return len(rows), named("unstage from", err)
}

// Count is as Postgres.Count.
func (w *SQLite) Count(ctx context.Context) (int64, error) {
	var n int64
	there, err := sqlitedb.HasTable(ctx, w.q, tableName)
	if there {
		err = w.q.QueryRow(ctx, "SELECT count(*) FROM gc_window").Scan(&n)
	}
	return n, named("count", err)
}

// insert runs a statement that stages rows, passed as one JSON object of keys in
// hex and their deadlines, and returns how many it wrote.
func (w *SQLite) insert(ctx context.Context, query string, rows []Row, r repeated) (int, error) {
	rows, err := distinct(rows, r)
	if err != nil {
		return 0, err
	}
	deadlines := make(map[string]blob.Instant, len(rows))
	for _, row := range rows {
		deadlines[hex.EncodeToString([]byte(row.Key))] = row.VisibleAfter
	}
	param, err := json.Marshal(deadlines)
	if err != nil {
		return 0, fmt.Errorf("encode rows: %w", err)
	}
	result, err := w.q.Exec(ctx, query, string(param))
	if err != nil {
		return 0, err
	}
	n, err := result.RowsAffected()
	return int(n), err
}

// read runs a statement that returns rows, and puts them into key order. Without
// the table there are none.
func (w *SQLite) read(ctx context.Context, query string, args ...any) ([]Row, error) {
	there, err := sqlitedb.HasTable(ctx, w.q, tableName)
	if err != nil || !there {
		return nil, err
	}
	rows, err := sqlitedb.Collect(ctx, w.q, func(rows *sql.Rows) (Row, error) {
		var key []byte
		var at int64
		err := rows.Scan(&key, &at)
		return Row{Key: blob.Key(key), VisibleAfter: blob.Instant(at)}, err
	}, query, args...)
	slices.SortFunc(rows, byKey)
	return rows, err
}

// sqliteLimit: to SQLite a negative limit is none.
func sqliteLimit(limit int) int {
	if limit <= 0 {
		return -1
	}
	return limit
}

func named(verb string, err error) error {
	if err != nil {
		return fmt.Errorf("%s window: %w", verb, err)
	}
	return nil
}
