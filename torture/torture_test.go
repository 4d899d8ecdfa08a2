package torture_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/bench"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

var (
	duration = flag.Duration("duration", time.Minute, "how long to go on, at least; five times as long at most, where races were met too seldom")
	seed     = flag.Uint64("seed", 0, "of what writers and chaos do, to do the same again; 0 draws one")
)

const (
	oneRound = 12 * time.Second
	// mostTimes bounds by how much a run may take longer than it was asked to.
	mostTimes = 5
)

// Writers under every guard, agents that compete, and everything that can be
// ended is: no blob is lost and none leaks. It runs alone, since the machine's
// time is what the races are made of.
func TestTorture(t *testing.T) {
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	began := time.Now()
	r := newRun(t, pools(), *seed)
	r.binary = bench.Build(t)
	r.agents = []*agentProcess{
		r.newAgent("run-1", "run"), r.newAgent("run-2", "run"),
		r.newAgent("sweep-1", "sweep", "--json", "--pool", r.every(2, 0)), r.newAgent("sweep-2", "sweep", "--json", "--pool", r.every(2, 1)),
	}
	r.ensureSchema()
	r.judge()
	t.Cleanup(func() { r.print(time.Since(began)) })

	stop := make(chan struct{})
	agents, ctx := errgroup.WithContext(t.Context())
	for _, a := range r.agents {
		agents.Go(func() error { return a.keep(ctx, stop) })
	}
	sessions, kills, stops := r.newChaos(*seed, 1), r.newChaos(*seed, 2), r.newChaos(*seed, 3)
	sessions.acts, kills.acts, stops.acts = sessions.ofSessions(), kills.ofKills(), stops.ofStops()

	for n := 0; n == 0 || time.Since(began) < *duration || len(r.counts.unmet()) > 0 && time.Since(began) < mostTimes**duration; n++ {
		r.setCalm(time.Time{})
		r.round(min(oneRound, *duration), sessions.rage, kills.rage, stops.rage)
		r.setCalm(time.Now())
		r.quiesce(ctx)
		if r.lost() > 0 {
			break
		}
	}
	close(stop)
	if err := agents.Wait(); err != nil {
		t.Error(err)
	}
	r.conclude()
}

// conclude fails the test where it has to be.
func (r *run) conclude() {
	r.t.Helper()
	if n := r.lost(); n > 0 {
		r.t.Errorf("%d violations, with -seed %d:\n%s", n, *seed, r.violations())
	}
	if unmet := r.counts.unmet(); len(unmet) > 0 {
		r.t.Errorf("met fewer than %d times:\n%s", enough, strings.Join(unmet, "\n"))
	}
}

// every names every nth pool, from the one at first on.
func (r *run) every(n, first int) string {
	var names []string
	for i := first; i < len(r.pools); i += n {
		names = append(names, r.pools[i].name)
	}
	return strings.Join(names, ",")
}

// ensureSchema makes the agent's tables, functions and triggers, as before a
// deployment.
func (r *run) ensureSchema() {
	r.t.Helper()
	r.command("schema", "ensure")
	for _, p := range r.pools {
		if p.guard == "trigger" {
			r.command("guard", "install", p.name)
		}
	}
}

