package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/internal/words"
)

// text is a check for people: what the pool is, then what is to be said about it.
func (c checked) text(now time.Time) string {
	var b strings.Builder
	fmt.Fprintf(&b, "pool %s\n", c.Pool)
	field := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-11s  %s\n", name, words.OneLine(fmt.Sprintf(format, args...)))
	}
	field("mode", "%s", c.Mode)
	field("schedule", "%s, next %s (in %s)", c.Schedule, c.Next.Format(time.RFC3339), span(c.Next.Sub(now)))
	field("window", "%s, %s", span(time.Duration(c.WindowMS)*time.Millisecond), c.whereWindow())
	for _, t := range c.Tiers {
		field("blobs", "%s %s, column %s, in database %s", t.Type, t.Table, t.Column, t.Database)
	}
	if c.Keys != "" {
		field("keys", "%s", c.Keys)
	}
	for _, s := range c.Sources {
		field("source", "%s: guard %s, %s%s", s.Name, s.Guard, s.Probe, s.extras())
		if s.LeavesOpen != "" {
			field("", "leaves open: %s", s.LeavesOpen)
		}
		if s.WouldClose != "" {
			field("", "would close it: %s", s.WouldClose)
		}
	}
	for _, f := range c.Findings {
		field(f.Severity, "%s", config.Problem{File: f.File, Line: f.Line, Path: f.Path, Message: f.Message})
	}
	for _, f := range c.Against {
		// The message names the path.
		field("would abort", "%s", config.Problem{File: f.File, Line: f.Line, Message: f.Cause + ": " + f.Message})
	}
	field("ready", "%s", c.verdict())
	return b.String()
}

func (c checked) whereWindow() string {
	switch {
	case c.Host == nil:
		return "in memory for the length of a sweep"
	case c.Host.Schema != "":
		return fmt.Sprintf("in database %s (%s), schema %s", c.Host.Database, c.Host.Engine, c.Host.Schema)
	}
	return fmt.Sprintf("in database %s (%s)", c.Host.Database, c.Host.Engine)
}

func (s source) extras() string {
	text := ", no index"
	if s.Indexed {
		text = ", indexed"
	}
	if s.AllowEmpty {
		text += ", may be empty"
	}
	return text
}

func (c checked) verdict() string {
	problems := int64(len(c.Against))
	for _, f := range c.Findings {
		if f.Severity != "warning" {
			problems++
		}
	}
	switch {
	case c.Error != "":
		return "unknown, see below"
	case problems > 0:
		return "no: " + some(problems, "problem")
	case c.Mode == string(config.ModeObserve):
		return "yes; it only observes: set mode: enforce to collect"
	}
	return "yes"
}
