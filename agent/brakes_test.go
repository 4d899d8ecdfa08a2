package agent_test

import (
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
)

// shelf is a library in which the first live of n blobs are referred to.
func (a *app) shelf(n, live int) {
	a.t.Helper()
	a.library(n)
	for _, key := range names(2, live) {
		a.exec(`INSERT INTO refs VALUES ('` + key + `')`)
	}
}

func TestMaxDeadRatio(t *testing.T) {
	for name, c := range map[string]struct {
		n, live int
		brakes  string
		stops   bool
	}{
		"exactly":              {8, 4, "max_dead_ratio: 0.5, min_dead_keys: 4", false},
		"one more":             {9, 4, "max_dead_ratio: 0.5, min_dead_keys: 4", true},
		"one less":             {9, 5, "max_dead_ratio: 0.5, min_dead_keys: 4", false},
		"at the floor":         {5, 1, "max_dead_ratio: 0.5, min_dead_keys: 4", true},
		"under the floor":      {5, 1, "max_dead_ratio: 0.5, min_dead_keys: 5", false},
		"by default, under":    {100, 1, "", false},
		"by default, at":       {101, 1, "", true},
		"switched off by name": {101, 1, "off: [max_dead_ratio]", false},
	} {
		t.Run(name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				a.shelf(c.n, c.live)
				p := a.pool(poolYAML{liveness: a.refs(), brakes: "{" + c.brakes + "}"})
				if !c.stops {
					if rep := sweep(t, p); rep.CandidatesStaged != int64(c.n-c.live) {
						t.Errorf("%+v", rep)
					}
					return
				}
				for _, opts := range []agent.SweepOptions{{}, {DryRun: true}} {
					rep := wantAbort(t, p, opts, agent.CauseMaxDeadRatio)
					if !strings.Contains(rep.Detail, "--override max_dead_ratio") {
						t.Errorf("detail = %q", rep.Detail)
					}
				}
				a.wantWindow()
			})
		})
	}
}

func TestMaxDeadCount(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.shelf(5, 2)
		p := a.pool(poolYAML{liveness: a.refs(), window: "1h", brakes: "{max_dead_count: 3}"})
		if rep := sweep(t, p); rep.CandidatesStaged != 3 {
			t.Fatalf("exactly as many: %+v", rep)
		}
		a.exec(`INSERT INTO blobs VALUES ('b6', 10)`)
		a.unchanged(func() { wantAbort(t, p, agent.SweepOptions{}, agent.CauseMaxDeadCount) })
		sweep(t, a.pool(poolYAML{liveness: a.refs(), window: "1h", brakes: "{max_dead_count: 3, off: [max_dead_count]}"}))
		a.wantWindow(names(3, 6)...)
	})
}

// What is in the window counts as dead, and what left it in this very sweep
// doesn't. Overdue rows stay where they are.
func TestBrakeCountsTheWindow(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.shelf(10, 6)
		cfg := poolYAML{liveness: a.refs(), brakes: "{max_dead_ratio: 0.5, min_dead_keys: 1}"}
		p := a.pool(cfg)
		sweep(t, p)
		a.exec(`DELETE FROM refs WHERE blob IN ('b5', 'b6')`)
		a.unchanged(func() {
			rep := wantAbort(t, p, agent.SweepOptions{}, agent.CauseMaxDeadRatio)
			if !strings.Contains(rep.Detail, "6 of 10") {
				t.Errorf("detail = %q", rep.Detail)
			}
		})
		// One override passes one sweep.
		override := agent.SweepOptions{Override: []config.Brake{config.BrakeMaxDeadRatio}}
		if rep := sweepWith(t, p, override); rep.Aborted != nil || rep.Deleted != 4 || rep.CandidatesStaged != 2 {
			t.Errorf("overridden: %+v", rep)
		}
		a.exec(`DELETE FROM refs WHERE blob IN ('b3', 'b4')`)
		wantAbort(t, p, agent.SweepOptions{}, agent.CauseMaxDeadRatio)
		wantAbort(t, p, agent.SweepOptions{Override: []config.Brake{config.BrakeMaxDeadCount, config.BrakeEmptySource}}, agent.CauseMaxDeadRatio)
		a.wantWindow("b5", "b6")
	})
}

