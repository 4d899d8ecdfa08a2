package agent_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"

	"github.com/jackc/pgx/v5"
)

// daemon is an agent that runs on a clock that a test moves.
type daemon struct {
	t      *testing.T
	clock  *manualClock
	log    *logBuffer
	agent  *agent.Agent
	cancel context.CancelFunc
	stop   func()
	ended  chan error
}

// yamlOf is a configuration of one pool for each database, swept every second.
func yamlOf(head string, apps map[string]*app) string {
	var b strings.Builder
	b.WriteString("databases:\n")
	for name, a := range apps {
		fmt.Fprintf(&b, "  %s: {url: %q}\n", name, a.url)
	}
	b.WriteString(head + "pools:\n")
	for name, a := range apps {
		fmt.Fprintf(&b, `  - name: %s
    database: %s
    mode: enforce
    window: 0s
    schedule: "@every 1s"
    brakes: {off: [max_dead_ratio]}
    limits: {batch: 1}
    blobs: [{type: table, table: blobs, column: id, size: size}]
    liveness: [{name: refs, table: refs, column: blob, guard: %s}]
`, name, name, a.settle())
	}
	return b.String()
}

func newDaemon(t *testing.T, yaml string, opts agent.Options) *daemon {
	d := &daemon{t: t, clock: newManualClock(), log: &logBuffer{}, ended: make(chan error, 1)}
	opts.Clock, opts.Log = d.clock, d.log.logger()
	d.agent = agentOf(t, yaml, opts)
	for _, p := range d.agent.Pools() {
		p.IgnoreClockJumps() // the real one goes on while the daemon's stands still
	}
	return d
}

// start runs the daemon. A test that fails stops it, too.
func (d *daemon) start() {
	ctx, cancel := context.WithCancel(d.t.Context())
	stop := make(chan struct{})
	d.cancel = cancel
	d.stop = sync.OnceFunc(func() { close(stop) })
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.ended <- d.agent.Run(ctx, stop)
	}()
	d.t.Cleanup(func() {
		cancel()
		<-done
		if d.t.Failed() {
			d.t.Logf("log:\n%s", d.log)
		}
	})
}

// tick lets a second pass, and waits until so many pools are asleep again.
func (d *daemon) tick(asleep int) {
	d.t.Helper()
	d.clock.advance(time.Second)
	d.clock.await(d.t, asleep)
}

// end waits for the end of Run.
func (d *daemon) end() {
	d.t.Helper()
	select {
	case err := <-d.ended:
		if err != nil {
			d.t.Errorf("run: %v", err)
		}
	case <-time.After(30 * time.Second):
		d.t.Fatal("the daemon doesn't end")
	}
}

func TestDaemonKeepsTheSchedule(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(4)
		d := newDaemon(t, yamlOf("", map[string]*app{"p": a}), agent.Options{})
		d.start()
		d.clock.await(t, 1)
		if a.hasWindow() {
			t.Error("it swept before its time")
		}
		d.clock.advance(999 * time.Millisecond)
		d.clock.await(t, 1)
		if a.hasWindow() {
			t.Error("it swept a millisecond early")
		}
		d.clock.advance(time.Millisecond)
		d.clock.await(t, 1)
		a.wantWindow(names(2, 4)...)
		a.wantBlobs(names(1, 4)...)
		d.tick(1)
		a.wantBlobs("b1")
		a.exec(`INSERT INTO blobs VALUES ('b5', 1)`)
		d.tick(1)
		d.tick(1)
		a.wantBlobs("b1")
		d.stop()
		d.end()
		for _, want := range []string{`"pool":"p"`, `"deleted":3`, "pool is on its schedule"} {
			if !strings.Contains(d.log.String(), want) {
				t.Errorf("the log doesn't say %s", want)
			}
		}
	})
}

// gate holds up the agent's statements and says how many pools it has stopped at once.
type gate struct {
	mu      sync.Mutex
	inside  int
	most    int
	entered chan struct{}
	open    chan struct{}
}

func newGate() *gate { return &gate{entered: make(chan struct{}, 100), open: make(chan struct{})} }

func (g *gate) pass() {
	g.mu.Lock()
	g.inside++
	g.most = max(g.most, g.inside)
	g.mu.Unlock()
	g.entered <- struct{}{}
	<-g.open
	g.mu.Lock()
	g.inside--
	g.mu.Unlock()
}

// await waits until one more statement is held up.
func (g *gate) await(t testing.TB) {
	t.Helper()
	select {
	case <-g.entered:
	case <-time.After(30 * time.Second):
		t.Fatal("nothing came to the gate")
	}
}

