package liveness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// SourceGrants are the rights that reading one source takes.
type SourceGrants struct {
	Source Source
	Grants []pgdb.Grant
	// Notes say what no GRANT gives, or no catalogue knows.
	Notes []string
	// Unseen says why Grants may not be all. It is empty where they are.
	Unseen string
}

// PostgresGrants returns what a role needs to read the sources, in their order,
// whoever asks: the catalogue is open to everybody. What a query or a condition
// reads the server finds out as it makes a view of it; so tx has to be one that
// may write, and the caller rolls it back. Where the asking role may not do that,
// or may not look a name up, Unseen says so.
func PostgresGrants(ctx context.Context, tx pgx.Tx, opts Options, sources []Source, targets []Target) ([]SourceGrants, error) {
	r := pgResolver{q: tx, opts: opts}
	var err error
	if r.role, err = pgdb.LookupGrantee(ctx, tx, ""); err != nil {
		return nil, err
	}
	if r.foreignKeys, err = readForeignKeys(ctx, tx, targets); err != nil {
		return nil, err
	}
	resolved := make([]pgSource, len(sources))
	for i, src := range sources {
		resolved[i] = pgSource{Source: src}
		if src.Query == "" {
			err = r.lookUp(ctx, &resolved[i])
		}
		if err != nil {
			return nil, fmt.Errorf("look up source %s: %w", src.Name, err)
		}
	}
	grants := make([]SourceGrants, len(sources))
	for i := range resolved {
		if grants[i], err = r.grants(ctx, tx, &resolved[i]); err != nil {
			return nil, fmt.Errorf("look for the rights that source %s takes: %w", sources[i].Name, err)
		}
	}
	return grants, nil
}

// ConfiguredGrants returns as much of it as the configuration knows.
func ConfiguredGrants(src Source) SourceGrants {
	s := pgSource{Source: src}
	g := SourceGrants{Source: src}
	switch {
	case src.Query != "":
		g.Unseen = "what its query reads"
	default:
		g.Grants = s.columnGrants()
		if src.Where != "" {
			g.Unseen = "what its where reads"
		}
	}
	return g
}

// lookUp resolves a table as far as the catalogue goes, without asking for rights.
func (r *pgResolver) lookUp(ctx context.Context, s *pgSource) error {
	rel, err := pgdb.LookupRelation(ctx, r.q, s.Schema, s.Table)
	if errors.Is(err, pgdb.ErrNoRelation) {
		return nil
	}
	if err != nil {
		return err
	}
	col, ok := rel.Column(s.Column)
	if !ok {
		return nil
	}
	s.rel, s.col = rel, col
	s.value, _ = valueTypeOf(col.Base)
	if s.parts, err = pgdb.Parts(ctx, r.q, rel); err != nil || s.value == 0 {
		return err
	}
	s.foreignKey, s.held = r.foreignKeyOf(s), r.held(s)
	if r.resolveFormat(s); s.format.Placeholder() == 0 {
		return nil
	}
	return r.resolveProbe(ctx, s)
}

func (r *pgResolver) grants(ctx context.Context, tx pgx.Tx, s *pgSource) (SourceGrants, error) {
	g := SourceGrants{Source: s.Source}
	if s.Query == "" && s.rel == nil {
		g.Grants = s.columnGrants()
		g.Unseen = fmt.Sprintf("there is no column %s.%s.%s in the database", s.Schema, s.Table, s.Column)
		return g, nil
	}
	if s.rel != nil {
		g.Grants = append(g.Grants, s.columnGrants()...)
		if s.joined() {
			g.Grants = append(g.Grants, s.joinGrants()...)
		}
		if _, needed := s.badValue(); needed && s.format.Placeholder() != 0 && s.rel.IsTable() {
			g.Grants = append(g.Grants, s.ctidGrant())
		}
	}
	if err := r.addLockGrants(ctx, s, &g); err != nil {
		return g, err
	}
	if s.rel != nil && s.rel.IsTable() && s.and() == "" {
		return g, nil
	}
	w := readWalk{source: s, tx: tx, grants: &g}
	err := w.analyse(ctx)
	return g, err
}

