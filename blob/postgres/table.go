package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// Config names a table tier as it is registered. Path is where it stands in
// the configuration.
type Config struct {
	Path   string
	Schema string
	Table  string
	Column string
	Size   string // optional column with the blob's size in bytes
}

// Table is a table tier that was found in the catalogue and is fit to be one.
type Table struct {
	rel  *pgdb.Relation
	key  pgdb.Column
	kind blob.Kind
	size string // SQL for a row p's size
}

// Resolve looks the tier up in the catalogue and says everything that is wrong
// with it. The table is nil where there is none with such a key; with a finding
// that is worse than a warning it serves only to look for more. With deletes it also asks for the rights that a delete needs, and warns of what
// may stop one.
func Resolve(ctx context.Context, q pgdb.Querier, cfg Config, deletes bool) (*Table, finding.List, error) {
	var found finding.List
	rel, err := pgdb.LookupRelation(ctx, q, cfg.Schema, cfg.Table)
	if errors.Is(err, pgdb.ErrNoRelation) {
		found.Add(finding.Misconfigured, cfg.Path+".table", "there is no table %s.%s in the database; create it or correct the name", cfg.Schema, cfg.Table)
		return nil, found, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if !rel.IsTable() {
		found.Add(finding.Misconfigured, cfg.Path+".table", "%s isn't a table; name the table that stores the blobs", rel)
		return nil, found, nil
	}
	t := &Table{rel: rel, size: "0::bigint"}
	checks := []func(context.Context, pgdb.Querier, Config, *finding.List) error{
		t.resolveKey, t.resolveSize, t.checkParts, t.checkServer,
		func(ctx context.Context, q pgdb.Querier, cfg Config, found *finding.List) error {
			return t.checkRights(ctx, q, cfg, deletes, found)
		},
	}
	if deletes {
		checks = append(checks, t.warnOfTriggers)
	}
	for _, check := range checks {
		if err := check(ctx, q, cfg, &found); err != nil {
			return nil, nil, err
		}
	}
	if t.kind == 0 {
		return nil, found, nil
	}
	return t, found, nil
}

func (t *Table) resolveKey(ctx context.Context, q pgdb.Querier, cfg Config, found *finding.List) error {
	path := cfg.Path + ".column"
	col, ok := t.rel.Column(cfg.Column)
	if !ok {
		found.Add(finding.Misconfigured, path, "table %s has no column %q; correct the name", t.rel, cfg.Column)
		return nil
	}
	t.key = col
	switch col.Base {
	case "bytea":
		t.kind = blob.KindBytes
	case "text", "varchar":
		t.kind = blob.KindText
	case "uuid":
		t.kind = blob.KindUUID
	case "int2", "int4", "int8":
		t.kind = blob.KindInt
	default:
		found.Add(finding.Misconfigured, path, "%s.%s is %s; a key column is bytea, text, varchar, uuid, smallint, integer or bigint", t.rel, col.Name, col.Type)
		return nil
	}
	if !col.Deterministic {
		found.Add(finding.Misconfigured, path, "%s.%s has a nondeterministic collation, under which different bytes are one key; use a deterministic one", t.rel, col.Name)
	}
	if !col.NotNull {
		found.Add(finding.Misconfigured, path, "%s.%s may be NULL; a key column must be NOT NULL", t.rel, col.Name)
	}
	unique, err := hasUniqueIndex(ctx, q, t.rel.OID, col.Num)
	if err != nil {
		return err
	}
	if !unique {
		found.Add(finding.Misconfigured, path, "%s.%s isn't unique; a key column needs a primary key, a unique constraint or a unique index of its own", t.rel, col.Name)
	}
	return nil
}

// A unique index that is partial, over an expression, not yet valid or only
// checked at commit doesn't make the column a key.
const uniqueIndex = `
SELECT EXISTS (
	SELECT 1 FROM pg_catalog.pg_index i
	WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indimmediate
		AND i.indnkeyatts = 1 AND i.indkey[0] = $2 AND i.indpred IS NULL)`

func hasUniqueIndex(ctx context.Context, q pgdb.Querier, oid uint32, column int16) (unique bool, err error) {
	if err := q.QueryRow(ctx, uniqueIndex, oid, column).Scan(&unique); err != nil {
		return false, fmt.Errorf("look for a unique index: %w", err)
	}
	return unique, nil
}

func (t *Table) resolveSize(_ context.Context, _ pgdb.Querier, cfg Config, found *finding.List) error {
	if cfg.Size == "" {
		return nil
	}
	col, ok := t.rel.Column(cfg.Size)
	switch {
	case !ok:
		found.Add(finding.Misconfigured, cfg.Path+".size", "table %s has no column %q; correct the name or leave size out", t.rel, cfg.Size)
	case !slices.Contains([]string{"int2", "int4", "int8"}, col.Base):
		found.Add(finding.Misconfigured, cfg.Path+".size", "%s.%s is %s; a size column is smallint, integer or bigint", t.rel, col.Name, col.Type)
	default:
		t.size = "coalesce(p." + pgdb.Ident(col.Name) + ", 0)::bigint"
	}
	return nil
}

// checkParts refuses what makes rows of other tables rows of this one without
// the index that makes the key unique.
func (t *Table) checkParts(ctx context.Context, q pgdb.Querier, cfg Config, found *finding.List) error {
	parts, err := pgdb.Parts(ctx, q, t.rel)
	if err != nil {
		return err
	}
	for _, part := range parts {
		switch {
		case part.Kind == "f":
			found.Add(finding.Misconfigured, cfg.Path+".table", "%s, a partition of %s, is a foreign table; blobs are rows of this database", part.Name, t.rel)
		case t.rel.Kind == "r" && part.OID != t.rel.OID:
			found.Add(finding.Misconfigured, cfg.Path+".table", "%s inherits from %s, so that a key can be there twice; detach it (ALTER TABLE ... NO INHERIT)", part.Name, t.rel)
		}
	}
	return nil
}

func (t *Table) checkServer(ctx context.Context, q pgdb.Querier, cfg Config, found *finding.List) error {
	why, err := pgdb.Unfit(ctx, q)
	if why != "" {
		found.Add(finding.Unreadable, cfg.Path, "%s", why)
	}
	return err
}

// Grants returns the rights that reading the tier takes and, with deletes, deleting
// from it. What a delete sets off in other tables (ON DELETE CASCADE and the
// like) runs with the rights of their owners, what a trigger does with the role's.
func (c Config) Grants(deletes bool) []pgdb.Grant {
	on := pgdb.OnTable(c.Schema, c.Table)
	grants := []pgdb.Grant{
		pgdb.Usage(c.Schema),
		{Right: "SELECT", Column: c.Column, On: on, Why: "read the keys of the blobs"},
	}
	if c.Size != "" && c.Size != c.Column {
		grants = append(grants, pgdb.Grant{Right: "SELECT", Column: c.Size, On: on, Why: "read the sizes of the blobs"})
	}
	if !deletes {
		return grants
	}
	return append(grants,
		// A lock on a row asks for UPDATE on any one column.
		pgdb.Grant{Right: "UPDATE", Column: c.Column, AnyColumn: true, On: on, Why: "lock the row of a blob (FOR UPDATE) before it is decided about; nothing is updated"},
		pgdb.Grant{Right: "DELETE", On: on, Why: "delete dead blobs"})
}

// checkRights names what the role lacks to read and, with deletes, to delete.
func (t *Table) checkRights(ctx context.Context, q pgdb.Querier, cfg Config, deletes bool, found *finding.List) error {
	role, err := pgdb.LookupGrantee(ctx, q, "")
	if err != nil {
		return err
	}
	missing, err := role.Missing(ctx, q, t.existing(cfg).Grants(deletes))
	if err != nil {
		return err
	}
	for _, line := range role.Lacks(missing) {
		found.Add(finding.Unreadable, cfg.Path, "%s", line)
	}
	if t.rel.RowSecurity {
		found.Add(finding.Unreadable, cfg.Path, "row-level security hides rows of %s from this role; give the role BYPASSRLS or exempt it", t.rel)
	}
	return nil
}

// existing is cfg without a size column that isn't there, which is another finding.
func (t *Table) existing(cfg Config) Config {
	if _, ok := t.rel.Column(cfg.Size); !ok {
		cfg.Size = ""
	}
	return cfg
}

// Triggers of the application's that fire for a delete, whose functions run with
// the rights of whoever deletes.
const callersTriggers = `
SELECT g.tgname::text || ' of ' || g.tgrelid::regclass::text || ' (function ' || p.oid::regprocedure::text || ')'
FROM pg_catalog.pg_trigger g JOIN pg_catalog.pg_proc p ON p.oid = g.tgfoid
WHERE g.tgrelid = $1 AND NOT g.tgisinternal AND g.tgenabled IN ('O', 'A') AND g.tgtype & 8 <> 0 AND NOT p.prosecdef
	AND p.prolang NOT IN (SELECT oid FROM pg_catalog.pg_language WHERE lanname IN ('internal', 'c'))
ORDER BY 1`

// CallersTriggers names the triggers that do, on a delete, something that takes
// rights which no catalogue knows.
func (t *Table) CallersTriggers(ctx context.Context, q pgdb.Querier) ([]string, error) {
	rows, err := q.Query(ctx, callersTriggers, t.rel.OID)
	if err != nil {
		return nil, fmt.Errorf("look for triggers on %s: %w", t, err)
	}
	triggers, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("look for triggers on %s: %w", t, err)
	}
	return triggers, nil
}

