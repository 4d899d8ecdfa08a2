package liveness

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
)

// SQLiteTarget is a tier's table in the same database, by the names that the
// catalogue has: the foreign keys that point at it are references, whether
// somebody registered them or not.
type SQLiteTarget struct {
	Table string
	Key   string // column
}

// SQLite is the liveness sources of one SQLite database, resolved against its
// catalogue. It holds no connection and is good until the catalogue changes,
// which Changed tells.
type SQLite struct {
	kind        blob.Kind
	sources     []sqliteSource
	targets     []SQLiteTarget
	foreignKeys []sqliteForeignKey // to the targets
	stretch     int                // rows that BadValue reads in one transaction
}

// sqliteSource is one resolved source. A column holds values of any storage
// class, whatever its type says, so each value is read as what it is.
type sqliteSource struct {
	Source
	format blob.Format

	// Of a table source.
	rel        *sqlitedb.Relation
	col        sqlitedb.Column
	foreignKey *sqliteForeignKey
	held       bool // a foreign key covers it: its rows refer, whatever where says
	noCase     bool // the index by which it is probed is in the collation NOCASE
	loose      bool // the column's collation takes different texts for equal
	indexed    bool

	guard Guard
	open  string
	close string // what would close it
}

// Sources describes the sources in the order of Answer.Source.
func (l *SQLite) Sources() []Info {
	infos := make([]Info, len(l.sources))
	for i := range l.sources {
		infos[i] = l.sources[i].info()
	}
	return infos
}

func (s *sqliteSource) info() Info {
	probe := "probed by key"
	switch {
	case s.scanned():
		probe = "scanned"
	case s.joined():
		probe = "joined through " + s.foreignKey.target.Table
	case s.noCase:
		probe = "probed by " + s.col.Name + " COLLATE NOCASE"
	}
	return Info{
		Path: s.Path, Name: s.Name, Guard: s.guard, LeavesOpen: s.open, WouldClose: s.close,
		Probe: probe, Indexed: s.indexed, AllowEmpty: s.AllowEmpty,
	}
}

// scanned says that a statement reads the source whole, once, into a set of
// keys. A key isn't looked for where no index helps: SQLite has no hash join.
func (s *sqliteSource) scanned() bool { return !s.indexed }

// joined says that the source refers through other columns of the blobs' table.
func (s *sqliteSource) joined() bool { return s.foreignKey != nil && !s.foreignKey.direct }

// native says that the column holds keys as the tier does, so that SQLite
// compares the two without a detour.
func (s *sqliteSource) native(kind blob.Kind) bool {
	if s.format.Prefix() != "" || s.format.Suffix() != "" {
		return false
	}
	switch s.format.Placeholder() {
	case blob.Bytes:
		return kind == blob.KindBytes
	case blob.Text:
		return kind == blob.KindText && s.col.Affinity == sqlitedb.AffinityText
	case blob.Int:
		return kind == blob.KindInt && (s.col.Affinity == sqlitedb.AffinityInteger || s.col.Affinity == sqlitedb.AffinityNumeric)
	default:
		return false
	}
}

// Len returns the number of sources.
func (l *SQLite) Len() int { return len(l.sources) }

// Scanned says whether any source is read whole by every statement.
func (l *SQLite) Scanned() bool {
	for i := range l.sources {
		if l.sources[i].scanned() {
			return true
		}
	}
	return false
}

// Unreferenced returns the predicate "no source refers to the key", to be pushed
// into a tier's statement on the same database. It takes no parameters of its
// own.
func (l *SQLite) Unreferenced(k KeyRef) string {
	if len(l.sources) == 0 {
		// Nothing registered means that nothing is known to be dead.
		return "false"
	}
	parts := make([]string, len(l.sources))
	for i := range l.sources {
		parts[i] = "NOT " + l.sources[i].refers(l.kind, k)
	}
	return strings.Join(parts, "\n\tAND ")
}

// refers returns the condition that a row of the source refers to the key, or
// may do. It is never NULL, or the key would be kept for ever.
func (s *sqliteSource) refers(kind blob.Kind, k KeyRef) string {
	found := s.finds(kind, k)
	if kind != blob.KindText || s.format.Placeholder() == blob.Text {
		return found
	}
	// The key 007 is no number as values name it, but the application's own 7 may
	// well mean it.
	canon := sqlitedb.Canon(kind, k.Expr)
	named := sqlitedb.KeyOf(blob.DefaultFormat(s.format.Kind()), canon)
	return "(" + found + " OR (" + named + " <> " + canon + ") IS TRUE)"
}

