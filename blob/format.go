package blob

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Placeholder is the part of a format that stands for the key. The zero value
// is no placeholder.
type Placeholder uint8

// The placeholders. Each says how the key's bytes are written in a value.
const (
	// Bytes is the key itself, any bytes.
	Bytes Placeholder = iota + 1
	// Text is the key itself, UTF-8 without NUL.
	Text
	// Int is a decimal number within 64 bits; the key is the number without padding.
	Int
	// UUID is dashed, in either case; the key is lower-case.
	UUID
	// Hex is the key's bytes in hex, canonically lower-case.
	Hex
	// UpperHex is the key's bytes in hex, canonically upper-case.
	UpperHex
	// Base64 is the key's bytes in base64, canonically of the standard alphabet,
	// padded and on one line.
	Base64
)

// placeholders is in the order in which an error lists them.
var placeholders = []Placeholder{Bytes, Text, Int, UUID, Hex, UpperHex, Base64}

// String returns the placeholder as a format spells it, with its braces.
func (p Placeholder) String() string {
	switch p {
	case Bytes:
		return "{bytes}"
	case Text:
		return "{text}"
	case Int:
		return "{int}"
	case UUID:
		return "{uuid}"
	case Hex:
		return "{hex}"
	case UpperHex:
		return "{HEX}"
	case Base64:
		return "{base64}"
	default:
		return "no placeholder"
	}
}

// Kind returns the kind of the keys that the placeholder stands for.
func (p Placeholder) Kind() Kind {
	switch p {
	case Bytes, Hex, UpperHex, Base64:
		return KindBytes
	case Text:
		return KindText
	case UUID:
		return KindUUID
	case Int:
		return KindInt
	default:
		return 0
	}
}

// Format maps a stored value to a key and back: literal text, a placeholder,
// literal text. Only ParseFormat and DefaultFormat make one; the zero value
// fits no value. A Format may be used by any number of goroutines at once.
//
// A format has one reading. The literals have a fixed length, so whatever stands
// between them is the key, also where a literal could be part of a key.
type Format struct {
	source      string
	prefix      string
	placeholder Placeholder
	suffix      string
}

// DefaultFormat returns the format of a value that is a key of kind k and
// nothing else. The kind of a column's type is k's. No kind has no format.
func DefaultFormat(k Kind) Format {
	switch k {
	case KindBytes:
		return bare(Bytes)
	case KindText:
		return bare(Text)
	case KindUUID:
		return bare(UUID)
	case KindInt:
		return bare(Int)
	default:
		return Format{}
	}
}

func bare(p Placeholder) Format {
	return Format{source: p.String(), placeholder: p}
}

// ParseFormat reads a format: exactly one placeholder, with or without literal
// text around it. A literal brace is written twice. An error names the format,
// what is wrong with it and, counted in characters from 1, where.
func ParseFormat(s string) (Format, error) {
	f := Format{source: s}
	if err := f.parse(s); err != nil {
		return Format{}, fmt.Errorf("format %q: %w", Shorten(s), err)
	}
	return f, nil
}

func (f *Format) parse(s string) error {
	if !utf8.ValidString(s) || strings.Contains(s, "\x00") {
		return errors.New("it isn't UTF-8 without NUL")
	}
	var literal strings.Builder
	for i := 0; i < len(s); {
		switch c := s[i]; {
		case c != '{' && c != '}':
			literal.WriteByte(c)
			i++
		case strings.HasPrefix(s[i+1:], string(c)):
			literal.WriteByte(c)
			i += 2
		case c == '}':
			return fmt.Errorf("closing brace at position %d without an opening one (a literal brace is written }})", position(s, i))
		default:
			p, n, err := parsePlaceholder(s, i)
			if err != nil {
				return err
			}
			if f.placeholder != 0 {
				return fmt.Errorf("second placeholder %s at position %d: several placeholders aren't supported", p, position(s, i))
			}
			f.prefix, f.placeholder = literal.String(), p
			literal.Reset()
			i += n
		}
	}
	f.suffix = literal.String()
	if f.placeholder == 0 {
		return fmt.Errorf("no placeholder: it needs one of %s", placeholderList())
	}
	return nil
}

