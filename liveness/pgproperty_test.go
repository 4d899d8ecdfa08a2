package liveness_test

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/liveness"
)

// What SQL finds dead is what blob.Format.Decode finds dead in the values as
// they are stored, whatever the types, the format and the values; and a value
// that the look-up by key would miss is found before. Each case is a transaction
// that is rolled back.
func TestPostgresAgreesWithFormat(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE COLLATION public.loose (provider = icu, locale = 'und-u-ks-level1', deterministic = false);
		CREATE DOMAIN public.word AS text; CREATE DOMAIN public.word2 AS public.word CHECK (length(value) < 100000);
		CREATE DOMAIN public.number AS bigint`)
	var n atomic.Int64
	rapid.Check(t, func(t *rapid.T) {
		ctx := context.Background()
		if w.agent.PgConn().TxStatus() != 'I' { // an earlier case failed
			if _, err := w.agent.Exec(ctx, "ROLLBACK"); err != nil {
				t.Fatal(err)
			}
		}
		c := drawPGCase(t, fmt.Sprintf("case%d", n.Add(1)))
		err := w.agent.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
			c.check(ctx, t, tx)
			return errPGRollback
		})
		if !errors.Is(err, errPGRollback) {
			t.Fatal(err)
		}
	})
}

type pgCase struct {
	schema  string
	kind    blob.Kind
	keyType string
	keys    []blob.Key
	sources []*pgCaseSource
	seqscan bool
}

type pgCaseSource struct {
	liveness.Source
	typ    string // of the column
	format blob.Format
	index  string
	query  bool
	values []*string
	live   []bool // what where looks at

	stored []*string // as the server prints it, raw bytes of a bytea
}

// Types of a source's column. Only a text takes any format.
var (
	pgTextTypes = []string{"text", "text", "varchar", "varchar(300)", `text COLLATE "C"`, `text COLLATE "en-x-icu"`, "text COLLATE public.loose", "char(90)", "name", "public.word2", "enum"}
	pgIntTypes  = []string{"int2", "int4", "int8", "oid", "public.number"}
)

func isPGText(typ string) bool { return slices.Contains(pgTextTypes, typ) }

func drawPGCase(t *rapid.T, schema string) *pgCase {
	c := &pgCase{schema: schema, seqscan: rapid.Bool().Draw(t, "seqscan")}
	c.kind = rapid.SampledFrom([]blob.Kind{blob.KindBytes, blob.KindText, blob.KindUUID, blob.KindInt}).Draw(t, "kind")
	keys := pgBytesKey
	switch c.kind {
	case blob.KindBytes:
		c.keyType = "bytea"
	case blob.KindText:
		c.keyType = rapid.SampledFrom([]string{"text", "varchar", `text COLLATE "C"`, `text COLLATE "en-x-icu"`, "public.word2"}).Draw(t, "key type")
		keys = pgTextKey
	case blob.KindUUID:
		c.keyType, keys = "uuid", pgUUIDKey
	case blob.KindInt:
		c.keyType = rapid.SampledFrom([]string{"int2", "int4", "int8", "public.number"}).Draw(t, "key type")
		keys = pgIntKey(c.keyType)
	}
	c.keys = rapid.SliceOfNDistinct(keys, 1, 8, rapid.ID[blob.Key]).Draw(t, "keys")
	for i := range rapid.IntRange(1, 3).Draw(t, "sources") {
		c.sources = append(c.sources, c.drawSource(t, "t"+strconv.Itoa(i)))
	}
	return c
}

func (c *pgCase) drawSource(t *rapid.T, table string) *pgCaseSource {
	s := &pgCaseSource{query: rapid.IntRange(0, 3).Draw(t, "query") == 0}
	s.Path, s.Name, s.Guard = table, table, liveness.Settle
	s.AllowEmpty = rapid.Bool().Draw(t, "allow empty")
	s.IgnoreUnparseable = rapid.Bool().Draw(t, "ignore unparseable")
	s.index = rapid.SampledFrom([]string{"", "plain", "lower"}).Draw(t, "index")
	if s.query {
		s.Query = "SELECT v FROM " + c.schema + "." + table + " WHERE live -- those"
	} else {
		s.Schema, s.Table, s.Column = c.schema, table, "v"
		s.Where = rapid.SampledFrom([]string{"", "live", "live -- those"}).Draw(t, "where")
	}
	types := map[blob.Kind][]string{
		blob.KindBytes: {"bytea"}, blob.KindUUID: {"uuid"}, blob.KindInt: pgIntTypes, blob.KindText: append([]string{"uuid"}, pgIntTypes...),
	}[c.kind]
	if rapid.IntRange(0, 3).Draw(t, "own type") > 0 {
		types = pgTextTypes
	}
	s.typ = rapid.SampledFrom(types).Draw(t, "type")
	s.drawFormat(t, c.kind)
	s.drawValues(t, c.keys)
	return s
}

// drawFormat draws one that fits. Types other than text have one of their own.
func (s *pgCaseSource) drawFormat(t *rapid.T, kind blob.Kind) {
	switch {
	case s.typ == "bytea":
		s.format = blob.DefaultFormat(blob.KindBytes)
	case s.typ == "uuid":
		s.format = blob.DefaultFormat(blob.KindUUID)
	case !isPGText(s.typ):
		s.format = blob.DefaultFormat(blob.KindInt)
	default:
		s.format = drawPGFormat(t, kind)
		if s.format.String() != "{text}" || kind != blob.KindText || rapid.Bool().Draw(t, "explicit") {
			s.Format = &s.format
		}
		return
	}
	if rapid.Bool().Draw(t, "explicit") {
		s.Format = &s.format
	}
}

var pgLiterals = []string{
	"", "", "", "sha256:", "/v1/files/", ".png", "a.b*c+?", "[x]", "(", ")", "|", "^", "$", "it's", `\d`, `\`, "%", "_", "é", "ΑΣ", "İı",
	"\n", "x\r\ny", "{", "}", "-", "#", "***:", "(?i)", "ID", "0", "aa", "==", " ", "$1", "E'", "😀", "`~!@&;:,<>\"",
}

