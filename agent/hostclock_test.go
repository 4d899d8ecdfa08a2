package agent_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
)

// shiftedClock is the machine's clock and a difference, which a test changes.
type shiftedClock struct {
	agent.SystemClock
	mu sync.Mutex
	by time.Duration
}

func (c *shiftedClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.SystemClock.Now().Add(c.by)
}

func (c *shiftedClock) shift(by time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.by += by
}

// An agent whose clock is a day off does what any other does.
func TestAgentsClockADayOff(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, off time.Duration) []agent.Report {
		a := newPostgresApp(t)
		a.library(9)
		p := a.poolWith(poolYAML{liveness: a.refs(), window: "1h", extra: "fleet: true"}, agent.Options{Clock: &shiftedClock{by: off}})
		reps := []agent.Report{sweep(t, p), sweep(t, p)}
		a.exec(`SELECT gc_agent.pin('b2'::bytea, 'me'::bytea, interval '10 minutes')`,
			`UPDATE gc_agent.gc_window SET visible_after = visible_after - 3600000000000 WHERE key < 'b6'`,
			`INSERT INTO blobs VALUES ('c1', 1)`, `INSERT INTO refs VALUES ('b3'), ('b9')`)
		reps = append(reps, sweep(t, p), sweep(t, p))
		a.wantBlobs("b1", "b2", "b3", "b6", "b7", "b8", "b9", "c1")
		a.wantWindow("b2", "b6", "b7", "b8", "c1")
		if n := a.number(`SELECT count(*) FROM gc_agent.gc_window WHERE visible_after > (extract(epoch FROM clock_timestamp()) * 1e9)::bigint + 3600000000000`); n != 0 {
			t.Errorf("%d keys wait for longer than the window", n)
		}
		return reps
	}
	want := run(t, 0)
	if want[2].Deleted != 2 || want[2].CancelledBy.Pinned != 1 {
		t.Fatalf("%+v", want)
	}
	for _, off := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		times := cmpopts.IgnoreFields(agent.Report{}, "StartedAt", "FinishedAt", "LongestTxMS")
		if diff := cmp.Diff(want, run(t, off), times); diff != "" {
			t.Errorf("off by %s: -want +got:\n%s", off, diff)
		}
	}
}

// jumpPool is a pool of dead blobs, staged and due, on a clock of its own.
func jumpPool(t *testing.T, a *app, blobs int, extra string) (*agent.Pool, *shiftedClock) {
	t.Helper()
	a.library(blobs)
	clock := &shiftedClock{}
	p := a.poolWith(poolYAML{liveness: a.refs(), extra: "fleet: true\n    pins: {ttl: 60s}\n    " + extra}, agent.Options{Clock: clock})
	sweep(t, p)
	return p, clock
}

func wantHeldUp(t *testing.T, rep agent.Report) {
	t.Helper()
	if !rep.HeldUp() || !strings.Contains(rep.Detail, "the host's clock has jumped ahead") || rep.Overdue != 0 {
		t.Errorf("it isn't held up by the clock: %+v", rep)
	}
}

// While the agent's clock stands still, the host's has jumped as seen from there.
// Nothing is executed then for as long as a pin could have lived on.
func TestHostClockAheadOfTheAgents(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		pin  string
		hold time.Duration
	}{
		"no pin":              {"SELECT 1", time.Minute},
		"a short pin":         {`SELECT gc_agent.pin('b2'::bytea, 'me'::bytea, interval '20 seconds')`, time.Hour + 20*time.Second},
		"a longer pin":        {`SELECT gc_agent.pin('b2'::bytea, 'me'::bytea, interval '10 minutes')`, time.Hour + 10*time.Minute},
		"no longer than pins": {`SELECT gc_agent.pin('b2'::bytea, 'me'::bytea, interval '23 hours')`, 24 * time.Hour},
		"one without end":     {`INSERT INTO gc_agent.gc_pins VALUES ('b2', 'me', 9223372036854775807)`, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			p, clock := jumpPool(t, a, 4, "")
			a.exec(c.pin, `INSERT INTO blobs VALUES ('c1', 1)`)
			clock.shift(-time.Hour)
			rep := sweep(t, p)
			wantHeldUp(t, rep)
			if rep.CandidatesStaged != 1 {
				t.Errorf("marks and stages don't go on: %+v", rep)
			}
			wantHeldUp(t, sweepWith(t, p, agent.SweepOptions{DryRun: true}))
			clock.shift(c.hold - time.Minute)
			if c.hold > time.Minute {
				wantHeldUp(t, sweep(t, p))
			}
			clock.shift(time.Minute)
			a.exec(`SELECT gc_agent.unpin('b2'::bytea, 'me'::bytea)`)
			if rep := sweep(t, p); rep.Deleted != 4 || rep.HeldUp() {
				t.Errorf("after that: %+v", rep)
			}
			a.wantBlobs("b1")
		})
	}
}

