package agent

import (
	"context"
	"fmt"
	"slices"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/liveness"
	"github.com/alkblobs/gc-agent/window"
)

// mark finds the candidates: what nothing refers to, no pin protects and the
// window doesn't have. It only spools them.
func (s *sweep) mark(ctx context.Context) error {
	var ask askFunc
	if len(s.elsewhere) > 0 {
		ask = s.askElsewhere
	}
	for more := true; more; {
		if s.stopped() {
			return errStopped
		}
		var page markedPage
		err := s.timed(func() (err error) {
			page, more, err = s.session.MarkPage(ctx, ask)
			return err
		})
		if err != nil {
			return unreadable(ctx, fmt.Errorf("mark: %w", err))
		}
		s.rep.Scanned += int64(page.Scanned)
		s.rep.Foreign += int64(page.Foreign)
		s.rep.Referenced += int64(page.Referenced)
		s.candidates += int64(page.Candidates)
		s.progress("mark", s.rep.Scanned)
	}
	return s.unstage(ctx)
}

// unreferenced is what no source of the host's database refers to in a page.
type unreferenced struct {
	keys  []blob.Key
	fresh []bool // a key, whether it is neither staged nor pinned
}

// candidates asks the other databases, if there are any, about the page's keys,
// completes its counts and returns those that are to be spooled.
func (u unreferenced) candidates(ctx context.Context, elsewhere askFunc, page *markedPage) (candidates []blob.Key, err error) {
	answers := make([]liveness.Answer, len(u.keys))
	for i := range answers {
		answers[i].Verdict = liveness.Unreferenced
	}
	if elsewhere != nil {
		if answers, err = elsewhere(ctx, u.keys); err != nil {
			return nil, err
		}
	}
	page.Referenced = page.Scanned - page.Foreign
	for i, a := range answers {
		if a.Verdict != liveness.Unreferenced {
			continue
		}
		page.Referenced--
		if u.fresh[i] {
			candidates = append(candidates, u.keys[i])
		}
	}
	page.Candidates = len(candidates)
	return candidates, nil
}

// unstage takes keys out of the window that are referred to again, or whose blob
// is gone, unless they are due: those are executed, so that their counts stay exact.
func (s *sweep) unstage(ctx context.Context) error {
	walk := windowWalk{page: s.pool.cfg.Limits.Page}
	for !walk.done {
		if s.stopped() {
			return errStopped
		}
		var leave []blob.Key
		err := s.inTx(ctx, stepPreview, func(ctx context.Context, tx tx) (err error) {
			leave, err = s.leaving(ctx, tx, &walk)
			return err
		})
		if err == nil && !s.dry() && len(leave) > 0 {
			// Apart from the look, which may take long and then holds no lock: what has
			// changed meanwhile is merely staged anew.
			err = s.inTx(ctx, stepUnstage, func(ctx context.Context, tx tx) error {
				_, err := tx.Window().Unstage(ctx, leave)
				return err
			})
		}
		if err != nil {
			return unreadable(ctx, fmt.Errorf("look through the window: %w", err))
		}
		walk.turn()
		s.rep.Unstaged += int64(len(leave))
	}
	return nil
}

// leaving returns those of a page of the window that needn't wait any longer.
func (s *sweep) leaving(ctx context.Context, tx tx, walk *windowWalk) (leave []blob.Key, err error) {
	rows, err := walk.rows(ctx, tx.Window(), func(row window.Row) bool { return row.VisibleAfter > s.cutoff })
	if err != nil {
		return nil, err
	}
	keys := keysOf(rows)
	if err := s.pool.validKeys(keys); err != nil {
		return nil, fault{err}
	}
	verdicts, err := s.arbitrate(ctx, tx, keys)
	if err != nil {
		return nil, err
	}
	holds, err := tx.Look(ctx, keys)
	if err != nil {
		return nil, err
	}
	for i, v := range verdicts {
		// A blob that is gone has nothing to wait for; one that is put there again gets
		// a whole window of its own.
		if v.cause == causeLive || holds[i].State == blob.Absent {
			leave = append(leave, keys[i])
		}
	}
	return leave, nil
}

