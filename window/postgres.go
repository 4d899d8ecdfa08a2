package window

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/owntable"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// Postgres is the window in a schema of a Postgres database. It does what it
// does on the connection, the pool or in the transaction that it was made with,
// and is as safe for concurrent use as that one.
type Postgres struct {
	q      pgdb.Querier
	schema string
	table  string // qualified and quoted
}

// NewPostgres returns the window of the pool whose schema this is. It asks the
// database nothing.
func NewPostgres(q pgdb.Querier, schema string) *Postgres {
	return &Postgres{q: q, schema: schema, table: pgdb.Ident(schema, tableName)}
}

// PostgresDDL returns the statements that make the window in the schema, in
// their order; the first makes the schema itself. Each may be run again.
func PostgresDDL(schema string) []string {
	table := pgdb.Ident(schema, tableName)
	return []string{
		"CREATE SCHEMA IF NOT EXISTS " + pgdb.Ident(schema),
		"CREATE TABLE IF NOT EXISTS " + table + " (key bytea PRIMARY KEY, visible_after bigint NOT NULL)",
		// It holds the order in which Take goes through the overdue rows.
		"CREATE INDEX IF NOT EXISTS gc_window_visible_after ON " + table + " (visible_after, key)",
	}
}

// EnsureSchema makes the window's table, and the schema where there is none.
// Where the table is there already it changes nothing, and needs no right to; a
// table that isn't the window's is an error that says what differs. It is all or
// nothing, safe to repeat, and safe when any number of agents run it at once.
func (w *Postgres) EnsureSchema(ctx context.Context) error {
	return w.named("ensure schema of", w.own().Ensure(ctx, w.q, w.schema))
}

// CheckSchema says whether the window's table is there. One that isn't the
// window's is an error that says what differs, an owntable.ErrDifferent.
func (w *Postgres) CheckSchema(ctx context.Context) (bool, error) {
	there, err := w.own().Check(ctx, w.q, w.schema)
	return there, w.named("check schema of", err)
}

func (w *Postgres) own() owntable.Table {
	return owntable.Table{
		Name:  tableName,
		Shape: []string{"ordinary table", "key bytea NOT NULL", "visible_after bigint NOT NULL", "PRIMARY KEY (key)"},
		DDL:   PostgresDDL(w.schema)[1:],
	}
}

// Stage puts rows into the window. A key that is there already, or twice among
// the rows, gets its last deadline. The order of the rows is of no matter
// otherwise. Without the table it fails, and whenever it fails it stages none.
func (w *Postgres) Stage(ctx context.Context, rows []Row) error {
	_, err := w.insert(ctx, `
		INSERT INTO %[1]s AS w (key, visible_after)
		SELECT key, visible_after FROM unnest($1::bytea[], $2::bigint[]) AS r (key, visible_after) ORDER BY key
		ON CONFLICT (key) DO UPDATE SET visible_after = excluded.visible_after
			WHERE w.visible_after <> excluded.visible_after`, rows, lastCounts)
	return w.named("stage in", err)
}

// StageKeepFirst puts rows into the window and returns how many are new. A key
// that is there already, or twice among the rows, keeps its first deadline.
// Without the table it fails, and whenever it fails it stages none.
func (w *Postgres) StageKeepFirst(ctx context.Context, rows []Row) (staged int, err error) {
	staged, err = w.insert(ctx, `
		INSERT INTO %[1]s (key, visible_after)
		SELECT key, visible_after FROM unnest($1::bytea[], $2::bigint[]) AS r (key, visible_after) ORDER BY key
		ON CONFLICT (key) DO NOTHING`, rows, firstCounts)
	return staged, w.named("stage in", err)
}

