package fleet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// ErrJointDone means that a joint transaction was used after it had ended:
// committed, rolled back, or failed.
var ErrJointDone = errors.New("the joint transaction has ended")

const rollbackTimeout = 5 * time.Second

// JointTx is a transaction in which entries and their pins are written together.
// It belongs to one goroutine, and its connection to it, until it ends. Only
// BeginJointTx makes one.
type JointTx struct {
	tx      pgx.Tx // nil once it has ended
	schema  string
	without omit
}

// Entry is a row that holds a blob: of which table, under which key, and what
// else stands in it, by the names of the columns.
type Entry struct {
	PinTier
	Key     blob.Key
	Columns map[string]any
}

// BeginJointTx begins a transaction on conn in which entries are put together
// with their pins. The schema is the pool's, where EnsureFunctions has run.
// Whoever began it ends it, with PinCommit or Rollback. It is READ COMMITTED.
func BeginJointTx(ctx context.Context, conn *pgdb.Conn, schema string) (*JointTx, error) {
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return nil, fmt.Errorf("begin joint transaction: %w", err)
	}
	jt := &JointTx{tx: tx, schema: schema}
	// A hidden row is an error, and a name means what it says.
	const set = `SELECT pg_catalog.set_config('row_security', 'off', true),
		pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true)`
	if _, err := tx.Exec(ctx, set); err != nil {
		return nil, errors.Join(fmt.Errorf("begin joint transaction: %w", err), jt.Rollback(ctx))
	}
	return jt, nil
}

// JointPut inserts the entry, unless its key is there, and pins the key for the
// owner. It says whether it inserted: the first writer wins, and the later one's
// columns are dropped. A pin that the owner has already is renewed. The key lock
// comes first, so that the entry that is found there stays.
//
// It waits for whoever is writing the same entry. After an error the transaction
// is rolled back and has ended: it leaves no entry and no pin, of this put or an
// earlier one.
func JointPut(ctx context.Context, jt *JointTx, e Entry, owner Owner, ttl time.Duration) (inserted bool, err error) {
	if jt.tx == nil {
		return false, fmt.Errorf("put into %s: %w", e.Table, ErrJointDone)
	}
	inserted, err = jt.put(ctx, e, owner, ttl)
	if err != nil {
		// Where this fails too the connection is broken, and the server rolls back.
		_ = jt.Rollback(ctx)
		return false, fmt.Errorf("put key %s into %s: %w", e.Kind.Display(e.Key), e.Table, err)
	}
	return inserted, nil
}

func (jt *JointTx) put(ctx context.Context, e Entry, owner Owner, ttl time.Duration) (inserted bool, err error) {
	if err := checkTTL(ttl); err != nil {
		return false, err
	}
	insert, args, err := e.insert()
	if err != nil {
		return false, err
	}
	if !jt.without.EntryLock {
		lock := "SELECT pg_catalog.pg_advisory_xact_lock_shared(" + keyLockSQL(jt.schema, "$1::bytea") + ")"
		if _, err := jt.tx.Exec(ctx, lock, []byte(e.Key)); err != nil {
			return false, fmt.Errorf("lock the key: %w", err)
		}
	}
	tag, err := jt.tx.Exec(ctx, insert, args...)
	if err != nil {
		return false, fmt.Errorf("insert the entry: %w", err)
	}
	pin := "SELECT " + pgdb.Ident(jt.schema, "pin") + "($1::bytea, $2::bytea, $3::bigint * interval '1 microsecond')"
	if _, err := jt.tx.Exec(ctx, pin, []byte(e.Key), []byte(owner), ttl.Microseconds()); err != nil {
		return false, fmt.Errorf("pin the key: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}

// insert returns the statement that inserts the entry, and its arguments. Another
// unique column than the key's raises the server's error.
func (e Entry) insert() (string, []any, error) {
	key, err := pgdb.Array(e.Kind, []blob.Key{e.Key})
	if err != nil {
		return "", nil, err
	}
	if _, ok := e.Columns[e.KeyColumn]; ok {
		return "", nil, fmt.Errorf("the key column %s stands among the other columns", e.KeyColumn)
	}
	columns, values := []string{pgdb.Ident(e.KeyColumn)}, []string{"($1::" + pgdb.Type(e.Kind) + "[])[1]"}
	args := []any{key}
	for _, name := range slices.Sorted(maps.Keys(e.Columns)) {
		args = append(args, e.Columns[name])
		columns, values = append(columns, pgdb.Ident(name)), append(values, fmt.Sprintf("$%d", len(args)))
	}
	return "INSERT INTO " + e.Table + " (" + strings.Join(columns, ", ") + ") VALUES (" + strings.Join(values, ", ") +
		") ON CONFLICT (" + columns[0] + ") DO NOTHING", args, nil
}

// PinCommit commits entries and pins in one step and ends the transaction. With
// SQLSTATE 40001 a pin has expired meanwhile: nothing is left, and it may be tried
// again. After any other error it may not be known whether both are there, or
// neither.
func PinCommit(ctx context.Context, jt *JointTx) error {
	if jt.tx == nil {
		return fmt.Errorf("commit joint transaction: %w", ErrJointDone)
	}
	tx := jt.tx
	jt.tx = nil
	if err := tx.Commit(ctx); err != nil {
		return errors.Join(fmt.Errorf("commit joint transaction: %w", err), rollback(ctx, tx))
	}
	return nil
}

// Rollback ends the transaction and leaves nothing of it. It may be repeated,
// does nothing after PinCommit, and works within a short time even when ctx has
// ended. After an error the connection is broken, and the server rolls back.
func (jt *JointTx) Rollback(ctx context.Context) error {
	if jt.tx == nil {
		return nil
	}
	tx := jt.tx
	jt.tx = nil
	return rollback(ctx, tx)
}

func rollback(ctx context.Context, tx pgx.Tx) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	if err := tx.Rollback(ctx); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
		return fmt.Errorf("roll back joint transaction: %w", err)
	}
	return nil
}
