package liveness_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

// unreferenced returns what the predicate for a mark leaves of a table's keys.
func (w *pgWorld) unreferenced(t *testing.T, p *liveness.Postgres, table string) (keys []string) {
	t.Helper()
	w.read(t, func(ctx context.Context, tx pgx.Tx) {
		rows, err := tx.Query(ctx, "SELECT p.id FROM public."+table+" p WHERE "+p.Unreferenced(liveness.KeyRef{Expr: "p.id", Collation: pgdb.DefaultCollation})+" ORDER BY 1")
		if err != nil {
			t.Fatal(err)
		}
		if keys, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			t.Fatal(err)
		}
	})
	return keys
}

// A key of text that is a uuid or an integer, spelt otherwise than the values
// are compared in, is kept by the source, whether a value names it or not.
func TestPostgresOddlySpeltKeys(t *testing.T) {
	t.Parallel()
	const u, odd, other = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12"
	w := newPGWorld(t, `
		CREATE TABLE blobs (id text PRIMARY KEY); CREATE TABLE refs (t text, l text, prefixed text, u uuid, n int, nt text);
		CREATE INDEX ON refs (t); CREATE INDEX ON refs (lower(l)); CREATE INDEX ON refs (prefixed); CREATE INDEX ON refs (u); CREATE INDEX ON refs (n); CREATE INDEX ON refs (nt)`)
	pgtest.Exec(t, w.app, "INSERT INTO refs VALUES ($1, $2, 'x' || $1::text, $1::uuid, 7, '7')", u, odd)
	keys := []blob.Key{u, odd, other, "7", "007", "-0", "8", "", "x", "9223372036854775808", "+7"}
	for _, key := range keys {
		pgtest.Exec(t, w.app, "INSERT INTO blobs VALUES ($1)", string(key))
	}
	tests := []struct {
		source liveness.Source
		kept   []blob.Key
	}{
		{pgSource("refs", "t", "{uuid}"), []blob.Key{u, odd}},
		{pgSource("refs", "l", "{uuid}"), []blob.Key{u, odd}},
		{pgSource("refs", "prefixed", "x{uuid}"), []blob.Key{u, odd}},
		{pgSource("refs", "u", ""), []blob.Key{u, odd}},
		{pgQuery("SELECT l FROM public.refs", "{uuid}"), []blob.Key{u, odd}},
		{pgQuery("SELECT u FROM public.refs", ""), []blob.Key{u, odd}},
		{pgSource("refs", "n", ""), []blob.Key{"7", "007", "-0"}},
		{pgSource("refs", "nt", "{int}"), []blob.Key{"7", "007", "-0"}},
		{pgQuery("SELECT n FROM public.refs", ""), []blob.Key{"7", "007", "-0"}},
		{pgQuery("SELECT nt FROM public.refs", "{int}"), []blob.Key{"7", "007", "-0"}},
		{pgSource("refs", "t", ""), []blob.Key{u}},
		{pgQuery("SELECT nt FROM public.refs", ""), []blob.Key{"7"}},
	}
	for _, tt := range tests {
		p := w.mustResolve(t, pgObserve(blob.KindText), tt.source)
		name := tt.source.Query + tt.source.Column
		left := make(map[blob.Key]bool)
		for _, key := range w.unreferenced(t, p, "blobs") {
			left[blob.Key(key)] = true
		}
		var answered, pushed []blob.Key
		for i, a := range w.answers(t, p, keys...) {
			if a.Verdict == liveness.Referenced {
				answered = append(answered, keys[i])
			}
			if !left[keys[i]] {
				pushed = append(pushed, keys[i])
			}
		}
		if diff := cmp.Diff(tt.kept, answered); diff != "" {
			t.Errorf("%s: answers keep (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(tt.kept, pushed); diff != "" {
			t.Errorf("%s: the predicate keeps (-want +got):\n%s", name, diff)
		}
	}
}

// A source of which no value names a key refers to nothing: where all values are
// decoded, and where those that name no key are ordinary.
func TestPostgresNoValueFits(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TYPE e AS ENUM ('x'); CREATE TABLE refs (b bytea UNIQUE, t text UNIQUE, e e, n int); INSERT INTO refs VALUES ('\xab', 'sha1:ab', 'x')`)
	tests := []struct {
		kind   blob.Kind
		source liveness.Source
		empty  bool // at the consult
		keeps  bool // every key, in the answers
	}{
		{blob.KindBytes, pgQuery("SELECT b::text FROM public.refs", "{hex}"), true, true},
		{blob.KindBytes, pgQuery("SELECT encode(b, 'hex') FROM public.refs", "{hex}"), false, false},
		{blob.KindBytes, pgQuery("SELECT b FROM public.refs", ""), false, false},
		{blob.KindText, pgQuery("SELECT NULL::text FROM public.refs", ""), true, true},
		{blob.KindInt, pgQuery("SELECT n FROM public.refs", ""), true, true},
		{blob.KindText, ignoring(pgSource("refs", "e", "y{text}")), true, true},
		{blob.KindBytes, ignoring(pgSource("refs", "t", "sha256:{hex}")), true, false},
		{blob.KindBytes, ignoring(pgSource("refs", "t", "sha1:{hex}")), false, false},
		{blob.KindBytes, pgSource("refs", "t", "sha256:{hex}"), false, false}, // its value is bad
	}
	for _, tt := range tests {
		name := tt.source.Query + tt.source.Column + " as " + tt.kind.String()
		p := w.mustResolve(t, pgObserve(tt.kind), tt.source)
		if empty := w.empty(t, p); (len(empty) > 0) != tt.empty {
			t.Errorf("%s: empty: %q", name, empty)
		}
		if a := w.answers(t, p, "77")[0]; a.Empty != tt.keeps || (a.Verdict == liveness.Referenced) != tt.keeps {
			t.Errorf("%s: %+v", name, a)
		}
	}
}

// A table behind a function is locked later than the statement takes its
// snapshot, to which one that was truncated meanwhile is empty.
func TestPostgresTruncatedBehindAFunction(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE refs (b int); CREATE TABLE other (b int UNIQUE); INSERT INTO refs VALUES (1), (2); INSERT INTO other VALUES (1), (9);
		CREATE FUNCTION all_refs() RETURNS SETOF int LANGUAGE plpgsql STABLE AS 'BEGIN RETURN QUERY SELECT b FROM public.other WHERE b = 9; RETURN QUERY SELECT b FROM public.refs; END';
		CREATE FUNCTION held(int) RETURNS boolean LANGUAGE plpgsql STABLE AS 'BEGIN RETURN EXISTS (SELECT 1 FROM public.refs WHERE b = $1) OR $1 = 9; END';
		CREATE VIEW v AS SELECT all_refs() AS b`)
	for _, s := range []liveness.Source{
		pgQuery("SELECT public.all_refs()", ""),
		pgSource("v", "b", ""),
		filtered(pgSource("other", "b", ""), "public.held(b)"),
	} {
		name := s.Query + s.Table
		p := w.mustResolve(t, pgObserve(blob.KindInt), s)
		loader := pgtest.Connect(t, w.url)
		pgtest.Exec(t, loader, "BEGIN; TRUNCATE refs; INSERT INTO refs VALUES (1), (2)")
		answered := make(chan []blob.Key, 1)
		go func() {
			var dead []blob.Key
			defer func() { answered <- dead }()
			err := w.run(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				answers, err := p.Answers(ctx, tx, []blob.Key{"1", "3"})
				for i, a := range answers {
					if a.Verdict == liveness.Unreferenced {
						dead = append(dead, []blob.Key{"1", "3"}[i])
					}
				}
				return err
			})
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}()
		w.waitForLock(t)
		pgtest.Exec(t, loader, "COMMIT")
		if dead := <-answered; !cmp.Equal(dead, []blob.Key{"3"}) {
			t.Errorf("%s: dead: %q", name, dead)
		}
	}
}

