package agent_test

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// loseMark takes the mark of pins in memory from whoever has it.
func (a *app) loseMark() {
	a.t.Helper()
	if path, onSQLite := strings.CutPrefix(a.url, "sqlite:"); onSQLite {
		if err := os.Remove(path + ".gc-agent.pins"); err != nil {
			a.t.Fatal(err)
		}
		return
	}
	conn := pgtest.Connect(a.t, a.url)
	who, err := fleet.PinMarkHolders(a.t.Context(), conn, "gc_agent")
	if err != nil || !strings.Contains(who, "gc-agent") {
		a.t.Fatalf("the mark is held by %q, err = %v", who, err)
	}
	pid := strings.Fields(who)[1]
	pgtest.Exec(a.t, conn, `SELECT pg_terminate_backend(`+pid+`, 10000)`)
}

// What one daemon has pinned in its memory no other agent deletes, whatever its
// configuration; it marks and stages, and says who has the pins. A second daemon
// gives no pins.
func TestPinsOfAnotherDaemon(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		y := poolYAML{liveness: a.refs()}
		keeper, _ := a.startedPool(y, agent.Options{})
		sweep(t, keeper)
		a.age(time.Hour)
		pinKeys(t, keeper, "me", time.Minute, "b2")

		second, secondClock := a.startedPool(y, agent.Options{})
		if _, err := second.Pin(t.Context(), []blob.Key{"b3"}, "you", time.Minute); !errors.Is(err, agent.ErrNotKeeper) {
			t.Errorf("a second daemon pins: err = %v", err)
		}
		_, oneShot := a.socketedPool(y, agent.Options{})
		others := map[string]*agent.Pool{"second": second, "one shot": oneShot, "no socket": a.pool(y)}
		if !strings.HasPrefix(a.url, "sqlite:") {
			_, others["fleet"] = a.socketedPool(poolYAML{liveness: a.refs(), extra: "fleet: true"}, agent.Options{})
		}
		for name, p := range others {
			for _, dry := range []bool{true, false} {
				rep := sweepWith(t, p, agent.SweepOptions{DryRun: dry})
				if !rep.HeldUp() || rep.Overdue != 0 || !strings.Contains(rep.Detail, "pid ") || !strings.Contains(rep.Detail, "pins") {
					t.Errorf("%s, dry run %t: %+v", name, dry, rep)
				}
			}
		}
		a.exec(`INSERT INTO blobs VALUES ('b7', 1)`)
		if rep := sweep(t, others["no socket"]); rep.CandidatesStaged != 1 || !rep.HeldUp() {
			t.Errorf("it doesn't stage: %+v", rep)
		}
		d := decided{}
		sweepWith(t, keeper, d.options())
		d.want(t, map[string][]string{"pinned": {"b2"}, "deleted": {"b3", "b7"}})

		keeper.ReleasePins()
		if got := pinKeys(t, second, "you", time.Minute, "b2"); !got[0] {
			t.Error("b2 isn't there")
		}
		a.age(time.Hour)
		if rep := sweep(t, second); !rep.HeldUp() {
			t.Errorf("it doesn't wait for the first one's pins: %+v", rep)
		}
		secondClock.pass(time.Minute)
		if rep := sweep(t, second); rep.HeldUp() || rep.Deleted != 1 {
			t.Errorf("%+v", rep)
		}
	})
}

// For as long as somebody sweeps who knows of no pins, no daemon gives any.
func TestNoPinDuringAnothersSweep(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		y := poolYAML{liveness: a.refs()}
		var daemon *agent.Pool
		during := before(func() {
			daemon, _ = a.startedPool(y, agent.Options{})
			if _, err := daemon.Pin(t.Context(), []blob.Key{"b2"}, "me", time.Minute); !errors.Is(err, agent.ErrNotKeeper) {
				t.Errorf("while b2 is being deleted: err = %v", err)
			}
		}, "DELETE FROM", "blobs", "RETURNING")
		p := a.poolWith(y, during.options())
		sweep(t, p)
		during.armed = true
		if rep := sweep(t, p); rep.Deleted != 2 || !during.done {
			t.Errorf("done: %t, %+v", during.done, rep)
		}
		if got := pinKeys(t, daemon, "me", time.Minute, "b2"); got[0] {
			t.Error("b2 is there")
		}
	})
}

// A daemon that has lost its mark begins anew, as after a start: the pins that it
// gave have ended, which renewing them tells, and for pins.ttl nothing is deleted.
func TestLostPinMark(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(3)
		p, clock := a.startedPool(poolYAML{liveness: a.refs()}, agent.Options{})
		sweep(t, p)
		pinKeys(t, p, "me", time.Minute, "b2")
		a.loseMark()
		renewed, lost, err := p.RenewPins(t.Context(), "me", time.Minute)
		if err != nil || renewed != 0 || lost != 1 {
			t.Errorf("renewed %d, lost %d, err = %v", renewed, lost, err)
		}
		rep := sweep(t, p)
		if !rep.HeldUp() || !strings.Contains(rep.Detail, "took back the mark") {
			t.Errorf("%+v", rep)
		}
		pinKeys(t, p, "me", time.Minute, "b3")
		clock.pass(time.Minute - time.Second)
		if rep := sweep(t, p); !rep.HeldUp() {
			t.Errorf("a second early: %+v", rep)
		}
		clock.pass(time.Second)
		if rep := sweep(t, p); rep.HeldUp() || rep.Deleted != 2 {
			t.Errorf("%+v", rep)
		}
	})
}

// A batch whose daemon loses the mark meanwhile is rolled back.
func TestPinMarkLostWithinABatch(t *testing.T) {
	eachEngine(t, func(_ *testing.T, a *app) { a.loseMarkWithinABatch(agent.Omit{}) })
}

// But for the second look it would be committed.
func TestPinMarkLostUnseen(t *testing.T) {
	eachEngine(t, func(_ *testing.T, a *app) { a.loseMarkWithinABatch(agent.Omit{Keeper: true}) })
}

func (a *app) loseMarkWithinABatch(without agent.Omit) {
	a.t.Helper()
	a.library(3)
	during := before(a.loseMark, "DELETE FROM", "gc_window")
	p, _ := a.startedPool(poolYAML{liveness: a.refs()}, during.options())
	p.Omit(without)
	sweep(a.t, p)
	during.armed = true
	rep := sweep(a.t, p)
	if want := !without.Keeper; rep.HeldUp() != want || (rep.Deleted == 0) != want || !during.done {
		a.t.Errorf("done: %t, %+v", during.done, rep)
	}
}

// Another daemon has pinned a blob in its memory.
func pinnedByAnotherDaemon(t *testing.T, without agent.Omit) bool {
	a := newPostgresApp(t)
	a.library(2)
	y := poolYAML{liveness: a.refs()}
	keeper, _ := a.startedPool(y, agent.Options{})
	p := a.pool(y)
	p.Omit(without)
	sweep(t, p)
	told := pinKeys(t, keeper, "me", time.Minute, "b2")[0]
	sweep(t, p)
	return told && a.number(`SELECT count(*) FROM blobs WHERE id = 'b2'`) == 0
}
