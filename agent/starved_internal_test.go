package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
)

// The warning comes after ten ticks and ten minutes with the same holder, and then
// each time that twice as long has passed.
func TestStarvedWarns(t *testing.T) {
	t.Parallel()
	start := time.Now()
	for name, c := range map[string]struct {
		tick, over time.Duration
		change     int // the holder changes at every so many ticks
		want       int
	}{
		"ten short ticks":       {time.Second, 9 * time.Minute, 0, 0},
		"ten minutes":           {time.Minute, 10 * time.Minute, 0, 1},
		"long ticks":            {time.Hour, 8 * time.Hour, 0, 0},
		"ten long ticks":        {time.Hour, 9 * time.Hour, 0, 1},
		"growing intervals":     {time.Second, 81 * time.Minute, 0, 4}, // 10, 20, 40, 80
		"a holder of each tick": {time.Minute, time.Hour, 1, 0},
		"sweeps of an hour":     {time.Minute, 3 * time.Hour, 60, 9},
	} {
		var out strings.Builder
		log := zerolog.New(&out)
		var s starved
		n := 0
		for at := time.Duration(0); at <= c.over; at += c.tick {
			by := holder{id: "one", detail: "pid 1", advice: "end it"}
			if c.change > 0 {
				by.id = string(rune('a' + n/c.change))
			}
			n++
			s.note(by, start.Add(at))
			s.log(&log, start.Add(at))
		}
		if got := strings.Count(out.String(), "the same holder"); got != c.want {
			t.Errorf("%s: %d warnings, want %d: %s", name, got, c.want, &out)
		}
		s.end()
		out.Reset()
		s.note(holder{id: "one"}, start.Add(100*time.Hour))
		if s.log(&log, start.Add(100*time.Hour)); out.Len() > 0 {
			t.Errorf("%s: after the lease was had: %s", name, &out)
		}
	}
}