// waitForLock returns once the agent waits for another's lock.
func (w *pgWorld) waitForLock(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		if pgCount(t, w.app, "SELECT cardinality(pg_blocking_pids($1))", w.agent.PgConn().PID()) > 0 {
			return
		}
	}
	t.Fatal("nothing waits for a lock")
}

// The padding of a char(n) counts on neither side, in a query as in a table.
func TestPostgresPaddedQuery(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE refs (b char(6) UNIQUE, c char(6) COLLATE "en-x-icu" UNIQUE); INSERT INTO refs VALUES ('abc', 'abc'), (NULL, NULL)`)
	for _, format := range []string{"", "{text}", "a{text}", "{text}c"} {
		for _, column := range []string{"b", "c"} {
			var dead [][]blob.Key
			for _, s := range []liveness.Source{pgSource("refs", column, format), pgQuery("SELECT "+column+" FROM public.refs", format)} {
				p := w.mustResolve(t, pgObserve(blob.KindText), s)
				dead = append(dead, w.dead(t, p, "abc", "abc   ", "ABC", " abc", "bc", "bc ", "ab", "dead"))
			}
			if diff := cmp.Diff(dead[0], dead[1]); diff != "" {
				t.Errorf("%q of %s: dead by a table and by a query (-table +query):\n%s", format, column, diff)
			}
			if format == "" && !cmp.Equal(dead[1], []blob.Key{"ABC", " abc", "bc", "bc ", "ab", "dead"}) {
				t.Errorf("%s: dead: %q", column, dead[1])
			}
		}
	}
}

// A source that can't be resolved hides nothing of what is wrong with another.
func TestPostgresRightsOfSeveralSources(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE a (b int UNIQUE); CREATE TABLE b (b int UNIQUE); CREATE TABLE c (b int UNIQUE)`)
	name, url := pgtest.Role(t, w.url, "")
	role := w.as(t, url)
	pool := pgObserve(blob.KindInt)
	pool.Enforce = true
	where := settled(filtered(pgSource("a", "b", ""), "b IN (SELECT b FROM public.b)"))
	pgtest.Exec(t, w.app, "GRANT SELECT ON a TO "+name)
	role.wantFindings(t, "several", pool, []liveness.Source{pgSource("none", "b", ""), settled(pgSource("b", "b", "")), where, pgQuery("SELECT b FROM public.c", "")},
		"U:liveness[0].table: there is no table public.none in the database; create it or correct the name",
		"U:liveness[0]: this role ("+name+`) may not read public.b; run: GRANT SELECT ("b") ON "public"."b" TO `+name,
		"M:liveness[0].guard: source query (a query) has no foreign key and can have no guard trigger, as a query"+pgLeft+"register the table that has one, or write guard: settle",
		"U:liveness[0]: permission denied for table b; grant this role ("+name+") what that needs",
		"U:liveness[0]: permission denied for table c; grant this role ("+name+") what that needs")

	odd := pgx.Identifier{name + ` "odd"`}.Sanitize()
	pgtest.Exec(t, w.app, "CREATE ROLE "+odd+"; GRANT "+odd+" TO "+name+"; ALTER ROLE "+name+" SET role = '"+name+` "odd"'`)
	t.Cleanup(func() { _, _ = w.app.Exec(context.Background(), "DROP ROLE "+odd) })
	w.as(t, url).wantFindings(t, "a name that needs quotes", pool, []liveness.Source{settled(pgSource("c", "b", ""))},
		"U:liveness[0]: this role ("+odd+`) may not read public.c; run: GRANT SELECT ("b") ON "public"."c" TO `+odd)
}

