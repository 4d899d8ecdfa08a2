package liveness

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// foreignKey is a foreign key to a tier's table.
type foreignKey struct {
	oid        uint32
	constraint string
	target     Target
	rel        uint32
	relName    string   // qualified
	from, to   []string // its columns and those they point at, in pairs
	onDelete   string   // confdeltype
	// direct says that one of its columns holds the tier's key. Otherwise the key
	// is found by a join.
	direct bool
	column string // that column, else its first
	gap    string // why it stops no reference from appearing; empty when it does
	state  string // what else of it can be altered: whether it is valid and when it is checked
}

// Of the constraints that a partitioned table hands down to its partitions only
// the topmost counts. conenforced came with Postgres 18; to_jsonb reads it where
// it exists. A disabled trigger, on either side or on a partition, lets
// references through. A row whose foreign key is NULL in part isn't checked,
// unless it is MATCH FULL.
const selectForeignKeys = `
WITH RECURSIVE fk AS (
	SELECT c.* FROM pg_catalog.pg_constraint c
	WHERE c.contype = 'f' AND c.confrelid = ANY ($1::oid[])
), own AS (
	SELECT fk.oid AS top, fk.oid FROM fk
	UNION
	SELECT own.top, c.oid FROM own JOIN pg_catalog.pg_constraint c ON c.conparentid = own.oid
)
SELECT c.oid, c.conname::text, c.conrelid, c.conrelid::regclass::text, c.confdeltype::text,
	(SELECT array_agg(a.attname::text ORDER BY k.ord)
	 FROM unnest(c.conkey) WITH ORDINALITY k (num, ord)
	 JOIN pg_catalog.pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.num),
	(SELECT array_agg(a.attname::text ORDER BY k.ord)
	 FROM unnest(c.confkey) WITH ORDINALITY k (num, ord)
	 JOIN pg_catalog.pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.num),
	(SELECT array_agg(a.attnotnull OR c.confmatchtype = 'f' ORDER BY k.ord)
	 FROM unnest(c.conkey) WITH ORDINALITY k (num, ord)
	 JOIN pg_catalog.pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.num),
	coalesce((to_jsonb(c) ->> 'conenforced')::boolean, true),
	EXISTS (
		SELECT 1 FROM own JOIN pg_catalog.pg_trigger g ON g.tgconstraint = own.oid
		WHERE own.top = c.oid AND g.tgenabled NOT IN ('O', 'A')),
	concat_ws(' ', c.convalidated, c.condeferrable, c.condeferred)
FROM fk c
WHERE NOT EXISTS (SELECT 1 FROM fk parent WHERE parent.oid = c.conparentid)
ORDER BY 4, 2`

// readForeignKeys returns the foreign keys to the targets.
func readForeignKeys(ctx context.Context, q pgdb.Querier, targets []Target) ([]foreignKey, error) {
	var all []foreignKey
	for _, target := range targets {
		// A partition or an inheritance child can be referred to on its own.
		parts, err := pgdb.Parts(ctx, q, target.Relation)
		if err != nil {
			return nil, err
		}
		var tables []uint32
		for _, part := range parts {
			tables = append(tables, part.OID)
		}
		rows, err := q.Query(ctx, selectForeignKeys, tables)
		if err != nil {
			return nil, fmt.Errorf("look for foreign keys to %s: %w", target.Relation, err)
		}
		fks, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (foreignKey, error) {
			return scanForeignKey(row, target)
		})
		if err != nil {
			return nil, fmt.Errorf("look for foreign keys to %s: %w", target.Relation, err)
		}
		all = append(all, fks...)
	}
	return all, nil
}

func scanForeignKey(row pgx.CollectableRow, target Target) (foreignKey, error) {
	fk := foreignKey{target: target}
	var checked []bool // the row is checked, or NULL altogether, when the column is NULL
	var enforced, disabled bool
	err := row.Scan(&fk.oid, &fk.constraint, &fk.rel, &fk.relName, &fk.onDelete, &fk.from, &fk.to, &checked, &enforced, &disabled, &fk.state)
	if err != nil {
		return fk, err
	}
	fk.column = fk.from[0]
	if at := slices.Index(fk.to, target.Key.Name); at >= 0 {
		fk.direct, fk.column = true, fk.from[at]
		checked[at] = true // a row without a key refers to nothing
	}
	switch {
	case !enforced:
		fk.gap = "it is NOT ENFORCED"
	case disabled:
		fk.gap = "a trigger of it is disabled (ALTER TABLE ... ENABLE TRIGGER ALL)"
	case fk.direct && slices.Contains(checked, false):
		fk.gap = "it has several columns, and doesn't check a row in which one is NULL; make them NOT NULL or the key MATCH FULL"
	}
	return fk, nil
}

func (fk *foreignKey) String() string { return "foreign key " + fk.constraint + " of " + fk.relName }

