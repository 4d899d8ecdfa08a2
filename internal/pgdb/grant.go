package pgdb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Grant is a right on one object of a database. Whoever needs rights says so in
// Grants: what a check finds missing and what `gc-agent grants` prints is then one
// list, in one spelling.
type Grant struct {
	Right  string // SELECT, USAGE and the like
	Column string // its bare name; empty for the object as a whole
	// AnyColumn says that the right on any one column does. Column names the one to
	// ask for.
	AnyColumn bool
	On        Object
	// Why ends a sentence that begins with "to".
	Why string
	// Verb says what the role may not do without it, where Right alone doesn't.
	Verb string
	// Optional says that without it something is slower or said less well, and
	// nothing is wrong.
	Optional bool
}

// Object is what a right is on.
type Object struct {
	Kind   ObjectKind `json:"kind"`
	Schema string     `json:"schema"` // of a table or a function
	Name   string     `json:"name"`
	Args   string     `json:"args"` // types of a function's, as the catalogue spells them
}

// ObjectKind says what an object is. The values are in the order in which rights
// are granted.
type ObjectKind int

// The kinds. A table is anything with columns.
const (
	DatabaseObject ObjectKind = iota
	SchemaObject
	TableObject
	FunctionObject
)

// OnSchema is the schema of that name.
func OnSchema(name string) Object { return Object{Kind: SchemaObject, Name: name} }

// OnTable is the table, or the like, of that name.
func OnTable(schema, name string) Object {
	return Object{Kind: TableObject, Schema: schema, Name: name}
}

// SQL returns the object as a GRANT names it.
func (o Object) SQL() string {
	switch o.Kind {
	case DatabaseObject:
		return "DATABASE " + Ident(o.Name)
	case SchemaObject:
		return "SCHEMA " + Ident(o.Name)
	case FunctionObject:
		return "FUNCTION " + Ident(o.Schema, o.Name) + "(" + o.Args + ")"
	default:
		return Ident(o.Schema, o.Name)
	}
}

// String returns the object's name for messages.
func (o Object) String() string {
	switch o.Kind {
	case DatabaseObject:
		return "database " + o.Name
	case SchemaObject:
		return "schema " + o.Name
	case FunctionObject:
		return "function " + o.Schema + "." + o.Name
	default:
		return o.Schema + "." + o.Name
	}
}

// Usage is what it takes to name anything that stands in the schema.
func Usage(schema string) Grant {
	return Grant{Right: "USAGE", On: OnSchema(schema), Why: "reach what stands in it"}
}

// To returns the statement that grants the right to a role, whose name is given
// as a statement spells it. It ends without a semicolon.
func (g Grant) To(role string) string {
	right := g.Right
	if g.Column != "" {
		right += " (" + Ident(g.Column) + ")"
	}
	return "GRANT " + right + " ON " + g.On.SQL() + " TO " + role
}

// ImpliedBy says that whoever has the other right has this one, or needs it no
// more.
func (g Grant) ImpliedBy(other Grant) bool {
	if g.Right != other.Right || g.On != other.On || other.Optional || g.Column == other.Column && g.AnyColumn == other.AnyColumn {
		return false
	}
	return other.Column == "" || g.AnyColumn && !other.AnyColumn
}

// Grantee is the role that rights are asked about.
type Grantee struct {
	Name     string
	SQL      string // as a statement spells it
	OID      uint32 // 0 where there is no such role
	Database string // that it was looked up in
}

// LookupGrantee looks up the role of that name, or the current one where it is
// empty. A role that isn't there is no error: it has no right at all.
func LookupGrantee(ctx context.Context, q Querier, name string) (Grantee, error) {
	const query = `SELECT name, quote_ident(name), coalesce((SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = name), 0), current_database()
		FROM (SELECT coalesce(nullif($1::text, ''), current_user::text) AS name) g`
	var g Grantee
	if err := q.QueryRow(ctx, query, name).Scan(&g.Name, &g.SQL, &g.OID, &g.Database); err != nil {
		return g, fmt.Errorf("look up the role: %w", err)
	}
	return g, nil
}

// Standing is what the catalogue says of one right.
type Standing struct {
	Held bool
	// Owned says that the object is the role's own, which gives it the right unless
	// it was taken away.
	Owned bool
}

const selectStandings = `
SELECT CASE g."Kind"
	WHEN 0 THEN has_database_privilege($1::oid, g."Name", g."Right")
	WHEN 1 THEN EXISTS (SELECT 1 FROM pg_catalog.pg_namespace n WHERE n.nspname = g."Name" AND has_schema_privilege($1::oid, n.oid, g."Right"))
	WHEN 2 THEN EXISTS (
		SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = g."Schema" AND c.relname = g."Name" AND (
			has_table_privilege($1::oid, c.oid, g."Right")
			OR CASE WHEN g."Any" THEN has_any_column_privilege($1::oid, c.oid, g."Right")
				WHEN g."Column" <> '' THEN EXISTS (
					SELECT 1 FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attname = g."Column"
						AND has_column_privilege($1::oid, c.oid, a.attnum, g."Right"))
				ELSE false END))
	ELSE EXISTS (
		SELECT 1 FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = g."Schema" AND p.proname = g."Name" AND oidvectortypes(p.proargtypes) = g."Args"
			AND has_function_privilege($1::oid, p.oid, g."Right"))
	END,
	CASE g."Kind"
	WHEN 0 THEN (SELECT d.datdba FROM pg_catalog.pg_database d WHERE d.datname = g."Name")
	WHEN 1 THEN (SELECT n.nspowner FROM pg_catalog.pg_namespace n WHERE n.nspname = g."Name")
	WHEN 2 THEN (SELECT c.relowner FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = g."Schema" AND c.relname = g."Name")
	ELSE (SELECT p.proowner FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = g."Schema" AND p.proname = g."Name" AND oidvectortypes(p.proargtypes) = g."Args")
	END IS NOT DISTINCT FROM $1::oid
FROM jsonb_to_recordset($2::jsonb) AS g ("Ord" int, "Kind" int, "Schema" text, "Name" text, "Args" text, "Right" text, "Column" text, "Any" boolean)
ORDER BY g."Ord"`

