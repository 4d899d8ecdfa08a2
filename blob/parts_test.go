package blob_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/alkblobs/gc-agent/blob"
)

func TestParts(t *testing.T) {
	t.Parallel()
	hex := func(from, to int) blob.Part { return blob.Part{Placeholder: blob.Hex, From: from, To: to} }
	literal := func(s string) blob.Part { return blob.Part{Literal: s} }
	tests := []struct {
		source, prefix, suffix string
		parts                  []blob.Part
		simple, reversible     bool
	}{
		{"{hex}", "", "", []blob.Part{hex(0, 0)}, true, true},
		{"{hex[:]}", "", "", []blob.Part{hex(0, 0)}, true, true},
		{"a{{{hex}}}b", "a{", "}b", []blob.Part{literal("a{"), hex(0, 0), literal("}b")}, true, true},
		{"{hex[0:2]}/{hex}", "", "", []blob.Part{hex(0, 2), literal("/"), hex(0, 0)}, false, true},
		{"x/{hex[:2]}/{hex[2:]}.y", "x/", ".y", []blob.Part{literal("x/"), hex(0, 2), literal("/"), hex(2, 0), literal(".y")}, false, true},
		{"{*}/{hex}", "", "", []blob.Part{{}, literal("/"), hex(0, 0)}, false, false},
		{"{uuid[0:36]}", "", "", []blob.Part{{Placeholder: blob.UUID}}, true, true},
	}
	for _, tt := range tests {
		f := mustFormat(t, tt.source)
		if f.Prefix() != tt.prefix || f.Suffix() != tt.suffix || f.Simple() != tt.simple || f.Reversible() != tt.reversible {
			t.Errorf("%s: %q, %q, simple %t, reversible %t", f, f.Prefix(), f.Suffix(), f.Simple(), f.Reversible())
		}
		if diff := cmp.Diff(tt.parts, f.Parts()); diff != "" {
			t.Errorf("%s: %s", f, diff)
		}
	}
	if zero := (blob.Format{}); zero.Simple() || zero.Reversible() || zero.Parts() != nil {
		t.Error("the zero format has parts")
	}
}

// Whoever gets the parts can't change the format.
func TestPartsAreCopied(t *testing.T) {
	t.Parallel()
	f := mustFormat(t, "{hex[0:2]}/{hex}")
	f.Parts()[1].Literal = "-"
	if _, _, ok := f.Decode("ab/abcd"); !ok {
		t.Error("the format has changed")
	}
}

