package blob

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Decoding says what a source's values keep to themselves, and how it is taken off.
type Decoding struct {
	// Match is a regular expression, in Go's syntax, with exactly one group: the
	// key, and what a format says is around it. "" is the whole value.
	Match string
	// URL says that values are percent-encoded, as in the path of a URL.
	URL bool
	// Formats are those in which values are written.
	Formats []Format
}

// Decoder reads from a stored value, text or bytes, the keys that it names. It
// does so in three steps, always in this order:
//
//  1. match: each match of the group is a text, from the left, without overlaps; a
//     group that takes no part in its match is none. Without a regular
//     expression the whole value is the one text.
//  2. url: a text with a percent sign in it is read as it stands and once more with its
//     escapes resolved, once. What isn't an escape, %zz, stands for itself, and so
//     does a plus sign. Both readings count: which one the application meant
//     can't be seen, and a key too many keeps a blob, while one too few loses it.
//  3. format: each text is read in every format, and each that fits counts.
//
// So another format never takes a key away. A Decoder may be used by any number of
// goroutines at once. Only NewDecoder makes one.
type Decoder struct {
	match   *regexp.Regexp
	url     bool
	formats []Format
}

// NewDecoder checks the parts. An error names the one that is wrong, and says how
// to mend it.
func NewDecoder(d Decoding) (*Decoder, error) {
	dec := &Decoder{url: d.URL, formats: slices.Clone(d.Formats)}
	if len(d.Formats) == 0 {
		return nil, errors.New("no format: values can't be read without one")
	}
	for i, f := range d.Formats {
		if f.Placeholder() == 0 {
			return nil, fmt.Errorf("format %d of %d is empty", i+1, len(d.Formats))
		}
	}
	if d.Match == "" {
		return dec, nil
	}
	var err error
	if dec.match, err = regexp.Compile(d.Match); err != nil {
		return nil, fmt.Errorf("match %q: %w", Shorten(d.Match), err)
	}
	if n := dec.match.NumSubexp(); n != 1 {
		return nil, fmt.Errorf("match %q: it has %s, not one: put the key in ( ), and write (?: ) for what is grouped otherwise",
			Shorten(d.Match), groups(n))
	}
	return dec, nil
}

func groups(n int) string {
	if n == 0 {
		return "no group"
	}
	return fmt.Sprintf("%d groups", n)
}

// Reading says how a value was read. The zero value is Unparseable.
type Reading uint8

// The readings of a value.
const (
	// Unparseable names no key although every value should.
	Unparseable Reading = iota
	// Ordinary names no key and needn't: where there is a match, values without one,
	// or whose matches are no keys, are to be expected.
	Ordinary
	// Named names one key at least.
	Named
)

// String returns the reading's name as it stands in messages.
func (r Reading) String() string {
	switch r {
	case Ordinary:
		return "ordinary"
	case Named:
		return "named"
	default:
		return "unparseable"
	}
}

// Formats returns the formats, in the order in which they were given.
func (d *Decoder) Formats() []Format { return slices.Clone(d.formats) }

// Reversible returns the formats in which alone a key can be written, so that its
// values can be looked up instead of being read, one after the other: each format's
// Encode of a key is one of them. ok is false where values can't be told from the
// key: with match, with url, or with a format that isn't reversible.
//
// A look-up finds canonical values only; Format.Decode says which are.
func (d *Decoder) Reversible() (formats []Format, ok bool) {
	if d.match != nil || d.url {
		return nil, false
	}
	for _, f := range d.formats {
		if !f.Reversible() {
			return nil, false
		}
	}
	return slices.Clone(d.formats), true
}

// Append appends to keys those that value names, in ascending order, each once,
// and says how value was read. A key may be longer than MaxKeyLen and may be no key
// of a given kind: Kind.Valid tells. It may share value's memory.
func (d *Decoder) Append(keys []Key, value string) ([]Key, Reading) {
	before := len(keys)
	if d.match == nil {
		keys = d.text(keys, value)
	} else {
		for _, at := range d.match.FindAllStringSubmatchIndex(value, -1) {
			if at[2] >= 0 {
				keys = d.text(keys, value[at[2]:at[3]])
			}
		}
	}
	switch named := keys[before:]; {
	case len(named) == 1:
		return keys, Named
	case len(named) > 1:
		slices.Sort(named)
		return keys[:before+len(slices.Compact(named))], Named
	case d.match != nil:
		return keys, Ordinary
	default:
		return keys, Unparseable
	}
}

// Keys is Append to nothing.
func (d *Decoder) Keys(value string) ([]Key, Reading) { return d.Append(nil, value) }

// text reads one text.
func (d *Decoder) text(keys []Key, text string) []Key {
	keys = d.format(keys, text)
	if d.url {
		if plain := unescape(text); plain != text {
			keys = d.format(keys, plain)
		}
	}
	return keys
}

func (d *Decoder) format(keys []Key, text string) []Key {
	for i := range d.formats {
		if key, _, ok := d.formats[i].Decode(text); ok {
			keys = append(keys, key)
		}
	}
	return keys
}

// unescape resolves the percent escapes of a URL's path and leaves what is none.
func unescape(s string) string {
	next := strings.IndexByte(s, '%')
	if next < 0 {
		return s
	}
	var b strings.Builder
	b.Grow(len(s))
	for ; next >= 0; next = strings.IndexByte(s, '%') {
		b.WriteString(s[:next])
		s = s[next:]
		if len(s) < 3 || !isHexDigit(rune(s[1])) || !isHexDigit(rune(s[2])) {
			b.WriteByte('%')
			s = s[1:]
			continue
		}
		b.WriteByte(nibble(s[1])<<4 | nibble(s[2]))
		s = s[3:]
	}
	b.WriteString(s)
	return b.String()
}

func nibble(c byte) byte {
	switch {
	case c <= '9':
		return c - '0'
	case c <= 'F':
		return c - 'A' + 10
	default:
		return c - 'a' + 10
	}
}
