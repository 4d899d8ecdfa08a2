package pgdb

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Relation is what the catalogue says about a table, a view or the like.
type Relation struct {
	OID     uint32
	Schema  string
	Name    string
	Kind    string // pg_class.relkind
	Columns []Column
	// RowSecurity says that a policy would hide rows from this role.
	RowSecurity bool
}

// Column is what the catalogue says about a column. Base names the type below
// all domains.
type Column struct {
	Name    string
	Num     int16
	TypeOID uint32
	Type    string // as Postgres spells it
	Base    string // pg_type.typname, "enum" for any enum
	NotNull bool
	// Collation is 0 where the type has none, and CollationSQL, its quoted and
	// qualified name, then empty. Deterministic says that equal means the same
	// bytes.
	Collation     uint32
	CollationSQL  string
	Deterministic bool
}

// DefaultCollation is the collation of a text parameter: the database's own.
const DefaultCollation = 100

// ErrNoRelation means that the catalogue has no relation of that name.
var ErrNoRelation = errors.New("no such relation")

// SQL returns the quoted, qualified name.
func (r *Relation) SQL() string { return Ident(r.Schema, r.Name) }

// String returns the qualified name for messages.
func (r *Relation) String() string { return r.Schema + "." + r.Name }

// Column returns the column of that exact name.
func (r *Relation) Column(name string) (Column, bool) {
	for _, c := range r.Columns {
		if c.Name == name {
			return c, true
		}
	}
	return Column{}, false
}

// IsTable says whether the relation stores rows of its own: a table or a
// partitioned one.
func (r *Relation) IsTable() bool { return r.Kind == "r" || r.Kind == "p" }

const selectRelation = `
SELECT c.oid, c.relkind::text, pg_catalog.row_security_active(c.oid)
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = $2 AND c.relkind IN ('r', 'p', 'v', 'm', 'f')`

// A domain's base type is found by walking down typbasetype.
const selectColumns = `
WITH RECURSIVE walk AS (
	SELECT a.attnum, a.atttypid AS typ
	FROM pg_catalog.pg_attribute a
	WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
	UNION ALL
	SELECT w.attnum, t.typbasetype
	FROM walk w JOIN pg_catalog.pg_type t ON t.oid = w.typ
	WHERE t.typtype = 'd'
)
SELECT a.attname::text, a.attnum, a.atttypid, pg_catalog.format_type(a.atttypid, a.atttypmod),
	CASE WHEN t.typtype = 'e' THEN 'enum' ELSE t.typname::text END,
	a.attnotnull, a.attcollation,
	coalesce((SELECT format('%I.%I', n.nspname, l.collname) FROM pg_catalog.pg_namespace n WHERE n.oid = l.collnamespace), ''),
	coalesce(l.collisdeterministic, true)
FROM pg_catalog.pg_attribute a
JOIN walk w ON w.attnum = a.attnum
JOIN pg_catalog.pg_type t ON t.oid = w.typ AND t.typtype <> 'd'
LEFT JOIN pg_catalog.pg_collation l ON l.oid = a.attcollation
WHERE a.attrelid = $1
ORDER BY a.attnum`

// LookupRelation reads a relation from the catalogue; ErrNoRelation when there
// is none.
func LookupRelation(ctx context.Context, q Querier, schema, name string) (*Relation, error) {
	r := &Relation{Schema: schema, Name: name}
	err := q.QueryRow(ctx, selectRelation, schema, name).Scan(&r.OID, &r.Kind, &r.RowSecurity)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("%s.%s: %w", schema, name, ErrNoRelation)
	}
	if err != nil {
		return nil, fmt.Errorf("look up %s.%s: %w", schema, name, err)
	}
	rows, err := q.Query(ctx, selectColumns, r.OID)
	if err != nil {
		return nil, fmt.Errorf("look up the columns of %s.%s: %w", schema, name, err)
	}
	r.Columns, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (Column, error) {
		var c Column
		err := row.Scan(&c.Name, &c.Num, &c.TypeOID, &c.Type, &c.Base, &c.NotNull, &c.Collation, &c.CollationSQL, &c.Deterministic)
		return c, err
	})
	if err != nil {
		return nil, fmt.Errorf("look up the columns of %s.%s: %w", schema, name, err)
	}
	return r, nil
}

