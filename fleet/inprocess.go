package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/alkblobs/gc-agent/blob"
)

// InProcess holds the pins of one pool in memory, for a pool whose database has
// no table of pins. They are as good as the process: when it ends they are
// forgotten, so whoever deletes must not do so before the longest of them would
// have run out. Nobody but this process may delete the pool's blobs meanwhile.
//
// The protocol is that of the package comment. A pin takes the lock of its key,
// shared, before it looks for the blob; a batch tries the same lock, exclusively,
// before it looks at pins, and has it until its transaction has ended. The locks
// are of this process, and end with it.
//
// Its methods may be called at once.
type InProcess struct {
	opts    InProcessOptions
	without omit

	mu    sync.Mutex
	pins  map[blob.Key]map[Owner]time.Time // to the expiry
	rows  int
	bytes int
	locks map[blob.Key]*processLock
}

// InProcessOptions bound the pins in memory. All of them are needed.
type InProcessOptions struct {
	// Now reads a clock that never goes back, such as time.Now with its monotonic
	// reading. It is called under a lock and must not block.
	Now func() time.Time
	// MaxTTL is the longest that a pin may be asked to live.
	MaxTTL time.Duration
	// Rows and Bytes limit how many pins are held, and the length of their keys and
	// owners together.
	Rows, Bytes int
}

// ErrPinsFull means that there is no room for more pins in memory.
var ErrPinsFull = errors.New("no room for more pins in memory")

// ErrPinExpired means that a pin had run out by the time its blob was looked for.
var ErrPinExpired = errors.New("the pin has expired before its blob was looked for: pin it anew, for longer")

// NewInProcess makes an empty one.
func NewInProcess(opts InProcessOptions) *InProcess {
	return &InProcess{opts: opts, pins: map[blob.Key]map[Owner]time.Time{}, locks: map[blob.Key]*processLock{}}
}

// Pin pins keys for ttl from now, calls look with the distinct ones, sorted, and
// returns what it says of each key, in the order of keys: whether its blob is
// there. All keys are pinned, or none. A pin that is there already is never
// shortened.
//
// It waits for batches that have a key locked, as long as ctx lasts; then nothing
// was pinned. look is called under the locks, once the pins are in force, and has
// to see what was committed before it was called. After an error of look's the
// pins stay, and run out by themselves, and so they do where they ran out before
// look was through, which is ErrPinExpired.
//
// A key of more than blob.MaxKeyLen bytes is never deleted: it isn't pinned.
func (p *InProcess) Pin(ctx context.Context, keys []blob.Key, owner Owner, ttl time.Duration,
	look func(ctx context.Context, keys []blob.Key) ([]bool, error),
) ([]bool, error) {
	if err := p.checkPin(owner, ttl); err != nil {
		return nil, err
	}
	distinct := sorted(keys)
	if !p.without.KeyLock {
		locked, err := p.lockShared(ctx, distinct)
		defer p.unlockShared(locked)
		if err != nil {
			return nil, err
		}
	}
	expiry, err := p.record(distinct, owner, ttl)
	if err != nil {
		return nil, err
	}
	there, err := look(ctx, distinct)
	switch {
	case err != nil:
		return nil, fmt.Errorf("look for what was pinned: %w", err)
	case len(there) != len(distinct):
		return nil, fmt.Errorf("look for what was pinned: %d keys, %d answers", len(distinct), len(there))
	case !p.without.CommitCheck && !p.before(expiry):
		return nil, ErrPinExpired
	}
	found := make([]bool, len(keys))
	for i, key := range keys {
		at, _ := slices.BinarySearch(distinct, key)
		found[i] = there[at]
	}
	return found, nil
}

func sorted(keys []blob.Key) []blob.Key {
	distinct := slices.Clone(keys)
	slices.Sort(distinct)
	return slices.Compact(distinct)
}

func (p *InProcess) checkPin(owner Owner, ttl time.Duration) error {
	if len(owner) > maxOwnerLen {
		return fmt.Errorf("pin: owner is longer than %d bytes", maxOwnerLen)
	}
	return p.checkTTL(ttl)
}

func (p *InProcess) checkTTL(ttl time.Duration) error {
	if ttl <= 0 || ttl > p.opts.MaxTTL {
		return fmt.Errorf("a pin's time to live is above 0 and at most %s here, not %s", p.opts.MaxTTL, ttl)
	}
	return nil
}

// before says whether the instant is still to come.
func (p *InProcess) before(expiry time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return expiry.After(p.opts.Now())
}

// record writes the pins, all or none, and returns when the first of them expires.
func (p *InProcess) record(keys []blob.Key, owner Owner, ttl time.Duration) (time.Time, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	expiry := p.opts.Now().Add(ttl)
	if !p.room(keys, owner) {
		p.expire()
		if !p.room(keys, owner) {
			return expiry, fmt.Errorf("pin %d keys: %w: it holds %d pins of %d bytes and at most %d of %d",
				len(keys), ErrPinsFull, p.rows, p.bytes, p.opts.Rows, p.opts.Bytes)
		}
	}
	for _, key := range keys {
		if len(key) > blob.MaxKeyLen {
			continue
		}
		owners := p.pins[key]
		if owners == nil {
			owners = map[Owner]time.Time{}
			p.pins[key] = owners
		}
		was, known := owners[owner]
		if !known {
			p.rows, p.bytes = p.rows+1, p.bytes+len(key)+len(owner)
		}
		if !known || expiry.After(was) {
			owners[owner] = expiry
		}
	}
	return expiry, nil
}

