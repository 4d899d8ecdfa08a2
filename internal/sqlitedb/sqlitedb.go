// Package sqlitedb is what the agent's parts share on SQLite: how a connection
// to somebody else's database is opened, how a transaction is run beside its
// writers, how keys are passed. It knows no window and no liveness source.
package sqlitedb

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/alkblobs/gc-agent/blob"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// Tracer sees every statement of a connection: Before it runs, and After it
// has. A nil Tracer sees none.
type Tracer interface {
	Before(sql string)
	After(sql string)
}

// Options configure the connections of one database.
type Options struct {
	// BusyTimeout is how long one attempt waits for another writer's lock.
	BusyTimeout time.Duration
	Tracer      Tracer
}

const rollbackTimeout = 5 * time.Second

// DB is one SQLite file.
type DB struct {
	sql  *sql.DB
	path string
	opts Options
}

// Open prepares connections to the file at path; it opens none yet. Connections
// never create a file: an agent that made an empty database where the
// application's should be would find every blob unreferenced. They leave the
// journal mode alone.
func Open(path string, opts Options) (*DB, error) {
	dsn := "file:" + (&url.URL{Path: path}).EscapedPath() + "?mode=rw" +
		fmt.Sprintf("&_pragma=busy_timeout(%d)", opts.BusyTimeout.Milliseconds()) +
		// A foreign key that still holds a row must stop the delete.
		"&_pragma=foreign_keys(1)"
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, fmt.Errorf("open SQLite database %s: %w", path, err)
	}
	// A connection that was kept would go on reading a file that has been replaced.
	db.SetMaxIdleConns(0)
	return &DB{sql: db, path: path, opts: opts}, nil
}

// Path returns the file's path, as given.
func (db *DB) Path() string { return db.path }

// Close closes the database.
func (db *DB) Close() error { return db.sql.Close() }

// Conn opens a connection that belongs to the caller, who closes it.
func (db *DB) Conn(ctx context.Context) (*Conn, error) {
	info, err := os.Stat(db.path)
	if err != nil {
		return nil, fmt.Errorf("open SQLite database: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("open SQLite database: %s isn't a regular file", db.path)
	}
	c, err := db.sql.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("open SQLite database %s: %w", db.path, err)
	}
	// SQLite reads nothing of the file before the first statement, whose error
	// wouldn't name it.
	var version int
	err = c.QueryRowContext(ctx, "PRAGMA schema_version").Scan(&version)
	if err != nil && !Busy(err) { // a busy one is a database
		return nil, errors.Join(fmt.Errorf("read SQLite database %s: %w", db.path, err), c.Close())
	}
	return &Conn{conn: c, busy: db.opts.BusyTimeout, path: db.path, file: info, tracer: db.opts.Tracer}, nil
}

// Querier runs statements on one connection.
type Querier interface {
	Exec(ctx context.Context, query string, args ...any) (sql.Result, error)
	Query(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRow(ctx context.Context, query string, args ...any) *sql.Row
}

// Conn is one connection; it isn't safe for concurrent use.
type Conn struct {
	conn   *sql.Conn
	busy   time.Duration
	path   string
	file   os.FileInfo
	tracer Tracer
}

var _ Querier = (*Conn)(nil)

// Close returns the connection.
func (c *Conn) Close() error { return c.conn.Close() }

// Replaced says whether another file stands at the path by now: what the
// connection reads is then no longer what the application writes.
func (c *Conn) Replaced() (bool, error) {
	info, err := os.Stat(c.path)
	if err != nil {
		return false, fmt.Errorf("look at SQLite database: %w", err)
	}
	return !os.SameFile(info, c.file), nil
}

// Exec runs a statement that returns no rows.
func (c *Conn) Exec(ctx context.Context, query string, args ...any) (sql.Result, error) {
	defer c.trace(query)()
	return c.conn.ExecContext(ctx, query, args...)
}

// Query runs a statement that returns rows; the caller closes them.
func (c *Conn) Query(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	defer c.trace(query)()
	return c.conn.QueryContext(ctx, query, args...) //nolint:sqlclosecheck // the caller closes them
}

// QueryRow runs a statement that returns at most one row.
func (c *Conn) QueryRow(ctx context.Context, query string, args ...any) *sql.Row {
	defer c.trace(query)()
	return c.conn.QueryRowContext(ctx, query, args...)
}

func (c *Conn) trace(query string) func() {
	if c.tracer == nil {
		return func() {}
	}
	c.tracer.Before(query)
	return func() { c.tracer.After(query) }
}

// Access says how a transaction begins.
type Access string

// The two kinds of transactions: Read takes a snapshot at its first read, Write
// takes the write lock at its beginning, so that nothing can slip between a
// check and the delete that follows from it.
const (
	Read  Access = "BEGIN DEFERRED"
	Write Access = "BEGIN IMMEDIATE"
)

// busyRetries is how often a transaction that found the file busy is begun
// anew, each attempt waiting for the whole busy timeout: in rollback-journal
// mode a crowd of readers and writers can starve one of them past it.
const busyRetries = 4

// InTx runs fn in one transaction and commits when fn returns nil; otherwise it
// rolls back and returns fn's error. fn may run more than once: a transaction
// that found the file busy is rolled back, whole, and begun again.
func (c *Conn) InTx(ctx context.Context, access Access, fn func(context.Context, Querier) error) error {
	for attempt := 0; ; attempt++ {
		err := c.inTx(ctx, access, fn)
		if err == nil || !Busy(err) || attempt == busyRetries || ctx.Err() != nil {
			return err
		}
	}
}

// HadWriteLock takes the write lock and gives it back. It is false when another
// connection didn't let it go within timeout.
func (c *Conn) HadWriteLock(ctx context.Context, timeout time.Duration) (had bool, err error) {
	if err := c.setBusyTimeout(ctx, timeout); err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, c.setBusyTimeout(context.WithoutCancel(ctx), c.busy)) }()
	err = c.inTx(ctx, Write, func(context.Context, Querier) error { return nil })
	if Busy(err) {
		return false, nil
	}
	return err == nil, err
}

