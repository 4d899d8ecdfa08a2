package liveness_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

func pgObserve(kind blob.Kind) pgPool { return pgPool{Options: liveness.Options{Kind: kind}} }

// T19: one digest, three spellings.
func TestPostgresOneDigestThreeSpellings(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE blobs (k bytea PRIMARY KEY); INSERT INTO blobs SELECT sha256(n::text::bytea) FROM generate_series(1, 4) n;
		CREATE TABLE m (d text UNIQUE); INSERT INTO m SELECT 'sha256:' || encode(sha256('1'), 'hex');
		CREATE TABLE l (id int PRIMARY KEY, d text UNIQUE); INSERT INTO l SELECT 7, upper(encode(sha256('2'), 'hex'));
		CREATE TABLE c (r bytea UNIQUE); INSERT INTO c SELECT sha256('3')`)
	var keys []blob.Key
	rows, err := w.app.Query(t.Context(), "SELECT sha256(n::text::bytea) FROM generate_series(1, 4) n")
	if err != nil {
		t.Fatal(err)
	}
	var k []byte
	if _, err := pgx.ForEachRow(rows, []any{&k}, func() error { keys = append(keys, blob.Key(k)); return nil }); err != nil {
		t.Fatal(err)
	}
	others := []liveness.Source{pgSource("m", "d", "sha256:{hex}"), pgSource("c", "r", "")}
	check := func(name string, l liveness.Source) {
		t.Helper()
		p := w.mustResolve(t, pgObserve(blob.KindBytes), append(others, l)...)
		if bad := w.badValue(t, p); bad != nil {
			t.Errorf("%s: bad value: %s", name, bad)
		}
		if dead := w.dead(t, p, keys...); !cmp.Equal(dead, keys[3:]) {
			t.Errorf("%s: dead: %q", name, dead)
		}
	}
	check("upper-case format", pgSource("l", "d", "{HEX}"))
	check("query", pgQuery("SELECT d FROM public.l", "{hex}"))

	// A look-up by the lower-case spelling misses it: the sweep must stop.
	p := w.mustResolve(t, pgObserve(blob.KindBytes), append(others, pgSource("l", "d", "{hex}"))...)
	bad := w.badValue(t, p)
	if bad == nil || bad.Unparseable {
		t.Fatalf("bad value: %v", bad)
	}
	want := `liveness[0] (source l): the value "` + strings.ToUpper(fmt.Sprintf("%x", string(keys[1]))) + `" in row id = 7 isn't in the canonical spelling, so that a probe by key would miss it; ` +
		`correct it, or run: CREATE INDEX CONCURRENTLY ON "public"."l" (lower("d"))`
	if bad.String() != want {
		t.Errorf("bad value: %s\nwant: %s", bad, want)
	}
	pgtest.Exec(t, w.app, bad.Index)
	check("the index that the message names", pgSource("l", "d", "{hex}"))
}

