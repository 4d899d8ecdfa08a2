package liveness_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/sqlite"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
	"github.com/alkblobs/gc-agent/liveness"

	"pgregory.net/rapid"
)

// liteTB is a test, or one case of a property.
type liteTB interface {
	rapid.TB
	Cleanup(func())
	Context() context.Context
}

// liteWorld is an SQLite file of a test's own: the application's connections, and
// the agent's.
type liteWorld struct {
	app   *sql.DB
	agent *sqlitedb.Conn
}

func newLiteWorld(t testing.TB, ddl ...string) *liteWorld {
	t.Helper()
	return newLiteWorldIn(t, t.TempDir(), ddl...)
}

func newLiteWorldIn(t liteTB, dir string, ddl ...string) *liteWorld {
	t.Helper()
	path := filepath.Join(dir, "app.db")
	app, err := sql.Open("sqlite", path+"?_pragma=synchronous(0)")
	if err != nil {
		t.Fatal(err)
	}
	w := &liteWorld{app: app}
	for _, stmt := range ddl {
		w.exec(t, stmt)
	}
	w.exec(t, `CREATE TABLE unrelated (x)`)
	db, err := sqlitedb.Open(path, sqlitedb.Options{BusyTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if w.agent, err = db.Conn(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, close := range []func() error{w.agent.Close, db.Close, app.Close} {
			if err := close(); err != nil {
				t.Error(err)
			}
		}
	})
	return w
}

func (w *liteWorld) exec(t liteTB, stmt string, args ...any) {
	t.Helper()
	if _, err := w.app.Exec(stmt, args...); err != nil {
		t.Fatalf("%s: %v", stmt, err)
	}
}

func (w *liteWorld) tier(t liteTB) *sqlite.Table {
	t.Helper()
	tier, found, err := sqlite.Resolve(t.Context(), w.agent, sqlite.Config{Path: "blobs[0]", Table: "blobs", Column: "id"})
	if err != nil || tier == nil {
		t.Fatalf("resolve the tier: %v, %v", found, err)
	}
	return tier
}

// resolve resolves sources beside the table blobs (id).
func (w *liteWorld) resolve(t liteTB, opts liveness.Options, sources ...liveness.Source) (*liveness.SQLite, finding.List) {
	t.Helper()
	var targets []liveness.SQLiteTarget
	if !opts.Elsewhere {
		tier := w.tier(t)
		opts.Kind = tier.Kind()
		targets = []liveness.SQLiteTarget{{Table: tier.Name(), Key: tier.KeyColumn()}}
	}
	l, found, err := liveness.ResolveSQLite(t.Context(), w.agent, opts, sources, targets)
	if err != nil {
		t.Fatal(err)
	}
	return l, found
}

func (w *liteWorld) mustResolve(t liteTB, sources ...liveness.Source) *liveness.SQLite {
	t.Helper()
	l, found := w.resolve(t, liveness.Options{}, sources...)
	if l == nil {
		t.Fatalf("findings: %v", found)
	}
	return l
}

// refusal resolves sources that have to be refused and returns the findings.
func (w *liteWorld) refusal(t liteTB, severity finding.Severity, sources ...liveness.Source) string {
	t.Helper()
	l, found := w.resolve(t, liveness.Options{}, sources...)
	if l != nil || found.Worst() != severity {
		t.Fatalf("findings: %v", found)
	}
	return found.Of(severity)
}

// dead returns the blobs that no source refers to, asked in both ways, which have
// to agree.
func (w *liteWorld) dead(t liteTB, l *liveness.SQLite) []blob.Key {
	t.Helper()
	tier := w.tier(t)
	all := w.keys(t, tier.Page(sqlite.Span{}), "true")
	answers, err := l.Answers(t.Context(), w.agent, all)
	if err != nil {
		t.Fatal(err)
	}
	var dead, pushed []blob.Key
	for i, a := range answers {
		if a.Verdict == liveness.Unreferenced {
			dead = append(dead, all[i])
		}
	}
	for span, last := (sqlite.Span{}), false; !last; {
		if span, last, err = tier.NextSpan(t.Context(), w.agent, span, 2); err != nil {
			t.Fatal(err)
		}
		p := tier.Page(span)
		pushed = append(pushed, w.keys(t, p, l.Unreferenced(liveness.KeyRef{Expr: p.Key, Lo: p.Lo, Hi: p.Hi}))...)
	}
	if slices.Sort(pushed); !slices.Equal(pushed, dead) {
		t.Errorf("pushed down: dead %q, answered: dead %q", pushed, dead)
	}
	return dead
}

// keys returns the sorted keys of the page's rows for which the condition holds.
func (w *liteWorld) keys(t liteTB, p sqlite.Page, where string) []blob.Key {
	t.Helper()
	keys, err := sqlitedb.Collect(t.Context(), w.agent, func(rows *sql.Rows) (blob.Key, error) {
		var key []byte
		err := rows.Scan(&key)
		return blob.Key(key), err
	}, `SELECT `+p.Canon+` FROM `+p.Table+` WHERE `+p.Where+` AND `+where, p.Args...)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(keys)
	return keys
}

func (w *liteWorld) badValue(t liteTB, l *liveness.SQLite) *liveness.BadValue {
	t.Helper()
	bad, err := l.BadValue(t.Context(), func(ctx context.Context, fn func(context.Context, sqlitedb.Querier) error) error {
		return w.agent.InTx(ctx, sqlitedb.Read, fn)
	})
	if err != nil {
		t.Fatal(err)
	}
	return bad
}

func (w *liteWorld) empty(t liteTB, l *liveness.SQLite) (names []string) {
	t.Helper()
	infos, err := l.Empty(t.Context(), w.agent)
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range infos {
		names = append(names, info.Name)
	}
	return names
}

func liteTable(t testing.TB, table, column, format string) liveness.Source {
	t.Helper()
	return liveness.Source{Path: "liveness[0]", Name: table, Table: table, Column: column, Format: liteFormat(t, format)}
}

func liteQuery(t testing.TB, query, format string) liveness.Source {
	t.Helper()
	return liveness.Source{Path: "liveness[0]", Name: "query", Query: query, Format: liteFormat(t, format)}
}

func liteFormat(t testing.TB, format string) *blob.Format {
	t.Helper()
	if format == "" {
		return nil
	}
	f, err := blob.ParseFormat(format)
	if err != nil {
		t.Fatal(err)
	}
	return &f
}

func liteKeys(keys ...blob.Key) []blob.Key { return keys }

// T08: NULLs and a soft-delete flag.
func TestSQLiteSoftDelete(t *testing.T) {
	t.Parallel()
	for name, types := range map[string]string{"declared": "part_id INTEGER, deleted INTEGER", "untyped": "part_id, deleted"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `INSERT INTO blobs VALUES (1), (2), (3)`,
				`CREATE TABLE msgs (`+types+`)`, `INSERT INTO msgs VALUES (1, 0), (NULL, 0), (2, 1)`)
			src := liteTable(t, "msgs", "part_id", "")
			src.Where = "deleted = 0"
			for _, indexed := range []bool{false, true} {
				if indexed {
					w.exec(t, `CREATE INDEX i ON msgs (part_id) WHERE deleted = 0`)
				}
				l := w.mustResolve(t, src)
				if dead := w.dead(t, l); !slices.Equal(dead, liteKeys("2", "3")) {
					t.Errorf("dead: %q", dead)
				}
				if bad := w.badValue(t, l); bad != nil {
					t.Error(bad)
				}
				if info := l.Sources()[0]; info.Indexed != indexed || info.Guard != liveness.Serial || info.LeavesOpen == "" {
					t.Errorf("%+v", info)
				}
			}
		})
	}
}

