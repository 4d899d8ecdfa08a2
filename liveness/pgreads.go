package liveness

import (
	"context"
	"fmt"
	"slices"

	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// pgRead is a column of a relation that a source's SQL reads, by name or behind
// a view.
type pgRead struct {
	OID    uint32
	Schema string
	Name   string
	Kind   string // pg_class.relkind
	Of     string // the relation that the SQL reads where this is a part of it
	Rules  string // those of a view: they change with its definition
	Column string // number, name, type and collation; empty where there is none
}

// The server analyses a statement, with the views in it, under locks on all that
// it names. So what is locked there is what it reads, save for
// what a function reads, and for partitions and the like. A lock of this
// transaction's from before would be among them, and only make the list longer.
const selectReads = `
WITH RECURSIVE tree AS (
	SELECT l.relation AS top, l.relation AS oid
	FROM pg_catalog.pg_locks l
	WHERE l.locktype = 'relation' AND l.pid = pg_backend_pid()
		AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
	UNION
	SELECT t.top, i.inhrelid FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid
)
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, CASE WHEN t.top <> t.oid THEN t.top::regclass::text ELSE '' END,
	coalesce((SELECT string_agg(concat_ws(' ', r.oid, r.xmin), ',' ORDER BY r.oid) FROM pg_catalog.pg_rewrite r WHERE r.ev_class = c.oid), ''),
	concat_ws(' ', a.attnum, a.attname, a.atttypid, a.attcollation)
FROM tree t
JOIN pg_catalog.pg_class c ON c.oid = t.oid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_attribute a ON t.top = t.oid AND a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE n.nspname <> 'pg_catalog' AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND (t.top = t.oid OR c.relkind = 'f')
ORDER BY 2, 3, a.attnum`

// resolveReads finds out what the source's SQL reads, and refuses what shows
// rows of another time or place.
func (r *pgResolver) resolveReads(ctx context.Context, s *pgSource) error {
	if s.rel != nil && s.rel.IsTable() && s.Where == "" {
		return nil // the table itself, and nothing else
	}
	err := r.aside(ctx, func(sub pgx.Tx) error {
		if _, err := sub.Conn().PgConn().Prepare(ctx, "", "SELECT 1 FROM "+s.rows(), nil); err != nil {
			return err
		}
		rows, err := sub.Query(ctx, selectReads)
		if err != nil {
			return err
		}
		s.reads, err = pgx.CollectRows(rows, pgx.RowToStructByPos[pgRead])
		return err
	})
	if err != nil {
		return fmt.Errorf("look for what it reads: %w", err)
	}
	r.checkReads(s)
	return nil
}

func (r *pgResolver) checkReads(s *pgSource) {
	path := s.Path + ".query"
	if s.rel != nil {
		path = s.Path
	}
	var refused []uint32
	for _, read := range s.reads {
		if slices.Contains(refused, read.OID) {
			continue
		}
		what := read.Schema + "." + read.Name
		switch {
		case read.Kind == "m":
			r.found.Add(finding.Misconfigured, path, "it reads %s, a materialized view, which shows the past; read the tables behind it", what)
		case read.Kind == "f" && read.Of != "":
			r.found.Add(finding.Misconfigured, path, "it reads %s, of which %s is a foreign table; %s", read.Of, what, registerThere)
		case read.Kind == "f":
			r.found.Add(finding.Misconfigured, path, "it reads %s, a foreign table; %s", what, registerThere)
		default:
			continue
		}
		refused = append(refused, read.OID)
		s.value = 0
	}
}

const changedReads = `
SELECT DISTINCT format('%I.%I', v.schema, v.name)
FROM unnest($1::oid[], $2::text[], $3::text[], $4::text[], $5::text[]) AS v (oid, schema, name, rules, col)
WHERE NOT EXISTS (
	SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
	WHERE c.oid = v.oid AND n.nspname = v.schema AND c.relname = v.name
		AND v.rules = coalesce((SELECT string_agg(concat_ws(' ', r.oid, r.xmin), ',' ORDER BY r.oid) FROM pg_catalog.pg_rewrite r WHERE r.ev_class = c.oid), '')
		AND (v.col = '' OR EXISTS (
			SELECT 1 FROM pg_catalog.pg_attribute a
			WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
				AND concat_ws(' ', a.attnum, a.attname, a.atttypid, a.attcollation) = v.col)))
ORDER BY 1`

// changedReads returns the relations that the sources' SQL reads and that aren't
// what they were.
func (p *Postgres) changedReads(ctx context.Context, q pgdb.Querier) ([]string, error) {
	var oids []uint32
	var schemas, names, rules, columns []string
	for i := range p.sources {
		for _, read := range p.sources[i].reads {
			oids, schemas, names = append(oids, read.OID), append(schemas, read.Schema), append(names, read.Name)
			rules, columns = append(rules, read.Rules), append(columns, read.Column)
		}
	}
	if len(oids) == 0 {
		return nil, nil
	}
	rows, err := q.Query(ctx, changedReads, oids, schemas, names, rules, columns)
	if err != nil {
		return nil, fmt.Errorf("compare what the sources read with the catalogue: %w", err)
	}
	changed, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("compare what the sources read with the catalogue: %w", err)
	}
	return changed, nil
}
