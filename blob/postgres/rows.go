package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// keyColumn is the key column of the table's alias p.
func (t *Table) keyColumn() string { return "p." + pgdb.Ident(t.key.Name) }

// Lock locks the rows of keys, in the order of keys, for the transaction that q
// is, and returns one hold a key. It waits for nobody's row: one that somebody else
// has locked is Busy. While somebody keeps the whole table from being changed for
// longer than lock_timeout, it is ErrTableHeld. It is a statement of its own, so that
// whatever is asked next sees everything that was committed before the lock was
// had. From then on nobody can add a foreign key to the table.
func (t *Table) Lock(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]blob.Hold, error) {
	param, err := pgdb.Array(t.kind, keys)
	if err != nil {
		return nil, fmt.Errorf("lock rows of %s: %w", t, err)
	}
	holds := make([]blob.Hold, len(keys))
	if err := t.lockTable(ctx, q); err != nil {
		return nil, err
	}
	// FOR UPDATE, not a weaker lock: it conflicts with the FOR KEY SHARE that the
	// key check of a new reference takes, so that check waits for this delete.
	lock := `SELECT k.ord - 1, ` + t.size + `
		FROM unnest($1::` + pgdb.Type(t.kind) + `[]) WITH ORDINALITY AS k (key, ord)
		JOIN ` + t.rel.SQL() + ` p ON ` + t.keyColumn() + ` = k.key
		ORDER BY k.ord
		FOR UPDATE OF p SKIP LOCKED`
	err = eachOrd(ctx, q, lock, param, func(ord, size int64) { holds[ord] = blob.Hold{State: blob.Held, Size: size} })
	if err != nil {
		return nil, fmt.Errorf("lock rows of %s: %w", t, err)
	}
	// What wasn't locked is locked by another, or isn't there.
	seen, err := t.Look(ctx, q, keys)
	if err != nil {
		return nil, err
	}
	for i := range holds {
		if holds[i].State != blob.Held && seen[i].State == blob.Absent {
			holds[i].State = blob.Absent
		}
	}
	return holds, nil
}

// Look is Lock without the lock: a row that is there is Held, whoever else may
// have it locked. It serves a dry run, which writes nothing.
func (t *Table) Look(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]blob.Hold, error) {
	param, err := pgdb.Array(t.kind, keys)
	if err != nil {
		return nil, fmt.Errorf("look for rows of %s: %w", t, err)
	}
	holds := make([]blob.Hold, len(keys))
	for i := range holds {
		holds[i].State = blob.Absent
	}
	look := `SELECT k.ord - 1, ` + t.size + `
		FROM unnest($1::` + pgdb.Type(t.kind) + `[]) WITH ORDINALITY AS k (key, ord)
		JOIN ` + t.rel.SQL() + ` p ON ` + t.keyColumn() + ` = k.key`
	err = eachOrd(ctx, q, look, param, func(ord, size int64) { holds[ord] = blob.Hold{State: blob.Held, Size: size} })
	if err != nil {
		return nil, fmt.Errorf("look for rows of %s: %w", t, err)
	}
	return holds, nil
}

// ErrTableHeld means that somebody keeps the table from being changed: an index is
// being built, say. The transaction goes on.
var ErrTableHeld = errors.New("another transaction keeps the table from being changed")

// lockTable takes the lock that a delete takes anyway, early: a foreign key that is
// made needs the table to itself, and waits. In a savepoint, because not to get a
// lock is an error to Postgres.
func (t *Table) lockTable(ctx context.Context, q pgdb.Querier) error {
	tx, ok := q.(pgx.Tx)
	if !ok {
		return fmt.Errorf("lock table %s: a lock outside a transaction holds nothing", t)
	}
	err := pgx.BeginFunc(ctx, tx, func(sub pgx.Tx) error {
		_, err := sub.Exec(ctx, "LOCK TABLE "+t.rel.SQL()+" IN ROW EXCLUSIVE MODE")
		return err
	})
	if pgdb.Code(err) == pgdb.LockNotAvailable {
		return fmt.Errorf("lock table %s: %w", t, ErrTableHeld)
	}
	if err != nil {
		return fmt.Errorf("lock table %s: %w", t, err)
	}
	return nil
}

func eachOrd(ctx context.Context, q pgdb.Querier, sql string, param any, fn func(ord, n int64)) error {
	rows, err := q.Query(ctx, sql, param)
	if err != nil {
		return err
	}
	var ord, n int64
	_, err = pgx.ForEachRow(rows, []any{&ord, &n}, func() error {
		fn(ord, n)
		return nil
	})
	return err
}