const (
	liteH1 = "a15b2c3d4e5f60718293a4b5c6d7e8f9aabbccddeeff00112233445566778899"
	liteH2 = "b25b2c3d4e5f60718293a4b5c6d7e8f9aabbccddeeff00112233445566778899"
	liteH3 = "c35b2c3d4e5f60718293a4b5c6d7e8f9aabbccddeeff00112233445566778899"
	liteH4 = "d45b2c3d4e5f60718293a4b5c6d7e8f9aabbccddeeff00112233445566778899"
)

// T19: one digest, three spellings.
func TestSQLiteSpellings(t *testing.T) {
	t.Parallel()
	for _, index := range []string{"", "CREATE INDEX m_d ON m (d); CREATE INDEX l_d ON l (d); CREATE INDEX c_r ON c (r)"} {
		w := newLiteWorld(t, `CREATE TABLE blobs (id BLOB PRIMARY KEY NOT NULL)`,
			`INSERT INTO blobs VALUES (x'`+liteH1+`'), (x'`+liteH2+`'), (x'`+liteH3+`'), (x'`+liteH4+`')`,
			`CREATE TABLE m (d TEXT)`, `INSERT INTO m VALUES ('sha256:`+liteH1+`')`,
			`CREATE TABLE l (d TEXT)`, `INSERT INTO l VALUES (upper('`+liteH2+`'))`,
			`CREATE TABLE c (r BLOB)`, `INSERT INTO c VALUES (x'`+liteH3+`')`, index)
		l := w.mustResolve(t, liteTable(t, "m", "d", "sha256:{hex}"), liteTable(t, "l", "d", "{HEX}"), liteTable(t, "c", "r", ""))
		h4, _ := blob.KindBytes.ParseKey(liteH4)
		if dead := w.dead(t, l); !slices.Equal(dead, liteKeys(h4)) {
			t.Errorf("dead: %x", dead)
		}
		if bad := w.badValue(t, l); bad != nil {
			t.Error(bad)
		}
		if l.Scanned() != (index == "") {
			t.Errorf("scanned: %t", l.Scanned())
		}
	}
}

