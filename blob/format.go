package blob

import (
	"encoding/base64"
	"encoding/hex"
	"slices"
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

// Format maps a stored value to a key and back: literal text around a placeholder,
// slices of it, and text that is ignored. Only ParseFormat and DefaultFormat make
// one; the zero value fits no value. A Format may be used by any number of
// goroutines at once.
//
// A format has one reading: no value names two keys. Without {*} the length of a
// value says where each part begins, so whatever stands there is the part, also
// where a literal could be part of a key. With {*}, ParseFormat has made sure of it.
type Format struct {
	source      string
	prefix      string
	placeholder Placeholder
	suffix      string
	layout      *layout // nil of a simple format
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

// String returns the format as it was written.
func (f Format) String() string { return f.source }

// Simple says whether the format is literal text, one whole placeholder and
// literal text: Prefix, Placeholder and Suffix then say all of it. Of any other
// format they don't, and Parts does.
func (f Format) Simple() bool { return f.placeholder != 0 && f.layout == nil }

// Reversible says whether Encode spells keys. A format with {*} isn't reversible:
// of the many values that name a key it can't know which one is stored.
func (f Format) Reversible() bool {
	return f.placeholder != 0 && (f.layout == nil || f.layout.ignores == 0)
}

// Prefix returns the literal text before the first part that is none, unescaped.
func (f Format) Prefix() string { return f.prefix }

// Suffix returns the literal text after the last part that is none, unescaped.
func (f Format) Suffix() string { return f.suffix }

// Placeholder returns the placeholder that the format has, whole or in slices.
func (f Format) Placeholder() Placeholder { return f.placeholder }

// Kind returns the kind of the keys that the format maps values to.
func (f Format) Kind() Kind { return f.placeholder.Kind() }

// Parts returns what the format is made of, in order. Literals aren't empty, and
// no two of them are neighbours.
func (f Format) Parts() []Part {
	if f.layout != nil {
		return slices.Clone(f.layout.parts)
	}
	var parts []Part
	if f.prefix != "" {
		parts = append(parts, Part{Literal: f.prefix})
	}
	if f.placeholder != 0 {
		parts = append(parts, Part{Placeholder: f.placeholder})
	}
	if f.suffix != "" {
		parts = append(parts, Part{Literal: f.suffix})
	}
	return parts
}

// Decode returns the key that value names. ok is false where the value doesn't
// fit the format. canonical says whether the value is the one that Encode gives
// for the key; other spellings of the same key are read, but a probe by value
// doesn't find them.
//
// The literals match exactly. A slice agrees with the placeholder as the value
// spells it, except that case doesn't count in hex and uuid, and the two alphabets
// of base64 are one. {*} is any text, of any length, also with slashes in it and
// also none.
//
// The placeholder may be empty for {text} and {bytes}, where it names the empty key:
// a tier can hold one, and a reference to a blob that isn't there does no harm.
// Elsewhere an empty placeholder names nothing. The key may be longer than
// MaxKeyLen: it then names no blob that is collected. It may share value's memory.
func (f Format) Decode(value string) (key Key, canonical, ok bool) {
	if f.layout != nil {
		return f.layout.decode(value)
	}
	if len(value) < len(f.prefix)+len(f.suffix) ||
		value[:len(f.prefix)] != f.prefix || value[len(value)-len(f.suffix):] != f.suffix {
		return "", false, false
	}
	return f.placeholder.decode(value[len(f.prefix) : len(value)-len(f.suffix)])
}

// Encode returns the canonical value that names key. ok is false where no value
// of this format does, as for a key that is too short for a slice, and where the
// format isn't reversible. Distinct keys have distinct values.
func (f Format) Encode(key Key) (value string, ok bool) {
	body, ok := f.placeholder.encode(key)
	if !ok {
		return "", false
	}
	if f.layout != nil {
		return f.layout.encode(body)
	}
	return f.prefix + body + f.suffix, true
}

// stackLen is how long a value may be to be read without a buffer on the heap.
const stackLen = 256

// decode returns "", false, false for what spells no key.
func (p Placeholder) decode(s string) (key Key, canonical, ok bool) {
	switch p {
	case Bytes:
		key, canonical, ok = Key(s), true, true
	case Text:
		key, canonical, ok = Key(s), true, isText(s)
	case Int:
		key, canonical, ok = decodeInt(s)
	case UUID:
		// No letter outside ASCII lower-cases to a hex digit.
		key = Key(strings.ToLower(s))
		canonical, ok = string(key) == s, isCanonicalUUID(string(key))
	case Hex:
		key, ok = decodeHex(s)
		canonical = !strings.ContainsAny(s, "ABCDEF")
	case UpperHex:
		key, ok = decodeHex(s)
		canonical = !strings.ContainsAny(s, "abcdef")
	case Base64:
		key, canonical, ok = decodeBase64(s)
	}
	if !ok {
		return "", false, false
	}
	return key, canonical, true
}

func decodeInt(s string) (key Key, canonical, ok bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || s[0] == '+' {
		return "", false, false
	}
	digits := strings.TrimPrefix(s, "-")
	if digits[0] != '0' || s == "0" {
		return Key(s), true, true // without a copy
	}
	return Key(strconv.FormatInt(n, 10)), false, true
}

func decodeHex(s string) (Key, bool) {
	var buf [stackLen]byte
	b := append(buf[:0], s...)
	n, err := hex.Decode(b, b)
	return Key(b[:n]), err == nil && n > 0
}

// toStandard maps the URL-safe alphabet to the standard one and drops line
// breaks, which Postgres puts into what its encode() returns.
var toStandard = strings.NewReplacer("-", "+", "_", "/", "\r", "", "\n", "")

// decodeBase64 reads either alphabet, padded or not, and ignores
// the spare bits of the last character.
func decodeBase64(s string) (key Key, canonical, ok bool) {
	standard := s
	if strings.ContainsAny(s, "-_\r\n") {
		standard = toStandard.Replace(s)
	}
	encoding := base64.StdEncoding
	if len(standard)%4 != 0 {
		encoding = base64.RawStdEncoding
	}
	var coded, decoded [stackLen]byte
	b, err := encoding.AppendDecode(decoded[:0], append(coded[:0], standard...))
	if err != nil || len(b) == 0 {
		return "", false, false
	}
	return Key(b), string(base64.StdEncoding.AppendEncode(coded[:0], b)) == s, true
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

func isText(s string) bool {
	return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0
}
