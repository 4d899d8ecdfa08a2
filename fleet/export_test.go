package fleet

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