// differing returns the names of the foreign keys that one list has and the
// other hasn't, or has otherwise.
func differing(a, b []foreignKey) []string {
	same := func(x, y foreignKey) bool {
		return x.oid == y.oid && x.constraint == y.constraint && x.state == y.state && x.rel == y.rel && x.target.Relation.OID == y.target.Relation.OID &&
			slices.Equal(x.from, y.from) && slices.Equal(x.to, y.to) && x.onDelete == y.onDelete && x.gap == y.gap
	}
	var names []string
	for _, lists := range [][2][]foreignKey{{a, b}, {b, a}} {
		for _, fk := range lists[0] {
			missing := !slices.ContainsFunc(lists[1], func(other foreignKey) bool { return same(fk, other) })
			if missing && !slices.Contains(names, fk.String()) {
				names = append(names, fk.String())
			}
		}
	}
	return names
}

// join returns the condition that row v of the tier's table is the one that row
// s refers to.
func (fk *foreignKey) join() string {
	conds := make([]string, len(fk.from))
	for i := range fk.from {
		conds[i] = "v." + pgdb.Ident(fk.to[i]) + " = s." + pgdb.Ident(fk.from[i])
	}
	return strings.Join(conds, " AND ")
}

// foreignKeyOf returns a foreign key of the source's own table that its column
// is part of: one that holds the key in that column, else one that leads to it
// by the fewest columns.
func (r *pgResolver) foreignKeyOf(s *pgSource) *foreignKey {
	var found *foreignKey
	for i := range r.foreignKeys {
		fk := &r.foreignKeys[i]
		holds := fk.direct && fk.column == s.col.Name
		if fk.rel == s.rel.OID && (holds || !fk.direct && slices.Contains(fk.from, s.col.Name)) && fk.betterThan(found) {
			found = fk
		}
	}
	return found
}

func (fk *foreignKey) betterThan(other *foreignKey) bool {
	switch {
	case other == nil:
		return true
	case fk.direct != other.direct:
		return fk.direct
	case (fk.gap == "") != (other.gap == ""):
		return fk.gap == ""
	default:
		return len(fk.from) < len(other.from)
	}
}

// checkForeignKeys refuses a foreign key that no source covers, and one whose
// rows a delete would take along although where says that they don't refer.
func (r *pgResolver) checkForeignKeys(sources []pgSource) {
	warned := map[*pgSource]bool{}
	for i := range r.foreignKeys {
		fk := &r.foreignKeys[i]
		s := covering(fk, sources)
		switch {
		case s == nil:
			r.found.Add(finding.Misconfigured, "liveness", "foreign key %s of %s (%s) refers to %s (%s), and no source registers it; add {table: %s, column: %s}",
				fk.constraint, fk.relName, strings.Join(fk.from, ", "), fk.target.Relation, strings.Join(fk.to, ", "), fk.relName, fk.column)
			continue
		case fk.direct && s.value != 0 && s.format.Placeholder() != 0 && !s.verbatim():
			r.found.Add(finding.Misconfigured, s.Path+".format", "by foreign key %s the values of %s.%s are keys as they are; leave format out", fk.constraint, s.rel, s.col.Name)
		case r.opts.without.HeldRows:
			continue
		case s.Where != "" && slices.Contains([]string{"c", "n", "d"}, fk.onDelete):
			r.found.Add(finding.Misconfigured, s.Path+".where", "foreign key %s takes its rows along when a blob goes (ON DELETE CASCADE, SET NULL or SET DEFAULT), "+
				"those that where leaves out too; make it ON DELETE NO ACTION or RESTRICT, or leave where out", fk.constraint)
		case s.Where != "" && !warned[s]:
			warned[s] = true
			r.found.Add(finding.Warning, s.Path+".where", "it has no effect: foreign key %s holds a blob for the rows that it leaves out as well", fk.constraint)
		}
	}
}

// held says whether a foreign key holds rows of the source.
func (r *pgResolver) held(s *pgSource) bool {
	return !r.opts.without.HeldRows &&
		slices.ContainsFunc(r.foreignKeys, func(fk foreignKey) bool { return covering(&fk, []pgSource{*s}) != nil })
}

// verbatim says that a value of the source is the key itself.
func (s *pgSource) verbatim() bool {
	return s.format.Placeholder() == s.value.defaultFormat().Placeholder() && s.format.Prefix() == "" && s.format.Suffix() == ""
}

// covering returns the source that reads what the foreign key holds, or nil. A
// partition's foreign key is covered by a source over the whole table where the
// column holds keys; a join has to be over the source's own.
func covering(fk *foreignKey, sources []pgSource) *pgSource {
	for i := range sources {
		s := &sources[i]
		switch {
		case s.rel == nil:
		case fk.direct && s.col.Name == fk.column && !s.joined() &&
			slices.ContainsFunc(s.parts, func(part pgdb.Part) bool { return part.OID == fk.rel }):
			return s
		case !fk.direct && s.joined() && s.foreignKey.impliedBy(fk):
			return s
		}
	}
	return nil
}

// impliedBy says that every row that other holds is one that a join by fk finds.
func (fk *foreignKey) impliedBy(other *foreignKey) bool {
	if fk.rel != other.rel || fk.target.Relation.OID != other.target.Relation.OID {
		return false
	}
	for i := range fk.from {
		at := slices.Index(other.from, fk.from[i])
		if at < 0 || other.to[at] != fk.to[i] {
			return false
		}
	}
	return true
}