func drawPGFormat(t *rapid.T, kind blob.Kind) blob.Format {
	placeholder := rapid.SampledFrom(map[blob.Kind][]string{
		blob.KindBytes: {"{hex}", "{HEX}", "{base64}", "{text}"},
		blob.KindText:  {"{text}", "{uuid}", "{int}"},
		blob.KindUUID:  {"{uuid}"},
		blob.KindInt:   {"{int}"},
	}[kind]).Draw(t, "placeholder")
	escape := strings.NewReplacer("{", "{{", "}", "}}")
	prefix, suffix := rapid.SampledFrom(pgLiterals).Draw(t, "prefix"), rapid.SampledFrom(pgLiterals).Draw(t, "suffix")
	f, err := blob.ParseFormat(escape.Replace(prefix) + placeholder + escape.Replace(suffix))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

var (
	pgBytesKey = rapid.Custom(func(t *rapid.T) blob.Key {
		switch rapid.IntRange(0, 5).Draw(t, "shape") {
		case 0:
			return blob.Key(rapid.SampledFrom([]string{"", "\x00", "abc", "ABC", "\xff", "é", "42", "a b"}).Draw(t, "bytes"))
		case 1: // its base64 has several lines
			return blob.Key(rapid.SliceOfN(rapid.Byte(), 57, 120).Draw(t, "bytes"))
		default:
			return blob.Key(rapid.SliceOfN(rapid.Byte(), 1, 33).Draw(t, "bytes"))
		}
	})
	pgTextKey = rapid.Custom(func(t *rapid.T) blob.Key {
		switch rapid.IntRange(0, 4).Draw(t, "shape") {
		case 0:
			return pgUUIDKey.Draw(t, "uuid")
		case 1:
			return pgIntKey("int8").Draw(t, "int")
		case 2:
			s := rapid.StringN(0, 12, 40).Draw(t, "text")
			return blob.Key(strings.ReplaceAll(strings.ToValidUTF8(s, "?"), "\x00", ""))
		default:
			return blob.Key(rapid.SampledFrom([]string{
				"", "a", "A", "ä", "Ä", "a ", " a", "x/y.png", "100%", "it's", `back\slash`, "new\nline", "é", "e\u0301",
				"007", "-0", "9223372036854775808", "ss", "ß", "I", "ı", "a\u200b", "\t", "$1", "😀",
			}).Draw(t, "text"))
		}
	})
	pgUUIDKey = rapid.Custom(func(t *rapid.T) blob.Key {
		h := hex.EncodeToString(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "uuid"))
		return blob.Key(h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:])
	})
)

