package main

import (
	"errors"
	"strings"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
)

// status is the exit status of a command.
type status int

// The statuses. The worst of several pools counts: failed, misused, aborted, done.
const (
	done    status = 0
	failed  status = 1
	misused status = 2 // usage or configuration
	aborted status = 3 // nothing was deleted
)

// worse returns the worse of two statuses.
func (s status) worse(other status) status {
	switch {
	case s == done:
		return other
	case other == done:
		return s
	}
	return min(s, other)
}

// exits is the part of a command's help about its exit status. An empty line
// leaves its status out.
func exits(zero, one, two, three string) string {
	var b strings.Builder
	b.WriteString("\n\nExit status:\n")
	for i, line := range []string{zero, one, two, three} {
		if line != "" {
			b.WriteString("  " + string(rune('0'+i)) + "  " + line + "\n")
		}
	}
	return strings.TrimRight(b.String(), "\n")
}

// usageError is a command line that can't be followed.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

// fail says what went wrong, one line a problem, and returns the status that
// follows from it.
func (a *app) fail(err error) status {
	var problems *config.Errors
	var misconfigured *agent.MisconfiguredError
	var usage *usageError
	switch {
	case errors.As(err, &problems):
		for _, p := range problems.Problems {
			a.stderr.line("%s", p)
		}
		return misused
	case errors.As(err, &misconfigured):
		for _, f := range misconfigured.Lines() {
			a.stderr.line("%s", a.problem(misconfigured.Pool, f))
		}
		return misused
	case errors.As(err, &usage):
		a.stderr.line("gc-agent: %v", err)
		return misused
	}
	a.stderr.line("gc-agent: %v", a.explain(err))
	return failed
}
