package liveness

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Options of a resolution.
type Options struct {
	// Kind is the kind of the pool's keys.
	Kind blob.Kind
	// Enforce asks for what deleting needs: a guard that was chosen knowingly.
	Enforce bool
	// Pool is the pool's name, as commands have it, and Schema where functions of
	// the agent's are.
	Pool, Schema string
	// AnyGuard takes whatever guard there is, and finds no fault with it: for who is
	// about to make one.
	AnyGuard bool
	// Elsewhere says that the pool's blobs are in another database: no foreign key
	// leads there, and targets are empty.
	Elsewhere bool
	// Denied returns the statements that grant what reading the source takes and the
	// role lacks, joined for one line. It is asked about a source whose SQL the
	// server refuses to read. Nil, and "", say nothing.
	Denied func(ctx context.Context, src Source) string

	without omit
}

// omit leaves protections out. Only tests set any of it, to show that each protection
// is what stands between its race and a lost blob.
type omit struct {
	// HeldRows: where decides of a row that a foreign key holds as of any other, and may
	// stand beside ON DELETE CASCADE, SET NULL and SET DEFAULT.
	HeldRows bool
}

// ResolvePostgres looks the sources up in the catalogue of the database that q
// is connected to, with the foreign keys that point at the targets, and says
// everything that is wrong. The registry is nil when a finding is worse than a
// warning. q is a transaction, best a read-only one; none of the sources' SQL is
// executed.
func ResolvePostgres(ctx context.Context, q pgdb.Querier, opts Options, sources []Source, targets []Target) (*Postgres, finding.List, error) {
	r := pgResolver{q: q, opts: opts, targets: targets}
	var err error
	if r.role, err = pgdb.LookupGrantee(ctx, q, ""); err != nil {
		return nil, nil, err
	}
	if err := r.checkServer(ctx, sources); err != nil {
		return nil, nil, err
	}
	if r.foreignKeys, err = readForeignKeys(ctx, q, targets); err != nil {
		return nil, nil, err
	}
	p := &Postgres{kind: opts.Kind, pool: opts.Pool, targets: targets, foreignKeys: r.foreignKeys}
	for _, src := range sources {
		s, err := r.resolve(ctx, src)
		if err != nil {
			return nil, nil, fmt.Errorf("resolve source %s: %w", src.Name, err)
		}
		p.sources = append(p.sources, s)
	}
	r.checkForeignKeys(p.sources)
	if err := r.checkStatements(ctx, p); err != nil {
		return nil, nil, err
	}
	if r.found.Worst() > finding.Warning {
		return nil, r.found, nil
	}
	return p, r.found, nil
}

type pgResolver struct {
	q           pgdb.Querier
	opts        Options
	role        pgdb.Grantee
	targets     []Target
	foreignKeys []foreignKey
	found       finding.List
}

// checkServer refuses a server that may lag behind its primary, and a connection
// that can't be relied on.
func (r *pgResolver) checkServer(ctx context.Context, sources []Source) error {
	why, err := pgdb.Unfit(ctx, r.q)
	if err != nil || why == "" {
		return err
	}
	for _, s := range sources {
		r.found.Add(finding.Unreadable, s.Path, "%s", why)
	}
	return nil
}

func (r *pgResolver) resolve(ctx context.Context, src Source) (pgSource, error) {
	s := pgSource{Source: src, guard: Settle}
	if src.Query != "" {
		if err := r.resolveQuery(ctx, &s); err != nil || s.value == 0 {
			return s, err
		}
		r.resolveFormat(&s)
	} else {
		if err := r.resolveTable(ctx, &s); err != nil || s.value == 0 {
			return s, err
		}
		s.foreignKey = r.foreignKeyOf(&s)
		s.held = r.held(&s)
		r.resolveFormat(&s)
		if s.format.Placeholder() != 0 {
			if err := r.resolveProbe(ctx, &s); err != nil {
				return s, err
			}
			r.warnOfLongRead(&s)
		}
	}
	if err := r.resolveReads(ctx, &s); err != nil || s.value == 0 {
		return s, err
	}
	return s, r.resolveGuard(ctx, &s)
}

