package liveness

import (
	"errors"
	"fmt"
	"strings"
)

// checkFragment makes sure that a piece of SQL stays between the parentheses that
// it is put into: with them it is then a part of one SELECT, which changes
// nothing.
func checkFragment(sql string) error {
	depth := 0
	for i := 0; i < len(sql); {
		if n := skipOpaque(sql[i:]); n > 0 {
			i += n
			continue
		}
		switch c := sql[i]; {
		case c == ';':
			return errors.New("it contains a semicolon")
		case c == 0:
			return errors.New("it contains a NUL")
		case c == '(':
			depth++
		case c == ')':
			if depth--; depth < 0 {
				return errors.New("it contains a closing parenthesis without an opening one")
			}
		case c == '?', strings.IndexByte(":@#$", c) >= 0 && (i == 0 || !isIdentifier(sql[i-1])):
			return fmt.Errorf("it contains a parameter (%c)", c)
		}
		i++
	}
	return nil
}

// skipOpaque returns the length of the string, quoted identifier or comment that
// sql begins with, or 0. One that doesn't end takes all of it, with the
// parenthesis that follows, so that SQLite refuses it.
func skipOpaque(sql string) int {
	var begin, end string
	switch {
	case strings.HasPrefix(sql, "--"):
		begin, end = "--", "\n"
	case strings.HasPrefix(sql, "/*"):
		begin, end = "/*", "*/"
	case sql[0] == '[':
		begin, end = "[", "]"
	case strings.IndexByte("'\"`", sql[0]) >= 0:
		// A doubled quote reads as the end of one string and the start of another.
		begin, end = sql[:1], sql[:1]
	default:
		return 0
	}
	n := strings.Index(sql[len(begin):], end)
	if n < 0 {
		return len(sql)
	}
	return len(begin) + n + len(end)
}

func isIdentifier(c byte) bool {
	return c == '_' || c == '$' || c >= 0x80 || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}
