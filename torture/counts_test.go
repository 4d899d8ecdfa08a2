package torture_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// enough is how often each race has to be met for a run to pass.
const enough = 20

// races are the kinds of races. Each is told by what came of it, on the side that
// noticed.
var races = []string{
	refused, conflict, pinExpired, putMetDelete, lookMetDelete, pinMetDelete, pinWaited, rowWaited,
	live, pinnedKey, locked, leaseHeld, heldUp, terminated, killed, takenOver, replaced,
}

// What writers meet.
const (
	refused       = "reference refused (23503), uploaded again"
	conflict      = "conflict (40001, 40P01), tried again"
	pinExpired    = "pin expired before its commit (40001)"
	putMetDelete  = "put: seen, deleted, stored anew"
	lookMetDelete = "look under lock: seen, deleted"
	pinMetDelete  = "pin: seen, deleted"
	pinWaited     = "pin waited for an arbitration"
	rowWaited     = "writer waited for a batch"
)

// What agents meet.
const (
	live       = "overdue, referred to since the mark"
	pinnedKey  = "overdue, pinned since the mark"
	locked     = "overdue, its row or key locked"
	leaseHeld  = "another agent had the lease"
	heldUp     = "held up by a writer that was waited for"
	terminated = "batch rolled back: session terminated"
	killed     = "batch rolled back: agent killed"
	takenOver  = "lease taken over from a killed agent"
	replaced   = "stopped in a batch, replaced, continued"
)

// counts counts what happened, by name and pool.
type counts struct {
	mu    sync.Mutex
	pools []string
	n     map[string]map[string]int64
}

// everywhere stands for what belongs to no pool.
const everywhere = ""

func newCounts(pools []*pool) *counts {
	c := &counts{n: map[string]map[string]int64{}}
	for _, p := range pools {
		c.pools = append(c.pools, p.name)
	}
	return c
}

func (c *counts) add(name, pool string, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n[name] == nil {
		c.n[name] = map[string]int64{}
	}
	c.n[name][pool] += n
}

func (c *counts) total(name string) (sum int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.n[name] {
		sum += n
	}
	return sum
}

// unmet returns the races that weren't met often enough yet.
func (c *counts) unmet() []string {
	return slices.DeleteFunc(slices.Clone(races), func(name string) bool { return c.total(name) >= enough })
}

// print writes a table: a line a name, a column a pool.
func (c *counts) print(w *strings.Builder, title string, names []string) {
	header := append([]string{title, "all"}, c.pools...)
	rows := [][]string{header}
	for _, name := range names {
		row := []string{name, strconv.FormatInt(c.total(name), 10)}
		c.mu.Lock()
		for _, pool := range c.pools {
			cell := ""
			if n := c.n[name][pool]; n > 0 {
				cell = strconv.FormatInt(n, 10)
			}
			row = append(row, cell)
		}
		c.mu.Unlock()
		rows = append(rows, row)
	}
	for _, row := range rows {
		fmt.Fprintf(w, "%-48s", row[0])
		for i, cell := range row[1:] {
			fmt.Fprintf(w, " %*s", max(8, len(header[i+1])), cell)
		}
		w.WriteString("\n")
	}
}
