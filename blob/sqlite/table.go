package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
)

// Config names a table tier as it is registered. Path is where it stands in
// the configuration.
type Config struct {
	Path   string
	Table  string
	Column string
	Size   string // optional column with the blob's size in bytes
}

// Table is a table tier that was found in the catalogue and is fit to be one.
type Table struct {
	rel  *sqlitedb.Relation
	key  sqlitedb.Column
	kind blob.Kind
	size string // SQL for a row's size
	// rowID says that the key is the row's own number: NOT NULL, unique and an
	// integer whatever the declaration says.
	rowID bool
}

// Resolve looks the tier up in the catalogue and says everything that is wrong
// with it, rows whose key isn't of the column's kind included. The table is nil
// when the kind of its keys isn't known. With a finding that is worse than a
// warning it serves to judge the rest of a configuration, and nothing else.
func Resolve(ctx context.Context, q sqlitedb.Querier, cfg Config) (*Table, finding.List, error) {
	var found finding.List
	rel, err := sqlitedb.LookupRelation(ctx, q, cfg.Table)
	switch {
	case errors.Is(err, sqlitedb.ErrNoRelation):
		found.Add(finding.Misconfigured, cfg.Path+".table", "there is no table %s in the database; create it or correct the name", cfg.Table)
	case sqlitedb.Refused(err):
		found.Add(finding.Misconfigured, cfg.Path+".table", "%s can't be read: %v", cfg.Table, err)
	case err != nil:
		return nil, nil, err
	case !rel.IsTable():
		found.Add(finding.Misconfigured, cfg.Path+".table", "%s is a %s; name the ordinary table that stores the blobs", rel, kindName(rel.Kind))
	case reserved(rel.Name):
		found.Add(finding.Misconfigured, cfg.Path+".table", "%s isn't the application's: name the table that stores the blobs", rel)
	}
	if len(found) > 0 {
		return nil, found, nil
	}
	t := &Table{rel: rel, size: "0"}
	if err := t.resolveKey(ctx, q, cfg, &found); err != nil {
		return nil, nil, err
	}
	t.resolveSize(cfg, &found)
	if t.kind == 0 {
		return nil, found, nil
	}
	return t, found, nil
}

func kindName(kind string) string {
	switch kind {
	case "virtual":
		return "virtual table"
	case "shadow":
		return "shadow table of a virtual one"
	default:
		return kind
	}
}

// reserved says whether the table is the agent's own or SQLite's.
func reserved(name string) bool {
	return sqlitedb.SameName(name, "gc_window") || len(name) >= 7 && sqlitedb.SameName(name[:7], "sqlite_")
}

func (t *Table) resolveKey(ctx context.Context, q sqlitedb.Querier, cfg Config, found *finding.List) error {
	path := cfg.Path + ".column"
	encoding, err := sqlitedb.Encoding(ctx, q)
	if err != nil {
		return err
	}
	if encoding != "UTF-8" {
		found.Add(finding.Misconfigured, cfg.Path, "the database stores text as %s; only UTF-8 is supported", encoding)
		return nil
	}
	col, ok := t.rel.Column(cfg.Column)
	if !ok {
		found.Add(finding.Misconfigured, path, "table %s has no column %q; correct the name", t.rel, cfg.Column)
		return nil
	}
	t.key = col
	if t.kind = kindOf(col.Class); t.kind == 0 {
		found.Add(finding.Misconfigured, path, "%s.%s is declared %s; a key column is declared BLOB, TEXT, UUID or INTEGER (or a type whose name contains INT, CHAR or CLOB)", t.rel, col.Name, col.Type)
		return nil
	}
	if err := t.checkUnique(ctx, q, path, found); err != nil {
		return err
	}
	if err := t.checkCollation(ctx, q, path, found); err != nil {
		return err
	}
	if found.Worst() > finding.Warning {
		return nil
	}
	return t.checkStorage(ctx, q, path, found)
}

func kindOf(class sqlitedb.Class) blob.Kind {
	switch class {
	case sqlitedb.ClassInt:
		return blob.KindInt
	case sqlitedb.ClassText, sqlitedb.ClassUUID:
		return blob.KindText
	case sqlitedb.ClassBytes, sqlitedb.ClassAny:
		return blob.KindBytes
	default:
		return 0
	}
}

// checkUnique asks for what makes the column a key: NOT NULL, and an index that
// holds each value once.
func (t *Table) checkUnique(ctx context.Context, q sqlitedb.Querier, path string, found *finding.List) error {
	indexes, err := uniqueIndexes(ctx, q, t.rel)
	if err != nil {
		return err
	}
	primary := t.rel.PrimaryKey()
	// Any other primary key than the row's number has an index.
	t.rowID = !t.rel.WithoutRowID && len(primary) == 1 && primary[0] == t.key && !slices.ContainsFunc(indexes, index.isPrimary)
	if t.rowID {
		return nil
	}
	if !t.key.NotNull && (!t.rel.WithoutRowID || t.key.PrimaryKey == 0) {
		found.Add(finding.Misconfigured, path, "%s.%s may be NULL; a key column must be NOT NULL (a PRIMARY KEY alone doesn't say so in SQLite)", t.rel, t.key.Name)
	}
	var other string // a unique index under which different keys are equal
	for _, i := range indexes {
		if i.columns == 1 && sqlitedb.SameName(i.column, t.key.Name) && !i.partial {
			if i.collation == binary {
				return nil
			}
			other = i.collation
		}
	}
	if other != "" {
		found.Add(finding.Misconfigured, path, "%s.%s is unique in the collation %s, under which different keys are equal; a key column needs a unique index in BINARY", t.rel, t.key.Name, other)
		return nil
	}
	found.Add(finding.Misconfigured, path, "%s.%s isn't unique; a key column needs a primary key, a unique constraint or a unique index of its own", t.rel, t.key.Name)
	return nil
}