func pgIntRange(typ string) (lo, hi int64) {
	switch typ {
	case "int2":
		return math.MinInt16, math.MaxInt16
	case "int4":
		return math.MinInt32, math.MaxInt32
	case "oid":
		return 0, math.MaxUint32
	default:
		return math.MinInt64, math.MaxInt64
	}
}

func pgIntKey(typ string) *rapid.Generator[blob.Key] {
	lo, hi := pgIntRange(typ)
	return rapid.Custom(func(t *rapid.T) blob.Key {
		n := rapid.Int64Range(max(lo, -20), 20).Draw(t, "small")
		if rapid.Bool().Draw(t, "large") {
			n = rapid.OneOf(rapid.SampledFrom([]int64{lo, hi}), rapid.Int64Range(lo, hi)).Draw(t, "int")
		}
		return blob.Key(strconv.FormatInt(n, 10))
	})
}

func (s *pgCaseSource) drawValues(t *rapid.T, keys []blob.Key) {
	for range rapid.IntRange(0, 8).Draw(t, "rows") {
		s.live = append(s.live, rapid.IntRange(0, 3).Draw(t, "live") > 0)
		if rapid.IntRange(0, 9).Draw(t, "null") == 0 {
			s.values = append(s.values, nil)
			continue
		}
		key := rapid.SampledFrom(keys).Draw(t, "of key")
		var v string
		switch {
		case s.typ == "bytea":
			v = string(rapid.OneOf(rapid.Just(key), pgBytesKey).Draw(t, "bytes"))
		case s.typ == "uuid":
			v = string(pgOwnOr(key, pgUUIDKey, blob.KindUUID).Draw(t, "uuid"))
		case !isPGText(s.typ):
			v = string(pgOwnOr(key, pgIntKey(s.typ), blob.KindInt).Draw(t, "int"))
			lo, hi := pgIntRange(s.typ)
			if n, _ := blob.Key(v).Int(); n < lo || n > hi {
				v = "7"
			}
		default:
			v = drawPGText(t, s.format, key)
		}
		if s.typ == "enum" {
			v = v[:min(len(v), 63)] // what a label can hold
			for !utf8.ValidString(v) {
				v = v[:len(v)-1]
			}
		}
		s.values = append(s.values, &v)
	}
}

// pgOwnOr is the key where it is one of the kind, or what gen gives.
func pgOwnOr(key blob.Key, gen *rapid.Generator[blob.Key], kind blob.Kind) *rapid.Generator[blob.Key] {
	if kind.Valid(key) != nil {
		return gen
	}
	return rapid.OneOf(rapid.Just(key), rapid.Just(key), gen)
}

