package state_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/alkblobs/gc-agent/agent/state"
)

func open(t *testing.T, path string) *state.Store {
	t.Helper()
	s, err := state.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestRemembers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "a b?.db")
	ctx, s := t.Context(), open(t, path)
	got, err := s.Pool(ctx, "p")
	must(t, err)
	if diff := cmp.Diff(state.Pool{SourceRows: map[string]int64{}}, got); diff != "" {
		t.Errorf("an unknown pool (-want +got):\n%s", diff)
	}
	must(t, s.Braked(ctx, "p", "source_shrunk"))
	must(t, s.Covered(ctx, "p", "digest"))
	got, err = s.Pool(ctx, "p")
	must(t, err)
	if want := (state.Pool{Braked: "source_shrunk", Covered: "digest", SourceRows: map[string]int64{}}); !cmp.Equal(want, got) {
		t.Errorf("a pool that never passed: %+v", got)
	}
	must(t, s.Passed(ctx, "p", 0, map[string]int64{"a": 1, "b": 2}))
	must(t, s.Passed(ctx, "p", 70, map[string]int64{"b": 3, "c": 0}))
	must(t, s.Passed(ctx, "q", 5, map[string]int64{"b": 9}))
	must(t, s.Braked(ctx, "q", "max_dead_ratio"))
	must(t, s.Close())

	s = open(t, path)
	for name, want := range map[string]state.Pool{
		"p": {Known: true, Scanned: 70, SourceRows: map[string]int64{"b": 3, "c": 0}, Covered: "digest"},
		"q": {Known: true, Scanned: 5, SourceRows: map[string]int64{"b": 9}, Braked: "max_dead_ratio"},
	} {
		got, err := s.Pool(ctx, name)
		must(t, err)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("pool %s (-want +got):\n%s", name, diff)
		}
	}
}

func TestHistoryIsBounded(t *testing.T) {
	t.Parallel()
	ctx, s := t.Context(), open(t, filepath.Join(t.TempDir(), "state.db"))
	s.Keep(30)
	const more = 40
	for i := range more {
		must(t, s.AddSweep(ctx, "p", time.Unix(int64(i), 1), json.RawMessage(fmt.Sprint(i))))
	}
	must(t, s.AddSweep(ctx, "q", time.Unix(1, 0), json.RawMessage(`{}`)))
	all, err := s.Sweeps(ctx, "p", more)
	must(t, err)
	if len(all) != 30 || string(all[0].Report) != "39" || !all[0].Started.Equal(time.Unix(39, 1)) || string(all[29].Report) != "10" {
		t.Errorf("%d sweeps, the latest %s, the oldest %s", len(all), all[0].Report, all[len(all)-1].Report)
	}
	last, err := s.Sweeps(ctx, "p", 2)
	must(t, err)
	if len(last) != 2 || last[0].ID <= last[1].ID {
		t.Errorf("the last two: %+v", last)
	}
}

// Several processes open one file, and make it, at once.
func TestSeveralAtOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state.db")
	var group sync.WaitGroup
	errs := make(chan error, 8)
	for i := range 8 {
		group.Go(func() {
			s, err := state.Open(context.WithoutCancel(t.Context()), path)
			if err == nil {
				err = s.Passed(context.WithoutCancel(t.Context()), fmt.Sprint(i), int64(i), map[string]int64{"s": 1})
			}
			if err == nil {
				err = s.Close()
			}
			errs <- err
		})
	}
	group.Wait()
	for range 8 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	s := open(t, path)
	for i := range 8 {
		if p, err := s.Pool(t.Context(), fmt.Sprint(i)); err != nil || !p.Known {
			t.Errorf("pool %d: %+v, %v", i, p, err)
		}
	}
}

func TestOthersFilesAreLeftAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text, other, later := filepath.Join(dir, "text"), filepath.Join(dir, "other.db"), filepath.Join(dir, "later.db")
	must(t, os.WriteFile(text, []byte(strings.Repeat("not a database\n", 100)), 0o600))
	for path, ddl := range map[string]string{other: "CREATE TABLE t (x)", later: "PRAGMA application_id = 1734566247; PRAGMA user_version = 7"} {
		db, err := sql.Open("sqlite", "file:"+path)
		must(t, err)
		_, err = db.ExecContext(t.Context(), ddl)
		must(t, err)
		must(t, db.Close())
	}
	before := map[string]string{}
	for _, path := range []string{text, other, later} {
		before[path] = read(t, path)
	}
	for path, want := range map[string]string{
		text:                                "file is not a database",
		other:                               "it is a database of something else",
		later:                               "it was written by a later version of the agent (7, this one knows 1)",
		filepath.Join(dir, "none", "state"): "unable to open database file",
	} {
		_, err := state.Open(t.Context(), path)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("Open(%s) = %v", path, err)
		}
	}
	for path, want := range before {
		if read(t, path) != want {
			t.Errorf("%s was written to", path)
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return string(data)
}