func TestSQLiteAnswersSayWhich(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id TEXT PRIMARY KEY NOT NULL)`, `CREATE TABLE a (k TEXT)`, `CREATE TABLE b (k TEXT)`,
		`INSERT INTO a VALUES ('x')`, `INSERT INTO b VALUES ('y')`)
	l := w.mustResolve(t, liteTable(t, "a", "k", ""), liteTable(t, "b", "k", ""))
	answers, err := l.Answers(t.Context(), w.agent, liteKeys("y", "z", "x", "y"))
	want := []liveness.Answer{{Source: 1}, {Verdict: liveness.Unreferenced}, {Source: 0}, {Source: 1}}
	if err != nil || !slices.Equal(answers, want) {
		t.Errorf("%v (%v)", answers, err)
	}
	if answers, err = l.Answers(t.Context(), w.agent, liteKeys("\xff")); err == nil {
		t.Errorf("an invalid key: %v", answers)
	}
}

// A source that refers to nothing keeps everything, whenever that becomes so.
func TestSQLiteEmptySource(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `INSERT INTO blobs VALUES (1), (2)`,
		`CREATE TABLE a (k INTEGER, gone)`, `INSERT INTO a VALUES (1, 0), (NULL, 0)`, `CREATE TABLE b (k INTEGER)`)
	a, b := liteTable(t, "a", "k", ""), liteTable(t, "b", "k", "")
	a.Where, b.AllowEmpty = "gone = 0", true
	q := liteQuery(t, "SELECT k FROM a", "")
	l := w.mustResolve(t, a, b, q)
	if dead := w.dead(t, l); !slices.Equal(dead, liteKeys("2")) {
		t.Errorf("dead: %q", dead)
	}
	if empty := w.empty(t, l); len(empty) > 0 {
		t.Errorf("empty: %q", empty)
	}
	w.exec(t, `UPDATE a SET gone = 1`)
	if empty := w.empty(t, l); !slices.Equal(empty, []string{"a"}) {
		t.Errorf("empty: %q", empty)
	}
	answers, err := l.Answers(t.Context(), w.agent, liteKeys("2"))
	if want := []liveness.Answer{{Source: 0, Empty: true}}; err != nil || !slices.Equal(answers, want) {
		t.Errorf("%v (%v)", answers, err)
	}
	w.exec(t, `UPDATE a SET k = NULL`)
	if empty := w.empty(t, l); !slices.Equal(empty, []string{"a", "query"}) {
		t.Errorf("empty: %q", empty)
	}
}

// Values that all miss the format refer to nothing, as if there were none.
func TestSQLiteNoValueFitsFormat(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id BLOB PRIMARY KEY NOT NULL)`, `INSERT INTO blobs VALUES (x'61'), (x'62')`,
		`CREATE TABLE s (k TEXT UNIQUE, plain TEXT)`, `INSERT INTO s VALUES ('0x61', '0x61'), ('', '')`)
	plain, indexed := liteTable(t, "s", "plain", "{hex}"), liteTable(t, "s", "k", "{hex}")
	plain.IgnoreUnparseable, indexed.IgnoreUnparseable = true, true
	for _, src := range []liveness.Source{liteQuery(t, "SELECT k FROM s", "{hex}"), plain, indexed} {
		l := w.mustResolve(t, src)
		if empty := w.empty(t, l); !slices.Equal(empty, []string{src.Name}) {
			t.Errorf("empty: %q", empty)
		}
		answers, err := l.Answers(t.Context(), w.agent, liteKeys("b"))
		if want := []liveness.Answer{{Empty: true}}; err != nil || !slices.Equal(answers, want) {
			t.Errorf("%v (%v)", answers, err)
		}
		w.exec(t, `INSERT INTO s VALUES ('61', '61')`)
		if dead := w.dead(t, l); !slices.Equal(dead, liteKeys("b")) {
			t.Errorf("dead: %q", dead)
		}
		if empty := w.empty(t, l); len(empty) > 0 {
			t.Errorf("empty: %q", empty)
		}
		w.exec(t, `DELETE FROM s WHERE k = '61'`)
	}
}

