package liveness

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
)

// ResolveSQLite looks the sources up in the catalogue of the database that q is
// connected to, with the foreign keys that point at the targets, and says
// everything that is wrong. The registry is nil when a finding is worse than a
// warning. It reads no rows.
func ResolveSQLite(ctx context.Context, q sqlitedb.Querier, opts Options, sources []Source, targets []SQLiteTarget) (*SQLite, finding.List, error) {
	r := sqliteResolver{q: q, opts: opts}
	if err := r.checkEncoding(ctx, sources); err != nil {
		return nil, nil, err
	}
	var err error
	if r.foreignKeys, err = readSQLiteForeignKeys(ctx, q, targets); err != nil {
		return nil, nil, err
	}
	l := &SQLite{kind: opts.Kind, targets: targets, foreignKeys: r.foreignKeys, stretch: sqliteStretch}
	for _, src := range sources {
		s := sqliteSource{Source: src}
		if err := r.resolve(ctx, &s); err != nil {
			return nil, nil, fmt.Errorf("resolve source %s: %w", src.Name, err)
		}
		l.sources = append(l.sources, s)
	}
	r.checkForeignKeys(l.sources)
	for i := range l.sources {
		if err := r.resolveProbe(ctx, &l.sources[i]); err != nil {
			return nil, nil, fmt.Errorf("resolve source %s: %w", l.sources[i].Name, err)
		}
	}
	if r.found.Worst() > finding.Warning {
		return nil, r.found, nil
	}
	return l, r.found, nil
}

type sqliteResolver struct {
	q           sqlitedb.Querier
	opts        Options
	foreignKeys []sqliteForeignKey
	found       finding.List
}

// checkEncoding refuses UTF-16, in which a cast of text to bytes isn't UTF-8.
func (r *sqliteResolver) checkEncoding(ctx context.Context, sources []Source) error {
	encoding, err := sqlitedb.Encoding(ctx, r.q)
	if err != nil {
		return err
	}
	for _, s := range sources {
		if encoding != "UTF-8" {
			r.found.Add(finding.Misconfigured, s.Path, "the database stores text as %s; only UTF-8 is supported", encoding)
		}
	}
	return nil
}

func (r *sqliteResolver) resolve(ctx context.Context, s *sqliteSource) error {
	r.resolveGuard(s)
	if s.Query != "" {
		return r.resolveQuery(ctx, s)
	}
	ok, err := r.resolveColumn(ctx, s)
	if err != nil || !ok {
		return err
	}
	if s.foreignKey = r.foreignKeyOf(s); s.joined() {
		// Its values are another column's of the blobs' table, not keys.
		s.format = blob.DefaultFormat(r.opts.Kind)
		return nil
	}
	r.resolveFormat(s, s.col.Class)
	return nil
}

// resolveColumn looks the table and its column up and has SQLite read both, and
// where on its own: inside a larger statement a misspelt column could be taken for
// one of another table.
func (r *sqliteResolver) resolveColumn(ctx context.Context, s *sqliteSource) (ok bool, err error) {
	rel, err := sqlitedb.LookupRelation(ctx, r.q, s.Table)
	switch {
	case errors.Is(err, sqlitedb.ErrNoRelation):
		r.found.Add(finding.Unreadable, s.Path+".table", "there is no table %s in the database; create it or correct the name", s.Table)
		return false, nil
	case sqlitedb.Refused(err):
		r.found.Add(finding.Unreadable, s.Path+".table", "%s can't be read: %v", s.Table, err)
		return false, nil
	case err != nil:
		return false, err
	}
	if s.col, ok = rel.Column(s.Column); !ok {
		r.found.Add(finding.Unreadable, s.Path+".column", "table %s has no column %q; correct the name", rel, s.Column)
		return false, nil
	}
	s.rel = rel
	read := "SELECT " + s.column() + " FROM " + rel.SQL() + " s"
	if _, refusal, err := r.describe(ctx, read); err != nil || refusal != nil {
		if refusal != nil {
			r.found.Add(finding.Unreadable, s.Path+".table", "%s can't be read: %v", rel, refusal)
		}
		return false, err
	}
	if s.Where == "" {
		return true, nil
	}
	_, refusal, err := r.describeFragment(ctx, s.Where, read+" WHERE ("+s.Where+"\n)")
	if err != nil {
		return false, err
	}
	if refusal != nil {
		r.found.Add(finding.Misconfigured, s.Path+".where", "SQLite refuses it: %v", refusal)
	}
	return refusal == nil, nil
}

