package blob

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxSlice is the highest index of a slice: no digest's spelling is longer.
const maxSlice = 256

// maxParts bounds the work that one format can make.
const maxParts = 32

// uuidLen is the length of a uuid's spelling.
const uuidLen = 36

// ParseFormat reads a format: literal text around one placeholder, such as {hex},
// slices of it, such as {hex[0:2]}, and {*} for text that is ignored. A slice
// counts the characters of the placeholder's spelling from 0 and ends before its
// second index; either can be left out. Slices that add up to the whole
// placeholder, such as {hex[:2]}/{hex[2:]}, may stand for it. A literal brace is
// written twice.
//
// A format whose values could name two keys is refused, with an example. An error
// names the format, what is wrong with it and, counted in characters from 1, where.
func ParseFormat(s string) (Format, error) {
	parts, err := parseParts(s)
	if err == nil {
		var f Format
		if f, err = newFormat(s, parts); err == nil {
			return f, nil
		}
	}
	return Format{}, fmt.Errorf("format %q: %w", Shorten(s), err)
}

// placedPart is a part and where in the format its brace stands.
type placedPart struct {
	Part
	position int
}

func parseParts(s string) ([]placedPart, error) {
	if !utf8.ValidString(s) || strings.Contains(s, "\x00") {
		return nil, errors.New("it isn't UTF-8 without NUL")
	}
	var parts []placedPart
	var literal strings.Builder
	flush := func() {
		if literal.Len() > 0 {
			parts = append(parts, placedPart{Part: Part{Literal: literal.String()}})
			literal.Reset()
		}
	}
	for i := 0; i < len(s); {
		switch c := s[i]; {
		case c != '{' && c != '}':
			literal.WriteByte(c)
			i++
		case strings.HasPrefix(s[i+1:], string(c)):
			literal.WriteByte(c)
			i += 2
		case c == '}':
			return nil, fmt.Errorf("closing brace at position %d without an opening one (a literal brace is written }})", position(s, i))
		default:
			part, n, err := parsePart(s, i)
			if err != nil {
				return nil, err
			}
			flush()
			if parts, err = addPart(parts, placedPart{Part: part, position: position(s, i)}); err != nil {
				return nil, err
			}
			i += n
		}
	}
	flush()
	return parts, nil
}

func addPart(parts []placedPart, part placedPart) ([]placedPart, error) {
	switch {
	case len(parts) >= maxParts:
		return nil, fmt.Errorf("%s at position %d is one part too many: a format has at most %d", part.Part, part.position, maxParts)
	case part.Part == (Part{}) && len(parts) > 0 && parts[len(parts)-1].Part == (Part{}):
		return nil, fmt.Errorf("second %s at position %d: one stands for any text already", ignored, part.position)
	}
	return append(parts, part), nil
}

// parsePart reads the part whose brace is s[at] and returns how long it is,
// braces included.
func parsePart(s string, at int) (Part, int, error) {
	end := strings.IndexAny(s[at+1:], "{}")
	if end < 0 || s[at+1+end] == '{' {
		return Part{}, 0, fmt.Errorf("brace at position %d isn't closed (a literal brace is written {{)", position(s, at))
	}
	spelled := s[at : at+end+2]
	if spelled == ignored {
		return Part{}, len(spelled), nil
	}
	name, indices, sliced := strings.Cut(strings.TrimSuffix(spelled, "}"), "[")
	for _, p := range placeholders {
		if p.String() != name+"}" {
			continue
		}
		part := Part{Placeholder: p}
		if sliced {
			if err := part.parseSlice(indices); err != nil {
				return Part{}, 0, fmt.Errorf("%s at position %d %w", Shorten(spelled), position(s, at), err)
			}
		}
		return part, len(spelled), nil
	}
	return Part{}, 0, fmt.Errorf("unknown placeholder %s at position %d: it can be %s or %s",
		Shorten(spelled), position(s, at), placeholderList(), ignored)
}

// parseSlice reads what follows the opening bracket. Its errors complete a
// sentence that begins with the slice.
func (p *Part) parseSlice(s string) error {
	inner, closed := strings.CutSuffix(s, "]")
	from, to, colon := strings.Cut(inner, ":")
	if !closed || !colon {
		return errors.New("isn't a slice: write [from:to], [:to] or [from:], counted from 0")
	}
	var err error
	if p.From, err = parseIndex(from, 0); err != nil {
		return err
	}
	if p.To, err = parseIndex(to, 0); err != nil {
		return err
	}
	switch {
	case to != "" && p.To <= p.From:
		return errors.New("is empty: the second index must be greater than the first")
	case p.Placeholder == UUID && (p.To > uuidLen || p.From >= uuidLen):
		return fmt.Errorf("ends behind the uuid, which has %d characters", uuidLen)
	case p.Placeholder == UUID && p.To == uuidLen:
		p.To = 0 // the same, and it counts as open
	}
	return nil
}

func parseIndex(s string, missing int) (int, error) {
	if s == "" {
		return missing, nil
	}
	n, err := strconv.ParseUint(s, 10, 16)
	switch {
	case errors.Is(err, strconv.ErrSyntax):
		return 0, fmt.Errorf("has the index %q: an index is a number, counted from 0", Shorten(s))
	case err != nil || n > maxSlice:
		return 0, fmt.Errorf("has an index above %d", maxSlice)
	}
	return int(n), nil
}

// newFormat checks what no single part can know.
func newFormat(source string, parts []placedPart) (Format, error) {
	l := &layout{}
	for _, part := range parts {
		if part.Placeholder != 0 {
			if l.placeholder == 0 {
				l.placeholder = part.Placeholder
			}
			if part.Placeholder != l.placeholder {
				return Format{}, fmt.Errorf("second placeholder %s at position %d: a value names one key, so %s is its only placeholder, whole or in slices",
					part.Part, part.position, l.placeholder)
			}
		}
		l.parts = append(l.parts, part.Part)
	}
	if l.placeholder == 0 {
		return Format{}, fmt.Errorf("no placeholder: it needs one of %s", placeholderList())
	}
	if missing, ok := l.measure(); !ok {
		return Format{}, fmt.Errorf("the slices leave out what %s has from index %d on: add %s", l.placeholder, missing,
			Part{Placeholder: l.placeholder, From: missing})
	}
	if err := l.checkReadings(parts); err != nil {
		return Format{}, err
	}
	return l.format(source), nil
}

// format keeps the layout only of a format that needs it.
func (l *layout) format(source string) Format {
	f := Format{source: source, placeholder: l.placeholder, layout: l}
	others := l.parts
	if first := others[0]; first.Literal != "" {
		f.prefix, others = first.Literal, others[1:]
	}
	if last := others[len(others)-1]; last.Literal != "" {
		f.suffix, others = last.Literal, others[:len(others)-1]
	}
	if len(others) == 1 {
		f.layout = nil
	}
	return f
}

func placeholderList() string {
	names := make([]string, len(placeholders))
	for i, p := range placeholders {
		names[i] = p.String()
	}
	return strings.Join(names, ", ")
}

// position counts characters, as a reader of the message does.
func position(s string, offset int) int { return utf8.RuneCountInString(s[:offset]) + 1 }