// A source that is emptied after the consult keeps every key; one that may be
// empty doesn't.
func TestPostgresEmptySource(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE a (b text UNIQUE); INSERT INTO a VALUES ('1'); CREATE TABLE q (b text UNIQUE); INSERT INTO q VALUES ('2'); CREATE TABLE f (b text UNIQUE, gone boolean); INSERT INTO f VALUES ('3', false)`)
	sources := func(allow bool) []liveness.Source {
		list := []liveness.Source{pgSource("a", "b", ""), pgQuery("SELECT b FROM public.q", ""), filtered(pgSource("f", "b", ""), "NOT gone")}
		for i := range list {
			list[i].AllowEmpty = allow
		}
		return list
	}
	strict := w.mustResolve(t, pgObserve(blob.KindText), sources(false)...)
	lax := w.mustResolve(t, pgObserve(blob.KindText), sources(true)...)
	for i, name := range []string{"a", "query", "f"} {
		if empty := w.empty(t, strict); len(empty) != 0 {
			t.Errorf("empty: %q", empty)
		}
		if dead := w.dead(t, strict, "1", "2", "3", "4"); !cmp.Equal(dead, []blob.Key{"4"}) {
			t.Errorf("dead: %q", dead)
		}
		undo := []string{"DELETE FROM a", "UPDATE q SET b = NULL", "UPDATE f SET gone = true"}[i]
		redo := []string{"INSERT INTO a VALUES ('1')", "UPDATE q SET b = '2'", "UPDATE f SET gone = false"}[i]
		pgtest.Exec(t, w.app, undo)
		for _, a := range w.answers(t, strict, "1", "2", "3", "4") {
			if a != (liveness.Answer{Verdict: liveness.Referenced, Source: i, Empty: true}) {
				t.Errorf("%s is empty: %+v", name, a)
			}
		}
		if empty := w.empty(t, strict); !cmp.Equal(empty, []string{name}) {
			t.Errorf("empty: %q, want %s", empty, name)
		}
		if empty := w.empty(t, lax); len(empty) != 0 {
			t.Errorf("empty, where it's allowed: %q", empty)
		}
		if dead := w.dead(t, lax, "1", "2", "3", "4"); len(dead) != 2 {
			t.Errorf("dead, where it's allowed: %q", dead)
		}
		pgtest.Exec(t, w.app, redo)
	}
}

func TestPostgresAnswersWithoutSources(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, "CREATE TABLE r (b text UNIQUE)")
	p := w.mustResolve(t, pgObserve(blob.KindText))
	if dead := w.dead(t, p, "1", "2"); len(dead) != 0 {
		t.Errorf("dead with nothing registered: %q", dead)
	}
	if got := p.Unreferenced(liveness.KeyRef{Expr: "p.b"}); got != "false" {
		t.Errorf("unreferenced with nothing registered: %s", got)
	}
	p = w.mustResolve(t, pgObserve(blob.KindText), pgSource("r", "b", ""))
	if answers := w.answers(t, p); len(answers) != 0 {
		t.Errorf("answers about no keys: %v", answers)
	}
}

// A key that can't be one of the pool's is an error that names it.
func TestPostgresAnswersForeignKey(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, "CREATE TABLE r (n int UNIQUE); INSERT INTO r VALUES (1)")
	p := w.mustResolve(t, pgObserve(blob.KindInt), pgSource("r", "n", ""))
	for _, key := range []blob.Key{"x", "01", "", "9223372036854775808", blob.Key(strings.Repeat("1", 1501))} {
		err := w.run(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			_, err := p.Answers(ctx, tx, []blob.Key{"1", key})
			return err
		})
		if err == nil || !strings.Contains(err.Error(), blob.KindInt.Display(key)) {
			t.Errorf("key %q: %v", blob.Shorten(string(key)), err)
		}
	}
}

// All sources are read from one snapshot: a row that moves between two tables is
// seen in one of them.
func TestPostgresAnswersFromOneSnapshot(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE a (b text UNIQUE); CREATE TABLE z (b text UNIQUE); INSERT INTO a VALUES ('x')`)
	a, z := pgSource("a", "b", ""), pgSource("z", "b", "")
	a.AllowEmpty, z.AllowEmpty = true, true
	p := w.mustResolve(t, pgObserve(blob.KindText), a, z)
	ctx, cancel := context.WithCancel(t.Context())
	moved := make(chan error, 1)
	mover := pgtest.Connect(t, w.url)
	go func() {
		for i := 0; ; i++ {
			from, to := "a", "z"
			if i%2 == 1 {
				from, to = to, from
			}
			_, err := mover.Exec(context.WithoutCancel(ctx), fmt.Sprintf("BEGIN; INSERT INTO %s VALUES ('x'); DELETE FROM %s; COMMIT", to, from))
			if err != nil || ctx.Err() != nil {
				moved <- err
				return
			}
		}
	}()
	seen := map[int]int{}
	for range 500 {
		answer := w.answers(t, p, "x")[0]
		if answer.Verdict != liveness.Referenced {
			t.Fatal("a key is dead while its row moves")
		}
		seen[answer.Source]++
	}
	cancel()
	if err := <-moved; err != nil {
		t.Fatal(err)
	}
	if len(seen) != 2 {
		t.Logf("the row was always seen in one table: %v", seen)
	}
}