// Only a bare name is one to qualify.
func TestPostgresPathHint(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE refs (b text UNIQUE)`)
	const bare, qualified = "; qualify it with its schema: there is no search_path", "; create it or correct the name"
	for query, want := range map[string]string{
		"SELECT b FROM refs":                       bare,
		"SELECT b FROM public.gone":                qualified,
		"SELECT gone(b) FROM public.refs":          bare,
		"SELECT public.gone(b) FROM public.refs":   qualified,
		"SELECT b::gone FROM public.refs":          bare,
		"SELECT b::public.gone FROM public.refs":   qualified,
		"SELECT gone(r) FROM public.refs r":        bare,
		"SELECT b FROM public.refs WHERE b ~~~~ b": bare,
	} {
		if _, found := w.resolve(t, pgObserve(blob.KindText), pgQuery(query, "")); len(found) != 1 || !strings.HasSuffix(found[0].Message, want) {
			t.Errorf("%s: %v", query, found)
		}
	}
}

// A look-up by key misses other spellings, which are looked for once a sweep.
func TestPostgresSpellingsLeftOpen(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE refs (t text, l text, b bytea); CREATE INDEX ON refs (t); CREATE INDEX ON refs (lower(l)); CREATE INDEX ON refs (b)`)
	for _, tt := range []struct {
		kind   blob.Kind
		source liveness.Source
		open   bool
	}{
		{blob.KindBytes, pgSource("refs", "t", "{hex}"), true},
		{blob.KindBytes, ignoring(pgSource("refs", "t", "{base64}")), true},
		{blob.KindUUID, pgSource("refs", "t", "{uuid}"), true},
		{blob.KindInt, pgSource("refs", "t", "{int}"), true},
		{blob.KindBytes, pgSource("refs", "l", "{base64}"), true},
		{blob.KindBytes, pgSource("refs", "l", "{hex}"), false},
		{blob.KindBytes, pgSource("refs", "b", ""), false},
		{blob.KindText, pgSource("refs", "t", "x{text}"), false},
		{blob.KindBytes, pgQuery("SELECT t FROM public.refs", "{hex}"), false},
	} {
		open := w.mustResolve(t, pgObserve(tt.kind), tt.source).Sources()[0].LeavesOpen
		if strings.HasSuffix(open, "; a value in another spelling that is written while a sweep runs") != tt.open {
			t.Errorf("%s%s: %s", tt.source.Column, tt.source.Query, open)
		}
	}
}