// A sweep that takes longer than its schedule is the only one of its pool: the
// ticks that it misses are skipped.
func TestDaemonNeverSweepsAPoolTwiceAtOnce(t *testing.T) {
	t.Parallel()
	a := newSQLiteApp(t)
	a.library(2)
	g := newGate()
	d := newDaemon(t, yamlOf("", map[string]*app{"p": a}), onStatement(func(sql string) {
		if strings.Contains(sql, "CREATE TABLE IF NOT EXISTS") { // once a sweep, of the first one
			g.pass()
		}
	}))
	d.start()
	d.clock.await(t, 1)
	d.clock.advance(time.Second)
	g.await(t)
	for range 5 {
		d.clock.advance(time.Second)
	}
	if g.most != 1 || len(g.entered) != 0 {
		t.Errorf("%d sweeps at once", g.most)
	}
	close(g.open)
	d.clock.await(t, 1)
	if n := strings.Count(d.log.String(), `"message":"swept"`); n != 1 {
		t.Errorf("%d sweeps, want the one", n)
	}
	d.tick(1)
	a.wantBlobs("b1")
}

// No more pools are swept at once than is configured, and so many are.
func TestDaemonLimitsSweepsAcrossPools(t *testing.T) {
	t.Parallel()
	for limit := 1; limit <= 2; limit++ {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			t.Parallel()
			apps := map[string]*app{"one": newSQLiteApp(t), "two": newSQLiteApp(t), "three": newSQLiteApp(t)}
			for _, a := range apps {
				a.library(2)
			}
			g := newGate()
			d := newDaemon(t, yamlOf(fmt.Sprintf("max_concurrent_sweeps: %d\n", limit), apps), onStatement(func(sql string) {
				if strings.Contains(sql, "CREATE TABLE IF NOT EXISTS") {
					g.pass()
				}
			}))
			d.start()
			d.clock.await(t, 3)
			d.clock.advance(time.Second)
			for range limit {
				g.await(t)
			}
			// That nobody comes takes a while to see. It can't fail for being too short.
			select {
			case <-g.entered:
				t.Error("more pools are swept than may be")
			case <-time.After(200 * time.Millisecond):
			}
			close(g.open)
			d.clock.await(t, 3)
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.most != limit {
				t.Errorf("%d sweeps at once, want %d", g.most, limit)
			}
			for _, a := range apps {
				a.wantWindow("b2")
			}
		})
	}
}

// The first signal lets the batch at hand finish, and no other begins.
func TestDaemonStopsAfterTheBatch(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(5)
		g := newGate()
		d := newDaemon(t, yamlOf("", map[string]*app{"p": a}), onStatement(func(sql string) {
			if containsAll(sql, stmtTake, `"blobs"`) {
				g.pass()
			}
		}))
		d.start()
		d.clock.await(t, 1)
		d.tick(1)
		d.clock.advance(time.Second)
		g.await(t)
		d.stop()
		close(g.open)
		d.end()
		if n := len(a.window()); n != 3 {
			t.Errorf("%d keys wait, want 3: the batch of one was at hand", n)
		}
		if n := a.number(`SELECT count(*) FROM blobs`); n != 4 {
			t.Errorf("%d blobs are left, want 4", n)
		}
	})
}

// The second signal cuts the batch, which loses nothing.
func TestDaemonIsCut(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(5)
		g := newGate()
		d := newDaemon(t, yamlOf("", map[string]*app{"p": a}), onStatement(func(sql string) {
			if containsAll(sql, stmtTake, `"blobs"`) {
				g.pass()
			}
		}))
		d.start()
		d.clock.await(t, 1)
		d.tick(1)
		d.clock.advance(time.Second)
		g.await(t)
		d.stop()
		d.cancel()
		close(g.open)
		d.end()
		a.wantBlobs(names(1, 5)...)
		a.wantWindow(names(2, 5)...)
	})
}