// A key of "" is a value that fits nothing.
func TestDecodeParts(t *testing.T) {
	t.Parallel()
	type value struct {
		value, key string
		canonical  bool
	}
	upper := strings.ToUpper(aUUID)
	tests := []struct {
		format string
		values []value
	}{
		{"{hex[0:2]}/{hex}", []value{
			{"ab/abcd", "\xab\xcd", true},
			{"AB/abcd", "\xab\xcd", false},
			{"ab/ABCD", "\xab\xcd", false},
			{"aB/AbCd", "\xab\xcd", false},
			{"ab/ab", "\xab", true},
			{"ac/abcd", "", false},
			{"cd/abcd", "", false},
			{"ab/abc", "", false},
			{"ab/", "", false},
			{"/abcd", "", false},
			{"abcd", "", false},
			{"ab/abcd/", "", false},
			{"/ab/abcd", "", false},
			{"a/abcd", "", false},
			{"abc/abcd", "", false},
		}},
		{"{HEX[:2]}/{HEX[2:4]}/{HEX}.bin", []value{
			{"AB/CD/ABCDEF.bin", "\xab\xcd\xef", true},
			{"ab/cd/abcdef.bin", "\xab\xcd\xef", false},
			{"AB/CD/AB.bin", "", false},
			{"AB/CE/ABCDEF.bin", "", false},
		}},
		{"{hex[:2]}/{hex[2:4]}/{hex[4:]}", []value{
			{"ab/cd/ef01", "\xab\xcd\xef\x01", true},
			{"ab/CD/ef01", "\xab\xcd\xef\x01", false},
			{"ab/cd/", "\xab\xcd", true},
			{"ab/cd/e", "", false},
			{"ab/cd", "", false},
			{"ab/cd/ef/01", "", false},
		}},
		{"{hex[3:]}-{hex[:4]}", []value{ // they overlap
			{"def-abcd", "\xab\xcd\xef", true},
			{"Def-abcd", "\xab\xcd\xef", false},
			{"eef-abcd", "", false},
		}},
		{"{uuid[0:1]}/{uuid[1:2]}/{uuid}", []value{
			{"6/b/" + aUUID, aUUID, true},
			{"6/B/" + aUUID, aUUID, false},
			{"6/b/" + upper, aUUID, false},
			{"6/a/" + aUUID, "", false},
		}},
		{"{uuid}/{uuid}.png", []value{
			{aUUID + "/" + aUUID + ".png", aUUID, true},
			{aUUID + "/" + upper + ".png", aUUID, false},
			{aUUID + "/" + strings.Replace(aUUID, "6", "7", 1) + ".png", "", false},
		}},
		{"{int[0:2]}/{int}", []value{
			{"41/417", "417", true},
			{"-4/-417", "-417", true},
			{"00/007", "7", false}, // the slice is of what stands there
			{"41/0417", "", false},
			{"7/7", "", false},
		}},
		{"{text[0:2]}/{text}", []value{
			{"éß/éßü.png", "éßü.png", true},
			{"a//a/b", "a/b", true},
			{"u//u/1.png", "u/1.png", true},
			{"É\u00df/éß", "", false},
			{"é/é", "", false},
			{"\xff\xff/\xff\xff", "", false},
		}},
		{"{bytes[0:2]}{bytes}", []value{
			{"\xff\x00\xff\x00\x01", "\xff\x00\x01", true},
			{"abab", "ab", true},
			{"aba", "", false},
		}},
		{"{base64[0:2]}/{base64}", []value{
			{"+/" + "/" + "+/8=", "\xfb\xff", true},
			{"-_" + "/" + "+/8=", "\xfb\xff", false},
			{"+/" + "/" + "-_8", "\xfb\xff", false},
			{"AP/AP\n8Q", "", false},
			{"Ap/AP8Q", "", false},
		}},
		{"{*}/{hex}", []value{
			{"/abcd", "\xab\xcd", false},
			{"https://cdn.example.test/a/b/ABCD", "\xab\xcd", false},
			{"ab/cd/ef", "\xef", false},
			{"\xff\x00\n/ab", "\xab", false},
			{"abcd", "", false},
			{"x/abc", "", false},
			{"x/", "", false},
		}},
		{"{*}/{hex[0:2]}/{hex[2:]}", []value{
			{"objects/ab/cdef", "\xab\xcd\xef", false},
			{"ab/cdef", "", false},
		}},
		{"{int}.{*}", []value{
			{"41.tar.gz", "41", false},
			{"041.", "41", false},
			{"41", "", false},
			{"x41.png", "", false},
		}},
		{"{uuid}{*}", []value{{aUUID + "-thumb.webp", aUUID, false}, {aUUID[1:], "", false}}},
		{"data:{*},{base64}", []value{
			{"data:image/png;base64,AP8Q", "\x00\xff\x10", false},
			{"data:,AP\n8Q", "\x00\xff\x10", false},
		}},
		{"{*}a{*}b/{hex}", []value{{"a-b-a-b/abcd", "\xab\xcd", false}, {"a-/abcd", "", false}, {"b/abcd", "", false}}},
	}
	for _, tt := range tests {
		f := mustFormat(t, tt.format)
		for _, v := range tt.values {
			key, canonical, ok := f.Decode(v.value)
			if string(key) != v.key || canonical != v.canonical || ok != (v.key != "") {
				t.Errorf("%s of %q: %q, canonical %t, ok %t; want %q, %t", f, v.value, key, canonical, ok, v.key, v.canonical)
			}
			if v.canonical {
				if spelled, ok := f.Encode(key); spelled != v.value || !ok {
					t.Errorf("%s spells %q as %q, ok %t, not %q", f, key, spelled, ok, v.value)
				}
			}
		}
	}
}

