package main

import (
	"os"
	"syscall"
	"testing"
	"time"
)

// A signal of the same kind that comes at once is the first one again; a later one,
// and another kind, cuts off.
func TestSecondSignal(t *testing.T) {
	t.Parallel()
	const again = sameSignal - time.Millisecond
	for name, c := range map[string]struct {
		second os.Signal
		after  time.Duration
		cut    bool
	}{
		"the same at once": {syscall.SIGTERM, again, false},
		"the same later":   {syscall.SIGTERM, sameSignal, true},
		"another at once":  {syscall.SIGINT, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			signals, released, ended := make(chan os.Signal), make(chan struct{}), make(chan struct{})
			now := time.Unix(0, 0)
			stopped, cut := 0, 0
			go func() {
				defer close(ended)
				takeSignals(signals, released, func() time.Time { return now }, func() { stopped++; now = now.Add(c.after) }, func() { cut++ })
			}()
			signals <- syscall.SIGTERM
			signals <- c.second
			close(released)
			<-ended
			if stopped != 1 || cut > 1 || cut == 1 != c.cut {
				t.Errorf("stopped %d times, cut off %d times; want it cut off: %t", stopped, cut, c.cut)
			}
		})
	}
}
