package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/internal/words"
)

// Problem is one thing that is wrong with the configuration.
type Problem struct {
	File string
	// Line counts from 1. It is 0 where the problem is the whole file's.
	Line int
	// Path is the field, such as pools[0].liveness[2].column, or empty.
	Path string
	// Message says what is wrong and what to do. It holds no secret.
	Message string
}

// String returns the problem on one line: FILE:LINE: PATH: MESSAGE.
func (p Problem) String() string {
	s := p.File + ": "
	if p.Line > 0 {
		s = fmt.Sprintf("%s:%d: ", p.File, p.Line)
	}
	if p.Path != "" {
		s += p.Path + ": "
	}
	return words.OneLine(s + p.Message)
}

// Errors is every problem of a configuration, ordered by line. Load and Parse
// return no other error.
type Errors struct{ Problems []Problem }

// Error returns the problems, one a line.
func (e *Errors) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// newErrors keeps the order in which problems of one line were found.
func newErrors(problems []Problem) *Errors {
	slices.SortStableFunc(problems, func(a, b Problem) int { return cmp.Compare(a.Line, b.Line) })
	return &Errors{Problems: problems}
}

// lineOf returns the line of path, or of the nearest parent that has one.
func lineOf(lines map[string]int, path string) int {
	for {
		line, ok := lines[path]
		if ok || path == "" {
			return line
		}
		path = path[:max(strings.LastIndexAny(path, ".["), 0)]
	}
}
