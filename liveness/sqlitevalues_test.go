package liveness_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/sqlite"
	"github.com/alkblobs/gc-agent/liveness"
)

// liteValueCase is a source's column with one value, and what it means.
type liteValueCase struct {
	name   string
	blobs  string // the tier's column
	keys   string // the tier's rows
	column string // the source's column
	format string
	value  string
	live   []blob.Key // the keys that the value keeps
	bad    string     // "", "unparseable" or "spelling"
}

const (
	liteInts  = `INTEGER PRIMARY KEY`
	liteTexts = `TEXT PRIMARY KEY NOT NULL`
	liteBytes = `BLOB PRIMARY KEY NOT NULL`
)

var liteValueCases = []liteValueCase{
	// What affinity does, and what it doesn't.
	{"integer in a text column", liteInts, `(1), (41)`, "TEXT", "{int}", `41`, liteKeys("41"), ""},
	{"text in an integer column", liteInts, `(1), (41)`, "INTEGER", "", `'41'`, liteKeys("41"), ""},
	{"padded text in an integer column", liteInts, `(1), (41)`, "INTEGER", "", `'0041'`, liteKeys("41"), ""},
	{"padded text in a text column", liteInts, `(1), (41)`, "TEXT", "{int}", `'0041'`, nil, "spelling"},
	{"words in an integer column", liteInts, `(1), (41)`, "INTEGER", "", `'n/a'`, nil, "unparseable"},
	{"fraction in an integer column", liteInts, `(1), (41)`, "INTEGER", "", `41.5`, nil, "unparseable"},
	{"whole float in an integer column", liteInts, `(1), (41)`, "INTEGER", "", `41.0`, liteKeys("41"), ""},
	{"whole float in a float column", liteInts, `(1), (41)`, "REAL", "", `41.0`, liteKeys("41"), ""},
	{"float that stands for several integers", liteInts, `(1), (9007199254740992)`, "REAL", "", `9007199254740992.0`, liteKeys("9007199254740992"), "unparseable"},
	{"digits as a BLOB in an integer column", liteInts, `(1), (41)`, "INTEGER", "", `x'3431'`, nil, "spelling"},
	{"integer in an untyped column", liteInts, `(1), (41)`, "", "", `41`, liteKeys("41"), ""},
	{"text in an untyped column", liteInts, `(1), (41)`, "", "", `'41'`, nil, "spelling"},
	{"integer that another key contains", liteInts, `(4), (41)`, "TEXT", "urn:oid:{int}", `'urn:oid:41'`, liteKeys("41"), ""},
	{"text keys, digits in an integer column", liteTexts, `('41'), ('041')`, "INTEGER", "", `41`, liteKeys("41", "041"), ""},
	{"text keys that are no canonical numbers", liteTexts, `('7'), ('007'), ('-0'), ('7.0'), ('n-007'), ('x')`, "TEXT", "n-{int}", `'n-8'`, liteKeys("007", "-0"), ""},
	// NUMERIC affinity makes a number of the probe as well: it finds too much, never too little.
	{"text keys, digits in a column of unknown type", liteTexts, `('41'), ('x')`, "STRING", "", `'41'`, liteKeys("41"), ""},
	{"text keys, padded digits in a column of unknown type", liteTexts, `('041'), ('x')`, "STRING", "", `'041'`, liteKeys("041"), ""},
	{"text keys in a column of unknown type", liteTexts, `('a1'), ('x')`, "STRING", "", `'a1'`, liteKeys("a1"), ""},

	// Bytes and text.
	{"bytes", liteBytes, `(x'00ff'), (x'61')`, "BLOB", "", `x'00ff'`, liteKeys("\x00\xff"), ""},
	{"no bytes", liteBytes, `(x''), (x'61')`, "BLOB", "", `x''`, liteKeys(""), ""},
	{"text in a BLOB column", liteBytes, `(x'61'), (x'62')`, "BLOB", "", `'a'`, nil, "unparseable"},
	{"integer in a BLOB column", liteBytes, `(x'31'), (x'62')`, "BLOB", "", `1`, nil, "unparseable"},
	{"text as bytes", liteBytes, `(x'61'), (x'62')`, "TEXT", "{text}", `'a'`, liteKeys("a"), ""},
	{"hex", liteBytes, `(x'00ff'), (x'62')`, "TEXT", "{hex}", `'00ff'`, liteKeys("\x00\xff"), ""},
	{"hex in the other case", liteBytes, `(x'00ff'), (x'62')`, "TEXT", "{hex}", `'00FF'`, nil, "spelling"},
	{"hex in either case", liteBytes, `(x'00ff'), (x'62')`, "TEXT COLLATE NOCASE", "{hex}", `'00Ff'`, liteKeys("\x00\xff"), ""},
	{"hex stored as a BLOB", liteBytes, `(x'00ff'), (x'62')`, "TEXT", "{hex}", `CAST('00ff' AS BLOB)`, nil, "spelling"},
	{"hex that reads as a number", liteBytes, `(x'12'), (x'1234')`, "STRING", "{hex}", `'1234'`, liteKeys("\x12\x34"), ""},
	{"hex with another prefix", liteBytes, `(x'00ff'), (x'62')`, "TEXT", "sha256:{hex}", `'SHA256:00ff'`, nil, "unparseable"},
	{"base64", liteBytes, `(x'fbff'), (x'62')`, "TEXT", "{base64}", `'+/8='`, liteKeys("\xfb\xff"), ""},
	{"base64 for URLs", liteBytes, `(x'fbff'), (x'62')`, "TEXT", "{base64}", `'-_8'`, nil, "spelling"},
	{"prefix with a quote", liteTexts, `('a'), ('b')`, "TEXT", "it's {{{text}", `'it''s {a'`, liteKeys("a"), ""},

	// Texts that are easily mistaken for others.
	{"text in the other case", liteTexts, `('a'), ('A')`, "TEXT", "", `'A'`, liteKeys("A"), ""},
	{"NOCASE column", liteTexts, `('a'), ('A'), ('b')`, "TEXT COLLATE NOCASE", "", `'A'`, liteKeys("A", "a"), ""},
	{"NOCASE column, paged", liteTexts, `('0'), ('A'), ('a'), ('b')`, "TEXT COLLATE NOCASE", "", `'a'`, liteKeys("a", "A"), ""},
	{"RTRIM column", liteTexts, `('a'), ('a '), ('b')`, "TEXT COLLATE RTRIM", "", `'a '`, liteKeys("a ", "a"), ""},
	{"no text", liteTexts, `(''), ('b')`, "TEXT", "", `''`, liteKeys(""), ""},
	{"text with a NUL", liteTexts, `('a'), ('b')`, "TEXT", "x{text}", `'xa' || char(0) || 'c'`, nil, "unparseable"},
	{"text stored as a BLOB", liteTexts, `('a'), ('b')`, "TEXT", "", `x'61'`, nil, "spelling"},
	{"bytes that are no text", liteTexts, `('a'), ('b')`, "TEXT", "", `x'ff'`, nil, "unparseable"},
	{"a date", liteTexts, `('2024-01-01'), ('b')`, "DATETIME", "", `'2024-01-01'`, liteKeys("2024-01-01"), ""},
	{"a bad date", liteTexts, `('a'), ('b')`, "DATETIME", "x{text}", `'2024-01-01 00:00:00'`, nil, "unparseable"},

	// UUIDs.
	{
		"uuid", "UUID PRIMARY KEY NOT NULL", `('0b7e7dee-87ea-4b6c-b1c5-0a1b2c3d4e5f')`, "UUID", "", `'0b7e7dee-87ea-4b6c-b1c5-0a1b2c3d4e5f'`,
		liteKeys("0b7e7dee-87ea-4b6c-b1c5-0a1b2c3d4e5f"), "",
	},
	{
		"uuid in the other case", "UUID PRIMARY KEY NOT NULL", `('0b7e7dee-87ea-4b6c-b1c5-0a1b2c3d4e5f')`, "UUID", "", `'0B7E7DEE-87ea-4b6c-b1c5-0a1b2c3d4e5f'`,
		nil, "spelling",
	},
	{
		"uuid in the other case as it is", "UUID PRIMARY KEY NOT NULL", `('0B7E7DEE-87ea-4b6c-b1c5-0a1b2c3d4e5f')`, "UUID", "{text}", `'0B7E7DEE-87ea-4b6c-b1c5-0a1b2c3d4e5f'`,
		liteKeys("0B7E7DEE-87ea-4b6c-b1c5-0a1b2c3d4e5f"), "",
	},
	{
		"uuid for a key in the other case", "UUID PRIMARY KEY NOT NULL", `('0b7e7dee-87ea-4b6c-b1c5-0a1b2c3d4e5f'), ('0B7E7DEE-87EA-4B6C-B1C5-0A1B2C3D4E5F')`, "TEXT", "{uuid}", `'0b7e7dee-87ea-4b6c-b1c5-000000000000'`,
		liteKeys("0B7E7DEE-87EA-4B6C-B1C5-0A1B2C3D4E5F"), "",
	},
	{"uuid as bytes", "UUID PRIMARY KEY NOT NULL", `('a')`, "UUID", "", `x'0b7e7dee87ea4b6cb1c50a1b2c3d4e5f'`, nil, "unparseable"},
}

