package liveness

import (
	"context"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// TriggerPlan is the guard trigger of one source: what there is of it, and how it
// is made.
type TriggerPlan struct {
	Source string
	Path   string
	Asked  Guard // in the configuration
	// Why says why the source can have none, or needs none; the rest is empty then.
	Why string

	Table string // quoted and qualified
	Name  string // of the trigger, and of its function in the pool's schema
	// There says that it is installed, and guards.
	There bool
	// Statements make it, in their order, in one transaction. They may be run again.
	Statements []string

	source *pgSource
}

// TriggerPlans plans the guard triggers of all sources, in their order. The
// registry should have been resolved with AnyGuard.
func (p *Postgres) TriggerPlans(deferrable bool) []TriggerPlan {
	plans := make([]TriggerPlan, len(p.sources))
	for i := range p.sources {
		s := &p.sources[i]
		plan := TriggerPlan{Source: s.Name, Path: s.Path, Asked: s.Guard, Why: s.trigger.why, source: s}
		switch {
		case s.guard == ForeignKey:
			plan.Why = "foreign key " + s.foreignKey.constraint + " guards it"
		case plan.Why == "":
			plan.Table, plan.Name = s.rel.SQL(), s.trigger.name
			// One that is deferrable does all that one that isn't does. One that is stricter
			// than it has to be guards, and is loosened.
			found := s.trigger.found
			plan.There = s.trigger.guards() && (found.deferrable || !deferrable) && (!found.strict || s.missesSpellings())
			plan.Statements = s.createTrigger(deferrable)
		}
		plans[i] = plan
	}
	return plans
}

// The table's owner owns the trigger's function too, and locks the blobs' rows by it.
// To give a function away takes more than the owner's rights, and the owner's right to
// create one there.
const selectInstallRights = `
SELECT pg_has_role(c.relowner, 'USAGE') AND pg_has_role(c.relowner, CASE WHEN current_setting('server_version_num')::int >= 160000 THEN 'SET' ELSE 'MEMBER' END),
	pg_get_userbyid(c.relowner)::text,
	CASE WHEN n.oid IS NULL THEN has_database_privilege(current_database(), 'CREATE') ELSE has_schema_privilege(n.oid, 'CREATE, USAGE') END,
	n.oid IS NULL, pg_catalog.quote_ident(current_database()),
	me.rolsuper OR CASE WHEN n.oid IS NULL THEN c.relowner = me.oid ELSE has_schema_privilege(c.relowner, n.oid, 'CREATE') END
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_roles me ON me.rolname = current_user LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = $2
WHERE c.oid = $1`

// MissingToInstall says in a line each what the role lacks to install the trigger, and
// the table's owner to own its function, and what to do.
func (p *Postgres) MissingToInstall(ctx context.Context, q pgdb.Querier, plan TriggerPlan) ([]string, error) {
	grantee, err := pgdb.LookupGrantee(ctx, q, "")
	if err != nil {
		return nil, err
	}
	role, s := grantee.SQL, plan.source
	var owns, creates, noSchema, ownerCreates bool
	var ownerName, database string
	if err := q.QueryRow(ctx, selectInstallRights, s.rel.OID, s.trigger.schema).Scan(&owns, &ownerName, &creates, &noSchema, &database, &ownerCreates); err != nil {
		return nil, fmt.Errorf("look for the right to make a trigger on %s: %w", s.rel, err)
	}
	owner, err := pgdb.LookupGrantee(ctx, q, ownerName)
	if err != nil {
		return nil, err
	}
	if !owns {
		// Everything else is the owner's business then.
		sql := strings.Replace(installCommand(p.pool, s.Name), " install ", " sql ", 1)
		return []string{fmt.Sprintf("this role (%s) doesn't own %s; have %s, who does, run what this prints: %s", role, s.rel, owner.SQL, sql)}, nil
	}
	var missing []string
	switch schema := pgdb.Ident(s.trigger.schema); {
	case !creates && noSchema:
		missing = append(missing, fmt.Sprintf("this role (%s) may not create schema %s; run: GRANT CREATE ON DATABASE %s TO %s", role, schema, database, role))
	case !creates:
		missing = append(missing, fmt.Sprintf("this role (%s) may not create functions in schema %s; run: GRANT CREATE, USAGE ON SCHEMA %s TO %s", role, schema, schema, role))
	case !ownerCreates:
		missing = append(missing, fmt.Sprintf("the owner of %s (%s) may not own functions in schema %s; run: CREATE SCHEMA IF NOT EXISTS %s; GRANT CREATE ON SCHEMA %s TO %s", s.rel, owner.SQL, schema, schema, schema, owner.SQL))
	}
	var needed []pgdb.Grant
	for _, t := range p.targets {
		on, why := pgdb.OnTable(t.Relation.Schema, t.Relation.Name), "look a reference's blob up"
		needed = append(needed,
			pgdb.Usage(t.Relation.Schema),
			pgdb.Grant{Right: "SELECT", Column: t.Key.Name, On: on, Why: why},
			pgdb.Grant{Right: "SELECT", Column: "tableoid", On: on, Why: why},
			pgdb.Grant{Right: "UPDATE", Column: t.Key.Name, AnyColumn: true, On: on, Why: why})
	}
	lacked, err := owner.Missing(ctx, q, needed)
	for _, line := range owner.Lacks(lacked) {
		missing = append(missing, strings.Replace(line, "this role (", "the owner of "+s.rel.String()+" (", 1))
	}
	return missing, err
}

// Dangling counts the rows of the plan's source that refer to a blob that no tier
// has. The trigger that is made afterwards doesn't look at them.
func (p *Postgres) Dangling(ctx context.Context, q pgdb.Querier, plan TriggerPlan) (n int64, err error) {
	if err := q.QueryRow(ctx, plan.source.dangling(p.kind, p.targets)).Scan(&n); err != nil {
		return 0, fmt.Errorf("count the dangling references of %s: %w", plan.source.rel, err)
	}
	return n, nil
}

// Install makes the plan's trigger in the transaction.
func (plan TriggerPlan) Install(ctx context.Context, tx pgx.Tx) error {
	for _, statement := range plan.Statements {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", strings.SplitN(statement, "\n", 2)[0], err)
		}
	}
	return nil
}

