package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/window"
)

// execute takes the overdue rows, a batch at a time, arbitrates each key again
// and deletes what is dead. What is held up stays in the window for the next sweep,
// which is no failure, and the report says by what.
func (s *sweep) execute(ctx context.Context) error {
	run := s.executeDue
	if s.dry() {
		run = s.previewDue
	}
	err := run(ctx)
	if errors.Is(err, errHeldUp) {
		s.rep.Detail = err.Error()
		return nil
	}
	return err
}

// executeDue ends when nothing is overdue as of the cutoff.
func (s *sweep) executeDue(ctx context.Context) error {
	if s.scanned() {
		s.pace.enlarge()
	}
	s.pace.bound(s.session.MaxBatch())
	for asked := false; ; asked = true {
		if s.stopped() {
			return errStopped
		}
		// Before anything else: nobody is asked, or waited for, in vain.
		due, err := s.anythingDue(ctx)
		if err != nil || !due {
			return err
		}
		if err := s.held(ctx); err != nil {
			return err
		}
		if !asked {
			if err := s.pool.protect(ctx); err != nil {
				return &abort{CauseProtectFailed, err.Error()}
			}
		}
		if err := s.settle(ctx); err != nil {
			return err
		}
		if err := s.executeBatch(ctx); err != nil {
			return err
		}
	}
}

// previewDue decides about the overdue as executeDue would.
func (s *sweep) previewDue(ctx context.Context) error {
	due, err := s.anythingDue(ctx)
	if err != nil || !due {
		return err
	}
	if err := s.held(ctx); err != nil {
		return err
	}
	return s.preview(ctx)
}

// held is errHeldUp while pins that another process keeps, that nobody knows any
// more, or that a jump of the host's clock has ended early, may protect anything. Who
// only observes is told what a sweep would find then.
func (s *sweep) held(ctx context.Context) error {
	if s.pool.cfg.Mode != config.ModeEnforce {
		return nil
	}
	if err := s.checkKept(ctx, false); err != nil {
		return err
	}
	if why := s.pool.hostClock.holdup(); why != "" {
		return heldUp(why)
	}
	return nil
}

func heldUp(why string) error { return fmt.Errorf("%s; %w", why, errHeldUp) }

func (s *sweep) anythingDue(ctx context.Context) (due bool, err error) {
	err = s.inTx(ctx, stepPreview, func(ctx context.Context, tx tx) error {
		rows, err := tx.Window().Peek(ctx, s.cutoff, 1)
		due = len(rows) > 0
		return err
	})
	if err != nil {
		return false, fmt.Errorf("look for overdue keys of pool %s: %w", s.pool.cfg.Name, err)
	}
	return due, nil
}