func TestBrakeDoesNotCountTheUnstaged(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.shelf(10, 5)
		p := a.pool(poolYAML{liveness: a.refs(), window: "1h", brakes: "{max_dead_ratio: 0.5, min_dead_keys: 1}"})
		sweep(t, p)
		a.exec(`INSERT INTO refs VALUES ('b6')`, `DELETE FROM refs WHERE blob = 'b5'`)
		for _, opts := range []agent.SweepOptions{{DryRun: true}, {}} {
			rep := sweepWith(t, p, opts)
			if rep.Aborted != nil || rep.Unstaged != 1 || rep.CandidatesStaged != 1 {
				t.Errorf("dry run %t: %+v", opts.DryRun, rep)
			}
		}
	})
}

func TestEmptySource(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(4)
		guard := "guard: " + a.settle()
		cfg := poolYAML{liveness: a.refs(), brakes: "{off: [max_dead_ratio]}"}
		p := a.pool(cfg)
		sweep(t, p)
		a.exec(`DELETE FROM refs`)
		a.unchanged(func() {
			rep := wantAbort(t, p, agent.SweepOptions{}, agent.CauseEmptySource)
			if !strings.Contains(rep.Detail, "source refs") || !strings.Contains(rep.Detail, "allow_empty") {
				t.Errorf("detail = %q", rep.Detail)
			}
		})
		// NULLs alone, or rows that don't count, refer to nothing.
		a.exec(`INSERT INTO refs VALUES (NULL)`)
		wantAbort(t, p, agent.SweepOptions{}, agent.CauseEmptySource)
		where := a.pool(poolYAML{brakes: cfg.brakes, liveness: []string{"{name: refs, table: refs, column: blob, where: \"blob <> 'b1'\", " + guard + "}"}})
		a.exec(`INSERT INTO refs VALUES ('b1')`)
		wantAbort(t, where, agent.SweepOptions{}, agent.CauseEmptySource)
		a.exec(`DELETE FROM refs`)

		// Without the brake the sweep goes on: that the source is empty was known.
		override := agent.SweepOptions{Override: []config.Brake{config.BrakeEmptySource}}
		if rep := sweepWith(t, p, override); rep.Aborted != nil || rep.Deleted != 3 {
			t.Errorf("overridden: %+v", rep)
		}
		a.wantBlobs("b1")
		off := a.pool(poolYAML{liveness: a.refs(), brakes: "{off: [max_dead_ratio, empty_source]}"})
		if rep := sweep(t, off); rep.Deleted != 1 {
			t.Errorf("switched off: %+v", rep)
		}
		a.wantBlobs()
		a.fill("blobs", 4)

		// That it is empty may be right.
		allowed := a.pool(poolYAML{brakes: cfg.brakes, liveness: []string{"{name: refs, table: refs, column: blob, allow_empty: true, " + guard + "}"}})
		sweep(t, allowed)
		sweep(t, allowed)
		a.wantBlobs()
	})
}

// One source that is empty stops the sweep, however much the others refer to.
func TestOneOfTwoSourcesIsEmpty(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.shelf(10, 9)
		a.exec(`CREATE TABLE more (blob text)`)
		p := a.pool(poolYAML{brakes: "{}", liveness: append(a.refs(), "{name: more, table: more, column: blob, guard: "+a.settle()+"}")})
		rep := wantAbort(t, p, agent.SweepOptions{}, agent.CauseEmptySource)
		if strings.Contains(rep.Detail, "source refs") || !strings.Contains(rep.Detail, "source more") {
			t.Errorf("detail = %q", rep.Detail)
		}
		if a.hasWindow() {
			t.Error("an aborted sweep made the schema")
		}
	})
}