// A clock that goes back, or gains less than a second, holds nothing up, nor does
// any in a pool that only observes.
func TestHostClockThatHoldsNothingUp(t *testing.T) {
	t.Parallel()
	for by, want := range map[time.Duration]int64{time.Hour: 3, -800 * time.Millisecond: 3} {
		t.Run(by.String(), func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			p, clock := jumpPool(t, a, 4, "")
			clock.shift(by)
			if rep := sweep(t, p); rep.Deleted != want || rep.Detail != "" {
				t.Errorf("%+v", rep)
			}
		})
	}
	t.Run("observe", func(t *testing.T) {
		t.Parallel()
		a := newPostgresApp(t)
		a.library(4)
		clock := &shiftedClock{}
		p := a.poolWith(poolYAML{liveness: a.refs(), mode: "observe"}, agent.Options{Clock: clock})
		sweep(t, p)
		clock.shift(-time.Hour)
		if rep := sweep(t, p); rep.Detail != "" || rep.CandidatesStaged != 3 {
			t.Errorf("%+v", rep)
		}
	})
}

// How long a jump matters may not be known at once: nothing is executed before.
func TestHostClockJumpThatCantBeMeasured(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	fail := false
	clock := &shiftedClock{}
	a.library(4)
	p := a.poolWith(poolYAML{liveness: a.refs(), extra: "fleet: true"}, agent.Options{Clock: clock, PostgresTracer: postgresHook(func(conn *pgx.Conn, data pgx.TraceQueryStartData) {
		if fail && strings.Contains(data.SQL, "max(expiry) FROM") {
			a.exec(fmt.Sprintf(`SELECT pg_terminate_backend(%d, 10000)`, conn.PgConn().PID()))
		}
	})})
	sweep(t, p)
	fail = true
	clock.shift(-time.Hour)
	for range 2 {
		_, _ = sweepError(t, p, "read the host clock")
	}
	a.wantBlobs(names(1, 4)...)
	fail = false
	wantHeldUp(t, sweep(t, p))
	clock.shift(2 * time.Minute)
	sweep(t, p)
	a.wantBlobs("b1")
}

// movedServer is a Postgres server whose clock a test moves while it runs.
type movedServer struct {
	t    testing.TB
	url  string
	file string
	by   time.Duration
}

func newMovedServer(t testing.TB) *movedServer {
	t.Helper()
	library, err := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1")
	if err != nil || len(library) == 0 {
		t.Skip("libfaketime isn't installed: run make test, which installs it")
	}
	// Not the test's own directory: the server's user must reach it.
	dir, err := os.MkdirTemp("", "gc-agent-clock")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	s := &movedServer{t: t, file: filepath.Join(dir, "by")}
	s.ahead(0)
	s.url = pgtest.Server(t, "LD_PRELOAD="+library[0], "FAKETIME_TIMESTAMP_FILE="+s.file, "FAKETIME_NO_CACHE=1",
		"FAKETIME_DISABLE_SHM=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", "NO_FAKE_STAT=1")
	return s
}

// ahead moves the server's clock ahead by so much more, at once.
func (s *movedServer) ahead(by time.Duration) {
	s.t.Helper()
	s.by += by
	err := os.WriteFile(s.file+".new", fmt.Appendf(nil, "+%ds", int(s.by.Seconds())), 0o644)
	if err = errors.Join(err, os.Rename(s.file+".new", s.file)); err != nil {
		s.t.Fatal(err)
	}
}

// app makes an application with a database of its own on the server.
func (s *movedServer) app(t *testing.T, name string) *app {
	t.Helper()
	pgtest.Exec(t, pgtest.Connect(t, s.url), "CREATE DATABASE "+name)
	return openApp(t, "postgres", "pgx", strings.Replace(s.url, "/postgres?", "/"+name+"?", 1))
}

