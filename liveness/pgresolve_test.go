package liveness_test

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

const pgResolveSchema = `
CREATE TABLE refs (id int PRIMARY KEY, b bytea, t text, u uuid, n bigint, o oid, s char(8), j jsonb, f boolean, deleted_at timestamptz);
CREATE INDEX ON refs (b); CREATE INDEX ON refs (t); CREATE INDEX ON refs (u); CREATE INDEX ON refs (n); CREATE INDEX ON refs (o); CREATE INDEX ON refs (s);
CREATE VIEW v AS SELECT t, u FROM refs;
CREATE MATERIALIZED VIEW m AS SELECT t FROM refs;
CREATE FOREIGN DATA WRAPPER far; CREATE SERVER far FOREIGN DATA WRAPPER far;
CREATE FOREIGN TABLE f (t text) SERVER far;
CREATE TABLE parts (t text) PARTITION BY LIST (t);
CREATE TABLE parts_a PARTITION OF parts FOR VALUES IN ('a');
CREATE INDEX ON parts (t);
CREATE TABLE far_parts (t text) PARTITION BY LIST (t);
CREATE FOREIGN TABLE "far Part" PARTITION OF far_parts FOR VALUES IN ('b') SERVER far;
CREATE TABLE bare (t text, "Odd ""Name" text, e text COLLATE "C");
CREATE INDEX ON bare (t) WHERE t <> ''; CREATE INDEX ON bare (left("Odd ""Name", 3)); CREATE INDEX ON bare (e COLLATE "en-x-icu");
CREATE TABLE bare_parts (t text) PARTITION BY HASH (t);
CREATE TYPE mood AS ENUM ('a'); CREATE TABLE moods (m mood);
CREATE FUNCTION live(timestamptz) RETURNS boolean LANGUAGE sql RETURN $1 IS NULL;
CREATE FUNCTION cheat() RETURNS text LANGUAGE sql AS 'DELETE FROM public.refs; SELECT ''x''';
INSERT INTO refs VALUES (1, '\x01', 'a', gen_random_uuid(), 1, 1, 'a', '{}', true, NULL);
`

