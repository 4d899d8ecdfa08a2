package liveness_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/liveness"
)

func TestSQLiteRefusesSources(t *testing.T) {
	t.Parallel()
	ints := []string{`CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `CREATE TABLE s (k INTEGER, h TEXT, b BLOB)`, `CREATE VIEW broken AS SELECT k FROM gone`}
	bytes := append([]string{`CREATE TABLE blobs (id BLOB PRIMARY KEY NOT NULL)`}, ints[1:]...)
	table := func(table, column, where, format string) liveness.Source {
		s := liteTable(t, table, column, format)
		s.Where = where
		return s
	}
	for _, c := range []struct {
		name     string
		ddl      []string
		src      liveness.Source
		severity finding.Severity
		want     string
	}{
		{"no table", ints, table("none", "k", "", ""), finding.Unreadable, "liveness[0].table: there is no table none"},
		{"no column", ints, table("s", "none", "", ""), finding.Unreadable, `liveness[0].column: table s has no column "none"`},
		{"broken view", ints, table("broken", "k", "", ""), finding.Unreadable, "no such table: main.gone"},
		{
			"a collation of the application's own", append([]string{`CREATE TABLE c (k TEXT COLLATE NOCASE); PRAGMA writable_schema = 1; UPDATE sqlite_schema SET sql = replace(sql, 'NOCASE', 'german') WHERE name = 'c'`}, bytes...),
			table("c", "k", "", "{hex}"), finding.Unreadable, "liveness[0].table: c can't be read: SQL logic error: no such collation sequence: german",
		},
		{"where names no column", ints, table("s", "k", "none = 1", ""), finding.Misconfigured, "liveness[0].where: SQLite refuses it: SQL logic error: no such column: none"},
		{"where is no SQL", ints, table("s", "k", "k = = 1", ""), finding.Misconfigured, "syntax error"},
		{"where with a parameter", ints, table("s", "k", "k = ?", ""), finding.Misconfigured, "contains a parameter (?)"},
		{"where ends the parentheses", ints, table("s", "k", "k) OR (1", ""), finding.Misconfigured, "closing parenthesis"},
		{"where doesn't end", ints, table("s", "k", "k /* all", ""), finding.Misconfigured, "SQLite refuses it"},
		{"where aggregates", ints, table("s", "k", "count(*) > 1", ""), finding.Misconfigured, "misuse of aggregate"},
		{"query is no SQL", ints, liteQuery(t, "SELEC k FROM s", ""), finding.Misconfigured, "liveness[0].query: SQLite refuses it"},
		{"query without a table", ints, liteQuery(t, "SELECT k FROM none", ""), finding.Unreadable, "no such table: none"},
		{"query of two columns", ints, liteQuery(t, "SELECT k, h FROM s", ""), finding.Misconfigured, "it returns 2 columns"},
		{"query that writes", ints, liteQuery(t, "DELETE FROM s RETURNING k", ""), finding.Misconfigured, "syntax error"},
		{"two queries", ints, liteQuery(t, "SELECT k FROM s; DELETE FROM s", ""), finding.Misconfigured, "contains a semicolon"},
		{"query that breaks out", ints, liteQuery(t, "SELECT k FROM s) LIMIT 0; DELETE FROM s; SELECT * FROM (SELECT 1", ""), finding.Misconfigured, "closing parenthesis"},
		{"pragma", ints, liteQuery(t, "PRAGMA query_only = 0", ""), finding.Misconfigured, "syntax error"},
		{"literals around an integer", ints, table("s", "k", "", "id-{int}"), finding.Misconfigured, `liveness[0].format: values of type INTEGER can't be read as "id-{int}"`},
		{"bytes as text", ints, table("s", "b", "", "{int}"), finding.Misconfigured, `values of type BLOB can't be read`},
		{"text as bytes", bytes, table("s", "h", "", "{bytes}"), finding.Misconfigured, `values of type TEXT can't be read`},
		{"integer for bytes", bytes, table("s", "k", "", ""), finding.Misconfigured, `format "{int}" can't name the pool's keys, which are bytes`},
		{"text for bytes", bytes, table("s", "h", "", ""), finding.Misconfigured, `read with "{hex}" or "{base64}"`},
		{"hex for integers", ints, table("s", "h", "", "{hex}"), finding.Misconfigured, `can't name the pool's keys, which are integers`},
		{"query of bytes, unsaid", bytes, liteQuery(t, "SELECT h FROM s", ""), finding.Misconfigured, "say with format"},
		{"query of an expression, unsaid", bytes, liteQuery(t, "SELECT substr(b, 1) FROM s", ""), finding.Misconfigured, "say with format"},
		{"UTF-16", append([]string{`PRAGMA encoding = 'UTF-16le'`}, ints...), table("s", "k", "", ""), finding.Misconfigured, "only UTF-8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newLiteWorld(t, c.ddl...)
			opts := liveness.Options{Kind: blob.KindInt, Elsewhere: true} // no tier is looked up
			if slices.Contains(c.ddl, bytes[0]) {
				opts.Kind = blob.KindBytes
			}
			l, found := w.resolve(t, opts, c.src)
			if l != nil || found.Worst() != c.severity || !strings.Contains(found.Of(c.severity), c.want) {
				t.Errorf("findings %v, want %q", found, c.want)
			}
		})
	}
}