// Where one key has several spellings, the guard doesn't stop another than the
// canonical one.
func TestSQLiteLeavesSpellingsOpen(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		blobs, ddl, format string
		open               bool
	}{
		{liteBytes, `CREATE TABLE s (k TEXT UNIQUE)`, "{hex}", true},
		{liteBytes, `CREATE TABLE s (k TEXT)`, "{base64}", true},
		{liteBytes, `CREATE TABLE s (k TEXT); CREATE INDEX i ON s (k COLLATE NOCASE)`, "{hex}", false},
		{liteBytes, `CREATE TABLE s (k BLOB)`, "", false},
		{liteBytes, `CREATE TABLE s (k TEXT)`, "{text}", false},
		{liteTexts, `CREATE TABLE s (k TEXT)`, "", false},
		{liteTexts, `CREATE TABLE s (k UUID UNIQUE)`, "", true},
		{liteInts, `CREATE TABLE s (k TEXT UNIQUE)`, "{int}", true},
		{liteInts, `CREATE TABLE s (k INTEGER UNIQUE)`, "", false},
	} {
		w := newLiteWorld(t, `CREATE TABLE blobs (id `+c.blobs+`)`, c.ddl)
		info := w.mustResolve(t, liteTable(t, "s", "k", c.format)).Sources()[0]
		if strings.Contains(info.LeavesOpen, "in another spelling") != c.open {
			t.Errorf("%s as %q: left open: %s", c.ddl, c.format, info.LeavesOpen)
		}
	}
}

func TestSQLiteNothingRegistered(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `INSERT INTO blobs VALUES (1)`)
	if dead := w.dead(t, w.mustResolve(t)); len(dead) > 0 {
		t.Errorf("dead: %q", dead)
	}
}

func TestSQLiteQueries(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id TEXT PRIMARY KEY NOT NULL, live TEXT)`,
		`INSERT INTO blobs VALUES ('a', 'x'), ('b', 'x'), ('c', 'x'), ('d', 'x'), ('7', 'x')`,
		`CREATE TABLE docs (doc TEXT, state TEXT)`,
		`INSERT INTO docs VALUES ('{"files": [{"id": "a"}, {"id": 7}, {"id": null}, {"id": "other"}]}', 'live'), ('{"files": [{"id": "b"}]}', 'dead')`)
	const files = `SELECT f.value ->> 'id' FROM docs, json_each(doc, '$.files') f`
	for _, c := range []struct {
		query string
		dead  []blob.Key
	}{
		{files, liteKeys("c", "d")},
		{files + ` WHERE state = 'live' -- not the others`, liteKeys("b", "c", "d")},
		{files + ` WHERE state = "live" ORDER BY 1 LIMIT 10`, liteKeys("b", "c", "d")}, // not the column of blobs
		{`WITH q (x) AS (` + files + `) SELECT x FROM q UNION SELECT 'c;)'`, liteKeys("c", "d")},
		{`VALUES ('a'), (CAST('b' AS BLOB)), (NULL), (7.0)`, liteKeys("c", "d")},
	} {
		l := w.mustResolve(t, liteQuery(t, c.query, "{text}"))
		if dead := w.dead(t, l); !slices.Equal(dead, c.dead) {
			t.Errorf("%s: dead %q, want %q", c.query, dead, c.dead)
		}
		if bad := w.badValue(t, l); bad != nil || !l.Scanned() {
			t.Errorf("%s: scanned %t, bad value %v", c.query, l.Scanned(), bad)
		}
	}
}

// Strings in double quotes aren't taken for columns of the blobs' table.
func TestSQLiteDoubleQuotedString(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY, image BLOB)`, `INSERT INTO blobs VALUES (1, x'00'), (2, x'00')`,
		`CREATE TABLE refs (blob INTEGER PRIMARY KEY, kind TEXT)`, `INSERT INTO refs VALUES (1, 'image')`)
	src := liteTable(t, "refs", "blob", "")
	src.Where = `kind = "image"`
	if dead := w.dead(t, w.mustResolve(t, src)); !slices.Equal(dead, liteKeys("2")) {
		t.Errorf("dead: %q", dead)
	}
}

