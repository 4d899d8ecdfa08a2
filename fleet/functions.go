package fleet

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/owntable"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// PinTier is a table whose rows are blobs, as the functions see it.
type PinTier struct {
	Table     string // qualified and quoted, as pgdb.Relation.SQL returns it
	KeyColumn string // its bare name; the column is unique and not NULL
	Kind      blob.Kind
}

// FunctionsDDL returns the statements that make the functions through which
// applications pin, in a schema that has the table of pins, in their order. Each
// may be run again. Whoever runs them owns the functions, which act with that
// role's rights: those of the agent on the pins and on the tiers.
//
//	pin(key bytea, owner bytea, ttl interval) returns boolean
//	pin(keys bytea[], owner bytea, ttl interval) returns boolean[]
//	unpin(key bytea, owner bytea) returns boolean
//	renew(owner bytea, ttl interval default '60 seconds') returns bigint
//
// Nobody but their owner may call them until PinGrants says so.
func FunctionsDDL(schema string, tiers []PinTier) []string {
	return functionsDDL(schema, tiers, omit{})
}

func functionsDDL(schema string, tiers []PinTier, without omit) []string {
	var ddl []string
	for _, f := range functions(schema, tiers, without) {
		ddl = append(ddl, f.create(schema), f.revoke(schema))
	}
	if !without.CommitCheck {
		ddl = append(ddl, triggerDDL(schema))
	}
	return ddl
}

// PinGrants returns the statements by which a role may pin.
func PinGrants(schema, role string) []string {
	grants := []string{"GRANT USAGE ON SCHEMA " + pgdb.Ident(schema) + " TO " + pgdb.Ident(role)}
	for _, f := range callable(schema, nil, omit{}) {
		grants = append(grants, "GRANT EXECUTE ON FUNCTION "+f.identity(schema)+" TO "+pgdb.Ident(role))
	}
	return grants
}

// EnsureFunctions makes what FunctionsDDL describes. What is there already and
// the same it leaves alone, and needs no right to; a function that differs is
// replaced, with whatever rights have been granted on it. It is all or nothing,
// safe to repeat, and safe when any number of agents run it at once. The table of
// pins must be there. To make the trigger on it takes a moment without writers;
// where there is none within lock_timeout, that is the error.
func EnsureFunctions(ctx context.Context, conn *pgdb.Conn, schema string, tiers []PinTier) error {
	missing, err := missingFunctions(ctx, conn, schema, tiers)
	if err == nil && len(missing) > 0 {
		err = conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
			return createFunctions(ctx, tx, schema, tiers)
		})
	}
	if err != nil {
		return fmt.Errorf("ensure functions of schema %s: %w", pgdb.Ident(schema), err)
	}
	return nil
}

// CheckFunctions says whether what FunctionsDDL describes is there. It reads the
// catalogue alone.
func CheckFunctions(ctx context.Context, q pgdb.Querier, schema string, tiers []PinTier) (bool, error) {
	missing, err := missingFunctions(ctx, q, schema, tiers)
	if err != nil {
		return false, fmt.Errorf("check functions of schema %s: %w", pgdb.Ident(schema), err)
	}
	return len(missing) == 0, nil
}

func createFunctions(ctx context.Context, tx pgx.Tx, schema string, tiers []PinTier) error {
	if err := owntable.LockSchema(ctx, tx, schema); err != nil {
		return err
	}
	missing, err := missingFunctions(ctx, tx, schema, tiers)
	if err != nil {
		return err
	}
	for _, statement := range missing {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", strings.SplitN(statement, "\n", 2)[0], err)
		}
	}
	return nil
}

