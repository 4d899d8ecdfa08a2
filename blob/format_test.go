package blob_test

import (
	"encoding/base64"
	"encoding/hex"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/alkblobs/gc-agent/blob"
)

const (
	aUUID  = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
	aHex   = "00ff10ab"
	aBytes = "\x00\xff\x10\xab"
)

func mustFormat(t testing.TB, s string) blob.Format {
	t.Helper()
	f, err := blob.ParseFormat(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestParseFormat(t *testing.T) {
	t.Parallel()
	tests := []struct {
		source, prefix string
		placeholder    blob.Placeholder
		suffix         string
		kind           blob.Kind
	}{
		{"{bytes}", "", blob.Bytes, "", blob.KindBytes},
		{"{text}", "", blob.Text, "", blob.KindText},
		{"{int}", "", blob.Int, "", blob.KindInt},
		{"{uuid}", "", blob.UUID, "", blob.KindUUID},
		{"{hex}", "", blob.Hex, "", blob.KindBytes},
		{"{HEX}", "", blob.UpperHex, "", blob.KindBytes},
		{"{base64}", "", blob.Base64, "", blob.KindBytes},
		{"sha256:{hex}", "sha256:", blob.Hex, "", blob.KindBytes},
		{"urn:oid:{int}", "urn:oid:", blob.Int, "", blob.KindInt},
		{"/v1/files/{text}", "/v1/files/", blob.Text, "", blob.KindText},
		{"é{uuid}.png", "é", blob.UUID, ".png", blob.KindUUID},
		{"{{{hex}}}", "{", blob.Hex, "}", blob.KindBytes},
		{"{{hex}}{hex}{{}}", "{hex}", blob.Hex, "{}", blob.KindBytes},
	}
	for _, tt := range tests {
		f := mustFormat(t, tt.source)
		if f.String() != tt.source || f.Prefix() != tt.prefix || f.Placeholder() != tt.placeholder ||
			f.Suffix() != tt.suffix || f.Kind() != tt.kind {
			t.Errorf("%s: %q, %q %s %q of %s", tt.source, f.String(), f.Prefix(), f.Placeholder(), f.Suffix(), f.Kind())
		}
	}
}

func TestParseFormatErrors(t *testing.T) {
	t.Parallel()
	const list = "{bytes}, {text}, {int}, {uuid}, {hex}, {HEX}, {base64}"
	const known = list + " or {*}"
	tests := []struct{ source, want string }{
		{"", `format "": no placeholder: it needs one of ` + list},
		{"sha256:", `format "sha256:": no placeholder: it needs one of ` + list},
		{"{{hex}}", `format "{{hex}}": no placeholder: it needs one of ` + list},
		{"é{sha}", `format "é{sha}": unknown placeholder {sha} at position 2: it can be ` + known},
		{"{Hex}", `format "{Hex}": unknown placeholder {Hex} at position 1: it can be ` + known},
		{"{ hex}", `format "{ hex}": unknown placeholder { hex} at position 1: it can be ` + known},
		{"{}", `format "{}": unknown placeholder {} at position 1: it can be ` + known},
		{"a{hex", `format "a{hex": brace at position 2 isn't closed (a literal brace is written {{)`},
		{"a{hex{text}", `format "a{hex{text}": brace at position 2 isn't closed (a literal brace is written {{)`},
		{"{", `format "{": brace at position 1 isn't closed (a literal brace is written {{)`},
		{"{hex}}", `format "{hex}}": closing brace at position 6 without an opening one (a literal brace is written }})`},
		{"{int}/{hex}", `format "{int}/{hex}": second placeholder {hex} at position 7: a value names one key, so {int} is its only placeholder, whole or in slices`},
		{"{HEX[0:2]}/{hex}", `format "{HEX[0:2]}/{hex}": second placeholder {hex} at position 12: a value names one key, so {HEX} is its only placeholder, whole or in slices`},
		{"{*}", `format "{*}": no placeholder: it needs one of ` + list},
		{"{*[1:]}", `format "{*[1:]}": unknown placeholder {*[1:]} at position 1: it can be ` + known},
		{"é{sha[0:2]}", `format "é{sha[0:2]}": unknown placeholder {sha[0:2]} at position 2: it can be ` + known},
		{"{hex[0:2]}/x", `format "{hex[0:2]}/x": the slices leave out what {hex} has from index 2 on: add {hex[2:]}`},
		{"{hex[0:2]}/{hex[4:]}", `format "{hex[0:2]}/{hex[4:]}": the slices leave out what {hex} has from index 2 on: add {hex[2:]}`},
		{"{hex[2:]}", `format "{hex[2:]}": the slices leave out what {hex} has from index 0 on: add {hex}`},
		{"é{hex[2]}", `format "é{hex[2]}": {hex[2]} at position 2 isn't a slice: write [from:to], [:to] or [from:], counted from 0`},
		{"{hex[0:2}", `format "{hex[0:2}": {hex[0:2} at position 1 isn't a slice: write [from:to], [:to] or [from:], counted from 0`},
		{"{hex[0:2]]}", `format "{hex[0:2]]}": {hex[0:2]]} at position 1 has the index "2]": an index is a number, counted from 0`},
		{"{hex[-2:]}", `format "{hex[-2:]}": {hex[-2:]} at position 1 has the index "-2": an index is a number, counted from 0`},
		{"{hex[a:2]}", `format "{hex[a:2]}": {hex[a:2]} at position 1 has the index "a": an index is a number, counted from 0`},
		{"{hex[0:2:4]}", `format "{hex[0:2:4]}": {hex[0:2:4]} at position 1 has the index "2:4": an index is a number, counted from 0`},
		{"{hex[:257]}", `format "{hex[:257]}": {hex[:257]} at position 1 has an index above 256`},
		{"{hex[99999999999999999999:]}", `format "{hex[99999999999999999999:]}": {hex[99999999999999999999:]} at position 1 has an index above 256`},
		{"{hex[2:2]}{hex}", `format "{hex[2:2]}{hex}": {hex[2:2]} at position 1 is empty: the second index must be greater than the first`},
		{"{hex[:0]}{hex}", `format "{hex[:0]}{hex}": {hex[:0]} at position 1 is empty: the second index must be greater than the first`},
		{"{hex}.{*}{*}", `format "{hex}.{*}{*}": second {*} at position 10: one stands for any text already`},
		{"é" + strings.Repeat("{hex}", 32), `format "é` + strings.Repeat("{hex}", 25) + `{…": {hex} at position 157 is one part too many: a format has at most 32`},
		{"{uuid[:37]}{uuid}", `format "{uuid[:37]}{uuid}": {uuid[:37]} at position 1 ends behind the uuid, which has 36 characters`},
		{"{uuid[36:]}{uuid}", `format "{uuid[36:]}{uuid}": {uuid[36:]} at position 1 ends behind the uuid, which has 36 characters`},
		{"a\x00{hex}", `format "a\x00{hex}": it isn't UTF-8 without NUL`},
		{"a\xff{hex}", `format "a\xff{hex}": it isn't UTF-8 without NUL`},
	}
	for _, tt := range tests {
		f, err := blob.ParseFormat(tt.source)
		if err == nil || err.Error() != tt.want {
			t.Errorf("%q:\n got %v\nwant %s", tt.source, err, tt.want)
		}
		if _, _, ok := f.Decode(""); ok || f.String() != "" {
			t.Errorf("%q: a format that fits values comes with the error", tt.source)
		}
	}
}

func TestDefaultFormat(t *testing.T) {
	t.Parallel()
	for kind, want := range map[blob.Kind]string{
		blob.KindBytes: "{bytes}", blob.KindText: "{text}", blob.KindUUID: "{uuid}", blob.KindInt: "{int}",
	} {
		f := blob.DefaultFormat(kind)
		if f.String() != want || f.Kind() != kind || f.Prefix() != "" || f.Suffix() != "" {
			t.Errorf("default format of %s: %s of %s", kind, f, f.Kind())
		}
	}
}

func TestZeroFormatFitsNothing(t *testing.T) {
	t.Parallel()
	for _, f := range []blob.Format{{}, blob.DefaultFormat(0)} {
		if _, _, ok := f.Decode("a"); ok {
			t.Error("decode: ok")
		}
		if _, ok := f.Encode("a"); ok {
			t.Error("encode: ok")
		}
		if f.Kind() != 0 || f.Placeholder() != 0 || f.String() != "" {
			t.Errorf("%q, %s, %s", f.String(), f.Placeholder(), f.Kind())
		}
	}
}

// canonical and other say how a value names its key; a refused value names none.
func TestDecode(t *testing.T) {
	t.Parallel()
	type spelling struct{ value, key string }
	tests := []struct {
		format           string
		canonical, other []spelling
		refused          []string
	}{
		{
			format:    "{bytes}",
			canonical: []spelling{{"", ""}, {aBytes, aBytes}, {"{bytes}", "{bytes}"}},
		},
		{
			format:    "{text}",
			canonical: []spelling{{"", ""}, {" é ", " é "}, {"e\u0301", "e\u0301"}},
			refused:   []string{"a\x00", "a\xff", "\xc3"},
		},
		{
			format:    "/v1/files/{text}",
			canonical: []spelling{{"/v1/files/u/1.png", "u/1.png"}, {"/v1/files/", ""}, {"/v1/files//v1/files/", "/v1/files/"}},
			refused:   []string{"", "/v1/files", "/V1/files/u/1.png", " /v1/files/u/1.png", "u/1.png"},
		},
		{
			format:    "aba{text}aba",
			canonical: []spelling{{"abaaba", ""}, {"abaabaaba", "aba"}},
			refused:   []string{"aba", "ababa"},
		},
		{
			format:    "{int}",
			canonical: []spelling{{"0", "0"}, {"-7", "-7"}, {"9223372036854775807", "9223372036854775807"}, {"-9223372036854775808", "-9223372036854775808"}},
			other:     []spelling{{"007", "7"}, {"-007", "-7"}, {"-0", "0"}, {"00", "0"}, {strings.Repeat("0", 40) + "41", "41"}},
			refused:   []string{"", "-", "+7", " 7", "7 ", "7\n", "n/a", "1_000", "0x7", "1e3", "7.0", "--7", "9223372036854775808", "-9223372036854775809", "٧"},
		},
		{
			format:    "urn:oid:-{int}",
			canonical: []spelling{{"urn:oid:-4", "4"}, {"urn:oid:--4", "-4"}},
			refused:   []string{"urn:oid:4", "urn:oid:-"},
		},
		{
			format:    "{uuid}",
			canonical: []spelling{{aUUID, aUUID}},
			other:     []spelling{{strings.ToUpper(aUUID), aUUID}, {"6BA7b810-9dad-11d1-80b4-00c04fd430c8", aUUID}},
			refused:   []string{"", strings.ReplaceAll(aUUID, "-", ""), "{" + aUUID + "}", aUUID + " ", "urn:uuid:" + aUUID, aUUID[:35] + "g", aUUID[:33] + "K"},
		},
		{
			format:    "{hex}",
			canonical: []spelling{{aHex, aBytes}},
			other:     []spelling{{"00FF10AB", aBytes}, {"00fF10aB", aBytes}},
			refused:   []string{"", "0", "00f", `\x00ff`, "0x00ff", "00 ff", "00ff\n", "zz"},
		},
		{
			format:    "{HEX}",
			canonical: []spelling{{"00FF10AB", aBytes}},
			other:     []spelling{{aHex, aBytes}},
			refused:   []string{"", "0"},
		},
		{
			format:    "sha256:{hex}.gz",
			canonical: []spelling{{"sha256:" + aHex + ".gz", aBytes}},
			other:     []spelling{{"sha256:00FF10AB.gz", aBytes}},
			refused:   []string{"sha256:.gz", "SHA256:" + aHex + ".gz", "sha256:" + aHex, aHex, "sha256:" + aHex + ".gz "},
		},
		{
			format:    "{base64}",
			canonical: []spelling{{"AA==", "\x00"}, {"+/8=", "\xfb\xff"}, {"AP8Q", "\x00\xff\x10"}},
			other: []spelling{
				{"AA", "\x00"},
				{"-_8=", "\xfb\xff"},
				{"-/8", "\xfb\xff"},
				{"AB==", "\x00"},
				{"AB", "\x00"},
				{"AA==\n", "\x00"},
				{"AP\r\n8Q", "\x00\xff\x10"},
			},
			refused: []string{"", "=", "====", "A", "AA=", "AA===", "A===", "AA== ", "AP 8Q", "AA==AA==", "\n", "AP8Q=", "*A=="},
		},
	}
	for _, tt := range tests {
		t.Run(tt.format, func(t *testing.T) {
			t.Parallel()
			f := mustFormat(t, tt.format)
			for canonical, spellings := range map[bool][]spelling{true: tt.canonical, false: tt.other} {
				for _, s := range spellings {
					key, gotCanonical, ok := f.Decode(s.value)
					if string(key) != s.key || gotCanonical != canonical || !ok {
						t.Errorf("%q: key %q, canonical %t, ok %t; want key %q, canonical %t", s.value, key, gotCanonical, ok, s.key, canonical)
					}
				}
			}
			for _, value := range tt.refused {
				if key, canonical, ok := f.Decode(value); ok || canonical || key != "" {
					t.Errorf("%q: key %q, canonical %t, ok %t; want none", value, key, canonical, ok)
				}
			}
		})
	}
}

// One digest in three spellings names one key.
func TestDecodeSpellingsOfOneDigest(t *testing.T) {
	t.Parallel()
	raw := strings.Repeat("\xa5\x01", 16)
	lower := hex.EncodeToString([]byte(raw))
	for format, value := range map[string]string{
		"sha256:{hex}": "sha256:" + lower,
		"{hex}":        strings.ToUpper(lower),
		"{bytes}":      raw,
	} {
		if key, _, ok := mustFormat(t, format).Decode(value); !ok || string(key) != raw {
			t.Errorf("%s of %q: key %x, ok %t", format, value, key, ok)
		}
	}
}

// A long key names a foreign blob; that is no reason to stop a sweep.
func TestDecodeLongKey(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a", 2*blob.MaxKeyLen+2)
	for _, format := range []string{"{text}", "{bytes}", "{hex}", "{base64}"} {
		key, _, ok := mustFormat(t, format).Decode(long)
		if !ok || len(key) <= blob.MaxKeyLen {
			t.Errorf("%s: a key of %d bytes, ok %t", format, len(key), ok)
		}
	}
}

func TestEncodeRefuses(t *testing.T) {
	t.Parallel()
	for format, keys := range map[string][]blob.Key{
		"x{text}":  {"a\x00", "\xff"},
		"{int}":    {"", "007", "-0", "+7", "a", "9223372036854775808"},
		"{uuid}":   {"", "a", blob.Key(strings.ToUpper(aUUID))},
		"{hex}":    {""},
		"{HEX}":    {""},
		"{base64}": {""},
	} {
		for _, key := range keys {
			if value, ok := mustFormat(t, format).Encode(key); ok || value != "" {
				t.Errorf("%s spells key %q as %q", format, key, value)
			}
		}
	}
}

var placeholders = []blob.Placeholder{blob.Bytes, blob.Text, blob.Int, blob.UUID, blob.Hex, blob.UpperHex, blob.Base64}

func escape(literal string) string {
	return strings.NewReplacer("{", "{{", "}", "}}").Replace(literal)
}

// drawFormat draws literals from what also occurs in keys, so that they overlap.
func drawFormat(t *rapid.T) blob.Format {
	literal := rapid.StringMatching(`[0aA=/{}é-]{0,4}`)
	source := escape(literal.Draw(t, "prefix")) +
		rapid.SampledFrom(placeholders).Draw(t, "placeholder").String() +
		escape(literal.Draw(t, "suffix"))
	f, err := blob.ParseFormat(source)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// drawKey draws a key that the format can spell.
func drawKey(t *rapid.T, f blob.Format, label string) blob.Key {
	if f.Kind() == blob.KindBytes && f.Placeholder() != blob.Bytes {
		return blob.Key(rapid.SliceOfN(rapid.Byte(), 1, 20).Draw(t, label))
	}
	return drawKeyOf(t, f.Kind(), label)
}

func drawKeyOf(t *rapid.T, kind blob.Kind, label string) blob.Key {
	switch kind {
	case blob.KindBytes:
		return blob.Key(rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, label))
	case blob.KindText:
		return blob.Key(rapid.OneOf(rapid.StringMatching(`[0aA=/{}é"\\-]{0,8}`), rapid.StringN(0, 10, 20)).
			Filter(func(s string) bool { return !strings.Contains(s, "\x00") }).Draw(t, label))
	case blob.KindUUID:
		return blob.Key(rapid.StringMatching(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`).Draw(t, label))
	default:
		n := rapid.Int64().Draw(t, label)
		return intKey(n)
	}
}

// drawValue draws values that fit the format, that nearly do, and any others.
func drawValue(t *rapid.T, f blob.Format) string {
	key := drawKey(t, f, "named key")
	canonical, ok := f.Encode(key)
	if !ok {
		t.Fatalf("%s can't spell %q", f, key)
	}
	body := canonical[len(f.Prefix()) : len(canonical)-len(f.Suffix())]
	body = rapid.SampledFrom([]string{
		body,
		strings.ToUpper(body),
		strings.ToLower(body),
		"00" + body,
		strings.Replace(body, "-", "-0", 1),
		strings.TrimRight(body, "="),
		strings.NewReplacer("+", "-", "/", "_").Replace(body),
		body + "\n",
		base64.RawURLEncoding.EncodeToString([]byte(key)),
		rapid.StringMatching(`[-0aAfF=+_/]{0,9}`).Draw(t, "near"),
		rapid.String().Draw(t, "any"),
	}).Draw(t, "body")
	return f.Prefix() + body + f.Suffix()
}

func TestEncodeThenDecode(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := drawFormat(t)
		key := drawKey(t, f, "key")
		value, ok := f.Encode(key)
		if !ok {
			t.Fatalf("%s can't spell %q", f, key)
		}
		if got, canonical, ok := f.Decode(value); got != key || !canonical || !ok {
			t.Fatalf("%s spells %q as %q, which is read as %q, canonical %t, ok %t", f, key, value, got, canonical, ok)
		}
	})
}

func TestEncodeMergesNoKeys(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := drawFormat(t)
		a, b := drawKey(t, f, "a"), drawKey(t, f, "b")
		aValue, _ := f.Encode(a)
		bValue, _ := f.Encode(b)
		if (a == b) != (aValue == bValue) {
			t.Fatalf("%s spells %q and %q as %q and %q", f, a, b, aValue, bValue)
		}
	})
}

func TestDecodeThenEncode(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := drawFormat(t)
		checkDecode(t, f, drawValue(t, f))
	})
}

// checkDecode holds for any format and any value.
func checkDecode(t interface {
	Helper()
	Fatalf(string, ...any)
}, f blob.Format, value string,
) {
	t.Helper()
	key, canonical, ok := f.Decode(value)
	if keys := f.Readings(value); len(keys) > 1 || ok != (len(keys) == 1) || ok && keys[0] != key {
		t.Fatalf("%s reads %q as %q, ok %t; its readings are %q", f, value, key, ok, keys)
	}
	if !ok {
		if key != "" || canonical {
			t.Fatalf("%s refuses %q with key %q, canonical %t", f, value, key, canonical)
		}
		return
	}
	if !strings.HasPrefix(value, f.Prefix()) || !strings.HasSuffix(value, f.Suffix()) {
		t.Fatalf("%s reads %q without its literals", f, value)
	}
	if err := f.Kind().Valid(key); err != nil && len(key) <= blob.MaxKeyLen {
		t.Fatalf("%s reads %q: %v", f, value, err)
	}
	spelled, ok := f.Encode(key)
	if !ok && !canonical && !f.Simple() {
		return // it has {*}, or the key is too short for a slice of a padded value
	}
	if !ok || canonical != (spelled == value) {
		t.Fatalf("%s reads %q as %q, canonical %t, and spells it %q, ok %t", f, value, key, canonical, spelled, ok)
	}
	if again, canonical, ok := f.Decode(spelled); again != key || !canonical || !ok {
		t.Fatalf("%s reads %q as %q but %q as %q, canonical %t, ok %t", f, value, key, spelled, again, canonical, ok)
	}
}

func FuzzParseFormat(f *testing.F) {
	for _, s := range []string{
		"{hex}", "sha256:{hex}", "urn:oid:{int}", "/v1/files/{text}", "{{{uuid}}}", "{bytes}é", "{HEX}.bin",
		"{base64}", "{hex[0:2]}/{hex}", "{*}", "{", "}", "{{", "}}", "{}", "{hex", "{int}{int}", "\x00{hex}", "\xff",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := blob.ParseFormat(s)
		if err != nil {
			if !utf8.ValidString(err.Error()) || strings.ContainsAny(err.Error(), "\x00\n") {
				t.Fatalf("%q: the error can't be printed: %q", s, err.Error())
			}
			return
		}
		if got.String() != s {
			t.Fatalf("%q prints as %q", s, got.String())
		}
		var again strings.Builder
		for _, part := range got.Parts() {
			again.WriteString(part.String())
		}
		if !strings.Contains(s, "[") && again.String() != s {
			t.Fatalf("%q is read as %q", s, again.String())
		}
		if same := mustFormat(t, again.String()); !slices.Equal(same.Parts(), got.Parts()) {
			t.Fatalf("%q is read as %q and %q", s, got.Parts(), same.Parts())
		}
	})
}

func FuzzDecode(f *testing.F) {
	for _, seed := range [][2]string{
		{"{hex}", aHex},
		{"{hex}", "00FF"},
		{"{HEX}", "00ff"},
		{"{hex}", ""},
		{"sha256:{hex}", "sha256:" + aHex},
		{"{int}", "-0"},
		{"{int}", "007"},
		{"urn:oid:{int}", "urn:oid:41"},
		{"{int}", "+1"},
		{"{uuid}", strings.ToUpper(aUUID)},
		{"{uuid}", aUUID[:33] + "K"},
		{"{base64}", "-_8"},
		{"{base64}", "AB=="},
		{"{base64}", "AP\n8Q"},
		{"/v1/files/{text}", "/v1/files/u/1.png"},
		{"{text}", "\xff"},
		{"{bytes}", aBytes},
		{"a{text}a", "a"},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, format, value string) {
		parsed, err := blob.ParseFormat(format)
		if err != nil {
			return
		}
		checkDecode(t, parsed, value)
		// The literals would rarely be met by chance.
		checkDecode(t, parsed, parsed.Prefix()+value+parsed.Suffix())
	})
}