// Each case is one source and every line that is said about it.
func TestPostgresResolveFindings(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, pgResolveSchema)
	where := func(column, where string) liveness.Source {
		s := pgSource("refs", column, "")
		s.Where = where
		return s
	}
	const (
		pathHint  = "; qualify it with its schema: there is no search_path"
		oneSelect = "; a source is one SELECT"
	)
	tests := []struct {
		name   string
		kind   blob.Kind
		source liveness.Source
		want   []string // W:, U: or M: before path and message
	}{
		{"fine", blob.KindText, pgSource("refs", "t", ""), nil},
		{"bytes", blob.KindBytes, pgSource("refs", "b", ""), nil},
		{"hex", blob.KindBytes, pgSource("refs", "t", "sha256:{hex}"), nil},
		{"uuid", blob.KindUUID, pgSource("refs", "u", ""), nil},
		{"uuid names a text key", blob.KindText, pgSource("refs", "u", ""), nil},
		{"int", blob.KindInt, pgSource("refs", "n", ""), nil},
		{"oid", blob.KindInt, pgSource("refs", "o", "{int}"), nil},
		{"int names a text key", blob.KindText, pgSource("refs", "n", ""), nil},
		{"char(n)", blob.KindText, pgSource("refs", "s", ""), nil},
		{"a view", blob.KindText, pgSource("v", "t", ""), nil},
		{"a partitioned table", blob.KindText, pgSource("parts", "t", ""), nil},

		{"no table", blob.KindText, pgSource("none", "t", ""), []string{"U:liveness[0].table: there is no table public.none in the database; create it or correct the name"}},
		{"table in other letters", blob.KindText, pgSource("Refs", "t", ""), []string{"U:liveness[0].table: there is no table public.Refs in the database; create it or correct the name"}},
		{"an index", blob.KindText, pgSource("refs_t_idx", "t", ""), []string{"U:liveness[0].table: there is no table public.refs_t_idx in the database; create it or correct the name"}},
		{"no column", blob.KindText, pgSource("refs", "tt", ""), []string{`U:liveness[0].column: table public.refs has no column "tt"; correct the name`}},
		{"a system column", blob.KindText, pgSource("refs", "ctid", ""), []string{`U:liveness[0].column: table public.refs has no column "ctid"; correct the name`}},
		{"materialized view", blob.KindText, pgSource("m", "t", ""), []string{"M:liveness[0].table: public.m is a materialized view, which shows the past; register the tables behind it"}},
		{"foreign table", blob.KindText, pgSource("f", "t", ""), []string{"M:liveness[0].table: public.f is a foreign table; register the database it stands in under databases: and the source there"}},
		{"foreign partition", blob.KindText, pgSource("far_parts", "t", ""), []string{`M:liveness[0].table: public."far Part", a partition of public.far_parts, is a foreign table; register the database it stands in under databases: and the source there`}},

		{"jsonb", blob.KindText, pgSource("refs", "j", ""), []string{"M:liveness[0].column: public.refs.j is jsonb, which isn't read as a key; register a query that returns text, bytea, uuid or an integer"}},
		{"boolean", blob.KindInt, pgSource("refs", "f", ""), []string{"M:liveness[0].column: public.refs.f is boolean, which isn't read as a key; register a query that returns text, bytea, uuid or an integer"}},
		{"hex of a bytea", blob.KindBytes, pgSource("refs", "b", "{hex}"), []string{`M:liveness[0].format: values of type bytea can't be read as "{hex}"; leave format out, or register a query that turns them into text`}},
		{"literals around a uuid", blob.KindUUID, pgSource("refs", "u", "x{uuid}"), []string{`M:liveness[0].format: values of type uuid can't be read as "x{uuid}"; leave format out, or register a query that turns them into text`}},
		{"bytes of a text", blob.KindBytes, pgSource("refs", "t", "{bytes}"), []string{`M:liveness[0].format: values of type text can't be read as "{bytes}"; leave format out, or register a query that turns them into text`}},
		{"text in a pool of bytes", blob.KindBytes, pgSource("refs", "t", ""), []string{`M:liveness[0]: public.refs.t is text and format isn't set: write format: "{hex}" or "{base64}"`}},
		{"text in a pool of uuids", blob.KindUUID, pgSource("refs", "t", ""), []string{`M:liveness[0]: public.refs.t is text and format isn't set: write format: "{uuid}"`}},
		{"text in a pool of integers", blob.KindInt, pgSource("refs", "t", ""), []string{`M:liveness[0]: public.refs.t is text and format isn't set: write format: "{int}"`}},
		{"hex in a pool of text", blob.KindText, pgSource("refs", "t", "{hex}"), []string{`M:liveness[0].format: format "{hex}" can't name the pool's keys, which are text; a text value that names one is read with "{text}"`}},
		{"bytes in a pool of text", blob.KindText, pgSource("refs", "b", ""), []string{`M:liveness[0]: format "{bytes}" can't name the pool's keys, which are text; a text value that names one is read with "{text}"`}},
		{"integers in a pool of uuids", blob.KindUUID, pgSource("refs", "n", ""), []string{`M:liveness[0]: format "{int}" can't name the pool's keys, which are uuid; a text value that names one is read with "{uuid}"`}},

		{"a primary key", blob.KindText, pgSource("refs", "id", ""), nil},
		{"a partial index", blob.KindText, pgSource("bare", "t", ""), []string{`W:liveness[0]: no index serves a look-up by public.bare.t, so that it is read whole again and again; run: CREATE INDEX CONCURRENTLY ON "public"."bare" ("t")`}},
		{"an index over an expression", blob.KindText, pgSource("bare", `Odd "Name`, ""), []string{`W:liveness[0]: no index serves a look-up by public.bare.Odd "Name, so that it is read whole again and again; run: CREATE INDEX CONCURRENTLY ON "public"."bare" ("Odd ""Name")`}},
		{"an index in another collation", blob.KindText, pgSource("bare", "e", ""), []string{`W:liveness[0]: no index serves a look-up by public.bare.e, so that it is read whole again and again; run: CREATE INDEX CONCURRENTLY ON "public"."bare" ("e")`}},
		{"no index on a partitioned table", blob.KindText, pgSource("bare_parts", "t", ""), []string{`W:liveness[0]: no index serves a look-up by public.bare_parts.t, so that it is read whole again and again; run: CREATE INDEX ON "public"."bare_parts" ("t")`}},
		{"text as bytes", blob.KindBytes, pgSource("refs", "t", "{text}"), []string{`W:liveness[0]: public.refs.t is read whole again and again: a key can't be looked up in a column of type text by the format "{text}"`}},
		{"enum", blob.KindText, pgSource("moods", "m", ""), []string{`W:liveness[0]: public.moods.m is read whole again and again: a key can't be looked up in a column of type public.mood by the format "{text}"`}},

		{"where", blob.KindText, where("t", "deleted_at IS NULL -- not yet"), nil},
		{"where with a row's name", blob.KindText, where("t", "s.deleted_at IS NULL"), nil},
		{"where of any time", blob.KindText, where("t", "deleted_at > now() - interval '30 days'"), nil},
		{"where with a subquery", blob.KindText, where("t", "EXISTS (SELECT 1 FROM public.parts p WHERE p.t = s.t)"), nil},
		{"where that doesn't parse", blob.KindText, where("t", "deleted_at IS"), []string{`M:liveness[0].where: it isn't a condition over public.refs: syntax error at or near ")"`}},
		{"where that isn't boolean", blob.KindText, where("t", "id"), []string{`M:liveness[0].where: it isn't a condition over public.refs: argument of WHERE must be type boolean, not type integer`}},
		{"where with a misspelt column", blob.KindText, where("t", "delete_at IS NULL"), []string{`M:liveness[0].where: it isn't a condition over public.refs: column "delete_at" does not exist`}},
		{"where with the agent's own column", blob.KindText, where("t", "key <> ''"), []string{`M:liveness[0].where: it isn't a condition over public.refs: column "key" does not exist`}},
		{"where with a bare function", blob.KindText, where("t", "live(deleted_at)"), []string{`M:liveness[0].where: it isn't a condition over public.refs: function live(timestamp with time zone) does not exist` + pathHint}},
		{"where with a qualified function", blob.KindText, where("t", "public.live(deleted_at)"), nil},
		{"where with a bare type", blob.KindText, where("t", "t::mood = 'a'"), []string{`M:liveness[0].where: it isn't a condition over public.refs: type "mood" does not exist` + pathHint}},
		{"where with a bare table", blob.KindText, where("t", "EXISTS (SELECT 1 FROM parts)"), []string{`M:liveness[0].where: it isn't a condition over public.refs: relation "parts" does not exist` + pathHint}},
		{"where that leaves its parentheses", blob.KindText, where("t", "deleted_at IS NULL) OR (true"), []string{`M:liveness[0].where: it isn't a condition over public.refs: syntax error at or near ")"`}},
		{"where with a parameter", blob.KindText, where("t", "t = $1"), []string{`M:liveness[0].where: it isn't a condition over public.refs: a parameter such as $1 has no value here`}},
		{"where with a semicolon", blob.KindText, where("t", "true;"), []string{`M:liveness[0].where: it isn't a condition over public.refs: syntax error at or near ";"`}},
		{"where with an aggregate", blob.KindText, where("t", "count(*) > 1"), []string{`M:liveness[0].where: it isn't a condition over public.refs: aggregate functions are not allowed in WHERE`}},
		{"where that no plan can have", blob.KindText, where("t", "1 / 0 = 1"), []string{`M:liveness[0]: the server can't plan a look-up: division by zero`}},

		{"query", blob.KindText, pgQuery("SELECT t FROM public.refs -- all", ""), nil},
		{"query with a join and a union", blob.KindText, pgQuery("SELECT a.t FROM public.refs a JOIN public.bare b USING (t) UNION ALL SELECT e FROM public.bare ORDER BY 1", ""), nil},
		{"query with WITH", blob.KindText, pgQuery("WITH a AS (SELECT t FROM public.refs) TABLE a", ""), nil},
		{"query of JSON", blob.KindBytes, pgQuery("SELECT jsonb_path_query(j, '$.files[*].id') #>> '{}' FROM public.refs", "{hex}"), nil},
		{"query of constants", blob.KindText, pgQuery("VALUES ('a'), (NULL)", ""), nil},
		{"query of two columns", blob.KindText, pgQuery("SELECT t, u FROM public.refs", ""), []string{"M:liveness[0].query: it returns 2 columns; a source returns exactly one"}},
		{"query of no column", blob.KindText, pgQuery("SELECT FROM public.refs", ""), []string{"M:liveness[0].query: it returns 0 columns; a source returns exactly one"}},
		{"query of jsonb", blob.KindText, pgQuery("SELECT j FROM public.refs", ""), []string{"M:liveness[0].query: it returns jsonb, which isn't read as a key; cast it to text, bytea, uuid or an integer"}},
		{"query of text in a pool of bytes", blob.KindBytes, pgQuery("SELECT t FROM public.refs", ""), []string{`M:liveness[0]: what the query returns is text and format isn't set: write format: "{hex}" or "{base64}"`}},
		{"query in a format it can't have", blob.KindBytes, pgQuery("SELECT b FROM public.refs", "{hex}"), []string{`M:liveness[0].format: values of type bytea can't be read as "{hex}"; leave format out, or register a query that turns them into text`}},
		{"query of a bare table", blob.KindText, pgQuery("SELECT t FROM refs", ""), []string{`U:liveness[0].query: it can't be asked: relation "refs" does not exist` + pathHint}},
		{"query with a bare function", blob.KindText, pgQuery("SELECT t FROM public.refs WHERE live(deleted_at)", ""), []string{`M:liveness[0].query: it can't be asked: function live(timestamp with time zone) does not exist` + pathHint}},
		{"query of a misspelt column", blob.KindText, pgQuery("SELECT tt FROM public.refs", ""), []string{`M:liveness[0].query: it can't be asked: column "tt" does not exist`}},
		{"query that doesn't parse", blob.KindText, pgQuery("SELECT t FORM public.refs", ""), []string{`M:liveness[0].query: it can't be asked: syntax error at or near "public"` + oneSelect}},
		{"query with a semicolon", blob.KindText, pgQuery("SELECT t FROM public.refs;", ""), []string{`M:liveness[0].query: it can't be asked: syntax error at or near ";"; leave out the semicolon at its end`}},
		{"query and another", blob.KindText, pgQuery("SELECT t FROM public.refs; DELETE FROM public.refs", ""), []string{`M:liveness[0].query: it can't be asked: cannot insert multiple commands into a prepared statement` + oneSelect}},
		{"query that leaves its parentheses", blob.KindText, pgQuery("SELECT t FROM public.refs) a, (SELECT 1", ""), []string{`M:liveness[0].query: it can't be asked: syntax error at or near ")"` + oneSelect}},
		{"query with a parameter", blob.KindText, pgQuery("SELECT t FROM public.refs WHERE t = $1", ""), []string{`M:liveness[0].query: it can't be asked: a parameter such as $1 has no value here`}},
		{"query that deletes", blob.KindText, pgQuery("DELETE FROM public.refs RETURNING t", ""), []string{`M:liveness[0].query: it can't be asked: syntax error at or near "FROM"` + oneSelect}},
		{"query that deletes inside", blob.KindText, pgQuery("WITH d AS (DELETE FROM public.refs RETURNING t) SELECT t FROM d", ""), []string{`M:liveness[0].query: it can't be asked: WITH clause containing a data-modifying statement must be at the top level`}},
		{"query that makes a table", blob.KindText, pgQuery("SELECT t INTO public.copy FROM public.refs", ""), []string{`M:liveness[0].query: it can't be asked: SELECT ... INTO is not allowed here` + oneSelect}},
		{"not a query", blob.KindText, pgQuery("VACUUM", ""), []string{`M:liveness[0].query: it can't be asked: syntax error at or near ")"` + oneSelect}},
	}
	for _, tt := range tests {
		_, found := w.resolve(t, pgPool{Options: liveness.Options{Kind: tt.kind}}, tt.source)
		if diff := cmp.Diff(tt.want, lines(found)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	if n := pgCount(t, w.app, "SELECT count(*) FROM refs"); n != 1 {
		t.Errorf("a source's SQL was executed: %d rows left of 1", n)
	}
}

func lines(found finding.List) (lines []string) {
	for _, f := range found {
		lines = append(lines, map[finding.Severity]string{finding.Warning: "W:", finding.Unreadable: "U:", finding.Misconfigured: "M:"}[f.Severity]+f.String())
	}
	return lines
}

func pgCount(t testing.TB, conn *pgx.Conn, sql string, args ...any) (n int) {
	t.Helper()
	if err := conn.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func (w *pgWorld) wantFindings(t *testing.T, name string, pool pgPool, sources []liveness.Source, want ...string) *liveness.Postgres {
	t.Helper()
	p, found := w.resolve(t, pool, sources...)
	if diff := cmp.Diff(want, lines(found)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
	if refused := strings.Contains(strings.Join(want, ""), "M:") || strings.Contains(strings.Join(want, ""), "U:"); p == nil && !refused {
		t.FailNow() // there is nothing to go on with
	}
	return p
}

// What a role may not read is said before anything is asked.
func TestPostgresResolveRights(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE granted (id int PRIMARY KEY, b text UNIQUE, secret text); CREATE TABLE denied (b text UNIQUE);
		CREATE TABLE hidden (b text UNIQUE); ALTER TABLE hidden ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON hidden USING (b <> 'a');
		INSERT INTO granted VALUES (1, 'a', 'x'); INSERT INTO denied VALUES ('a'); INSERT INTO hidden VALUES ('a'), ('b');
		CREATE VIEW over_denied AS SELECT b FROM denied;
		CREATE SCHEMA closed; CREATE TABLE closed.refs (b text UNIQUE)`)
	name, url := pgtest.Role(t, w.url, "NOINHERIT")
	pgtest.Exec(t, w.app, "GRANT SELECT (b) ON granted TO "+name+"; GRANT SELECT ON hidden, over_denied TO "+name)
	role := w.as(t, url)
	pool := pgPool{Options: liveness.Options{Kind: blob.KindText}}
	one := func(s liveness.Source) []liveness.Source { return []liveness.Source{s} }
	grant := "; grant this role (" + name + ") what that needs"
	closed := pgSource("refs", "b", "")
	closed.Schema = "closed"
	where := pgSource("granted", "b", "")
	where.Where = "secret IS NULL"

	role.wantFindings(t, "no SELECT", pool, one(pgSource("denied", "b", "")), "U:liveness[0]: this role ("+name+`) may not read public.denied; run: GRANT SELECT ("b") ON "public"."denied" TO `+name)
	role.wantFindings(t, "no USAGE", pool, one(closed),
		"U:liveness[0]: this role ("+name+`) may not use schema closed; run: GRANT USAGE ON SCHEMA "closed" TO `+name,
		"U:liveness[0]: this role ("+name+`) may not read closed.refs; run: GRANT SELECT ("b") ON "closed"."refs" TO `+name)
	role.wantFindings(t, "a column of where", pool, one(where), "U:liveness[0]: permission denied for table granted"+grant)
	role.wantFindings(t, "a query's table", pool, one(pgQuery("SELECT b FROM public.denied", "")), "U:liveness[0]: permission denied for table denied"+grant)
	role.wantFindings(t, "a query's schema", pool, one(pgQuery("SELECT b FROM closed.refs", "")), "U:liveness[0].query: it can't be asked: permission denied for schema closed"+grant)
	role.wantFindings(t, "a view reads as its owner", pool, one(pgSource("over_denied", "b", "")))
	role.wantFindings(t, "hidden rows", pool, one(pgSource("hidden", "b", "")), "U:liveness[0]: row-level security hides rows of public.hidden from this role; give the role BYPASSRLS or exempt it")
	role.wantFindings(t, "a query's hidden rows", pool, one(pgQuery("SELECT b FROM public.hidden", "")), `U:liveness[0].query: it can't be asked: query would be affected by row-level security policy for table "hidden"`+grant)

	p := role.wantFindings(t, "one column", pool, one(pgSource("granted", "b", "x{text}")),
		`W:liveness[0]: the values of public.granted.b are looked through in one statement, which takes long where they are many; run: GRANT SELECT ("ctid") ON "public"."granted" TO `+name)
	if dead := role.dead(t, p, "a", "b"); len(dead) != 2 {
		t.Errorf("dead: %q", dead)
	}
	if bad := role.badValue(t, p); bad == nil || !strings.Contains(bad.String(), `the value "a" in row that this role may not read in full doesn't fit the format`) {
		t.Errorf("bad value of a table that can't be read in full: %v", bad)
	}
	pgtest.Exec(t, w.app, "GRANT SELECT (ctid) ON granted TO "+name)
	p = role.wantFindings(t, "one column and where it stands", pool, one(pgSource("granted", "b", "x{text}")))
	if bad := role.badValue(t, p); bad == nil || !strings.Contains(bad.String(), `the value "a" in row ctid = (0,1) doesn't fit the format`) {
		t.Errorf("bad value of a table whose rows can be told apart: %v", bad)
	}

	bypass, url := pgtest.Role(t, w.url, "BYPASSRLS")
	pgtest.Exec(t, w.app, "GRANT SELECT ON hidden TO "+bypass)
	role = w.as(t, url)
	p = role.wantFindings(t, "rows that aren't hidden", pool, one(pgSource("hidden", "b", "")))
	if dead := role.dead(t, p, "a", "b", "c"); !cmp.Equal(dead, []blob.Key{"c"}) {
		t.Errorf("dead: %q", dead)
	}
}

