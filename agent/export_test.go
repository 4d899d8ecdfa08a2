package agent

// What the tests need of the package's inside.

// UpgradeGrace is how much longer the last renewal of pins lasts.
const UpgradeGrace = upgradeGrace

// IgnoreClockJumps leaves out the rule about jumps of the host's clock.
func (p *Pool) IgnoreClockJumps() {
	if p.hostClock != nil {
		p.hostClock.blind = true
	}
}

// ReleasePins ends that the process keeps pins of the pool in memory.
func (p *Pool) ReleasePins() { p.releasePins() }

type Omit = omit

// Omit leaves protections out of the sweeps that follow.
func (p *Pool) Omit(without Omit) { p.without = without }