// windowWalk pages through a window in key order. A page may be read again, when
// its transaction is: only turn goes on to the next.
type windowWalk struct {
	page int
	from blob.Key
	next blob.Key
	last bool
	done bool
}

// rows returns those of the page's rows that are wanted.
func (w *windowWalk) rows(ctx context.Context, r windowReader, wanted func(window.Row) bool) ([]window.Row, error) {
	rows, err := r.List(ctx, w.from, w.page)
	if err != nil {
		return nil, err
	}
	if w.last = len(rows) < w.page; !w.last {
		w.next = window.After(rows[len(rows)-1].Key)
	}
	return slices.DeleteFunc(rows, func(row window.Row) bool { return !wanted(row) }), nil
}

func (w *windowWalk) turn() { w.from, w.done = w.next, w.last }

// arbitrate decides about keys. Pins in memory are looked at before the sources
// are: whoever refers, commits and unpins is seen by one or the other.
func (s *sweep) arbitrate(ctx context.Context, tx tx, keys []blob.Key) ([]verdict, error) {
	pins := s.pinned(keys)
	verdicts, err := s.arbitrateInDatabases(ctx, tx, keys)
	if err != nil {
		return nil, err
	}
	return verdicts, s.foldPinned(ctx, verdicts, pins)
}

// arbitrateInDatabases asks pins and sources in databases. Where sources stand in
// other databases every database but the last is asked twice: a row may move from
// one to another between the reads, and is then seen in one of them.
func (s *sweep) arbitrateInDatabases(ctx context.Context, tx tx, keys []blob.Key) ([]verdict, error) {
	verdicts, err := tx.Arbitrate(ctx, keys)
	if err != nil || len(s.elsewhere) == 0 {
		return verdicts, err
	}
	once := s.pool.without.AskAgain
	round := s.elsewhere
	if !once {
		round = slices.Concat(s.elsewhere, s.elsewhere[:len(s.elsewhere)-1])
	}
	for _, o := range round {
		err := again(keys, verdicts, func(dead []blob.Key) ([]verdict, error) {
			answers, err := o.Answers(ctx, dead)
			return foldAnswers(answers, o.Infos()), err
		})
		if err != nil {
			return nil, err
		}
	}
	if once {
		return verdicts, nil
	}
	return verdicts, again(keys, verdicts, func(dead []blob.Key) ([]verdict, error) { return tx.Arbitrate(ctx, dead) })
}

// again has those keys decided about once more that are dead so far.
func again(keys []blob.Key, verdicts []verdict, decide func(dead []blob.Key) ([]verdict, error)) error {
	dead, at := selectDead(keys, verdicts)
	decided, err := decide(dead)
	if err != nil {
		return err
	}
	if len(decided) != len(dead) {
		return fmt.Errorf("asked about %d keys, %d answered", len(dead), len(decided))
	}
	for i, v := range decided {
		verdicts[at[i]] = v
	}
	return nil
}

func selectDead(keys []blob.Key, verdicts []verdict) (dead []blob.Key, at []int) {
	for i, v := range verdicts {
		if v.cause == causeDead {
			dead, at = append(dead, keys[i]), append(at, i)
		}
	}
	return dead, at
}

// askElsewhere asks the sources of all other databases. A key is unreferenced
// when all of them say so.
func (s *sweep) askElsewhere(ctx context.Context, keys []blob.Key) ([]liveness.Answer, error) {
	merged := make([]liveness.Answer, len(keys))
	for n, o := range s.elsewhere {
		answers, err := o.Answers(ctx, keys)
		if err != nil {
			return nil, err
		}
		if len(answers) != len(keys) {
			return nil, fmt.Errorf("asked about %d keys, %d answered", len(keys), len(answers))
		}
		for i, a := range answers {
			if n == 0 || merged[i].Verdict == liveness.Unreferenced {
				merged[i] = a
			}
		}
	}
	return merged, nil
}