// The server's clock really jumps ahead by an hour, before a sweep, between two
// batches of it, and within a batch, right before it looks at the pins. Without the
// rule a blob with a live pin is lost. With it, none is, and once the pin would
// have expired anyway everything is collected.
func TestHostClockJumps(t *testing.T) {
	t.Parallel()
	server := newMovedServer(t)
	for name, c := range map[string]struct {
		at      []string // the jump comes before the statement with these parts
		nth     int
		deleted int64 // before the jump
	}{
		"before":   {},
		"between":  {at: []string{"pg_locks", "ExclusiveLock"}, nth: 3, deleted: 2}, // twice a batch
		"within":   {at: []string{"max(expiry)", "GROUP BY key"}, nth: 2, deleted: 2},
		"at first": {at: []string{"max(expiry)", "GROUP BY key"}, nth: 1},
	} {
		for _, blind := range []bool{true, false} {
			what := fmt.Sprintf("%s_%t", strings.ReplaceAll(name, " ", "_"), blind)
			t.Run(what, func(t *testing.T) {
				a := server.app(t, "app_"+what)
				left, armed := c.nth, false
				clock := &shiftedClock{}
				a.library(9)
				opts := onStatement(func(sql string) {
					if armed && containsAll(sql, c.at...) {
						if left--; left == 0 {
							server.ahead(time.Hour)
						}
					}
				})
				opts.Clock = clock
				p := a.poolWith(poolYAML{liveness: a.refs(), extra: "fleet: true\n    limits: {batch: 2}"}, opts)
				sweep(t, p)
				a.exec(`SELECT gc_agent.pin(ARRAY['b2', 'b3', 'b4', 'b5', 'b6', 'b7']::bytea[], 'me'::bytea, interval '30 minutes')`,
					// Those without a pin come first.
					`UPDATE gc_agent.gc_window SET visible_after = visible_after - 1000000000 WHERE key >= 'b8'`)
				if blind {
					p.IgnoreClockJumps()
				}
				if armed = true; len(c.at) == 0 {
					server.ahead(time.Hour)
				}
				rep := sweep(t, p)
				if blind {
					if rep.Deleted != 8 {
						t.Errorf("without the rule nothing is lost: %+v", rep)
					}
					return
				}
				if !rep.HeldUp() || rep.Deleted != c.deleted || rep.Overdue != c.deleted {
					t.Errorf("it isn't held up at once: %+v", rep)
				}
				clock.shift(25 * time.Minute)
				wantHeldUp(t, sweep(t, p))
				for _, b := range names(2, 7) {
					if !slices.Contains(a.column(`SELECT id FROM blobs`), b) {
						t.Errorf("%s is gone, and was pinned", b)
					}
				}
				clock.shift(6 * time.Minute)
				sweep(t, p)
				a.wantBlobs("b1")
				if n := a.number(`SELECT count(*) FROM gc_agent.gc_pins`); n != 0 {
					t.Errorf("%d expired pins are left after that", n)
				}
			})
		}
	}
}

// Pins that a jump has made expire are still there to show for how long it
// matters, even where it comes right before expired ones are removed.
func TestHostClockJumpsBeforeTidying(t *testing.T) {
	t.Parallel()
	server := newMovedServer(t)
	for _, blind := range []bool{true, false} {
		t.Run(fmt.Sprint(blind), func(t *testing.T) {
			a := server.app(t, fmt.Sprintf("tidy_%t", blind))
			a.library(3)
			clock := &shiftedClock{}
			jump := before(func() { server.ahead(time.Hour) }, "DELETE FROM", "gc_pins")
			opts := jump.options()
			opts.Clock = clock
			p := a.poolWith(poolYAML{liveness: a.refs(), extra: "fleet: true"}, opts)
			sweep(t, p)
			a.exec(`SELECT gc_agent.pin('b2'::bytea, 'me'::bytea, interval '30 minutes')`)
			if blind {
				p.IgnoreClockJumps()
			}
			jump.armed = true
			if rep := sweep(t, p); rep.Deleted != 1 || rep.CancelledBy.Pinned != 1 {
				t.Errorf("%+v", rep)
			}
			if n := a.number(`SELECT count(*) FROM gc_agent.gc_pins`); (n == 0) != blind {
				t.Errorf("%d pins are left", n)
			}
			if !blind {
				clock.shift(25 * time.Minute)
				wantHeldUp(t, sweep(t, p))
				a.wantBlobs("b1", "b2")
			}
		})
	}
}

// A reading that takes long shows nothing, and is repeated: a slow network is no
// jump.
func TestSlowReadingIsNoJump(t *testing.T) {
	t.Parallel()
	server := newMovedServer(t)
	a := server.app(t, "slow")
	a.library(4)
	clock := &shiftedClock{}
	// Time passes for both, after the agent's clock was read and before the host's is.
	slow := before(func() {
		server.ahead(5 * time.Second)
		clock.shift(5 * time.Second)
	}, "SELECT (extract(epoch FROM pg_catalog.clock_timestamp())")
	opts := slow.options()
	opts.Clock = clock
	p := a.poolWith(poolYAML{liveness: a.refs()}, opts)
	sweep(t, p)
	slow.armed = true
	if rep := sweep(t, p); rep.Deleted != 3 || rep.HeldUp() || !slow.done {
		t.Errorf("%+v", rep)
	}
}