// What is refused is never run.
func TestSQLiteRefusalRunsNothing(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `CREATE TABLE s (k INTEGER)`, `INSERT INTO s VALUES (1)`)
	for _, src := range []liveness.Source{
		liteQuery(t, "SELECT 1) LIMIT 0; DELETE FROM s; SELECT * FROM (SELECT 1", ""),
		{Path: "p", Table: "s", Column: "k", Where: "1)) LIMIT 0; DELETE FROM s; SELECT * FROM (SELECT 1 WHERE (1"},
	} {
		w.refusal(t, finding.Misconfigured, src)
	}
	var n int
	if err := w.app.QueryRow(`SELECT count(*) FROM s`).Scan(&n); err != nil || n != 1 {
		t.Errorf("%d rows are left (%v)", n, err)
	}
}

// All sources are judged, not only the first.
func TestSQLiteReportsAllFindings(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `CREATE TABLE s (k INTEGER REFERENCES blobs)`)
	a, b := liteTable(t, "none", "k", ""), liteTable(t, "s", "none", "")
	b.Path = "liveness[1]"
	_, found := w.resolve(t, liveness.Options{}, a, b)
	var paths []string
	for _, f := range found {
		paths = append(paths, f.Path)
	}
	if want := []string{"liveness[0].table", "liveness[1].column", "liveness"}; !slices.Equal(paths, want) {
		t.Errorf("paths %q, want %q: %v", paths, want, found)
	}
}