// finds returns the condition that a row of the source holds the value that names
// the key.
func (s *sqliteSource) finds(kind blob.Kind, k KeyRef) string {
	// The plus takes a column's affinity away, which would convert what it is
	// compared with, and hide the index.
	key, canon := "+("+k.Expr+")", sqlitedb.Canon(kind, k.Expr)
	switch {
	case s.joined() && s.scanned():
		return "(" + key + " IN (SELECT " + s.foreignKey.key() + " FROM " + s.joinedRows() + "))"
	case s.joined():
		return "EXISTS (SELECT 1 FROM " + s.joinedRows() + " WHERE " + s.foreignKey.key() + " = " + key + ")"
	case s.Query != "":
		named := sqlitedb.KeyOf(s.format, "v")
		return "(" + canon + " IN (" + s.with() + "SELECT " + named + " FROM " + s.rows() + " AND " + named + " IS NOT NULL))"
	case s.scanned() && s.native(kind) && !s.loose:
		return "(" + key + " IN (SELECT " + s.column() + " COLLATE BINARY FROM " + s.rows() + s.between(k) + "))"
	case s.scanned():
		// Values are compared as a probe compares them, in the column's affinity and
		// collation: both find the same. A key that no value names has the value NULL.
		return "((" + sqlitedb.ValueOf(s.format, canon) + " IN (SELECT " + s.column() + " FROM " + s.rows() + ")) IS TRUE)"
	}
	if !s.native(kind) {
		key = sqlitedb.ValueOf(s.format, canon)
	}
	return "EXISTS (SELECT 1 FROM " + s.rel.SQL() + " s WHERE " + s.probe(key) + s.and() + ")"
}

// probe returns the condition that row s holds the value.
func (s *sqliteSource) probe(value string) string {
	if s.noCase {
		return s.column() + " COLLATE NOCASE = " + value
	}
	return s.column() + " = " + value
}

// between bounds the source as the keys are bounded. Values that aren't stored
// as keys are sort outside the bounds, and are none.
func (s *sqliteSource) between(k KeyRef) string {
	var b string
	if k.Lo != "" {
		b += " AND " + s.column() + " COLLATE BINARY > " + k.Lo
	}
	if k.Hi != "" {
		b += " AND " + s.column() + " COLLATE BINARY <= " + k.Hi
	}
	return b
}

// joinedRows is FROM for the rows that refer through a foreign key, with the rows
// v of the tier's table that they refer to. CROSS JOIN begins with the latter's
// unique index where a key is looked for; a whole source is read from its side.
func (s *sqliteSource) joinedRows() string {
	target := "main." + sqlitedb.Ident(s.foreignKey.target.Table) + " v"
	if s.scanned() {
		return s.rel.SQL() + " s CROSS JOIN " + target + " ON " + s.foreignKey.join()
	}
	return target + " CROSS JOIN " + s.rel.SQL() + " s ON " + s.foreignKey.join()
}

// The name of a query's rows must not be a table's that the query reads.
const sqliteQueryRows = "gc_agent_values"

// with begins a SELECT from rows. A query stands in a common table expression
// because that alone can name its column.
func (s *sqliteSource) with() string {
	if s.Query == "" {
		return ""
	}
	return "WITH " + sqliteQueryRows + " (v) AS (" + s.Query + "\n) "
}

// rows returns FROM and WHERE for all rows that refer to anything.
func (s *sqliteSource) rows() string {
	if s.Query != "" {
		return sqliteQueryRows + " WHERE v IS NOT NULL"
	}
	return s.rel.SQL() + " s WHERE " + s.column() + " IS NOT NULL" + s.and()
}

func (s *sqliteSource) column() string { return "s." + sqlitedb.Ident(s.col.Name) }

// and returns the source's where as a further condition. A row that a foreign
// key holds refers, whatever where says: it would stop the delete.
func (s *sqliteSource) and() string {
	if s.Where == "" || s.held {
		return ""
	}
	return " AND (" + s.Where + "\n)"
}

// any returns an EXISTS over all that the source refers to. A value that fits no
// format refers to nothing: with no other, a wrong format would make all keys dead.
func (s *sqliteSource) any() string {
	value, fits := s.column(), ""
	if s.Query != "" {
		value = "v"
	}
	if !s.joined() {
		fits = " AND " + sqlitedb.KeyOf(s.format, value) + " IS NOT NULL"
	}
	return "EXISTS (" + s.with() + "SELECT 1 FROM " + s.rows() + fits + ")"
}

