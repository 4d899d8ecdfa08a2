package torture_test

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// The judge replays transactions in the order of their commit records in the
// write-ahead log, as a standby would, and looks at the state after each. That
// order is exact for what is asked here. Whoever decides anything because of a
// transaction has seen it, or has waited for a lock of its; Postgres shows a
// transaction to others, and gives its locks back, only after its commit record is
// written. So a decision that was right when it was made is right in this order,
// and a state that is wrong between two commits was there to be seen.

// transaction is one that was committed.
type transaction struct {
	at      int64 // when, in nanoseconds since 1970, by the server's clock
	writer  *said // nil: an agent's
	changes []change
}

// said is what a writer wrote into the log just before its commit: what it relies
// on, and from its commit on has been told.
type said struct {
	Pool   string   `json:"pool"`
	Number int64    `json:"number"` // of this attempt, unlike any other's
	Claims []claim  `json:"claims"`
	Pinned []string `json:"pinned"` // keys: whatever else it has written to gc_pins are renewals
	Renews int64    `json:"renews"` // for how long, in nanoseconds, the longest of those
}

// claim says that a key has a blob, and which.
type claim struct {
	Key         string `json:"key"`
	Incarnation int64  `json:"incarnation"`
}

// change is a row as it is now, or the key of one that is gone.
type change struct {
	pool, table string
	gone        bool
	row         map[string]string
}

// history is what the judge knows.
type history struct {
	pools      map[string]*state
	violations []string
	more       int // violations beyond those
	// What writers were told of their commits, and which were in the log.
	told   map[int64]bool
	logged map[int64]bool
}

// mostViolations are shown.
const mostViolations = 20

func newHistory(pools []*pool) *history {
	h := &history{pools: map[string]*state{}, told: map[int64]bool{}, logged: map[int64]bool{}}
	for _, p := range pools {
		h.pools[p.name] = &state{
			pool: p, blobs: map[string]int64{}, keys: map[int64]string{},
			refs: map[rowID]holder{}, held: map[string]int{}, pins: map[rowID]pin{},
		}
	}
	return h
}

func (h *history) violation(format string, args ...any) {
	if len(h.violations) == mostViolations {
		h.more++
		return
	}
	h.violations = append(h.violations, fmt.Sprintf(format, args...))
}

// lost is how many violations there were.
func (h *history) lost() int { return len(h.violations) + h.more }

// apply judges one transaction.
func (h *history) apply(tx transaction) {
	touched := map[*state]map[string]bool{}
	note := func(s *state, key string) {
		if touched[s] == nil {
			touched[s] = map[string]bool{}
		}
		touched[s][key] = true
	}
	for _, c := range tx.changes {
		s := h.pools[c.pool]
		note(s, h.change(s, tx, c))
	}
	if tx.writer != nil {
		h.logged[tx.writer.Number] = true
		for _, c := range tx.writer.Claims {
			if have := h.pools[tx.writer.Pool].blobs[c.Key]; have != c.Incarnation || have == 0 {
				h.violation("%s: a writer was told yes for blob %d of %s, and there is %d", tx.writer.Pool, c.Incarnation, c.Key, have)
			}
		}
	}
	for s, keys := range touched {
		for key := range keys {
			if s.held[key] > 0 && s.blobs[key] == 0 {
				h.violation("%s: %s is referred to and isn't there", s.pool.name, key)
			}
		}
	}
}

// change makes one change and returns the key that it is about.
func (h *history) change(s *state, tx transaction, c change) string {
	switch c.table {
	case "blobs":
		return h.changeBlob(s, tx, c)
	case "gc_pins":
		return h.changePin(s, tx, c)
	default:
		if tx.writer == nil {
			h.violation("%s: an agent changed a row of %s: %v", s.pool.name, c.table, c.row)
		}
		return s.changeReference(c)
	}
}