// settle waits in every database that has a source whose guard is settle.
func (s *sweep) settle(ctx context.Context) error {
	holdup, err := s.session.Settle(ctx, s.sleep)
	for _, o := range s.elsewhere {
		if err == nil && holdup == "" {
			holdup, err = o.Settle(ctx, s.sleep)
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("settle pool %s: %w", s.pool.cfg.Name, err)
	case holdup != "":
		return heldUp(holdup)
	default:
		return nil
	}
}

// scanned says whether any source is read whole by every batch.
func (s *sweep) scanned() bool {
	return s.session.Scanned() || slices.ContainsFunc(s.elsewhere, func(o oracle) bool { return o.Scanned() })
}

// batch is what one transaction did about the rows that it took.
type batch struct {
	rows     []window.Row
	verdicts []verdict
	freed    []int64
	// left are rows that were taken and go back as they were.
	left []window.Row
}

// executeBatch runs one batch, or finds out that it has to be smaller.
func (s *sweep) executeBatch(ctx context.Context) error {
	began := s.clock.Now()
	var b batch
	err := s.underPinLocks(func() error {
		return s.inTx(ctx, stepExecute, func(ctx context.Context, tx tx) (err error) {
			b, err = s.batch(ctx, tx)
			return err
		})
	})
	switch {
	case errors.Is(err, errTooSlow) && !errors.Is(err, errSlowDelete) && s.scanned() && s.slow:
		// It takes as long for one key as for many.
		return fmt.Errorf("a source that is read whole takes longer than a batch may; create the index that check names; %w: %w", errHeldUp, err)
	case (errors.Is(err, errTooSlow) || isRejection(err)) && s.pace.shrink():
		s.slow = true
		return nil
	case isRejection(err), errors.Is(err, errSlowDelete):
		return s.setBack(ctx, err)
	case errors.Is(err, errChanged) && s.rep.Overdue == 0:
		return &abort{CauseProtectFailed, err.Error()}
	case err != nil:
		return fmt.Errorf("execute a batch of pool %s: %w", s.pool.cfg.Name, err)
	}
	s.account(b)
	s.slow = false
	return s.clock.Sleep(ctx, s.pace.after(s.clock.Now().Sub(began)))
}

// underPinLocks runs a transaction, within which the locks of pins in memory are
// taken, and gives them back when it has ended, one way or another: not sooner, or
// a pin would find a blob that is about to go.
func (s *sweep) underPinLocks(fn func() error) error {
	if s.locks = s.pool.local.begin(); s.locks != nil {
		defer func() {
			s.locks.Release()
			s.locks = nil
		}()
	}
	return fn()
}

// setBack sets aside the one key whose batch was rejected as a whole, or took too
// long, although the key stood alone in it.
func (s *sweep) setBack(ctx context.Context, why error) error {
	var b batch
	err := s.inTx(ctx, stepExecute, func(ctx context.Context, tx tx) (err error) {
		b = batch{}
		if err := tx.Verify(ctx); err != nil {
			return err
		}
		if b.rows, err = tx.Window().Take(ctx, s.cutoff, 1); err != nil || len(b.rows) == 0 {
			return err
		}
		b.verdicts, b.freed = []verdict{{cause: causeFailed, why: why.Error()}}, make([]int64, 1)
		back, err := s.goBack(b)
		if err != nil {
			return err
		}
		return tx.Window().Stage(ctx, back)
	})
	if err != nil {
		return fmt.Errorf("set a key of pool %s aside: %w", s.pool.cfg.Name, err)
	}
	s.account(b)
	return nil
}

// batch is the heart: take, lock, arbitrate, delete, in one transaction.
func (s *sweep) batch(ctx context.Context, tx tx) (b batch, err error) {
	if err := tx.LockSources(ctx); err != nil {
		return b, err
	}
	if err := s.verify(ctx, tx); err != nil {
		return b, err
	}
	if b.rows, err = tx.Window().Take(ctx, s.cutoff, s.pace.limit); err != nil || len(b.rows) == 0 {
		return b, err
	}
	keys := keysOf(b.rows)
	if err := s.pool.validKeys(keys); err != nil {
		return b, err
	}
	// The locks come first, so that the check's snapshot is younger than they are.
	holds, err := tx.Lock(ctx, keys)
	if err != nil {
		return b, err
	}
	n := s.withinBytes(holds)
	b.rows, b.left, keys, holds = b.rows[:n], b.rows[n:], keys[:n], holds[:n]
	if b.verdicts, err = s.arbitrate(ctx, tx, keys); err != nil {
		return b, err
	}
	// Once more: a source that was read can't become another before the commit, one
	// that is only about to be read can.
	if err := s.verify(ctx, tx); err != nil {
		return b, err
	}
	foldHolds(b.verdicts, holds)
	if err := s.delete(ctx, tx, keys, &b); err != nil {
		return b, err
	}
	back, err := s.goBack(b)
	if err != nil || len(back) == 0 {
		return b, err
	}
	return b, tx.Window().Stage(ctx, back)
}

// verify looks, within the batch, whether all that it relies on still holds.
func (s *sweep) verify(ctx context.Context, tx tx) error {
	if err := tx.Verify(ctx); err != nil {
		return err
	}
	return s.checkKept(ctx, true)
}

func keysOf(rows []window.Row) []blob.Key {
	keys := make([]blob.Key, len(rows))
	for i, row := range rows {
		keys[i] = row.Key
	}
	return keys
}

// withinBytes returns how many of the batch's blobs, at least one, stay within
// the limit on bytes.
func (s *sweep) withinBytes(holds []blob.Hold) int {
	var sum int64
	for i, h := range holds {
		if sum += h.Size; sum > s.pool.cfg.Limits.BatchBytes && i > 0 {
			return i
		}
	}
	return len(holds)
}

// foldHolds corrects the verdicts by what the locks found.
func foldHolds(verdicts []verdict, holds []blob.Hold) {
	for i, h := range holds {
		switch {
		case h.State == blob.Absent:
			verdicts[i] = verdict{cause: causeVanished}
		case h.State != blob.Held && verdicts[i].cause == causeDead:
			verdicts[i] = verdict{cause: causeLocked, why: "its row is locked by another transaction"}
		}
	}
}

// Singling out the keys that are rejected costs several attempts each, and each
// attempt may wait for a lock: it ends after so many keys, or so long. Those that
// were singled out don't come back in this sweep, so the next batch gets further.
const (
	mostRejected = 32
	patience     = 250 * time.Millisecond
)

// delete deletes the dead of the batch. A rejection is halved until the key
// that causes it stands alone; the others go.
func (s *sweep) delete(ctx context.Context, tx tx, keys []blob.Key, b *batch) error {
	b.freed = make([]int64, len(keys))
	began, rejected := s.clock.Now(), 0
	dead, at := selectDead(keys, b.verdicts)
	return halve(dead, at, func(keys []blob.Key, at []int) error {
		if rejected == mostRejected || rejected > 0 && s.clock.Now().Sub(began) > patience {
			for _, i := range at {
				b.verdicts[i] = verdict{cause: causeLeft}
			}
			return nil
		}
		deletions, err := tx.Delete(ctx, keys)
		if isRejection(err) && len(keys) == 1 {
			rejected++
			b.verdicts[at[0]] = verdict{cause: causeFailed, why: err.Error()}
			return nil
		}
		for i, d := range deletions {
			b.verdicts[at[i]], b.freed[at[i]] = afterDelete(d), d.Size
		}
		return err
	})
}

// afterDelete is the verdict on a key that was dead, once its delete has ended.
func afterDelete(d blob.Deletion) verdict {
	switch d.Outcome {
	case blob.Deleted:
		return verdict{cause: causeDead}
	case blob.Vanished:
		return verdict{cause: causeVanished}
	case blob.Changed:
		return verdict{cause: causeLive, why: "it was written again since it was looked at"}
	default:
		return verdict{cause: causeFailed, why: fmt.Sprint(d.Err)}
	}
}

// halve calls fn with all keys and, while that is rejected, with each half.
func halve(keys []blob.Key, at []int, fn func([]blob.Key, []int) error) error {
	if len(keys) == 0 {
		return nil
	}
	err := fn(keys, at)
	if !isRejection(err) {
		return err
	}
	mid := len(keys) / 2
	if err := halve(keys[:mid], at[:mid], fn); err != nil {
		return err
	}
	return halve(keys[mid:], at[mid:], fn)
}

// goBack returns the rows that return to the window. What was decided comes due
// after the cutoff, so that no key is executed twice in one sweep and the loop
// ends; what wasn't tried stays due.
func (s *sweep) goBack(b batch) ([]window.Row, error) {
	back := append([]window.Row(nil), b.left...)
	for i, v := range b.verdicts {
		var deadline blob.Instant
		var err error
		switch v.cause {
		case causeLocked:
			deadline, err = s.cutoff.Add(1)
		case causePinned:
			// A pin of which nothing is left by now still waits for the next sweep.
			if deadline, err = s.cutoff.Add(1); err == nil {
				deadline = max(deadline, v.until)
			}
		case causeFailed:
			deadline, err = s.cutoff.Add(s.pool.failures.next(b.rows[i].Key))
		case causeLeft:
			deadline = b.rows[i].VisibleAfter
		default:
			continue
		}
		if err != nil {
			return nil, err
		}
		back = append(back, window.Row{Key: b.rows[i].Key, VisibleAfter: deadline})
	}
	return back, nil
}

// account counts a batch that was committed.
func (s *sweep) account(b batch) {
	s.nameLocked(b)
	for i, v := range b.verdicts {
		if v.cause == causeLeft {
			continue
		}
		key := b.rows[i].Key
		s.rep.count(v.cause, b.freed[i])
		if v.cause == causeFailed {
			s.pool.failures.add(key)
			s.log.Error().Str("key", s.pool.display(key)).Str("error", v.why).Msg("key could not be deleted")
		} else {
			s.pool.failures.forget(key)
		}
		s.decided(key, v)
	}
	s.progress("execute", s.rep.Overdue)
}

// nameLocked names the first key of the batch that somebody has locked: one that is
// locked for ever is tried for ever, and somebody ought to know. One line a batch,
// since whoever pins very many keys at once locks them all.
func (s *sweep) nameLocked(b batch) {
	locked, first := 0, 0
	for i, v := range b.verdicts {
		if v.cause == causeLocked {
			if locked++; locked == 1 {
				first = i
			}
		}
	}
	if locked > 0 {
		s.log.Info().Str("key", s.pool.display(b.rows[first].Key)).Int("locked", locked).Str("detail", b.verdicts[first].why).
			Msg("locked by somebody; the next sweep tries again")
	}
}

// preview decides about the overdue without locking or writing anything.
func (s *sweep) preview(ctx context.Context) error {
	walk := windowWalk{page: s.pool.cfg.Limits.Batch}
	for !walk.done {
		if s.stopped() {
			return errStopped
		}
		var b batch
		err := s.inTx(ctx, stepPreview, func(ctx context.Context, tx tx) (err error) {
			b, err = s.previewPage(ctx, tx, &walk)
			return err
		})
		if err != nil {
			return fmt.Errorf("preview the overdue of pool %s: %w", s.pool.cfg.Name, err)
		}
		walk.turn()
		for i, v := range b.verdicts {
			s.rep.count(v.cause, b.freed[i])
			s.decided(b.rows[i].Key, v)
		}
	}
	return nil
}

func (s *sweep) previewPage(ctx context.Context, tx tx, walk *windowWalk) (b batch, err error) {
	b.rows, err = walk.rows(ctx, tx.Window(), func(row window.Row) bool { return row.VisibleAfter <= s.cutoff })
	if err != nil {
		return b, err
	}
	keys := keysOf(b.rows)
	if err := s.pool.validKeys(keys); err != nil {
		return b, err
	}
	holds, err := tx.Look(ctx, keys)
	if err != nil {
		return b, err
	}
	if b.verdicts, err = s.arbitrate(ctx, tx, keys); err != nil {
		return b, err
	}
	foldHolds(b.verdicts, holds)
	for _, h := range holds {
		b.freed = append(b.freed, h.Size)
	}
	return b, nil
}

func (s *sweep) decided(key blob.Key, v verdict) {
	s.log.Debug().Str("key", s.pool.display(key)).Stringer("verdict", v.cause).Str("detail", v.why).Msg("arbitrated")
	if s.opts.Decided != nil {
		s.opts.Decided(Decision{Key: key, Cause: v.cause.String(), Detail: v.why})
	}
}