const binary = "BINARY"

// index is a unique index and the first of its columns.
type index struct {
	origin    string // pk, u, c
	partial   bool
	columns   int
	column    string // empty for an expression
	collation string
}

func (i index) isPrimary() bool { return i.origin == "pk" }

const selectUniqueIndexes = `
SELECT l.origin, l.partial,
	(SELECT count(*) FROM pragma_index_xinfo(l.name, 'main') x WHERE x.key),
	coalesce(x.name, ''), upper(x.coll)
FROM pragma_index_list(?1, 'main') l
JOIN pragma_index_xinfo(l.name, 'main') x ON x.seqno = 0
WHERE l."unique"`

func uniqueIndexes(ctx context.Context, q sqlitedb.Querier, rel *sqlitedb.Relation) ([]index, error) {
	indexes, err := sqlitedb.Collect(ctx, q, func(rows *sql.Rows) (index, error) {
		var i index
		err := rows.Scan(&i.origin, &i.partial, &i.columns, &i.column, &i.collation)
		return i, err
	}, selectUniqueIndexes, rel.Name)
	if err != nil {
		return nil, fmt.Errorf("look for a unique index on %s: %w", rel, err)
	}
	return indexes, nil
}

// checkCollation refuses a column that compares different texts as equal:
// deleting one would delete the other. A unique index may have another collation
// than its column.
func (t *Table) checkCollation(ctx context.Context, q sqlitedb.Querier, path string, found *finding.List) error {
	if t.kind != blob.KindText {
		return nil
	}
	loose, err := t.rel.Loose(ctx, q, t.key)
	switch {
	case sqlitedb.Refused(err):
		found.Add(finding.Misconfigured, path, "%s.%s can't be compared: %v; a key column has the collation BINARY", t.rel, t.key.Name, err)
	case err != nil:
		return err
	case loose:
		found.Add(finding.Misconfigured, path, "%s.%s has a collation (NOCASE or RTRIM) under which different keys are equal; a key column has the collation BINARY", t.rel, t.key.Name)
	}
	return nil
}

// checkStorage looks for a row whose key isn't stored as the column is declared.
// NULLs and numbers sort before texts, and those before BLOBs, so that the unique
// index has such rows at its ends; only fractions stand among the integers.
func (t *Table) checkStorage(ctx context.Context, q sqlitedb.Querier, path string, found *finding.List) error {
	if t.rowID || (t.rel.Strict && t.key.Class != sqlitedb.ClassAny) {
		return nil
	}
	var class string
	var odd []string
	switch t.kind {
	case blob.KindInt:
		class, odd = "integer", []string{"typeof(%s) <> 'integer'"}
	case blob.KindText:
		class, odd = "text", []string{"%s < ''", "%s >= x''"}
	default:
		class, odd = "blob", []string{"%s < x''"}
	}
	for _, cond := range odd {
		where := strings.ReplaceAll(cond, "%s", t.keyColumn())
		var stored, example string
		err := q.QueryRow(ctx, `SELECT typeof(`+t.keyColumn()+`), substr(quote(`+t.keyColumn()+`), 1, 80) FROM `+t.rel.SQL()+` p WHERE `+where+` LIMIT 1`).Scan(&stored, &example)
		if errors.Is(err, sql.ErrNoRows) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look for odd keys in %s: %w", t, err)
		}
		found.Add(finding.Misconfigured, path, "%s.%s holds %s, stored as %s; every key must be stored as %s", t.rel, t.key.Name, example, stored, class)
		return nil
	}
	return nil
}

func (t *Table) resolveSize(cfg Config, found *finding.List) {
	if cfg.Size == "" {
		return
	}
	col, ok := t.rel.Column(cfg.Size)
	switch {
	case !ok:
		found.Add(finding.Misconfigured, cfg.Path+".size", "table %s has no column %q; correct the name or leave size out", t.rel, cfg.Size)
	case col.Class != sqlitedb.ClassInt:
		found.Add(finding.Misconfigured, cfg.Path+".size", "%s.%s is declared %q; a size column is declared INTEGER", t.rel, col.Name, col.Type)
	default:
		size := sqlitedb.Ident(col.Name)
		t.size = `CASE typeof(` + size + `) WHEN 'integer' THEN ` + size + ` ELSE 0 END`
	}
}

// Kind returns the kind of the table's keys.
func (t *Table) Kind() blob.Kind { return t.kind }

// Name returns the table's name as the catalogue has it.
func (t *Table) Name() string { return t.rel.Name }

// KeyColumn returns the name of the key column as the catalogue has it.
func (t *Table) KeyColumn() string { return t.key.Name }

// Same says whether the table is still what was resolved. It isn't once it was
// dropped, renamed or altered.
func (t *Table) Same(ctx context.Context, q sqlitedb.Querier) (bool, error) {
	changed, err := sqlitedb.Changed(ctx, q, []sqlitedb.Fingerprint{t.rel.Fingerprint()})
	return len(changed) == 0 && err == nil, err
}

// String returns the table's name for messages.
func (t *Table) String() string { return t.rel.String() }
