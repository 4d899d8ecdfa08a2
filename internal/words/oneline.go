package words

import (
	"strings"
	"unicode"
)

// OneLine joins lines, and replaces control characters, which could do anything
// to a terminal, by spaces.
func OneLine(s string) string {
	s = strings.ReplaceAll(strings.TrimSpace(s), "\n", "; ")
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
}
