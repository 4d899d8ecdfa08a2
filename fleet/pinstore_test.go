package fleet_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// pinStore is a place for pins, beside blobs that can be put there.
type pinStore interface {
	put(key blob.Key)
	pin(ctx context.Context, keys []blob.Key, owner fleet.Owner, ttl time.Duration) ([]bool, error)
	renew(key blob.Key, owner fleet.Owner, ttl time.Duration) (bool, error)
	renewOwners(owners []fleet.Owner, ttl time.Duration) (renewed, lost int, err error)
	unpin(keys []blob.Key, owner fleet.Owner) []bool
	check(key blob.Key) fleet.PinState
	list(f fleet.PinFilter) []fleet.PinRow
	// expire lets a live pin of the owner run out.
	expire(key blob.Key, owner fleet.Owner)
	// arbitrate decides about keys in a batch that lasts until fn returns.
	arbitrate(keys []blob.Key, fn func([]fleet.PinState))
	// waits says whether somebody waits for the batch that has the key.
	waits(key blob.Key) bool
}

// eachPinStore runs a test of what pins promise wherever they are.
func eachPinStore(t *testing.T, test func(t *testing.T, s pinStore)) {
	t.Parallel()
	for name, open := range map[string]func(*testing.T) pinStore{"in process": newProcessStore, "postgres": newPostgresStore} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

// processStore has its blobs in an application's SQLite file.
type processStore struct {
	t     *testing.T
	clock *handClock
	pins  *fleet.InProcess
	file  *blobFile
}

func newProcessStore(t *testing.T) pinStore {
	s := &processStore{t: t, clock: newHandClock(), file: newBlobFile(t)}
	s.pins = fleet.NewInProcess(roomy(s.clock))
	return s
}

func (s *processStore) put(key blob.Key) { s.file.put(key) }

func (s *processStore) pin(ctx context.Context, keys []blob.Key, owner fleet.Owner, ttl time.Duration) ([]bool, error) {
	return s.pins.Pin(ctx, keys, owner, ttl, s.file.look)
}

func (s *processStore) renew(key blob.Key, owner fleet.Owner, ttl time.Duration) (bool, error) {
	return s.pins.PinRenew(key, owner, ttl)
}

func (s *processStore) renewOwners(owners []fleet.Owner, ttl time.Duration) (int, int, error) {
	var renewed, lost int
	for _, owner := range owners {
		r, l, err := s.pins.RenewOwner(owner, time.Time{}, ttl)
		if err != nil {
			return renewed, lost, err
		}
		renewed, lost = renewed+r, lost+l
	}
	return renewed, lost, nil
}

func (s *processStore) unpin(keys []blob.Key, owner fleet.Owner) []bool {
	return s.pins.Unpin(keys, owner)
}
func (s *processStore) check(key blob.Key) fleet.PinState     { return s.pins.PinCheck(key) }
func (s *processStore) list(f fleet.PinFilter) []fleet.PinRow { return s.pins.List(f) }
func (s *processStore) waits(key blob.Key) bool               { return s.pins.Waiting(key) > 0 }

func (s *processStore) expire(key blob.Key, owner fleet.Owner) {
	for _, row := range s.pins.List(fleet.PinFilter{Key: &key, Owner: &owner, Limit: 1}) {
		s.clock.advance(row.Left)
	}
}

func (s *processStore) arbitrate(keys []blob.Key, fn func([]fleet.PinState)) {
	locks := s.pins.Begin()
	defer locks.Release()
	var states []fleet.PinState
	for _, pin := range locks.Check(keys) {
		equal(s.t, pin.Left > 0, pin.State == fleet.Protected)
		states = append(states, pin.State)
	}
	fn(states)
}

// postgresStore has both in one database.
type postgresStore struct {
	t                      *testing.T
	pinner, sweep, control *pgdb.Conn
}

func newPostgresStore(t *testing.T) pinStore {
	url, control := newPool(t)
	return &postgresStore{t: t, control: control, pinner: connect(t, url, patient), sweep: connect(t, url, patient)}
}

func (s *postgresStore) put(key blob.Key) { putBlob(s.t, s.control, key) }

func (s *postgresStore) pin(ctx context.Context, keys []blob.Key, owner fleet.Owner, ttl time.Duration) (there []bool, err error) {
	err = s.pinner.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
		there, err = fleet.PinKeys(ctx, tx, schema, keys, owner, ttl)
		return err
	})
	return there, err
}

func (s *postgresStore) renew(key blob.Key, owner fleet.Owner, ttl time.Duration) (bool, error) {
	return fleet.PinRenew(s.t.Context(), s.control, schema, key, owner, ttl)
}

func (s *postgresStore) renewOwners(owners []fleet.Owner, ttl time.Duration) (int, int, error) {
	renewals := make([]fleet.Renewal, len(owners))
	for i, owner := range owners {
		renewals[i] = fleet.Renewal{Owner: owner, Due: blob.MinInstant}
	}
	n, err := fleet.RenewOwners(s.t.Context(), s.control, schema, renewals, ttl, 2)
	return n.Renewed, n.Lost, err
}

