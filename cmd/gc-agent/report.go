package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/words"
)

// jsonReport is a report, and what made the sweep fail.
type jsonReport struct {
	agent.Report
	Error string `json:"error,omitempty"`
}

// printReport prints what a sweep did. Of a pool that was refused for its
// configuration there is nothing to read.
func (a *app) printReport(rep agent.Report, err error) status {
	if a.json {
		r := jsonReport{Report: rep}
		if err != nil {
			r.Error = words.OneLine(a.explain(err).Error())
		}
		return a.printJSON(r)
	}
	if misconfigured := (*agent.MisconfiguredError)(nil); errors.As(err, &misconfigured) {
		return done
	}
	return a.print(reportText(rep, err))
}

// line is one line of a report.
type line struct {
	label string
	n     int64
	note  string
}

func reportText(rep agent.Report, err error) string {
	lines := []line{{"scanned", rep.Scanned, ""}, {"referenced", rep.Referenced, ""}}
	if rep.Foreign > 0 {
		lines = append(lines, line{"foreign", rep.Foreign, "can't be keys of the pool, and are never touched"})
	}
	switch {
	case rep.Aborted == nil && (err == nil || begun(rep)):
		lines = append(lines, outcome(rep)...)
	case !begun(rep):
		lines = nil
	}
	text := fmt.Sprintf("pool %s: %s\n", rep.Pool, headline(rep, err)) + align(lines)
	switch {
	case rep.HeldUp():
		text += "  held up, and what is overdue is left for the next sweep: " + words.OneLine(rep.Detail) + "\n"
	case rep.Stopped():
		text += "  " + rep.Detail + "\n"
	}
	return text
}

// begun says whether the sweep has counted anything.
func begun(rep agent.Report) bool {
	return rep.Scanned > 0 || rep.Unstaged > 0 || rep.CandidatesStaged > 0 || rep.Overdue > 0
}

// headline says how the sweep ended. What kept it from its end stands on standard
// error.
func headline(rep agent.Report, err error) string {
	took := span(rep.FinishedAt.Sub(rep.StartedAt))
	switch {
	case err != nil && begun(rep):
		return "failed after " + took + ", this far:"
	case err != nil:
		return "failed after " + took
	case rep.Skipped():
		return "skipped: " + words.OneLine(rep.Detail)
	case rep.Aborted != nil:
		return "aborted after " + took + ", nothing was deleted"
	case rep.DryRun && rep.Mode == "observe":
		return "observed in " + took + ", nothing was changed (mode observe)"
	case rep.DryRun:
		return "looked at in " + took + ", nothing was changed (dry run)"
	}
	return fmt.Sprintf("swept in %s, longest transaction %d ms", took, rep.LongestTxMS)
}

// outcome is what was decided, or would have been.
func outcome(rep agent.Report) []line {
	staged, unstaged, deleted, cancelled := "staged", "unstaged", "deleted", "cancelled"
	if rep.DryRun {
		staged, unstaged, deleted, cancelled = "would stage", "would unstage", "would delete", "would cancel"
	}
	lines := []line{{staged, rep.CandidatesStaged, ""}}
	if rep.Unstaged > 0 {
		lines = append(lines, line{unstaged, rep.Unstaged, "referred to again"})
	}
	bytes := ""
	if rep.BytesReclaimed > 0 {
		bytes = size(rep.BytesReclaimed)
	}
	return append(lines, line{"overdue", rep.Overdue, ""}, line{deleted, rep.Deleted, bytes},
		line{cancelled, rep.Cancelled, causes(rep.CancelledBy)})
}

// causes lists why keys were kept.
func causes(by agent.CancelledBy) string {
	var causes []string
	for _, c := range []struct {
		n    int64
		name string
	}{{by.Live, "live"}, {by.Pinned, "pinned"}, {by.Vanished, "vanished"}, {by.Locked, "locked"}, {by.Failed, "failed"}} {
		if c.n > 0 {
			causes = append(causes, count(c.n)+" "+c.name)
		}
	}
	return strings.Join(causes, ", ")
}

// align sets labels in one column, numbers in the next and notes in the last.
func align(lines []line) string {
	labels, numbers := 0, 0
	for _, l := range lines {
		labels, numbers = max(labels, len(l.label)), max(numbers, len(count(l.n)))
	}
	var b strings.Builder
	for _, l := range lines {
		text := fmt.Sprintf("  %-*s  %*s  %s", labels, l.label, numbers, count(l.n), l.note)
		b.WriteString(strings.TrimRight(text, " ") + "\n")
	}
	return b.String()
}