func TestSQLiteQueryFormats(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id BLOB PRIMARY KEY NOT NULL)`, `INSERT INTO blobs VALUES (x'61'), (x'62')`,
		`CREATE TABLE s (b BLOB)`, `INSERT INTO s VALUES (x'61')`)
	for _, src := range []liveness.Source{liteQuery(t, "SELECT b FROM s", ""), liteQuery(t, "SELECT hex(b) FROM s", "{hex}"), liteQuery(t, "SELECT substr(b, 1) FROM s", "{bytes}")} {
		if dead := w.dead(t, w.mustResolve(t, src)); !slices.Equal(dead, liteKeys("b")) {
			t.Errorf("%s: dead %q", src.Query, dead)
		}
	}
}

func TestSQLiteGuards(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		guard     liveness.Guard
		elsewhere bool
		observe   bool
		want      liveness.Guard
		refusal   string
	}{
		{guard: liveness.Auto, want: liveness.Serial},
		{guard: liveness.Serial, want: liveness.Serial},
		{guard: liveness.Settle, want: liveness.Serial},
		{guard: liveness.ForeignKey, refusal: "foreign_key is no guard on SQLite"},
		{guard: liveness.Settle, elsewhere: true, want: liveness.Settle},
		{guard: liveness.Auto, elsewhere: true, refusal: "with guard: settle"},
		{guard: liveness.Auto, elsewhere: true, observe: true, want: liveness.Settle},
		{guard: liveness.Serial, elsewhere: true, refusal: "choose guard: settle"},
	} {
		w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `CREATE TABLE s (k INTEGER UNIQUE)`)
		src := liteTable(t, "s", "k", "")
		src.Guard = c.guard
		l, found := w.resolve(t, liveness.Options{Kind: blob.KindInt, Enforce: !c.observe, Elsewhere: c.elsewhere}, src)
		switch {
		case c.refusal != "":
			if l != nil || !strings.Contains(found.Of(finding.Misconfigured), c.refusal) {
				t.Errorf("%+v: findings %v", c, found)
			}
		case l == nil || len(found) > 0:
			t.Errorf("%+v: findings %v", c, found)
		case l.Sources()[0].Guard != c.want:
			t.Errorf("%+v: %+v", c, l.Sources()[0])
		}
	}
}

// T07: a foreign key that nobody registered.
func TestSQLiteUnregisteredForeignKey(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY, content BLOB)`, `INSERT INTO blobs (id) VALUES (1), (2), (3), (4), (5)`,
		`CREATE TABLE audits (blob INTEGER)`, `INSERT INTO audits VALUES (1)`,
		`CREATE TABLE sub_att (blob INTEGER)`, `INSERT INTO sub_att VALUES (2), (NULL)`,
		`CREATE TABLE form_att (blob INTEGER)`, `INSERT INTO form_att VALUES (3)`,
		`CREATE TABLE form_defs (n INTEGER PRIMARY KEY, XLS INTEGER REFERENCES Blobs)`, `INSERT INTO form_defs VALUES (1, 4)`)
	sources := []liveness.Source{liteTable(t, "audits", "blob", ""), liteTable(t, "sub_att", "blob", ""), liteTable(t, "form_att", "blob", "")}
	if got := w.refusal(t, finding.Misconfigured, sources...); !strings.Contains(got, "foreign key of form_defs.XLS refers to blobs.id, and no source registers it; add {table: form_defs, column: XLS}") {
		t.Error(got)
	}
	// A query over the column isn't enough: it might leave rows out.
	if got := w.refusal(t, finding.Misconfigured, append(sources, liteQuery(t, "SELECT xls FROM form_defs", ""))...); !strings.Contains(got, "no source registers it") {
		t.Error(got)
	}
	l := w.mustResolve(t, append(sources, liteTable(t, "form_defs", "xls", ""))...)
	if dead := w.dead(t, l); !slices.Equal(dead, liteKeys("5")) {
		t.Errorf("dead: %q", dead)
	}
}

