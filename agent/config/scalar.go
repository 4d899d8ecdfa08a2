package config

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"gopkg.in/yaml.v3"

	"github.com/alkblobs/gc-agent/blob"
)

// scalar is a value that is one piece of text, its variables expanded.
type scalar struct {
	value
	text     string
	expanded bool
}

// scalar reads a value with one of the tags, or one that holds a variable, which
// YAML takes for a string whatever it stands for.
func (v value) scalar(want string, tags ...string) (scalar, bool) {
	if !v.is(yaml.ScalarNode, want) {
		return scalar{}, false
	}
	s := scalar{value: v, text: v.node.Value}
	tag := v.node.ShortTag()
	if tag == "!!str" {
		var problems []string
		s.text, s.expanded, problems = expand(v.node.Value, v.d.env.variable)
		for _, p := range problems {
			v.fail("%s", p)
		}
		if problems != nil {
			return scalar{}, false
		}
	}
	switch {
	case !slices.Contains(tags, tag) && !s.expanded:
		v.fail("want %s, got %s%s", want, describe(v.node), quotesHint(v.node, tags))
	case strings.TrimSpace(s.text) == "":
		v.fail("is empty: want %s", v.orNothing(want))
	case !utf8.ValidString(s.text) || strings.Contains(s.text, "\x00"):
		v.fail("isn't UTF-8 without NUL")
	default:
		return s, true
	}
	return scalar{}, false
}

// quotesHint says what to do where only the quotes are wrong.
func quotesHint(n *yaml.Node, tags []string) string {
	wantsText := slices.Contains(tags, "!!str")
	switch n.ShortTag() {
	case "!!int", "!!float", "!!bool", "!!timestamp":
		if wantsText {
			return ": put it in quotes"
		}
	case "!!str":
		if !wantsText && n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0 {
			return ": write it without quotes"
		}
	}
	return ""
}

// secretRE is text that looks as if it held a password: a URL that was put into
// the wrong field, most likely.
var secretRE = regexp.MustCompile(`(?i)[:/]\S*@|passw`)

// quote spells the value as the file does, and only if it may be seen.
func (s scalar) quote() string {
	raw := s.node.Value
	switch {
	case secretRE.MatchString(raw) || secretRE.MatchString(s.text):
		return "the value (not shown: it may hold a password)"
	case s.expanded:
		return strconv.Quote(blob.Shorten(raw)) + " (expanded)"
	}
	return strconv.Quote(blob.Shorten(raw))
}

// because returns what a parser said, unless it may quote what mustn't be seen.
func (s scalar) because(err error) string {
	if s.expanded || secretRE.MatchString(s.text) {
		return ""
	}
	return ": " + err.Error()
}

// str reads any text.
func (v value) str(into *string) bool {
	s, ok := v.scalar("a string", "!!str")
	if ok {
		*into = s.text
	}
	return ok
}

// matching reads text of a form that want describes.
func (v value) matching(into *string, form *regexp.Regexp, want string) bool {
	s, ok := v.scalar("a string", "!!str")
	if ok && !form.MatchString(s.text) {
		v.fail("%s isn't %s", s.quote(), want)
		ok = false
	}
	if ok {
		*into = s.text
	}
	return ok
}

// choose reads one of the choices.
func choose[T ~string](v value, into *T, choices ...T) {
	s, ok := v.scalar("a string", "!!str")
	switch {
	case !ok:
	case slices.Contains(choices, T(s.text)):
		*into = T(s.text)
	default:
		v.fail("%s isn't known: want %s", s.quote(), list(choices))
	}
}

// list joins two or more names for a message.
func list[T ~string](names []T) string {
	words := make([]string, len(names))
	for i, n := range names {
		words[i] = string(n)
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

func (v value) boolean(into *bool) {
	s, ok := v.scalar("true or false", "!!bool")
	switch {
	case !ok:
	case s.text == "true" || s.text == "false":
		*into = s.text == "true"
	default:
		v.fail("%s is neither true nor false", s.quote())
	}
}

// whole reads a whole number between the bounds. Only the plain decimal
// spelling counts: YAML reads 010 as eight.
func whole[T int | int64](v value, into *T, lowest, highest T) {
	s, ok := v.scalar("a whole number", "!!int", "!!float")
	if !ok {
		return
	}
	n, err := strconv.ParseInt(s.text, 10, 64)
	switch {
	case err != nil || strconv.FormatInt(n, 10) != s.text:
		v.fail("%s isn't a whole number of at most 64 bits, such as 1000", s.quote())
	case n < int64(lowest) || n > int64(highest):
		v.fail("%s is out of range: %s", s.quote(), bounds(int64(lowest), int64(highest)))
	default:
		*into = T(n)
	}
}

func bounds(lowest, highest int64) string {
	if highest == math.MaxInt64 {
		return fmt.Sprintf("want at least %d", lowest)
	}
	return fmt.Sprintf("want %d to %d", lowest, highest)
}

// ratio reads a number over 0 and at most 1.
func (v value) ratio(into *float64) {
	s, ok := v.scalar("a number", "!!float", "!!int")
	if !ok {
		return
	}
	r, err := strconv.ParseFloat(s.text, 64)
	inRange := r > 0 && r <= 1 // false for what is no number
	if err != nil || !inRange {
		v.fail("%s isn't a number over 0 and at most 1, such as 0.5", s.quote())
		return
	}
	*into = r
}

// duration reads a duration that isn't negative.
func (v value) duration(into *time.Duration) bool {
	s, ok := v.scalar("a duration such as 7d, 12h or 100ms", "!!str", "!!int", "!!float")
	if !ok {
		return false
	}
	d, err := parseDuration(s.text)
	if err != nil {
		v.fail("%s: %v", s.quote(), err)
		return false
	}
	*into = d
	return true
}

// timeout reads a duration that Postgres and a person can both live with: zero
// would mean none there.
func (v value) timeout(into *time.Duration) {
	const longest = time.Hour
	var d time.Duration
	switch ok := v.duration(&d); {
	case !ok:
	case d < time.Millisecond || d > longest || d%time.Millisecond != 0:
		v.fail("want whole milliseconds, from 1ms to 1h")
	default:
		*into = d
	}
}

// size reads a number of bytes of at least one.
func (v value) size(into *int64) {
	s, ok := v.scalar("a size such as 256MiB", "!!str", "!!int")
	if !ok {
		return
	}
	n, err := parseSize(s.text)
	switch {
	case err != nil:
		v.fail("%s: %v", s.quote(), err)
	case n == 0:
		v.fail("want at least one byte")
	default:
		*into = n
	}
}