// A right that goes between the consult and a batch is an error, not an answer.
func TestPostgresRowSecurityAppears(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE refs (b text UNIQUE); INSERT INTO refs VALUES ('a'), ('b')`)
	name, url := pgtest.Role(t, w.url, "")
	pgtest.Exec(t, w.app, "GRANT SELECT ON refs TO "+name)
	role := w.as(t, url)
	p := role.mustResolve(t, pgPool{Options: liveness.Options{Kind: blob.KindText}}, pgSource("refs", "b", ""))
	pgtest.Exec(t, w.app, "ALTER TABLE refs ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON refs USING (b <> 'a')")
	err := role.run(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		_, err := p.Answers(ctx, tx, []blob.Key{"a"})
		return err
	})
	if pgdb.Code(err) != pgdb.InsufficientPrivilege {
		t.Errorf("answers over rows that a policy hides: %v", err)
	}
}

func TestPostgresResolveReadOnly(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE refs (b text UNIQUE)`)
	name, url := pgtest.Role(t, w.url, "")
	pgtest.Exec(t, w.app, "GRANT SELECT ON refs TO "+name+"; ALTER ROLE "+name+" SET default_transaction_read_only = on")
	w.as(t, url).wantFindings(t, "read-only", pgPool{Options: liveness.Options{Kind: blob.KindText}}, []liveness.Source{pgSource("refs", "b", "")},
		"U:liveness[0]: the server is read-only (default_transaction_read_only is on); make it writable or point the url at one that is")
}

