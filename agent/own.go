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
	return s.checkOwnRights(ctx, q, path, found)
}

func (s *postgresSession) checkOwnRights(ctx context.Context, q pgdb.Querier, path string, found *finding.List) error {
	role, err := pgdb.LookupGrantee(ctx, q, "")
	if err != nil {
		return err
	}
	own, err := lookUpOwn(ctx, q, s.cfg.Schema)
	if err != nil {
		return err
	}
	missing, err := role.Missing(ctx, q, own.grants(s.cfg, role.Database))
	if err != nil {
		return fmt.Errorf("schema %s: %w", s.cfg.Schema, err)
	}
	for _, grant := range missing {
		found.Add(finding.Misconfigured, path, "the agent's role lacks a right of its own, to %s; run: %s", grant.Why, grant.To(role.SQL))
	}
	if !s.cfg.Fleet || s.cfg.Mode != config.ModeEnforce {
		return nil
	}
	there, err := fleet.CheckFunctions(ctx, q, s.cfg.Schema, s.pinTiers())
	if err == nil && !there && own.pins && !own.mine {
		found.Add(finding.Misconfigured, path, "%s", othersFunctions(s.cfg))
	}
	return notOurs(err, path, found)
}

// othersFunctions says what to do about functions that the agent may not make.
func othersFunctions(cfg config.Pool) string {
	return fmt.Sprintf("the functions to pin by are missing from schema %s, or differ, and its tables aren't the agent's role's; have their owner run what `gc-agent schema sql %s` prints",
		cfg.Schema, cfg.Name)
}

// notOurs turns a table or a function that stands where the agent's should into a finding.
func notOurs(err error, path string, found *finding.List) error {
	if errors.Is(err, owntable.ErrDifferent) || errors.Is(err, fleet.ErrForeignFunction) {
		found.Add(finding.Misconfigured, path, "%v", err)
		return nil
	}
	return err
}

// ownState says what of the agent's own is there.
type ownState struct {
	schema, window, pins bool
	mine                 bool // the pins belong to the current role, or one that it is a member of
}

const selectOwn = `
SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1),
	coalesce(bool_or(c.relname = 'gc_window'), false), coalesce(bool_or(c.relname = 'gc_pins'), false),
	coalesce(bool_or(c.relname = 'gc_pins' AND pg_has_role(c.relowner, 'USAGE')), false)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname IN ('gc_window', 'gc_pins')`

func lookUpOwn(ctx context.Context, q pgdb.Querier, schema string) (own ownState, err error) {
	if err := q.QueryRow(ctx, selectOwn, schema).Scan(&own.schema, &own.window, &own.pins, &own.mine); err != nil {
		return own, fmt.Errorf("look for the agent's tables in schema %s: %w", schema, err)
	}
	return own, nil
}

// grants returns the rights that a sweep takes beside those on tiers and sources:
// on the tables that are there, or to make those that aren't. A pool that
// observes reads what is there and makes nothing.
func (o ownState) grants(cfg config.Pool, database string) (grants []pgdb.Grant) {
	on, schema := pgdb.Object{Kind: pgdb.DatabaseObject, Name: database}, pgdb.OnSchema(cfg.Schema)
	enforce := cfg.Mode == config.ModeEnforce
	if enforce {
		grants = append(grants, pgdb.Grant{Right: "TEMPORARY", On: on, Why: "keep the candidates of a sweep in a temporary table"})
	}
	switch {
	case enforce && !o.schema:
		grants = append(grants, pgdb.Grant{
			Right: "CREATE", On: on,
			Why: "make its schema " + cfg.Schema + "; not needed where somebody else runs what `gc-agent schema sql " + cfg.Name + "` prints, after which grants prints what to grant instead",
		})
	case o.window || o.pins || enforce:
		grants = append(grants, pgdb.Usage(cfg.Schema))
	}
	if enforce && o.schema && (!o.window || !o.pins) {
		grants = append(grants, pgdb.Grant{Right: "CREATE", On: schema, Why: "make its own tables"})
	}
	if o.window {
		grants = append(grants, ownTableGrants(cfg.Schema, "gc_window", enforce, []ownRight{
			{"SELECT", "read the delete window"},
			{"INSERT", "stage what is dead"},
			{"UPDATE", "take what is due under lock, and put back what has to wait"},
			{"DELETE", "take what is due"},
		})...)
	}
	if o.pins {
		grants = append(grants, ownTableGrants(cfg.Schema, "gc_pins", enforce, []ownRight{
			{"SELECT", "honour pins"},
			{"UPDATE", "lock the pins of a key while it is decided about"},
			{"DELETE", "remove pins that have expired"},
		})...)
	}
	return grants
}

type ownRight struct{ right, why string }

// ownTableGrants gives the first of the rights, which reads, or all.
func ownTableGrants(schema, table string, all bool, rights []ownRight) (grants []pgdb.Grant) {
	if !all {
		rights = rights[:1]
	}
	for _, r := range rights {
		grants = append(grants, pgdb.Grant{Right: r.right, On: pgdb.OnTable(schema, table), Why: r.why})
	}
	return grants
}