// A daemon ends while it waits: for its tick, for a slot, for a database.
func TestDaemonStopsWhileItWaits(t *testing.T) {
	t.Parallel()
	t.Run("for its tick", func(t *testing.T) {
		t.Parallel()
		a := newSQLiteApp(t)
		a.library(2)
		d := newDaemon(t, yamlOf("", map[string]*app{"p": a}), agent.Options{})
		d.start()
		d.clock.await(t, 1)
		d.stop()
		d.end()
	})
	t.Run("for a database", func(t *testing.T) {
		t.Parallel()
		a := newSQLiteApp(t)
		a.url += ".missing"
		d := newDaemon(t, yamlOf("", map[string]*app{"p": a}), agent.Options{})
		d.start()
		d.clock.await(t, 1)
		d.stop()
		d.end()
	})
	t.Run("until its time is over", func(t *testing.T) {
		t.Parallel()
		a := newSQLiteApp(t)
		a.library(2)
		d := newDaemon(t, yamlOf("", map[string]*app{"p": a}), agent.Options{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := d.agent.Run(ctx, nil); err != nil {
			t.Errorf("run: %v", err)
		}
	})
}

// A database that is down at the start is tried again, ever less often, and its
// pool swept once it is there.
func TestDaemonWaitsForADatabase(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	proxy, through := newProxy(t, a.url)
	behind := *a
	behind.url = through
	d := newDaemon(t, yamlOf("", map[string]*app{"p": &behind}), agent.Options{})
	d.start()
	for wait := time.Second; wait <= 8*time.Second; wait *= 2 {
		d.clock.await(t, 1)
		d.clock.advance(wait - time.Millisecond)
		d.clock.await(t, 1)
		d.clock.advance(time.Millisecond)
	}
	d.clock.await(t, 1)
	if n := strings.Count(d.log.String(), "can't be looked at yet"); n != 5 {
		t.Errorf("%d tries, want 5", n)
	}
	proxy.start()
	d.clock.advance(16 * time.Second)
	d.clock.await(t, 1)
	d.tick(1)
	a.wantWindow("b2", "b3")
	d.tick(1)
	a.wantBlobs("b1")
	if strings.Contains(d.log.String(), "gc_test_") && strings.Contains(d.log.String(), "postgres://") {
		t.Error("the log holds the database's url")
	}
}

// One database goes away and comes back while the daemon runs.
func TestDaemonOutlivesAnOutage(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	proxy, through := newProxy(t, a.url)
	behind := *a
	behind.url = through
	proxy.start()
	d := newDaemon(t, yamlOf("", map[string]*app{"p": &behind}), agent.Options{})
	d.start()
	d.clock.await(t, 1)
	d.tick(1)
	proxy.stop()
	d.tick(1)
	d.tick(1)
	a.wantBlobs(names(1, 3)...)
	proxy.start()
	d.tick(1)
	a.wantBlobs("b1")
	if n := strings.Count(d.log.String(), "sweep failed; the next tick tries again"); n != 2 {
		t.Errorf("%d failed sweeps, want 2", n)
	}
}

// A pool that panics, is misconfigured or fails leaves the others running, and is
// tried again at each tick.
func TestDaemonOutlivesABadPool(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spoil, mend func(a *app)
		panics      string // at statements that contain it
		says        string
	}{
		"panics at the first look": {panics: "BEGIN", says: "out of order"},
		"panics in a sweep":        {panics: "CREATE TABLE IF NOT EXISTS", says: "out of order"},
		"no table of blobs": {
			spoil: func(a *app) { a.exec(`ALTER TABLE blobs RENAME TO away`) },
			mend:  func(a *app) { a.exec(`ALTER TABLE away RENAME TO blobs`) }, says: "there is no table blobs",
		},
		"no source": {
			spoil: func(a *app) { a.exec(`ALTER TABLE refs RENAME TO away`) },
			mend:  func(a *app) { a.exec(`ALTER TABLE away RENAME TO refs`) }, says: "protect_failed",
		},
		"a fault": {
			spoil: func(a *app) { a.exec(`CREATE TABLE gc_window (other text)`) },
			mend:  func(a *app) { a.exec(`DROP TABLE gc_window`) }, says: "sweep failed; the next tick tries again",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bad, good := newSQLiteApp(t), newPostgresApp(t)
			bad.library(3)
			good.library(3)
			if c.spoil != nil {
				c.spoil(bad)
			}
			var mu sync.Mutex
			spoilt := true
			d := newDaemon(t, yamlOf("", map[string]*app{"bad": bad, "good": good}), agent.Options{SQLiteTracer: sqliteHook(func(sql string) {
				mu.Lock()
				defer mu.Unlock()
				if c.panics != "" && spoilt && strings.Contains(sql, c.panics) {
					panic(errors.New("out of order"))
				}
			})})
			d.start()
			d.clock.await(t, 2)
			d.tick(2)
			d.tick(2)
			good.wantBlobs("b1")
			bad.wantBlobsSomewhere(names(1, 3))
			if !strings.Contains(d.log.String(), c.says) {
				t.Errorf("the log doesn't say %q", c.says)
			}
			if strings.Contains(d.log.String(), "goroutine ") {
				t.Error("the log holds a stack trace")
			}
			mu.Lock()
			spoilt = false
			mu.Unlock()
			if c.mend != nil {
				c.mend(bad)
			}
			// A look that failed is repeated after some seconds.
			for range 10 {
				d.tick(2)
			}
			bad.wantBlobs("b1")
			d.stop()
			d.end()
		})
	}
}

// wantBlobsSomewhere is wantBlobs for a table that may have been renamed.
func (a *app) wantBlobsSomewhere(want []string) {
	a.t.Helper()
	table := "blobs"
	if a.number(`SELECT count(*) FROM sqlite_master WHERE name = 'blobs'`) == 0 {
		table = "away"
	}
	wantColumn(a.t, a, `SELECT id FROM `+table, want...)
}

// Two daemons of one pool take turns: who comes second says so and sweeps at the
// next tick.
func TestTwoDaemons(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(3)
	yaml := yamlOf("", map[string]*app{"p": a})
	g := newGate()
	first := newDaemon(t, yaml, agent.Options{PostgresTracer: postgresHook(func(_ *pgx.Conn, data pgx.TraceQueryStartData) {
		if strings.Contains(data.SQL, "CREATE TEMPORARY TABLE") {
			g.pass()
		}
	})})
	second := newDaemon(t, yaml, agent.Options{})
	first.start()
	second.start()
	first.clock.await(t, 1)
	second.clock.await(t, 1)
	first.clock.advance(time.Second)
	g.await(t)
	second.tick(1)
	if !strings.Contains(second.log.String(), string(agent.CauseSweeperLock)) {
		t.Error("the second swept beside the first")
	}
	close(g.open)
	first.clock.await(t, 1)
	second.tick(1)
	a.wantBlobs("b1")
}
