package agent

import "time"

// pace adapts the size of a batch to the time that the database takes for it,
// and rests between batches where the writers of the application have to wait
// for the whole batch.
type pace struct {
	limit, most int           // in keys
	target      time.Duration // of a batch
	rest        float64       // of a batch's time
	// least is where adapting ends: a batch costs something however small it is, and
	// where that alone is over the target, smaller ones only cost it more often.
	least int

	// scanned are limit and target where every batch has to read a source whole.
	scannedLimit  int
	scannedTarget time.Duration
}

// How a batch is paced, by what holds the blobs. On SQLite every writer of the
// application waits for the whole batch, so batches are short and followed by a
// rest, in which a writer that polls for the lock can get it. Nobody waits for a
// store.
var (
	postgresPace = pace{limit: 1000, least: 125, target: 250 * time.Millisecond, scannedLimit: 20_000, scannedTarget: time.Second}
	sqlitePace   = pace{limit: 250, least: 50, target: 50 * time.Millisecond, rest: 0.5, scannedLimit: 2_000, scannedTarget: 500 * time.Millisecond}
	storePace    = pace{limit: 1000, least: 125, target: 250 * time.Millisecond, scannedLimit: 20_000, scannedTarget: time.Second}
)

// within returns the pace for batches of at most most keys.
func (p pace) within(most int) pace {
	p.most = most
	p.limit = min(p.limit, most)
	return p
}

// enlarge adapts to sources that every batch reads from end to end. It doesn't
// where somebody asked for batches smaller than usual.
func (p *pace) enlarge() {
	if p.most < postgresPace.limit {
		return
	}
	p.limit, p.most, p.least = max(p.limit, p.scannedLimit), max(p.most, p.scannedLimit), p.scannedLimit/8
	p.target = max(p.target, p.scannedTarget)
}

// bound keeps batches to at most most keys; 0 is any number.
func (p *pace) bound(most int) {
	if most > 0 {
		p.most = min(p.most, most)
		p.limit = min(p.limit, p.most)
	}
}

// after takes in how long a batch took and returns how long to rest.
func (p *pace) after(took time.Duration) time.Duration {
	switch {
	case took > p.target:
		p.limit = max(min(p.least, p.limit), p.limit/2)
	case took < p.target/2:
		p.limit = min(p.most, p.limit*2)
	}
	return p.pause(took)
}

// pause returns how long to rest after a write that took so long.
func (p *pace) pause(took time.Duration) time.Duration {
	return time.Duration(p.rest * float64(took))
}

// shrink makes the next batch much smaller; false when it can't be.
func (p *pace) shrink() bool {
	if p.limit == 1 {
		return false
	}
	p.limit = max(1, p.limit/4)
	return true
}
