package agent

import (
	"context"
	"fmt"
	"slices"

	"github.com/alkblobs/gc-agent/agent/config"
)

// braked says whether the brake holds in this sweep.
func (s *sweep) braked(name config.Brake) bool {
	return s.pool.cfg.Brakes.Enabled(name) && !slices.Contains(s.opts.Override, name)
}

// brake stops a sweep that looks wrong, before it has deleted or staged
// anything.
func (s *sweep) brake(ctx context.Context) error {
	var staged int64
	err := s.inTx(ctx, stepPreview, func(ctx context.Context, tx tx) (err error) {
		staged, err = tx.Window().Count(ctx)
		return err
	})
	if err != nil {
		return unreadable(ctx, fmt.Errorf("count the window: %w", err))
	}
	if s.dry() {
		// They are still there, but would have left.
		staged -= s.rep.Unstaged
	}
	return s.brakeDead(s.candidates + staged)
}

// brakeDead compares what is dead, or was when it was staged, with the limits.
func (s *sweep) brakeDead(dead int64) error {
	b := s.pool.cfg.Brakes
	if s.braked(config.BrakeMaxDeadCount) && b.MaxDeadCount > 0 && dead > b.MaxDeadCount {
		return &abort{CauseMaxDeadCount, fmt.Sprintf("%d keys are dead, more than max_dead_count %d allows; "+
			"if that is right, raise it or pass --override %s once", dead, b.MaxDeadCount, CauseMaxDeadCount)}
	}
	if !s.braked(config.BrakeMaxDeadRatio) || dead < b.MinDeadKeys || s.rep.Scanned == 0 {
		return nil
	}
	if ratio := float64(dead) / float64(s.rep.Scanned); ratio > b.MaxDeadRatio {
		return &abort{CauseMaxDeadRatio, fmt.Sprintf("%d of %d keys (%.0f %%) are dead, more than max_dead_ratio %g allows: is a table that refers to blobs not registered, or a format wrong? "+
			"If it is right, raise the ratio or pass --override %s once", dead, s.rep.Scanned, 100*ratio, b.MaxDeadRatio, CauseMaxDeadRatio)}
	}
	return nil
}
