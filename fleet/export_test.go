package fleet

import (
	"context"
	"time"

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
