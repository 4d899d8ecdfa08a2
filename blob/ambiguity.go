package blob

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
)

// Only {*} can make a format ambiguous: without it the length of a value says
// where each part stands. With it, the format is made into an automaton over
// characters, one run of which is one way to divide a value among the parts. Two
// runs at once, over the same characters, are searched for a value that has two
// divisions in which the slices differ. If there is none, whatever division is
// found is the only one, and its key is the value's only key.
//
// The automaton knows nothing of slices that must agree, nor of numbers that are
// too long. It errs towards more values, and so towards refusing a format.

// maxStates bounds the automaton, and with maxParts the search for two runs.
const maxStates = 256

// checkReadings makes sure that a format with {*} has one reading, and prepares
// the layout for finding it.
func (l *layout) checkReadings(parts []placedPart) error {
	if l.ignores == 0 {
		return nil
	}
	at := 0
	for _, part := range parts {
		if part.Part == (Part{}) {
			at = part.position
			break
		}
	}
	a := newAutomaton(l)
	if len(a.steps) > maxStates {
		return fmt.Errorf("%s at position %d can't be checked in so long a format: shorten it, or use match instead of %s", ignored, at, ignored)
	}
	if witness, found := a.twoRuns(); found {
		return fmt.Errorf("%s at position %d %s; %s", ignored, at, l.explain(witness), l.mend())
	}
	l.pattern = regexp.MustCompile(l.expression())
	return nil
}

func (l *layout) mend() string {
	switch {
	case l.placeholder == Text || l.placeholder == Bytes:
		return fmt.Sprintf("%s can hold any text, so use match instead of %s", l.placeholder, ignored)
	case l.ignores > 1:
		return fmt.Sprintf("use %s once, or match", ignored)
	}
	return fmt.Sprintf("put text between that %s can't hold, or use match", l.placeholder)
}

// explain says what is ambiguous, if it can with a value and two of its keys.
func (l *layout) explain(witness string) string {
	if value, a, b := l.example(witness); value != "" {
		return fmt.Sprintf("lets a value be read in two ways: in %q, %s is %q or %q", Shorten(value), l.placeholder, Shorten(a), Shorten(b))
	}
	return fmt.Sprintf("leaves it open where the parts of a value such as %q begin", Shorten(witness))
}

// example looks for a short value that has two keys, and returns their spellings
// in it. The witness is one, unless its slices don't agree or it names one key
// in two places. Others are made up of the format's own pieces.
func (l *layout) example(witness string) (value, a, b string) {
	if a, b, ok := l.twoKeys(witness); ok {
		return witness, a, b
	}
	random := rand.New(rand.NewPCG(1, 2)) // the same message each time
	for range 200 {
		v := l.sample(random)
		if value != "" && len(v) >= len(value) {
			continue
		}
		if x, y, ok := l.twoKeys(v); ok {
			value, a, b = v, x, y
		}
	}
	return value, a, b
}

// sample makes up a value in which {*} stands for what other parts could.
func (l *layout) sample(random *rand.Rand) string {
	a, b := l.placeholder.sample(random), l.placeholder.sample(random)
	var value strings.Builder
	for _, part := range l.parts {
		if part != (Part{}) {
			value.WriteString(part.text(a))
			continue
		}
		if random.IntN(2) == 0 {
			for _, other := range l.parts {
				value.WriteString(other.text(b))
			}
			continue
		}
		for range random.IntN(4) {
			value.WriteString(l.parts[random.IntN(len(l.parts))].text(b))
		}
	}
	return value.String()
}

// text is the part in a value that spells its key so, as far as it goes.
func (p Part) text(spelled string) string {
	if p.Placeholder == 0 {
		return p.Literal
	}
	text, _ := p.of(spelled)
	return text
}

// sample spells a key of few characters, so that some of them repeat.
func (p Placeholder) sample(random *rand.Rand) string {
	of := func(n int, chars string) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = chars[random.IntN(len(chars))]
		}
		return string(b)
	}
	switch p {
	case Int:
		return of(1+random.IntN(4), "12")
	case UUID:
		return of(8, "ab") + "-" + of(4, "ab") + "-" + of(4, "ab") + "-" + of(4, "ab") + "-" + of(12, "ab")
	case Base64:
		return of(4*(1+random.IntN(2)), "aB")
	case UpperHex:
		return of(2*(1+random.IntN(3)), "AB")
	default:
		return of(2*(1+random.IntN(3)), "ab")
	}
}

// twoKeys returns two spellings of different keys in value.
func (l *layout) twoKeys(value string) (a, b string, ok bool) {
	spellings := map[Key]string{}
	l.readings(value, maxTries, func(spelled string, key Key) bool {
		if _, seen := spellings[key]; seen {
			return true
		}
		spellings[key] = spelled
		switch len(spellings) {
		case 1:
			a = spelled
		case 2:
			b = spelled
		}
		return len(spellings) < 2
	})
	return a, b, len(spellings) == 2
}

// maxTries bounds the search of an example in one value.
const maxTries = 5_000

// readings tries all ways to divide value among the parts and yields each key
// that comes of it, until yield returns false, or until it has tried too often.
func (l *layout) readings(value string, tries int, yield func(spelled string, key Key) bool) {
	// n is the length of the spelling, once a slice to its end has told it.
	var walk func(parts []Part, rest string, texts []string, n int) bool
	walk = func(parts []Part, rest string, texts []string, n int) bool {
		if tries--; tries < 0 {
			return false
		}
		if len(parts) == 0 {
			if key, _, ok := l.read(texts); ok && rest == "" {
				spelled, _ := l.join(texts)
				return yield(spelled, key)
			}
			return true
		}
		part, parts := parts[0], parts[1:]
		if part.Literal != "" {
			rest, ok := strings.CutPrefix(rest, part.Literal)
			return !ok || walk(parts, rest, texts, n)
		}
		if part.Placeholder != 0 && (n > 0 || !part.open()) {
			text, rest, ok := part.Placeholder.cut(rest, part.endIn(n)-part.From)
			return !ok || walk(parts, rest, append(texts, text), n)
		}
		for i := len(rest); i >= 0; i-- {
			divided, n := texts, n
			if part.Placeholder != 0 {
				divided, n = append(texts, rest[:i]), part.From+part.Placeholder.count(rest[:i])
			}
			if !walk(parts, rest[i:], divided, n) {
				return false
			}
		}
		return true
	}
	n := 0
	if l.placeholder == UUID {
		n = uuidLen
	}
	walk(l.parts, value, nil, n)
}
