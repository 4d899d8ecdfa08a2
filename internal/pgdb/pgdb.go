// Package pgdb is what the agent's parts share on Postgres: how a connection is
// opened and set, how a transaction is run, how a key is written in SQL. It
// knows no window, no pin and no liveness source.
package pgdb

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Querier runs statements: a connection, a pool or a transaction.
type Querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Timeouts bound what the agent may cost the application. They are set on every
// connection that has no pooler behind it, and again, with SET LOCAL, in every
// transaction, so that neither a pooler nor a role's defaults can lift them.
// Milliseconds are the resolution.
type Timeouts struct {
	Lock      time.Duration // waiting for one lock
	Statement time.Duration // one statement
	Idle      time.Duration // idle inside a transaction
}

// Options configure the connections of one database.
type Options struct {
	Timeouts Timeouts
	Tracer   pgx.QueryTracer // sees every statement; nil for none
}

const (
	connectTimeout  = 10 * time.Second
	rollbackTimeout = 5 * time.Second
	maxConns        = 4
)

// DB is one Postgres database that the agent works in.
type DB struct {
	cfg      *pgxpool.Config
	timeouts Timeouts

	mu   sync.Mutex
	pool *pgxpool.Pool // nil until the first connection
}

// Open prepares connections to the database at url; it doesn't connect yet. An
// error never contains the url.
func Open(url string, opts Options) (*DB, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		// The parser's error quotes the connection string.
		return nil, errors.New("the connection string isn't a valid postgres URL")
	}
	cfg.MaxConns = maxConns
	cfg.ConnConfig.ConnectTimeout = connectTimeout
	cfg.ConnConfig.Tracer = opts.Tracer
	cfg.ConnConfig.DialFunc = dialer().DialContext
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		pooled, err := isPooled(ctx, conn)
		if err != nil || pooled {
			// What is set on a pooler's session stays there, for whoever gets it next.
			return err
		}
		if err := configureSession(ctx, conn, opts.Timeouts); err != nil {
			return err
		}
		return configurePeer(ctx, conn)
	}
	return &DB{cfg: cfg, timeouts: opts.Timeouts}, nil
}

// Login returns the role and the database that the url names.
func (db *DB) Login() (user, database string) {
	return db.cfg.ConnConfig.User, db.cfg.ConnConfig.Database
}

// Close closes every pooled connection.
func (db *DB) Close() {
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.pool != nil {
		db.pool.Close()
	}
}

// Dedicated opens a connection that belongs to the caller, who closes it. It is
// never recycled: a lease lives as long as its session.
func (db *DB) Dedicated(ctx context.Context) (*Conn, error) {
	pool, err := db.connect(ctx)
	if err != nil {
		return nil, err
	}
	pooled, err := pool.Acquire(ctx)
	if err != nil {
		return nil, connectError{err}
	}
	return &Conn{Conn: pooled.Hijack(), timeouts: db.timeouts}, nil
}

// connectError says once what every attempt at an address or an encryption failed
// of.
type connectError struct{ error }

func (e connectError) Error() string {
	var lines []string
	for line := range strings.Lines(e.error.Error()) {
		if line = strings.TrimSpace(line); line != "" && !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return "connect: " + strings.Join(lines, "; ")
}

func (e connectError) Unwrap() error { return e.error }

func (db *DB) connect(ctx context.Context) (*pgxpool.Pool, error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.pool != nil {
		return db.pool, nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, db.cfg)
	if err != nil {
		return nil, fmt.Errorf("open connection pool: %w", err)
	}
	db.pool = pool
	return pool, nil
}

// Conn is one connection to Postgres.
type Conn struct {
	*pgx.Conn
	timeouts Timeouts
}

// Close closes the connection within a short time, even when ctx has ended.
func (c *Conn) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	return c.Conn.Close(ctx)
}

// Access says whether a transaction may write.
type Access bool

// A transaction's access.
const (
	ReadOnly  Access = false
	ReadWrite Access = true
)

// InTx runs fn in one transaction and commits when fn returns nil; otherwise it
// rolls back and returns fn's error. An error of the commit means that the
// outcome isn't known. It never retries.
//
// The transaction is READ COMMITTED whatever the role's default, so that every
// statement sees what committed before it began: the check after a lock must be
// younger than the lock.
func (c *Conn) InTx(ctx context.Context, access Access, fn func(context.Context, pgx.Tx) error) (err error) {
	opts := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly, DeferrableMode: pgx.NotDeferrable}
	if access == ReadWrite {
		opts.AccessMode = pgx.ReadWrite
	}
	tx, err := c.BeginTx(ctx, opts)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() {
		if err == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		// A rollback that fails leaves a broken connection, whose transaction the
		// server rolls back by itself.
		_ = tx.Rollback(ctx)
	}()
	if err = configureTx(ctx, tx, c.timeouts); err != nil {
		return err
	}
	if err = fn(ctx, tx); err != nil {
		return err
	}
	if err = tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// setLocal is one statement, so that no transaction of the agent's runs with