// Fingerprint says which object, and which column of it, a statement was built
// for, so that a later transaction can tell whether it is still that one.
type Fingerprint struct {
	Relation  string // quoted and qualified
	OID       uint32
	Column    string
	ColumnNum int16
	TypeOID   uint32
	Collation uint32
}

// FingerprintOf returns the fingerprint of a relation's column.
func FingerprintOf(r *Relation, c Column) Fingerprint {
	return Fingerprint{Relation: r.SQL(), OID: r.OID, Column: c.Name, ColumnNum: c.Num, TypeOID: c.TypeOID, Collation: c.Collation}
}

const changedFingerprints = `
SELECT v.rel || '.' || v.col
FROM unnest($1::text[], $2::oid[], $3::text[], $4::int2[], $5::oid[], $6::oid[]) AS v (rel, oid, col, num, typ, coll)
WHERE NOT EXISTS (
	SELECT 1 FROM pg_catalog.pg_attribute a
	WHERE a.attrelid = to_regclass(v.rel) AND a.attrelid = v.oid AND a.attnum = v.num
		AND a.attname = v.col AND a.atttypid = v.typ AND a.attcollation = v.coll AND NOT a.attisdropped)`

// Changed returns those of the columns that aren't what they were.
func Changed(ctx context.Context, q Querier, prints []Fingerprint) ([]string, error) {
	if len(prints) == 0 {
		return nil, nil
	}
	var rels, cols []string
	var oids, types, collations []uint32
	var nums []int16
	for _, p := range prints {
		rels, oids, cols = append(rels, p.Relation), append(oids, p.OID), append(cols, p.Column)
		nums, types, collations = append(nums, p.ColumnNum), append(types, p.TypeOID), append(collations, p.Collation)
	}
	rows, err := q.Query(ctx, changedFingerprints, rels, oids, cols, nums, types, collations)
	if err != nil {
		return nil, fmt.Errorf("compare tables with the catalogue: %w", err)
	}
	changed, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("compare tables with the catalogue: %w", err)
	}
	return changed, nil
}

const serverState = `SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean, current_setting('client_encoding'), pg_catalog.quote_ident(current_user)`

// Unfit says in a line why a sweep must not rely on what the connection shows:
// the server is a standby or read-only, or text is recoded on the way. It is
// empty where nothing speaks against it.
func Unfit(ctx context.Context, q Querier) (string, error) {
	var standby, readOnly bool
	var encoding, role string
	if err := q.QueryRow(ctx, serverState).Scan(&standby, &readOnly, &encoding, &role); err != nil {
		return "", fmt.Errorf("ask the server for its state: %w", err)
	}
	switch {
	case standby:
		return "the server is a standby, which may not show a reference yet; point the database's url at the primary", nil
	case readOnly:
		return "the server is read-only (default_transaction_read_only is on); make it writable or point the url at one that is", nil
	case encoding != "UTF8":
		return "the connection's client_encoding is " + encoding + ", so that text would be misread; run: ALTER ROLE " + role + " SET client_encoding = 'UTF8'", nil
	default:
		return "", nil
	}
}

const selectDescendants = `
WITH RECURSIVE tree AS (
	SELECT $1::oid AS oid
	UNION
	SELECT i.inhrelid FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid
)
SELECT c.oid, c.relkind::text, c.oid::regclass::text
FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.oid`

// Part is a table, or one of those whose rows are read with it.
type Part struct {
	OID  uint32
	Kind string // pg_class.relkind
	Name string // qualified
}

// Parts returns the relation itself, its partitions and all that inherits
// from it.
func Parts(ctx context.Context, q Querier, r *Relation) ([]Part, error) {
	rows, err := q.Query(ctx, selectDescendants, r.OID)
	if err != nil {
		return nil, fmt.Errorf("look for the partitions of %s: %w", r, err)
	}
	parts, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Part])
	if err != nil {
		return nil, fmt.Errorf("look for the partitions of %s: %w", r, err)
	}
	return parts, nil
}

// Now reads the host's clock as nanoseconds since the epoch: clock_timestamp(),
// which goes on inside a transaction. Its resolution is a microsecond.
const Now = `(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint * 1000`
