package liveness

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// TriggerPrefix begins the name of every guard trigger and of its function.
const TriggerPrefix = "gc_guard_"

// TriggerName returns the name that a source's guard trigger and its function
// have. It follows from the pool's schema and the source's name alone, so that it
// stays when the pool is renamed, and no two sources share one. It fits a name of
// Postgres's, and needs no quotes.
func TriggerName(schema, source string) string {
	sum := sha256.Sum256([]byte(schema + "\x00" + source))
	readable := strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
			return c
		case c >= 'A' && c <= 'Z':
			return c - 'A' + 'a'
		default:
			return '_'
		}
	}, source)
	return TriggerPrefix + readable[:min(len(readable), 30)] + "_" + hex.EncodeToString(sum[:6])
}

// triggerBody returns the source of the trigger's function. It holds the keys that
// the row names as a set, since a value may name several.
//
// An immediate trigger leaves out those that the row has named, and counted for,
// before: the version that was there held them, and whoever looks sees the one or
// the other. A deferred one sees a row as it was at some time of the transaction,
// and may not rely on what the version before it named: that one's own check may
// have passed because the row had gone on. It asks whether a row still says what
// this one said before it raises an error.
//
// One that is strict refuses a value that names a key in a spelling by which a sweep
// doesn't find it.
func (s *pgSource) triggerBody(kind blob.Kind, targets []Target, form triggerForm) string {
	var look strings.Builder
	for _, t := range targets {
		fmt.Fprintf(&look, lookTier, t.Relation.SQL(), pgdb.Ident(t.Key.Name), nativeKey(kind, "guard.key"))
	}
	subtract, outdated, refuse := "", "", ""
	if form.strict {
		refuse = s.refuseSpelling(form.deferrable)
	}
	if form.deferrable {
		outdated = strings.NewReplacer("{table}", s.rel.SQL(), "{column}", pgdb.Ident(s.col.Name), "{and}", s.and()).Replace(outdatedRow)
	} else {
		subtract = strings.NewReplacer("{before}", s.keysOf("OLD")).Replace(subtractBefore)
	}
	return s.sayingWhat("{keys}", s.keysOf("NEW"), "{refuse}", refuse, "{subtract}", subtract, "{look}", look.String(), "{outdated}", outdated).Replace(triggerBody)
}

// sayingWhat fills in, beside the pairs, what an error says of the value.
func (s *pgSource) sayingWhat(pairs ...string) *strings.Replacer {
	return strings.NewReplacer(append(pairs,
		"{what}", literal(s.rel.String()+"."+s.col.Name), "{value}", "left(NEW."+pgdb.Ident(s.col.Name)+"::text, 64)", "{column}", literal(s.col.Name))...)
}

// keysOf is a query of the canonical keys that the row NEW or OLD names, where it
// counts. where stands on its own: no name in it means anything but a column.
func (s *pgSource) keysOf(row string) string {
	return "SELECT k.key FROM " + s.rowThat(row) + " CROSS JOIN LATERAL (VALUES (" + s.decoded() + ")) k (key)\n\t\tWHERE k.key IS NOT NULL"
}

// rowThat is the FROM item s of the row NEW or OLD, where it counts.
func (s *pgSource) rowThat(row string) string {
	column := pgdb.Ident(s.col.Name)
	if s.and() == "" {
		// Without where one column is enough, and costs less.
		return "(SELECT " + row + "." + column + " AS " + column + ") s"
	}
	return "(SELECT s." + column + " FROM (SELECT " + row + ".*) s WHERE true" + s.and() + ") s"
}

// respelt is the condition that a value names a key in a spelling that a look-up by
// the key doesn't find.
func (s *pgSource) respelt() string {
	v := s.text(s.column())
	return fitsFormat(s.format, v) + " AND NOT (" + isCanonical(s.format, v) + ")"
}

// missesSpellings says whether there are such spellings.
func (s *pgSource) missesSpellings() bool {
	_, checked := s.badValue()
	return checked && !s.scanned && !s.lowerIndex && s.format.Placeholder() != blob.Text
}

// refuseSpelling raises an error for a value that a look-up doesn't find. One that
// was there before isn't what this write is to blame for, and holds up a sweep.
func (s *pgSource) refuseSpelling(deferrable bool) string {
	value := s.text("NEW." + pgdb.Ident(s.col.Name))
	unless := "NOT (TG_OP = 'UPDATE' AND EXISTS (SELECT FROM " + s.rowThat("OLD") + " WHERE " + bytewise(s.text(s.column())) + " = " + bytewise(value) + "))"
	if deferrable {
		unless = "EXISTS (SELECT FROM " + s.rel.SQL() + " s WHERE " + s.column() + " = NEW." + pgdb.Ident(s.col.Name) + s.and() + " AND " + s.respelt() + ")"
	}
	hint := "Write it as " + s.format.String() + ", " + canonically(s.format.Placeholder())
	if hasCase(s.format.Placeholder()) {
		hint += "; or, so that every spelling is found, run " + s.createIndex("lower("+pgdb.Ident(s.col.Name)+")") + " and install the trigger again"
	}
	return s.sayingWhat("{new}", s.rowThat("NEW"), "{respelt}", s.respelt(), "{unless}", unless, "{hint}", literal(hint+".")).Replace(refuseSpelling)
}

// canonically says how a key is spelt where each has one spelling.
func canonically(p blob.Placeholder) string {
	switch p {
	case blob.UpperHex:
		return "in upper case"
	case blob.Base64:
		return "in the standard alphabet, with its padding and no line breaks"
	case blob.Int:
		return "without leading zeros"
	default:
		return "in lower case"
	}
}

