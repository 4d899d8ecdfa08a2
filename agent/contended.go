package agent

import (
	"context"
	"slices"

	"github.com/alkblobs/gc-agent/fleet"
)

const pinnedNow = "somebody is pinning it right now"

// namePoolHolder says of keys that are all contended whether that is because somebody
// pins very many keys at once, and who: it may be none of these.
func (t *postgresTx) namePoolHolder(ctx context.Context, decisions []fleet.Verdict, verdicts []verdict) error {
	if slices.ContainsFunc(decisions, func(d fleet.Verdict) bool { return d.Decision != fleet.Contended }) {
		return nil
	}
	by, ok, err := fleet.FindPoolHolder(ctx, t.tx, t.session.cfg.Schema)
	if err != nil {
		return err
	}
	why := pinnedNow
	switch {
	case ok:
		why = "somebody pins very many keys at once (" + by.String() + ")"
	case len(verdicts) > 1:
		why = "somebody is pinning it, or very many keys at once, right now"
	}
	for i := range verdicts {
		verdicts[i].why = why
	}
	return nil
}
