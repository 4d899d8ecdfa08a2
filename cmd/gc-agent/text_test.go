package main

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"

	"github.com/google/go-cmp/cmp"
)

func TestCount(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{
		0: "0", 999: "999", 1000: "1,000", 123456: "123,456", 1234567: "1,234,567",
		-1: "-1", -100: "-100", -1000: "-1,000", math.MaxInt64: "9,223,372,036,854,775,807", math.MinInt64: "-9,223,372,036,854,775,808",
	} {
		if got := count(n); got != want {
			t.Errorf("count(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestSize(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{
		0: "0 bytes", 1: "1 byte", 1023: "1,023 bytes", 1024: "1,024 bytes (1.0 KiB)",
		1<<20 - 1: "1,048,575 bytes (1.0 MiB)", 5 << 30: "5,368,709,120 bytes (5.0 GiB)",
		math.MaxInt64: "9,223,372,036,854,775,807 bytes (8.0 EiB)",
	} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestSpan(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "0 s", time.Nanosecond: "0 ms", 999 * time.Millisecond: "999 ms", time.Second: "1 s",
		1999 * time.Millisecond: "1.9 s", 10*time.Second + 500*time.Millisecond: "10 s", time.Minute: "1 min",
		61 * time.Second: "1 min 1 s", time.Hour + 59*time.Second: "1 h", 25 * time.Hour: "1 d 1 h", 7 * day: "7 d",
		-time.Minute: "-1 min", math.MaxInt64: "106751 d 23 h", math.MinInt64: "-106751 d 23 h",
	} {
		if got := span(d); got != want {
			t.Errorf("span(%d) = %q, want %q", d, got, want)
		}
	}
}

func TestWorse(t *testing.T) {
	t.Parallel()
	order := []status{done, aborted, misused, failed} // from the best on
	for i, a := range order {
		for j, b := range order {
			if got, want := a.worse(b), order[max(i, j)]; got != want {
				t.Errorf("worse(%d, %d) = %d, want %d", a, b, got, want)
			}
		}
	}
}

func TestQuoteArg(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]string{"/tmp/a-1/c.yaml": "/tmp/a-1/c.yaml", "it's here": `'it'\''s here'`, "é": "'é'"} {
		if got := quoteArg(path); got != want {
			t.Errorf("quoteArg(%q) = %s, want %s", path, got, want)
		}
	}
}

func TestProgram(t *testing.T) {
	t.Parallel()
	for run, want := range map[string]string{
		"gc-agent": "gc-agent", "bin/gc-agent": "bin/gc-agent", "/opt/a b/gc-agent": "'/opt/a b/gc-agent'",
		"/tmp/go-build3381/b001/exe/gc-agent":                                       "go run ./cmd/gc-agent",
		"/home/me/.cache/go-build/cd/" + strings.Repeat("0af9", 16) + "-d/gc-agent": "go run ./cmd/gc-agent",
		"/srv/b001/exe/gc-agent":                                                    "/srv/b001/exe/gc-agent",
	} {
		if got := program(run); got != want {
			t.Errorf("program(%q) = %s, want %s", run, got, want)
		}
	}
}

func TestReportText(t *testing.T) {
	t.Parallel()
	begin := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	rep := agent.Report{
		Pool: "images", Form: agent.Durable, Mode: "enforce", Detail: "writer 42 has not ended",
		Scanned: 200000, Referenced: 139900, Foreign: 100, CandidatesStaged: 59000, Unstaged: 7,
		Overdue: 1000, Deleted: 995, Cancelled: 5, CancelledBy: agent.CancelledBy{Live: 3, Failed: 2},
		BytesReclaimed: 5 << 20, StartedAt: begin, FinishedAt: begin.Add(83 * time.Second), LongestTxMS: 412,
	}
	want := `pool images: swept in 1 min 23 s, longest transaction 412 ms
  scanned     200,000
  referenced  139,900
  foreign         100  can't be keys of the pool, and are never touched
  staged       59,000
  unstaged          7  referred to again
  overdue       1,000
  deleted         995  5,242,880 bytes (5.0 MiB)
  cancelled         5  3 live, 2 failed
  held up, and what is overdue is left for the next sweep: writer 42 has not ended
`
	if diff := cmp.Diff(want, reportText(rep, nil)); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
	cause := agent.CauseMaxDeadCount
	rep.Aborted = &cause
	want = `pool images: aborted after 1 min 23 s, nothing was deleted
  scanned     200,000
  referenced  139,900
  foreign         100  can't be keys of the pool, and are never touched
`
	if diff := cmp.Diff(want, reportText(rep, nil)); diff != "" {
		t.Errorf("report of an abort (-want +got):\n%s", diff)
	}
	lock := agent.CauseSweeperLock
	skipped := agent.Report{Pool: "images", Aborted: &lock, Detail: "another agent is sweeping this pool"}
	if got, want := reportText(skipped, nil), "pool images: skipped: another agent is sweeping this pool\n"; got != want {
		t.Errorf("report of a sweep that was skipped: %q, want %q", got, want)
	}
	unopened := agent.Report{Pool: "images", FinishedAt: time.Time{}.Add(4 * time.Millisecond)}
	if got, want := reportText(unopened, errors.New("no")), "pool images: failed after 4 ms\n"; got != want {
		t.Errorf("report of a sweep that never began: %q, want %q", got, want)
	}
}

func TestProgressMeasuresEachPhase(t *testing.T) {
	t.Parallel()
	var p pacer
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for _, step := range []struct {
		after time.Duration
		now   agent.Progress
		want  string
	}{
		{0, agent.Progress{Pool: "images", Phase: "mark", Done: 10000}, "images: marking, 10,000 keys"},
		{2 * time.Second, agent.Progress{Pool: "images", Phase: "mark", Done: 30000}, "images: marking, 30,000 keys, 10,000/s"},
		{time.Second, agent.Progress{Pool: "images", Phase: "execute", Done: 1}, "images: deleting, 1 key"},
		{time.Second, agent.Progress{Pool: "notes", Phase: "execute", Done: 5}, "notes: deleting, 5 keys"},
		{time.Second, agent.Progress{Pool: "notes", Phase: "stage", Done: 7}, "notes: staging, 7 keys"},
	} {
		at = at.Add(step.after)
		if got := p.text(step.now, at); got != step.want {
			t.Errorf("progress = %q, want %q", got, step.want)
		}
	}
}

func TestPassingLineLeavesNoTrace(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	term := &terminal{w: &b, isTTY: true}
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	text := func(s string) func() string { return func() string { return s } }
	term.passing(at, text("one"))
	term.passing(at.Add(time.Millisecond), text("too soon"))
	term.passing(at.Add(time.Second), text("two"))
	term.line("stays: %d", 1)
	term.line("stays: %d", 2)
	term.passing(at.Add(2*time.Second), text("three"))
	term.wipe()
	term.wipe()
	const wipe = "\r\x1b[K"
	if got, want := b.String(), "one"+wipe+"two"+wipe+"stays: 1\nstays: 2\nthree"+wipe; got != want {
		t.Errorf("written %q, want %q", got, want)
	}
}

func TestNoPassingLineOffATerminal(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	newTerminal(&b).passing(time.Now(), func() string { return "one" })
	if b.Len() > 0 {
		t.Errorf("written %q", b.String())
	}
}
