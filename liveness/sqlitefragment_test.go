package liveness

import (
	"strings"
	"testing"
)

func TestCheckFragment(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]string{
		"a = 1":                         "",
		"":                              "",
		"((a) OR (b))":                  "",
		"a = ';' AND b = ')'":           "",
		"a = 'it''s ;' -- ;)?":          "",
		"a = \";\" AND `;)` = [;)]":     "",
		"a /* ;)? */ = 1":               "",
		"doc ->> '$.a' = x'00'":         "",
		"a$b = 1":                       "",
		"'unterminated ;":               "",
		"-- comment\n;":                 "semicolon",
		"/* ; */ ;":                     "semicolon",
		"[a;]]; b":                      "semicolon",
		"a; b":                          "semicolon",
		"a) OR (b":                      "closing parenthesis",
		"(a))":                          "closing parenthesis",
		"a = ?":                         "parameter (?)",
		"a = ?1":                        "parameter (?)",
		"a = :x":                        "parameter (:)",
		"a=@x":                          "parameter (@)",
		"a = $x":                        "parameter ($)",
		"a\x00":                         "NUL",
		"a - -1 / 2 * 3 /*/ ; */ AND 1": "",
	} {
		err := checkFragment(sql)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", sql, err, want)
		}
	}
}
