package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/liveness"
)

// rowTier is a tier whose blobs are rows of the host's database. Q is how a
// transaction of that engine runs statements.
type rowTier[Q any] interface {
	// Lock locks rows; Look only looks.
	Lock(ctx context.Context, q Q, keys []blob.Key) ([]blob.Hold, error)
	Look(ctx context.Context, q Q, keys []blob.Key) ([]blob.Hold, error)
	Delete(ctx context.Context, q Q, keys []blob.Key) ([]blob.Deletion, error)
}

// kinder is a tier that knows the kind of its keys.
type kinder interface {
	fmt.Stringer
	Kind() blob.Kind
}

// resolveTiers looks every tier of the pool up and gathers all that is wrong. A
// tier that resolve can make nothing of is nil.
func resolveTiers[T interface {
	comparable
	kinder
}](p *Pool, resolve func(config.Tier) (T, finding.List, error),
) (tiers []T, found finding.List, err error) {
	var none T
	for _, t := range p.cfg.Blobs {
		table, more, err := resolve(t)
		if err != nil {
			return nil, nil, fmt.Errorf("look up tier %s: %w", t.Path, err)
		}
		found = append(found, more...)
		if table == none {
			continue
		}
		if len(tiers) > 0 {
			oneKind(&found, t.Path, tiers[0], table)
		}
		tiers = append(tiers, table)
		p.setKind(table.Kind())
	}
	return tiers, found, nil
}

// oneKind finds fault with a tier whose keys are of another kind than the
// pool's first one's: the two could never mean the same key.
func oneKind(found *finding.List, path string, first, tier kinder) {
	if first.Kind() != tier.Kind() {
		found.Add(finding.Misconfigured, path+".column", "the keys of %s are %s, those of %s are %s; the tiers of a pool share one kind of keys",
			tier, tier.Kind(), first, first.Kind())
	}
}

// tierSet offers a batch to every tier of the pool: a window row names none.
type tierSet[Q any] struct {
	tiers []rowTier[Q]
	held  []map[blob.Key]bool // a tier, what was locked in it
}

func newTierSet[Q any, T rowTier[Q]](tiers []T) tierSet[Q] {
	s := tierSet[Q]{held: make([]map[blob.Key]bool, len(tiers))}
	for i, t := range tiers {
		s.tiers = append(s.tiers, t)
		s.held[i] = map[blob.Key]bool{}
	}
	return s
}

func (s *tierSet[Q]) lock(ctx context.Context, q Q, keys []blob.Key) ([]blob.Hold, error) {
	return s.merge(keys, func(t rowTier[Q]) ([]blob.Hold, error) { return t.Lock(ctx, q, keys) })
}

func (s *tierSet[Q]) look(ctx context.Context, q Q, keys []blob.Key) ([]blob.Hold, error) {
	return s.merge(keys, func(t rowTier[Q]) ([]blob.Hold, error) { return t.Look(ctx, q, keys) })
}

// merge makes one hold a key of one a tier. A key that is busy in one tier is
// busy: it is deleted from all tiers that have it, or from none.
func (s *tierSet[Q]) merge(keys []blob.Key, ask func(rowTier[Q]) ([]blob.Hold, error)) ([]blob.Hold, error) {
	merged := make([]blob.Hold, len(keys))
	for i := range merged {
		merged[i].State = blob.Absent
	}
	for n, t := range s.tiers {
		holds, err := ask(t)
		if err != nil {
			return nil, err
		}
		if len(holds) != len(keys) {
			return nil, fmt.Errorf("%d keys were locked, %d asked for", len(holds), len(keys))
		}
		for i, h := range holds {
			m := &merged[i]
			m.Size += h.Size
			switch {
			case h.State == blob.Held:
				s.held[n][keys[i]] = true
				if m.State == blob.Absent {
					m.State = blob.Held
				}
			case h.State != blob.Absent:
				m.State = blob.Busy
			}
		}
	}
	return merged, nil
}

// errSuppressed means that a row that was locked and told to go stayed.
var errSuppressed = errors.New("the delete had no effect: a trigger or a rule of the application's suppresses it")

// delete deletes keys from every tier that holds them. The deletions are in the
// order of keys.
func (s *tierSet[Q]) delete(ctx context.Context, q Q, keys []blob.Key) ([]blob.Deletion, error) {
	sizes := make(map[blob.Key]int64, len(keys))
	for n, t := range s.tiers {
		var held []blob.Key
		for _, key := range keys {
			if s.held[n][key] {
				held = append(held, key)
			}
		}
		if len(held) == 0 {
			continue
		}
		deletions, err := t.Delete(ctx, q, held)
		if err != nil {
			return nil, err
		}
		if len(deletions) != len(held) {
			return nil, errSuppressed
		}
		for _, d := range deletions {
			sizes[d.Key] += d.Size
		}
	}
	deleted := make([]blob.Deletion, len(keys))
	for i, key := range keys {
		deleted[i] = blob.Deletion{Key: key, Size: sizes[key], Outcome: blob.Deleted}
	}
	return deleted, nil
}

// foldAnswers turns the sources' answers into verdicts.
func foldAnswers(answers []liveness.Answer, sources []liveness.Info) []verdict {
	verdicts := make([]verdict, len(answers))
	for i, a := range answers {
		switch {
		case a.Verdict == liveness.Unreferenced:
			verdicts[i] = verdict{cause: causeDead}
		case a.Source >= len(sources):
			verdicts[i] = verdict{cause: causeLive}
		case a.Empty:
			verdicts[i] = verdict{cause: causeLive, why: "source " + sources[a.Source].Name + " refers to nothing at the moment, which protects every key"}
		default:
			verdicts[i] = verdict{cause: causeLive, why: "source " + sources[a.Source].Name}
		}
	}
	return verdicts
}

func changedError(changed []string) error {
	if len(changed) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", strings.Join(changed, ", "), errChanged)
}