// room says whether the pins fit in.
func (p *InProcess) room(keys []blob.Key, owner Owner) bool {
	rows, bytes := p.rows, p.bytes
	for _, key := range keys {
		if _, known := p.pins[key][owner]; !known && len(key) <= blob.MaxKeyLen {
			rows, bytes = rows+1, bytes+len(key)+len(owner)
		}
	}
	return rows <= p.opts.Rows && bytes <= p.opts.Bytes
}

// DeleteExpired removes the pins that have run out, which protect nothing.
func (p *InProcess) DeleteExpired() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expire()
}

func (p *InProcess) expire() {
	now := p.opts.Now()
	for key, owners := range p.pins {
		for owner, expiry := range owners {
			if !expiry.After(now) {
				p.remove(key, owner)
			}
		}
	}
}

func (p *InProcess) remove(key blob.Key, owner Owner) {
	delete(p.pins[key], owner)
	if len(p.pins[key]) == 0 {
		delete(p.pins, key)
	}
	p.rows, p.bytes = p.rows-1, p.bytes-len(key)-len(owner)
}

// Unpin takes pins back and says for each key, in the order of keys, whether
// there was a live one.
func (p *InProcess) Unpin(keys []blob.Key, owner Owner) []bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.opts.Now()
	removed := make([]bool, len(keys))
	for i, key := range keys {
		expiry, known := p.pins[key][owner]
		if known {
			p.remove(key, owner)
		}
		removed[i] = known && expiry.After(now)
	}
	return removed
}

