package fleet

import (
	"context"
	"errors"
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
// replaced, with whatever rights have been granted on it, and so is the trigger. One
// that can't be replaced is an error that names it, ErrForeignFunction. It is all or
// nothing, safe to repeat, and safe when any number of agents run it at once. The
// table of pins must be there. To make the trigger on it takes a moment without
// writers; where there is none within lock_timeout, that is the error.
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

// CheckFunctions says whether what FunctionsDDL describes is there, the trigger
// enabled. A function that it couldn't replace is an error that names it,
// ErrForeignFunction. It reads the catalogue alone.
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
		found, exists := there[f.name+"("+f.types()+")"]
		if exists && !f.replaces(found) {
			return nil, fmt.Errorf("%s(%s) exists and %w (it is %s with the arguments %s, and returns %s); it is left as it is: drop it, or give the pool another schema",
				pgdb.Ident(schema, f.name), f.types(), ErrForeignFunction, found.kind, found.args, found.described[0])
		}
		if !slices.Equal(found.described, f.describe()) {
			ddl = append(ddl, f.create(schema))
		}
		if !exists {
			ddl = append(ddl, f.revoke(schema))
		}
	}
	var trigger bool
	err = q.QueryRow(ctx, "SELECT "+triggerSQL+rightTriggerSQL+alwaysSQL+")", schema, pinsTable, expiredTrigger).Scan(&trigger)
	if err != nil {
		return nil, fmt.Errorf("look for the trigger on %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	if !trigger {
		ddl = append(ddl, triggerDDL(schema))
	}
	return ddl, nil
}

// ErrForeignFunction means that a function of the name and the types of one of the agent's
// is there, and can't be replaced by it.
var ErrForeignFunction = errors.New("isn't the agent's function")

// foundFunction is what the catalogue says of a function.
type foundFunction struct {
	kind, args string
	defaults   int
	described  []string // as function.describe has it
}

// describeFunctions reads the functions of the schema, by name and types.
func describeFunctions(ctx context.Context, q pgdb.Querier, schema string) (map[string]foundFunction, error) {
	rows, err := q.Query(ctx, `
		SELECT p.proname || '(' || pg_catalog.oidvectortypes(p.proargtypes) || ')',
			CASE p.prokind WHEN 'f' THEN 'a function' WHEN 'p' THEN 'a procedure' ELSE 'an aggregate' END,
			pg_catalog.pg_get_function_identity_arguments(p.oid), p.pronargdefaults,
			ARRAY[coalesce(pg_catalog.pg_get_function_result(p.oid), 'nothing'), l.lanname::text, p.provolatile::text,
				p.prosecdef::text, p.pronargdefaults::text,
				coalesce(pg_catalog.array_to_string(p.proconfig, E'\n'), ''), p.prosrc]
		FROM pg_catalog.pg_proc p
		JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
		JOIN pg_catalog.pg_language l ON l.oid = p.prolang
		WHERE n.nspname = $1`, schema)
	if err != nil {
		return nil, fmt.Errorf("describe functions: %w", err)
	}
	there := make(map[string]foundFunction)
	var name string
	var found foundFunction
	_, err = pgx.ForEachRow(rows, []any{&name, &found.kind, &found.args, &found.defaults, &found.described}, func() error {
		there[name] = found
		found.described = nil
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("describe functions: %w", err)
	}
	return there, nil
}

// expiredTrigger keeps a pin from committing after it has expired. It fires where
// session_replication_role is replica, too.
const expiredTrigger = "gc_pins_expired"

const (
	// triggerSQL is left open for more conditions.
	triggerSQL = `EXISTS (
	SELECT FROM pg_catalog.pg_trigger g
	JOIN pg_catalog.pg_class c ON c.oid = g.tgrelid
	JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
	WHERE n.nspname = $1 AND c.relname = $2 AND g.tgname = $3`
	// 21 is AFTER INSERT OR UPDATE FOR EACH ROW.
	rightTriggerSQL = `
		AND g.tgtype = 21 AND g.tgconstraint <> 0 AND g.tgdeferrable AND g.tginitdeferred
		AND g.tgqual IS NULL AND g.tgattr::text = '' AND g.tgfoid = (
			SELECT p.oid FROM pg_catalog.pg_proc p
			WHERE p.pronamespace = n.oid AND p.proname = 'pin_expired' AND p.pronargs = 0)`
	alwaysSQL = ` AND g.tgenabled = 'A'`
)

// triggerDDL makes the trigger as it should be: CREATE CONSTRAINT TRIGGER knows
// neither IF NOT EXISTS nor OR REPLACE. To drop one takes a stronger lock, so that it
// isn't done where there is none.
func triggerDDL(schema string) string {
	names := strings.NewReplacer("$1", literal(schema), "$2", literal(pinsTable), "$3", literal(expiredTrigger))
	has := names.Replace(triggerSQL)
	right := has + rightTriggerSQL
	table := pgdb.Ident(schema, pinsTable)
	return "DO " + dollarQuote(`
BEGIN
	IF `+has+`) AND NOT `+right+`) THEN
		DROP TRIGGER `+expiredTrigger+` ON `+table+`;
	END IF;
	IF NOT `+has+`) THEN
		CREATE CONSTRAINT TRIGGER `+expiredTrigger+` AFTER INSERT OR UPDATE ON `+table+`
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION `+pgdb.Ident(schema, "pin_expired")+`();
	END IF;
	IF NOT `+right+alwaysSQL+`) THEN
		ALTER TABLE `+table+` ENABLE ALWAYS TRIGGER `+expiredTrigger+`;
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
		// A policy that hides rows from the agent is an error, not an answer, and isn't run.
		options += " SECURITY DEFINER SET search_path = " + safePath + " SET row_security = off"
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

// types are those of the arguments, as oidvectortypes has them.
func (f function) types() string {
	if f.args == "" {
		return ""
	}
	args := strings.Split(f.args, ", ")
	for i, arg := range args {
		_, args[i], _ = strings.Cut(arg, " ")
	}
	return strings.Join(args, ", ")
}

// replaces says whether CREATE OR REPLACE can make this function of the one found: it
// changes no name of an argument, no result, and takes no default away.
func (f function) replaces(found foundFunction) bool {
	defaults := 0
	if f.fallback != "" {
		defaults = 1
	}
	return found.kind == "a function" && found.args == f.args && found.described[0] == f.returns && found.defaults <= defaults
}

// describe is what describeFunctions should find.
func (f function) describe() []string {
	defaults, settings := "0", ""
	if f.fallback != "" {
		defaults = "1"
	}
	if !f.caller {
		settings = "search_path=" + safePath + "\nrow_security=off"
	}
	return []string{f.returns, "plpgsql", f.volatility, fmt.Sprint(!f.caller), defaults, settings, f.body}
}