// The agent's statements mean the same whatever the role's defaults are.
func TestPostgresOddDefaults(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE r (b text UNIQUE); INSERT INTO r VALUES ('a\d1'), ('it''s'), ('éd')`)
	name, url := pgtest.Role(t, w.url, "")
	for _, set := range []string{
		"standard_conforming_strings = off", "backslash_quote = off", "escape_string_warning = on", "bytea_output = escape", "search_path = nowhere",
		"default_transaction_isolation = serializable", "row_security = on", "IntervalStyle = iso_8601", "enable_hashjoin = off", "quote_all_identifiers = on",
	} {
		pgtest.Exec(t, w.app, "ALTER ROLE "+name+" SET "+set)
	}
	pgtest.Exec(t, w.app, "GRANT SELECT ON r TO "+name)
	w = w.as(t, url)
	for _, format := range []string{`a\d{text}`, "it'{text}", "é{text}"} {
		s := pgSource("r", "b", format)
		s.IgnoreUnparseable = true
		p := w.mustResolve(t, pgObserve(blob.KindText), s)
		if !p.Sources()[0].Indexed {
			t.Errorf("%s: %+v", format, p.Sources()[0])
		}
		if bad := w.badValue(t, p); bad != nil {
			t.Errorf("%s: bad value: %s", format, bad)
		}
		if dead := w.dead(t, p, "1", "s", "d"); len(dead) != 2 {
			t.Errorf("%s: dead: %q", format, dead)
		}
	}
}

// A connection whose text is recoded is refused, or set right; it never answers
// wrongly.
func TestPostgresClientEncoding(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE r (b text UNIQUE); INSERT INTO r VALUES ('éd')`)
	name, url := pgtest.Role(t, w.url, "")
	pgtest.Exec(t, w.app, "GRANT SELECT ON r TO "+name+"; ALTER ROLE "+name+" SET client_encoding = latin1")
	w = w.as(t, url)
	p, found := w.resolve(t, pgObserve(blob.KindText), pgSource("r", "b", "é{text}"))
	if p == nil {
		want := []string{"U:liveness[0]: the connection's client_encoding is LATIN1, so that text would be misread; run: ALTER ROLE " + name + " SET client_encoding = 'UTF8'"}
		if diff := cmp.Diff(want, lines(found)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		return
	}
	if dead := w.dead(t, p, "d", "é"); !cmp.Equal(dead, []blob.Key{"é"}) {
		t.Errorf("dead: %q", dead)
	}
}

