package blob_test

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
	"golang.org/x/text/unicode/norm"
	"pgregory.net/rapid"

	"github.com/alkblobs/gc-agent/blob"
)

var (
	nfc   = blob.Folding{NFC: true}
	lower = blob.Folding{Lower: true}
	both  = blob.Folding{NFC: true, Lower: true}
)

func TestFold(t *testing.T) {
	t.Parallel()
	tests := []struct {
		folding   blob.Folding
		key, want blob.Key
	}{
		{blob.Folding{}, "E\u0301.PNG", "E\u0301.PNG"},
		{nfc, "E\u0301.PNG", "É.PNG"},
		{nfc, "É.PNG", "É.PNG"},
		{lower, "U/1.PNG", "u/1.png"},
		{lower, "E\u0301", "e\u0301"},
		{both, "E\u0301.PNG", "é.png"},
		{both, "É.PNG", "é.png"},
		{lower, "STRASSE", "strasse"},
		{lower, "Straße", "strasse"},
		{lower, "ΌΣΟΣ", "όσοσ"},
		{lower, "όσος", "όσοσ"},
		{lower, "\u212a", "k"}, // the sign for kelvin
		{lower, "I", "i"},
		{lower, "\u0131", "\u0131"},
		{lower, "\u13a0\uab70", "\u13a0\u13a0"},
		{both, "α\u0345\u0301", "άι"},
		{both, "A\xff\u0301", "A\xff\u0301"},
		{both, "\xc3", "\xc3"},
		{both, "", ""},
	}
	for _, tt := range tests {
		want := tt.want
		if tt.folding == both && utf8.ValidString(string(want)) {
			want = blob.Key(norm.NFC.String(string(want)))
		}
		if got := tt.folding.Fold(tt.key); got != want {
			t.Errorf("%+v of %q: %q, not %q", tt.folding, tt.key, got, want)
		}
	}
}

// Every character folds once and for all, in each folding, and to the same as what
// its mappings to the other cases do.
func TestFoldEveryCharacter(t *testing.T) {
	t.Parallel()
	// The one whose simple lower case is i, though its full one isn't; and the one
	// whose upper case is I.
	turkish := map[rune]bool{'\u0130': true, '\u0131': true}
	const end = 0x30000 // no character behind has a case or a decomposition
	for r := range rune(end) {
		if !utf8.ValidRune(r) {
			continue
		}
		for _, f := range []blob.Folding{nfc, lower, both} {
			once := f.Fold(blob.Key(r))
			if again := f.Fold(once); again != once {
				t.Errorf("%+v of %U: %q, then %q", f, r, once, again)
			}
			for _, mapped := range []rune{unicode.ToLower(r), unicode.ToUpper(r), unicode.ToTitle(r)} {
				if f.Lower && mapped != r && !turkish[r] && f.Fold(blob.Key(mapped)) != once {
					t.Errorf("%+v of %U: %q, but of %U: %q", f, r, once, mapped, f.Fold(blob.Key(mapped)))
				}
			}
		}
	}
}

// drawOddText draws marks that combine, letters whose case is irregular, and others.
func drawOddText(t *rapid.T) string {
	odd := []rune("aAeEiIkKsSß\u1e9eςσΣ\u0130\u0131\u0301\u0307\u0323\u0327\u0345\u03b1\u1fb3\u1fbc\u212a\u212bÅ\u01f0\u0149\ufb03\u13a0\uab70\u1100\u1161\uac00\u0958\u2126\u0344/.")
	return rapid.OneOf(rapid.StringOfN(rapid.SampledFrom(odd), 0, 40, -1), rapid.String(),
		rapid.Map(rapid.IntRange(0, 80), func(n int) string { return "E" + strings.Repeat("\u0301", n) }),
	).Draw(t, "text")
}

func TestFoldTwiceIsFoldOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		key := blob.Key(drawOddText(t) + rapid.SampledFrom([]string{"", "", "\xff"}).Draw(t, "more"))
		for _, f := range []blob.Folding{{}, nfc, lower, both} {
			once := f.Fold(key)
			if again := f.Fold(once); again != once {
				t.Fatalf("%+v of %q: %q, then %q", f, key, once, again)
			}
			if !utf8.ValidString(string(key)) && once != key {
				t.Fatalf("%+v of %q, which isn't UTF-8: %q", f, key, once)
			}
			if err := blob.KindText.Valid(once); utf8.ValidString(string(key)) && !strings.Contains(string(key), "\x00") && err != nil && len(once) <= blob.MaxKeyLen {
				t.Fatalf("%+v of %q: %v", f, key, err)
			}
		}
	})
}

// Whatever an application did to a text by Unicode's rules, it is the same text.
func TestFoldUndoesMappings(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := drawOddText(t)
		fold := func(f blob.Folding, s string) blob.Key { return f.Fold(blob.Key(s)) }
		if want := fold(lower, text); fold(lower, cases.Lower(language.Und).String(text)) != want {
			t.Fatalf("%q in lower case folds to %q, not %q", text, fold(lower, cases.Lower(language.Und).String(text)), want)
		}
		for _, form := range []norm.Form{norm.NFC, norm.NFD} {
			for _, f := range []blob.Folding{nfc, both} {
				if got, want := fold(f, form.String(text)), fold(f, text); got != want {
					t.Fatalf("%+v: %q, composed or decomposed, folds to %q, not %q", f, text, got, want)
				}
			}
		}
	})
}

func TestFoldingCheck(t *testing.T) {
	t.Parallel()
	for _, k := range []blob.Kind{blob.KindBytes, blob.KindText, blob.KindUUID, blob.KindInt} {
		if err := (blob.Folding{}).Check(k); err != nil {
			t.Errorf("nothing, of %s: %v", k, err)
		}
		for _, f := range []blob.Folding{nfc, lower, both} {
			if err := f.Check(k); (err == nil) != (k == blob.KindText) {
				t.Errorf("%+v of %s: %v", f, k, err)
			}
		}
	}
	const want = "keys that are integers can't be normalised or folded, only text: remove normalize and fold"
	if err := nfc.Check(blob.KindInt); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func BenchmarkFold(b *testing.B) {
	for _, key := range []blob.Key{"u/1/avatar.png", "U/1/Avatar.PNG", "u/1/größe.png", "u/1/gro\u0308ße.png"} {
		b.Run(string(key), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				both.Fold(key)
			}
		})
	}
}