// half of its settings:
//   - row_security off makes Postgres raise an error where a policy would hide
//     rows; a hidden row is a reference that nobody sees.
//   - search_path holds nothing that others may create objects in.
//   - plan_cache_mode: a generic plan of a page's range is several times slower.
//   - quote_all_identifiers changes how the catalogue spells what is compared.
//   - client_encoding: keys that are text travel as UTF-8.
//   - parallel workers are the application's.
//   - jit costs more than a page's plan saves.
//   - ReadSettings: a source's SQL means the same whoever asks.
var setLocal = `SELECT pg_catalog.set_config('row_security', 'off', true),
	pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
	pg_catalog.set_config('lock_timeout', $1, true),
	pg_catalog.set_config('statement_timeout', $2, true),
	pg_catalog.set_config('idle_in_transaction_session_timeout', $3, true),
	pg_catalog.set_config('plan_cache_mode', 'force_custom_plan', true),
	pg_catalog.set_config('quote_all_identifiers', 'off', true),
	pg_catalog.set_config('client_encoding', 'UTF8', true),
	pg_catalog.set_config('max_parallel_workers_per_gather', '0', true),
	pg_catalog.set_config('jit', 'off', true)` + setReading()

// ReadSettings are the settings, name=value, on which it depends what a literal in SQL
// means and how a value is written as text. Every transaction of the agent's has them,
// and so must whatever evaluates a source's SQL elsewhere.
func ReadSettings() []string {
	return []string{
		"TimeZone=UTC", "DateStyle=ISO, MDY", "IntervalStyle=postgres", "bytea_output=hex", "extra_float_digits=1",
		"standard_conforming_strings=on", "transform_null_equals=off",
	}
}

func setReading() string {
	var sql strings.Builder
	for _, setting := range ReadSettings() {
		name, value, _ := strings.Cut(setting, "=")
		sql.WriteString(",\n\tpg_catalog.set_config('" + name + "', '" + value + "', true)")
	}
	return sql.String()
}

func configureTx(ctx context.Context, tx pgx.Tx, t Timeouts) error {
	if _, err := tx.Exec(ctx, setLocal, ms(t.Lock), ms(t.Statement), ms(t.Idle)); err != nil {
		return fmt.Errorf("set the transaction's limits: %w", err)
	}
	return nil
}

// unprepared has a statement leave nothing behind on the server that a later one
// needs: a pooler may give that one another session.
const unprepared = pgx.QueryExecModeExec

// configureSession sets the limits by statements, not by startup parameters,
// which poolers refuse with an error that nobody understands.
func configureSession(ctx context.Context, conn *pgx.Conn, t Timeouts) error {
	const set = `SELECT pg_catalog.set_config('application_name', 'gc-agent', false),
		pg_catalog.set_config('lock_timeout', $1, false),
		pg_catalog.set_config('statement_timeout', $2, false),
		pg_catalog.set_config('idle_in_transaction_session_timeout', $3, false),
		pg_catalog.set_config('idle_session_timeout', '0', false),
		pg_catalog.set_config('quote_all_identifiers', 'off', false),
		pg_catalog.set_config('client_encoding', 'UTF8', false)`
	if _, err := conn.Exec(ctx, set, unprepared, ms(t.Lock), ms(t.Statement), ms(t.Idle)); err != nil {
		return fmt.Errorf("set the connection's limits: %w", err)
	}
	return nil
}

// pooledKey is where a connection remembers what isPooled found.
const pooledKey = "gc-agent pooled"

// isPooled finds out whether a pooler stands in between: the server's process isn't
// the one that introduced itself.
func isPooled(ctx context.Context, conn *pgx.Conn) (bool, error) {
	var pid uint32
	if err := conn.QueryRow(ctx, "SELECT pg_catalog.pg_backend_pid()", unprepared).Scan(&pid); err != nil {
		return false, fmt.Errorf("ask for the server's process: %w", err)
	}
	pooled := pid != conn.PgConn().PID()
	conn.PgConn().CustomData()[pooledKey] = pooled
	return pooled, nil
}

// Pooled says whether a pooler stands between the connection and the server. What
// belongs to a session, such as a lock, can't be relied on then, whichever mode the
// pooler is in.
func (c *Conn) Pooled() bool {
	pooled, known := c.PgConn().CustomData()[pooledKey].(bool)
	return pooled || !known
}

// ms is never 0 for a positive duration: 0 would mean no limit at all.
func ms(d time.Duration) string {
	n := d.Milliseconds()
	if n == 0 && d > 0 {
		n = 1
	}
	return strconv.FormatInt(n, 10)
}

// Ident quotes a schema and a name, or a name alone.
func Ident(parts ...string) string { return pgx.Identifier(parts).Sanitize() }

// SQLSTATEs that branches depend on.
// https://www.postgresql.org/docs/15/errcodes-appendix.html
const (
	ForeignKeyViolation   = "23503"
	SerializationFailure  = "40001"
	DeadlockDetected      = "40P01"
	InsufficientPrivilege = "42501"
	UndefinedTable        = "42P01"
	LockNotAvailable      = "55P03"
	QueryCanceled         = "57014"
	InvalidParameterValue = "22023"
)

// Code returns err's SQLSTATE, or "" when it isn't an error of the server's.
func Code(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// ConnectionLost says whether err ended the connection, so that nothing more
// can be said on it.
func ConnectionLost(err error) bool {
	switch code := Code(err); {
	case code == "57P01", code == "57P02", code == "57P03", len(code) == 5 && code[:2] == "08":
		return true
	default:
		return code == ""
	}
}
