package blob

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxKeyLen is the longest key, in bytes, that a window can hold: a btree
// entry of Postgres is limited to about a third of a page. A longer key is
// foreign: it is counted and never touched.
const MaxKeyLen = 1500

// Key is the canonical bytes that name one blob. It is a string so that it can
// be compared, used in maps and never changes; it isn't necessarily text.
type Key string

// Kind says which canonical bytes are keys of a pool. It follows from the type
// of the key column.
type Kind uint8

// The kinds of keys. The zero value is no kind.
const (
	// KindBytes keys are any bytes: bytea, BLOB.
	KindBytes Kind = iota + 1
	// KindText keys are UTF-8 without NUL: text, varchar.
	KindText
	// KindUUID keys are lower-case dashed ASCII: uuid.
	KindUUID
	// KindInt keys are decimal ASCII within 64 bits: smallint, integer, bigint, INTEGER.
	KindInt
)

// String returns the kind's name as it stands in messages.
func (k Kind) String() string {
	switch k {
	case KindBytes:
		return "bytes"
	case KindText:
		return "text"
	case KindUUID:
		return "uuid"
	case KindInt:
		return "integers"
	default:
		return "no kind"
	}
}

// Valid says whether key can be a key of this kind. An error names the key and
// what is wrong with it.
func (k Kind) Valid(key Key) error {
	if len(key) > MaxKeyLen {
		return fmt.Errorf("key %s is %d bytes long, more than %d", k.Display(key), len(key), MaxKeyLen)
	}
	ok := false
	switch k {
	case KindBytes:
		ok = true
	case KindText:
		ok = isText(string(key))
	case KindUUID:
		ok = isCanonicalUUID(string(key))
	case KindInt:
		_, ok = canonicalInt(string(key))
	}
	if !ok {
		return fmt.Errorf("key %s isn't a key of a pool whose keys are %s", k.Display(key), k)
	}
	return nil
}

// displayMax keeps a key in a log line or a report from filling it.
const displayMax = 128

// Spell writes the key so that ParseKey reads it: hex for bytes, otherwise the
// text itself, quoted where it isn't printable. What isn't a key of the kind is
// hex behind \x.
func (k Kind) Spell(key Key) string {
	s := string(key)
	switch {
	case k == KindBytes:
		return hex.EncodeToString([]byte(s))
	case !utf8.ValidString(s):
		return `\x` + hex.EncodeToString([]byte(s))
	case strconv.Quote(s) != `"`+s+`"`:
		return strconv.Quote(s)
	}
	return s
}

// Display is Spell, shortened to fit a message.
func (k Kind) Display(key Key) string { return Shorten(k.Spell(key)) }

// ParseKey reads a key as Spell writes it. Behind \x the key is hex, whatever the
// kind; a KindBytes key is hex without it too. Other keys stand for themselves,
// with or without quotes. The key may be one that isn't valid: an operator has to
// be able to name it.
func (k Kind) ParseKey(s string) (Key, error) {
	digits, isHex := strings.CutPrefix(s, `\x`)
	switch {
	case k == KindBytes || isHex:
		b, err := hex.DecodeString(digits)
		if err != nil {
			return "", fmt.Errorf("key %q isn't hex, as the keys of this pool are written: %w", Shorten(s), err)
		}
		return Key(b), nil
	case k == KindUUID:
		return Key(strings.ToLower(s)), nil
	case len(s) > 1 && s[0] == '"':
		if u, err := strconv.Unquote(s); err == nil {
			return Key(u), nil
		}
	}
	return Key(s), nil
}

// Shorten cuts s to a length that fits a message and says that it did.
func Shorten(s string) string {
	if len(s) <= displayMax {
		return s
	}
	cut := displayMax
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}

func isCanonicalUUID(s string) bool {
	if len(s) != uuidLen {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case isUUIDDash(i):
			if c != '-' {
				return false
			}
		case c >= '0' && c <= '9', c >= 'a' && c <= 'f':
		default:
			return false
		}
	}
	return true
}

// isUUIDDash says whether a uuid's spelling has a dash there.
func isUUIDDash(i int) bool { return i == 8 || i == 13 || i == 18 || i == 23 }

func canonicalInt(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil && strconv.FormatInt(n, 10) == s
}

// Int returns the number that a KindInt key spells. It is false for any other
// spelling of a number.
func (key Key) Int() (int64, bool) { return canonicalInt(string(key)) }
