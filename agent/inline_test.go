package agent_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/memory"

	"github.com/google/go-cmp/cmp"
	"github.com/rs/zerolog"
	"pgregory.net/rapid"
)

// shop is an application whose blobs stand in memory, as an outside store would,
// and whose references are rows of a database.
type shop struct {
	*app
	tier  *memory.Tier
	clock *stepClock
	pool  *agent.Pool
}

// newShop makes a shop whose store the agent sees through wrap, nil for as it is.
func newShop(a *app, window string, opts agent.Options, wrap func(agent.StoreTier) agent.StoreTier) *shop {
	a.t.Helper()
	a.exec(`CREATE TABLE refs (blob text)`, `CREATE INDEX refs_blob ON refs (blob)`)
	// The store takes the place of the file's tier, whose database nobody opens.
	y := poolYAML{
		window: window, databases: map[string]string{"app": "sqlite:/nowhere/app.db", "shop": a.url}, extra: "limits: {batch: 3, page: 2}",
		liveness: []string{"{name: refs, database: shop, table: refs, column: blob, allow_empty: true, guard: settle}"},
	}
	s := &shop{app: a, tier: memory.New("shop", blob.KindText), clock: newStepClock()}
	s.pool = inlinePool(a.t, y, s, opts, wrap)
	return s
}

func inlinePool(t testing.TB, y poolYAML, s *shop, opts agent.Options, wrap func(agent.StoreTier) agent.StoreTier) *agent.Pool {
	t.Helper()
	cfg, err := config.Parse("test.yaml", []byte(y.String()), config.OSEnv())
	if err != nil {
		t.Fatalf("%v\n%s", err, y)
	}
	pool, _ := cfg.Pool("p")
	opts.Log = zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)
	opts.Clock = s.clock
	var tier agent.StoreTier = s.tier
	if wrap != nil {
		tier = wrap(tier)
	}
	ag, err := agent.NewInline(cfg, pool, tier, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ag.Close(); err != nil {
			t.Error(err)
		}
	})
	p, _ := ag.Pool("p")
	return p
}

func (s *shop) put(keys ...string) {
	for _, key := range keys {
		s.tier.Put(blob.Key(key), 10)
	}
}

// blobs returns the keys in the store.
func (s *shop) blobs() []string {
	s.t.Helper()
	page, err := s.tier.List(s.t.Context(), "", 1000)
	if err != nil {
		s.t.Fatal(err)
	}
	keys := []string{}
	for _, o := range page.Objects {
		keys = append(keys, string(o.Key))
	}
	return keys
}

func (s *shop) wantBlobs(want ...string) {
	s.t.Helper()
	if got := s.blobs(); !slices.Equal(got, want) {
		s.t.Errorf("blobs\n got %v\nwant %v", got, want)
	}
}

// An inline sweep stages, waits for its window and executes.
func TestInlineSweep(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		s := newShop(a, "30s", agent.Options{}, nil)
		s.put(names(1, 8)...)
		s.tier.Put(blob.Key("not\x00text"), 10)
		s.exec(`INSERT INTO refs VALUES ('b1'), ('b2')`)
		s.clock.onSleep = func(slept time.Duration) {
			if slept == 29*time.Second {
				s.wantBlobs(names(1, 8)...)
				s.exec(`INSERT INTO refs VALUES ('b3')`)
			}
		}
		want := agent.Report{
			Scanned: 9, Referenced: 2, Foreign: 1, CandidatesStaged: 6, Overdue: 6, Deleted: 5, BytesReclaimed: 50,
			Cancelled: 1, CancelledBy: agent.CancelledBy{Live: 1},
		}
		dry := sweepWith(t, s.pool, agent.SweepOptions{DryRun: true})
		if dry.CandidatesStaged != 6 || dry.Overdue != 6 || dry.Deleted != 6 || s.clock.slept != 0 {
			t.Errorf("dry run, %s slept: %+v", s.clock.slept, dry)
		}
		s.wantBlobs(names(1, 8)...)
		d := decided{}
		rep := sweepWith(t, s.pool, d.options())
		wantCounts(t, rep, want)
		d.want(t, map[string][]string{"live": {"b3"}, "deleted": names(4, 8)})
		if rep.Form != agent.Inline || s.clock.slept != 30*time.Second {
			t.Errorf("form %s, %s slept", rep.Form, s.clock.slept)
		}
		s.wantBlobs(names(1, 3)...)
		if s.hasWindow() {
			t.Error("an inline sweep has made a schema in a source's database")
		}
	})
}

