package blob

import (
	"fmt"
	"regexp"
	"strings"
)

// automaton runs over characters. It begins in state 0 and has accepted in the
// last one. steps[state] are the ways on, free those that take no character.
type automaton struct {
	layout *layout
	steps  [][]step
	free   [][]int
	end    int

	classes []rune // one character of each set that no step divides
}

type step struct {
	takes charset
	to    int
	slice int // which slice the character belongs to, counted from 1; 0 is none
}

type charset func(rune) bool

func one(want rune) charset     { return func(r rune) bool { return r == want } }
func anything(rune) bool        { return true }
func isDigit(r rune) bool       { return r >= '0' && r <= '9' }
func isNewline(r rune) bool     { return r == '\r' || r == '\n' }
func isHexDigit(r rune) bool    { return isDigit(r) || r >= 'a' && r <= 'f' || r >= 'A' && r <= 'F' }
func isInt(r rune) bool         { return isDigit(r) || r == '-' }
func isBase64Digit(r rune) bool { return r < 0x80 && strings.ContainsRune(base64Digits, r) }
func isBase64(r rune) bool      { return isBase64Digit(r) || r == '=' }

const base64Digits = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_+/"

// chars is the set of characters of the placeholder's spellings, line breaks
// aside, and class the same in a regular expression. It is for those that don't
// take any character.
func (p Placeholder) chars() (chars charset, class string) {
	switch p {
	case Int:
		return isInt, `[-0-9]`
	case Base64:
		return isBase64, `[-0-9A-Za-z+/_=]`
	default:
		return isHexDigit, `[0-9A-Fa-f]`
	}
}

// candidates are characters of all sets above, those first that look well in an
// example. The rest of each set is like one of them.
var candidates = []string{"abcdef", "123456789", "0", "ABCDEF", "xyghijklmnopqrstuvwz", "XYGHIJKLMNOPQRSTUVWZ", "-", "_", "+/", "=", "\n\r"}

func newAutomaton(l *layout) *automaton {
	a := &automaton{layout: l}
	at, slice := a.state(), 0
	for _, part := range l.parts {
		switch {
		case part.Literal != "":
			for _, r := range part.Literal {
				at = a.take(at, one(r), 0)
			}
		case part.Placeholder == 0:
			at = a.loop(at, anything, 0)
		default:
			slice++
			at = a.slice(at, part, slice)
		}
	}
	a.end = at
	a.classify()
	return a
}

func (a *automaton) state() int {
	a.steps, a.free = append(a.steps, nil), append(a.free, nil)
	return len(a.steps) - 1
}

func (a *automaton) step(from int, takes charset, to, slice int) {
	a.steps[from] = append(a.steps[from], step{takes, to, slice})
}

// take adds a state behind one character.
func (a *automaton) take(from int, takes charset, slice int) int {
	to := a.state()
	a.step(from, takes, to, slice)
	return to
}

// skip adds a state behind none.
func (a *automaton) skip(from int) int {
	to := a.state()
	a.free[from] = append(a.free[from], to)
	return to
}

// loop adds a state behind any number of characters.
func (a *automaton) loop(from int, takes charset, slice int) int {
	at := a.skip(from)
	a.step(at, takes, at, slice)
	return at
}

// slice adds the states of a slice, which need not be more exact than expression.
func (a *automaton) slice(at int, p Part, slice int) int {
	chars, _ := p.Placeholder.chars()
	switch {
	case p.Placeholder == Text || p.Placeholder == Bytes:
		return a.loop(at, anything, slice)
	case p.Placeholder == UUID:
		for i := p.From; i < p.endIn(uuidLen); i++ {
			at = a.take(at, uuidChar(i), slice)
		}
		return at
	case !p.open():
		for range p.To - p.From {
			at = a.take(at, chars, slice)
		}
		return at
	case p.From > 0:
		return a.loop(at, chars, slice)
	}
	begin := a.skip(at)
	switch p.Placeholder {
	case Int:
		sign := a.take(begin, one('-'), slice)
		digits := a.take(begin, isDigit, slice)
		a.step(sign, isDigit, digits, slice)
		a.step(digits, isDigit, digits, slice)
		return digits
	case Base64:
		a.step(begin, isNewline, begin, slice)
		digits := a.take(begin, isBase64Digit, slice)
		a.step(digits, isBase64Digit, digits, slice)
		a.step(digits, isNewline, digits, slice)
		return a.loop(digits, func(r rune) bool { return r == '=' || isNewline(r) }, slice)
	default:
		pair := a.take(a.take(begin, isHexDigit, slice), isHexDigit, slice)
		a.free[pair] = append(a.free[pair], begin)
		return pair
	}
}

// endIn is the end of the slice of a spelling of n characters.
func (p Part) endIn(n int) int {
	if p.open() {
		return n
	}
	return p.To
}

