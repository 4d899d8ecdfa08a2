package windowtest

import (
	"cmp"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/window"
)

// model is the window as one would explain it: a map.
type model map[blob.Key]blob.Instant

func (m model) all() []window.Row {
	var out []window.Row
	for key, at := range m {
		out = append(out, window.Row{Key: key, VisibleAfter: at})
	}
	return sorted(out)
}

// due sorts by key, then, stably, by deadline, and cuts.
func (m model) due(now blob.Instant, limit int) []window.Row {
	due := slices.DeleteFunc(m.all(), func(row window.Row) bool { return row.VisibleAfter > now })
	slices.SortStableFunc(due, func(a, b window.Row) int { return cmp.Compare(a.VisibleAfter, b.VisibleAfter) })
	if limit > 0 {
		due = due[:min(limit, len(due))]
	}
	return sorted(due)
}

// Few keys and few instants, so that they meet; among them those at the edges.
var (
	someKeys     = rapid.SampledFrom([]blob.Key{"", "\x00", "a", "a\x00", "b", "é", "\x80", "\xff", "\xff\x00"})
	someInstants = rapid.OneOf(
		rapid.SampledFrom([]blob.Instant{blob.MinInstant, -1, 0, 1, blob.MaxInstant}),
		rapid.Custom(func(t *rapid.T) blob.Instant { return blob.Instant(rapid.Int64().Draw(t, "ns")) }))
	someLimits = rapid.IntRange(-1, 4)
	someRows   = rapid.SliceOfN(rapid.Custom(func(t *rapid.T) window.Row {
		return window.Row{Key: someKeys.Draw(t, "key"), VisibleAfter: someInstants.Draw(t, "at")}
	}), 0, 6)
)

// testStateMachine does at random what can be done, and compares with the model.
func testStateMachine(t *testing.T, target Target) {
	e := open(t, target)
	rapid.Check(t, func(rt *rapid.T) {
		s := state{t: t, rt: rt, engine: e, model: model{}}
		_, err := e.Take(t.Context(), blob.MaxInstant, 0) // what the last run left
		s.check(err)
		actions := []func(){s.stage, s.stageKeepFirst, s.take, s.peek, s.list, s.unstage}
		for range rapid.IntRange(1, target.Steps).Draw(rt, "steps") {
			actions[rapid.IntRange(0, len(actions)-1).Draw(rt, "action")]()
		}
		all, err := e.List(t.Context(), "", 0)
		s.check(err)
		s.want(all, s.model.all())
		n, err := e.Count(t.Context())
		s.check(err)
		s.want(n, int64(len(s.model)))
	})
}

type state struct {
	t      *testing.T
	rt     *rapid.T
	engine Engine
	model  model
}

func (s state) stage() {
	rows := someRows.Draw(s.rt, "stage")
	s.check(s.engine.Stage(s.t.Context(), rows))
	for _, row := range rows {
		s.model[row.Key] = row.VisibleAfter
	}
}

func (s state) stageKeepFirst() {
	rows := someRows.Draw(s.rt, "stage, keep first")
	got, err := s.engine.StageKeepFirst(s.t.Context(), rows)
	s.check(err)
	before := len(s.model)
	for _, row := range rows {
		if _, there := s.model[row.Key]; !there {
			s.model[row.Key] = row.VisibleAfter
		}
	}
	s.want(got, len(s.model)-before)
}

func (s state) take() {
	now, limit := someInstants.Draw(s.rt, "take"), someLimits.Draw(s.rt, "limit")
	got, err := s.engine.Take(s.t.Context(), now, limit)
	s.check(err)
	due := s.model.due(now, limit)
	s.want(got, due)
	for _, row := range due {
		delete(s.model, row.Key)
	}
}

func (s state) peek() {
	now, limit := someInstants.Draw(s.rt, "peek"), someLimits.Draw(s.rt, "limit")
	got, err := s.engine.Peek(s.t.Context(), now, limit)
	s.check(err)
	s.want(got, s.model.due(now, limit))
}

func (s state) list() {
	from, limit := someKeys.Draw(s.rt, "list"), someLimits.Draw(s.rt, "limit")
	got, err := s.engine.List(s.t.Context(), from, limit)
	s.check(err)
	page := slices.DeleteFunc(s.model.all(), func(row window.Row) bool { return row.Key < from })
	if limit > 0 {
		page = page[:min(limit, len(page))]
	}
	s.want(got, page)
}

func (s state) unstage() {
	keys := rapid.SliceOfN(someKeys, 0, 4).Draw(s.rt, "unstage")
	got, err := s.engine.Unstage(s.t.Context(), keys)
	s.check(err)
	before := len(s.model)
	for _, key := range keys {
		delete(s.model, key)
	}
	s.want(got, before-len(s.model))
}

func (s state) check(err error) {
	if err != nil {
		s.rt.Fatal(err)
	}
}

func (s state) want(got, want any) {
	if diff := gocmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		s.rt.Fatalf("-want +got:\n%s", diff)
	}
}