// SQL that changes something passes for a SELECT, and is caught as the consult
// reads it: the agent reads in read-only transactions.
func TestPostgresSourceThatWrites(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE refs (id int PRIMARY KEY, b text UNIQUE); INSERT INTO refs VALUES (1, 'a'); CREATE SEQUENCE counted;
		CREATE FUNCTION cheat(text) RETURNS text LANGUAGE plpgsql AS 'BEGIN DELETE FROM public.refs; RETURN $1; END'`)
	where := pgSource("refs", "b", "")
	where.Where = "public.cheat(b) IS NOT NULL"
	for _, s := range []liveness.Source{
		pgQuery("SELECT public.cheat(b) FROM public.refs", ""),
		pgQuery("SELECT b FROM public.refs WHERE nextval('public.counted') > 0", ""),
		pgQuery("SELECT b FROM public.refs FOR UPDATE", ""),
		where,
	} {
		s.AllowEmpty = true // is read as well
		p := w.mustResolve(t, pgPool{Options: liveness.Options{Kind: blob.KindText}}, s)
		err := w.run(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			_, err := p.Empty(ctx, tx)
			return err
		})
		if pgdb.Code(err) != "25006" { // read_only_sql_transaction
			t.Errorf("%s%s: %v", s.Query, s.Where, err)
		}
	}
	if n := pgCount(t, w.app, "SELECT count(*) FROM refs"); n != 1 {
		t.Errorf("%d rows left of 1", n)
	}
}

// The index over lower() is found however its column is spelt.
func TestPostgresLowerIndex(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE DOMAIN word AS text; CREATE COLLATION loose (provider = icu, locale = 'und', deterministic = false);
		CREATE TABLE refs (plain text, "Odd ""Name" varchar, padded char(8), "user" word, c text COLLATE "C", l text COLLATE loose, other text, partial text);
		CREATE INDEX ON refs (lower(plain)); CREATE INDEX ON refs (lower("Odd ""Name")); CREATE INDEX ON refs (lower(padded));
		CREATE INDEX ON refs (lower("user")); CREATE INDEX ON refs (lower(c)); CREATE INDEX ON refs (lower(l));
		CREATE INDEX ON refs (lower(other) COLLATE "C"); CREATE INDEX ON refs (lower(partial)) WHERE partial <> '';
		INSERT INTO refs VALUES ('AB', 'AB', 'AB', 'AB', 'AB', 'AB', 'AB', 'AB')`)
	for column, want := range map[string]bool{"plain": true, `Odd "Name`: true, "padded": true, "user": true, "c": true, "l": true, "other": false, "partial": false} {
		p := w.mustResolve(t, pgPool{Options: liveness.Options{Kind: blob.KindBytes}}, pgSource("refs", column, "{hex}"))
		bad := w.badValue(t, p)
		dead := w.dead(t, p, "\xab", "\xac")
		if want {
			if info := p.Sources()[0]; !info.Indexed || info.Probe != "probed by lower("+column+")" {
				t.Errorf("%s: %+v", column, info)
			}
			if bad != nil || !cmp.Equal(dead, []blob.Key{"\xac"}) {
				t.Errorf("%s: bad value %v, dead %q", column, bad, dead)
			}
			continue
		}
		if bad == nil || bad.Unparseable || bad.Value != "AB" {
			t.Fatalf("%s: bad value %v", column, bad)
		}
		pgtest.Exec(t, w.app, bad.Index)
		p = w.mustResolve(t, pgPool{Options: liveness.Options{Kind: blob.KindBytes}}, pgSource("refs", column, "{hex}"))
		if bad := w.badValue(t, p); bad != nil || len(w.dead(t, p, "\xab")) != 0 {
			t.Errorf("%s: bad value %v after the index that it names", column, bad)
		}
	}
}

func TestPostgresCitext(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, "")
	if pgCount(t, w.app, "SELECT count(*) FROM pg_available_extensions WHERE name = 'citext'") == 0 {
		t.Skip("citext isn't installed on the server: install Postgres' contrib")
	}
	pgtest.Exec(t, w.app, "CREATE EXTENSION citext; CREATE TABLE refs (c citext UNIQUE); INSERT INTO refs VALUES ('A')")
	pool := pgPool{Options: liveness.Options{Kind: blob.KindText}}
	w.wantFindings(t, "citext", pool, []liveness.Source{pgSource("refs", "c", "")},
		"M:liveness[0].column: public.refs.c is public.citext, which isn't read as a key; register a query that returns text, bytea, uuid or an integer")
	p := w.mustResolve(t, pool, pgQuery("SELECT c::text FROM public.refs", ""))
	if dead := w.dead(t, p, "A", "a"); !cmp.Equal(dead, []blob.Key{"a"}) {
		t.Errorf("dead: %q", dead)
	}
}