func (h *history) changeBlob(s *state, tx transaction, c change) string {
	key := c.row["key"]
	was := s.blobs[key]
	if was != 0 {
		delete(s.keys, was)
		delete(s.blobs, key)
	}
	if !c.gone {
		now := number(c.row["incarnation"])
		s.blobs[key], s.keys[now] = now, key
		if c.row["content"] != content(key, now) {
			h.violation("%s: blob %d of %s holds %q", s.pool.name, now, key, c.row["content"])
		}
		return key
	}
	switch until := s.pinnedUntil(key); {
	case s.held[key] > 0:
		h.violation("%s: blob %d of %s was deleted while %d references held it", s.pool.name, was, key, s.held[key])
	case until > tx.at:
		h.violation("%s: blob %d of %s was deleted with %d ns of a pin left", s.pool.name, was, key, until-tx.at)
	}
	return key
}

func (h *history) changePin(s *state, tx transaction, c change) string {
	key := c.row["key"]
	id := rowID{key, c.row["owner"]}
	if !c.gone {
		now := pin{key, number(c.row["expiry"])}
		h.judgePin(s, tx, s.pins[id], now)
		s.pins[id] = now
		return key
	}
	if left := s.pins[id].expiry - tx.at; left > 0 && tx.writer == nil {
		h.violation("%s: an agent removed a pin of %s with %d ns left", s.pool.name, key, left)
	}
	delete(s.pins, id)
	return key
}

// judgePin judges a pin that was written, over another of its key and owner or over
// none. A renewal came as long before its expiry as it renews for, at the most.
func (h *history) judgePin(s *state, tx transaction, was, now pin) {
	switch {
	case now.expiry < was.expiry:
		h.violation("%s: a pin of %s was shortened by %d ns", s.pool.name, now.key, was.expiry-now.expiry)
	case tx.writer == nil:
		h.violation("%s: an agent, which has no owner's pins to renew, wrote a pin of %s", s.pool.name, now.key)
	case slices.Contains(tx.writer.Pinned, now.key):
	case was.expiry <= now.expiry-tx.writer.Renews:
		h.violation("%s: a pin of %s was renewed that had expired for %d ns", s.pool.name, now.key, now.expiry-tx.writer.Renews-was.expiry)
	}
}

// tell notes what a writer knows of one of its commits.
func (h *history) tell(number int64, committed bool) { h.told[number] = committed }

// reconcile compares what writers were told so far with the log, which must have
// been read to a point after that.
func (h *history) reconcile() {
	for number, committed := range h.told {
		if committed != h.logged[number] {
			h.violation("a writer heard of its transaction %d that committed is %v, and the log says otherwise", number, committed)
		}
	}
	clear(h.told)
	clear(h.logged)
}

// state is one pool as of the last transaction.
type state struct {
	pool  *pool
	blobs map[string]int64 // key to incarnation
	keys  map[int64]string // and back
	refs  map[rowID]holder
	held  map[string]int // key to how many references hold it
	pins  map[rowID]pin
}

type (
	// rowID is a table and a row's id, or a key and an owner.
	rowID [2]string
	// holder is a row that refers to a key, and holds it unless it is only soft.
	holder struct {
		key   string
		holds bool
	}
	pin struct {
		key    string
		expiry int64
	}
)

func (s *state) changeReference(c change) string {
	id := rowID{c.table, c.row["id"]}
	was, existed := s.refs[id]
	if existed && was.holds {
		s.held[was.key]--
	}
	delete(s.refs, id)
	if c.gone {
		return was.key
	}
	now := holder{key: s.pool.referred(c.row["blob"], s.keys), holds: s.pool.constrained() || c.row["deleted_at"] == ""}
	s.refs[id] = now
	if now.holds {
		s.held[now.key]++
	}
	return now.key
}

func (s *state) pinnedUntil(key string) (until int64) {
	for _, p := range s.pins {
		if p.key == key {
			until = max(until, p.expiry)
		}
	}
	return until
}

// dead returns the keys that nothing holds or pins.
func (s *state) dead(at int64) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(s.blobs)), func(key string) bool {
		return s.held[key] > 0 || s.pinnedUntil(key) > at
	})
}

// content is what a blob holds: a delete and an upload of the same key in between
// show in it.
func content(key string, incarnation int64) string {
	return strings.Repeat(key+" ", 4) + strconv.FormatInt(incarnation, 10)
}

// number reads what the server wrote.
func number(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}
