package blob

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/unicode/norm"
)

// Folding makes keys the same that a pool doesn't tell apart. It is applied to both
// sides, to the keys that values name and to those of blobs, when they are
// compared, and to nothing that is stored or deleted. The zero value changes nothing.
//
// The more keys are one, the fewer are dead. So Lower is the full case folding of
// Unicode and not a mapping to lower case: whatever an application has mapped to
// lower or upper case by Unicode's rules, whole or in part, folds to the same as
// before, also where the mapping changes the length (ß, SS) or depends on the letter's
// place (a final sigma). It knows no language: the dotless i of Turkish isn't
// folded to i.
type Folding struct {
	// NFC makes keys one that are canonically equivalent: é is one character or two.
	NFC bool
	// Lower makes keys one that differ in case.
	Lower bool
}

// Check says whether keys of the kind can be folded: only text can.
func (f Folding) Check(k Kind) error {
	if f == (Folding{}) || k == KindText {
		return nil
	}
	return fmt.Errorf("keys that are %s can't be normalised or folded, only text: remove normalize and fold", k)
}

// Fold returns the form in which keys of text are compared. Folding it again
// changes nothing. A key that isn't UTF-8 is left as it stands.
func (f Folding) Fold(key Key) Key {
	s := string(key)
	switch {
	case isASCII(s):
		if f.Lower {
			s = strings.ToLower(s)
		}
	case !utf8.ValidString(s):
	default:
		s = f.fold(s)
	}
	return Key(s)
}

func (f Folding) fold(s string) string {
	if f.Lower && f.NFC {
		// An iota below a letter folds to one beside it: decomposed first, it can't
		// get in front of other marks.
		s = norm.NFD.String(s)
	}
	if f.Lower {
		s = strings.Map(foldCherokee, cases.Fold().String(s))
	}
	if f.NFC {
		s = norm.NFC.String(s)
	}
	return s
}

// foldCherokee folds Cherokee, whose small letters Unicode folds to the capital
// ones. The library exchanges the two, so that it never ends.
func foldCherokee(r rune) rune {
	if unicode.Is(unicode.Cherokee, r) {
		return unicode.ToUpper(r)
	}
	return r
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}
