package main

import (
	"context"
	"errors"
	"strings"
	"testing"
)

type panicking struct{}

func (panicking) Write([]byte) (int, error) { panic("line one\nline two") }

func TestAPanicIsOneLine(t *testing.T) {
	t.Parallel()
	var stderr strings.Builder
	if got := run(t.Context(), []string{"version"}, nil, panicking{}, &stderr); got != failed {
		t.Errorf("exit status %d, want %d", got, failed)
	}
	if got, want := stderr.String(), "gc-agent: internal error: line one; line two\n"; got != want {
		t.Errorf("stderr %q, want %q", got, want)
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestOutputThatCantBeWrittenIsAFailure(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"version"}, {"version", "--json"}} {
		var stderr strings.Builder
		if got := run(t.Context(), args, nil, full{}, &stderr); got != failed {
			t.Errorf("%v: exit status %d, want %d", args, got, failed)
		}
		if got := stderr.String(); got != "gc-agent: write to standard output: no space left\n" {
			t.Errorf("%v: stderr %q", args, got)
		}
	}
}

func TestStoppedSweepSaysWhatItLeftOut(t *testing.T) {
	t.Parallel()
	dir := writeApp(t, "1h")
	stop := make(chan struct{})
	close(stop)
	var stdout, stderr strings.Builder
	a := &app{stdout: &stdout, stderr: newTerminal(&stderr), stop: stop, configPath: dir + "/config.yaml"}
	if got := a.sweep(t.Context(), sweepFlags{}); got != failed {
		t.Errorf("exit status %d, want %d", got, failed)
	}
	if got, want := stderr.String(), "pool parts: not swept: stopped by a signal\n"; got != want {
		t.Errorf("stderr %q, want %q", got, want)
	}
}

func TestSweepThatIsCutOffSaysSo(t *testing.T) {
	t.Parallel()
	dir := writeApp(t, "1h")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errCut)
	var stdout, stderr strings.Builder
	a := &app{stdout: &stdout, stderr: newTerminal(&stderr), configPath: dir + "/config.yaml"}
	if got := a.sweep(ctx, sweepFlags{}); got != failed {
		t.Errorf("exit status %d, want %d", got, failed)
	}
	if got := stderr.String(); !strings.HasPrefix(got, "pool parts: cut off by a second signal: ") || strings.Count(got, "\n") != 1 {
		t.Errorf("stderr %q", got)
	}
}
