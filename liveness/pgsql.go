package liveness

import (
	"regexp"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
)

// valueType is how Postgres stores a source's values.
type valueType uint8

const (
	valueText valueType = iota + 1
	valueBytes
	valueUUID
	valueInt
	valueOID
)

// valueTypeOf maps pg_type.typname. Values of an enum, a name and char(n) are
// read as text.
func valueTypeOf(base string) (valueType, bool) {
	switch base {
	case "text", "varchar", "bpchar", "name", "enum":
		return valueText, true
	case "bytea":
		return valueBytes, true
	case "uuid":
		return valueUUID, true
	case "int2", "int4", "int8":
		return valueInt, true
	case "oid":
		return valueOID, true
	default:
		return 0, false
	}
}

// defaultFormat is the format of a column whose source names none.
func (v valueType) defaultFormat() blob.Format {
	switch v {
	case valueBytes:
		return blob.DefaultFormat(blob.KindBytes)
	case valueUUID:
		return blob.DefaultFormat(blob.KindUUID)
	case valueInt, valueOID:
		return blob.DefaultFormat(blob.KindInt)
	default:
		return blob.DefaultFormat(blob.KindText)
	}
}

// takes says whether values of this type can be read with the format.
func (v valueType) takes(f blob.Format) bool {
	if v == valueText {
		return f.Placeholder() != blob.Bytes
	}
	// A value that isn't text has no room for literals.
	return f.Placeholder() == v.defaultFormat().Placeholder() && f.Prefix() == "" && f.Suffix() == ""
}

const (
	uuidPattern = `[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`
	intPattern  = `0|-?[1-9][0-9]{0,18}`
	// int64Range follows a numeric.
	int64Range = ` BETWEEN -9223372036854775808 AND 9223372036854775807`
	// The last digit before the padding has bits that must be zero.
	base64Canonical = `(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=|[A-Za-z0-9+/][AQgw]==)`
	base64Any       = `(?:[A-Za-z0-9+/_-]{4})*(?:[A-Za-z0-9+/_-]{4}|[A-Za-z0-9+/_-]{3}=?|[A-Za-z0-9+/_-]{2}(?:==)?)`
	// Base64 as it may be wrapped: Postgres' own encode breaks lines.
	base64Wrapped = `[A-Za-z0-9+/_=\r\n-]+`
)

// encode returns SQL for the canonical spelling, in the source's own type, of
// the native key expr. It is NULL for a key that has none. It is false where
// SQL can't say it without risking an error: such a source is scanned.
func encode(f blob.Format, v valueType, kind blob.Kind, expr string) (string, bool) {
	switch v {
	case valueBytes:
		return expr, kind == blob.KindBytes
	case valueUUID:
		if kind == blob.KindUUID {
			return expr, true
		}
		return `CASE WHEN ` + expr + ` ~ '^(?:` + uuidPattern + `)$' THEN ` + expr + `::uuid END`, kind == blob.KindText
	case valueInt:
		return intKey(kind, expr)
	case valueOID:
		n, ok := intKey(kind, expr)
		return `CASE WHEN ` + n + ` BETWEEN 0 AND 4294967295 THEN (` + n + `)::oid END`, ok
	}
	inner, ok := encodeText(f.Placeholder(), kind, expr)
	if !ok {
		return "", false
	}
	if f.Prefix() != "" {
		inner = literal(f.Prefix()) + ` || ` + inner
	}
	if f.Suffix() != "" {
		inner += ` || ` + literal(f.Suffix())
	}
	return `(` + inner + `)`, true
}

func intKey(kind blob.Kind, expr string) (string, bool) {
	switch kind {
	case blob.KindInt:
		return expr, true
	case blob.KindText:
		return `CASE WHEN ` + expr + ` ~ '^(?:` + intPattern + `)$' THEN
			CASE WHEN ` + expr + `::numeric` + int64Range + ` THEN ` + expr + `::bigint END END`, true
	default:
		return "", false
	}
}

func encodeText(p blob.Placeholder, kind blob.Kind, expr string) (string, bool) {
	// No value of these formats names the empty key.
	named := `nullif(` + expr + `, '')`
	switch p {
	case blob.Hex:
		return `encode(` + named + `, 'hex')`, kind == blob.KindBytes
	case blob.UpperHex:
		return `upper(encode(` + named + `, 'hex'))`, kind == blob.KindBytes
	case blob.Base64:
		// encode breaks lines every 76 characters.
		return `translate(encode(` + named + `, 'base64'), E'\n', '')`, kind == blob.KindBytes
	case blob.Text:
		// bytes to text raises an error where they aren't UTF-8.
		return expr, kind == blob.KindText
	case blob.UUID:
		if kind == blob.KindUUID {
			return expr + `::text`, true
		}
		return `CASE WHEN ` + expr + ` ~ '^(?:` + uuidPattern + `)$' THEN ` + expr + ` END`, kind == blob.KindText
	case blob.Int:
		n, ok := intKey(kind, expr)
		return `(` + n + `)::text`, ok
	default:
		return "", false
	}
}

