package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// A window says in a comment on its table whose it is. The configuration finds
// two pools on one schema or one table as long as it names them alike; agents
// with files of their own, a host with two names, a partition beside its table
// meet only in the database.
const ownerMark = "gc-agent pool "

// owner is what the comment on a window says.
type owner struct {
	schema string // that the window is in
	pool   string
	tables []string // schema.table, the tiers
}

func (o owner) comment() string { return ownerMark + o.pool + ": " + strings.Join(o.tables, ", ") }

func parseOwner(schema, comment string) (owner, bool) {
	rest, marked := strings.CutPrefix(comment, ownerMark)
	pool, tables, ok := strings.Cut(rest, ": ")
	return owner{schema: schema, pool: pool, tables: strings.Split(tables, ", ")}, marked && ok
}

// ownerOf is what the pool of this configuration writes.
func ownerOf(cfg config.Pool) owner {
	o := owner{schema: cfg.Schema, pool: cfg.Name}
	for _, t := range cfg.Blobs {
		o.tables = append(o.tables, t.Table.Schema+"."+t.Table.Name)
	}
	return o
}

// A comment of somebody who couldn't collect from the pool's tables says nothing:
// anybody may write one.
const selectOwners = `
SELECT n.nspname::text, obj_description(c.oid, 'pg_class')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = 'gc_window' AND c.relkind = 'r' AND obj_description(c.oid, 'pg_class') LIKE $1 || '%'
	AND (n.nspname = $2 OR EXISTS (SELECT 1 FROM unnest($3::oid[]) AS t WHERE has_table_privilege(c.relowner, t, 'DELETE')))`

