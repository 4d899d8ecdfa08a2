package agent

import (
	"errors"
	"fmt"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
)

// longestInline is the longest window that a sweep can be expected to sit out.
const longestInline = time.Hour

// NewInline makes an agent of one pool whose blobs stand in tier and whose window
// is memory: a sweep stages, waits for the length of the window and executes. Its
// sources stand in databases of cfg. Of pool, which has to be one of cfg's or made
// from one, neither the host nor the tiers apply. It connects to nothing.
func NewInline(cfg *config.Validated, pool config.Pool, tier StoreTier, opts Options) (*Agent, error) {
	if pool.Window > longestInline {
		return nil, fmt.Errorf("pool %s: a window of over %s needs a database to live in", pool.Name, longestInline)
	}
	if opts.Clock == nil {
		opts.Clock = SystemClock{}
	}
	pool.Host, pool.Blobs = "", nil
	a := newAgent(cfg, opts)
	p := &Pool{cfg: pool, clock: opts.Clock, log: opts.Log.With().Str("pool", pool.Name).Logger(), pace: storePace.within(pool.Limits.Batch)}
	p.local = newLocalPins(cfg, pool, opts.Clock)
	p.host = &inlineHost{pool: p, tier: tier}
	if err := a.addElsewhere(p); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	a.pools = []*Pool{p}
	return a, nil
}
