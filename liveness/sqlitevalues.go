package liveness

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
)

// sqliteStretch is how many rows of a table one transaction reads when it looks
// for bad values: well under a second, also through the agent's own functions.
const sqliteStretch = 50_000

// RunSQLiteTx runs fn in one transaction that reads.
type RunSQLiteTx func(ctx context.Context, fn func(context.Context, sqlitedb.Querier) error) error

// BadValue looks through the values of every table source for one that isn't
// found by the key that it names: it fits no format, or has another spelling, or
// storage class, than the canonical value. It returns nil when there is none. A
// table is read in stretches, each in a transaction of its own; values written
// meanwhile may be missed. A view, and a table WITHOUT ROWID, is one stretch.
func (l *SQLite) BadValue(ctx context.Context, run RunSQLiteTx) (*BadValue, error) {
	for i := range l.sources {
		s := &l.sources[i]
		cond, needed := s.badValue(l.kind)
		if !needed {
			continue
		}
		bad, err := s.findBadValue(ctx, run, cond, l.stretch)
		if err != nil {
			return nil, fmt.Errorf("read source %s: %w", s.Name, err)
		}
		if bad != nil {
			if l.kind == blob.KindText {
				bad.Index = "" // a key that is spelt so is kept, by whatever index it is looked for
			}
			return bad, nil
		}
	}
	return nil, nil
}

// badValue returns the condition under which a value is bad.
func (s *sqliteSource) badValue(kind blob.Kind) (cond string, needed bool) {
	if s.Query != "" || s.joined() {
		return "", false
	}
	named := sqlitedb.KeyOf(s.format, s.column())
	// The very comparison of a probe: does it find the value by its own key?
	cond = "(" + s.probe(sqlitedb.ValueOf(s.format, named)) + ") IS NOT TRUE"
	if s.native(kind) {
		// Of the storage class that keys have every value is the key itself.
		cond = "typeof(" + s.column() + ") <> '" + storageClass(kind) + "'"
	}
	if s.IgnoreUnparseable {
		cond += " AND " + named + " IS NOT NULL"
	}
	return cond, true
}

func storageClass(kind blob.Kind) string {
	switch kind {
	case blob.KindBytes:
		return "blob"
	case blob.KindInt:
		return "integer"
	default:
		return "text"
	}
}

func (s *sqliteSource) findBadValue(ctx context.Context, run RunSQLiteTx, cond string, rows int) (bad *BadValue, err error) {
	rowID, ok := s.rel.RowID()
	if !ok {
		err := run(ctx, func(ctx context.Context, q sqlitedb.Querier) (err error) {
			bad, err = s.badValueIn(ctx, q, cond, "true")
			return err
		})
		return bad, err
	}
	rowID = "s." + rowID
	// A stretch is so many rows, not so many numbers: numbers may be far apart.
	ends := "SELECT " + rowID + " FROM " + s.rel.SQL() + " s WHERE " + rowID + " >= ?1 ORDER BY " + rowID + " LIMIT 1 OFFSET ?2"
	for from, to := int64(math.MinInt64), int64(0); bad == nil; from = to + 1 {
		err := run(ctx, func(ctx context.Context, q sqlitedb.Querier) error {
			err := q.QueryRow(ctx, ends, from, rows-1).Scan(&to)
			if errors.Is(err, sql.ErrNoRows) {
				to, err = math.MaxInt64, nil
			}
			if err != nil {
				return err
			}
			bad, err = s.badValueIn(ctx, q, cond, rowID+" BETWEEN ?1 AND ?2", from, to)
			return err
		})
		if err != nil || to == math.MaxInt64 {
			return bad, err
		}
	}
	return bad, nil
}

// badValueIn returns the first bad value among the rows of a stretch, or nil.
func (s *sqliteSource) badValueIn(ctx context.Context, q sqlitedb.Querier, cond, stretch string, args ...any) (*BadValue, error) {
	find := "SELECT typeof(" + s.column() + "), " + shown(s.column()) + ", " + s.rowName() + ", " + sqlitedb.KeyOf(s.format, s.column()) + " IS NULL" +
		" FROM " + s.rows() + " AND " + cond + " AND " + stretch + " LIMIT 1"
	bad := BadValue{Source: s.info()}
	var class string
	err := q.QueryRow(ctx, find, args...).Scan(&class, &bad.Value, &bad.Row, &bad.Unparseable)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	bad.Value = blob.Shorten(bad.Value)
	if !bad.Unparseable && class == "text" && hasCase(s.format.Placeholder()) && !s.noCase && s.rel.IsTable() {
		bad.Index = s.createIndex(" COLLATE NOCASE")
	}
	return &bad, nil
}

// shown returns SQL for a value as people read it.
func shown(expr string) string {
	return "CASE typeof(" + expr + ") WHEN 'text' THEN substr(" + expr + ", 1, 200) WHEN 'blob' THEN quote(substr(" + expr + ", 1, 100)) ELSE CAST(" + expr + " AS TEXT) END"
}

// rowName returns SQL that names a row s for people: by its primary key, else by
// its number.
func (s *sqliteSource) rowName() string {
	var parts []string
	for _, c := range s.rel.PrimaryKey() {
		parts = append(parts, sqlitedb.Literal(c.Name+" = ")+" || substr(quote(s."+sqlitedb.Ident(c.Name)+"), 1, 64)")
	}
	if rowID, ok := s.rel.RowID(); ok && len(parts) == 0 {
		parts = []string{"'" + rowID + " = ' || s." + rowID}
	}
	if len(parts) == 0 {
		return "'of the " + s.rel.Kind + "'"
	}
	return strings.Join(parts, " || ', ' || ")
}
