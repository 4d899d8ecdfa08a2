// Package finding is how the parts that look at a database say what is wrong
// with it, all at once, in one form.
package finding

import (
	"fmt"
	"strings"
)

// Severity says what follows from a finding.
type Severity uint8

// The severities, in rising order.
const (
	// Warning is worth saying and stops nothing.
	Warning Severity = iota + 1
	// Unreadable is a state of the database in which a source can't be read,
	// completely: the sweep aborts and the next one looks again.
	Unreadable
	// Misconfigured can't become right without a change of the configuration or
	// of the schema it describes.
	Misconfigured
)

// Finding is one line for people: where in the configuration, what is wrong,
// and what to do.
type Finding struct {
	Severity Severity
	Path     string
	Message  string
}

// String returns "path: message".
func (f Finding) String() string { return f.Path + ": " + f.Message }

// List collects findings.
type List []Finding

// Add appends one finding.
func (l *List) Add(s Severity, path, format string, args ...any) {
	*l = append(*l, Finding{Severity: s, Path: path, Message: fmt.Sprintf(format, args...)})
}

// Worst returns the highest severity, 0 when the list is empty.
func (l List) Worst() Severity {
	var worst Severity
	for _, f := range l {
		worst = max(worst, f.Severity)
	}
	return worst
}

// Of returns the findings of the severity, joined for one line.
func (l List) Of(s Severity) string {
	var lines []string
	for _, f := range l {
		if f.Severity == s {
			lines = append(lines, f.String())
		}
	}
	return strings.Join(lines, "; ")
}