// Answers answers for keys, in their order, in one statement over all sources.
// The emptiness of a source is asked in that statement too: a table that was
// emptied since it was looked at keeps every key. A key that can't be one of the
// pool is an error that names it.
func (l *SQLite) Answers(ctx context.Context, q sqlitedb.Querier, keys []blob.Key) ([]Answer, error) {
	if len(keys) == 0 || len(l.sources) == 0 {
		return make([]Answer, len(keys)), nil // nothing registered keeps everything
	}
	answers, err := l.answers(ctx, q, keys)
	if err != nil {
		return nil, fmt.Errorf("ask the liveness sources: %w", err)
	}
	return answers, nil
}

func (l *SQLite) answers(ctx context.Context, q sqlitedb.Querier, keys []blob.Key) ([]Answer, error) {
	for _, key := range keys {
		if err := l.kind.Valid(key); err != nil {
			return nil, err
		}
	}
	param, err := sqlitedb.KeyParam(keys)
	if err != nil {
		return nil, err
	}
	t := newTally(len(keys))
	_, err = sqlitedb.Collect(ctx, q, func(rows *sql.Rows) (struct{}, error) {
		var ord, n int
		var kind string
		if err := rows.Scan(&ord, &kind, &n); err != nil {
			return struct{}{}, err
		}
		return struct{}{}, t.add(ord, kind, n)
	}, l.answersSQL(), param)
	if err != nil {
		return nil, err
	}
	return t.finish()
}

// answersSQL is a union, not one row a key with a column a source: a source
// that is scanned is then scanned once. The keys' names are such as no
// application's SQL means by accident.
func (l *SQLite) answersSQL() string {
	const keys = "gc_agent_keys"
	native := sqlitedb.Native(l.kind, keys+".gc_agent_canon")
	var b strings.Builder
	fmt.Fprintf(&b, "WITH %s (gc_agent_ord, gc_agent_canon) AS MATERIALIZED (SELECT ord, canon FROM %s)", keys, sqlitedb.KeyList)
	fmt.Fprintf(&b, "\nSELECT 0, '%s', count(*) FROM %s", rowAsked, keys)
	for i := range l.sources {
		s := &l.sources[i]
		if !s.AllowEmpty {
			fmt.Fprintf(&b, "\nUNION ALL SELECT 0, '%s', %d WHERE NOT %s", rowEmpty, i, s.any())
		}
		fmt.Fprintf(&b, "\nUNION ALL SELECT gc_agent_ord, '%s', %d FROM %s WHERE %s", rowRefers, i, keys, s.refers(l.kind, KeyRef{Expr: native}))
	}
	return b.String()
}

// AllowEmpty lets sources that Empty returned refer to nothing, without
// protecting every key by it.
func (l *SQLite) AllowEmpty(empty []Info) {
	for i := range l.sources {
		l.sources[i].allowEmpty(empty)
	}
}

// Empty reads every source, to its first row that refers to anything, and
// returns those that have none and aren't allowed to.
func (l *SQLite) Empty(ctx context.Context, q sqlitedb.Querier) ([]Info, error) {
	var empty []Info
	for i := range l.sources {
		s := &l.sources[i]
		var has bool
		if err := q.QueryRow(ctx, "SELECT "+s.any()).Scan(&has); err != nil {
			return nil, fmt.Errorf("read source %s: %w", s.Name, err)
		}
		if !has && !s.AllowEmpty {
			empty = append(empty, s.info())
		}
	}
	return empty, nil
}

// Changed returns what isn't as it was resolved: tables of the sources that were
// dropped, renamed or given other columns, and the foreign keys to the targets.
func (l *SQLite) Changed(ctx context.Context, q sqlitedb.Querier) ([]string, error) {
	var prints []sqlitedb.Fingerprint
	for i := range l.sources {
		if s := &l.sources[i]; s.rel != nil {
			prints = append(prints, s.rel.Fingerprint())
		}
	}
	changed, err := sqlitedb.Changed(ctx, q, prints)
	if err != nil {
		return nil, err
	}
	now, err := readSQLiteForeignKeys(ctx, q, l.targets)
	if err != nil {
		return nil, err
	}
	for _, target := range l.targets {
		if !sameForeignKeys(target, l.foreignKeys, now) {
			changed = append(changed, "foreign keys to "+target.Table)
		}
	}
	return changed, nil
}
