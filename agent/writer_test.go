package agent_test

import (
	"testing"

	"github.com/alkblobs/gc-agent/bench"
)

// An application in another process goes on writing while its file is swept, and
// never finds it locked beyond its own timeout.
func TestSQLiteWriterIsNotLockedOut(t *testing.T) {
	t.Parallel()
	bin := bench.Build(t)
	for _, journal := range []string{"WAL", "DELETE"} {
		t.Run(journal, func(t *testing.T) {
			t.Parallel()
			a := bench.NewSQLite(t, 30_000, journal)
			w := a.WriteDuring(func() {
				var deleted int64
				for range 8 {
					deleted += bin.Sweep(t, a).Deleted
				}
				if deleted == 0 {
					t.Error("nothing was deleted meanwhile")
				}
			})
			t.Logf("%d writes, median %s, 99 %% within %s, longest %s", w.Writes, w.Median, w.P99, w.Longest)
			if w.Busy != 0 {
				t.Errorf("%d writes found the file locked for 5 s", w.Busy)
			}
			if w.Writes < 20 {
				t.Errorf("the sweeps ended before the application had written much: %d times", w.Writes)
			}
			a.CheckReferences()
			// What the writer left dead goes too.
			bin.Sweep(t, a)
			bin.Sweep(t, a)
			a.CheckReferences()
			if n := a.Unreferenced(); n != 0 {
				t.Errorf("%d dead blobs are left", n)
			}
		})
	}
}