func (r *sqliteResolver) resolveQuery(ctx context.Context, s *sqliteSource) error {
	columns, refusal, err := r.describeFragment(ctx, s.Query, "SELECT * FROM ("+s.Query+"\n)")
	if err != nil {
		return err
	}
	if refusal != nil {
		severity := finding.Misconfigured
		if strings.Contains(refusal.Error(), "no such table") { // SQLite has one code for all
			severity = finding.Unreadable
		}
		r.found.Add(severity, s.Path+".query", "SQLite refuses it: %v; correct the query", refusal)
		return nil
	}
	if len(columns) != 1 {
		r.found.Add(finding.Misconfigured, s.Path+".query", "it returns %d columns; a source returns exactly one", len(columns))
		return nil
	}
	// What an expression returns isn't declared, and a text that isn't read as one
	// would refer to nothing without a word: a value that is no key of the pool is
	// ordinary in a query.
	declared := sqlitedb.ClassOf(columns[0].DatabaseTypeName())
	if s.Format == nil && r.opts.Kind == blob.KindBytes && declared != sqlitedb.ClassBytes {
		r.found.Add(finding.Misconfigured, s.Path+".query", `say with format how its values spell the pool's keys, which are bytes: "{bytes}" for BLOBs, %s for texts`, suggest(r.opts.Kind))
		return nil
	}
	r.resolveFormat(s, sqlitedb.ClassAny)
	return nil
}

// describeFragment describes a statement that contains a piece of the
// configuration's SQL between parentheses.
func (r *sqliteResolver) describeFragment(ctx context.Context, fragment, statement string) (columns []*sql.ColumnType, refusal, err error) {
	if refusal := checkFragment(fragment); refusal != nil {
		return nil, refusal, nil
	}
	return r.describe(ctx, statement)
}

// describe has SQLite prepare a SELECT, and returns its columns or why SQLite
// refuses it. No row is read.
func (r *sqliteResolver) describe(ctx context.Context, statement string) (columns []*sql.ColumnType, refusal, err error) {
	rows, err := r.q.Query(ctx, "SELECT * FROM ("+statement+"\n) LIMIT 0")
	if sqlitedb.Refused(err) {
		return nil, err, nil
	}
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	columns, err = rows.ColumnTypes()
	return columns, nil, errors.Join(err, rows.Err())
}

func (r *sqliteResolver) resolveFormat(s *sqliteSource, class sqlitedb.Class) {
	format, explicit, path := defaultSQLiteFormat(class, r.opts.Kind), false, s.Path
	if s.Format != nil {
		format, explicit, path = *s.Format, true, s.Path+".format"
	}
	switch {
	case !takesSQLite(class, format):
		r.found.Add(finding.Misconfigured, path, "values of type %s can't be read as %q; leave format out, or register a query that turns them into text", s.col.Type, format)
	case !fits(r.opts.Kind, format, explicit):
		r.found.Add(finding.Misconfigured, path, "format %q can't name the pool's keys, which are %s; a text value that names one is read with %s", format, r.opts.Kind, suggest(r.opts.Kind))
	default:
		s.format = format
	}
}

// defaultSQLiteFormat is the format of a column whose source names none. A column
// without a type has no say: its values are taken for keys as they are.
func defaultSQLiteFormat(class sqlitedb.Class, kind blob.Kind) blob.Format {
	switch class {
	case sqlitedb.ClassAny:
		return blob.DefaultFormat(kind)
	case sqlitedb.ClassUUID:
		// Also for keys that are text: {text} would miss a key in the other case
		// without a word, {uuid} complains about it.
		return blob.DefaultFormat(blob.KindUUID)
	default:
		return sqliteValueType(class).defaultFormat()
	}
}

// takesSQLite says whether a column declared so can be read with the format.
func takesSQLite(class sqlitedb.Class, f blob.Format) bool {
	return class == sqlitedb.ClassAny || sqliteValueType(class).takes(f)
}

func sqliteValueType(class sqlitedb.Class) valueType {
	switch class {
	case sqlitedb.ClassBytes:
		return valueBytes
	case sqlitedb.ClassInt, sqlitedb.ClassReal, sqlitedb.ClassNumber:
		return valueInt
	default:
		return valueText
	}
}