func TestEncodePartsRefuses(t *testing.T) {
	t.Parallel()
	for format, keys := range map[string][]blob.Key{
		"{*}/{hex}":                     {"\xab"},
		"{int[0:2]}/{int}":              {"7", "007", ""},
		"{int[2:]}/{int}":               {"7"},
		"{hex[2:4]}/{hex}":              {"\xab", ""},
		"{text[0:3]}/{text}":            {"éé", "ab\x00"},
		"{bytes[1:]}/{bytes}":           {""},
		"{hex[:2]}/{hex[3:4]}{hex[2:]}": {"\xab"},
	} {
		for _, key := range keys {
			if value, ok := mustFormat(t, format).Encode(key); ok || value != "" {
				t.Errorf("%s spells key %q as %q", format, key, value)
			}
		}
	}
}

// Where a format can be read in two ways, the message shows both.
func TestAmbiguousFormats(t *testing.T) {
	t.Parallel()
	const apart = "; put text between that {hex} can't hold, or use match"
	tests := []struct{ source, want string }{
		{"{text}-{*}", `{*} at position 8 lets a value be read in two ways: in "--", {text} is "-" or ""; {text} can hold any text, so use match instead of {*}`},
		{"{*}-{text}", `{*} at position 1 lets a value be read in two ways: in "--", {text} is "" or "-"; {text} can hold any text, so use match instead of {*}`},
		{"{bytes}{*}", `{*} at position 8 lets a value be read in two ways: in "a", {bytes} is "a" or ""; {bytes} can hold any text, so use match instead of {*}`},
		{"https://{*}/{text}", `{*} at position 9 lets a value be read in two ways: in "https:////", {text} is "" or "/"; {text} can hold any text, so use match instead of {*}`},
		{"{*}{hex}", `{*} at position 1 lets a value be read in two ways: in "aaaa", {hex} is "aa" or "aaaa"` + apart},
		{"é{hex}{*}", `{*} at position 7 lets a value be read in two ways: in "éaaaa", {hex} is "aaaa" or "aa"` + apart},
		{"{hex}ab{*}", `{*} at position 8 lets a value be read in two ways: in "ccabab", {hex} is "ccab" or "cc"` + apart},
		{"{*}{hex[0:2]}{hex}", `{*} at position 1 lets a value be read in two ways: in "aaaaaa", {hex} is "aa" or "aaaa"` + apart},
		{"{*}-{int}", `{*} at position 1 lets a value be read in two ways: in "--1", {int} is "1" or "-1"; put text between that {int} can't hold, or use match`},
		{"{*}/{hex}.{*}", `{*} at position 1 lets a value be read in two ways: in "/bb./aa.", {hex} is "aa" or "bb"; use {*} once, or match`},
		{"{base64}={*}", `{*} at position 10 leaves it open where the parts of a value such as "a==" begin; put text between that {base64} can't hold, or use match`},
		{"{*}" + strings.Repeat("x", 300) + "/{hex}", `{*} at position 1 can't be checked in so long a format: shorten it, or use match instead of {*}`},
	}
	for _, tt := range tests {
		_, err := blob.ParseFormat(tt.source)
		if err == nil || !strings.HasSuffix(err.Error(), ": "+tt.want) {
			t.Errorf("%q:\n got %v\nwant %s", tt.source, err, tt.want)
		}
	}
	// These differ from others above in little, and have one reading.
	for _, source := range []string{
		"{*}/{hex}", "{int}.{*}", "{uuid}{*}", "{*}{uuid}", "{hex}x{*}", "{*},{base64}", "{hex[0:2]}{hex}",
		"{hex}{hex}", "{text}{text[1:]}", "{*}/{int}", "{*}{uuid}.png", "{*}/{hex}{hex[:4]}", "{hex}.{*}.{*}",
	} {
		if _, err := blob.ParseFormat(source); err != nil {
			t.Error(err)
		}
	}
}

// drawParts draws the source of a format of several parts, which may have two
// readings. The literals also occur in keys.
func drawParts(t *rapid.T, ignored bool) string {
	placeholder := rapid.SampledFrom(placeholders).Draw(t, "placeholder")
	name := strings.TrimSuffix(placeholder.String(), "}")
	literal := rapid.StringMatching(`[0aA=/{}éx-]{1,2}`).Filter(func(s string) bool { return !strings.Contains(s, "\n") })
	part := func() string {
		choice := rapid.IntRange(0, 5).Draw(t, "part")
		from := rapid.IntRange(0, 3).Draw(t, "from")
		switch {
		case choice == 0:
			return placeholder.String()
		case choice == 1:
			return name + "[" + string(rune('0'+from)) + ":]}"
		case choice == 2:
			return name + "[" + string(rune('0'+from)) + ":" + string(rune('1'+from+rapid.IntRange(0, 2).Draw(t, "length"))) + "]}"
		case choice < 5 || !ignored:
			return escape(literal.Draw(t, "literal"))
		}
		return "{*}"
	}
	sources := []string{placeholder.String()}
	for range rapid.IntRange(1, 4).Draw(t, "parts") {
		at := rapid.IntRange(0, len(sources)).Draw(t, "at")
		sources = slices.Insert(sources, at, part())
	}
	return strings.Join(sources, "")
}