// addLockGrants adds what the guard table_lock takes.
func (r *pgResolver) addLockGrants(ctx context.Context, s *pgSource, g *SourceGrants) error {
	if s.Guard != TableLock || !r.opts.Enforce {
		return nil
	}
	_, err := r.resolveLocks(ctx, s)
	switch {
	case pgdb.Code(err) != "":
		g.Unseen = "which tables it locks: " + serverMessage(err)
		return nil
	case err != nil:
		return err
	}
	grants, err := r.lockGrants(ctx, s)
	g.Grants = append(g.Grants, grants...)
	return err
}

// on is the source's table.
func (s *pgSource) on() pgdb.Object { return pgdb.OnTable(s.Schema, s.Table) }

// columnGrants are what it takes to read the source's column.
func (s *pgSource) columnGrants() []pgdb.Grant {
	return []pgdb.Grant{
		pgdb.Usage(s.Schema),
		{Right: "SELECT", Column: s.Column, On: s.on(), Why: "read source " + s.Name},
	}
}

// joinGrants are what it takes to find a key through other columns of the tier's
// table.
func (s *pgSource) joinGrants() []pgdb.Grant {
	fk := s.foreignKey
	why := "join source " + s.Name + " with the blobs, by foreign key " + fk.constraint
	tier := pgdb.OnTable(fk.target.Relation.Schema, fk.target.Relation.Name)
	var grants []pgdb.Grant
	for i := range fk.from {
		grants = append(grants,
			pgdb.Grant{Right: "SELECT", Column: fk.to[i], On: tier, Why: why},
			pgdb.Grant{Right: "SELECT", Column: fk.from[i], On: s.on(), Why: why})
	}
	return grants
}

// ctidGrant is what it takes to look through the values of a table in stretches.
func (s *pgSource) ctidGrant() pgdb.Grant {
	return pgdb.Grant{
		Right: "SELECT", Column: "ctid", On: s.on(), Optional: true,
		Why: "look through the values of source " + s.Name + " a stretch at a time, not in one long statement, and say where a wrong one is",
	}
}

// readWalk finds out what the SQL of one source reads.
type readWalk struct {
	source *pgSource
	tx     pgx.Tx
	grants *SourceGrants
	seen   []uint32 // views
}

// errDone rolls a savepoint back.
var errDone = errors.New("roll back")

// analyse reads what the server notes about a view of the source. Nothing is run,
// and nothing of it stays.
func (w *readWalk) analyse(ctx context.Context) error {
	if s := w.source; s.rel != nil && s.and() == "" {
		return w.walk(ctx, s.rel.OID)
	}
	err := pgx.BeginFunc(ctx, w.tx, func(sub pgx.Tx) error {
		// Through the protocol that takes one statement at a time.
		view := "CREATE TEMPORARY VIEW gc_agent_reads AS SELECT * FROM " + w.source.rows()
		if _, err := sub.Conn().PgConn().ExecParams(ctx, view, nil, nil, nil, nil).Close(); err != nil {
			return analysisError{err}
		}
		outer := w.tx
		defer func() { w.tx = outer }()
		w.tx = sub
		var oid uint32
		if err := sub.QueryRow(ctx, "SELECT 'pg_temp.gc_agent_reads'::regclass::oid").Scan(&oid); err != nil {
			return err
		}
		if err := w.walk(ctx, oid); err != nil {
			return err
		}
		if err := w.named(ctx, oid); err != nil {
			return err
		}
		return errDone
	})
	var refused analysisError
	switch {
	case errors.Is(err, errDone):
		return nil
	case errors.As(err, &refused) && pgdb.Code(err) != "":
		w.grants.Unseen = "what its SQL reads: " + serverMessage(err)
		return w.closed(ctx)
	default:
		return err
	}
}

type analysisError struct{ error }

func (e analysisError) Unwrap() error { return e.error }