func TestSQLiteForeignKeys(t *testing.T) {
	t.Parallel()
	const blobs = `CREATE TABLE blobs (id INTEGER PRIMARY KEY, sha TEXT UNIQUE COLLATE NOCASE, a INTEGER, b INTEGER, UNIQUE (a, b), UNIQUE (id, a));
		INSERT INTO blobs VALUES (1, 'one', 10, 11), (2, 'two', 20, 21), (3, 'three', 30, 31)`
	table := func(column, where, format string) liveness.Source {
		s := liteTable(t, "s", column, format)
		s.Where = where
		return s
	}
	for _, c := range []struct {
		name string
		ddl  string
		src  liveness.Source
		dead []blob.Key
		want string // of a finding
	}{
		{"to the key", `CREATE TABLE s (k INTEGER REFERENCES blobs (id)); INSERT INTO s VALUES (1)`, table("k", "", ""), liteKeys("2", "3"), ""},
		{"where doesn't let go", `CREATE TABLE s (k INTEGER REFERENCES blobs, gone); INSERT INTO s VALUES (1, 0), (2, 1)`, table("k", "gone = 0", ""), liteKeys("3"), "it has no effect"},
		{"where and cascade", `CREATE TABLE s (k INTEGER REFERENCES blobs ON DELETE CASCADE, gone)`, table("k", "gone = 0", ""), nil, "takes its rows along when a blob goes (ON DELETE CASCADE)"},
		{"where and set null", `CREATE TABLE s (k INTEGER REFERENCES blobs ON DELETE SET NULL, gone)`, table("k", "gone = 0", ""), nil, "(ON DELETE SET NULL)"},
		{"where and set default", `CREATE TABLE s (k INTEGER REFERENCES blobs ON DELETE SET DEFAULT, gone)`, table("k", "gone = 0", ""), nil, "(ON DELETE SET DEFAULT)"},
		{"cascade alone", `CREATE TABLE s (k INTEGER REFERENCES blobs ON DELETE CASCADE); INSERT INTO s VALUES (1)`, table("k", "", ""), liteKeys("2", "3"), ""},
		{"through another column", `CREATE TABLE s (k TEXT REFERENCES blobs (SHA)); INSERT INTO s VALUES ('ONE'), (NULL)`, table("k", "", ""), liteKeys("2", "3"), ""},
		{"through two columns", `CREATE TABLE s (x INTEGER, y INTEGER, FOREIGN KEY (x, y) REFERENCES blobs (a, b)); INSERT INTO s VALUES (10, 11), (20, 11), (30, NULL)`, table("y", "", ""), liteKeys("2", "3"), ""},
		{"two columns, one the key", `CREATE TABLE s (x INTEGER, y INTEGER, FOREIGN KEY (x, y) REFERENCES blobs (id, a)); INSERT INTO s VALUES (1, 10), (2, NULL)`, table("x", "", ""), liteKeys("3"), ""},
		{"two columns, the other registered", `CREATE TABLE s (x INTEGER, y INTEGER, FOREIGN KEY (x, y) REFERENCES blobs (id, a))`, table("y", "", ""), nil, "foreign key of s.x, y refers to blobs.id, a, and no source registers it; add {table: s, column: x}"},
		{"of text to an integer", `CREATE TABLE s (k TEXT REFERENCES blobs); INSERT INTO s VALUES ('1')`, table("k", "", "{int}"), liteKeys("2", "3"), ""},
		{"with a format", `CREATE TABLE s (k TEXT REFERENCES blobs)`, table("k", "", "x{int}"), nil, "leave format out"},
		{
			"of the blobs themselves", `CREATE TABLE s (k INTEGER); INSERT INTO s VALUES (3); ALTER TABLE blobs ADD COLUMN parent INTEGER REFERENCES blobs; UPDATE blobs SET parent = 1 WHERE id = 2`,
			table("k", "", ""), nil, "add {table: blobs, column: parent}",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, index := range []string{"", "x, y", "k"} {
				w := newLiteWorld(t, blobs, c.ddl)
				if index != "" && !strings.Contains(c.ddl, "("+index[:1]+" ") {
					continue
				}
				if index != "" {
					w.exec(t, `CREATE INDEX i ON s (`+index+`)`)
				}
				l, found := w.resolve(t, liveness.Options{}, c.src)
				if c.want != "" && !strings.Contains(found.Of(finding.Misconfigured)+found.Of(finding.Warning), c.want) {
					t.Fatalf("findings %v, want %q", found, c.want)
				}
				if c.dead == nil {
					if l != nil {
						t.Errorf("it isn't refused")
					}
					continue
				}
				if l == nil {
					t.Fatalf("findings %v", found)
				}
				if dead := w.dead(t, l); !slices.Equal(dead, c.dead) {
					t.Errorf("index (%s): dead %q, want %q", index, dead, c.dead)
				}
				if bad := w.badValue(t, l); bad != nil {
					t.Error(bad)
				}
			}
		})
	}
}

// A foreign key to another column is probed by its own index too.
func TestSQLiteJoinUsesIndex(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		column, index string
		indexed       bool
	}{{"y", "", false}, {"y", "x, y", true}, {"x", "y", true}, {"y", "z, x, y", false}} {
		w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY, a INTEGER, b INTEGER, UNIQUE (a, b))`,
			`CREATE TABLE s (x INTEGER, y INTEGER, z INTEGER, FOREIGN KEY (x, y) REFERENCES blobs (a, b))`)
		if c.index != "" {
			w.exec(t, `CREATE INDEX i ON s (`+c.index+`)`)
		}
		l := w.mustResolve(t, liteTable(t, "s", c.column, ""))
		if info := l.Sources()[0]; info.Indexed != c.indexed {
			t.Errorf("%+v: %+v", c, info)
		}
	}
}
