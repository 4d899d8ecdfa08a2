package sqlitedb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	sqlite3 "modernc.org/sqlite/lib"
)

// Relation is what the catalogue says about a table, a view or the like of the
// main database.
type Relation struct {
	Name         string // as it was created
	Kind         string // table, view, virtual or shadow, as pragma table_list says
	WithoutRowID bool
	Strict       bool
	Columns      []Column
	sql          string // the statement that created it
}

// Column is what the catalogue says about a column.
type Column struct {
	Name    string
	Type    string // as declared, often empty
	Class   Class
	NotNull bool // declared so
	// Affinity is what happens to values that are stored in the column, or
	// compared with it.
	Affinity Affinity
	// PrimaryKey is the column's place in the primary key, from 1; 0 is none.
	PrimaryKey int
}

// ErrNoRelation means that the database has no relation of that name.
var ErrNoRelation = errors.New("no such table")

// SQL returns the quoted, qualified name: a temporary table can't take its place.
func (r *Relation) SQL() string { return "main." + Ident(r.Name) }

// String returns the name for messages.
func (r *Relation) String() string { return r.Name }

// IsTable says whether it is an ordinary table.
func (r *Relation) IsTable() bool { return r.Kind == "table" }

// Column returns the column of that name, in any letter case, as SQLite does.
func (r *Relation) Column(name string) (Column, bool) {
	for _, c := range r.Columns {
		if SameName(c.Name, name) {
			return c, true
		}
	}
	return Column{}, false
}

// PrimaryKey returns the columns of the primary key in its order.
func (r *Relation) PrimaryKey() []Column {
	var key []Column
	for place := 1; ; place++ {
		n := len(key)
		for _, c := range r.Columns {
			if c.PrimaryKey == place {
				key = append(key, c)
			}
		}
		if len(key) == n {
			return key
		}
	}
}

// RowID returns a name under which SQL reads the row's number: false for a
// relation that has none, or hides it behind columns of the same names.
func (r *Relation) RowID() (string, bool) {
	if !r.IsTable() || r.WithoutRowID {
		return "", false
	}
	for _, name := range []string{"rowid", "_rowid_", "oid"} {
		if _, taken := r.Column(name); !taken {
			return name, true
		}
	}
	return "", false
}

// Loose says whether the column compares different texts as equal. No pragma
// tells its collation: two texts are compared in it. For a collation that isn't
// SQLite's own it is an error for which Refused is true.
func (r *Relation) Loose(ctx context.Context, q Querier, c Column) (loose bool, err error) {
	compare := `SELECT v = 'A' OR v = 'a ' FROM (SELECT ` + Ident(c.Name) + ` AS v FROM ` + r.SQL() + ` WHERE false UNION ALL SELECT 'a')`
	if err := q.QueryRow(ctx, compare).Scan(&loose); err != nil {
		return false, fmt.Errorf("compare texts of %s.%s: %w", r, c.Name, err)
	}
	return loose, nil
}

// SameName compares identifiers as SQLite does: ASCII letters in any case.
func SameName(a, b string) bool { return foldASCII(a) == foldASCII(b) }

func foldASCII(s string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s)
}

const selectRelation = `
SELECT l.name, l.type, l.wr, l.strict, coalesce(m.sql, '')
FROM pragma_table_list(?1) l
LEFT JOIN main.sqlite_schema m ON m.name = l.name AND m.type IN ('table', 'view')
WHERE l.schema = 'main'`

// Columns that a virtual table hides are no columns of rows.
const selectColumns = `SELECT name, type, "notnull", pk FROM pragma_table_xinfo(?1, 'main') WHERE hidden <> 1 ORDER BY cid`

// LookupRelation reads a relation from the catalogue, its name in any letter
// case; ErrNoRelation when there is none. Of a view whose tables are gone it is
// an error for which Refused is true.
func LookupRelation(ctx context.Context, q Querier, name string) (*Relation, error) {
	r := &Relation{}
	err := q.QueryRow(ctx, selectRelation, name).Scan(&r.Name, &r.Kind, &r.WithoutRowID, &r.Strict, &r.sql)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("%s: %w", name, ErrNoRelation)
	}
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	r.Columns, err = Collect(ctx, q, func(rows *sql.Rows) (Column, error) {
		var c Column
		err := rows.Scan(&c.Name, &c.Type, &c.NotNull, &c.PrimaryKey)
		c.Class, c.Affinity = classify(c.Type, r.Strict)
		return c, err
	}, selectColumns, r.Name)
	if err != nil {
		return nil, fmt.Errorf("look up the columns of %s: %w", name, err)
	}
	return r, nil
}

// Fingerprint says which table, of which shape, a statement was built for, so
// that a later transaction can tell whether it is still that one.
type Fingerprint struct {
	Name string
	SQL  string
}

// Fingerprint returns the relation's fingerprint: the statement that would make
// it. A table that was dropped and made anew alike is as good as the old one.
func (r *Relation) Fingerprint() Fingerprint { return Fingerprint{Name: r.Name, SQL: r.sql} }

// Changed returns the names of the relations that aren't what they were.
func Changed(ctx context.Context, q Querier, prints []Fingerprint) ([]string, error) {
	var changed []string
	for _, p := range prints {
		var same bool
		err := q.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM main.sqlite_schema WHERE type IN ('table', 'view') AND name = ?1 AND sql = ?2)`, p.Name, p.SQL).Scan(&same)
		if err != nil {
			return nil, fmt.Errorf("compare %s with the catalogue: %w", p.Name, err)
		}
		if !same {
			changed = append(changed, p.Name)
		}
	}
	return changed, nil
}

// Encoding returns how the database stores text. A cast between text and bytes
// is UTF-8 only where it is "UTF-8".
func Encoding(ctx context.Context, q Querier) (name string, err error) {
	if err := q.QueryRow(ctx, `SELECT encoding FROM pragma_encoding`).Scan(&name); err != nil {
		return "", fmt.Errorf("ask for the database's encoding: %w", err)
	}
	return name, nil
}

// Collect runs a query to its end, without which a statement that writes isn't
// done, and returns what scan makes of each of its rows; nothing with an error.
func Collect[T any](ctx context.Context, q Querier, scan func(*sql.Rows) (T, error), query string, args ...any) (out []T, err error) {
	rows, err := q.Query(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err = errors.Join(err, rows.Close()); err != nil {
			out = nil
		}
	}()
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, rows.Err()
}

// Refused says whether err means that SQLite can't make sense of the statement:
// it isn't SQL, or names what isn't there.
func Refused(err error) bool { return primary(err) == sqlite3.SQLITE_ERROR }