// What one value keeps, with an index and without, and whether it stops a sweep.
func TestSQLiteValues(t *testing.T) {
	t.Parallel()
	for _, c := range liteValueCases {
		for _, unparseable := range []string{"abort", "ignore"} {
			t.Run(c.name+"/"+unparseable, func(t *testing.T) {
				t.Parallel()
				w := newLiteWorld(t, `CREATE TABLE blobs (id `+c.blobs+`)`, `INSERT INTO blobs VALUES `+c.keys,
					`CREATE TABLE s (n INTEGER PRIMARY KEY, k `+c.column+`)`, `INSERT INTO s (k) VALUES (NULL), (`+c.value+`)`)
				src := liteTable(t, "s", "k", c.format)
				src.IgnoreUnparseable, src.AllowEmpty = unparseable == "ignore", true
				c.check(t, w, src, false)
				w.exec(t, `CREATE INDEX i ON s (k)`)
				c.check(t, w, src, true)
			})
		}
	}
}

func (c liteValueCase) check(t *testing.T, w *liteWorld, src liveness.Source, indexed bool) {
	t.Helper()
	l := w.mustResolve(t, src)
	if l.Scanned() == indexed {
		t.Fatalf("scanned: %t", l.Scanned())
	}
	want := slices.DeleteFunc(w.keys(t, w.tier(t).Page(sqlite.Span{}), "true"), func(key blob.Key) bool { return slices.Contains(c.live, key) })
	if dead := w.dead(t, l); !slices.Equal(dead, want) {
		t.Errorf("indexed %t: dead %q, want %q", indexed, dead, want)
	}
	bad := w.badValue(t, l)
	if wanted := c.bad == "spelling" || c.bad == "unparseable" && !src.IgnoreUnparseable; (bad != nil) != wanted {
		t.Errorf("indexed %t: bad value %v", indexed, bad)
	}
	if bad != nil && (bad.Unparseable != (c.bad == "unparseable") || bad.Row != "n = 2") {
		t.Errorf("indexed %t: %+v", indexed, bad)
	}
}

