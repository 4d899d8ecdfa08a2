package blob

import (
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// ignored is how a format spells the part that stands for any text.
const ignored = "{*}"

// Part is one part of a format: literal text; or, where Placeholder is set, some
// or all characters of the placeholder's spelling; or, where neither is, any text.
type Part struct {
	// Literal is the text itself, unescaped.
	Literal string
	// Placeholder's spelling is counted in characters for {text}, in bytes otherwise.
	Placeholder Placeholder
	// From is the first character's index, To the one after the last; To 0 is
	// the end of the spelling, however long.
	From, To int
}

// String returns the part as a format spells it.
func (p Part) String() string {
	switch {
	case p.Literal != "":
		return strings.NewReplacer("{", "{{", "}", "}}").Replace(p.Literal)
	case p.Placeholder == 0:
		return ignored
	case p.From == 0 && p.open():
		return p.Placeholder.String()
	}
	slice := "[" + strconv.Itoa(p.From) + ":"
	if !p.open() {
		slice += strconv.Itoa(p.To)
	}
	return strings.TrimSuffix(p.Placeholder.String(), "}") + slice + "]}"
}

// open says that the slice goes to the end of the spelling.
func (p Part) open() bool { return p.To == 0 }

// layout is a format of several parts. It doesn't change once it is made.
type layout struct {
	placeholder Placeholder
	parts       []Part
	ignores     int // how many {*} there are

	slices []Part  // the parts that hold characters of the placeholder
	cover  []piece // what of the slices, in turn, makes up the placeholder

	// Without {*} a value of n characters spells the key in (n-fixed)/open ones.
	fixed, open int
	// With {*}, what tells the slices apart: a group each.
	pattern *regexp.Regexp
}

// piece is a slice without its first characters.
type piece struct{ slice, skip int }

// measure fills in what follows from the parts. Where the slices don't make up the
// placeholder it returns the index of the first character that is missing.
func (l *layout) measure() (missing int, ok bool) {
	for _, part := range l.parts {
		switch {
		case part.Literal != "":
			l.fixed += l.placeholder.count(part.Literal)
		case part.Placeholder == 0:
			l.ignores++
		default:
			l.slices = append(l.slices, part)
			if part.open() {
				l.open++
				l.fixed -= part.From
			} else {
				l.fixed += part.To - part.From
			}
		}
	}
	return l.findCover()
}

// findCover always takes the slice that leads furthest.
func (l *layout) findCover() (missing int, ok bool) {
	for next := 0; ; {
		best := -1
		for i, s := range l.slices {
			if s.From > next || !s.open() && s.To <= next {
				continue
			}
			if best < 0 || !l.slices[best].open() && (s.open() || s.To > l.slices[best].To) {
				best = i
			}
		}
		if best < 0 {
			return next, false
		}
		l.cover = append(l.cover, piece{slice: best, skip: next - l.slices[best].From})
		if l.slices[best].open() {
			return 0, true
		}
		next = l.slices[best].To
	}
}

func (l *layout) decode(value string) (Key, bool, bool) {
	var buf [8]string
	texts, ok := l.split(buf[:0], value)
	if !ok {
		return "", false, false
	}
	key, canonical, ok := l.read(texts)
	return key, canonical && l.ignores == 0, ok
}

// split appends the text of each slice.
func (l *layout) split(texts []string, value string) ([]string, bool) {
	if l.ignores > 0 {
		return l.search(texts, value)
	}
	// Where that is no whole number, the last part won't end with the value.
	n := (l.placeholder.count(value) - l.fixed) / l.open
	for _, part := range l.parts {
		var text string
		ok := true
		switch {
		case part.Literal != "":
			value, ok = strings.CutPrefix(value, part.Literal)
		case part.open():
			text, value, ok = l.placeholder.cut(value, n-part.From)
			texts = append(texts, text)
		default:
			text, value, ok = l.placeholder.cut(value, part.To-part.From)
			texts = append(texts, text)
		}
		if !ok {
			return nil, false
		}
	}
	return texts, value == ""
}

// search is split with {*}. The pattern may match in several ways, but the slices
// are the same in all of them.
func (l *layout) search(texts []string, value string) ([]string, bool) {
	at := l.pattern.FindStringSubmatchIndex(value)
	if at == nil {
		return nil, false
	}
	for i := 2; i < len(at); i += 2 {
		texts = append(texts, value[at[i]:at[i+1]])
	}
	return texts, true
}

// read returns the key of a value whose slices are texts, if they agree.
func (l *layout) read(texts []string) (key Key, canonical, ok bool) {
	spelled, ok := l.join(texts)
	if !ok || len(l.slices) > 1 && l.placeholder == Base64 && strings.ContainsAny(spelled, "\r\n") {
		return "", false, false // a slice wouldn't know whether to count line breaks
	}
	key, canonical, ok = l.placeholder.decode(spelled)
	if !ok {
		return "", false, false
	}
	for i, s := range l.slices {
		whole, ok := s.of(spelled)
		if !ok || !l.placeholder.agree(whole, texts[i]) {
			return "", false, false
		}
		canonical = canonical && whole == texts[i]
	}
	return key, canonical, true
}

// join puts the placeholder's spelling together.
func (l *layout) join(texts []string) (string, bool) {
	if first := l.cover[0]; len(l.cover) == 1 {
		return texts[first.slice], true
	}
	var spelled strings.Builder
	for _, c := range l.cover {
		_, text, ok := l.placeholder.cut(texts[c.slice], c.skip)
		if !ok {
			return "", false
		}
		spelled.WriteString(text)
	}
	return spelled.String(), true
}

// encode returns the value in which the placeholder is spelled so.
func (l *layout) encode(spelled string) (string, bool) {
	if l.ignores > 0 {
		return "", false
	}
	var value strings.Builder
	for _, part := range l.parts {
		text, ok := part.Literal, true
		if part.Placeholder != 0 {
			text, ok = part.of(spelled)
		}
		if !ok {
			return "", false
		}
		value.WriteString(text)
	}
	return value.String(), true
}

// of returns the slice of a spelling. ok is false if that is too short.
func (p Part) of(spelled string) (text string, ok bool) {
	_, text, ok = p.Placeholder.cut(spelled, p.From)
	if ok && !p.open() {
		text, _, ok = p.Placeholder.cut(text, p.To-p.From)
	}
	return text, ok
}

// count returns how many characters of the placeholder s would be.
func (p Placeholder) count(s string) int {
	if p == Text {
		return utf8.RuneCountInString(s)
	}
	return len(s)
}

// cut takes n characters of the placeholder from the front of s.
func (p Placeholder) cut(s string, n int) (head, tail string, ok bool) {
	switch {
	case n < 0 || len(s) < n:
		return "", s, false
	case p != Text:
		return s[:n], s[n:], true
	}
	at := 0
	for range n {
		if at == len(s) {
			return "", s, false
		}
		_, size := utf8.DecodeRuneInString(s[at:])
		at += size
	}
	return s[:at], s[at:], true
}

// agree says whether two slices of spellings are the same characters.
func (p Placeholder) agree(a, b string) bool {
	if a == b {
		return true
	}
	switch p {
	case Hex, UpperHex, UUID:
		// a is ASCII without k and s, the letters that others fold to.
		return len(a) == len(b) && strings.EqualFold(a, b)
	case Base64:
		return toStandard.Replace(a) == toStandard.Replace(b) && len(a) == len(b)
	default:
		return false
	}
}
