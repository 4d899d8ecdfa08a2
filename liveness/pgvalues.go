package liveness

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// valueBlocks is how many 8 kB blocks of a table one transaction reads when it
// looks for bad values: some 64 MiB, well under a second when they are cached.
const valueBlocks = 8192

// RunTx runs fn in one read-only transaction.
type RunTx func(ctx context.Context, fn func(context.Context, pgx.Tx) error) error

// BadValue looks through the values of every source that is probed by key for
// one that a probe can't find: it fits no format, or spells a key otherwise than
// canonically. It returns nil when there is none. A table is read in stretches,
// each in a transaction of its own; values written meanwhile may be missed.
func (p *Postgres) BadValue(ctx context.Context, run RunTx) (*BadValue, error) {
	for i := range p.sources {
		s := &p.sources[i]
		cond, needed := s.badValue()
		if !needed {
			continue
		}
		bad, err := s.findBadValue(ctx, run, cond)
		if bad != nil || err != nil {
			return bad, err
		}
	}
	return nil, nil
}

// badValue returns the condition under which a value is bad. What is scanned, or
// looked up by lower(), is found in every spelling; types other than text have
// only one.
func (s *pgSource) badValue() (cond string, needed bool) {
	if s.Query != "" || s.joined() || s.value != valueText || bareText(s.format) {
		return "", false
	}
	v := s.text(s.column())
	accepted, canonical := fitsFormat(s.format, v), isCanonical(s.format, v)
	switch everySpelling := s.scanned || s.lowerIndex; {
	case everySpelling && s.IgnoreUnparseable:
		return "", false
	case everySpelling:
		return "NOT (" + accepted + ")", true
	case s.IgnoreUnparseable:
		return accepted + " AND NOT (" + canonical + ")", true
	default:
		return "NOT (" + canonical + ")", true // the canonical spelling is an accepted one
	}
}

func (s *pgSource) findBadValue(ctx context.Context, run RunTx, cond string) (bad *BadValue, err error) {
	var blocks, step int64
	var row string
	err = run(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		if blocks, step, err = s.stretches(ctx, tx); err != nil {
			return err
		}
		row, err = s.rowName(ctx, tx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read source %s: %w", s.Name, err)
	}
	v := s.text(s.column())
	// Only the beginning of a value is fetched: it may be of any size.
	sql := "SELECT left(" + v + ", 256), " + fitsFormat(s.format, v) + ", " + row + " FROM " + s.referring() + " AND " + cond
	for from := int64(0); from < max(blocks, 1) && bad == nil; from += step {
		err := run(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
			bad, err = s.readBadValue(ctx, tx, sql+stretch(from, step, blocks)+" LIMIT 1")
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("read source %s: %w", s.Name, err)
		}
	}
	return bad, nil
}

func (s *pgSource) readBadValue(ctx context.Context, q pgdb.Querier, sql string) (*BadValue, error) {
	var value, row string
	var parsed bool
	err := q.QueryRow(ctx, sql).Scan(&value, &parsed, &row)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	bad := &BadValue{Source: s.info(), Row: row, Value: blob.Shorten(value), Unparseable: !parsed}
	if parsed && hasCase(s.format.Placeholder()) && s.rel.IsTable() {
		bad.Index = s.createIndex("lower(" + pgdb.Ident(s.col.Name) + ")")
	}
	return bad, nil
}

// stretch bounds row s to so many blocks from one on. Nothing bounds a source
// without blocks, and the last stretch is open: the table may have grown.
func stretch(from, step, blocks int64) string {
	switch {
	case blocks == 0:
		return ""
	case from+step >= blocks:
		return fmt.Sprintf(" AND s.ctid >= '(%d,0)'::tid", from)
	default:
		return fmt.Sprintf(" AND s.ctid >= '(%d,0)'::tid AND s.ctid < '(%d,0)'::tid", from, from+step)
	}
}

const selectBlocks = `
SELECT coalesce(max(pg_relation_size(oid)), 0) / current_setting('block_size')::bigint + 1
FROM unnest($1::oid[]) AS t (oid)`

// stretches returns how many blocks the largest part of the source has, and how
// many are read at once of each. A view, and a table of which the role may not
// read where its rows stand, has no blocks.
func (s *pgSource) stretches(ctx context.Context, q pgdb.Querier) (blocks, step int64, err error) {
	step = max(valueBlocks/int64(max(len(s.parts), 1)), 1)
	if !s.rel.IsTable() || !s.readsCTID {
		return 0, step, nil
	}
	var oids []uint32
	for _, part := range s.parts {
		oids = append(oids, part.OID)
	}
	err = q.QueryRow(ctx, selectBlocks, oids).Scan(&blocks)
	return blocks, step, err
}

const selectPrimaryKey = `
SELECT a.attname::text
FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey::int2[])
WHERE i.indrelid = $1 AND i.indisprimary
ORDER BY array_position(i.indkey::int2[], a.attnum)`

const byCTID = "'ctid = ' || s.ctid::text"

// rowName returns SQL that names a row s for people: by its primary key, else by
// where it stands.
func (s *pgSource) rowName(ctx context.Context, q pgdb.Querier) (string, error) {
	switch {
	case !s.rel.IsTable():
		return "'of the view'", nil
	case !s.wholeRows && s.readsCTID:
		return byCTID, nil
	case !s.wholeRows:
		return "'that this role may not read in full'", nil
	}
	rows, err := q.Query(ctx, selectPrimaryKey, s.rel.OID)
	if err != nil {
		return "", err
	}
	columns, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return "", err
	}
	if len(columns) == 0 {
		return byCTID, nil
	}
	parts := make([]string, len(columns))
	for i, c := range columns {
		parts[i] = literal(c+" = ") + " || left(s." + pgdb.Ident(c) + "::text, 64)"
	}
	return "concat_ws(', ', " + strings.Join(parts, ", ") + ")", nil
}