func (s *postgresSession) owners(ctx context.Context, q pgdb.Querier) ([]owner, error) {
	rows, err := q.Query(ctx, selectOwners, ownerMark, s.cfg.Schema, s.oids())
	if err != nil {
		return nil, fmt.Errorf("look whose windows there are: %w", err)
	}
	var list []owner
	var schema, comment string
	_, err = pgx.ForEachRow(rows, []any{&schema, &comment}, func() error {
		if o, ok := parseOwner(schema, comment); ok {
			list = append(list, o)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look whose windows there are: %w", err)
	}
	return list, nil
}

// checkOwner refuses a window that is another pool's, and tables that another
// pool of this database collects from.
func (s *postgresSession) checkOwner(ctx context.Context, q pgdb.Querier, path string, found *finding.List) error {
	mine := ownerOf(s.cfg)
	all, err := s.owners(ctx, q)
	if err != nil {
		return err
	}
	for _, o := range all {
		if o.schema == mine.schema {
			if err := s.checkOwnWindow(ctx, q, o, path, found); err != nil {
				return err
			}
			continue
		}
		shared, err := s.overlap(ctx, q, o.tables)
		if err != nil {
			return err
		}
		if shared != "" {
			found.Add(finding.Misconfigured, s.cfg.Path+".blobs", "pool %s, whose window is in schema %s, collects from %s too; keep one of the two "+
				"(if that pool has given the table up, run: COMMENT ON TABLE %s IS NULL)", o.pool, o.schema, shared, pgdb.Ident(o.schema, "gc_window"))
		}
	}
	return nil
}

// checkOwnWindow compares the pool with whose window it is. A pool may be renamed,
// and may change its tiers, as long as it keeps one of them or they are gone.
func (s *postgresSession) checkOwnWindow(ctx context.Context, q pgdb.Querier, o owner, path string, found *finding.List) error {
	mine := ownerOf(s.cfg)
	if slices.ContainsFunc(o.tables, func(t string) bool { return slices.Contains(mine.tables, t) }) {
		return nil
	}
	const still = `SELECT count(*) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname || '.' || c.relname = ANY ($1::text[])`
	var there int
	if err := q.QueryRow(ctx, still, o.tables).Scan(&there); err != nil {
		return fmt.Errorf("look whose window it is: %w", err)
	}
	if there > 0 || o.pool != mine.pool {
		found.Add(finding.Misconfigured, path, "the window in schema %s belongs to pool %s, which collects from %s; give this pool a schema of its own "+
			"(if the window is this pool's, whose tables have all changed, run: COMMENT ON TABLE %s IS NULL)",
			o.schema, o.pool, strings.Join(o.tables, ", "), pgdb.Ident(o.schema, "gc_window"))
	}
	return nil
}

func (s *postgresSession) oids() []uint32 {
	oids := make([]uint32, len(s.tiers))
	for i, t := range s.tiers {
		oids[i] = t.Relation().OID
	}
	return oids
}

// A table overlaps with itself, with its partitions and with what it is a
// partition of.
const selectOverlap = `
WITH RECURSIVE down AS (
	SELECT o AS root, o AS oid FROM unnest($1::oid[]) AS o
	UNION
	SELECT d.root, i.inhrelid FROM down d JOIN pg_catalog.pg_inherits i ON i.inhparent = d.oid
), up AS (
	SELECT o AS root, o AS oid FROM unnest($1::oid[]) AS o
	UNION
	SELECT u.root, i.inhparent FROM up u JOIN pg_catalog.pg_inherits i ON i.inhrelid = u.oid
)
SELECT coalesce(string_agg(DISTINCT n.nspname || '.' || c.relname, ', '), '')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = ANY ($2::text[])
	AND EXISTS (SELECT 1 FROM (TABLE down UNION ALL TABLE up) r WHERE r.oid = c.oid AND (NOT $3 OR r.root <> c.oid))`

// overlap returns those of the tables that share rows with the pool's tiers.
func (s *postgresSession) overlap(ctx context.Context, q pgdb.Querier, tables []string) (string, error) {
	return s.selectOverlap(ctx, q, tables, false)
}

func (s *postgresSession) selectOverlap(ctx context.Context, q pgdb.Querier, tables []string, others bool) (shared string, err error) {
	if err := q.QueryRow(ctx, selectOverlap, s.oids(), tables, others).Scan(&shared); err != nil {
		return "", fmt.Errorf("look for tables that share rows: %w", err)
	}
	return shared, nil
}

// checkTiers refuses two tiers of one pool that share rows.
func (s *postgresSession) checkTiers(ctx context.Context, q pgdb.Querier, found *finding.List) error {
	shared, err := s.selectOverlap(ctx, q, ownerOf(s.cfg).tables, true)
	if err == nil && shared != "" {
		found.Add(finding.Misconfigured, s.cfg.Path+".blobs", "%s share rows, one being a partition of, or inheriting from, another; register the topmost alone", shared)
	}
	return err
}

// markOwner writes the comment where it is missing or has changed. Only the
// table's owner may: where somebody else made the schema, with what `schema sql`
// prints, the comment is among it.
func (s *postgresSession) markOwner(ctx context.Context) error {
	const look = `SELECT coalesce(obj_description(c.oid, 'pg_class'), ''), pg_has_role(c.relowner, 'USAGE')
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = 'gc_window'`
	var comment string
	var may bool
	if err := s.conn.QueryRow(ctx, look, s.cfg.Schema).Scan(&comment, &may); err != nil {
		return fmt.Errorf("look whose window it is: %w", err)
	}
	if !may || comment == ownerOf(s.cfg).comment() {
		return nil
	}
	if _, err := s.conn.Exec(ctx, ownerDDL(s.cfg)); err != nil {
		return fmt.Errorf("mark whose window it is: %w", err)
	}
	return nil
}

func ownerDDL(cfg config.Pool) string {
	return "COMMENT ON TABLE " + pgdb.Ident(cfg.Schema, "gc_window") + " IS '" + strings.ReplaceAll(ownerOf(cfg).comment(), "'", "''") + "'"
}