// missingFunctions returns the statements that are still to be run.
func missingFunctions(ctx context.Context, q pgdb.Querier, schema string, tiers []PinTier) ([]string, error) {
	there, err := describeFunctions(ctx, q, schema)
	if err != nil {
		return nil, err
	}
	var ddl []string
	for _, f := range functions(schema, tiers, omit{}) {
		described, exists := there[f.name+"("+f.args+")"]
		if !slices.Equal(described, f.describe()) {
			ddl = append(ddl, f.create(schema))
		}
		if !exists {
			ddl = append(ddl, f.revoke(schema))
		}
	}
	var hasTrigger bool
	err = q.QueryRow(ctx, "SELECT "+hasTriggerSQL, schema, pinsTable, expiredTrigger).Scan(&hasTrigger)
	if err != nil {
		return nil, fmt.Errorf("look for the trigger on %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	if !hasTrigger {
		ddl = append(ddl, triggerDDL(schema))
	}
	return ddl, nil
}

// describeFunctions reads the functions of the schema, by name and arguments, as
// function.describe has them.
func describeFunctions(ctx context.Context, q pgdb.Querier, schema string) (map[string][]string, error) {
	rows, err := q.Query(ctx, `
		SELECT p.proname || '(' || pg_catalog.pg_get_function_identity_arguments(p.oid) || ')',
			ARRAY[pg_catalog.pg_get_function_result(p.oid), l.lanname::text, p.provolatile::text,
				p.prosecdef::text, p.pronargdefaults::text,
				coalesce(pg_catalog.array_to_string(p.proconfig, E'\n'), ''), p.prosrc]
		FROM pg_catalog.pg_proc p
		JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
		JOIN pg_catalog.pg_language l ON l.oid = p.prolang
		WHERE n.nspname = $1 AND p.prokind = 'f'`, schema)
	if err != nil {
		return nil, fmt.Errorf("describe functions: %w", err)
	}
	there := make(map[string][]string)
	var name string
	var described []string
	_, err = pgx.ForEachRow(rows, []any{&name, &described}, func() error {
		there[name] = slices.Clone(described)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("describe functions: %w", err)
	}
	return there, nil
}

// expiredTrigger keeps a pin from committing after it has expired.
const expiredTrigger = "gc_pins_expired"

const hasTriggerSQL = `EXISTS (
	SELECT FROM pg_catalog.pg_trigger g
	JOIN pg_catalog.pg_class c ON c.oid = g.tgrelid
	JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
	WHERE n.nspname = $1 AND c.relname = $2 AND g.tgname = $3)`

// triggerDDL makes the trigger unless it is there: CREATE CONSTRAINT TRIGGER
// knows neither IF NOT EXISTS nor OR REPLACE.
func triggerDDL(schema string) string {
	has := strings.NewReplacer("$1", literal(schema), "$2", literal(pinsTable), "$3", literal(expiredTrigger)).Replace(hasTriggerSQL)
	return "DO " + dollarQuote(`
BEGIN
	IF NOT `+has+` THEN
		CREATE CONSTRAINT TRIGGER `+expiredTrigger+` AFTER INSERT OR UPDATE ON `+pgdb.Ident(schema, pinsTable)+`
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION `+pgdb.Ident(schema, "pin_expired")+`();
	END IF;
END
`)
}

// literal quotes a string, with or without backslashes, whatever
// standard_conforming_strings says.
func literal(s string) string {
	quoted := "'" + strings.ReplaceAll(s, "'", "''") + "'"
	if strings.Contains(s, `\`) {
		return "E" + strings.ReplaceAll(quoted, `\`, `\\`)
	}
	return quoted
}

// dollarQuote quotes a body under a tag that doesn't stand in it: a table may be
// named anything.
func dollarQuote(body string) string {
	tag := "$gc$"
	for n := 1; strings.Contains(body, tag); n++ {
		tag = fmt.Sprintf("$gc%d$", n)
	}
	return tag + body + tag
}

// function is one function as the agent makes it.
type function struct {
	name     string
	args     string // names and types, without defaults
	fallback string // SQL of the last argument's default, or ""
	returns  string
	// volatility is v or s, as the catalogue has it.
	volatility string
	// caller says that the function runs with the rights and the search_path of
	// whoever calls it: one that only the others call.
	caller bool
	body   string
}

const safePath = "pg_catalog, pg_temp"

func (f function) create(schema string) string {
	args := f.args
	if f.fallback != "" {
		args += " DEFAULT " + f.fallback
	}
	options := " STABLE"
	if f.volatility == "v" {
		options = " VOLATILE"
	}
	if !f.caller {
		options += " SECURITY DEFINER SET search_path = " + safePath
	}
	return "CREATE OR REPLACE FUNCTION " + pgdb.Ident(schema, f.name) + "(" + args + ") RETURNS " + f.returns +
		"\nLANGUAGE plpgsql" + options + " AS " + dollarQuote(f.body)
}

func (f function) revoke(schema string) string {
	return "REVOKE ALL ON FUNCTION " + f.identity(schema) + " FROM PUBLIC"
}

// identity names the function apart from others of its name.
func (f function) identity(schema string) string {
	return pgdb.Ident(schema, f.name) + "(" + f.args + ")"
}

// describe is what describeFunctions should find.
func (f function) describe() []string {
	defaults, path := "0", ""
	if f.fallback != "" {
		defaults = "1"
	}
	if !f.caller {
		path = "search_path=" + safePath
	}
	return []string{f.returns, "plpgsql", f.volatility, fmt.Sprint(!f.caller), defaults, path, f.body}
}