func TestInlineAborts(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		s := newShop(a, "0s", agent.Options{}, nil)
		s.put(names(1, 4)...)
		s.exec(`ALTER TABLE refs RENAME TO away`)
		wantAbort(t, s.pool, agent.SweepOptions{}, agent.CauseProtectFailed)
		s.exec(`ALTER TABLE away RENAME TO refs`)
		// During the wait, too.
		s.wantBlobs(names(1, 4)...)
		sweep(t, s.pool)
		s.wantBlobs()
	})
}

func TestInlineSourceChangedDuringTheWindow(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		s := newShop(a, "10s", agent.Options{}, nil)
		s.put(names(1, 4)...)
		s.clock.onSleep = func(slept time.Duration) {
			if slept == 5*time.Second {
				s.exec(`ALTER TABLE refs RENAME TO away`)
			}
		}
		wantAbortInline(t, s)
		s.wantBlobs(names(1, 4)...)
	})
}

// wantAbortInline is wantAbort for a sweep that has staged in memory.
func wantAbortInline(t *testing.T, s *shop) {
	t.Helper()
	rep := sweepWith(t, s.pool, agent.SweepOptions{})
	if rep.Aborted == nil || *rep.Aborted != agent.CauseProtectFailed || rep.Deleted != 0 {
		t.Errorf("%+v", rep)
	}
}

// Two sweeps of an inline pool never meet, and a stop doesn't wait for the
// window's end.
func TestInlineLeaseAndStop(t *testing.T) {
	t.Parallel()
	s := newShop(newSQLiteApp(t), "1h", agent.Options{}, nil)
	s.put("b1")
	stop := make(chan struct{})
	s.clock.onSleep = func(slept time.Duration) {
		if slept == 3*time.Second {
			wantAbort(t, s.pool, agent.SweepOptions{}, agent.CauseSweeperLock)
			close(stop)
		}
	}
	rep := sweepWith(t, s.pool, agent.SweepOptions{Stop: stop})
	if rep.Deleted != 0 || rep.Detail == "" || s.clock.slept != 3*time.Second {
		t.Errorf("%s slept: %+v", s.clock.slept, rep)
	}
	s.wantBlobs("b1")
}

func TestInlineWindowIsBounded(t *testing.T) {
	t.Parallel()
	a := newSQLiteApp(t)
	a.library(1)
	cfg, err := config.Parse("test.yaml", []byte(poolYAML{window: "61m", databases: map[string]string{"app": a.url}, liveness: a.refs()}.String()), config.OSEnv())
	if err != nil {
		t.Fatal(err)
	}
	pool, _ := cfg.Pool("p")
	if _, err := agent.NewInline(cfg, pool, memory.New("shop", blob.KindText), agent.Options{}); err == nil || !strings.Contains(err.Error(), "window") {
		t.Errorf("err = %v", err)
	}
}

// meddler calls the application before each call that the agent makes.
type meddler struct {
	agent.StoreTier
	stat, del func()
	fail      map[blob.Key]bool
}

func (m *meddler) Stat(ctx context.Context, keys []blob.Key) ([]blob.Object, error) {
	if m.stat != nil {
		m.stat()
	}
	return m.StoreTier.Stat(ctx, keys)
}

func (m *meddler) Delete(ctx context.Context, seen []blob.Object) ([]blob.Deletion, error) {
	if m.del != nil {
		m.del()
	}
	var done []blob.Deletion
	for _, o := range seen {
		if m.fail[o.Key] {
			done = append(done, blob.Deletion{Key: o.Key, Err: fmt.Errorf("object %s can't be deleted", o.Key)})
			continue
		}
		d, err := m.StoreTier.Delete(ctx, []blob.Object{o})
		if err != nil {
			return nil, err
		}
		done = append(done, d...)
	}
	return done, nil
}

// What was written again since it was found dead is another blob, and stays; what
// is gone is done; what fails stops no other.
func TestInlineStoreChangesMeanwhile(t *testing.T) {
	t.Parallel()
	for name, at := range map[string]func(m *meddler, s *shop, fn func()){
		"in the window": func(_ *meddler, s *shop, fn func()) {
			s.clock.onSleep = func(slept time.Duration) {
				if slept == time.Second {
					fn()
				}
			}
		},
		"before the look":   func(m *meddler, _ *shop, fn func()) { m.stat = fn },
		"before the delete": func(m *meddler, _ *shop, fn func()) { m.del = fn },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &meddler{fail: map[blob.Key]bool{"b4": true}}
			s := newShop(newSQLiteApp(t), "2s", agent.Options{}, func(tier agent.StoreTier) agent.StoreTier {
				m.StoreTier = tier
				return m
			})
			s.put(names(1, 5)...)
			s.exec(`INSERT INTO refs VALUES ('b1')`)
			done := false
			at(m, s, func() {
				if done {
					return
				}
				done = true
				s.put("b2")
				if _, err := s.tier.Delete(t.Context(), mustStat(t, s.tier, "b3")); err != nil {
					t.Error(err)
				}
			})
			d := decided{}
			rep := sweepWith(t, s.pool, d.options())
			d.want(t, map[string][]string{"live": {"b2"}, "vanished": {"b3"}, "failed": {"b4"}, "deleted": {"b5"}})
			if rep.BytesReclaimed != 10 {
				t.Errorf("%+v", rep)
			}
			s.wantBlobs("b1", "b2", "b4")
		})
	}
}

