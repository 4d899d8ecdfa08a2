package liveness_test

import (
	"database/sql"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/sqlite"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
	"github.com/alkblobs/gc-agent/liveness"

	"pgregory.net/rapid"
)

// What SQL finds dead is what blob.Format.Decode finds dead in the values as they
// are stored, whatever the columns' types, the formats and the values; and a value
// that SQL would miss is found before.
func TestSQLiteAgreesWithFormat(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		c := drawLiteCase(rt)
		w := newLiteWorldIn(rt, t.TempDir(), `CREATE TABLE blobs (id `+c.keyType+` NOT NULL UNIQUE)`)
		c.create(rt, w)
		c.check(rt, w)
	})
}

// liteCase is a pool with its sources. Several sources are resolved together.
type liteCase struct {
	kind    blob.Kind
	keyType string
	keys    []blob.Key
	sources []*liteCaseSource
}

type liteCaseSource struct {
	liveness.Source
	column string // its declaration
	index  string
	values []any
	scope  []bool // whether where is true

	stored []liteStored
}

// liteStored is a value as SQLite has stored it.
type liteStored struct {
	class, text string
}

var liteKeyChars = map[blob.Kind]*rapid.Generator[blob.Key]{
	blob.KindBytes: rapid.Map(rapid.SliceOfN(rapid.SampledFrom([]byte{0x00, 0x0f, 0x12, 0x41, 0xfb, 0xff}), 0, 3), func(b []byte) blob.Key { return blob.Key(b) }),
	blob.KindText: rapid.OneOf(
		rapid.Map(rapid.StringOfN(rapid.RuneFrom([]rune("aA01 .ä%")), 0, 3, -1), func(s string) blob.Key { return blob.Key(s) }),
		rapid.SampledFrom([]blob.Key{"0b7e7dee-87ea-4b6c-b1c5-0a1b2c3d4e5f", "0B7E7DEE-87ea-4b6c-b1c5-0a1b2c3d4e5f", "007", "7", "1e3", "1000", "9223372036854775808"})),
	blob.KindInt: rapid.SampledFrom([]blob.Key{"0", "1", "-1", "10", "41", "1000", "9007199254740993", "9223372036854775807", "-9223372036854775808"}),
}

func drawLiteCase(t *rapid.T) *liteCase {
	c := &liteCase{kind: rapid.SampledFrom([]blob.Kind{blob.KindBytes, blob.KindText, blob.KindInt}).Draw(t, "kind")}
	c.keyType = rapid.SampledFrom(map[blob.Kind][]string{
		blob.KindBytes: {"BLOB", ""}, blob.KindText: {"TEXT", "VARCHAR(40)"}, blob.KindInt: {"INTEGER", "BIGINT"},
	}[c.kind]).Draw(t, "key type")
	c.keys = rapid.SliceOfNDistinct(liteKeyChars[c.kind], 1, 6, rapid.ID[blob.Key]).Draw(t, "keys")
	for i := range rapid.IntRange(1, 3).Draw(t, "sources") {
		c.sources = append(c.sources, c.drawSource(t, fmt.Sprintf("s%d", i)))
	}
	return c
}

// Formats by the kind of the keys, and the columns that can be read with them.
var (
	liteFormats = map[blob.Kind][]string{
		blob.KindBytes: {"{bytes}", "{hex}", "{HEX}", "{base64}", "{text}", "x'{hex}", "{base64}."},
		blob.KindText:  {"{text}", "{uuid}", "{int}", "a{text}", "{text}0", "n-{int}"},
		blob.KindInt:   {"{int}", "n-{int}", "{int}0"},
	}
	liteTextColumns = []string{"TEXT", "TEXT", "VARCHAR(99)", "TEXT COLLATE NOCASE", "TEXT COLLATE RTRIM", "STRING", "UUID", ""}
	liteIntColumns  = []string{"INTEGER", "BIGINT", "DECIMAL", "REAL"}
	liteByteColumns = []string{"BLOB", ""}
)