func TestSQLiteBadValueMessages(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		table, format, value string
		want                 []string
		index                bool
	}{
		{`CREATE TABLE s (a, b, k TEXT, PRIMARY KEY (b, a))`, "{hex}", `'no hex'`, []string{`the value "no hex" in row b = 'B', a = 1 doesn't fit`, "on_unparseable: ignore"}, false},
		{`CREATE TABLE s (a, b, k TEXT)`, "{hex}", `'00FF'`, []string{`"00FF" in row rowid = 1 isn't in the canonical spelling`, "or run: CREATE INDEX"}, true},
		{`CREATE TABLE s (a, rowid, k TEXT)`, "{hex}", `'00FF'`, []string{"in row _rowid_ = 1 isn't"}, true},
		{`CREATE TABLE s (a, b PRIMARY KEY, k TEXT) WITHOUT ROWID`, "{hex}", `'00FF'`, []string{`in row b = 'B' isn't`}, true},
		{`CREATE TABLE s (a, b, k TEXT)`, "{hex}", `x'3030'`, []string{`the value "X'3030'" in row rowid = 1 isn't in the canonical spelling`}, false},
		{`CREATE TABLE s (a, b, k TEXT)`, "{hex}", `hex(zeroblob(999))||'x'`, []string{`…" in row`}, false},
	} {
		w := newLiteWorld(t, `CREATE TABLE blobs (id BLOB PRIMARY KEY NOT NULL)`, `INSERT INTO blobs VALUES (x'00ff')`, c.table,
			`INSERT INTO s VALUES (1, 'B', `+c.value+`)`, `CREATE INDEX i ON s (k)`)
		src := liteTable(t, "s", "k", c.format)
		l := w.mustResolve(t, src)
		bad := w.badValue(t, l)
		if bad == nil {
			t.Errorf("%s in %s: no bad value", c.value, c.table)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(bad.String(), want) {
				t.Errorf("%s doesn't contain %q", bad, want)
			}
		}
		if c.index != (bad.Index != "") {
			t.Errorf("index: %q", bad.Index)
		}
		if bad.Index == "" {
			continue
		}
		w.exec(t, bad.Index)
		l = w.mustResolve(t, src)
		if bad := w.badValue(t, l); bad != nil {
			t.Errorf("with the index: %s", bad)
		}
		if dead := w.dead(t, l); len(dead) > 0 {
			t.Errorf("with the index: dead %q", dead)
		}
	}
}