func mustStat(t testing.TB, tier *memory.Tier, key blob.Key) []blob.Object {
	t.Helper()
	objects, err := tier.Stat(t.Context(), []blob.Key{key})
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// An application puts, refers and forgets, and is swept at any time: a blob that
// is referred to is never missing, and after a sweep nothing else is there but
// what was put during it.
func TestInlineProperty(t *testing.T) {
	t.Parallel()
	s := newShop(newSQLiteApp(t), "1s", agent.Options{}, nil)
	key := rapid.Map(rapid.IntRange(1, 9), func(n int) string { return fmt.Sprint("b", n) })
	rapid.Check(t, func(t *rapid.T) {
		s.exec(`DELETE FROM refs`)
		for _, k := range s.blobs() {
			if _, err := s.tier.Delete(s.t.Context(), mustStat(s.t, s.tier, blob.Key(k))); err != nil {
				t.Fatal(err)
			}
		}
		there, refs := map[string]bool{}, map[string]int{}
		put := func(k string) { s.put(k); there[k] = true }
		refer := func(k string) {
			if there[k] {
				s.exec(`INSERT INTO refs VALUES ('` + k + `')`)
				refs[k]++
			}
		}
		forget := func(k string) { s.exec(`DELETE FROM refs WHERE blob = '` + k + `'`); delete(refs, k) }
		steps := map[string]func(){
			"put":    func() { put(key.Draw(t, "key")) },
			"refer":  func() { refer(key.Draw(t, "key")) },
			"forget": func() { forget(key.Draw(t, "key")) },
			"sweep": func() {
				// In the window the application refers to some and puts others.
				saved, renewed, dropped := key.Draw(t, "saved"), key.Draw(t, "renewed"), key.Draw(t, "dropped")
				kept := map[string]bool{dropped: refs[dropped] > 0}
				kept[renewed] = true
				s.clock.onSleep = func(time.Duration) {
					s.clock.onSleep = nil
					refer(saved)
					put(renewed)
					forget(dropped)
				}
				rep, err := s.pool.Sweep(s.t.Context(), agent.SweepOptions{})
				if err != nil || rep.Aborted != nil {
					t.Fatalf("sweep: %v, %+v", err, rep)
				}
				for k := range there {
					if refs[k] == 0 && !kept[k] {
						delete(there, k)
					}
				}
			},
		}
		plan := rapid.SliceOfN(rapid.SampledFrom([]string{"put", "put", "refer", "forget", "sweep"}), 1, 12).Draw(t, "plan")
		for _, step := range append(plan, "sweep") {
			steps[step]()
			want := []string{}
			for _, k := range names(1, 9) {
				if there[k] {
					want = append(want, k)
				}
			}
			if diff := cmp.Diff(want, s.blobs()); diff != "" {
				t.Fatalf("after %s: blobs -want +got:\n%s", step, diff)
			}
		}
	})
}

// A dry run of an inline pool predicts what a sweep does that nobody disturbs.
func TestInlineDryRunPredictsTheSweep(t *testing.T) {
	t.Parallel()
	s := newShop(newSQLiteApp(t), "0s", agent.Options{}, nil)
	rapid.Check(t, func(t *rapid.T) {
		state := states().Draw(t, "state")
		for _, n := range state.Blobs {
			s.put(fmt.Sprint("b", n))
		}
		s.exec(`DELETE FROM refs`)
		for _, n := range state.Refs {
			s.exec(fmt.Sprintf(`INSERT INTO refs VALUES ('b%d')`, n))
		}
		was := s.blobs()
		dry, err := s.pool.Sweep(s.t.Context(), agent.SweepOptions{DryRun: true})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(was, s.blobs()); diff != "" {
			t.Fatalf("a dry run deleted -was +is:\n%s", diff)
		}
		rep, err := s.pool.Sweep(s.t.Context(), agent.SweepOptions{})
		if err != nil {
			t.Fatal(err)
		}
		dry.BytesReclaimed = rep.BytesReclaimed // a listing alone doesn't promise sizes
		if diff := cmp.Diff(counts(rep), counts(dry)); diff != "" {
			t.Errorf("-done +predicted:\n%s", diff)
		}
	})
}
