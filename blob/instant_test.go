package blob_test

import (
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/alkblobs/gc-agent/blob"
)

func TestInstantAdd(t *testing.T) {
	t.Parallel()
	const longest = time.Duration(math.MaxInt64)
	const shortest = time.Duration(math.MinInt64)
	tests := []struct {
		i    blob.Instant
		d    time.Duration
		want blob.Instant
		ok   bool
	}{
		{0, 0, 0, true},
		{-5, time.Second, 999_999_995, true},
		{blob.MaxInstant, 0, blob.MaxInstant, true},
		{blob.MaxInstant, 1, 0, false},
		{blob.MaxInstant - 1, 1, blob.MaxInstant, true},
		{blob.MaxInstant, longest, 0, false},
		{1, longest, 0, false},
		{0, longest, blob.MaxInstant, true},
		{blob.MinInstant, 0, blob.MinInstant, true},
		{blob.MinInstant, -1, 0, false},
		{blob.MinInstant + 1, -1, blob.MinInstant, true},
		{blob.MinInstant, shortest, 0, false},
		{-1, shortest, 0, false},
		{0, shortest, blob.MinInstant, true},
		{blob.MaxInstant, shortest, -1, true},
		{blob.MinInstant, longest, -1, true},
	}
	for _, tt := range tests {
		got, err := tt.i.Add(tt.d)
		if got != tt.want || (err == nil) != tt.ok {
			t.Errorf("%d + %d: %d, %v; want %d, ok %t", tt.i, tt.d, got, err, tt.want, tt.ok)
		}
	}
}

func TestInstantAddIsExactOrAnError(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		i := blob.Instant(rapid.Int64().Draw(t, "i"))
		d := time.Duration(rapid.Int64().Draw(t, "d"))
		want := new(big.Int).Add(big.NewInt(int64(i)), big.NewInt(int64(d)))
		got, err := i.Add(d)
		if (err == nil) != want.IsInt64() || (err == nil && int64(got) != want.Int64()) {
			t.Fatalf("%d + %d: %d, %v; want %s", i, d, got, err, want)
		}
	})
}

func TestInstantOfTime(t *testing.T) {
	t.Parallel()
	for _, i := range []blob.Instant{
		blob.MinInstant, blob.MinInstant + 1, blob.MinInstant + 1e9, -1e9 - 1, -1e9, -1, 0, 1, 1e9, blob.MaxInstant - 1, blob.MaxInstant,
	} {
		if got, err := blob.InstantOf(i.Time()); err != nil || got != i {
			t.Errorf("instant %d: %d, %v", i, got, err)
		}
	}
}

func TestInstantOfAnyTime(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		i := blob.Instant(rapid.Int64().Draw(t, "i"))
		if got, err := blob.InstantOf(i.Time()); err != nil || got != i {
			t.Fatalf("instant %d: %d, %v", i, got, err)
		}
	})
}

func TestInstantOfTimeOutOfRange(t *testing.T) {
	t.Parallel()
	for _, tm := range []time.Time{
		{},
		blob.MinInstant.Time().Add(-1),
		blob.MinInstant.Time().Add(-time.Second),
		blob.MaxInstant.Time().Add(1),
		blob.MaxInstant.Time().Add(time.Second),
		time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC),
		time.Date(-9999, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Unix(math.MaxInt64, 0),
		time.Unix(math.MinInt64, 0),
	} {
		if got, err := blob.InstantOf(tm); err == nil {
			t.Errorf("time %s is instant %d", tm, got)
		}
	}
}

func TestInstantTimeIsUTC(t *testing.T) {
	t.Parallel()
	const want = "1969-12-31T23:59:59.999999999Z"
	if got := blob.Instant(-1).Time().Format(time.RFC3339Nano); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