// closed adds the schemas that stand in the source's SQL and that the asking role
// may not use: the server goes no further than the first of them.
func (w *readWalk) closed(ctx context.Context) error {
	rows, err := w.tx.Query(ctx, `SELECT nspname::text FROM pg_catalog.pg_namespace
		WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' AND NOT has_schema_privilege(oid, 'USAGE') ORDER BY 1`)
	if err != nil {
		return err
	}
	schemas, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, schema := range schemas {
		if w.source.names(schema) {
			w.add(pgdb.Usage(schema))
		}
	}
	return err
}

// names says whether the schema's name stands in the source's SQL.
func (s *pgSource) names(schema string) bool {
	text := strings.ToLower(s.Query + " " + s.Where)
	return strings.Contains(text, strings.ToLower(schema)+".") || strings.Contains(text, strings.ToLower(pgdb.Ident(schema))+".")
}

func (w *readWalk) add(g pgdb.Grant) { w.grants.Grants = append(w.grants.Grants, g) }

// walk adds what the definition of a view takes, and of the views in it. What a view
// reads, it reads with its owner's rights, unless it is a security_invoker, which
// asks for the caller's wherever it is nested. To call functions takes the caller's
// in any case.
func (w *readWalk) walk(ctx context.Context, view uint32) error {
	if slices.Contains(w.seen, view) {
		return nil
	}
	w.seen = append(w.seen, view)
	var tree string
	var invoker bool
	err := w.tx.QueryRow(ctx, selectRule, view).Scan(&tree, &invoker)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil // a table
	}
	if err != nil {
		return fmt.Errorf("read the definition of a view: %w", err)
	}
	reads, err := readsOf(tree)
	if err != nil {
		return err
	}
	if invoker || len(w.seen) == 1 && w.source.stands(view) {
		if err := w.addReads(ctx, reads); err != nil {
			return err
		}
	}
	if err := w.addFunctions(ctx, view); err != nil {
		return err
	}
	for _, r := range reads {
		if err := w.walk(ctx, r.relation); err != nil {
			return err
		}
	}
	return nil
}

// stands says whether a view stands for the source's SQL, and isn't its table.
func (s *pgSource) stands(view uint32) bool { return s.rel == nil || s.rel.OID != view }

const selectRule = `
SELECT r.ev_action::text, coalesce((SELECT o.option_value::boolean FROM pg_options_to_table(c.reloptions) o WHERE o.option_name = 'security_invoker'), false)
FROM pg_catalog.pg_rewrite r JOIN pg_catalog.pg_class c ON c.oid = r.ev_class
WHERE r.ev_class = $1 AND r.rulename = '_RETURN'`

// Of a function in a view's definition the catalogue knows, and of the one behind
// an operator in it. Those of pg_catalog are everybody's.
const selectFunctions = `
WITH used AS (
	SELECT d.refclassid, d.refobjid FROM pg_catalog.pg_depend d
	JOIN pg_catalog.pg_rewrite r ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND d.objid = r.oid
	WHERE r.ev_class = $1
)
SELECT n.nspname::text, p.proname::text, oidvectortypes(p.proargtypes),
	NOT p.prosecdef AND l.lanname NOT IN ('c', 'internal')
FROM pg_catalog.pg_proc p
JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
JOIN pg_catalog.pg_language l ON l.oid = p.prolang
WHERE n.nspname <> 'pg_catalog' AND (
	p.oid IN (SELECT refobjid FROM used WHERE refclassid = 'pg_catalog.pg_proc'::regclass)
	OR p.oid IN (SELECT o.oprcode FROM used u JOIN pg_catalog.pg_operator o ON u.refclassid = 'pg_catalog.pg_operator'::regclass AND o.oid = u.refobjid))
ORDER BY 1, 2, 3`

