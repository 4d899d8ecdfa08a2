package demo

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func create(t *testing.T, dir string) *App {
	t.Helper()
	a, err := Create(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

func take(t *testing.T, a *App) Stock {
	t.Helper()
	s, err := a.Take(context.WithoutCancel(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestStock(t *testing.T) {
	t.Parallel()
	a := create(t, filepath.Join(t.TempDir(), "new", "dir with a ? and a %"))
	s := take(t, a)
	if len(s.Blobs) != 200 || len(s.Attached) != attachedBlobs || len(s.Avatars) != avatarBlobs || len(s.Trashed) != trashedBlobs+1 {
		t.Errorf("%d blobs, %d attached, %d avatars, %d in the trash", len(s.Blobs), len(s.Attached), len(s.Avatars), len(s.Trashed))
	}
	if got := len(s.Dead()); got != trashedBlobs+unnamedBlobs {
		t.Errorf("%d are dead, want %d", got, trashedBlobs+unnamedBlobs)
	}
	if got := s.Dangling(); len(got) > 0 {
		t.Errorf("dangling: %v", got)
	}
}

func TestAttachDeadTakesOneOfTheDead(t *testing.T) {
	t.Parallel()
	a := create(t, t.TempDir())
	title, err := a.AttachDead(t.Context())
	if err != nil || title == "" {
		t.Fatalf("AttachDead = %q, %v", title, err)
	}
	s := take(t, a)
	if len(s.Blobs) != 200 || len(s.Dead()) != trashedBlobs+unnamedBlobs-1 {
		t.Errorf("%d blobs, %d of them dead", len(s.Blobs), len(s.Dead()))
	}
}

func TestStockFindsWhatDangles(t *testing.T) {
	t.Parallel()
	a := create(t, t.TempDir())
	err := a.inTx(t.Context(), func(tx *sql.Tx) error {
		_, err := tx.ExecContext(t.Context(), `DELETE FROM blobs WHERE digest = (SELECT avatar FROM users WHERE avatar IS NOT NULL LIMIT 1)`)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := take(t, a).Dangling(); len(got) != 1 {
		t.Errorf("dangling: %v, want one", got)
	}
}

// Each change keeps what is referred to where it is.
func TestChanges(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(context.Context, *sql.Tx, int) error{
		"add": add, "breakOff": breakOff, "remove": remove, "trash": trash, "restore": restore,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := create(t, t.TempDir())
			before := take(t, a)
			if err := a.inTx(t.Context(), func(tx *sql.Tx) error { return change(t.Context(), tx, 1000) }); err != nil {
				t.Fatal(err)
			}
			after := take(t, a)
			if got := after.Dangling(); len(got) > 0 {
				t.Errorf("dangling: %v", got)
			}
			for d := range before.Blobs {
				if !after.Blobs[d] {
					t.Errorf("blob %s is gone", d)
				}
			}
		})
	}
}

func TestLiveEndsWithItsContext(t *testing.T) {
	t.Parallel()
	a := create(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Live(ctx) }()
	deadline, tick := time.After(30*time.Second), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for len(take(t, a).Blobs) == 200 {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("nothing is added")
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestLiveSaysWhenItCantChange(t *testing.T) {
	t.Parallel()
	a := create(t, t.TempDir())
	_, err := a.db.ExecContext(t.Context(), `DROP TABLE attachments; DROP TABLE blobs`)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Live(t.Context()); err == nil {
		t.Error("no error")
	}
}

func TestForeignFilesAreRefused(t *testing.T) {
	t.Parallel()
	for name, put := range map[string]func(dir string) error{
		"notes": func(dir string) error { return os.WriteFile(filepath.Join(dir, "notes.txt"), nil, 0o600) },
		"config": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, configFile), []byte("pools: []"), 0o600)
		},
		"database": func(dir string) error { return os.WriteFile(filepath.Join(dir, databaseFile), []byte("SQLite"), 0o600) },
		"journal":  func(dir string) error { return os.Mkdir(filepath.Join(dir, databaseFile+"-wal"), 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := put(dir); err != nil {
				t.Fatal(err)
			}
			if _, err := Create(t.Context(), dir); !errors.Is(err, ErrForeign) {
				t.Errorf("Create = %v, want ErrForeign", err)
			}
			if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
				t.Errorf("%d files are left, want 1: %v", len(entries), err)
			}
		})
	}
}

func TestEarlierDemoIsReplaced(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first := create(t, dir)
	if _, err := first.AttachDead(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Its write-ahead log is still there: the header alone must do.
	second := create(t, dir)
	if got := len(take(t, second).Attached); got != attachedBlobs {
		t.Errorf("%d are attached, want %d", got, attachedBlobs)
	}
}