// What was resolved is compared with the catalogue by OID.
func TestPostgresChanged(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE other (b text); CREATE DOMAIN word AS text`)
	tests := []struct {
		name, change string
		changed      bool
	}{
		{"nothing", "SELECT", false},
		{"rows", "INSERT INTO r VALUES (1, 'x'); TRUNCATE r; VACUUM r", false},
		{"another column", "ALTER TABLE r ADD c int; ALTER TABLE r DROP id", false},
		{"an index", "CREATE INDEX ON r (b)", false},
		{"dropped", "DROP TABLE r", true},
		{"made anew", "DROP TABLE r; CREATE TABLE r (id int, b text)", true},
		{"renamed", "ALTER TABLE r RENAME TO r2", true},
		{"another in its place", "ALTER TABLE r RENAME TO r2; ALTER TABLE r3 RENAME TO r", true},
		{"another schema", "CREATE SCHEMA s; ALTER TABLE r SET SCHEMA s", true},
		{"column dropped", "ALTER TABLE r DROP b", true},
		{"column made anew", "ALTER TABLE r DROP b; ALTER TABLE r ADD b text", true},
		{"column renamed", "ALTER TABLE r RENAME b TO c", true},
		{"another column in its place", "ALTER TABLE r RENAME b TO c; ALTER TABLE r RENAME d TO b", true},
		{"type", "ALTER TABLE r ALTER b TYPE varchar", true},
		{"a domain over the type", "ALTER TABLE r ALTER b TYPE word", true},
		{"collation", `ALTER TABLE r ALTER b TYPE text COLLATE "C"`, true},
	}
	for _, tt := range tests {
		pgtest.Exec(t, w.app, "DROP SCHEMA IF EXISTS s CASCADE; DROP TABLE IF EXISTS r, r2, r3")
		pgtest.Exec(t, w.app, "CREATE TABLE r (id int, b text, d text); CREATE TABLE r3 (id int, b text)")
		p := w.mustResolve(t, pgObserve(blob.KindText), pgQuery("SELECT b FROM public.other", ""), pgSource("r", "b", ""), pgSource("other", "b", ""))
		for _, change := range strings.Split(tt.change, "; ") {
			pgtest.Exec(t, w.app, change)
		}
		var want, got []string
		if tt.changed {
			want = []string{`"public"."r".b`}
		}
		w.read(t, func(ctx context.Context, tx pgx.Tx) {
			var err error
			if got, err = p.Changed(ctx, tx); err != nil {
				t.Error(err)
			}
		})
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	p := w.mustResolve(t, pgObserve(blob.KindText), pgQuery("SELECT b FROM public.other", ""))
	w.read(t, func(ctx context.Context, tx pgx.Tx) {
		if changed, err := p.Changed(ctx, tx); err != nil || len(changed) != 0 {
			t.Errorf("a query: %q, %v", changed, err)
		}
	})
}

// Each kind of bad value, and how its row is named.
func TestPostgresBadValueLines(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE r (id int, "K k" text, b text, PRIMARY KEY ("K k", id)); CREATE INDEX ON r (b); INSERT INTO r VALUES (1, 'one', '00ff');
		CREATE TABLE bare (b text UNIQUE); CREATE VIEW v AS SELECT b FROM bare;
		CREATE TABLE parts (id int, b text, PRIMARY KEY (id)) PARTITION BY LIST (id); CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1); CREATE TABLE parts_2 PARTITION OF parts FOR VALUES IN (2); CREATE INDEX ON parts (b);
		CREATE TABLE mother (b text UNIQUE); CREATE TABLE child (c int) INHERITS (mother)`)
	tests := []struct {
		name   string
		kind   blob.Kind
		source liveness.Source
		insert string
		want   string
	}{
		{
			"unparseable", blob.KindBytes, pgSource("r", "b", "{hex}"), `INSERT INTO r VALUES (2, 'two', 'zz')`,
			`the value "zz" in row K k = two, id = 2 doesn't fit the format; correct it, or set on_unparseable: ignore if such values refer to nothing`,
		},
		{"unparseable, where it may be", blob.KindBytes, ignoring(pgSource("r", "b", "{hex}")), `INSERT INTO r VALUES (2, 'two', 'zz')`, ""},
		{"unparseable, where it doesn't count", blob.KindBytes, filtered(pgSource("r", "b", "{hex}"), "id = 1"), `INSERT INTO r VALUES (2, 'two', 'zz')`, ""},
		{"unparseable, scanned", blob.KindBytes, pgQuery("SELECT b FROM public.r", "{hex}"), `INSERT INTO r VALUES (2, 'two', 'zz')`, ""},
		{
			"in another case", blob.KindBytes, ignoring(pgSource("r", "b", "{hex}")), `INSERT INTO r VALUES (2, 'two', '00FF')`,
			`the value "00FF" in row K k = two, id = 2 isn't in the canonical spelling, so that a probe by key would miss it; correct it, or run: CREATE INDEX CONCURRENTLY ON "public"."r" (lower("b"))`,
		},
		{
			"padded", blob.KindInt, pgSource("r", "b", "{int}"), `UPDATE r SET b = '7'; INSERT INTO r VALUES (2, 'two', '07')`,
			`the value "07" in row K k = two, id = 2 isn't in the canonical spelling, so that a probe by key would miss it; correct it`,
		},
		{
			"out of range", blob.KindInt, pgSource("r", "b", "{int}"), `UPDATE r SET b = '7'; INSERT INTO r VALUES (2, 'two', '9223372036854775808')`,
			`the value "9223372036854775808" in row K k = two, id = 2 doesn't fit the format; correct it, or set on_unparseable: ignore if such values refer to nothing`,
		},
		{
			"longer than numeric", blob.KindInt, pgSource("r", "b", "{int}"), `UPDATE r SET b = NULL; DROP INDEX r_b_idx; INSERT INTO r VALUES (2, 'two', repeat('9', 140000))`,
			`the value "` + strings.Repeat("9", 128) + `…" in row K k = two, id = 2 doesn't fit the format; correct it, or set on_unparseable: ignore if such values refer to nothing`,
		},
		{
			"without a primary key", blob.KindBytes, pgSource("bare", "b", "{hex}"), `INSERT INTO bare VALUES ('00'), ('0')`,
			`the value "0" in row ctid = (0,2) doesn't fit the format; correct it, or set on_unparseable: ignore if such values refer to nothing`,
		},
		{
			"of a view", blob.KindBytes, pgSource("v", "b", "{hex}"), `INSERT INTO bare VALUES ('AA')`,
			`the value "AA" in row of the view isn't in the canonical spelling, so that a probe by key would miss it; correct it`,
		},
		{
			"of a partition", blob.KindBytes, pgSource("parts", "b", "{hex}"), `INSERT INTO parts VALUES (1, '00'), (2, 'AA')`,
			`the value "AA" in row id = 2 isn't in the canonical spelling, so that a probe by key would miss it; correct it, or run: CREATE INDEX ON "public"."parts" (lower("b"))`,
		},
		{
			"of a child", blob.KindBytes, pgSource("mother", "b", "{hex}"), `INSERT INTO child VALUES ('00', 1), ('x', 1)`,
			`the value "x" in row ctid = (0,2) doesn't fit the format; correct it, or set on_unparseable: ignore if such values refer to nothing`,
		},
		{
			"long", blob.KindText, pgSource("bare", "b", "x{text}"), `INSERT INTO bare VALUES (repeat('é', 500))`,
			`the value "` + strings.Repeat("é", 64) + `…" in row ctid = (0,1) doesn't fit the format; correct it, or set on_unparseable: ignore if such values refer to nothing`,
		},
	}
	for _, tt := range tests {
		pgtest.Exec(t, w.app, "BEGIN; CREATE INDEX IF NOT EXISTS r_b_idx ON r (b); COMMIT")
		pgtest.Exec(t, w.app, tt.insert)
		p := w.mustResolve(t, pgObserve(tt.kind), tt.source)
		bad, want := w.badValue(t, p), "liveness[0] (source "+p.Sources()[0].Name+"): "+tt.want
		switch {
		case tt.want == "" && bad != nil:
			t.Errorf("%s: %s", tt.name, bad)
		case tt.want != "" && (bad == nil || bad.String() != want):
			t.Errorf("%s: %v\nwant: %s", tt.name, bad, want)
		}
		pgtest.Exec(t, w.app, "TRUNCATE r, bare, parts, mother, child; INSERT INTO r VALUES (1, 'one', '00ff')")
	}
}

