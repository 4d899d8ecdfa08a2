package agent_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/memory"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/rs/zerolog"
)

// socketed puts a control socket into a configuration. Nobody has to serve it.
func socketed(yaml string) string { return "admin: {socket: /nowhere/admin.sock}\n" + yaml }

// socketedPool makes a pool whose pins are in memory, and its agent.
func (a *app) socketedPool(p poolYAML, opts agent.Options) (*agent.Agent, *agent.Pool) {
	a.t.Helper()
	p.databases = map[string]string{"app": a.url}
	opts.Log = zerolog.New(zerolog.NewTestWriter(a.t)).Level(zerolog.InfoLevel)
	ag := agentOf(a.t, socketed(p.String()), opts)
	return ag, ag.Pools()[0]
}

// startedPool is one whose daemon started long ago.
func (a *app) startedPool(p poolYAML, opts agent.Options) (*agent.Pool, *stepClock) {
	a.t.Helper()
	clock := newStepClock()
	opts.Clock = clock
	ag, pool := a.socketedPool(p, opts)
	pool.IgnoreClockJumps() // the real one goes on while the daemon's stands still
	ag.StartPins(a.t.Context())
	clock.pass(time.Minute)
	return pool, clock
}

// pass lets the clock go on.
func (c *stepClock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func pinKeys(t *testing.T, p *agent.Pool, owner fleet.Owner, ttl time.Duration, keys ...blob.Key) []bool {
	t.Helper()
	there, err := p.Pin(t.Context(), keys, owner, ttl)
	if err != nil {
		t.Fatal(err)
	}
	return there
}

// What is pinned in memory is no candidate, and, once it is staged, goes back into
// the window until the pin has run out. A dry run says the same.
func TestPinsInProcess(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(6)
		p, clock := a.startedPool(poolYAML{liveness: a.refs()}, agent.Options{})
		if got := pinKeys(t, p, "me", time.Minute, "b2", "b9", "b1"); !slices.Equal(got, []bool{true, false, true}) {
			t.Errorf("there: %v", got)
		}
		dry := sweepWith(t, p, agent.SweepOptions{DryRun: true})
		rep := sweep(t, p)
		if dry.CandidatesStaged != 4 || rep.CandidatesStaged != 4 {
			t.Errorf("staged %d, predicted %d, want 4", rep.CandidatesStaged, dry.CandidatesStaged)
		}
		a.wantWindow(names(3, 6)...)

		pinKeys(t, p, "me", time.Minute, "b3")
		pinKeys(t, p, "you", 20*time.Second, "b3", "b4")
		dry = sweepWith(t, p, agent.SweepOptions{DryRun: true})
		d := decided{}
		rep = sweepWith(t, p, d.options())
		d.want(t, map[string][]string{"pinned": {"b3", "b4"}, "deleted": {"b5", "b6"}})
		if dry.Overdue != 4 || dry.Deleted != 2 || dry.CancelledBy != rep.CancelledBy {
			t.Errorf("predicted %+v\nbut did %+v", dry, rep)
		}
		if left := a.deadline("b3") - a.deadline("b4"); time.Duration(left).Round(time.Second) != 40*time.Second {
			t.Errorf("b3 is due %s after b4", time.Duration(left))
		}
		removed, err := p.Unpin(t.Context(), []blob.Key{"b3", "b6"}, "me")
		if err != nil || !slices.Equal(removed, []bool{true, false}) {
			t.Errorf("removed %v, err = %v", removed, err)
		}
		a.age(time.Hour)
		d = decided{}
		sweepWith(t, p, d.options())
		d.want(t, map[string][]string{"pinned": {"b3", "b4"}})
		clock.pass(20 * time.Second)
		a.age(time.Hour)
		sweep(t, p)
		a.wantBlobs("b1", "b2")
		if rows, err := p.Pins(t.Context(), fleet.PinFilter{Limit: 10}); err != nil || len(rows) != 3 {
			t.Errorf("pins %v, err = %v", rows, err)
		}
		clock.pass(time.Minute)
		sweep(t, p)
		sweep(t, p)
		a.wantBlobs("b1")
	})
}