// resolveProbe finds out whether keys can be looked up by the column, and with
// which index: SQLite itself is asked how it would do it.
func (r *sqliteResolver) resolveProbe(ctx context.Context, s *sqliteSource) (err error) {
	if s.rel == nil || s.format.Placeholder() == 0 {
		return nil // a query, or a source with a finding
	}
	if !s.joined() { // the blobs' table has the say in a join
		if s.loose, err = s.rel.Loose(ctx, r.q, s.col); err != nil {
			return err
		}
	}
	s.indexed = true // what is explained is a probe
	if hasCase(s.format.Placeholder()) && !s.joined() {
		s.noCase = true
		if found, err := r.usesIndex(ctx, s); err != nil || found {
			return err
		}
		s.noCase = false
	}
	if !s.joined() && spellings(s.format.Placeholder()) && !s.native(r.opts.Kind) {
		s.open += "; a value in another spelling that is written while a sweep runs"
	}
	if s.indexed, err = r.usesIndex(ctx, s); err != nil || s.indexed {
		return err
	}
	if !s.rel.IsTable() {
		r.found.Add(finding.Warning, s.Path, "%s is a %s without an index to look keys up by, so that it is read whole again and again", s.rel, s.rel.Kind)
		return nil
	}
	r.found.Add(finding.Warning, s.Path, "no index serves a look-up by %s.%s, so that it is scanned again and again; run: %s", s.rel, s.col.Name, s.createIndex(""))
	return nil
}

// spellings says whether one key can be spelt in several ways.
func spellings(p blob.Placeholder) bool { return p != blob.Text && p != blob.Bytes }

// usesIndex says whether a probe by the column goes by an index, as it does for a
// table whose detail reads like "SEARCH s USING INDEX i (column=?)".
func (r *sqliteResolver) usesIndex(ctx context.Context, s *sqliteSource) (bool, error) {
	explain := "EXPLAIN QUERY PLAN SELECT " + s.refers(r.opts.Kind, KeyRef{Expr: sqlitedb.Native(r.opts.Kind, "x''")})
	details, err := sqlitedb.Collect(ctx, r.q, func(rows *sql.Rows) (string, error) {
		var id, parent, unused int
		var detail string
		err := rows.Scan(&id, &parent, &unused, &detail)
		return detail, err
	}, explain)
	if err != nil {
		return false, fmt.Errorf("explain a look-up in %s: %w", s.rel, err)
	}
	columns := []string{s.col.Name}
	if s.joined() {
		columns = s.foreignKey.from
	}
	for _, d := range details {
		if !strings.HasPrefix(d, "SEARCH s ") || strings.Contains(d, "AUTOMATIC") {
			continue
		}
		if strings.Contains(d, "(rowid=?") {
			return true, nil
		}
		for _, c := range columns {
			if strings.Contains(d, "("+c+"=?") {
				return true, nil
			}
		}
	}
	return false, nil
}

// createIndex returns the statement for an index on the source's column.
func (s *sqliteSource) createIndex(collate string) string {
	name := "gc_agent_" + s.rel.Name + "_" + s.col.Name
	return "CREATE INDEX " + sqlitedb.Ident(name) + " ON " + sqlitedb.Ident(s.rel.Name) + " (" + sqlitedb.Ident(s.col.Name) + collate + ")"
}

func (r *sqliteResolver) resolveGuard(s *sqliteSource) {
	path := s.Path + ".guard"
	if s.Guard == ForeignKey {
		r.found.Add(finding.Misconfigured, path, "foreign_key is no guard on SQLite, where each connection decides whether foreign keys are checked; leave guard out")
		return
	}
	if !r.opts.Elsewhere {
		// Every deleting transaction has the write lock, whatever was chosen.
		s.guard = Serial
		s.open = "a reference by an application that looks for the blob in one transaction and refers to it in a later one"
		s.close = "looking for the blob and referring to it in one transaction"
		return
	}
	s.guard = Settle
	s.open = "a reference whose transaction takes the write lock after the wait and commits after the check"
	s.close = "moving the table into the blobs' file"
	switch {
	case s.Guard == Serial:
		r.found.Add(finding.Misconfigured, path, "serial holds only where the source and the blobs are in one file; choose guard: settle")
	case s.Guard != Settle && r.opts.Enforce:
		r.found.Add(finding.Misconfigured, path, "the source is in another database than the blobs, so that nothing stops a new reference from appearing between the check and the delete; "+
			"move it into the blobs' file (guard serial), or accept what stays open, %s, with guard: settle", s.open)
	}
}