func ignoring(s liveness.Source) liveness.Source {
	s.IgnoreUnparseable = true
	return s
}

// A table is looked through in stretches, each read by block numbers in a
// transaction of its own, and so are its partitions.
func TestPostgresBadValueInStretches(t *testing.T) {
	t.Parallel()
	// Each row fills a block: some 70 MiB.
	w := newPGWorld(t, `
		CREATE TABLE big (id int PRIMARY KEY, b text, pad text); ALTER TABLE big ALTER pad SET STORAGE PLAIN;
		INSERT INTO big SELECT n, 'AB', repeat('x', 8000) FROM generate_series(1, 9000) n;
		CREATE TABLE parts (id int, b text, pad text) PARTITION BY RANGE (id); CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (3000); CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (3000) TO (9999);
		INSERT INTO parts SELECT id, b, '' FROM big; ANALYZE big; ANALYZE parts`)
	name, url := pgtest.Role(t, w.url, "")
	// The partitions themselves needn't be readable.
	pgtest.Exec(t, w.app, "GRANT SELECT ON big, parts TO "+name)
	role := w.as(t, url)
	find := func(table string, id int, before func(transaction int)) (bad *liveness.BadValue, transactions int, last string) {
		t.Helper()
		// Every row is bad; where says which one counts.
		p := role.mustResolve(t, pgObserve(blob.KindBytes), filtered(pgSource(table, "b", "{hex}"), fmt.Sprintf("id + 0 = %d", id)))
		bad, err := p.BadValue(t.Context(), func(ctx context.Context, fn func(context.Context, pgx.Tx) error) error {
			transactions++
			before(transactions)
			return role.run(ctx, func(ctx context.Context, tx pgx.Tx) error {
				err := fn(ctx, tx)
				last = role.tracer.sql
				return err
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		return bad, transactions, last
	}
	nothing := func(int) {}
	for _, table := range []string{"big", "parts"} {
		for _, id := range []int{1, 2999, 3000, 8191, 8192, 8193, 9000} {
			if bad, _, _ := find(table, id, nothing); bad == nil {
				t.Errorf("%s: the bad value in row %d isn't found", table, id)
			}
		}
		bad, transactions, last := find(table, 0, nothing)
		if want := map[string]int{"big": 3, "parts": 2}[table]; bad != nil || transactions != want {
			t.Errorf("%s: %d transactions, want %d; bad value %v", table, transactions, want, bad)
		}
		role.read(t, func(ctx context.Context, tx pgx.Tx) {
			if plan := explainPG(ctx, t, tx, last); plan.buffers() > 2000 {
				t.Errorf("%s: the last stretch touches %d buffers: %+v", table, plan.buffers(), plan)
			}
		})
	}
	// The table grows while it is read: its end is where it is then.
	bad, _, _ := find("big", 99_999, func(transaction int) {
		if transaction == 3 {
			pgtest.Exec(t, w.app, "INSERT INTO big SELECT n, 'AB', repeat('x', 8000) FROM generate_series(92001, 99999) n")
		}
	})
	if bad == nil {
		t.Error("a bad value at the end of a table that grew isn't found")
	}
}

// A statement that fails is an error, never an answer.
func TestPostgresAnswersFail(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE r (b text UNIQUE, n int); INSERT INTO r VALUES ('1', 1)`)
	p := w.mustResolve(t, pgObserve(blob.KindText), pgSource("r", "b", ""), pgQuery("SELECT (1 / n)::text FROM public.r", ""))
	if dead := w.dead(t, p, "1", "2"); !cmp.Equal(dead, []blob.Key{"2"}) {
		t.Errorf("dead: %q", dead)
	}
	for _, change := range []string{"UPDATE r SET n = 0", "ALTER TABLE r RENAME TO r2"} {
		pgtest.Exec(t, w.app, change)
		err := w.run(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			answers, err := p.Answers(ctx, tx, []blob.Key{"1", "2"})
			if len(answers) != 0 {
				t.Errorf("%s: %v", change, answers)
			}
			return err
		})
		if pgdb.Code(err) == "" {
			t.Errorf("%s: %v", change, err)
		}
	}
}

// A value that is decoded names its key in every spelling that blob.Format
// reads, and no key otherwise.
func TestPostgresSpellings(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE r (v text)`)
	const (
		u = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
		// Its base64 needs both letters that the alphabets differ in.
		odd = "\xfb\xff\xfe"
	)
	long := blob.Key(strings.Repeat(odd, 30))
	tests := []struct {
		kind   blob.Kind
		format string
		key    blob.Key
		reads  []string
		not    []string
	}{
		{blob.KindBytes, "{hex}", "\xab\xcd", []string{"abcd", "ABCD", "aBCd"}, []string{"abc", "abcdab", " abcd", "abcd\n", "0xabcd", `\xabcd`, "", "ａｂｃｄ"}},
		{blob.KindBytes, "{HEX}", "\xab\xcd", []string{"abcd", "ABCD"}, []string{"ABC"}},
		{blob.KindBytes, "a\nb{hex}", "\xab", []string{"a\nbab", "a\nbAB"}, []string{"abab", "a\r\nbab", "A\nbab"}},
		{blob.KindBytes, "{base64}", odd, []string{"+//+", "-__-", "+__+", "+/\n/+", "+//+\r\n"}, []string{"+//+=", "+//", "", "= ", "+// +"}},
		{blob.KindBytes, "{base64}", "\xfb\xff", []string{"+/8=", "+/8", "-_8", "-_8=", "+/9=", "+/\r\n8="}, []string{"+/8==", "+/", "+/=8"}},
		{blob.KindBytes, "{base64}", "\xfb", []string{"+w==", "-w", "+x==", "+w=\n="}, []string{"+w=", "+", "+w==="}},
		{blob.KindBytes, "a\nb{base64}\n", odd, []string{"a\nb+//+\n", "a\nb+/\n/+\n", "a\nb+//+\n\n"}, []string{"ab+//+\n", "a\nb+//+"}},
		{blob.KindBytes, "{base64}", long, []string{strings.Repeat("+//+", 30), strings.Repeat("+//+", 19) + "\n" + strings.Repeat("-__-", 11)}, nil},
		{blob.KindBytes, "x{hex}", "", nil, []string{"x", "", "x00"}},
		{blob.KindBytes, "x{base64}", "", nil, []string{"x", "x=", "x\n", "x===="}},
		{blob.KindBytes, "x{text}", "", []string{"x"}, []string{"", "xx"}},
		{blob.KindBytes, "x{text}", "é\n", []string{"xé\n"}, []string{"xé", "x\u0065\u0301\n"}},
		{blob.KindUUID, "{uuid}", u, []string{u, strings.ToUpper(u)}, []string{"{" + u + "}", strings.ReplaceAll(u, "-", ""), u + " ", "urn:uuid:" + u}},
		{blob.KindText, "/{uuid}.png", u, []string{"/" + u + ".png", "/" + strings.ToUpper(u) + ".png"}, []string{"/" + u + "xpng", u}},
		{blob.KindInt, "{int}", "7", []string{"7", "07", strings.Repeat("0", 140_000) + "7"}, []string{"+7", " 7", "7 ", "7.0", "0x7", "-7", "٧", "7\n", ""}},
		{blob.KindInt, "{int}", "0", []string{"0", "-0", "000", "-000"}, []string{"", "-", "+0"}},
		{blob.KindInt, "{int}", "-9223372036854775808", []string{"-9223372036854775808", "-009223372036854775808"}, []string{"9223372036854775808", "-9223372036854775809"}},
		{blob.KindText, "{int}", "9223372036854775807", []string{"9223372036854775807"}, []string{"9223372036854775808", "18446744073709551615"}},
		{blob.KindText, "{int}", "9223372036854775808", nil, []string{"9223372036854775808"}},
		{blob.KindText, "(a|b).*{text}$", "x", []string{"(a|b).*x$"}, []string{"a.*x$", "(a|b)..x$", "ax"}},
		{blob.KindText, `it's \d{text}`, "x", []string{`it's \dx`}, []string{"it's 1x", `it''s \dx`, `it's \\dx`}},
		{blob.KindText, "ab{text}bc", "", []string{"abbc"}, []string{"abc", "ab", "bc"}},
		{blob.KindText, "{text}", "a ", []string{"a "}, []string{"a", "A "}},
	}
	for _, tt := range tests {
		for i, v := range append(tt.reads, tt.not...) {
			want := i < len(tt.reads)
			s := pgQuery("SELECT v FROM public.r", tt.format)
			if key, _, ok := s.Format.Decode(v); (ok && key == tt.key) != want {
				t.Errorf("%s: Decode(%q) = %q, %t", tt.format, blob.Shorten(v), key, ok)
			}
			pgtest.Exec(t, w.app, "TRUNCATE r")
			pgtest.Exec(t, w.app, "INSERT INTO r VALUES ($1)", v)
			for _, s := range []liveness.Source{s, ignoring(pgSource("r", "v", tt.format))} {
				s.AllowEmpty = true // a value that names no key doesn't count
				p := w.mustResolve(t, pgObserve(tt.kind), s)
				live := len(w.dead(t, p, tt.key)) == 0
				if s.Query != "" && live != want || s.Query == "" && live && !want {
					t.Errorf("%s: %q refers to %q: %t, want %t", tt.format, blob.Shorten(v), tt.key, live, want)
				}
				if bad := w.badValue(t, p); s.Query == "" && !live && want && bad == nil {
					t.Errorf("%s: %q is missed, and isn't found to be bad", tt.format, blob.Shorten(v))
				}
			}
		}
	}
}

// The bounds of a page are passed on only where the values sort as the keys do.
func TestPostgresBoundsInAnotherOrder(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE blobs (c text COLLATE "C" UNIQUE, i text COLLATE "en-x-icu" UNIQUE); INSERT INTO blobs VALUES ('Z', 'a'), ('a', 'B'), ('b', 'c'), ('10', '10'), ('9', '9');
		CREATE TABLE refs (c text COLLATE "C" UNIQUE, i text COLLATE "en-x-icu" UNIQUE, plain text UNIQUE, padded char(3) UNIQUE, prefixed text COLLATE "C" UNIQUE, suffixed text COLLATE "C" UNIQUE, n int UNIQUE);
		INSERT INTO refs SELECT c, c, c, c, '0' || c, c || 'x', CASE WHEN c < 'A' THEN c::int END FROM blobs; INSERT INTO refs (c, i) VALUES ('B', 'B'), ('c', 'c')`)
	tests := []struct{ key, lo, hi, column, format, want string }{
		{"c", "Z", "b", "c", "", ""},
		{"c", "Z", "b", "i", "", ""},
		{"c", "Z", "b", "plain", "", ""},
		{"c", "Z", "b", "padded", "", ""},
		{"c", "Z", "b", "prefixed", "0{text}", ""},
		{"c", "Z", "b", "suffixed", "{text}x", ""},
		{"c", "Z", "b", "prefixed", "", "a b"}, // nothing refers to them
		{"c", "0", "9", "n", "", ""},
		{"i", "a", "c", "i", "", ""},
		{"i", "a", "c", "c", "", ""},
	}
	for _, tt := range tests {
		p := w.mustResolve(t, pgObserve(blob.KindText), pgSource("refs", tt.column, tt.format))
		var got string
		w.read(t, func(ctx context.Context, tx pgx.Tx) {
			rel, err := pgdb.LookupRelation(ctx, tx, "public", "blobs")
			if err != nil {
				t.Fatal(err)
			}
			col, _ := rel.Column(tt.key)
			ref := liveness.KeyRef{Expr: "p." + tt.key, Lo: "$1::text", Hi: "$2::text", Collation: col.Collation}
			sql := fmt.Sprintf("SELECT coalesce(string_agg(%[1]s, ' ' ORDER BY %[1]s), '') FROM public.blobs p WHERE %[1]s > $1 AND %[1]s <= $2 AND %[2]s", ref.Expr, p.Unreferenced(ref))
			if err := tx.QueryRow(ctx, sql, tt.lo, tt.hi).Scan(&got); err != nil {
				t.Fatal(err)
			}
		})
		if got != tt.want {
			t.Errorf("keys %s within (%s, %s] and values %s: dead %q, want %q", tt.key, tt.lo, tt.hi, tt.column, got, tt.want)
		}
	}
}