func (c *liteCase) drawSource(t *rapid.T, name string) *liteCaseSource {
	s := &liteCaseSource{}
	s.Path, s.Name, s.AllowEmpty = name, name, true
	s.IgnoreUnparseable = rapid.Bool().Draw(t, "ignore")
	f, err := blob.ParseFormat(rapid.SampledFrom(liteFormats[c.kind]).Draw(t, "format"))
	if err != nil {
		t.Fatal(err)
	}
	s.Format = &f
	columns := liteTextColumns
	switch f.String() {
	case "{bytes}":
		columns = liteByteColumns
	case "{int}":
		columns = append(slices.Clone(liteTextColumns), liteIntColumns...)
	}
	s.column = rapid.SampledFrom(columns).Draw(t, "column")
	s.index = rapid.SampledFrom([]string{"", "", "k", "k COLLATE NOCASE", "k, live"}).Draw(t, "index")
	if rapid.IntRange(0, 3).Draw(t, "query") == 0 {
		s.Query = "SELECT k FROM " + name + " WHERE live"
	} else {
		s.Table, s.Column = name, "k"
		s.Where = rapid.SampledFrom([]string{"live", "live = 1 OR 1 = 0"}).Draw(t, "where")
	}
	for range rapid.IntRange(0, 4).Draw(t, "values") {
		s.values = append(s.values, c.drawValue(t, f))
		s.scope = append(s.scope, rapid.IntRange(0, 4).Draw(t, "live") > 0)
	}
	return s
}

// drawValue draws what an application may have written: mostly one of the keys,
// in one spelling or another.
func (c *liteCase) drawValue(t *rapid.T, f blob.Format) any {
	key := rapid.SampledFrom(c.keys).Draw(t, "key")
	if rapid.Bool().Draw(t, "any key") {
		key = liteKeyChars[c.kind].Draw(t, "key")
	}
	value, ok := f.Encode(key)
	if !ok {
		value = string(key)
	}
	n, isInt := key.Int()
	switch rapid.IntRange(0, 11).Draw(t, "spelling") {
	case 0:
		return nil
	case 1:
		return strings.ToUpper(value)
	case 2:
		return strings.ToLower(value)
	case 3:
		return f.Prefix() + "00" + strings.TrimPrefix(value, f.Prefix())
	case 4:
		return f.Prefix() + base64.RawURLEncoding.EncodeToString([]byte(key)) + f.Suffix()
	case 5:
		return hex.EncodeToString([]byte(key))
	case 6:
		return []byte(value)
	case 7:
		return rapid.SampledFrom([]any{"n/a", "", 1.5, 1e300, -1e18, int64(1000), 41.0, "41.0", "a\x00b", "\xff", []byte("\xff")}).Draw(t, "odd")
	case 8:
		if isInt {
			return n
		}
	}
	if f.Placeholder() == blob.Bytes {
		return []byte(value)
	}
	return value
}

func (c *liteCase) create(t *rapid.T, w *liteWorld) {
	for _, key := range c.keys {
		switch n, _ := key.Int(); c.kind {
		case blob.KindInt:
			w.exec(t, `INSERT INTO blobs VALUES (?)`, n)
		case blob.KindText:
			w.exec(t, `INSERT INTO blobs VALUES (?)`, string(key))
		default:
			w.exec(t, `INSERT INTO blobs VALUES (?)`, []byte(key))
		}
	}
	for _, s := range c.sources {
		w.exec(t, `CREATE TABLE `+s.Name+` (k `+s.column+`, live INTEGER)`)
		if s.index != "" {
			w.exec(t, `CREATE INDEX i`+s.Name+` ON `+s.Name+` (`+s.index+`)`)
		}
		for i, v := range s.values {
			w.exec(t, `INSERT INTO `+s.Name+` VALUES (?, ?)`, v, s.scope[i])
		}
		s.stored = w.stored(t, `SELECT typeof(k), CAST(k AS BLOB) FROM `+s.Name+` WHERE live AND k IS NOT NULL`)
	}
}

