package agent_test

import (
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/bench"
)

// A slice of `make bench`: the real binary sweeps a pool to exactly the right
// set, in memory that doesn't grow with the number of blobs and in short
// transactions.
func TestScale(t *testing.T) {
	t.Parallel()
	bin := bench.Build(t)
	open := map[string]func(testing.TB, int64) *bench.App{
		"postgres": bench.NewPostgres,
		"sqlite":   func(t testing.TB, keys int64) *bench.App { return bench.NewSQLite(t, keys, "WAL") },
	}
	for engine, open := range open {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			small := scale(t, bin, open(t, 4_000))
			large := scale(t, bin, open(t, 20_000))
			if bench.HasProc() && large > small+16 {
				t.Errorf("memory grows with the number of blobs: %.1f MiB with 4,000, %.1f with 20,000", small, large)
			}
		})
	}
}

// scale sweeps twice and returns the peak of memory in MiB.
func scale(t *testing.T, bin bench.Binary, a *bench.App) (peak float64) {
	t.Helper()
	staged, executed := bin.Sweep(t, a), bin.Sweep(t, a)
	a.CheckCollected()
	if staged.CandidatesStaged != a.Dead() || staged.Deleted != 0 {
		t.Errorf("first sweep: %+v", staged.Report)
	}
	if executed.Overdue != a.Dead() || executed.Deleted != a.Dead() || executed.CandidatesStaged != 0 {
		t.Errorf("second sweep: %+v", executed.Report)
	}
	peak = max(staged.PeakMiB, executed.PeakMiB)
	longest := max(staged.LongestTx, executed.LongestTx)
	t.Logf("%d blobs: %.1f MiB, %s and %s, longest transaction %s", a.Keys, peak, staged.Took, executed.Took, longest)
	if bench.HasProc() && (peak == 0 || peak > 64) {
		t.Errorf("peak of memory: %.1f MiB, want under 64", peak)
	}
	if longest > 5*time.Second {
		t.Errorf("a transaction was open for %s", longest)
	}
	return peak
}
