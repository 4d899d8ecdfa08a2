package blob_test

import (
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/alkblobs/gc-agent/blob"
)

var kinds = []blob.Kind{blob.KindBytes, blob.KindText, blob.KindUUID, blob.KindInt}

func intKey(n int64) blob.Key { return blob.Key(strconv.FormatInt(n, 10)) }

func TestKindValid(t *testing.T) {
	t.Parallel()
	longest := strings.Repeat("a", blob.MaxKeyLen)
	tests := []struct {
		kind    blob.Kind
		valid   []string
		invalid []string
	}{
		{blob.KindBytes, []string{"", "\x00\xff", longest}, []string{longest + "a"}},
		{blob.KindText, []string{"", "é", "a b\n", longest}, []string{"a\x00", "\xff", longest + "a"}},
		{
			blob.KindUUID,
			[]string{aUUID, "00000000-0000-0000-0000-000000000000"},
			[]string{"", strings.ToUpper(aUUID), strings.ReplaceAll(aUUID, "-", ""), aUUID + "0", aUUID[:35] + "g", strings.Replace(aUUID, "-", "0", 1), strings.Repeat("-", 36)},
		},
		{
			blob.KindInt,
			[]string{"0", "-1", "9223372036854775807", "-9223372036854775808"},
			[]string{"", "-", "-0", "+1", "01", " 1", "9223372036854775808", "1.0", strings.Repeat("1", blob.MaxKeyLen+1)},
		},
		{0, nil, []string{"", "a"}},
	}
	for _, tt := range tests {
		for _, key := range tt.valid {
			if err := tt.kind.Valid(blob.Key(key)); err != nil {
				t.Errorf("%s: %v", tt.kind, err)
			}
		}
		for _, key := range tt.invalid {
			if err := tt.kind.Valid(blob.Key(key)); err == nil {
				t.Errorf("%s: key %q is valid", tt.kind, blob.Shorten(key))
			}
		}
	}
}

func TestKindValidNamesTheKey(t *testing.T) {
	t.Parallel()
	tests := []struct {
		kind blob.Kind
		key  blob.Key
		want string
	}{
		{blob.KindInt, "n/a", "key n/a isn't a key of a pool whose keys are integers"},
		{blob.KindUUID, "a\nb", `key "a\nb" isn't a key of a pool whose keys are uuid`},
		{blob.KindText, "\xff", `key \xff isn't a key of a pool whose keys are text`},
		{blob.KindBytes, blob.Key(strings.Repeat("\x01", 1501)), "key " + strings.Repeat("01", 64) + "… is 1501 bytes long, more than 1500"},
	}
	for _, tt := range tests {
		if err := tt.kind.Valid(tt.key); err == nil || err.Error() != tt.want {
			t.Errorf("got %v\nwant %s", err, tt.want)
		}
	}
}

func TestKindDisplay(t *testing.T) {
	t.Parallel()
	tests := []struct {
		kind blob.Kind
		key  blob.Key
		want string
	}{
		{blob.KindBytes, "abc", "616263"},
		{blob.KindBytes, "", ""},
		{blob.KindText, "u/1.png", "u/1.png"},
		{blob.KindText, "é", "é"},
		{blob.KindText, "a\tb", `"a\tb"`},
		{blob.KindText, `"a"`, `"\"a\""`},
		{blob.KindText, "\xff", `\xff`},
		{blob.KindText, `\xff`, `"\\xff"`},
		{blob.KindUUID, aUUID, aUUID},
		{blob.KindInt, "-7", "-7"},
	}
	for _, tt := range tests {
		if got := tt.kind.Display(tt.key); got != tt.want {
			t.Errorf("%s key %q: %s, want %s", tt.kind, tt.key, got, tt.want)
		}
	}
}

func TestParseKey(t *testing.T) {
	t.Parallel()
	tests := []struct {
		kind blob.Kind
		in   string
		want blob.Key
		err  string
	}{
		{blob.KindBytes, aHex, aBytes, ""},
		{blob.KindBytes, `\x` + strings.ToUpper(aHex), aBytes, ""},
		{blob.KindBytes, "xyz", "", `key "xyz" isn't hex`},
		{blob.KindBytes, "abc", "", `key "abc" isn't hex`},
		{blob.KindInt, `\xff`, "\xff", ""},
		{blob.KindText, `\xf`, "", `key "\\xf" isn't hex`},
		{blob.KindText, `"a\tb"`, "a\tb", ""},
		{blob.KindText, `"a`, `"a`, ""},
		{blob.KindText, `"`, `"`, ""},
		{blob.KindUUID, strings.ToUpper(aUUID), aUUID, ""},
		{blob.KindInt, "-7", "-7", ""},
		{blob.KindInt, "07", "07", ""},
	}
	for _, tt := range tests {
		got, err := tt.kind.ParseKey(tt.in)
		switch {
		case tt.err == "" && (err != nil || got != tt.want):
			t.Errorf("%s %q: %q, %v; want %q", tt.kind, tt.in, got, err, tt.want)
		case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
			t.Errorf("%s %q: error %v, want %s", tt.kind, tt.in, err, tt.err)
		}
	}
}

// What a list shows can be pasted into a command, also what isn't a key.
func TestParseKeyReadsWhatSpellWrites(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		kind := rapid.SampledFrom(kinds).Draw(t, "kind")
		key := drawKeyOf(t, kind, "key")
		if kind != blob.KindUUID && rapid.Bool().Draw(t, "any bytes") {
			key = blob.Key(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
		}
		if got, err := kind.ParseKey(kind.Spell(key)); err != nil || got != key {
			t.Fatalf("%s key %q is written %s, which is read as %q, %v", kind, key, kind.Spell(key), got, err)
		}
	})
}

func TestDisplayIsOnePrintableLine(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		kind := rapid.SampledFrom(kinds).Draw(t, "kind")
		key := blob.Key(rapid.String().Draw(t, "text") + string(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")))
		shown := kind.Display(key)
		for _, r := range shown {
			if r == utf8.RuneError && !strings.ContainsRune(string(key), r) || !strconv.IsPrint(r) {
				t.Fatalf("%s key %q is shown as %q", kind, key, shown)
			}
		}
	})
}

func TestShorten(t *testing.T) {
	t.Parallel()
	fits := strings.Repeat("a", 128)
	for in, want := range map[string]string{
		"":                              "",
		fits:                            fits,
		fits + "b":                      fits + "…",
		strings.Repeat("a", 127) + "é":  strings.Repeat("a", 127) + "…",
		strings.Repeat("a", 126) + "éb": strings.Repeat("a", 126) + "é…",
	} {
		if got := blob.Shorten(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestKeyInt(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64().Draw(t, "n")
		if got, ok := intKey(n).Int(); !ok || got != n {
			t.Fatalf("%d: %d, %t", n, got, ok)
		}
	})
	for _, key := range []blob.Key{"", "07", "-0", "+7", "n/a", "9223372036854775808", "0x7"} {
		if n, ok := key.Int(); ok {
			t.Errorf("key %q is the number %d", key, n)
		}
	}
}
