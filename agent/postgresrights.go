package agent

import (
	"context"
	"fmt"

	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// ownRights returns what the role lacks to keep a window in the schema: rights on
// the tables that are there, or the right to make those that aren't.
const ownRights = `
WITH own AS (
	SELECT c.oid, c.relname::text AS name
	FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
	WHERE n.nspname = $1 AND c.relname IN ('gc_window', 'gc_pins')
), space AS (
	SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $1
)
SELECT format('GRANT CREATE ON DATABASE %I TO <role>', current_database())
WHERE NOT EXISTS (SELECT 1 FROM space) AND NOT has_database_privilege(current_database(), 'CREATE')
UNION ALL
SELECT format('GRANT USAGE ON SCHEMA %I TO <role>', $1)
FROM space WHERE NOT has_schema_privilege(oid, 'USAGE')
UNION ALL
SELECT format('GRANT CREATE ON SCHEMA %I TO <role>', $1)
FROM space WHERE (SELECT count(*) FROM own) < 2 AND NOT has_schema_privilege(oid, 'CREATE')
UNION ALL
SELECT format('GRANT %s ON %I.%I TO <role>', r.name, $1, own.name)
FROM own, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS r (name)
WHERE NOT has_table_privilege(own.oid, r.name)`

// checkOwnRights finds the grants that are missing before the first statement
// that would need them fails.
func (s *postgresSession) checkOwnRights(ctx context.Context, q pgdb.Querier, found *finding.List) error {
	rows, err := q.Query(ctx, ownRights, s.cfg.Schema)
	if err != nil {
		return fmt.Errorf("look for missing rights on schema %s: %w", s.cfg.Schema, err)
	}
	grants, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("look for missing rights on schema %s: %w", s.cfg.Schema, err)
	}
	for _, grant := range grants {
		found.Add(finding.Misconfigured, s.cfg.Path+".schema", "this role can't keep its window there; run: %s", grant)
	}
	return nil
}