// Whoever pins a key while a batch that deletes it is under way isn't answered
// before the batch has ended, and then hears what it did.
func TestPinBetweenCheckAndDelete(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		var p *agent.Pool
		during := before(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if there, err := p.Pin(ctx, []blob.Key{"b2"}, "me", time.Minute); !errors.Is(err, agent.ErrPinBusy) {
				t.Errorf("while b2 is being deleted it is pinned: there %v, err = %v", there, err)
			}
			if got := pinKeys(t, p, "me", time.Minute, "b9"); got[0] {
				t.Error("b9 is there")
			}
		}, "DELETE FROM", "blobs", "RETURNING")
		p, _ = a.startedPool(poolYAML{liveness: a.refs()}, during.options())
		sweep(t, p)
		during.armed = true
		if rep := sweep(t, p); rep.Deleted != 2 || !during.done {
			t.Errorf("done: %t, %+v", during.done, rep)
		}
		if got := pinKeys(t, p, "me", time.Minute, "b1", "b2"); !slices.Equal(got, []bool{true, false}) {
			t.Errorf("there: %v", got)
		}
	})
}

// Once a batch was rolled back its keys can be pinned.
func TestPinAfterABatchWasCutOff(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(2)
		ctx, cancel := context.WithCancel(t.Context())
		during := before(cancel, "DELETE FROM", "blobs", "RETURNING")
		p, _ := a.startedPool(poolYAML{liveness: a.refs()}, during.options())
		sweep(t, p)
		during.armed = true
		if _, err := p.Sweep(ctx, agent.SweepOptions{}); err == nil {
			t.Fatal("it wasn't cut off")
		}
		if got := pinKeys(t, p, "me", time.Minute, "b2"); !got[0] {
			t.Error("b2 isn't there")
		}
		if rep := sweep(t, p); rep.CancelledBy.Pinned != 1 {
			t.Errorf("%+v", rep)
		}
	})
}

// For as long as pins may live that the process before this one gave, nothing is
// deleted; it is marked and staged, and said until when.
func TestNothingIsDeletedAfterARestart(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(4)
		y := poolYAML{liveness: a.refs(), extra: "pins: {ttl: 10m}"}
		clock := newStepClock()
		ag, p := a.socketedPool(y, agent.Options{Clock: clock})
		p.IgnoreClockJumps() // the real one goes on while this one stands still
		ag.StartPins(t.Context())
		if rep := sweep(t, p); rep.HeldUp() || rep.CandidatesStaged != 3 {
			t.Errorf("with nothing due: %+v", rep)
		}
		for _, dry := range []bool{true, false} {
			rep := sweepWith(t, p, agent.SweepOptions{DryRun: dry})
			if !rep.HeldUp() || rep.Overdue != 0 || !strings.Contains(rep.Detail, "10m0s") || !strings.Contains(rep.Detail, clock.Now().UTC().Format("2006-01-02T")) {
				t.Errorf("dry run %t: %+v", dry, rep)
			}
		}
		ag.StartPins(t.Context()) // once only
		clock.pass(10*time.Minute - time.Millisecond)
		if rep := sweep(t, p); !rep.HeldUp() {
			t.Errorf("a millisecond early: %+v", rep)
		}
		clock.pass(time.Millisecond)
		if rep := sweep(t, p); rep.HeldUp() || rep.Deleted != 3 {
			t.Errorf("%+v", rep)
		}
		a.wantBlobs("b1")
	})
}

// A process that isn't the daemon knows no pins, and deletes nothing.
func TestOneShotSweepDeletesNothing(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(4)
		_, p := a.socketedPool(poolYAML{liveness: a.refs()}, agent.Options{})
		sweep(t, p)
		rep := sweep(t, p)
		if !rep.HeldUp() || !strings.Contains(rep.Detail, "/nowhere/admin.sock") || !strings.Contains(rep.Detail, "gc-agent run") {
			t.Errorf("%+v", rep)
		}
		if _, err := p.Pin(t.Context(), []blob.Key{"b1"}, "me", time.Second); !errors.Is(err, agent.ErrPinsElsewhere) {
			t.Errorf("err = %v", err)
		}
		// Where no pin in memory can exist, nothing changes.
		if rep := sweep(t, a.pool(poolYAML{liveness: a.refs()})); rep.Deleted != 3 {
			t.Errorf("%+v", rep)
		}
		// Observing deletes nothing anyway, and says what it would.
		a.exec(`INSERT INTO blobs VALUES ('b7', 1)`)
		sweep(t, a.pool(poolYAML{liveness: a.refs()}))
		_, p = a.socketedPool(poolYAML{liveness: a.refs(), mode: "observe"}, agent.Options{})
		if rep := sweep(t, p); rep.HeldUp() || rep.Deleted != 1 {
			t.Errorf("%+v", rep)
		}
	})
}

