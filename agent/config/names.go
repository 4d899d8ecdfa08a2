package config

import (
	"errors"
	"fmt"
	"strings"
)

// maxIdentifier is what Postgres cuts longer names to, silently.
const maxIdentifier = 63

var errIdentifier = errors.New(`want a name, in double quotes where it holds a dot or a quote: public.blobs, "odd.name"`)

// parseTable reads [schema.]table as the engine understands it. Case is kept.
func parseTable(s string, engine Engine) (Table, error) {
	parts, err := identifiers(s)
	switch {
	case err != nil:
		return Table{}, err
	case len(parts) > 2:
		return Table{}, errors.New("too many dots: want schema.table")
	case engine == SQLite && len(parts) == 2:
		return Table{}, errors.New("an SQLite table has no schema: want its bare name")
	case len(parts) == 2:
		return Table{Schema: parts[0], Name: parts[1]}, checkLength(engine, parts...)
	case engine == Postgres:
		return Table{Schema: "public", Name: parts[0]}, checkLength(engine, parts...)
	}
	return Table{Name: parts[0]}, nil
}

// parseColumn reads the name of one column.
func parseColumn(s string, engine Engine) (string, error) {
	parts, err := identifiers(s)
	switch {
	case err != nil:
		return "", err
	case len(parts) > 1:
		return "", errors.New("want the name of a column alone, in double quotes where it holds a dot")
	}
	return parts[0], checkLength(engine, parts...)
}

func checkLength(engine Engine, names ...string) error {
	for _, n := range names {
		if engine == Postgres && len(n) > maxIdentifier {
			return fmt.Errorf("a name of %d bytes: Postgres has at most %d", len(n), maxIdentifier)
		}
	}
	return nil
}

// identifiers splits a dotted name. A part may stand in double quotes, in which
// a quote is written twice.
func identifiers(s string) ([]string, error) {
	var parts []string
	for {
		part, rest, err := identifier(s)
		if err != nil {
			return nil, err
		}
		parts = append(parts, part)
		if rest == "" {
			return parts, nil
		}
		if rest[0] != '.' {
			return nil, errIdentifier
		}
		s = rest[1:]
	}
}

func identifier(s string) (part, rest string, err error) {
	if !strings.HasPrefix(s, `"`) {
		end := strings.IndexAny(s+".", `."`)
		part, rest = s[:end], s[end:]
		if part == "" || strings.TrimSpace(part) != part {
			return "", "", errIdentifier
		}
		return part, rest, nil
	}
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] != '"':
		case strings.HasPrefix(s[i+1:], `"`):
			i++
		case i == 1:
			return "", "", errIdentifier
		default:
			return strings.ReplaceAll(s[1:i], `""`, `"`), s[i+1:], nil
		}
	}
	return "", "", errIdentifier
}