// nativeKey is SQL for a key, canonical bytes that a value was read as, in the
// type that the blobs' table has it in.
func nativeKey(kind blob.Kind, key string) string {
	text := "convert_from(" + key + ", 'UTF8')"
	switch kind {
	case blob.KindBytes:
		return key
	case blob.KindText:
		return text
	default:
		return text + "::" + pgdb.Type(kind)
	}
}

// The names are qualified by the block's, so that a column of the same name in a
// table isn't taken for the variable, nor the other way round.
//
// The second attempt is for READ COMMITTED: who waited for a delete there sees a
// row that was stored again meanwhile in a new statement only.
const triggerBody = `
#variable_conflict use_column
<<guard>>
DECLARE
	named bytea[] := ARRAY(
		{keys}
		ORDER BY k.key);
	key bytea;
	there boolean;
BEGIN
{refuse}{subtract}	FOREACH key IN ARRAY guard.named LOOP
		FOR attempt IN 1 .. 2 LOOP
			there := false;
{look}			EXIT WHEN there;
		END LOOP;
{outdated}		IF NOT there THEN
			RAISE EXCEPTION USING ERRCODE = '23503',
				MESSAGE = {what} || ' refers to a blob that is not there: ' || {value},
				HINT = 'Store the blob again, and retry the whole transaction.',
				SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME, COLUMN = {column}, CONSTRAINT = TG_NAME;
		END IF;
	END LOOP;
	RETURN NULL;
END
`

// lookTier holds the blob's row until the transaction ends. It waits for a sweep
// that has locked it, and then finds it gone, or, where the snapshot is older than
// that, raises 40001. A view, which would run what its own owner put into it, has no
// tableoid.
const lookTier = `			PERFORM t.tableoid FROM %s AS t WHERE t.%s = %s FOR KEY SHARE;
			there := there OR FOUND;
`

const refuseSpelling = `	IF EXISTS (SELECT FROM {new} WHERE {respelt})
		AND {unless} THEN
		RAISE EXCEPTION USING ERRCODE = '23514',
			MESSAGE = {what} || ' names a blob in a spelling that a sweep does not look for: ' || {value},
			HINT = {hint},
			SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME, COLUMN = {column}, CONSTRAINT = TG_NAME;
	END IF;
`

const subtractBefore = `	IF TG_OP = 'UPDATE' THEN
		named := ARRAY(
			SELECT n.key FROM unnest(guard.named) AS n (key) WHERE n.key NOT IN (
				{before})
			ORDER BY n.key);
	END IF;
`

const outdatedRow = `		there := there OR NOT EXISTS (
			SELECT FROM {table} s WHERE s.{column} = NEW.{column}{and});
`

// createTrigger returns the statements that make the trigger, in their order, for
// one transaction. They may be run again.
func (s *pgSource) createTrigger(deferrable bool) []string {
	t := &s.trigger
	function, table, name := pgdb.Ident(t.schema, t.name), s.rel.SQL(), pgdb.Ident(t.name)
	kind, when := "TRIGGER", ""
	form := triggerForm{deferrable, s.missesSpellings()}
	if deferrable {
		kind, when = "CONSTRAINT TRIGGER", " DEFERRABLE INITIALLY DEFERRED"
	}
	var set strings.Builder
	for _, setting := range t.settings {
		what, value, _ := strings.Cut(setting, "=")
		switch what {
		case "search_path":
			fmt.Fprintf(&set, "\nSET %s = %s", what, value)
		default:
			fmt.Fprintf(&set, "\nSET %s = %s", what, literal(value))
		}
	}
	return []string{
		// IF NOT EXISTS would want the right to create schemas in any case.
		"DO " + dollarQuote("\nBEGIN\n\tIF to_regnamespace("+literal(pgdb.Ident(t.schema))+") IS NULL THEN\n\t\tCREATE SCHEMA "+pgdb.Ident(t.schema)+";\n\tEND IF;\nEND\n"),
		"CREATE OR REPLACE FUNCTION " + function + "() RETURNS trigger\nLANGUAGE plpgsql SECURITY DEFINER" + set.String() + "\nAS " + dollarQuote(t.bodies[form]),
		"REVOKE ALL ON FUNCTION " + function + "() FROM PUBLIC",
		// What it runs, the table's owner has a say in, by where and by the tables. It
		// mustn't run as somebody else, whoever makes it.
		"ALTER FUNCTION " + function + "() OWNER TO " + t.owner,
		"DROP TRIGGER IF EXISTS " + name + " ON " + table,
		"CREATE " + kind + " " + name + " AFTER INSERT OR UPDATE ON " + table + when + "\n\tFOR EACH ROW EXECUTE FUNCTION " + function + "()",
		// It fires where session_replication_role is replica, too.
		"ALTER TABLE " + table + " ENABLE ALWAYS TRIGGER " + name,
	}
}

// dangling counts the source's rows that name a key which no tier has.
func (s *pgSource) dangling(kind blob.Kind, targets []Target) string {
	sql := "SELECT count(*) FROM (SELECT " + s.decoded() + " AS key FROM " + s.rel.SQL() + " s WHERE true" + s.and() + ") k WHERE k.key IS NOT NULL"
	for _, t := range targets {
		sql += "\n\tAND NOT EXISTS (SELECT FROM " + t.Relation.SQL() + " t WHERE t." + pgdb.Ident(t.Key.Name) + " = " + nativeKey(kind, "k.key") + ")"
	}
	return sql
}

// dollarQuote quotes a body under a tag that doesn't stand in it: where may hold
// anything.
func dollarQuote(body string) string {
	tag := "$gc$"
	for n := 1; strings.Contains(body, tag); n++ {
		tag = fmt.Sprintf("$gc%d$", n)
	}
	return tag + body + tag
}
