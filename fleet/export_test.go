package fleet

import (
	"context"
	"time"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// What the tests need of the package's inside.

type Omit = omit

var (
	CheckPins            = checkPins
	ArbitrateOmitting    = arbitrate
	PinRenewOmitting     = pinRenew
	FunctionsDDLOmitting = functionsDDL
	KeyLockSQL           = keyLockSQL
	PoolLock             = poolLock
)

// Omit leaves protections out of the puts that follow.
func (jt *JointTx) Omit(without Omit) { jt.without = without }

// RenewAll is RenewOwners in the caller's transaction.
func RenewAll(ctx context.Context, q pgdb.Querier, schema string, owners []Renewal, ttl time.Duration, batch int) error {
	r := newRenewing(schema, owners, ttl, batch)
	for {
		if _, more, err := r.renew(ctx, q); err != nil || !more {
			return err
		}
	}
}

// NewInProcessOmitting leaves protections out.
func NewInProcessOmitting(opts InProcessOptions, without Omit) *InProcess {
	p := NewInProcess(opts)
	p.without = without
	return p
}

// Waiting says how many pins wait for a batch that has the key locked.
func (p *InProcess) Waiting(key blob.Key) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l := p.locks[key]; l != nil {
		return l.waiting
	}
	return 0
}

// Held says how many locks and pins are held.
func (p *InProcess) Held() (locks, rows, bytes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.locks), p.rows, p.bytes
}