func uuidChar(i int) charset {
	if isUUIDDash(i) {
		return one('-')
	}
	return isHexDigit
}

// expression is the automaton as a regular expression, with a group for each
// slice. Beside {*}, text and bytes are always ambiguous: they never come so far.
func (l *layout) expression() string {
	var b strings.Builder
	b.WriteString(`\A`)
	for _, part := range l.parts {
		switch {
		case part.Literal != "":
			b.WriteString(regexp.QuoteMeta(part.Literal))
		case part.Placeholder == 0:
			b.WriteString(`(?s:.*)`)
		default:
			b.WriteString("(" + part.expression() + ")")
		}
	}
	b.WriteString(`\z`)
	return b.String()
}

func (p Part) expression() string {
	_, class := p.Placeholder.chars()
	switch {
	case p.Placeholder == UUID:
		return uuidExpression(p.From, p.endIn(uuidLen))
	case !p.open():
		return fmt.Sprintf("%s{%d}", class, p.To-p.From)
	case p.From > 0:
		return class + `*`
	}
	switch p.Placeholder {
	case Int:
		return `-?[0-9]+`
	case Base64:
		return `[\r\n]*[-0-9A-Za-z+/_][-0-9A-Za-z+/_\r\n]*[=\r\n]*`
	default:
		return `(?:[0-9A-Fa-f]{2})+`
	}
}

func uuidExpression(from, to int) string {
	var b strings.Builder
	for i := from; i < to; i++ {
		if isUUIDDash(i) {
			b.WriteByte('-')
		} else {
			b.WriteString(`[0-9A-Fa-f]`)
		}
	}
	return b.String()
}

// classify finds a character for each set of characters that all steps treat
// alike: every one in a literal, and one of each candidates' that is in none.
func (a *automaton) classify() {
	literals := map[rune]bool{}
	var inOrder []rune
	for _, part := range a.layout.parts {
		for _, r := range part.Literal {
			if !literals[r] {
				literals[r] = true
				inOrder = append(inOrder, r)
			}
		}
	}
	for _, set := range candidates {
		for _, r := range set {
			if !literals[r] {
				a.classes = append(a.classes, r)
				break
			}
		}
	}
	a.classes = append(a.classes, inOrder...)
	// Whatever else there is behaves like this one.
	other := 'é'
	for literals[other] {
		other++
	}
	a.classes = append(a.classes, other)
}

// reach returns the states that can be had from one without a character.
func (a *automaton) reach(from int) []int {
	seen := map[int]bool{from: true}
	states := []int{from}
	for i := 0; i < len(states); i++ {
		for _, to := range a.free[states[i]] {
			if !seen[to] {
				seen[to] = true
				states = append(states, to)
			}
		}
	}
	return states
}

// move is a step by a character of one class.
type move struct{ to, slice int }

// moves returns, by state and class, all steps that are possible, and by state
// whether the run may end there.
func (a *automaton) moves() (moves [][][]move, ends []bool) {
	moves, ends = make([][][]move, len(a.steps)), make([]bool, len(a.steps))
	for state := range a.steps {
		moves[state] = make([][]move, len(a.classes))
		for _, near := range a.reach(state) {
			ends[state] = ends[state] || near == a.end
			for _, s := range a.steps[near] {
				for class, r := range a.classes {
					if s.takes(r) {
						moves[state][class] = append(moves[state][class], move{s.to, s.slice})
					}
				}
			}
		}
	}
	return moves, ends
}

// pair is two runs after the same characters; differ says that they have divided
// them differently.
type pair struct {
	p, q   int
	differ bool
}

type origin struct {
	from  pair
	class int
}

// twoRuns looks for a shortest value with two runs that divide it differently.
func (a *automaton) twoRuns() (witness string, found bool) {
	moves, ends := a.moves()
	start := pair{}
	origins := map[pair]origin{start: {}}
	for queue := []pair{start}; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		if at.differ && ends[at.p] && ends[at.q] {
			return a.spell(origins, at), true
		}
		for class := range a.classes {
			for _, m := range moves[at.p][class] {
				for _, n := range moves[at.q][class] {
					next := pair{m.to, n.to, at.differ || m.slice != n.slice}
					if _, seen := origins[next]; !seen {
						origins[next] = origin{at, class}
						queue = append(queue, next)
					}
				}
			}
		}
	}
	return "", false
}

// spell returns the characters that led to a pair.
func (a *automaton) spell(origins map[pair]origin, at pair) string {
	var reversed []rune
	for at != (pair{}) {
		o := origins[at]
		reversed = append(reversed, a.classes[o.class])
		at = o.from
	}
	runes := make([]rune, 0, len(reversed))
	for i := len(reversed) - 1; i >= 0; i-- {
		runes = append(runes, reversed[i])
	}
	return string(runes)
}
