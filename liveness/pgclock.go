package liveness

import (
	"regexp"
	"slices"
	"strings"
)

// Types of dates and times read these words as the time of the reading, which makes
// a constant of them that is another one tomorrow. A word ends where its letters do:
// 'today+1' is one too.
var clockWordRE = regexp.MustCompile(`(?i)(?:^|[^a-z])(now|today|tomorrow|yesterday)(?:[^a-z]|$)`)

var (
	// In their order: who begins first is what it is.
	quotedRE = regexp.MustCompile(`--[^\n]*|"(?:[^"]|"")*"|'(?:[^']|'')*'`)
	// What quotedRE doesn't know: comments in comments, dollar quotes, quotes that are
	// escaped.
	unquotableRE = regexp.MustCompile(`/\*|\$[^\s$']*\$|\\'`)
	// Letters can hide in escapes, and in a literal that goes on on the next line.
	escapesRE   = regexp.MustCompile(`(?i)(?:^|[^a-z0-9_])e'`)
	escapedRE   = regexp.MustCompile(`\\[0-9A-Za-z]`)
	unicodeRE   = regexp.MustCompile(`(?i)(?:^|[^a-z0-9_])u&'`)
	continuedRE = regexp.MustCompile(`'[^\S\n]*(?:--[^\n]*)?\n(?:\s|--[^\n]*\n)*'`)
)

// clockWord returns a word of SQL's literals that may mean the time at which they
// are read, quoted, or "". A literal that can't be seen through may hold any.
func clockWord(sql string) string {
	sql = strings.ReplaceAll(sql, "\r", "\n")
	switch {
	case unicodeRE.MatchString(sql), escapesRE.MatchString(sql) && escapedRE.MatchString(sql):
		return "what is escaped"
	case continuedRE.MatchString(sql):
		return "what goes on on another line"
	}
	for _, l := range literals(sql) {
		if m := clockWordRE.FindStringSubmatch(l); m != nil {
			return "'" + strings.ToLower(m[1]) + "'"
		}
	}
	return ""
}

// literals returns what is in quotes, or all of it where that is hard to tell.
func literals(sql string) []string {
	if unquotableRE.MatchString(sql) {
		return []string{sql}
	}
	return slices.DeleteFunc(quotedRE.FindAllString(sql, -1), func(part string) bool { return part[0] != '\'' })
}