// InstalledTrigger is a guard trigger that is there, whether it guards or not and
// whatever the configuration says. Table is empty where the function alone is left.
type InstalledTrigger struct {
	Name  string
	Table string // quoted and qualified
}

// A partition's clone goes with its parent's trigger.
const selectInstalled = `
SELECT p.proname::text, coalesce((
	SELECT format('%I.%I', tn.nspname, c.relname)
	FROM pg_catalog.pg_trigger g JOIN pg_catalog.pg_class c ON c.oid = g.tgrelid JOIN pg_catalog.pg_namespace tn ON tn.oid = c.relnamespace
	WHERE g.tgfoid = p.oid AND g.tgname = p.proname AND g.tgparentid = 0 LIMIT 1), '')
FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = $1 AND starts_with(p.proname::text, $2) AND p.pronargs = 0 AND p.prorettype = 'trigger'::regtype
ORDER BY 1`

// InstalledTriggers returns the guard triggers whose functions are in the pool's
// schema, by name.
func InstalledTriggers(ctx context.Context, q pgdb.Querier, schema string) ([]InstalledTrigger, error) {
	rows, err := q.Query(ctx, selectInstalled, schema, TriggerPrefix)
	if err != nil {
		return nil, fmt.Errorf("look for guard triggers of schema %s: %w", pgdb.Ident(schema), err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[InstalledTrigger])
	if err != nil {
		return nil, fmt.Errorf("look for guard triggers of schema %s: %w", pgdb.Ident(schema), err)
	}
	return all, nil
}

// Remove drops the trigger and its function in the transaction. What is gone
// already is no error; anything else that uses the function is.
func (t InstalledTrigger) Remove(ctx context.Context, tx pgx.Tx, schema string) error {
	statements := []string{"DROP FUNCTION IF EXISTS " + pgdb.Ident(schema, t.Name) + "()"}
	if t.Table != "" {
		statements = append([]string{"DROP TRIGGER IF EXISTS " + pgdb.Ident(t.Name) + " ON " + t.Table}, statements...)
	}
	for _, statement := range statements {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}