// PinRenew moves the expiry of a live pin to ttl from now, and says whether there
// was one: an expired pin, or none, stays what it is. It never shortens.
func (p *InProcess) PinRenew(key blob.Key, owner Owner, ttl time.Duration) (bool, error) {
	if err := p.checkTTL(ttl); err != nil {
		return false, fmt.Errorf("renew pin: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.renew(p.pins[key], owner, ttl), nil
}

func (p *InProcess) renew(owners map[Owner]time.Time, owner Owner, ttl time.Duration) bool {
	now := p.opts.Now()
	was, known := owners[owner]
	if !known || !was.After(now) {
		return false
	}
	if expiry := now.Add(ttl); expiry.After(was) {
		owners[owner] = expiry
	}
	return true
}

// RenewOwner is PinRenew for all pins of an owner. It says how many were renewed
// and how many lost: live when this should have been done, which is due, and
// expired since. What has expired is removed, so that each is counted once.
func (p *InProcess) RenewOwner(owner Owner, due time.Time, ttl time.Duration) (renewed, lost int, err error) {
	if err := p.checkTTL(ttl); err != nil {
		return 0, 0, fmt.Errorf("renew pins: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, pins := range p.pins {
		switch was, known := pins[owner]; {
		case !known:
		case p.renew(pins, owner, ttl):
			renewed++
		default:
			p.remove(key, owner)
			if was.After(due) {
				lost++
			}
		}
	}
	return renewed, lost, nil
}

// Expire ends every live pin and says how many there were. They can't be renewed
// any more, only taken again.
func (p *InProcess) Expire() (expired int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.opts.Now()
	for _, pins := range p.pins {
		for owner, expiry := range pins {
			if expiry.After(now) {
				pins[owner] = now
				expired++
			}
		}
	}
	return expired
}

// PinCheck says whether any pin of the key is live at this moment: Protected or
// Unprotected, never Locked. It locks nothing and decides nothing.
func (p *InProcess) PinCheck(key blob.Key) PinState { return p.LivePins([]blob.Key{key})[0].State }

// LivePin is what the pins of one key say. The zero value keeps it.
type LivePin struct {
	State PinState
	// Left is for how long the last of the live pins lives on, 0 unless Protected. It
	// is a span and no instant, since the host's clock is another one.
	Left time.Duration
}

// LivePins says for each key, in the order of the keys, whether a pin protects
// it. It is for looking: it locks nothing, no key is Locked, and the answer may be
// out of date when it arrives.
func (p *InProcess) LivePins(keys []blob.Key) []LivePin {
	p.mu.Lock()
	defer p.mu.Unlock()
	pins := make([]LivePin, len(keys))
	for i, key := range keys {
		pins[i] = p.live(key)
	}
	return pins
}

func (p *InProcess) live(key blob.Key) LivePin {
	now := p.opts.Now()
	pin := LivePin{State: Unprotected}
	for _, expiry := range p.pins[key] {
		if expiry.After(now) {
			pin.State, pin.Left = Protected, max(pin.Left, expiry.Sub(now))
		}
	}
	return pin
}

// Keys returns the keys that have a live pin, sorted.
func (p *InProcess) Keys() []blob.Key {
	p.mu.Lock()
	defer p.mu.Unlock()
	var keys []blob.Key
	for key := range p.pins {
		if p.live(key).State == Protected {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// PinRow is one live pin.
type PinRow struct {
	Key   blob.Key
	Owner Owner
	// Left is for how long it lives on.
	Left time.Duration
}

// PinFilter says which live pins to list: those of a key and of an owner, nil for
// all, behind After in the order of keys and owners, and at most Limit of them.
type PinFilter struct {
	Key   *blob.Key
	Owner *Owner
	After *PinRow // its key and its owner
	Limit int
}

func comparePins(a, b PinRow) int {
	return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Owner, b.Owner))
}

// List returns live pins in the order of their keys and owners.
func (p *InProcess) List(f PinFilter) []PinRow {
	p.mu.Lock()
	now := p.opts.Now()
	var rows []PinRow
	for key, owners := range p.pins {
		if f.Key != nil && *f.Key != key {
			continue
		}
		for owner, expiry := range owners {
			row := PinRow{Key: key, Owner: owner, Left: expiry.Sub(now)}
			if row.Left > 0 && (f.Owner == nil || *f.Owner == owner) && (f.After == nil || comparePins(row, *f.After) > 0) {
				rows = append(rows, row)
			}
		}
	}
	p.mu.Unlock()
	slices.SortFunc(rows, comparePins)
	return rows[:min(len(rows), max(0, f.Limit))]
}

// processLock is the lock of one key, in the map only while somebody has it or
// waits for it.
type processLock struct {
	taken   bool          // by a batch
	shared  int           // pins that have it
	waiting int           // pins that wait for the batch
	freed   chan struct{} // closed when the batch gives it back
}

func (l *processLock) unused() bool { return !l.taken && l.shared == 0 && l.waiting == 0 }

// lockShared takes the locks of keys, in their order, and returns those it has,
// after an error too.
func (p *InProcess) lockShared(ctx context.Context, keys []blob.Key) ([]blob.Key, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, key := range keys {
		if err := p.wait(ctx, key); err != nil {
			return keys[:i], fmt.Errorf("wait for the batch that has key %d of %d locked: %w", i+1, len(keys), err)
		}
		p.locks[key].shared++
	}
	return keys, nil
}

// wait returns once no batch has the key, with the mutex held. Whoever waits is
// seen by batches, so that they leave the key alone from then on.
func (p *InProcess) wait(ctx context.Context, key blob.Key) error {
	l := p.locks[key]
	if l == nil {
		l = &processLock{}
		p.locks[key] = l
	}
	for l.taken {
		l.waiting++
		freed := l.freed
		p.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
		}
		p.mu.Lock()
		l.waiting--
		if err := ctx.Err(); err != nil {
			p.forget(key)
			return err
		}
	}
	return nil
}

// forget drops a lock that nobody uses.
func (p *InProcess) forget(key blob.Key) {
	if l := p.locks[key]; l != nil && l.unused() {
		delete(p.locks, key)
	}
}

func (p *InProcess) unlockShared(keys []blob.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range keys {
		p.locks[key].shared--
		p.forget(key)
	}
}

// BatchLocks are the key locks of one batch. It belongs to one goroutine.
type BatchLocks struct {
	pins *InProcess
	held map[blob.Key]struct{}
}

// Begin returns the locks of a batch that is about to begin: none yet.
func (p *InProcess) Begin() *BatchLocks {
	return &BatchLocks{pins: p, held: map[blob.Key]struct{}{}}
}

// Check tries the lock of each key, and says, in the order of keys, what keeps
// it. A key whose lock it didn't get, because somebody is pinning it right now, is
// Locked. It waits for nobody. The other keys nobody can pin before Release, so
// that who may refer to them is to be asked after Check and before Release. It may
// be called again, for keys that it has locked too.
func (b *BatchLocks) Check(keys []blob.Key) []LivePin {
	p := b.pins
	p.mu.Lock()
	defer p.mu.Unlock()
	pins := make([]LivePin, len(keys))
	for i, key := range keys {
		if b.lock(key) {
			pins[i] = p.live(key)
		}
	}
	return pins
}

func (b *BatchLocks) lock(key blob.Key) bool {
	if _, held := b.held[key]; held || b.pins.without.KeyLock {
		return true
	}
	if b.pins.locks[key] != nil {
		return false
	}
	b.pins.locks[key] = &processLock{taken: true, freed: make(chan struct{})}
	b.held[key] = struct{}{}
	return true
}

// Release gives the locks back. It is to be called once the transaction has
// ended, committed or rolled back, and not before; it may be repeated, and Check
// may follow.
func (b *BatchLocks) Release() {
	b.pins.mu.Lock()
	defer b.pins.mu.Unlock()
	for key := range maps.Keys(b.held) {
		l := b.pins.locks[key]
		l.taken = false
		close(l.freed)
		b.pins.forget(key)
	}
	clear(b.held)
}
