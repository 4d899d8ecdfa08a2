package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/owntable"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/window"

	"github.com/jackc/pgx/v5"
)

// checkOwn looks at the agent's own tables: whether they are there, whether they
// are the agent's, and whether this role may use them as the mode needs.
func (s *postgresSession) checkOwn(ctx context.Context, q pgdb.Querier, found *finding.List) (err error) {
	path := s.cfg.Path + ".schema"
	s.hasWindow, err = window.NewPostgres(q, s.cfg.Schema).CheckSchema(ctx)
	if err := notOurs(err, path, found); err != nil {
		return err
	}
	s.hasPins, err = fleet.CheckSchema(ctx, q, s.cfg.Schema)
	if err := notOurs(err, path, found); err != nil {
		return err
	}
	if err := s.checkOwner(ctx, q, path, found); err != nil {
		return err
	}
	rows, err := q.Query(ctx, ownRights, s.cfg.Schema, s.cfg.Mode == config.ModeEnforce)
	if err != nil {
		return fmt.Errorf("look for missing rights on schema %s: %w", s.cfg.Schema, err)
	}
	grants, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("look for missing rights on schema %s: %w", s.cfg.Schema, err)
	}
	for _, grant := range grants {
		found.Add(finding.Misconfigured, path, "the agent's role lacks a right on its own tables; run: %s", grant)
	}
	return nil
}

// notOurs turns a table that stands where the agent's should into a finding.
func notOurs(err error, path string, found *finding.List) error {
	if errors.Is(err, owntable.ErrDifferent) {
		found.Add(finding.Misconfigured, path, "%v", err)
		return nil
	}
	return err
}

// ownRights returns the grants that the role lacks, $2 saying whether it enforces:
// rights on the tables that are there, or the right to make those that aren't. A
// pool that observes reads what is there and makes nothing.
const ownRights = `
WITH own AS (
	SELECT c.oid, c.relname::text AS name
	FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
	WHERE n.nspname = $1 AND c.relname IN ('gc_window', 'gc_pins')
), space AS (
	SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $1
)
SELECT format('GRANT CREATE ON DATABASE %I TO %I', current_database(), current_user)
WHERE $2 AND NOT EXISTS (SELECT 1 FROM space) AND NOT has_database_privilege(current_database(), 'CREATE')
UNION ALL
SELECT format('GRANT USAGE ON SCHEMA %I TO %I', $1, current_user)
FROM space WHERE NOT has_schema_privilege(oid, 'USAGE') AND ($2 OR EXISTS (SELECT 1 FROM own))
UNION ALL
SELECT format('GRANT CREATE ON SCHEMA %I TO %I', $1, current_user)
FROM space WHERE $2 AND (SELECT count(*) FROM own) < 2 AND NOT has_schema_privilege(oid, 'CREATE')
UNION ALL
SELECT format('GRANT %s ON %I.%I TO %I', string_agg(r.name, ', '), $1, own.name, current_user)
FROM own, unnest(CASE WHEN $2 THEN ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] ELSE ARRAY['SELECT'] END) AS r (name)
WHERE NOT has_table_privilege(own.oid, r.name)
GROUP BY own.name`