// parsePlaceholder reads the placeholder whose brace is s[at] and returns how
// long it is, braces included.
func parsePlaceholder(s string, at int) (Placeholder, int, error) {
	end := strings.IndexAny(s[at+1:], "{}")
	if end < 0 || s[at+1+end] == '{' {
		return 0, 0, fmt.Errorf("brace at position %d isn't closed (a literal brace is written {{)", position(s, at))
	}
	spelled := s[at : at+end+2]
	for _, p := range placeholders {
		if p.String() == spelled {
			return p, len(spelled), nil
		}
	}
	switch {
	case spelled == "{*}":
		return 0, 0, fmt.Errorf("{*} at position %d isn't supported", position(s, at))
	case strings.Contains(spelled, "["):
		return 0, 0, fmt.Errorf("%s at position %d: slices aren't supported", Shorten(spelled), position(s, at))
	}
	return 0, 0, fmt.Errorf("unknown placeholder %s at position %d: it can be %s", Shorten(spelled), position(s, at), placeholderList())
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

// String returns the format as it was written.
func (f Format) String() string { return f.source }

// Prefix returns the literal text before the placeholder, unescaped.
func (f Format) Prefix() string { return f.prefix }

// Suffix returns the literal text after the placeholder, unescaped.
func (f Format) Suffix() string { return f.suffix }

// Placeholder returns the placeholder between Prefix and Suffix.
func (f Format) Placeholder() Placeholder { return f.placeholder }

// Kind returns the kind of the keys that the format maps values to.
func (f Format) Kind() Kind { return f.placeholder.Kind() }

// Decode returns the key that value names. ok is false where the value doesn't
// fit the format. canonical says whether the value is the one that Encode gives
// for the key; other spellings of the same key are read, but a probe by value
// doesn't find them.
//
// The literals match exactly. What lies between them may be empty for {text} and
// {bytes}, where it names the empty key: a tier can hold one, and a reference
// to a blob that isn't there does no harm. Elsewhere an empty value names nothing.
// The key may be longer than MaxKeyLen: it then names no blob that is collected.
func (f Format) Decode(value string) (key Key, canonical, ok bool) {
	body, ok := strings.CutPrefix(value, f.prefix)
	if !ok {
		return "", false, false
	}
	body, ok = strings.CutSuffix(body, f.suffix)
	if !ok {
		return "", false, false
	}
	key, ok = f.placeholder.decode(body)
	if !ok {
		return "", false, false
	}
	spelled, ok := f.placeholder.encode(key)
	return key, ok && spelled == body, ok
}

// Encode returns the canonical value that names key. ok is false where no value
// of this format does. Distinct keys have distinct values.
func (f Format) Encode(key Key) (value string, ok bool) {
	body, ok := f.placeholder.encode(key)
	if !ok {
		return "", false
	}
	return f.prefix + body + f.suffix, true
}

func (p Placeholder) decode(s string) (Key, bool) {
	switch p {
	case Bytes:
		return Key(s), true
	case Text:
		return Key(s), isText(s)
	case Int:
		n, err := strconv.ParseInt(s, 10, 64)
		return Key(strconv.FormatInt(n, 10)), err == nil && s[0] != '+'
	case UUID:
		// No letter outside ASCII lower-cases to a hex digit.
		lower := strings.ToLower(s)
		return Key(lower), isCanonicalUUID(lower)
	case Hex, UpperHex:
		b, err := hex.DecodeString(s)
		return Key(b), err == nil && s != ""
	case Base64:
		return decodeBase64(s)
	default:
		return "", false
	}
}

func (p Placeholder) encode(key Key) (string, bool) {
	s := string(key)
	switch p {
	case Bytes:
		return s, true
	case Text:
		return s, isText(s)
	case Int:
		_, ok := key.Int()
		return s, ok
	case UUID:
		return s, isCanonicalUUID(s)
	case Hex:
		return hex.EncodeToString([]byte(s)), s != ""
	case UpperHex:
		return strings.ToUpper(hex.EncodeToString([]byte(s))), s != ""
	case Base64:
		return base64.StdEncoding.EncodeToString([]byte(s)), s != ""
	default:
		return "", false
	}
}

// toStandard maps the URL-safe alphabet to the standard one and drops line
// breaks, which Postgres puts into what its encode() returns.
var toStandard = strings.NewReplacer("-", "+", "_", "/", "\r", "", "\n", "")

// decodeBase64 reads either alphabet, padded or not, and ignores
// the spare bits of the last character.
func decodeBase64(s string) (Key, bool) {
	s = toStandard.Replace(s)
	encoding := base64.StdEncoding
	if len(s)%4 != 0 {
		encoding = base64.RawStdEncoding
	}
	b, err := encoding.DecodeString(s)
	return Key(b), err == nil && len(b) > 0
}

func isText(s string) bool {
	return utf8.ValidString(s) && !strings.Contains(s, "\x00")
}
