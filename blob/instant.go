package blob

import (
	"fmt"
	"math"
	"time"
)

// Instant is a point in time as signed nanoseconds since the Unix epoch. It is
// negative before 1970 and covers the whole range of an int64. Only the clock of
// a pool's host makes one that decides anything.
type Instant int64

// The first and the last instant that can be written down.
const (
	MinInstant Instant = math.MinInt64
	MaxInstant Instant = math.MaxInt64
)

// Add returns i+d. A sum outside the range of an Instant is an error, never a
// wrap-around: a deadline that wrapped would make a blob deletable at once.
func (i Instant) Add(d time.Duration) (Instant, error) {
	sum := i + Instant(d)
	if (d > 0 && sum < i) || (d < 0 && sum > i) {
		return 0, fmt.Errorf("instant %d plus %s overflows 64-bit nanoseconds", int64(i), d)
	}
	return sum, nil
}

// Time returns the instant as a time in UTC, for display.
func (i Instant) Time() time.Time { return time.Unix(0, int64(i)).UTC() }

// InstantOf returns the instant of t. A time outside the range is an error.
func InstantOf(t time.Time) (Instant, error) {
	i := Instant(t.UnixNano())
	if !i.Time().Equal(t) { // UnixNano wraps outside the range
		return 0, fmt.Errorf("time %s is outside the range of 64-bit nanoseconds", t)
	}
	return i, nil
}
