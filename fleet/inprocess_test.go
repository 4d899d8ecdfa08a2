package fleet_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	_ "modernc.org/sqlite" // the driver

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
)

// handClock stands still until it is moved.
type handClock struct {
	mu  sync.Mutex
	now time.Time
}

func newHandClock() *handClock { return &handClock{now: time.Unix(1_000_000_000, 0)} }

func (c *handClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *handClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func roomy(clock *handClock) fleet.InProcessOptions {
	return fleet.InProcessOptions{Now: clock.Now, MaxTTL: fleet.MaxTTL, Rows: 10_000, Bytes: 1 << 20}
}

// blobFile is an application's SQLite file, with a table of blobs.
type blobFile struct {
	t   *testing.T
	app *sql.DB
	db  *sqlitedb.DB
}

func newBlobFile(t *testing.T) *blobFile {
	t.Helper()
	path := filepath.Join(t.TempDir(), "app.db")
	app, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(wal)")
	check(t, err)
	db, err := sqlitedb.Open(path, sqlitedb.Options{BusyTimeout: 5 * time.Second})
	check(t, err)
	t.Cleanup(func() { check(t, errors.Join(app.Close(), db.Close())) })
	f := &blobFile{t: t, app: app, db: db}
	f.exec("CREATE TABLE blobs (id BLOB PRIMARY KEY NOT NULL)")
	return f
}

func (f *blobFile) exec(query string, args ...any) {
	f.t.Helper()
	_, err := f.app.ExecContext(f.t.Context(), query, args...)
	check(f.t, err)
}

func (f *blobFile) put(key blob.Key) {
	f.t.Helper()
	f.exec("INSERT INTO blobs VALUES (?)", []byte(key))
}

// look reads on a connection of its own.
func (f *blobFile) look(ctx context.Context, keys []blob.Key) ([]bool, error) {
	there := make([]bool, len(keys))
	for i, key := range keys {
		if err := f.app.QueryRowContext(ctx, "SELECT count(*) FROM blobs WHERE id = ?", []byte(key)).Scan(&there[i]); err != nil {
			return nil, err
		}
	}
	return there, nil
}

func (f *blobFile) has(key blob.Key) bool {
	f.t.Helper()
	there, err := f.look(f.t.Context(), []blob.Key{key})
	check(f.t, err)
	return there[0]
}

// sweep is a batch: it decides, lets somebody get ahead, and deletes what no pin
// protects.
func (f *blobFile) sweep(pins *fleet.InProcess, key blob.Key, between func()) {
	f.t.Helper()
	conn, err := f.db.Conn(f.t.Context())
	check(f.t, err)
	defer func() { check(f.t, conn.Close()) }()
	locks := pins.Begin()
	defer locks.Release()
	check(f.t, conn.InTx(f.t.Context(), sqlitedb.Write, func(ctx context.Context, q sqlitedb.Querier) error {
		unprotected := locks.Check([]blob.Key{key})[0].State == fleet.Unprotected
		between()
		if unprotected {
			_, err := q.Exec(ctx, "DELETE FROM blobs WHERE id = ?", []byte(key))
			return err
		}
		return nil
	}))
}

// A writer pins while a batch is between its check and its delete, and is told
// whether the blob is there. Without the lock it is told of one that is about to go.
func TestRacePinInProcess(t *testing.T) {
	t.Parallel()
	bothWays(t, fleet.Omit{KeyLock: true}, func(t *testing.T, without fleet.Omit) bool {
		pins := fleet.NewInProcessOmitting(roomy(newHandClock()), without)
		f := newBlobFile(t)
		f.put(raceKey)
		var done <-chan outcome
		f.sweep(pins, raceKey, func() {
			done = start(func() (bool, error) {
				there, err := pins.Pin(t.Context(), []blob.Key{raceKey}, "me", time.Minute, f.look)
				return err == nil && there[0], err
			})
			for pins.Waiting(raceKey) == 0 && len(done) == 0 {
				_ = f.has(raceKey) // it takes a moment
			}
		})
		got := <-done
		check(t, got.err)
		return got.told && !f.has(raceKey)
	})
}

// A batch comes while a writer is pinning: it leaves the key alone.
func TestRaceBatchWhilePinning(t *testing.T) {
	t.Parallel()
	pins, f := fleet.NewInProcess(roomy(newHandClock())), newBlobFile(t)
	f.put(raceKey)
	there, err := pins.Pin(t.Context(), []blob.Key{raceKey}, "me", time.Minute, func(ctx context.Context, keys []blob.Key) ([]bool, error) {
		equal(t, pins.Unpin(keys, "me"), []bool{true})
		f.sweep(pins, raceKey, func() {})
		return f.look(ctx, keys)
	})
	check(t, err)
	equal(t, there, []bool{true})
	f.sweep(pins, raceKey, func() {})
	equal(t, f.has(raceKey), false)
}

// The look takes longer than the pin lives: its writer would be told that the blob
// is safe, and it is safe no more.
func TestRacePinInProcessOutlived(t *testing.T) {
	t.Parallel()
	bothWays(t, fleet.Omit{CommitCheck: true}, func(t *testing.T, without fleet.Omit) bool {
		clock, f := newHandClock(), newBlobFile(t)
		pins := fleet.NewInProcessOmitting(roomy(clock), without)
		f.put(raceKey)
		there, err := pins.Pin(t.Context(), []blob.Key{raceKey}, "me", time.Second, func(ctx context.Context, keys []blob.Key) ([]bool, error) {
			defer clock.advance(time.Second)
			return f.look(ctx, keys)
		})
		if without == (fleet.Omit{}) && !errors.Is(err, fleet.ErrPinExpired) {
			t.Errorf("got error %v", err)
		}
		f.sweep(pins, raceKey, func() {})
		return err == nil && there[0] && !f.has(raceKey)
	})
}

// A batch may check what it has locked again, and lets go of everything at once.
// Whoever waits comes before the next batch.
func TestBatchLocks(t *testing.T) {
	t.Parallel()
	pins := fleet.NewInProcess(roomy(newHandClock()))
	states := func(b *fleet.BatchLocks, keys ...blob.Key) (all []fleet.PinState) {
		for _, pin := range b.Check(keys) {
			all = append(all, pin.State)
		}
		return all
	}
	first, second := pins.Begin(), pins.Begin()
	equal(t, states(first, "a", "b", "a"), []fleet.PinState{fleet.Unprotected, fleet.Unprotected, fleet.Unprotected})
	equal(t, states(second, "b", "c"), []fleet.PinState{fleet.Locked, fleet.Unprotected})
	done := start(func() (bool, error) {
		there, err := pins.Pin(t.Context(), []blob.Key{"a"}, "me", time.Minute, func(_ context.Context, keys []blob.Key) ([]bool, error) {
			equal(t, states(second, "a"), []fleet.PinState{fleet.Locked})
			return make([]bool, len(keys)), nil
		})
		return len(there) == 1, err
	})
	for pins.Waiting("a") == 0 {
		equal(t, len(done), 0)
	}
	first.Release()
	first.Release()
	told(t, <-done, true)
	equal(t, states(first, "a", "b"), []fleet.PinState{fleet.Protected, fleet.Unprotected})
	first.Release()
	second.Release()
	locks, rows, _ := pins.Held()
	equal(t, []int{locks, rows}, []int{0, 1})
	equal(t, fleet.LivePin{}.State, fleet.Locked)
}

// There is room for so many pins, and no more; what has run out makes room.
func TestPinsInProcessAreBounded(t *testing.T) {
	t.Parallel()
	clock := newHandClock()
	none := func(_ context.Context, keys []blob.Key) ([]bool, error) { return make([]bool, len(keys)), nil }
	pins := fleet.NewInProcess(fleet.InProcessOptions{Now: clock.Now, MaxTTL: time.Minute, Rows: 3, Bytes: 1000})
	pin := func(ttl time.Duration, keys ...blob.Key) error {
		_, err := pins.Pin(t.Context(), keys, "me", ttl, none)
		return err
	}
	check(t, pin(time.Minute, "a", "b"))
	if err := pin(time.Minute, "c", "d"); !errors.Is(err, fleet.ErrPinsFull) || !strings.Contains(err.Error(), "2 pins") {
		t.Errorf("got error %v", err)
	}
	equal(t, fmt.Sprint(pins.PinCheck("c"), pins.PinCheck("d")), "unprotected unprotected") // all or none
	check(t, pin(time.Second, "c", "b"))
	if err := pin(time.Second, "d"); !errors.Is(err, fleet.ErrPinsFull) {
		t.Errorf("got error %v", err)
	}
	clock.advance(time.Second)
	check(t, pin(time.Second, "d"))
	if err := pin(time.Second, blob.Key(strings.Repeat("k", 999))); !errors.Is(err, fleet.ErrPinsFull) {
		t.Errorf("got error %v", err)
	}
	check(t, pin(time.Second, blob.Key(strings.Repeat("k", blob.MaxKeyLen+1)))) // which nothing deletes
	pins.Unpin([]blob.Key{"a"}, "me")
	clock.advance(time.Hour)
	pins.DeleteExpired()
	locks, rows, bytes := pins.Held()
	equal(t, []int{locks, rows, bytes}, []int{0, 0, 0})
	for _, ttl := range []time.Duration{0, -1, time.Minute + 1} {
		if pin(ttl, "a") == nil {
			t.Errorf("pinned for %s", ttl)
		}
	}
	if _, err := pins.Pin(t.Context(), []blob.Key{"a"}, fleet.Owner(strings.Repeat("o", 1001)), time.Second, none); err == nil {
		t.Error("pinned for an owner that is too long")
	}
}

// When nobody can look, the pins stay, and nobody is told anything.
func TestPinInProcessLookFails(t *testing.T) {
	t.Parallel()
	pins := fleet.NewInProcess(roomy(newHandClock()))
	broken := errors.New("broken")
	for _, look := range []func() ([]bool, error){
		func() ([]bool, error) { return []bool{true}, broken },
		func() ([]bool, error) { return []bool{true, true}, nil },
	} {
		there, err := pins.Pin(t.Context(), []blob.Key{"a"}, "me", time.Second, func(context.Context, []blob.Key) ([]bool, error) { return look() })
		if there != nil || err == nil {
			t.Errorf("got %v and error %v", there, err)
		}
		equal(t, pins.PinCheck("a"), fleet.Protected)
	}
	locks, _, _ := pins.Held()
	equal(t, locks, 0)
}

// Many writers pin, look, upload and unpin, and batches delete what no pin
// protects: whoever pins has the blob for as long as the pin lasts.
func TestPinsInProcessAtOnce(t *testing.T) {
	t.Parallel()
	pins, f := fleet.NewInProcess(roomy(newHandClock())), newBlobFile(t)
	var sweeps, writers sync.WaitGroup
	stop := make(chan struct{})
	sweeps.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
				f.sweep(pins, blob.Key(fmt.Sprint("k", n%3)), func() {})
			}
		}
	})
	for w := range 4 {
		writers.Go(func() {
			owner := fleet.Owner(fmt.Sprint("writer ", w))
			for n := range 25 {
				key := blob.Key(fmt.Sprint("k", (n+w)%3))
				there, err := pins.Pin(t.Context(), []blob.Key{key, "other"}, owner, time.Minute, f.look)
				if err != nil {
					t.Error(err)
					return
				}
				if !there[0] {
					f.exec("INSERT OR IGNORE INTO blobs VALUES (?)", []byte(key))
				}
				if !f.has(key) {
					t.Errorf("%s is gone, and %s has it pinned", key, owner)
				}
				pins.Unpin([]blob.Key{key, "other"}, owner)
			}
		})
	}
	writers.Wait()
	close(stop)
	sweeps.Wait()
	locks, rows, _ := pins.Held()
	equal(t, []int{locks, rows}, []int{0, 0})
}