// Delete deletes the rows of keys and returns those that it deleted, in no
// order. A key whose row isn't there, or whose delete a trigger of the
// application's suppressed, isn't among them. Constraints that were deferred
// are checked before it returns. After an error the transaction is broken and
// nothing is deleted.
func (t *Table) Delete(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]blob.Deletion, error) {
	param, err := pgdb.Array(t.kind, keys)
	if err != nil {
		return nil, fmt.Errorf("delete rows of %s: %w", t, err)
	}
	del := `DELETE FROM ` + t.rel.SQL() + ` p
		USING unnest($1::` + pgdb.Type(t.kind) + `[]) AS k (key)
		WHERE ` + t.keyColumn() + ` = k.key
		RETURNING ` + pgdb.Canon(t.kind, t.keyColumn()) + `, ` + t.size
	rows, err := q.Query(ctx, del, param)
	if err != nil {
		return nil, fmt.Errorf("delete rows of %s: %w", t, err)
	}
	deleted, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (blob.Deletion, error) {
		d := blob.Deletion{Outcome: blob.Deleted}
		err := row.Scan((*keyBytes)(&d.Key), &d.Size)
		return d, err
	})
	if err != nil {
		return nil, fmt.Errorf("delete rows of %s: %w", t, err)
	}
	if _, err := q.Exec(ctx, `SET CONSTRAINTS ALL IMMEDIATE`); err != nil {
		return nil, fmt.Errorf("check the constraints on %s: %w", t, err)
	}
	return deleted, nil
}

// keyBytes scans a bytea into a key.
type keyBytes blob.Key

// ScanBytes implements pgtype.BytesScanner.
func (k *keyBytes) ScanBytes(v []byte) error {
	if v == nil {
		return errors.New("a key is NULL")
	}
	*k = keyBytes(v)
	return nil
}

// Span is a stretch of the table in the order of its key column, whose native
// order isn't that of the canonical bytes. From is exclusive, To inclusive; nil
// is the table's end.
type Span struct {
	From, To any
}

// NextSpan returns the stretch of at most n rows that follows the one given,
// and whether it is the last. The zero Span begins the table.
func (t *Table) NextSpan(ctx context.Context, q pgdb.Querier, after Span, n int) (next Span, last bool, err error) {
	where, args := "", []any{n - 1}
	if after.To != nil {
		where, args = " WHERE "+t.keyColumn()+" > $2::"+pgdb.Type(t.kind), append(args, after.To)
	}
	// The bound is looked up first and the page then read between two bounds:
	// bounded scans of every table merge, a LIMIT over an anti-join doesn't.
	sql := `SELECT ` + t.keyColumn() + `::` + pgdb.Type(t.kind) + ` FROM ` + t.rel.SQL() + ` p` + where +
		` ORDER BY ` + t.keyColumn() + ` OFFSET $1 LIMIT 1`
	var to any
	err = q.QueryRow(ctx, sql, args...).Scan(&to)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Span{From: after.To}, true, nil
	case err != nil:
		return Span{}, false, fmt.Errorf("find the end of a page of %s: %w", t, err)
	}
	return Span{From: after.To, To: to}, false, nil
}

// Page is what the sweep's mark needs to build its statement over one span:
// SQL over the alias p, and the parameters it stands on.
type Page struct {
	Table string // FROM item
	Key   string // native key column
	Canon string // canonical bytes
	Where string // the span's bounds, over Key
	Lo    string // parameter of the lower bound, or ""
	Hi    string // parameter of the upper bound, or ""
	Args  []any
}

// Page returns the span as SQL.
func (t *Table) Page(s Span) Page {
	p := Page{
		Table: t.rel.SQL() + " p",
		Key:   t.keyColumn(),
		Canon: pgdb.Canon(t.kind, t.keyColumn()),
		Where: "true",
	}
	if s.From != nil {
		p.Args = append(p.Args, s.From)
		p.Lo = fmt.Sprintf("$%d::%s", len(p.Args), pgdb.Type(t.kind))
		p.Where += " AND " + p.Key + " > " + p.Lo
	}
	if s.To != nil {
		p.Args = append(p.Args, s.To)
		p.Hi = fmt.Sprintf("$%d::%s", len(p.Args), pgdb.Type(t.kind))
		p.Where += " AND " + p.Key + " <= " + p.Hi
	}
	return p
}