// spell writes key into the format's parts, with any text for {*}. ok is false for
// a key that is too short.
func spell(t *rapid.T, f blob.Format, key blob.Key) (value string, ok bool) {
	for _, part := range f.Parts() {
		text := part.Literal
		if part == (blob.Part{}) {
			text = rapid.OneOf(rapid.StringMatching(`[0aA=/x-]{0,4}`), rapid.String()).Draw(t, "ignored")
		}
		if part.Placeholder != 0 {
			whole, _ := mustRapidFormat(t, part.Placeholder.String()).Encode(key)
			chars := strings.Split(whole, "")
			if part.Placeholder == blob.Bytes {
				chars = nil
				for i := range len(whole) {
					chars = append(chars, whole[i:i+1])
				}
			}
			if len(chars) < max(part.From, part.To) {
				return "", false
			}
			if part.To == 0 {
				part.To = len(chars)
			}
			text = strings.Join(chars[part.From:part.To], "")
			switch part.Placeholder {
			case blob.Hex, blob.UpperHex, blob.UUID:
				text = rapid.SampledFrom([]string{text, strings.ToUpper(text), strings.ToLower(text)}).Draw(t, "case")
			case blob.Base64:
				text = rapid.SampledFrom([]string{text, strings.NewReplacer("+", "-", "/", "_").Replace(text)}).Draw(t, "alphabet")
			}
		}
		value += text
	}
	return value, true
}

func mustRapidFormat(t *rapid.T, source string) blob.Format {
	f, err := blob.ParseFormat(source)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// However a format of several parts spells a key, it reads that key and no other.
func TestPartsReadWhatTheySpell(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		source := drawParts(t, rapid.Bool().Draw(t, "ignored"))
		f, err := blob.ParseFormat(source)
		if err != nil {
			if !strings.Contains(err.Error(), "{*} at position ") {
				t.Fatal(err)
			}
			t.Skip("ambiguous")
		}
		key := drawKey(t, f, "key")
		value, ok := spell(t, f, key)
		if canonical, can := f.Encode(key); can != (ok && f.Reversible()) {
			t.Fatalf("%s spells %q as %q, ok %t", f, key, canonical, can)
		}
		if !ok {
			t.Skip("too short")
		}
		if got, _, ok := f.Decode(value); got != key || !ok {
			t.Fatalf("%s reads %q, which spells %q, as %q, ok %t", f, value, key, got, ok)
		}
		checkDecode(t, f, value)
	})
}

// No value whatever has two keys, and Decode finds the one that there is.
func TestPartsHaveOneReading(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f, err := blob.ParseFormat(drawParts(t, true))
		if err != nil {
			t.Skip("ambiguous")
		}
		key := drawKey(t, f, "key")
		value, _ := spell(t, f, key)
		other, _ := spell(t, f, drawKey(t, f, "other"))
		alphabet := rapid.StringMatching(`[0aA=/{}éx-]{0,6}`)
		value = rapid.SampledFrom([]string{value, value + value, value + other, other + value[:len(value)/2]}).Draw(t, "whole") +
			rapid.SampledFrom([]string{"", alphabet.Draw(t, "rest")}).Draw(t, "more")
		checkDecode(t, f, value)
	})
}

func TestPartsMergeNoKeys(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := mustRapidFormat(t, drawParts(t, false))
		a, b := drawKey(t, f, "a"), drawKey(t, f, "b")
		aValue, aOK := f.Encode(a)
		bValue, bOK := f.Encode(b)
		if aOK && bOK && (a == b) != (aValue == bValue) {
			t.Fatalf("%s spells %q and %q as %q and %q", f, a, b, aValue, bValue)
		}
	})
}