func (r *pgResolver) resolveTable(ctx context.Context, s *pgSource) error {
	rel, err := pgdb.LookupRelation(ctx, r.q, s.Schema, s.Table)
	if errors.Is(err, pgdb.ErrNoRelation) {
		r.found.Add(finding.Unreadable, s.Path+".table", "there is no table %s.%s in the database; create it or correct the name", s.Schema, s.Table)
		return nil
	}
	if err != nil {
		return err
	}
	s.rel = rel
	if stored, err := r.checkStored(ctx, s); err != nil || !stored {
		return err
	}
	col, ok := rel.Column(s.Column)
	if !ok {
		r.found.Add(finding.Unreadable, s.Path+".column", "table %s has no column %q; correct the name", rel, s.Column)
		return nil
	}
	s.col = col
	if readable, err := r.checkReadable(ctx, s); err != nil || !readable {
		return err
	}
	value, ok := valueTypeOf(col.Base)
	if !ok {
		r.found.Add(finding.Misconfigured, s.Path+".column", "%s.%s is %s, which isn't read as a key; register a query that returns text, bytea, uuid or an integer", rel, col.Name, col.Type)
		return nil
	}
	s.value = value
	return r.checkWhere(ctx, s)
}

const registerThere = "register the database it stands in under databases: and the source there"

// checkStored refuses what shows rows of another time or place.
func (r *pgResolver) checkStored(ctx context.Context, s *pgSource) (ok bool, err error) {
	switch s.rel.Kind {
	case "m":
		r.found.Add(finding.Misconfigured, s.Path+".table", "%s is a materialized view, which shows the past; register the tables behind it", s.rel)
		return false, nil
	case "f":
		r.found.Add(finding.Misconfigured, s.Path+".table", "%s is a foreign table; %s", s.rel, registerThere)
		return false, nil
	}
	if s.parts, err = pgdb.Parts(ctx, r.q, s.rel); err != nil {
		return false, err
	}
	for _, part := range s.parts {
		if part.Kind == "f" {
			r.found.Add(finding.Misconfigured, s.Path+".table", "%s, a partition of %s, is a foreign table; %s", part.Name, s.rel, registerThere)
			return false, nil
		}
	}
	return true, nil
}

// checkReadable names what the role lacks to read the source's column.
func (r *pgResolver) checkReadable(ctx context.Context, s *pgSource) (bool, error) {
	needed := append(s.columnGrants(), s.ctidGrant(), pgdb.Grant{Right: "SELECT", On: s.on()})
	standings, err := r.role.Standings(ctx, r.q, needed)
	if err != nil {
		return false, err
	}
	var missing []pgdb.Grant
	for i, g := range s.columnGrants() {
		if !standings[i].Held {
			missing = append(missing, g)
		}
	}
	s.readsCTID, s.wholeRows = standings[len(needed)-2].Held, standings[len(needed)-1].Held
	for _, line := range r.role.Lacks(missing) {
		r.found.Add(finding.Unreadable, s.Path, "%s", line)
	}
	if s.rel.RowSecurity {
		r.found.Add(finding.Unreadable, s.Path, "row-level security hides rows of %s from this role; give the role BYPASSRLS or exempt it", s.rel)
	}
	return len(missing) == 0 && !s.rel.RowSecurity, nil
}

// checkWhere has the server read the condition on its own: inside a larger
// statement a misspelt column could be taken for one of another table.
func (r *pgResolver) checkWhere(ctx context.Context, s *pgSource) error {
	if s.Where == "" {
		return nil
	}
	from := " FROM " + s.rel.SQL() + " s WHERE "
	_, err := r.describe(ctx, "SELECT "+s.column()+from+"("+s.Where+"\n)")
	if err == nil {
		// Inside brackets too: "a) OR (b" is a condition in parentheses alone.
		_, err = r.describe(ctx, "SELECT "+s.column()+from+"(ARRAY["+s.Where+"\n])[1]")
	}
	if err == nil {
		return nil
	}
	if pgdb.Code(err) == "" && !errors.Is(err, errParameters) {
		return err
	}
	r.found.Add(finding.Misconfigured, s.Path+".where", "it isn't a condition over %s: %s%s", s.rel, serverMessage(err), pathHint(err))
	s.value = 0
	return nil
}

