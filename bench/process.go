package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
)

// Binary is the path of a gc-agent, built as it is for use: without C, and
// without the race detector, which takes memory of its own.
type Binary string

// Build builds it.
func Build(t testing.TB) Binary {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gc-agent")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", path, "github.com/alkblobs/gc-agent/cmd/gc-agent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build gc-agent: %v\n%s", err, out)
	}
	return Binary(path)
}

// Swept is a sweep as it was seen from outside.
type Swept struct {
	agent.Report
	Took time.Duration
	// PeakMiB is the process's peak of memory, VmHWM, 0 where there is no /proc.
	PeakMiB float64
	// LongestTx is the greatest age of a transaction of the agent's in
	// pg_stat_activity, 0 on SQLite.
	LongestTx time.Duration
}

const (
	memoryPoll      = 2 * time.Millisecond
	transactionPoll = 10 * time.Millisecond
)

// Sweep sweeps the application once and watches. A sweep that fails or aborts
// fails the test.
func (b Binary) Sweep(t testing.TB, a *App) Swept {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), string(b), "sweep", "--json", "--config", a.Config)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	memory, transactions := make(chan float64, 1), make(chan time.Duration, 1)
	go func() { memory <- watchMemory(cmd.Process.Pid, ended) }()
	go func() { transactions <- a.watchTransactions(t.Context(), ended) }()
	err := cmd.Wait()
	s := Swept{Took: time.Since(began)}
	close(ended)
	s.PeakMiB, s.LongestTx = <-memory, <-transactions
	if err != nil {
		t.Fatalf("sweep: %v\n%s%s", err, &stdout, &stderr)
	}
	if err := json.Unmarshal(stdout.Bytes(), &s.Report); err != nil {
		t.Fatalf("read the report %s: %v", &stdout, err)
	}
	return s
}

// watchMemory reads a peak, which only grows, until the process has ended.
func watchMemory(pid int, ended <-chan struct{}) (peakMiB float64) {
	poll := time.NewTicker(memoryPoll)
	defer poll.Stop()
	for {
		select {
		case <-ended:
			return peakMiB
		case <-poll.C:
			if mib, err := PeakMemory(pid); err == nil {
				peakMiB = max(peakMiB, mib)
			}
		}
	}
}

// PeakMemory reads the peak of a running process's memory, VmHWM.
func PeakMemory(pid int) (mib float64, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kib, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	n, err := strconv.ParseFloat(kib, 64)
	return n / 1024, err
}

// HasProc says whether the peak of a process's memory can be read.
func HasProc() bool { return runtime.GOOS == "linux" }

const selectOldest = `SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8
FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'gc-agent'`

// watchTransactions samples the age of the agent's oldest transaction.
func (a *App) watchTransactions(ctx context.Context, ended <-chan struct{}) (longest time.Duration) {
	if a.Engine != "postgres" {
		return 0
	}
	poll := time.NewTicker(transactionPoll)
	defer poll.Stop()
	for {
		select {
		case <-ended:
			return longest
		case <-poll.C:
			var seconds float64
			if err := a.DB.QueryRowContext(ctx, selectOldest).Scan(&seconds); err == nil {
				longest = max(longest, time.Duration(seconds*float64(time.Second)))
			}
		}
	}
}