func (s *postgresStore) unpin(keys []blob.Key, owner fleet.Owner) (removed []bool) {
	inTx(s.t, s.control, func(ctx context.Context, tx pgx.Tx) (err error) {
		removed, err = fleet.UnpinKeys(ctx, tx, schema, keys, owner)
		return err
	})
	return removed
}

func (s *postgresStore) check(key blob.Key) fleet.PinState {
	state, err := fleet.PinCheck(s.t.Context(), s.control, schema, key)
	check(s.t, err)
	return state
}

func (s *postgresStore) list(f fleet.PinFilter) []fleet.PinRow {
	rows, err := fleet.ListPins(s.t.Context(), s.control, schema, f)
	check(s.t, err)
	return rows
}

func (s *postgresStore) expire(key blob.Key, owner fleet.Owner) {
	equal(s.t, s.unpin([]blob.Key{key}, owner), []bool{true})
	agedPin(s.t, s.control, key, owner, past)
}

func (s *postgresStore) arbitrate(keys []blob.Key, fn func([]fleet.PinState)) {
	inTx(s.t, s.sweep, func(ctx context.Context, tx pgx.Tx) error {
		verdicts, err := fleet.ArbitrateBatch(ctx, tx, schema, keys, refs{})
		check(s.t, err)
		states := make([]fleet.PinState, len(keys))
		for i, v := range verdicts {
			states[i] = map[fleet.Decision]fleet.PinState{fleet.Dead: fleet.Unprotected, fleet.Pinned: fleet.Protected}[v.Decision]
		}
		fn(states)
		return nil
	})
}

func (s *postgresStore) waits(blob.Key) bool {
	return ask[bool](s.t, s.control, "SELECT cardinality(pg_blocking_pids($1)) > 0", s.pinner.PgConn().PID())
}

// A pin says of each key, in the order asked, whether its blob is there, and
// protects it, there or not, until it is taken back or has run out.
func TestPinStore(t *testing.T) {
	eachPinStore(t, func(t *testing.T, s pinStore) {
		s.put("there")
		s.put("also")
		keys := []blob.Key{"there", "absent", "also", "there"}
		there, err := s.pin(t.Context(), keys, "me", time.Minute)
		check(t, err)
		equal(t, there, []bool{true, false, true, true})
		_, err = s.pin(t.Context(), []blob.Key{"there"}, "you", time.Minute)
		check(t, err)
		equal(t, s.check("there"), fleet.Protected)
		equal(t, s.check("absent"), fleet.Protected)
		equal(t, s.check("never"), fleet.Unprotected)
		s.arbitrate([]blob.Key{"never", "there", "absent"}, func(got []fleet.PinState) {
			equal(t, got, []fleet.PinState{fleet.Unprotected, fleet.Protected, fleet.Protected})
		})

		equal(t, s.unpin([]blob.Key{"there", "never", "absent"}, "me"), []bool{true, false, true})
		equal(t, s.unpin([]blob.Key{"there"}, "me"), []bool{false})
		equal(t, s.check("there"), fleet.Protected) // by somebody else
		s.expire("there", "you")
		equal(t, s.check("there"), fleet.Unprotected)
		s.arbitrate([]blob.Key{"there"}, func(got []fleet.PinState) { equal(t, got, []fleet.PinState{fleet.Unprotected}) })
	})
}

// A renewal moves what is live, never to an earlier time, and brings nothing back.
func TestPinStoreRenew(t *testing.T) {
	eachPinStore(t, func(t *testing.T, s pinStore) {
		left := func(key blob.Key, owner fleet.Owner) time.Duration {
			rows := s.list(fleet.PinFilter{Key: &key, Owner: &owner, Limit: 10})
			if len(rows) == 0 {
				return 0
			}
			return rows[0].Left
		}
		between := func(got, low, high time.Duration) {
			t.Helper()
			if got <= low || got > high {
				t.Errorf("%s are left, want over %s and at most %s", got, low, high)
			}
		}
		for key, owner := range map[blob.Key]fleet.Owner{"live": "me", "long": "me", "other": "you", "gone": "me"} {
			_, err := s.pin(t.Context(), []blob.Key{key}, owner, time.Minute)
			check(t, err)
		}
		renew := func(key blob.Key, owner fleet.Owner, ttl time.Duration) bool {
			renewed, err := s.renew(key, owner, ttl)
			check(t, err)
			return renewed
		}
		equal(t, renew("live", "me", 5*time.Minute), true)
		between(left("live", "me"), 4*time.Minute, 5*time.Minute)
		equal(t, renew("live", "me", time.Second), true)
		between(left("live", "me"), 4*time.Minute, 5*time.Minute)
		equal(t, renew("live", "you", time.Minute), false)
		equal(t, renew("never", "me", time.Minute), false)

		// A shorter pin of the same owner shortens nothing.
		_, err := s.pin(t.Context(), []blob.Key{"live"}, "me", time.Second)
		check(t, err)
		between(left("live", "me"), 4*time.Minute, 5*time.Minute)

		equal(t, renew("other", "you", 20*time.Minute), true)
		equal(t, renew("long", "me", 10*time.Minute), true)
		s.expire("gone", "me")
		equal(t, renew("gone", "me", time.Minute), false)
		equal(t, s.check("gone"), fleet.Unprotected)
		renewed, lost, err := s.renewOwners([]fleet.Owner{"me", "nobody"}, 15*time.Minute)
		check(t, err)
		equal(t, []int{renewed, lost}, []int{2, 1})
		equal(t, s.check("gone"), fleet.Unprotected)
		between(left("live", "me"), 14*time.Minute, 15*time.Minute)
		between(left("other", "you"), 15*time.Minute, 20*time.Minute)
		for _, ttl := range []time.Duration{0, -1, 25 * time.Hour} {
			if _, err := s.renew("live", "me", ttl); err == nil {
				t.Errorf("renewed for %s", ttl)
			}
			if _, err := s.pin(t.Context(), []blob.Key{"live"}, "me", ttl); err == nil {
				t.Errorf("pinned for %s", ttl)
			}
		}
	})
}