// pathHint says what to do about a name that the server doesn't find. A column
// isn't found for another reason.
func pathHint(err error) string {
	// A function's arguments follow in brackets, with types that may be qualified.
	name, _, _ := strings.Cut(serverMessage(err), "(")
	switch pgdb.Code(err) {
	case "42883", "42704", pgdb.UndefinedTable: // function or operator, type, table
		if !strings.Contains(name, ".") {
			return "; qualify it with its schema: there is no search_path"
		}
		return "; create it or correct the name"
	default:
		return ""
	}
}

func (r *pgResolver) resolveQuery(ctx context.Context, s *pgSource) error {
	// First as it stands, so that the server's words are about what somebody wrote,
	// and so that it can't close the parenthesis that it is put into.
	_, err := r.describe(ctx, s.Query)
	var fields []pgconn.FieldDescription
	if err == nil {
		fields, err = r.describe(ctx, "SELECT * FROM ("+s.Query+"\n) q")
	}
	if err != nil {
		return r.refuseQuery(ctx, s, err)
	}
	if len(fields) != 1 {
		r.found.Add(finding.Misconfigured, s.Path+".query", "it returns %d columns; a source returns exactly one", len(fields))
		return nil
	}
	base, err := r.baseType(ctx, fields[0].DataTypeOID)
	if err != nil {
		return err
	}
	value, ok := valueTypeOf(base)
	if !ok {
		r.found.Add(finding.Misconfigured, s.Path+".query", "it returns %s, which isn't read as a key; cast it to text, bytea, uuid or an integer", base)
		return nil
	}
	s.value, s.col.Base, s.scanned = value, base, true
	return nil
}

func (r *pgResolver) refuseQuery(ctx context.Context, s *pgSource, err error) error {
	severity, hint := finding.Misconfigured, pathHint(err)
	switch code := pgdb.Code(err); {
	case code == "" && !errors.Is(err, errParameters):
		return err
	case code == pgdb.UndefinedTable:
		severity = finding.Unreadable
	case code == pgdb.InsufficientPrivilege:
		severity, hint = finding.Unreadable, r.grantHint(ctx, s)
	case strings.HasSuffix(strings.TrimSpace(s.Query), ";"):
		hint = "; leave out the semicolon at its end"
	case code == "42601": // syntax error
		hint = "; a source is one SELECT"
	}
	r.found.Add(severity, s.Path+".query", "it can't be asked: %s%s", serverMessage(err), hint)
	return nil
}

// grantHint is for a right of which the server names only the object.
func (r *pgResolver) grantHint(ctx context.Context, s *pgSource) string {
	if r.opts.Denied != nil {
		if statements := r.opts.Denied(ctx, s.Source); statements != "" {
			return "; run: " + statements
		}
	}
	return "; grant this role (" + r.role.SQL + ") what that needs"
}

// errParameters: $1 would be taken for the agent's own parameter.
var errParameters = errors.New("a parameter such as $1 has no value here")

// describe has the server parse and analyse a statement without running it.
func (r *pgResolver) describe(ctx context.Context, sql string) (fields []pgconn.FieldDescription, err error) {
	err = r.aside(ctx, func(sub pgx.Tx) error {
		d, err := sub.Conn().PgConn().Prepare(ctx, "", sql, nil)
		if err == nil && len(d.ParamOIDs) > 0 {
			err = errParameters
		}
		if err != nil {
			return err
		}
		fields = d.Fields
		return nil
	})
	return fields, err
}

// aside runs fn in a savepoint that is rolled back, whatever fn returns: an error
// must not break the transaction that looks at the other sources, and no lock may
// last.
func (r *pgResolver) aside(ctx context.Context, fn func(pgx.Tx) error) error {
	tx, ok := r.q.(pgx.Tx)
	if !ok {
		return errors.New("sources can be resolved only inside a transaction")
	}
	done := errors.New("roll back")
	err := pgx.BeginFunc(ctx, tx, func(sub pgx.Tx) error {
		if err := fn(sub); err != nil {
			return err
		}
		return done
	})
	if errors.Is(err, done) {
		return nil
	}
	return err
}