// Every stretch of a table is looked at, however its rows are numbered.
func TestSQLiteBadValueReadsAllStretches(t *testing.T) {
	t.Parallel()
	for _, numbers := range []string{"n", "-n", "n * 1000000007 - 4000000000", "iif(n < 5, -9223372036854775808 + (n - 1), 9223372036854775798 + n)"} {
		w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `CREATE TABLE s (n INTEGER PRIMARY KEY, k TEXT)`,
			`WITH RECURSIVE c (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM c WHERE n < 9) INSERT INTO s SELECT `+numbers+`, n FROM c`)
		l := w.mustResolve(t, liteTable(t, "s", "k", "{int}"))
		for stretch := 1; stretch <= 10; stretch++ {
			liveness.SetStretch(l, stretch)
			if bad := w.badValue(t, l); bad != nil {
				t.Error(bad)
			}
			for at := range 9 {
				w.exec(t, `UPDATE s SET k = 'X' WHERE k = ?`, at+1)
				if bad := w.badValue(t, l); bad == nil || bad.Value != "X" {
					t.Errorf("%s in stretches of %d, row %d: %v", numbers, stretch, at+1, bad)
				}
				w.exec(t, `UPDATE s SET k = ? WHERE k = 'X'`, at+1)
			}
		}
	}
}

// Rows that where leaves out, and views, are no reason to stop.
func TestSQLiteBadValueScope(t *testing.T) {
	t.Parallel()
	w := newLiteWorld(t, `CREATE TABLE blobs (id INTEGER PRIMARY KEY)`, `CREATE TABLE s (k INTEGER UNIQUE, gone)`,
		`INSERT INTO s VALUES (1, 0), ('n/a', 1)`, `CREATE VIEW v AS SELECT k FROM s`)
	src := liteTable(t, "s", "k", "")
	if w.badValue(t, w.mustResolve(t, src)) == nil {
		t.Error("no bad value")
	}
	src.Where = "gone = 0"
	if bad := w.badValue(t, w.mustResolve(t, src)); bad != nil {
		t.Error(bad)
	}
	if bad := w.badValue(t, w.mustResolve(t, liteTable(t, "v", "k", ""))); bad == nil || bad.Row != "of the view" {
		t.Error(bad)
	}
}

// No index is advised that would find a text key in one spelling and keep it in
// all others for ever. What finds it nonetheless keeps it.
func TestSQLiteTextKeyInAnotherSpelling(t *testing.T) {
	t.Parallel()
	const live, dead = "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A12"
	w := newLiteWorld(t, `CREATE TABLE blobs (id TEXT PRIMARY KEY NOT NULL)`, `INSERT INTO blobs VALUES ('`+live+`'), ('`+dead+`'), ('x')`,
		`CREATE TABLE s (k UUID)`, `INSERT INTO s VALUES ('`+live+`')`)
	src := liteTable(t, "s", "k", "")
	if bad := w.badValue(t, w.mustResolve(t, src)); bad == nil || bad.Unparseable || bad.Index != "" {
		t.Errorf("%+v", bad)
	}
	for _, index := range []string{"k", "k COLLATE NOCASE"} {
		w.exec(t, `CREATE INDEX "`+index+`" ON s (`+index+`)`)
		for _, src := range []liveness.Source{src, liteQuery(t, "SELECT k FROM s", "{uuid}")} {
			if got := w.dead(t, w.mustResolve(t, src)); !slices.Equal(got, liteKeys("x")) {
				t.Errorf("%s: dead %q", index, got)
			}
		}
	}
	src.Format = liteFormat(t, "{text}")
	if got := w.dead(t, w.mustResolve(t, src)); !slices.Equal(got, liteKeys(dead, "x")) {
		t.Errorf("as text: dead %q", got)
	}
}