// Enabled triggers of the application's that fire for a delete (bit 3 of tgtype)
// and whose function has no search_path of its own.
const loosePathTriggers = `
SELECT g.tgname::text, p.oid::regprocedure::text
FROM pg_catalog.pg_trigger g JOIN pg_catalog.pg_proc p ON p.oid = g.tgfoid
WHERE g.tgrelid = $1 AND NOT g.tgisinternal AND g.tgenabled IN ('O', 'A') AND g.tgtype & 8 <> 0
	AND NOT EXISTS (SELECT 1 FROM unnest(p.proconfig) AS o WHERE starts_with(o, 'search_path='))
	AND p.prolang NOT IN (SELECT oid FROM pg_catalog.pg_language WHERE lanname IN ('internal', 'c'))
ORDER BY 1`

// warnOfTriggers: a trigger that works for the application may fail for the
// agent, whose transactions have no search_path.
func (t *Table) warnOfTriggers(ctx context.Context, q pgdb.Querier, cfg Config, found *finding.List) error {
	rows, err := q.Query(ctx, loosePathTriggers, t.rel.OID)
	if err != nil {
		return fmt.Errorf("look for triggers on %s: %w", t, err)
	}
	var trigger, function string
	_, err = pgx.ForEachRow(rows, []any{&trigger, &function}, func() error {
		found.Add(finding.Warning, cfg.Path, "trigger %s of %s runs %s, which finds no table by its bare name when the agent deletes: the agent has no search_path; "+
			"run: ALTER FUNCTION %s SET search_path = ...", trigger, t.rel, function, function)
		return nil
	})
	if err != nil {
		return fmt.Errorf("look for triggers on %s: %w", t, err)
	}
	return nil
}

// Kind returns the kind of the table's keys.
func (t *Table) Kind() blob.Kind { return t.kind }

// Relation returns the table as the catalogue has it.
func (t *Table) Relation() *pgdb.Relation { return t.rel }

// KeyColumn returns the key column as the catalogue has it.
func (t *Table) KeyColumn() pgdb.Column { return t.key }

// Fingerprint identifies the table and its key column.
func (t *Table) Fingerprint() pgdb.Fingerprint { return pgdb.FingerprintOf(t.rel, t.key) }

// String returns the table's name for messages.
func (t *Table) String() string { return t.rel.String() }