// The daemon counts from its start.
func TestDaemonHoldsUpAfterItsStart(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		d := newDaemon(t, yamlOf("admin: {socket: /nowhere/admin.sock}\n", map[string]*app{"p": a}), agent.Options{})
		d.start()
		d.clock.await(t, 1)
		for range 3 {
			d.tick(1)
		}
		a.wantBlobs(names(1, 3)...)
		if !strings.Contains(d.log.String(), "pins from before the daemon's start may be live until") {
			t.Error("it isn't said why")
		}
		d.clock.advance(time.Minute)
		for range 3 {
			d.clock.await(t, 1)
			d.clock.advance(time.Second)
		}
		d.clock.await(t, 1)
		a.wantBlobs("b1")
		d.stop()
		d.end()
	})
}

// The pins of owners that are alive are renewed in memory as they are in a
// database, and aren't when the daemon stops: they end with it.
func TestPinsInProcessAreRenewed(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		d := newDaemon(t, fmt.Sprintf(`
admin: {socket: /nowhere/admin.sock}
databases: {app: {url: %q}}
pools:
  - {name: p, database: app, mode: enforce, schedule: "0 0 1 1 *", pins: {ttl: 600s, owners: [{name: me, alive: {always: true}}]},
     blobs: [{type: table, table: blobs, column: id}], liveness: [{name: refs, table: refs, column: blob, guard: %s}]}
`, a.url, a.settle()), agent.Options{})
		d.start()
		d.clock.await(t, 2)
		if _, err := d.pool().ParseKey(t.Context(), "b1"); err != nil { // the kind of the keys is known from now on
			t.Fatal(err)
		}
		pinKeys(t, d.pool(), "me", 250*time.Second, "b1")
		pinKeys(t, d.pool(), "me", 150*time.Second, "b2")
		pinKeys(t, d.pool(), "you", 600*time.Second, "b3")
		d.turn(200*time.Second, 2)
		var left []string
		rows, err := d.pool().Pins(t.Context(), fleet.PinFilter{Limit: 10})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rows {
			left = append(left, fmt.Sprint(string(r.Key), " ", r.Owner, " ", r.Left))
		}
		// That of b2 was to end before it could be renewed.
		if got, want := strings.Join(left, ", "), "b1 me 10m0s, b3 you 6m40s"; got != want {
			t.Errorf("pins: %s; want %s", got, want)
		}
		if got, want := d.pool().PinCounts(), (agent.PinCounts{Renewed: 1}); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		d.stop()
		d.end()
		if strings.Contains(d.log.String(), "for the time of an upgrade") {
			t.Error("pins were renewed at the stop")
		}
	})
}

// What applications write into the table of pins is honoured beside pins in
// memory, and pins of a fleet go there.
func TestPinsInTheDatabase(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(5)
	p, _ := a.startedPool(poolYAML{liveness: a.refs()}, agent.Options{})
	sweep(t, p)
	if !p.PinsInProcess() {
		t.Error("its pins aren't in memory")
	}
	_, inTable := a.socketedPool(poolYAML{liveness: a.refs(), extra: "fleet: true"}, agent.Options{})
	if _, err := inTable.Pin(t.Context(), nil, "me", time.Minute); err == nil || !strings.Contains(err.Error(), "schema ensure") {
		t.Errorf("before there are functions: err = %v", err)
	}
	if err := inTable.EnsureSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := pinKeys(t, inTable, "me", 2*time.Minute, "b2", "b9"); !slices.Equal(got, []bool{true, false}) {
		t.Errorf("there: %v", got)
	}
	pinKeys(t, p, "me", time.Minute, "b3")
	d := decided{}
	sweepWith(t, p, d.options())
	d.want(t, map[string][]string{"pinned": {"b2", "b3"}, "deleted": {"b4", "b5"}})

	renewed, lost, err := inTable.RenewPins(t.Context(), "me", time.Hour)
	if err != nil || renewed != 2 || lost != 0 {
		t.Errorf("renewed %d, lost %d, err = %v", renewed, lost, err)
	}
	rows, err := inTable.Pins(t.Context(), fleet.PinFilter{Limit: 10})
	if err != nil || len(rows) != 2 || rows[0].Key != "b2" || rows[0].Left < 59*time.Minute {
		t.Errorf("pins %v, err = %v", rows, err)
	}
	if removed, err := inTable.Unpin(t.Context(), []blob.Key{"b9", "b2"}, "me"); err != nil || !slices.Equal(removed, []bool{true, true}) {
		t.Errorf("removed %v, err = %v", removed, err)
	}
	for _, ttl := range []time.Duration{0, 25 * time.Hour} {
		if _, err := inTable.Pin(t.Context(), []blob.Key{"b2"}, "me", ttl); !errors.Is(err, agent.ErrBadPin) {
			t.Errorf("for %s: err = %v", ttl, err)
		}
	}
}

