// Package owntable makes the tables of the agent's own in a schema of a Postgres
// database, and says how one that is there already differs. It knows none of them.
package owntable

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// Table is a table of the agent's in a pool's schema.
type Table struct {
	Name  string
	Shape []string // what shapeSQL says of it
	DDL   []string // makes it in a schema that is there
}

// HasTable asks the catalogue for a table. to_regclass would do that too, but raises an
// error where the role may not use the schema.
func HasTable(ctx context.Context, q pgdb.Querier, schema, name string) (bool, error) {
	const query = `SELECT EXISTS (
		SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2)`
	var there bool
	if err := q.QueryRow(ctx, query, schema, name).Scan(&there); err != nil {
		return false, fmt.Errorf("look for table %s: %w", pgdb.Ident(schema, name), err)
	}
	return there, nil
}

// Ensure makes the table unless it is there. The look without a lock comes first
// so that an agent whose table is there needs no right to create anything, and
// writes nothing.
func (t Table) Ensure(ctx context.Context, q pgdb.Querier, schema string) error {
	if there, err := t.Check(ctx, q, schema); there || err != nil {
		return err
	}
	return inTx(ctx, q, func(ctx context.Context, tx pgx.Tx) error {
		if err := LockSchema(ctx, tx, schema); err != nil {
			return err
		}
		if there, err := t.Check(ctx, tx, schema); there || err != nil {
			return err
		}
		return t.create(ctx, tx, schema)
	})
}

func (t Table) create(ctx context.Context, tx pgx.Tx, schema string) error {
	var hasSchema bool
	const query = `SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)`
	if err := tx.QueryRow(ctx, query, schema).Scan(&hasSchema); err != nil {
		return fmt.Errorf("look for schema %s: %w", pgdb.Ident(schema), err)
	}
	ddl := t.DDL
	if !hasSchema {
		// IF NOT EXISTS alone would want the right to create schemas in any case.
		ddl = append([]string{"CREATE SCHEMA IF NOT EXISTS " + pgdb.Ident(schema)}, ddl...)
	}
	for _, statement := range ddl {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}

// shapeSQL describes a relation in lines: its kind, its columns, its constraints.
// Postgres 18 has NOT NULL among the constraints, where others have it at the
// column only. The agent's own constraint triggers are added later.
const shapeSQL = `
	SELECT ARRAY[CASE
			WHEN c.relkind = 'r' AND c.relpersistence = 'p' THEN 'ordinary table'
			WHEN c.relkind = 'r' THEN 'unlogged table'
			WHEN c.relkind = 'p' THEN 'partitioned table'
			WHEN c.relkind = 'f' THEN 'foreign table'
			WHEN c.relkind = 'v' THEN 'view'
			ELSE 'relation of kind ' || c.relkind::text END]
		|| ARRAY(
			SELECT a.attname::text || ' ' || pg_catalog.format_type(a.atttypid, a.atttypmod)
				|| CASE WHEN a.attnotnull THEN ' NOT NULL' ELSE '' END
			FROM pg_catalog.pg_attribute a
			WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
			ORDER BY a.attnum)
		|| ARRAY(
			SELECT pg_catalog.pg_get_constraintdef(k.oid)
			FROM pg_catalog.pg_constraint k
			WHERE k.conrelid = c.oid AND k.contype NOT IN ('n', 't')
			ORDER BY 1)
	FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
	WHERE n.nspname = $1 AND c.relname = $2`

// Check says whether the table is there. One that isn't as the agent makes it is
// an error, ErrDifferent.
func (t Table) Check(ctx context.Context, q pgdb.Querier, schema string) (bool, error) {
	var shape []string
	err := q.QueryRow(ctx, shapeSQL, schema, t.Name).Scan(&shape)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("describe table %s: %w", pgdb.Ident(schema, t.Name), err)
	}
	if diff := Differences(t.Shape, shape); diff != "" {
		return false, Different(pgdb.Ident(schema, t.Name), diff)
	}
	return true, nil
}

// ErrDifferent means that a table of the agent's name is there and isn't the agent's.
var ErrDifferent = errors.New("isn't the agent's table")

// Different returns the ErrDifferent of a table, with what Differences says.
func Different(table, differences string) error {
	return fmt.Errorf("%s exists and %w (%s); it is left as it is: rename it, or give the pool another schema", table, ErrDifferent, differences)
}

// LockSchema waits until no other agent makes anything in the schema, and keeps
// others waiting until the transaction ends. The lock is of agents alone, so
// lock_timeout, which spares the application, would only make a race fail.
func LockSchema(ctx context.Context, tx pgx.Tx, schema string) error {
	var timeout string
	if err := tx.QueryRow(ctx, "SELECT pg_catalog.current_setting('lock_timeout')").Scan(&timeout); err != nil {
		return fmt.Errorf("read lock_timeout: %w", err)
	}
	const set = "SELECT pg_catalog.set_config('lock_timeout', $1, true)"
	if _, err := tx.Exec(ctx, set, "0"); err != nil {
		return fmt.Errorf("set lock_timeout: %w", err)
	}
	sum := sha256.Sum256([]byte("gc-agent schema\x00" + schema))
	key := int64(binary.BigEndian.Uint64(sum[:]))
	if _, err := tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock($1)", key); err != nil {
		return fmt.Errorf("wait for other agents: %w", err)
	}
	if _, err := tx.Exec(ctx, set, timeout); err != nil {
		return fmt.Errorf("set lock_timeout: %w", err)
	}
	return nil
}

// inTx runs fn in a transaction of q's: one of its own, or a part of the one
// that q is, so that an error leaves the rest of that one usable.
func inTx(ctx context.Context, q pgdb.Querier, fn func(context.Context, pgx.Tx) error) error {
	type conn interface {
		InTx(ctx context.Context, access pgdb.Access, fn func(context.Context, pgx.Tx) error) error
	}
	type beginner interface {
		Begin(ctx context.Context) (pgx.Tx, error)
	}
	switch q := q.(type) {
	case conn:
		return q.InTx(ctx, pgdb.ReadWrite, fn)
	case beginner:
		return pgx.BeginFunc(ctx, q, func(tx pgx.Tx) error { return fn(ctx, tx) })
	default:
		return fmt.Errorf("%T can't begin a transaction", q)
	}
}

// Differences says how a table that exists differs from the one that the agent
// makes, both as lines that describe them. It returns "" where they are the same.
func Differences(want, got []string) string {
	var parts []string
	if missing := without(want, got); len(missing) > 0 {
		parts = append(parts, "missing: "+strings.Join(missing, ", "))
	}
	if extra := without(got, want); len(extra) > 0 {
		parts = append(parts, "unexpected: "+strings.Join(extra, ", "))
	}
	return strings.Join(parts, "; ")
}

// without returns the lines that are in a and not in b.
func without(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(line string) bool { return slices.Contains(b, line) })
}