// checkStatements has the server plan what will be asked of each source that
// could be resolved. A plan looks up every right, also on what stands in a
// condition or behind a view.
func (r *pgResolver) checkStatements(ctx context.Context, p *Postgres) error {
	for i := range p.sources {
		s := &p.sources[i]
		if s.value == 0 || s.format.Placeholder() == 0 && !s.joined() {
			continue
		}
		plan := "EXPLAIN SELECT 1 FROM " + keysFrom(p.kind) + " WHERE " + s.any() + " AND " + s.refers(p.kind, keyOfBatch)
		err := r.aside(ctx, func(sub pgx.Tx) error {
			param, err := pgdb.Array(p.kind, nil)
			if err != nil {
				return err
			}
			rows, err := sub.Query(ctx, plan, param)
			if err != nil {
				return err
			}
			rows.Close()
			return rows.Err()
		})
		switch code := pgdb.Code(err); {
		case err == nil:
		case code == "":
			return fmt.Errorf("plan the look-up in source %s: %w", s.Name, err)
		case code == pgdb.InsufficientPrivilege:
			r.found.Add(finding.Unreadable, s.Path, "%s%s", serverMessage(err), r.grantHint(ctx, s))
		default:
			r.found.Add(finding.Misconfigured, s.Path, "the server can't plan a look-up: %s", serverMessage(err))
		}
	}
	return nil
}

const baseType = `
WITH RECURSIVE walk AS (
	SELECT $1::oid AS typ
	UNION ALL
	SELECT t.typbasetype FROM walk w JOIN pg_catalog.pg_type t ON t.oid = w.typ WHERE t.typtype = 'd'
)
SELECT CASE WHEN t.typtype = 'e' THEN 'enum' ELSE t.typname::text END
FROM walk w JOIN pg_catalog.pg_type t ON t.oid = w.typ WHERE t.typtype <> 'd'`

func (r *pgResolver) baseType(ctx context.Context, oid uint32) (base string, err error) {
	if err := r.q.QueryRow(ctx, baseType, oid).Scan(&base); err != nil {
		return "", fmt.Errorf("look up type %d: %w", oid, err)
	}
	return base, nil
}

func (r *pgResolver) resolveFormat(s *pgSource) {
	format, explicit, path := s.value.defaultFormat(), false, s.Path
	if s.Format != nil {
		format, explicit, path = *s.Format, true, s.Path+".format"
	}
	typ := s.col.Type
	if typ == "" {
		typ = s.col.Base
	}
	switch {
	case s.joined():
		// Its values are those of another column of the blobs' table, not keys.
		if explicit {
			r.found.Add(finding.Misconfigured, path, "by foreign key %s the values of %s.%s aren't keys, the key is looked up by them; leave format out", s.foreignKey.constraint, s.rel, s.col.Name)
			return
		}
	case !s.value.takes(format):
		r.found.Add(finding.Misconfigured, path, "values of type %s can't be read as %q; leave format out, or register a query that turns them into text", typ, format)
		return
	case !fits(r.opts.Kind, format, explicit) && s.Format == nil && s.value == valueText:
		what := "what the query returns"
		if s.rel != nil {
			what = s.rel.String() + "." + s.col.Name
		}
		r.found.Add(finding.Misconfigured, path, "%s is %s and format isn't set: write format: %s", what, typ, suggest(r.opts.Kind))
		return
	case !fits(r.opts.Kind, format, explicit):
		r.found.Add(finding.Misconfigured, path, "format %q can't name the pool's keys, which are %s; a text value that names one is read with %s", format, r.opts.Kind, suggest(r.opts.Kind))
		return
	}
	s.format = format
}

