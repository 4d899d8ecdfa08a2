package agent

import (
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/blob"
)

// What makes two readings a jump: the host's clock, and the least time that can
// have passed between them by the agent's.
func TestWhatIsAJump(t *testing.T) {
	t.Parallel()
	start := time.Now()
	at := func(host, before, after time.Duration) reading {
		return reading{host: blob.Instant(host), before: start.Add(before), after: start.Add(after)}
	}
	for name, c := range map[string]struct {
		first, second reading
		want          time.Duration
	}{
		"steady":              {at(0, 0, 0), at(time.Minute, time.Minute, time.Minute), 0},
		"a second":            {at(0, 0, 0), at(time.Second, 0, 0), 0},
		"more than that":      {at(0, 0, 0), at(time.Second+1, 0, 0), time.Second + 1},
		"drift":               {at(0, 0, 0), at(1001*time.Second+time.Second, 1000*time.Second, 1000*time.Second), 0},
		"more than drift":     {at(0, 0, 0), at(1002*time.Second+1, 1000*time.Second, 1000*time.Second), 2*time.Second + 1},
		"back":                {at(0, 0, 0), at(-time.Hour, time.Second, time.Second), 0},
		"an agent's jump":     {at(0, 0, 0), at(time.Second, time.Hour, time.Hour), 0},
		"in doubt, the first": {at(0, 0, 3*time.Second), at(5*time.Second, 5*time.Second, 5*time.Second), 3 * time.Second},
		"in doubt, the next":  {at(0, 0, 0), at(5*time.Second, 2*time.Second, 5*time.Second), 3 * time.Second},
		"out of order":        {at(time.Second, time.Second, time.Second), at(0, 0, 0), 0},
	} {
		var clock hostClock
		clock.note(c.first)
		clock.note(c.second)
		if clock.jumped != c.want {
			t.Errorf("%s: jumped by %s, want %s", name, clock.jumped, c.want)
		}
	}
}

// A clock that gains a little from each reading to the next is found out within a pin's
// usual life; one that only drifts never is, however long it goes on.
func TestDriftIsAJump(t *testing.T) {
	t.Parallel()
	start := time.Now()
	for name, c := range map[string]struct {
		every time.Duration
		speed float64
		want  bool
	}{
		"double, read often":    {900 * time.Millisecond, 2, true},
		"a tenth, read often":   {time.Second, 1.1, true},
		"slewed, read often":    {time.Second, 1.0005, false},
		"slewed, read seldom":   {time.Hour, 1.0005, false},
		"behind, read often":    {time.Second, 0.5, false},
		"double, read once":     {time.Minute, 2, true},
		"a thousandth, at most": {20 * time.Second, 1.001, false},
	} {
		clock := hostClock{ttl: time.Minute}
		var gained time.Duration
		for elapsed := time.Duration(0); elapsed < 10*time.Minute && clock.jumped == 0; elapsed += c.every {
			host := time.Duration(float64(elapsed) * c.speed)
			clock.note(reading{host: blob.Instant(host), before: start.Add(elapsed), after: start.Add(elapsed)})
			gained = host - elapsed
		}
		if (clock.jumped > 0) != c.want {
			t.Errorf("%s: jumped by %s after it has gained %s", name, clock.jumped, gained)
		}
		if c.want && gained > clock.ttl+jumpSlack {
			t.Errorf("%s: found out only after it has gained %s", name, gained)
		}
	}
}