func TestSQLiteChanged(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `CREATE TABLE a (k INTEGER)`, `CREATE VIEW b AS SELECT k FROM a`)
	l := w.mustResolve(t, liteTable(t, "A", "K", ""), liteTable(t, "b", "k", ""))
	for _, step := range []struct {
		stmt string
		want string
	}{
		{`CREATE INDEX i ON a (k)`, ""},
		{`DROP VIEW b`, "b"},
		{`CREATE VIEW b AS SELECT k FROM a`, ""},
		{`CREATE TABLE gc_window (k BLOB PRIMARY KEY NOT NULL)`, ""},
		{`ALTER TABLE a ADD COLUMN x`, "a"},
		{`DROP TABLE a`, "a"},
	} {
		w.exec(t, step.stmt)
		changed, err := l.Changed(t.Context(), w.agent)
		if err != nil || strings.Join(changed, " ") != step.want {
			t.Errorf("after %s: changed %q (%v), want %q", step.stmt, changed, err, step.want)
		}
	}
}

// A foreign key that comes or goes during a sweep is a change: what it holds was
// never asked about, and a delete would cascade to it.
func TestSQLiteForeignKeyChanges(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY, a INTEGER UNIQUE)`, `CREATE TABLE a (k INTEGER, n INTEGER REFERENCES Blobs)`)
	l := w.mustResolve(t, liteTable(t, "a", "n", ""))
	for _, step := range []struct {
		stmt, want string
	}{
		{`CREATE TABLE gc_window (k BLOB PRIMARY KEY NOT NULL)`, ""},
		{`CREATE TABLE b (k INTEGER REFERENCES unrelated ON DELETE CASCADE)`, ""},
		{`CREATE TABLE c (k INTEGER REFERENCES blobs ON DELETE CASCADE)`, "foreign keys to blobs"},
		{`DROP TABLE c`, ""},
		{`CREATE TABLE c (k INTEGER REFERENCES BLOBS (a))`, "foreign keys to blobs"},
		{`DROP TABLE c`, ""},
		{`ALTER TABLE b ADD COLUMN l INTEGER REFERENCES blobs`, "foreign keys to blobs"},
		{`ALTER TABLE b DROP COLUMN l`, ""},
		{`DROP TABLE a`, "a, foreign keys to blobs"},
		{`CREATE TABLE a (k INTEGER, n INTEGER REFERENCES Blobs ON DELETE SET NULL)`, "a, foreign keys to blobs"},
	} {
		w.exec(t, step.stmt)
		changed, err := l.Changed(t.Context(), w.agent)
		if err != nil || strings.Join(changed, ", ") != step.want {
			t.Errorf("after %s: changed %q (%v), want %q", step.stmt, changed, err, step.want)
		}
	}
}

// A probe goes by the source's own index, in the statements that the sweep runs,
// and not by one that SQLite would build for the statement.
func TestSQLiteProbesUseIndexes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		blobs   string
		ddl     string
		format  string
		where   string
		indexed bool
	}{
		{"integers", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k INTEGER); CREATE INDEX i ON s (k)`, "", "", true},
		{"row number", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k INTEGER PRIMARY KEY)`, "", "", true},
		{"integers as text", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k TEXT UNIQUE)`, "{int}", "", true},
		{"integers in text", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k TEXT UNIQUE)`, "blob/{int}", "", true},
		{"untyped integers", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k UNIQUE)`, "", "", true},
		{"floats", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k REAL UNIQUE)`, "", "", true},
		{"texts", "id TEXT PRIMARY KEY NOT NULL", `CREATE TABLE s (k TEXT PRIMARY KEY) WITHOUT ROWID`, "", "", true},
		{"texts, numeric key column", "id UUID PRIMARY KEY NOT NULL", `CREATE TABLE s (k TEXT UNIQUE)`, "", "", true},
		{"uuids", "id UUID PRIMARY KEY NOT NULL", `CREATE TABLE s (k UUID UNIQUE)`, "", "", true},
		{"nocase texts", "id TEXT PRIMARY KEY NOT NULL", `CREATE TABLE s (k TEXT UNIQUE COLLATE NOCASE)`, "", "", true},
		{"another collation's index", "id TEXT PRIMARY KEY NOT NULL", `CREATE TABLE s (k TEXT); CREATE UNIQUE INDEX i ON s (k COLLATE NOCASE)`, "", "", false},
		{"bytes", "id BLOB PRIMARY KEY NOT NULL", `CREATE TABLE s (k BLOB UNIQUE)`, "", "", true},
		{"hex", "id BLOB PRIMARY KEY NOT NULL", `CREATE TABLE s (k TEXT UNIQUE)`, "sha256:{hex}", "", true},
		{"hex in either case", "id BLOB PRIMARY KEY NOT NULL", `CREATE TABLE s (k TEXT); CREATE INDEX i ON s (k COLLATE NOCASE)`, "{hex}", "", true},
		{"second column of an index", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k INTEGER, t); CREATE INDEX i ON s (t, k)`, "", "", false},
		{"index of the condition alone", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k INTEGER, t); CREATE INDEX i ON s (t)`, "", "t = 1", false},
		{"partial index that fits", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k INTEGER, t); CREATE INDEX i ON s (k) WHERE t = 1`, "", "t = 1", true},
		{"partial index that doesn't", "id INTEGER PRIMARY KEY", `CREATE TABLE s (k INTEGER, t); CREATE INDEX i ON s (k) WHERE t = 2`, "", "t = 1", false},
		{"view", "id INTEGER PRIMARY KEY", `CREATE TABLE x (k INTEGER UNIQUE); CREATE VIEW s AS SELECT k FROM x`, "", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newLiteWorld(t, `CREATE TABLE blobs (`+c.blobs+`)`, c.ddl)
			src := liteTable(t, "s", "k", c.format)
			src.Where, src.AllowEmpty = c.where, true
			l, found := w.resolve(t, liveness.Options{}, src)
			if l == nil {
				t.Fatal(found)
			}
			if got := l.Sources()[0]; got.Indexed != c.indexed || l.Scanned() == c.indexed || (len(found) == 0) != c.indexed {
				t.Errorf("%+v, findings %v", got, found)
			}
			p := w.tier(t).Page(sqlite.Span{})
			plan := w.explain(t, `SELECT `+p.Canon+` FROM `+p.Table+` WHERE `+l.Unreferenced(liveness.KeyRef{Expr: p.Key}))
			byIndex := strings.Contains(plan, "(k=?") || strings.Contains(plan, "(rowid=?")
			if byIndex != c.indexed || strings.Contains(plan, "AUTOMATIC") {
				t.Error(plan)
			}
		})
	}
}

func (w *liteWorld) explain(t liteTB, query string) string {
	t.Helper()
	details, err := sqlitedb.Collect(t.Context(), w.agent, func(rows *sql.Rows) (string, error) {
		var id, parent, unused int
		var detail string
		err := rows.Scan(&id, &parent, &unused, &detail)
		return detail, err
	}, "EXPLAIN QUERY PLAN "+query)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(details, "\n")
}

func TestSQLiteMissingIndexIsWarnedAbout(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `CREATE TABLE "odd ""s" ("k 1" INTEGER)`)
	_, found := w.resolve(t, liveness.Options{}, liteTable(t, `odd "s`, "k 1", ""))
	_, stmt, ok := strings.Cut(found.Of(finding.Warning), "run: ")
	if !ok {
		t.Fatal(found)
	}
	w.exec(t, stmt)
	if l, found := w.resolve(t, liveness.Options{}, liteTable(t, `odd "s`, "k 1", "")); len(found) > 0 || l.Scanned() {
		t.Error(found)
	}
}