// resolveProbe finds out whether keys can be looked up by the column, and with
// which index.
func (r *pgResolver) resolveProbe(ctx context.Context, s *pgSource) error {
	_, reversible := encode(s.format, s.value, r.opts.Kind, "k.key")
	// Nothing compares an enum with a text.
	s.scanned = !s.joined() && (!reversible || s.col.Base == "enum")
	switch {
	case s.scanned:
		r.found.Add(finding.Warning, s.Path, "%s.%s is read whole again and again: a key can't be looked up in a column of type %s by the format %q", s.rel, s.col.Name, s.col.Type, s.format)
		return nil
	case s.rel.Kind == "v":
		return nil
	}
	indexes, err := r.indexExpressions(ctx, s.rel.OID, s.col.Collation)
	if err != nil {
		return err
	}
	s.indexed = slices.Contains(indexes, pgdb.Ident(s.col.Name))
	if hasCase(s.format.Placeholder()) && s.value == valueText {
		s.lowerIndex = slices.Contains(indexes, "lower("+pgdb.Ident(s.col.Name)+")")
		s.indexed = s.indexed || s.lowerIndex
	}
	if !s.indexed {
		r.found.Add(finding.Warning, s.Path, "no index serves a look-up by %s.%s, so that it is read whole again and again; run: %s", s.rel, s.col.Name, s.createIndex(pgdb.Ident(s.col.Name)))
	}
	return nil
}

// warnOfLongRead: a table is read in stretches of blocks, if the role may see where
// its rows stand.
func (r *pgResolver) warnOfLongRead(s *pgSource) {
	if _, needed := s.badValue(); needed && s.rel.IsTable() && !s.readsCTID {
		r.found.Add(finding.Warning, s.Path, "the values of %s.%s are looked through in one statement, which takes long where they are many; run: %s",
			s.rel, s.col.Name, r.role.Statements([]pgdb.Grant{s.ctidGrant()}))
	}
}

// createIndex is the statement that makes an index over expr.
func (s *pgSource) createIndex(expr string) string {
	create := "CREATE INDEX CONCURRENTLY ON "
	if s.rel.Kind == "p" {
		create = "CREATE INDEX ON " // no other is possible on a partitioned table
	}
	return create + s.rel.SQL() + " (" + expr + ")"
}

// hasCase says whether one key can be spelt in two letter cases.
func hasCase(p blob.Placeholder) bool {
	return p == blob.Hex || p == blob.UpperHex || p == blob.UUID
}

// A partial index serves only statements that imply its condition, and one with
// a collation of its own only comparisons in that collation.
const leadingColumns = `
SELECT pg_catalog.pg_get_indexdef(i.indexrelid, 1, false)
FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
JOIN pg_catalog.pg_am a ON a.oid = c.relam
WHERE i.indrelid = $1 AND i.indisvalid AND a.amname IN ('btree', 'hash') AND i.indpred IS NULL
	AND i.indcollation[0] = $2`

// indexExpressions returns the first column of each index that compares in the
// collation, or lower() of a column, quoted as pgdb.Ident quotes it.
func (r *pgResolver) indexExpressions(ctx context.Context, oid, collation uint32) ([]string, error) {
	rows, err := r.q.Query(ctx, leadingColumns, oid, collation)
	if err != nil {
		return nil, fmt.Errorf("look for indexes: %w", err)
	}
	exprs, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("look for indexes: %w", err)
	}
	for i, e := range exprs {
		exprs[i] = requote(e)
	}
	return exprs, nil
}

// columnExpr is a column, or lower() of one, cast to text or not, as
// pg_get_indexdef spells it: with quotes where they are needed.
var columnExpr = regexp.MustCompile(`^(lower\()?\(?([a-z0-9_]+|"(?:[^"]|"")+")(?:\)::text)?(\))?$`)

func requote(expr string) string {
	m := columnExpr.FindStringSubmatch(expr)
	if m == nil {
		return expr
	}
	name := m[2]
	if name[0] != '"' {
		name = `"` + name + `"`
	}
	return m[1] + name + m[3]
}

// serverMessage is the server's own words about a statement, which contain no
// secret: neither connection parameters nor rows.
func serverMessage(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Message
	}
	return err.Error()
}