// decode returns SQL for the canonical bytes of the key that the value expr
// names, in any spelling; NULL where it names none.
func decode(f blob.Format, v valueType, expr string) string {
	switch v {
	case valueBytes:
		return expr
	case valueUUID, valueInt, valueOID:
		return `convert_to((` + expr + `)::text, 'UTF8')`
	}
	if bareText(f) {
		return `convert_to(` + expr + `, 'UTF8')`
	}
	inner := body(f, expr)
	switch f.Placeholder() {
	case blob.Hex, blob.UpperHex:
		return `decode(` + inner + `, 'hex')`
	case blob.Base64:
		// Postgres decodes the padded standard alphabet alone.
		bare := `translate(rtrim(` + inner + `, '='), '-_', '+/')`
		return `decode(rpad(` + bare + `, (length(` + bare + `) + 3) / 4 * 4, '='), 'base64')`
	case blob.UUID:
		return `convert_to(lower(` + inner + `), 'UTF8')`
	case blob.Int:
		return `CASE WHEN ` + fitsFormat(f, expr) + ` THEN convert_to((` + inner + `)::numeric::text, 'UTF8') END`
	default:
		return `convert_to(` + inner + `, 'UTF8')`
	}
}

// fitsFormat returns the condition that the text expr names a key, in any
// spelling. It is false, not NULL, where expr doesn't.
func fitsFormat(f blob.Format, expr string) string {
	if f.Placeholder() == blob.Int {
		return `coalesce((` + body(f, expr) + `)::numeric` + int64Range + `, false)`
	}
	return body(f, expr) + ` IS NOT NULL`
}

// isCanonical returns the condition that the text expr is the canonical spelling
// of a key. It is false, not NULL, where expr isn't.
func isCanonical(f blob.Format, expr string) string {
	cond := bytewise(expr) + ` ~ ` + literal(pattern(f, canonicalPattern(f.Placeholder())))
	if f.Placeholder() == blob.Int {
		cond = `(` + cond + ` AND ` + fitsFormat(f, expr) + `)`
	}
	return cond
}

// body returns SQL for what stands between the format's literals in expr; NULL
// where expr isn't of that form. Of base64 it is without line breaks: those are
// taken out there alone, the literals match exactly.
func body(f blob.Format, expr string) string {
	if f.Placeholder() != blob.Base64 {
		return `substring(` + bytewise(expr) + ` FROM ` + literal(pattern(f, anyPattern(f.Placeholder()))) + `)`
	}
	wrapped := `substring(` + bytewise(expr) + ` FROM ` + literal(pattern(f, base64Wrapped)) + `)`
	return `substring(translate(` + wrapped + `, E'\r\n', '') FROM ` + literal(`^(?:`+base64Any+`)$`) + `)`
}

// bytewise has a text compared by its bytes: a nondeterministic collation takes
// no regular expressions.
func bytewise(expr string) string { return `(` + expr + ` COLLATE pg_catalog."C")` }

// bareText says that every text is a value of the format.
func bareText(f blob.Format) bool {
	return f.Placeholder() == blob.Text && f.Prefix() == "" && f.Suffix() == ""
}

// anyPattern matches every spelling that the placeholder accepts,
// canonicalPattern the canonical one alone.
func anyPattern(p blob.Placeholder) string {
	switch p {
	case blob.Hex, blob.UpperHex:
		return `(?:[0-9a-fA-F]{2})+`
	case blob.Base64:
		return base64Any
	case blob.UUID:
		return strings.ReplaceAll(uuidPattern, "a-f", "a-fA-F")
	case blob.Int:
		// So few digits that numeric takes them, however many zeros there are.
		return `-?0*[0-9]{1,19}`
	default:
		return `.*`
	}
}

func canonicalPattern(p blob.Placeholder) string {
	switch p {
	case blob.Hex:
		return `(?:[0-9a-f]{2})+`
	case blob.UpperHex:
		return `(?:[0-9A-F]{2})+`
	case blob.Base64:
		return base64Canonical
	case blob.UUID:
		return uuidPattern
	case blob.Int:
		return intPattern
	default:
		return `.*`
	}
}

// pattern is a whole value as an advanced regular expression of Postgres', its
// one group the placeholder's text. In it $ matches only at the very end and .
// matches a line break too.
func pattern(f blob.Format, inner string) string {
	return `^` + regexp.QuoteMeta(f.Prefix()) + `(` + inner + `)` + regexp.QuoteMeta(f.Suffix()) + `$`
}

// literal quotes a string. It must not depend on standard_conforming_strings,
// which a role can switch off.
func literal(s string) string {
	if strings.Contains(s, `\`) {
		return ` E'` + strings.NewReplacer(`\`, `\\`, `'`, `''`).Replace(s) + `'`
	}
	return `'` + strings.ReplaceAll(s, `'`, `''`) + `'`
}