// Standings says of each right, in their order, whether the role has it, by
// whatever way. On an object that isn't there it has none.
func (r Grantee) Standings(ctx context.Context, q Querier, grants []Grant) ([]Standing, error) {
	standings := make([]Standing, len(grants))
	if r.OID == 0 || len(grants) == 0 {
		return standings, nil
	}
	type row struct {
		Ord, Kind                         int
		Schema, Name, Args, Right, Column string
		Any                               bool
	}
	list := make([]row, len(grants))
	for i, g := range grants {
		list[i] = row{i, int(g.On.Kind), g.On.Schema, g.On.Name, g.On.Args, g.Right, g.Column, g.AnyColumn}
	}
	param, err := json.Marshal(list)
	if err != nil {
		return nil, fmt.Errorf("look for missing rights: %w", err)
	}
	rows, err := q.Query(ctx, selectStandings, r.OID, string(param))
	if err != nil {
		return nil, fmt.Errorf("look for missing rights: %w", err)
	}
	standings, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Standing])
	if err == nil && len(standings) != len(grants) {
		err = errors.New("some weren't looked up")
	}
	if err != nil {
		return nil, fmt.Errorf("look for missing rights: %w", err)
	}
	return standings, nil
}

// Missing returns the rights that the role lacks and can't do without.
func (r Grantee) Missing(ctx context.Context, q Querier, grants []Grant) ([]Grant, error) {
	standings, err := r.Standings(ctx, q, grants)
	if err != nil {
		return nil, err
	}
	var missing []Grant
	for i, s := range standings {
		if !s.Held && !grants[i].Optional {
			missing = append(missing, grants[i])
		}
	}
	return missing, nil
}

// Statements returns the statements that grant rights to the role, joined for one
// line.
func (r Grantee) Statements(grants []Grant) string {
	statements := make([]string, len(grants))
	for i, g := range grants {
		statements[i] = g.To(r.SQL)
	}
	return strings.Join(statements, "; ")
}

// Lacks says, in a line for each object, what the role may not do there, and what
// to do.
func (r Grantee) Lacks(missing []Grant) []string {
	var lines []string
	for len(missing) > 0 {
		on := missing[0].On
		var verbs []string
		var here, rest []Grant
		for _, g := range missing {
			if g.On != on {
				rest = append(rest, g)
				continue
			}
			here = append(here, g)
			if v := g.verb(); !slices.Contains(verbs, v) {
				verbs = append(verbs, v)
			}
		}
		lines = append(lines, fmt.Sprintf("this role (%s) may not %s %s; run: %s", r.SQL, strings.Join(verbs, ", "), on, r.Statements(here)))
		missing = rest
	}
	return lines
}

// verb is what a right lets a role do. A lock on a row asks for UPDATE.
func (g Grant) verb() string {
	switch {
	case g.Verb != "":
		return g.Verb
	case g.Right == "SELECT":
		return "read"
	case g.Right == "UPDATE" && g.AnyColumn:
		return "lock rows of"
	case g.Right == "DELETE":
		return "delete from"
	case g.Right == "EXECUTE":
		return "call"
	case g.Right == "USAGE":
		return "use"
	default:
		return strings.ToLower(g.Right) + " in"
	}
}

const selectHidden = `
SELECT DISTINCT n.nspname || '.' || c.relname
FROM unnest($2::text[], $3::text[]) AS t (schema, name)
JOIN pg_catalog.pg_namespace n ON n.nspname = t.schema
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.name
JOIN pg_catalog.pg_roles r ON r.oid = $1 AND NOT r.rolsuper AND NOT r.rolbypassrls
WHERE c.relrowsecurity AND (c.relforcerowsecurity OR NOT pg_has_role(r.oid, c.relowner, 'USAGE'))
ORDER BY 1`

// Hidden returns the tables among what the rights are on of which row-level
// security may hide rows from the role. No GRANT helps there.
func (r Grantee) Hidden(ctx context.Context, q Querier, grants []Grant) ([]string, error) {
	var schemas, names []string
	for _, g := range grants {
		if g.On.Kind == TableObject {
			schemas, names = append(schemas, g.On.Schema), append(names, g.On.Name)
		}
	}
	rows, err := q.Query(ctx, selectHidden, r.OID, schemas, names)
	if err != nil {
		return nil, fmt.Errorf("look for row-level security: %w", err)
	}
	hidden, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("look for row-level security: %w", err)
	}
	return hidden, nil
}