// drawPGText draws a value of the format, a near miss, or anything.
func drawPGText(t *rapid.T, f blob.Format, key blob.Key) string {
	prefix, suffix, body := f.Prefix(), f.Suffix(), drawPGSpelling(t, f.Placeholder(), key)
	switch rapid.IntRange(0, 15).Draw(t, "wrap") {
	case 0:
		prefix = strings.ToUpper(prefix)
	case 1:
		suffix = strings.ToLower(suffix)
	case 2:
		prefix = ""
	case 3:
		suffix += rapid.SampledFrom([]string{"\n", " ", "x", suffix}).Draw(t, "behind")
	case 4:
		prefix = rapid.SampledFrom([]string{"\n", " ", "x", prefix}).Draw(t, "before") + prefix
	case 5:
		body = rapid.SampledFrom([]string{"", "x", "xyz", "zz", "0x10", "=", "====", "A", "\n", "1\n", "99999999999999999999999", strings.Repeat("0", 3000) + "1", "-", "1e3", "٣"}).Draw(t, "body")
	case 6:
		return strings.ReplaceAll(strings.ToValidUTF8(rapid.String().Draw(t, "anything"), "?"), "\x00", "")
	}
	if v := prefix + body + suffix; utf8.ValidString(v) && !strings.Contains(v, "\x00") {
		return v
	}
	return prefix + "?" + suffix
}

// drawPGSpelling draws one of the ways in which the key is written, most often
// the canonical one, or nearly one.
func drawPGSpelling(t *rapid.T, p blob.Placeholder, key blob.Key) string {
	raw := []byte(key)
	canonical := rapid.IntRange(0, 2).Draw(t, "canonical") > 0
	switch p {
	case blob.Hex, blob.UpperHex:
		s := hex.EncodeToString(raw)
		if canonical != (p == blob.Hex) {
			s = strings.ToUpper(s)
		}
		if !canonical && rapid.Bool().Draw(t, "mixed") {
			s = mixPGCase(t, s)
		}
		return s
	case blob.Base64:
		if canonical {
			return base64.StdEncoding.EncodeToString(raw)
		}
		return drawPGBase64(t, raw)
	case blob.UUID:
		if canonical {
			return string(key)
		}
		return rapid.SampledFrom([]string{strings.ToUpper(string(key)), mixPGCase(t, string(key)), "{" + string(key) + "}", strings.ReplaceAll(string(key), "-", "")}).Draw(t, "uuid")
	case blob.Int:
		if canonical {
			return string(key)
		}
		digits, negative := strings.CutPrefix(string(key), "-")
		sign := ""
		if negative || rapid.Bool().Draw(t, "sign") {
			sign = "-"
		}
		return sign + rapid.SampledFrom([]string{"0", "000", "+", " ", "", "9"}).Draw(t, "padding") + digits
	default:
		return string(key)
	}
}

func mixPGCase(t *rapid.T, s string) string {
	cut := rapid.IntRange(0, len(s)).Draw(t, "cut")
	return strings.ToUpper(s[:cut]) + strings.ToLower(s[cut:])
}

func drawPGBase64(t *rapid.T, raw []byte) string {
	encodings := []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding}
	s := rapid.SampledFrom(encodings).Draw(t, "alphabet").EncodeToString(raw)
	switch rapid.IntRange(0, 4).Draw(t, "then") {
	case 0:
		at := rapid.IntRange(0, len(s)).Draw(t, "break")
		return s[:at] + rapid.SampledFrom([]string{"\n", "\r\n", "\r"}).Draw(t, "break") + s[at:]
	case 1: // other spare bits
		if i := strings.LastIndexAny(s, "AQgw"); i >= 0 {
			return s[:i] + "B" + s[i+1:]
		}
	case 2:
		return s + "="
	}
	return s
}

// check makes the tables and compares.
func (c *pgCase) check(ctx context.Context, t *rapid.T, tx pgx.Tx) {
	c.create(ctx, t, tx)
	sources := make([]liveness.Source, len(c.sources))
	for i, s := range c.sources {
		sources[i] = s.Source
	}
	p, found, err := liveness.ResolvePostgres(ctx, tx, liveness.Options{Kind: c.kind}, sources, nil)
	if err != nil || p == nil {
		t.Fatalf("resolve: %v, %v", found, err)
	}
	bad := c.checkBadValue(ctx, t, tx, p)
	c.checkEmpty(ctx, t, tx, p)
	want := c.dead(bad)
	c.checkPushedDown(ctx, t, tx, p, want)
	c.checkAnswers(ctx, t, tx, p, want)
}

