package agent

import (
	"testing"
	"time"
)

// A database that takes its time for however small a batch isn't asked more often.
func TestPaceEndsAtLeast(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]pace{"postgres": postgresPace, "sqlite": sqlitePace, "store": storePace} {
		p := p.within(1000)
		for range 100 {
			p.after(time.Minute)
		}
		if p.limit != p.least {
			t.Errorf("%s: %d keys a batch, want %d", name, p.limit, p.least)
		}
		for range 100 {
			p.after(time.Millisecond)
		}
		if p.limit != 1000 {
			t.Errorf("%s: %d keys a batch once it is quick, want 1000", name, p.limit)
		}
		for p.shrink() {
		}
		if p.after(time.Minute); p.limit != 1 {
			t.Errorf("%s: %d keys a batch where 4 were too many, want 1", name, p.limit)
		}
	}
	if small := postgresPace.within(10); small.limit != 10 {
		t.Errorf("%d keys a batch, want the 10 that were asked for", small.limit)
	}
}

// The server's lock table bounds a batch, also one that was made to count.
func TestPaceIsBound(t *testing.T) {
	t.Parallel()
	p := postgresPace.within(1000)
	p.enlarge()
	p.bound(700)
	for range 100 {
		p.after(time.Millisecond)
	}
	if p.limit != 700 {
		t.Errorf("%d keys a batch, want the 700 that the lock table has room for", p.limit)
	}
	p.bound(0)
	if p.limit != 700 {
		t.Errorf("%d keys a batch, want no bound to change nothing", p.limit)
	}
}