func (c *Conn) setBusyTimeout(ctx context.Context, d time.Duration) error {
	if _, err := c.Exec(ctx, fmt.Sprintf("PRAGMA busy_timeout = %d", d.Milliseconds())); err != nil {
		return fmt.Errorf("set the busy timeout: %w", err)
	}
	return nil
}

func (c *Conn) inTx(ctx context.Context, access Access, fn func(context.Context, Querier) error) (err error) {
	if _, err = c.Exec(ctx, string(access)); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() {
		if err == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		// It fails where SQLite has rolled back by itself already, which is the
		// state that is wanted.
		_, _ = c.Exec(ctx, "ROLLBACK")
	}()
	if err = fn(ctx, c); err != nil {
		return err
	}
	if _, err = c.Exec(ctx, "COMMIT"); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// Busy says whether err means that another connection holds the file.
func Busy(err error) bool {
	switch primary(err) {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return true
	}
	return false
}

// Constraint says whether err means that a constraint or a trigger refused a
// row, and not that the database is in trouble.
func Constraint(err error) bool { return primary(err) == sqlite3.SQLITE_CONSTRAINT }

// primary returns the primary result code: extended codes carry it in their
// low byte, https://www.sqlite.org/rescode.html.
func primary(err error) int {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return -1
	}
	return e.Code() & 0xff
}

// Ident quotes an identifier.
func Ident(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

// HasTable asks the catalogue for a table, in any letter case, as SQLite does.
func HasTable(ctx context.Context, q Querier, name string) (bool, error) {
	var n int
	err := q.QueryRow(ctx, `SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE`, name).Scan(&n)
	if err != nil {
		return false, fmt.Errorf("look for table %s: %w", name, err)
	}
	return n > 0, nil
}

// Canon returns SQL for the canonical bytes (a BLOB) of a key column or value of
// the given kind.
func Canon(kind blob.Kind, expr string) string {
	switch kind {
	case blob.KindBytes:
		return expr
	case blob.KindInt:
		return "CAST(CAST(" + expr + " AS TEXT) AS BLOB)"
	default:
		return "CAST(" + expr + " AS BLOB)"
	}
}

// Native returns SQL that turns canonical bytes into the value that a key
// column of the kind stores.
func Native(kind blob.Kind, canon string) string {
	switch kind {
	case blob.KindBytes:
		return canon
	case blob.KindInt:
		return "CAST(CAST(" + canon + " AS TEXT) AS INTEGER)"
	default:
		return "CAST(" + canon + " AS TEXT)"
	}
}

// KeyList is the FROM item that turns the parameter KeyParam makes into rows
// (ord INTEGER, canon BLOB), ord counting from 0 in the order of the keys.
const KeyList = `(SELECT key AS ord, unhex(value) AS canon FROM json_each(?))`

// KeyParam passes any number of keys in one parameter: SQLite has no arrays, and
// JSON no bytes.
func KeyParam(keys []blob.Key) (string, error) {
	out := make([]string, len(keys))
	for i, key := range keys {
		out[i] = hex.EncodeToString([]byte(key))
	}
	data, err := json.Marshal(out)
	if err != nil {
		return "", fmt.Errorf("encode keys: %w", err)
	}
	return string(data), nil
}