func (c *pgCase) exec(ctx context.Context, t *rapid.T, tx pgx.Tx, sql string, args ...any) {
	if _, err := tx.Exec(ctx, sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func (c *pgCase) create(ctx context.Context, t *rapid.T, tx pgx.Tx) {
	c.exec(ctx, t, tx, "CREATE SCHEMA "+c.schema)
	c.exec(ctx, t, tx, "CREATE TABLE "+c.schema+".blobs (key "+c.keyType+" NOT NULL UNIQUE)")
	param, err := pgdb.Array(c.kind, c.keys)
	if err != nil {
		t.Fatal(err)
	}
	c.exec(ctx, t, tx, "INSERT INTO "+c.schema+".blobs SELECT unnest($1::"+pgdb.Type(c.kind)+"[])", param)
	if !c.seqscan {
		c.exec(ctx, t, tx, "SET LOCAL enable_seqscan = off")
	}
	for _, s := range c.sources {
		c.createSource(ctx, t, tx, s)
	}
}

func (c *pgCase) createSource(ctx context.Context, t *rapid.T, tx pgx.Tx, s *pgCaseSource) {
	typ, table := s.typ, c.schema+"."+s.Name
	if typ == "enum" {
		typ = c.schema + ".enum_" + s.Name
		var labels []string
		for _, v := range s.values {
			if v != nil {
				labels = append(labels, "E'"+strings.NewReplacer(`'`, `''`, `\`, `\\`).Replace(*v)+"'")
			}
		}
		slices.Sort(labels)
		c.exec(ctx, t, tx, "CREATE TYPE "+typ+" AS ENUM ("+strings.Join(slices.Compact(labels), ", ")+")")
	}
	c.exec(ctx, t, tx, "CREATE TABLE "+table+" (id int GENERATED ALWAYS AS IDENTITY, v "+typ+", live boolean)")
	switch {
	case s.index == "plain":
		c.exec(ctx, t, tx, "CREATE INDEX ON "+table+" (v)")
	case s.index == "lower" && isPGText(s.typ) && s.typ != "enum":
		c.exec(ctx, t, tx, "CREATE INDEX ON "+table+" (lower(v))")
	}
	param, value := any(s.values), "x.v::"+strings.Split(typ, " COLLATE")[0]
	from := "unnest($1::text[], $2::boolean[])"
	shown := "v::text"
	if s.typ == "bytea" {
		var raw [][]byte
		for _, v := range s.values {
			if v == nil {
				raw = append(raw, nil)
			} else {
				raw = append(raw, []byte(*v))
			}
		}
		param, value, from, shown = raw, "x.v", "unnest($1::bytea[], $2::boolean[])", "v"
	}
	c.exec(ctx, t, tx, "INSERT INTO "+table+" (v, live) SELECT "+value+", x.live FROM "+from+" WITH ORDINALITY x (v, live, ord) ORDER BY x.ord", param, s.live)
	rows, err := tx.Query(ctx, "SELECT "+shown+" FROM "+table+" ORDER BY id")
	if err != nil {
		t.Fatal(err)
	}
	s.stored, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (*string, error) {
		if s.typ != "bytea" {
			var v *string
			return v, row.Scan(&v)
		}
		var b []byte
		if err := row.Scan(&b); err != nil || b == nil {
			return nil, err
		}
		v := string(b)
		return &v, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// referring returns the values that count.
func (s *pgCaseSource) referring() []string {
	var values []string
	for i, v := range s.stored {
		if v != nil && (s.live[i] || s.Where == "" && !s.query) {
			values = append(values, *v)
		}
	}
	return values
}

// empty says that nothing is referred to. Where the values are decoded, or those
// that name no key are ordinary, at the consult, those don't count.
func (s *pgCaseSource) empty(kind blob.Kind, consult bool) bool {
	decoded := s.query || s.typ == "enum" || kind == blob.KindBytes && s.format.Placeholder() == blob.Text || consult && s.IgnoreUnparseable
	return !slices.ContainsFunc(s.referring(), func(v string) bool {
		_, _, ok := s.format.Decode(v)
		return ok || !decoded
	})
}

func (s *pgCaseSource) hasCase() bool {
	p := s.format.Placeholder()
	return p == blob.Hex || p == blob.UpperHex || p == blob.UUID
}

// everySpelling says that the look-up finds a key in every spelling: where the
// values are decoded, and by an index over lower().
func (s *pgCaseSource) everySpelling(kind blob.Kind) bool {
	return s.query || s.typ == "enum" || kind == blob.KindBytes && s.format.Placeholder() == blob.Text ||
		isPGText(s.typ) && s.hasCase() && s.index == "lower"
}

// exact says that SQL finds no key that Go doesn't. Letter case of the literals
// doesn't matter to lower(), trailing spaces not to char(n), and much not to a
// nondeterministic collation: a few keys more are kept.
func (s *pgCaseSource) exact() bool {
	lower := isPGText(s.typ) && s.hasCase() && s.index == "lower"
	return s.typ != "char(90)" && (s.query || s.typ != "text COLLATE public.loose" && !lower)
}

// checkBadValue returns whether there is a bad value.
func (c *pgCase) checkBadValue(ctx context.Context, t *rapid.T, tx pgx.Tx, p *liveness.Postgres) bool {
	got, err := p.BadValue(ctx, func(ctx context.Context, fn func(context.Context, pgx.Tx) error) error { return fn(ctx, tx) })
	if err != nil {
		t.Fatal(err)
	}
	isBad := func(s *pgCaseSource, v string) bool {
		_, canonical, ok := s.format.Decode(v)
		return !ok && !s.IgnoreUnparseable || ok && !canonical && !s.everySpelling(c.kind)
	}
	for _, s := range c.sources {
		if s.query || !isPGText(s.typ) {
			continue
		}
		for _, v := range s.referring() {
			if !isBad(s, v) {
				continue
			}
			if got == nil {
				t.Fatalf("source %s: %q isn't found to be bad", s.Name, v)
			}
			return true
		}
	}
	if got != nil {
		t.Fatalf("a good value is found to be bad: %s", got)
	}
	return false
}

func (c *pgCase) checkEmpty(ctx context.Context, t *rapid.T, tx pgx.Tx, p *liveness.Postgres) {
	var want, got []string
	for _, s := range c.sources {
		if s.empty(c.kind, true) && !s.AllowEmpty {
			want = append(want, s.Name)
		}
	}
	empty, err := p.Empty(ctx, tx)
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range empty {
		got = append(got, info.Name)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("empty sources (-want +got):\n%s", diff)
	}
}

// pgDead is what is dead at most and, where SQL is exact, at least.
type pgDead struct {
	keys  []blob.Key
	exact bool
}

// dead computes in Go what no source refers to. Of bad values only the
// canonical ones must be found.
func (c *pgCase) dead(bad bool) pgDead {
	want := pgDead{exact: !bad}
	for _, key := range c.keys {
		if !slices.ContainsFunc(c.sources, func(s *pgCaseSource) bool { return s.refersTo(key, c.kind) }) {
			want.keys = append(want.keys, key)
		}
	}
	for _, s := range c.sources {
		want.exact = want.exact && s.exact()
	}
	slices.Sort(want.keys)
	return want
}

// refersTo says that a value names the key. A key of text that is a uuid or an
// integer in another spelling is kept whatever the values are.
func (s *pgCaseSource) refersTo(key blob.Key, kind blob.Kind) bool {
	if p := s.format.Placeholder(); kind == blob.KindText && (p == blob.UUID || p == blob.Int) {
		if _, canonical, ok := blob.DefaultFormat(p.Kind()).Decode(string(key)); ok && !canonical {
			return true
		}
	}
	return slices.ContainsFunc(s.referring(), func(v string) bool {
		named, canonical, ok := s.format.Decode(v)
		return ok && named == key && (canonical || s.everySpelling(kind))
	})
}

func (want pgDead) compare(t *rapid.T, what string, got []blob.Key) {
	slices.Sort(got)
	for _, key := range got {
		if !slices.Contains(want.keys, key) {
			t.Fatalf("%s: key %q is dead, and referred to", what, key)
		}
	}
	if diff := cmp.Diff(want.keys, got, cmpopts.EquateEmpty()); diff != "" && want.exact {
		t.Fatalf("%s: dead keys (-want +got):\n%s", what, diff)
	}
}

func (c *pgCase) checkPushedDown(ctx context.Context, t *rapid.T, tx pgx.Tx, p *liveness.Postgres, want pgDead) {
	rel, err := pgdb.LookupRelation(ctx, tx, c.schema, "blobs")
	if err != nil {
		t.Fatal(err)
	}
	ref := liveness.KeyRef{Expr: "p.key", Collation: rel.Columns[0].Collation}
	want.compare(t, "pushed down", c.selectKeys(ctx, t, tx, "true AND "+p.Unreferenced(ref)))

	bounds, err := pgdb.Array(c.kind, []blob.Key{rapid.SampledFrom(c.keys).Draw(t, "lo"), rapid.SampledFrom(c.keys).Draw(t, "hi")})
	if err != nil {
		t.Fatal(err)
	}
	typ := pgdb.Type(c.kind)
	const lo, hi = "($1::%[1]s[])[1]", "($1::%[1]s[])[2]"
	if rapid.IntRange(0, 3).Draw(t, "below") > 0 {
		ref.Lo = fmt.Sprintf(lo, typ)
	}
	if rapid.IntRange(0, 3).Draw(t, "above") > 0 {
		ref.Hi = fmt.Sprintf(hi, typ)
	}
	within := "cardinality($1::" + typ + "[]) = 2"
	if ref.Lo != "" {
		within += " AND p.key > " + ref.Lo
	}
	if ref.Hi != "" {
		within += " AND p.key <= " + ref.Hi
	}
	inside := c.selectKeys(ctx, t, tx, within, bounds)
	want.keys = slices.DeleteFunc(slices.Clone(want.keys), func(key blob.Key) bool { return !slices.Contains(inside, key) })
	want.compare(t, "pushed down within "+within, c.selectKeys(ctx, t, tx, within+" AND "+p.Unreferenced(ref), bounds))
}

func (c *pgCase) selectKeys(ctx context.Context, t *rapid.T, tx pgx.Tx, where string, args ...any) []blob.Key {
	sql := "SELECT " + pgdb.Canon(c.kind, "p.key") + " FROM " + c.schema + ".blobs p WHERE " + where
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	keys, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (blob.Key, error) {
		var b []byte
		err := row.Scan(&b)
		return blob.Key(b), err
	})
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return keys
}

func (c *pgCase) checkAnswers(ctx context.Context, t *rapid.T, tx pgx.Tx, p *liveness.Postgres, want pgDead) {
	answers, err := p.Answers(ctx, tx, c.keys)
	if err != nil {
		t.Fatal(err)
	}
	if len(answers) != len(c.keys) {
		t.Fatalf("%d answers about %d keys", len(answers), len(c.keys))
	}
	mustKeep := slices.ContainsFunc(c.sources, func(s *pgCaseSource) bool { return s.empty(c.kind, false) && !s.AllowEmpty })
	var dead []blob.Key
	for i, a := range answers {
		s := c.sources[a.Source]
		switch {
		case a.Empty != mustKeep, a.Empty && (!s.empty(c.kind, false) || s.AllowEmpty), a.Empty && a.Verdict != liveness.Referenced:
			t.Fatalf("key %q: %+v, an empty source: %t", c.keys[i], a, mustKeep)
		case a.Verdict == liveness.Unreferenced:
			dead = append(dead, c.keys[i])
		case !a.Empty && want.exact && !s.refersTo(c.keys[i], c.kind):
			t.Fatalf("key %q: source %d doesn't keep it", c.keys[i], a.Source)
		}
	}
	if !mustKeep {
		want.compare(t, "answers", dead)
	}
}
