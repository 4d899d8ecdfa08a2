package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
)

// keyColumn is the key column of the table's alias p.
func (t *Table) keyColumn() string { return "p." + sqlitedb.Ident(t.key.Name) }

// keyParam returns keys as the parameter of sqlitedb.KeyList. A key that isn't
// one of the table's kind is an error that names it.
func (t *Table) keyParam(keys []blob.Key) (string, error) {
	for _, key := range keys {
		if err := t.kind.Valid(key); err != nil {
			return "", err
		}
	}
	return sqlitedb.KeyParam(keys)
}

// Look is Lock: there are no locks of rows to take or to leave.
func (t *Table) Look(ctx context.Context, q sqlitedb.Querier, keys []blob.Key) ([]blob.Hold, error) {
	return t.Lock(ctx, q, keys)
}

// Lock looks for the rows of keys and returns one hold a key, in their order. A
// transaction that began with sqlitedb.Write has the lock of the whole file, so
// that no hold is ever Busy, and what is Held stays; in one that reads, as a dry
// run's, it may change once that ends.
func (t *Table) Lock(ctx context.Context, q sqlitedb.Querier, keys []blob.Key) ([]blob.Hold, error) {
	param, err := t.keyParam(keys)
	if err != nil {
		return nil, fmt.Errorf("look for rows of %s: %w", t, err)
	}
	type held struct{ ord, size int64 }
	// CROSS JOIN keeps the order of the tables: one look-up a key.
	look := `SELECT k.ord, ` + t.size + ` FROM ` + sqlitedb.KeyList + ` k
		CROSS JOIN ` + t.rel.SQL() + ` p ON ` + t.keyColumn() + ` = ` + sqlitedb.Native(t.kind, "k.canon")
	rows, err := sqlitedb.Collect(ctx, q, func(rows *sql.Rows) (held, error) {
		var h held
		err := rows.Scan(&h.ord, &h.size)
		return h, err
	}, look, param)
	if err != nil {
		return nil, fmt.Errorf("look for rows of %s: %w", t, err)
	}
	holds := make([]blob.Hold, len(keys))
	for i := range holds {
		holds[i].State = blob.Absent
	}
	for _, h := range rows {
		holds[h.ord] = blob.Hold{State: blob.Held, Size: h.size}
	}
	return holds, nil
}

// Delete deletes the rows of keys and returns those that it deleted, in no
// order. A key whose row isn't there, or whose delete a trigger of the
// application's suppressed, isn't among them. A foreign key that was deferred is
// checked only when the transaction commits. After an error, for which
// sqlitedb.Constraint may be true, nothing is deleted; where a trigger rolled
// back, the transaction is over as well.
func (t *Table) Delete(ctx context.Context, q sqlitedb.Querier, keys []blob.Key) ([]blob.Deletion, error) {
	param, err := t.keyParam(keys)
	if err != nil {
		return nil, fmt.Errorf("delete rows of %s: %w", t, err)
	}
	column := sqlitedb.Ident(t.key.Name)
	// RETURNING knows no alias.
	del := `DELETE FROM ` + t.rel.SQL() + ` WHERE ` + column + ` IN (SELECT ` + sqlitedb.Native(t.kind, "k.canon") + ` FROM ` + sqlitedb.KeyList + ` k)
		RETURNING ` + sqlitedb.Canon(t.kind, column) + `, ` + t.size
	deleted, err := sqlitedb.Collect(ctx, q, func(rows *sql.Rows) (blob.Deletion, error) {
		d := blob.Deletion{Outcome: blob.Deleted}
		var key []byte
		err := rows.Scan(&key, &d.Size)
		d.Key = blob.Key(key)
		return d, err
	}, del, param)
	if err != nil {
		return nil, fmt.Errorf("delete rows of %s: %w", t, err)
	}
	return deleted, nil
}

// Span is a stretch of the table in the order of its key column, whose native
// order isn't that of the canonical bytes. From is exclusive, To inclusive; nil
// is the table's end.
type Span struct {
	From, To any
}

// NextSpan returns the stretch of at most n rows that follows the one given,
// and whether it is the last. The zero Span begins the table.
func (t *Table) NextSpan(ctx context.Context, q sqlitedb.Querier, after Span, n int) (next Span, last bool, err error) {
	where, args := "", []any{n - 1}
	if after.To != nil {
		where, args = " WHERE "+t.keyColumn()+" > ?2", append(args, after.To)
	}
	find := `SELECT ` + t.keyColumn() + ` FROM ` + t.rel.SQL() + ` p` + where + ` ORDER BY ` + t.keyColumn() + ` LIMIT 1 OFFSET ?1`
	var to any
	err = q.QueryRow(ctx, find, args...).Scan(&to)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return Span{From: after.To}, true, nil
	case err != nil:
		return Span{}, false, fmt.Errorf("find the end of a page of %s: %w", t, err)
	}
	if b, ok := to.([]byte); ok && b == nil {
		to = []byte{} // the driver reads an empty BLOB as nil, and binds nil as NULL
	}
	return Span{From: after.To, To: to}, false, nil
}

// Page is what the sweep's mark needs to build its statement over one span:
// SQL over the alias p, and the parameters it stands on, numbered from ?1.
type Page struct {
	Table string // FROM item
	Key   string // native key column
	Canon string // canonical bytes
	Where string // the span's bounds, over Key
	// Foreign is the condition that the row's key can't be one of the pool's: too
	// long, or no text that could be read back.
	Foreign string
	Lo      string // parameter of the lower bound, or ""
	Hi      string // parameter of the upper bound, or ""
	Args    []any
}

// Page returns the span as SQL.
func (t *Table) Page(s Span) Page {
	p := Page{
		// The subquery costs nothing and hides the table's other columns: SQLite
		// takes "x" in an application's condition for a column x of any table in
		// reach before it takes it for a string.
		Table: `(SELECT ` + sqlitedb.Ident(t.key.Name) + ` AS gc_agent_key FROM ` + t.rel.SQL() + `) p`,
		Key:   "p.gc_agent_key",
		Canon: sqlitedb.Canon(t.kind, "p.gc_agent_key"),
		Where: "true",
	}
	p.Foreign = fmt.Sprintf("(length(%s) > %d)", p.Canon, blob.MaxKeyLen)
	if t.kind == blob.KindText {
		p.Foreign = "(" + p.Foreign + " OR " + sqlitedb.KeyOf(blob.DefaultFormat(t.kind), p.Key) + " IS NULL)"
	}
	if s.From != nil {
		p.Args = append(p.Args, s.From)
		p.Lo = fmt.Sprintf("?%d", len(p.Args))
		p.Where += " AND " + p.Key + " > " + p.Lo
	}
	if s.To != nil {
		p.Args = append(p.Args, s.To)
		p.Hi = fmt.Sprintf("?%d", len(p.Args))
		p.Where += " AND " + p.Key + " <= " + p.Hi
	}
	return p
}