// Take removes and returns the rows whose deadline is now or earlier, in key
// order. A limit above 0 makes it at most so many, the oldest deadlines first and
// of equal deadlines the lower key. Two takers never get the same row: the second
// waits until it is known what became of the first one's, and goes on behind them.
// After an error nothing was taken; outside a transaction it may not be known.
func (w *Postgres) Take(ctx context.Context, now blob.Instant, limit int) ([]Row, error) {
	// Rows are locked below the limit, so that one which another taker has removed
	// meanwhile doesn't count towards it. SKIP LOCKED would pass over rows of a
	// taker that then rolls back, and call a window empty that isn't. The locks
	// are taken in the order of the deadlines, the same for all takers. Others write
	// in key order: one that writes several due rows meanwhile can deadlock with
	// this, and Postgres then rolls one of the two back.
	rows, err := w.read(ctx, `
		WITH due AS MATERIALIZED (
			SELECT key FROM %[1]s WHERE visible_after <= $1::bigint
			ORDER BY visible_after, key LIMIT nullif($2::bigint, 0) FOR UPDATE
		)
		DELETE FROM %[1]s AS w USING due WHERE w.key = due.key
		RETURNING w.key, w.visible_after`, int64(now), max(limit, 0))
	return rows, w.named("take from", err)
}

// Peek returns what Take would, and removes nothing.
func (w *Postgres) Peek(ctx context.Context, now blob.Instant, limit int) ([]Row, error) {
	rows, err := w.read(ctx, `
		SELECT key, visible_after FROM %[1]s WHERE visible_after <= $1::bigint
		ORDER BY visible_after, key LIMIT nullif($2::bigint, 0)`, int64(now), max(limit, 0))
	return rows, w.named("peek into", err)
}

// List returns rows in key order, due or not, beginning with the first key that
// is from or sorts after it; a limit above 0 makes it at most so many. The page
// after a row begins at After of its key.
func (w *Postgres) List(ctx context.Context, from blob.Key, limit int) ([]Row, error) {
	rows, err := w.read(ctx, `
		SELECT key, visible_after FROM %[1]s WHERE key >= $1::bytea
		ORDER BY key LIMIT nullif($2::bigint, 0)`, []byte(from), max(limit, 0))
	return rows, w.named("list", err)
}

// Unstage removes the rows of the keys, due or not, and returns how many there
// were. A key without a row is no error.
func (w *Postgres) Unstage(ctx context.Context, keys []blob.Key) (removed int, err error) {
	rows, err := w.read(ctx, `
		WITH gone AS MATERIALIZED (
			SELECT key FROM %[1]s WHERE key = ANY($1::bytea[]) ORDER BY key FOR UPDATE
		)
		DELETE FROM %[1]s AS w USING gone WHERE w.key = gone.key
		RETURNING w.key, w.visible_after`, pgdb.Bytes(keys))
	return len(rows), w.named("unstage from", err)
}

// Count returns the number of rows, due or not.
func (w *Postgres) Count(ctx context.Context) (int64, error) {
	var n int64
	there, err := owntable.HasTable(ctx, w.q, w.schema, tableName)
	if there {
		err = w.q.QueryRow(ctx, "SELECT pg_catalog.count(*) FROM "+w.table).Scan(&n)
	}
	return n, w.named("count", err)
}

// insert runs a statement that stages rows and returns how many it wrote.
func (w *Postgres) insert(ctx context.Context, query string, rows []Row, r repeated) (int, error) {
	rows, err := distinct(rows, r)
	if err != nil {
		return 0, err
	}
	keys, deadlines := make([][]byte, len(rows)), make([]int64, len(rows))
	for i, row := range rows {
		keys[i], deadlines[i] = []byte(row.Key), int64(row.VisibleAfter)
	}
	tag, err := w.q.Exec(ctx, fmt.Sprintf(query, w.table), keys, deadlines)
	return int(tag.RowsAffected()), err
}

// read runs a statement that returns rows, and puts them into key order. Without
// the table there are none.
func (w *Postgres) read(ctx context.Context, query string, args ...any) ([]Row, error) {
	there, err := owntable.HasTable(ctx, w.q, w.schema, tableName)
	if err != nil || !there {
		return nil, err
	}
	found, err := w.q.Query(ctx, fmt.Sprintf(query, w.table), args...)
	if err != nil {
		return nil, err
	}
	rows, err := pgx.CollectRows(found, func(r pgx.CollectableRow) (Row, error) {
		var key []byte
		var at int64
		err := r.Scan(&key, &at)
		return Row{Key: blob.Key(key), VisibleAfter: blob.Instant(at)}, err
	})
	slices.SortFunc(rows, byKey)
	return rows, err
}

func (w *Postgres) named(verb string, err error) error {
	if err != nil {
		return fmt.Errorf("%s window %s: %w", verb, w.table, err)
	}
	return nil
}