// command runs a command to its end.
func (r *run) command(args ...string) {
	r.t.Helper()
	cmd := exec.CommandContext(r.t.Context(), string(r.binary), append(args, r.agents[0].args[1:]...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		r.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// quiesce waits, with nobody writing and nothing being ended, until the agents
// have deleted what is dead, and compares what is left.
func (r *run) quiesce(ctx context.Context) {
	r.t.Helper()
	deadline := time.Now().Add(patience)
	var left []string
	for {
		now, windows, err := r.readAll(ctx)
		if err != nil {
			r.t.Fatal(err)
		}
		if left = r.left(now, windows); len(left) == 0 || time.Now().After(deadline) {
			break
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			r.t.Fatal(errors.Join(err, context.Cause(ctx)))
		}
	}
	for _, l := range left {
		r.violation("after %s in which nobody wrote: %s", patience, l)
	}
	if err := r.compare(ctx); err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history.reconcile()
}

// readAll reads the log up to now, the windows' sizes and the host's clock.
func (r *run) readAll(ctx context.Context) (now int64, windows map[string]int, err error) {
	windows = map[string]int{}
	for _, p := range r.pools {
		var n int
		if err := r.admin.QueryRow(ctx, `SELECT count(*) FROM `+ownSchema+p.name+`.gc_window`).Scan(&n); err != nil {
			return 0, nil, err
		}
		windows[p.name] = n
	}
	if err := r.caughtUp(ctx); err != nil {
		return 0, nil, err
	}
	err = r.admin.QueryRow(ctx, `SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint * 1000`).Scan(&now)
	return now, windows, err
}

// left returns what isn't done yet.
func (r *run) left(now int64, windows map[string]int) (left []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.pools {
		s := r.history.pools[p.name]
		if dead := s.dead(now); len(dead) > 0 {
			left = append(left, fmt.Sprintf("%s: nothing refers to %s", p.name, strings.Join(dead, ", ")))
		}
		for _, pin := range s.pins {
			if pin.expiry > now {
				left = append(left, fmt.Sprintf("%s: a pin of %s is live", p.name, pin.key))
			}
		}
		if n := windows[p.name]; n > 0 {
			left = append(left, fmt.Sprintf("%s: %d keys are in the window", p.name, n))
		}
	}
	return left
}

// compare makes sure that the judge knows all blobs and references that there are:
// it has missed nothing.
func (r *run) compare(ctx context.Context) error {
	for _, p := range r.pools {
		blobs, refs := map[string]int64{}, map[rowID]string{}
		rows, err := r.admin.Query(ctx, `SELECT key::text, incarnation, content FROM `+p.name+`.blobs`)
		if err != nil {
			return err
		}
		var key, text string
		var incarnation int64
		_, err = pgx.ForEachRow(rows, []any{&key, &incarnation, &text}, func() error {
			blobs[key] = incarnation
			if text != content(key, incarnation) {
				r.violation("%s: blob %d of %s holds %q", p.name, incarnation, key, text)
			}
			return nil
		})
		if err != nil {
			return err
		}
		for _, table := range tables {
			rows, err := r.admin.Query(ctx, `SELECT id::text, blob::text FROM `+p.name+`.`+table)
			if err != nil {
				return err
			}
			var id, value string
			_, err = pgx.ForEachRow(rows, []any{&id, &value}, func() error {
				refs[rowID{table, id}] = value
				return nil
			})
			if err != nil {
				return err
			}
		}
		r.compareState(p, blobs, refs)
	}
	return nil
}

func (r *run) compareState(p *pool, blobs map[string]int64, refs map[rowID]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.history.pools[p.name]
	for key, incarnation := range blobs {
		if s.blobs[key] != incarnation {
			r.history.violation("%s: blob %d of %s is there, which the log doesn't say", p.name, incarnation, key)
		}
	}
	if len(blobs) != len(s.blobs) || len(refs) != len(s.refs) {
		r.history.violation("%s: %d blobs and %d references are there, the log says %d and %d", p.name, len(blobs), len(refs), len(s.blobs), len(s.refs))
	}
	for id, value := range refs {
		if have, ok := s.refs[id]; !ok || have.holds && have.key != p.referred(value, s.keys) {
			r.history.violation("%s: row %s refers to %s, which the log doesn't say", p.name, id, value)
		}
	}
}

// print prints the run's table.
func (r *run) print(took time.Duration) {
	w := &strings.Builder{}
	fmt.Fprintf(w, "\ntorture: %s, -seed %d\n\n", took.Round(time.Second), *seed)
	var met []string
	for _, op := range operations {
		if r.counts.total(op) > 0 {
			met = append(met, op)
		}
	}
	r.counts.print(w, "operations committed", met)
	w.WriteString("\n")
	r.counts.print(w, "agents and writers", []string{"sweeps", "blobs deleted", "rolled back", "given up"})
	w.WriteString("\n")
	r.counts.print(w, "ended", []string{"agents killed", "agents stopped", "agents' sessions terminated", "writers terminated", "writers' sessions lost", "sweeps failed"})
	w.WriteString("\n")
	r.counts.print(w, fmt.Sprintf("races met, each at least %d times", enough), races)
	w.WriteString("\n")
	for _, a := range r.agents {
		fmt.Fprintf(w, "peak of memory of %s: %.1f MiB\n", a.name, a.peak)
	}
	fmt.Fprintf(w, "lost: %d\n\n", r.lost())
	fmt.Print(w)
}