// A list is in the order of keys and owners, whatever page it comes in.
func TestPinStoreList(t *testing.T) {
	eachPinStore(t, func(t *testing.T, s pinStore) {
		want := []string{}
		for _, key := range []blob.Key{"b", "a", "a\x00", "\xff"} {
			for _, owner := range []fleet.Owner{"me", "", "\x00"} {
				_, err := s.pin(t.Context(), []blob.Key{key}, owner, time.Minute)
				check(t, err)
				want = append(want, string(key)+"|"+string(owner))
			}
		}
		_, err := s.pin(t.Context(), []blob.Key{"gone"}, "me", time.Second)
		check(t, err)
		s.expire("gone", "me")
		slices.Sort(want)
		names := func(f fleet.PinFilter) (all []string) {
			for f.Limit = 5; ; {
				rows := s.list(f)
				for _, row := range rows {
					all = append(all, string(row.Key)+"|"+string(row.Owner))
				}
				if len(rows) < f.Limit {
					return all
				}
				f.After = &rows[len(rows)-1]
			}
		}
		got := names(fleet.PinFilter{})
		sortedGot := slices.Sorted(slices.Values(got))
		equal(t, sortedGot, want)
		equal(t, got[:4], []string{"a|", "a|\x00", "a|me", "a\x00|"})
		owner, key := fleet.Owner(""), blob.Key("a")
		equal(t, names(fleet.PinFilter{Owner: &owner}), []string{"a|", "a\x00|", "b|", "\xff|"})
		equal(t, names(fleet.PinFilter{Owner: &owner, Key: &key}), []string{"a|"})
	})
}

// Whoever pins a key that a batch has locked waits for the end of the batch, and
// then sees what it did. Nobody waits for another key.
func TestPinStoreContention(t *testing.T) {
	eachPinStore(t, func(t *testing.T, s pinStore) {
		s.put("a")
		var done <-chan outcome
		s.arbitrate([]blob.Key{"a"}, func(got []fleet.PinState) {
			equal(t, got, []fleet.PinState{fleet.Unprotected})
			there, err := s.pin(t.Context(), []blob.Key{"b"}, "me", time.Minute)
			check(t, err)
			equal(t, there, []bool{false})
			done = start(func() (bool, error) {
				there, err := s.pin(t.Context(), []blob.Key{"a"}, "me", time.Minute)
				return len(there) == 1 && there[0], err
			})
			for !s.waits("a") {
				if len(done) > 0 {
					t.Fatal("it didn't wait")
				}
			}
			equal(t, s.check("a"), fleet.Unprotected)
		})
		told(t, <-done, true)
		s.arbitrate([]blob.Key{"a"}, func(got []fleet.PinState) { equal(t, got, []fleet.PinState{fleet.Protected}) })
	})
}

// Whoever has waited long enough has pinned nothing.
func TestPinStoreWaitIsBounded(t *testing.T) {
	eachPinStore(t, func(t *testing.T, s pinStore) {
		s.arbitrate([]blob.Key{"b"}, func([]fleet.PinState) {
			ctx, cancel := context.WithCancel(t.Context())
			done := start(func() (bool, error) {
				_, err := s.pin(ctx, []blob.Key{"a", "b", "c"}, "me", time.Minute)
				return true, err
			})
			for !s.waits("b") {
				if len(done) > 0 {
					t.Fatal("it didn't wait")
				}
			}
			cancel()
			if got := <-done; got.err == nil {
				t.Error("it was told that the keys are pinned")
			}
		})
		for _, key := range []blob.Key{"a", "b", "c"} {
			equal(t, s.check(key), fleet.Unprotected)
		}
	})
}