func (w *readWalk) addFunctions(ctx context.Context, view uint32) error {
	rows, err := w.tx.Query(ctx, selectFunctions, view)
	if err != nil {
		return fmt.Errorf("look for functions: %w", err)
	}
	on := pgdb.Object{Kind: pgdb.FunctionObject}
	var asCaller bool
	_, err = pgx.ForEachRow(rows, []any{&on.Schema, &on.Name, &on.Args, &asCaller}, func() error {
		w.add(pgdb.Grant{Right: "EXECUTE", On: on, Why: "read source " + w.source.Name + ", which calls it"})
		if asCaller {
			w.grants.Notes = append(w.grants.Notes, "function "+on.Schema+"."+on.Name+", which source "+w.source.Name+
				" calls, runs with the rights of its caller: what it reads itself isn't listed and has to be granted too")
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("look for functions: %w", err)
	}
	return nil
}

const selectColumnsRead = `
SELECT n.nspname::text, c.relname::text, coalesce(array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attnum = ANY ($2::int2[])), '{}'),
	coalesce((array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attnum > 0))[1], '')
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped
WHERE c.oid = $1 AND n.nspname NOT IN ('pg_catalog', 'information_schema')
GROUP BY 1, 2`

func (w *readWalk) addReads(ctx context.Context, reads []columnsRead) error {
	for _, r := range reads {
		on := pgdb.Object{Kind: pgdb.TableObject}
		var columns []string
		var first string
		err := w.tx.QueryRow(ctx, selectColumnsRead, r.relation, r.columns).Scan(&on.Schema, &on.Name, &columns, &first)
		if errors.Is(err, pgx.ErrNoRows) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look up what is read: %w", err)
		}
		why := "read source " + w.source.Name
		switch {
		case r.whole:
			w.add(pgdb.Grant{Right: "SELECT", On: on, Why: why})
		case len(columns) == 0:
			// It counts rows: any column will do.
			w.add(pgdb.Grant{Right: "SELECT", Column: first, AnyColumn: true, On: on, Why: why})
		}
		for _, c := range columns {
			if !r.whole {
				w.add(pgdb.Grant{Right: "SELECT", Column: c, On: on, Why: why})
			}
		}
	}
	return nil
}

// Schemas that hold something that the view depends on directly. A relation can
// be named in no way but with its schema: there is no search_path.
const selectNamed = `
SELECT DISTINCT n.nspname::text, x.relation
FROM pg_catalog.pg_depend d
JOIN pg_catalog.pg_rewrite r ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND d.objid = r.oid
CROSS JOIN LATERAL (
	SELECT relnamespace, true FROM pg_catalog.pg_class WHERE d.refclassid = 'pg_catalog.pg_class'::regclass AND oid = d.refobjid
	UNION ALL SELECT pronamespace, false FROM pg_catalog.pg_proc WHERE d.refclassid = 'pg_catalog.pg_proc'::regclass AND oid = d.refobjid
	UNION ALL SELECT oprnamespace, false FROM pg_catalog.pg_operator WHERE d.refclassid = 'pg_catalog.pg_operator'::regclass AND oid = d.refobjid
	UNION ALL SELECT typnamespace, false FROM pg_catalog.pg_type WHERE d.refclassid = 'pg_catalog.pg_type'::regclass AND oid = d.refobjid
	UNION ALL SELECT collnamespace, false FROM pg_catalog.pg_collation WHERE d.refclassid = 'pg_catalog.pg_collation'::regclass AND oid = d.refobjid
) x (namespace, relation)
JOIN pg_catalog.pg_namespace n ON n.oid = x.namespace
WHERE r.ev_class = $1 AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
ORDER BY 1, 2 DESC`

// named adds USAGE of the schemas that the source's SQL names.
func (w *readWalk) named(ctx context.Context, view uint32) error {
	rows, err := w.tx.Query(ctx, selectNamed, view)
	if err != nil {
		return fmt.Errorf("look for schemas: %w", err)
	}
	var schema string
	var relation bool
	_, err = pgx.ForEachRow(rows, []any{&schema, &relation}, func() error {
		if relation || w.source.names(schema) {
			w.add(pgdb.Usage(schema))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("look for schemas: %w", err)
	}
	return nil
}
