package liveness

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
)

// sqliteForeignKey is a foreign key to a tier's table. It counts whether the
// application switches the enforcement on or not: the agent does.
type sqliteForeignKey struct {
	target   SQLiteTarget
	rel      string
	from, to []string // its columns and those they point at, in pairs
	onDelete string   // as SQL spells it
	// direct says that one of its columns holds the tier's key. Otherwise the key
	// is found by a join.
	direct bool
	column string // that column, else its first
}

// Without a list of columns a foreign key points at the primary key.
const selectSQLiteForeignKeys = `
SELECT m.name, f.id, f."from", coalesce(f."to", (SELECT p.name FROM pragma_table_info(?1, 'main') p WHERE p.pk = f.seq + 1), ''), upper(f.on_delete)
FROM main.sqlite_schema m
JOIN pragma_foreign_key_list(m.name, 'main') f
WHERE m.type = 'table' AND f."table" = ?1 COLLATE NOCASE
ORDER BY m.name, f.id, f.seq`

// readSQLiteForeignKeys returns the foreign keys to the targets.
func readSQLiteForeignKeys(ctx context.Context, q sqlitedb.Querier, targets []SQLiteTarget) ([]sqliteForeignKey, error) {
	var all []sqliteForeignKey
	for _, target := range targets {
		type part struct {
			rel, from, to, onDelete string
			id                      int
		}
		parts, err := sqlitedb.Collect(ctx, q, func(rows *sql.Rows) (part, error) {
			var p part
			err := rows.Scan(&p.rel, &p.id, &p.from, &p.to, &p.onDelete)
			return p, err
		}, selectSQLiteForeignKeys, target.Table)
		if err != nil {
			return nil, fmt.Errorf("look for foreign keys to %s: %w", target.Table, err)
		}
		for i, p := range parts {
			if i == 0 || p.rel != parts[i-1].rel || p.id != parts[i-1].id {
				all = append(all, sqliteForeignKey{target: target, rel: p.rel, onDelete: p.onDelete, column: p.from})
			}
			fk := &all[len(all)-1]
			fk.from, fk.to = append(fk.from, p.from), append(fk.to, p.to)
			if sqlitedb.SameName(p.to, target.Key) {
				fk.direct, fk.column = true, p.from
			}
		}
	}
	return all, nil
}

// sameForeignKeys says whether both lists have the same foreign keys to the
// target.
func sameForeignKeys(target SQLiteTarget, a, b []sqliteForeignKey) bool {
	to := func(all []sqliteForeignKey) (fks []sqliteForeignKey) {
		for _, fk := range all {
			if fk.target == target {
				fks = append(fks, fk)
			}
		}
		return fks
	}
	return reflect.DeepEqual(to(a), to(b))
}

// join returns the condition that row v of the tier's table is the one that row
// s refers to. A foreign key compares in the collation and affinity of the column
// that it points at: that stands on the left.
func (fk *sqliteForeignKey) join() string {
	conds := make([]string, len(fk.from))
	for i := range fk.from {
		conds[i] = "v." + sqlitedb.Ident(fk.to[i]) + " = s." + sqlitedb.Ident(fk.from[i])
	}
	return strings.Join(conds, " AND ")
}

// key is the tier's key column in a join.
func (fk *sqliteForeignKey) key() string { return "v." + sqlitedb.Ident(fk.target.Key) }

// String names it for messages: in SQLite a foreign key has no name.
func (fk *sqliteForeignKey) String() string {
	return "foreign key of " + fk.rel + "." + strings.Join(fk.from, ", ")
}

// foreignKeyOf returns a foreign key that the source's own column is part of:
// one that holds the key in that column, else one that leads to it.
func (r *sqliteResolver) foreignKeyOf(s *sqliteSource) *sqliteForeignKey {
	var found *sqliteForeignKey
	for i := range r.foreignKeys {
		fk := &r.foreignKeys[i]
		named := func(column string) bool { return sqlitedb.SameName(column, s.col.Name) }
		switch {
		case fk.rel != s.rel.Name:
		case fk.direct && named(fk.column):
			return fk
		case !fk.direct && slices.ContainsFunc(fk.from, named) && found == nil:
			found = fk
		}
	}
	return found
}

// checkForeignKeys refuses a foreign key that no source covers, and one whose
// rows a delete would take along although where says that they don't refer.
func (r *sqliteResolver) checkForeignKeys(sources []sqliteSource) {
	for i := range r.foreignKeys {
		fk := &r.foreignKeys[i]
		s := coveringSQLite(fk, sources)
		switch {
		case s == nil:
			r.found.Add(finding.Misconfigured, "liveness", "%s refers to %s.%s, and no source registers it; add {table: %s, column: %s}",
				fk, fk.target.Table, strings.Join(fk.to, ", "), fk.rel, fk.column)
			continue
		case fk.direct && !asItIs(s.format):
			r.found.Add(finding.Misconfigured, s.Path+".format", "by its foreign key the values of %s.%s are keys as they are; leave format out", s.rel, s.col.Name)
		case s.Where != "" && slices.Contains([]string{"CASCADE", "SET NULL", "SET DEFAULT"}, fk.onDelete):
			r.found.Add(finding.Misconfigured, s.Path+".where", "%s takes its rows along when a blob goes (ON DELETE %s), "+
				"those that where leaves out too; make it ON DELETE NO ACTION or RESTRICT, or leave where out", fk, fk.onDelete)
		case s.Where != "" && !s.held:
			r.found.Add(finding.Warning, s.Path+".where", "it has no effect: the %s holds a blob for the rows that it leaves out as well", fk)
		}
		s.held = true
	}
}

// coveringSQLite returns the source that reads what the foreign key holds, or
// nil.
func coveringSQLite(fk *sqliteForeignKey, sources []sqliteSource) *sqliteSource {
	for i := range sources {
		s := &sources[i]
		switch {
		case s.rel == nil || s.rel.Name != fk.rel:
		case fk.direct && sqlitedb.SameName(s.col.Name, fk.column), !fk.direct && s.foreignKey == fk:
			return s
		}
	}
	return nil
}

// asItIs says whether a value of the format is the key itself; an unresolved
// format has its finding already.
func asItIs(f blob.Format) bool {
	switch f.Placeholder() {
	case blob.Hex, blob.UpperHex, blob.Base64:
		return false
	default:
		return f.Prefix() == "" && f.Suffix() == ""
	}
}