// A look waits for a delete whose session the agent has lost.
func TestPinLooksBehindALostSession(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(2)
	p, _ := a.startedPool(poolYAML{liveness: a.refs()}, agent.Options{})
	if err := p.ResolveKind(t.Context()); err != nil {
		t.Fatal(err)
	}
	lost, err := pgtest.Connect(t, a.url).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if locked, err := fleet.LockKeys(t.Context(), lost, "gc_agent", []blob.Key{"b2"}); err != nil || !locked[0] {
		t.Fatalf("locked %v, err = %v", locked, err)
	}
	pgtest.Exec(t, lost, `DELETE FROM blobs WHERE id = 'b2'`)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if there, err := p.Pin(ctx, []blob.Key{"b2"}, "me", time.Minute); !errors.Is(err, agent.ErrPinBusy) {
		t.Errorf("there %v, err = %v", there, err)
	}
	if err := lost.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := pinKeys(t, p, "me", time.Minute, "b2"); got[0] {
		t.Error("b2 is there")
	}
}

// Pins in memory hold for a pool that works inline.
func TestPinsInProcessInline(t *testing.T) {
	t.Parallel()
	a := newSQLiteApp(t)
	a.exec(`CREATE TABLE refs (blob text)`, `INSERT INTO refs VALUES ('b1')`)
	y := poolYAML{
		window: "2s", databases: map[string]string{"app": "sqlite:/nowhere/app.db", "shop": a.url},
		liveness: []string{"{name: refs, database: shop, table: refs, column: blob, guard: settle}"},
	}
	cfg, err := config.Parse("test.yaml", []byte(socketed(y.String())), config.OSEnv())
	if err != nil {
		t.Fatal(err)
	}
	poolCfg, _ := cfg.Pool("p")
	tier, clock := memory.New("shop", blob.KindText), newStepClock()
	for _, key := range names(1, 5) {
		tier.Put(blob.Key(key), 1)
	}
	ag, err := agent.NewInline(cfg, poolCfg, tier, agent.Options{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ag.Close(); err != nil {
			t.Error(err)
		}
	})
	ag.StartPins(t.Context())
	p := ag.Pools()[0]
	sweepHeld := sweep(t, p)
	if !sweepHeld.HeldUp() || sweepHeld.Deleted != 0 {
		t.Errorf("after the start: %+v", sweepHeld)
	}
	clock.pass(time.Minute)
	pinKeys(t, p, "me", time.Minute, "b2")
	clock.slept = 0
	clock.onSleep = func(slept time.Duration) {
		if slept == time.Second {
			if got := pinKeys(t, p, "me", time.Minute, "b3", "b9"); !slices.Equal(got, []bool{true, false}) {
				t.Errorf("there: %v", got)
			}
		}
	}
	d := decided{}
	rep := sweepWith(t, p, d.options())
	d.want(t, map[string][]string{"pinned": {"b3"}, "deleted": {"b4", "b5"}})
	if rep.CandidatesStaged != 3 {
		t.Errorf("%+v", rep)
	}
}

// A pool without a place for pins says what gives it one.
func TestNoPlaceForPins(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(1)
		p := a.pool(poolYAML{liveness: a.refs()})
		for what, err := range map[string]error{
			"pin":   second(p.Pin(t.Context(), nil, "me", time.Second)),
			"unpin": second(p.Unpin(t.Context(), nil, "me")),
			"list":  second(p.Pins(t.Context(), fleet.PinFilter{})),
		} {
			if !errors.Is(err, agent.ErrNoPins) || !strings.Contains(fmt.Sprint(err), "admin.socket") {
				t.Errorf("%s: err = %v", what, err)
			}
		}
	})
}

func second[T any](_ T, err error) error { return err }