func (w *liteWorld) stored(t liteTB, query string) []liteStored {
	stored, err := sqlitedb.Collect(t.Context(), w.agent, func(rows *sql.Rows) (liteStored, error) {
		var v liteStored
		var text []byte
		err := rows.Scan(&v.class, &text)
		v.text = string(text)
		return v, err
	}, query)
	if err != nil {
		t.Fatal(err)
	}
	return stored
}

// key reads a value as the package says that it is read.
func (v liteStored) key(f blob.Format) (key blob.Key, ok bool) {
	if f.Placeholder() == blob.Bytes && v.class != "blob" {
		return "", false
	}
	text := v.text
	if v.class == "real" {
		if text, ok = strings.CutSuffix(text, ".0"); !ok || len(text) > 16 {
			return "", false
		}
	}
	key, _, ok = f.Decode(text)
	return key, ok
}

// exact says that the column compares values byte by byte, and stores texts as
// they are: what SQL finds is then known to the last key. Otherwise it may find
// more.
func (s *liteCaseSource) exact() bool {
	bare := s.Format.Prefix() == "" && s.Format.Suffix() == ""
	switch s.column {
	case "TEXT COLLATE NOCASE", "TEXT COLLATE RTRIM":
		return false
	case "STRING", "UUID":
		return s.Format.Placeholder() == blob.Int && bare
	case "REAL":
		return false // beyond 53 bits
	default:
		return s.index != "k COLLATE NOCASE"
	}
}

// canonical says that the value is stored as a probe looks for it.
func (s *liteCaseSource) canonical(v liteStored, key blob.Key) bool {
	f := *s.Format
	want, _ := f.Encode(key)
	class := "text"
	switch {
	case f.Placeholder() == blob.Bytes:
		class = "blob"
	case f.String() == "{int}" && !strings.HasPrefix(s.column, "TEXT") && !strings.HasPrefix(s.column, "VARCHAR"):
		class = "integer"
		if v.class == "real" { // equal to the integer
			return s.column == ""
		}
	}
	return v.class == class && v.text == want
}

func (c *liteCase) check(t *rapid.T, w *liteWorld) {
	live, sure, exact := map[blob.Key]bool{}, map[blob.Key]bool{}, true
	var read []blob.Placeholder // of text keys: what is read as another's spelling is kept
	unparseable, misspelt := false, false
	var sources []liveness.Source
	for _, s := range c.sources {
		sources = append(sources, s.Source)
		exact = exact && s.exact()
		if p := s.Format.Placeholder(); c.kind == blob.KindText && p != blob.Text {
			read = append(read, p)
		}
		for _, v := range s.stored {
			key, ok := v.key(*s.Format)
			switch {
			case !ok:
				unparseable = unparseable || s.Query == "" && !s.IgnoreUnparseable
			case s.Query == "" && !s.canonical(v, key):
				misspelt, live[key] = true, true
			default:
				live[key], sure[key] = true, true
			}
		}
	}
	l := w.mustResolve(t, sources...)
	bad := w.badValue(t, l)
	switch {
	case bad == nil && unparseable, exact && (bad != nil) != (unparseable || misspelt), bad != nil && !unparseable && !misspelt && exact:
		t.Errorf("bad value %v, unparseable %t, misspelt %t", bad, unparseable, misspelt)
	}
	wanted := live
	if bad != nil {
		wanted = sure
	}
	dead := w.dead(t, l)
	for _, key := range w.keys(t, w.tier(t).Page(sqlite.Span{}), "true") {
		isDead, kept := slices.Contains(dead, key), slices.ContainsFunc(read, func(p blob.Placeholder) bool { return respelt(p, key) })
		if isDead && (wanted[key] || kept) {
			t.Errorf("%q is referred to, and dead", key)
		}
		if exact && !isDead && !wanted[key] && !live[key] && !kept {
			t.Errorf("%q isn't referred to, and isn't dead", key)
		}
	}
}

// respelt says that the key, read as a value, is another's spelling.
func respelt(p blob.Placeholder, key blob.Key) bool {
	_, canonical, ok := blob.DefaultFormat(p.Kind()).Decode(string(key))
	return ok && !canonical
}
