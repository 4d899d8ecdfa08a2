package agent

import (
	"context"
	"fmt"
	"sync"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/liveness"
	"github.com/alkblobs/gc-agent/window"
)

// StoreTier is a tier whose blobs stand in no database that the agent has a
// transaction on. The application writes to it meanwhile.
type StoreTier interface {
	// List returns the next page of at most n objects, in key order.
	List(ctx context.Context, after blob.Cursor, n int) (blob.Page, error)
	// Stat returns those of the keys that exist, in any order.
	Stat(ctx context.Context, keys []blob.Key) ([]blob.Object, error)
	// Delete removes each object that is still the version seen, and says what
	// became of each, in the order of seen. After an error that isn't known.
	Delete(ctx context.Context, seen []blob.Object) ([]blob.Deletion, error)
	Kind() blob.Kind
}

// inlineHost keeps the window of a pool that has no SQL host in memory. A crash
// forgets it, which only means that the next sweep stages anew.
type inlineHost struct {
	pool  *Pool
	tier  StoreTier
	lease sync.Mutex
}

func (h *inlineHost) form() Form { return Inline }

func (h *inlineHost) open(_ context.Context, why purpose) (session, bool, error) {
	h.pool.setKind(h.tier.Kind())
	s := &inlineSession{host: h, window: window.NewMemory(), release: func() {}, marked: map[blob.Key]blob.Object{}}
	if !why.leased() {
		return s, true, nil
	}
	if !h.lease.TryLock() {
		return nil, false, nil
	}
	s.release = sync.OnceFunc(h.lease.Unlock)
	return s, true, nil
}

// inlineSession is the lease on an inline pool, and its window.
type inlineSession struct {
	host    *inlineHost
	window  *window.Memory
	release func()

	cursor blob.Cursor
	spool  []blob.Key
	// marked are the candidates as they were listed. What is written again since
	// then is another blob, whose own wait hasn't begun.
	marked map[blob.Key]blob.Object
}

func (s *inlineSession) Close(context.Context) error {
	s.release()
	return nil
}

// Now reads the agent's clock: a deadline in memory is compared with nothing
// else.
func (s *inlineSession) Now(context.Context) (blob.Instant, error) {
	return blob.InstantOf(s.host.pool.clock.Now())
}

// Consult finds nothing: every source stands in a database of its own.
func (s *inlineSession) Consult(context.Context) (finding.List, error) { return nil, nil }

func (s *inlineSession) Evidence(context.Context) (Evidence, error) { return Evidence{}, nil }

func (s *inlineSession) EnsureSchema(context.Context) error { return nil }

func (s *inlineSession) Infos() []liveness.Info { return nil }

func (s *inlineSession) AllowEmpty([]liveness.Info) {}

func (s *inlineSession) Scanned() bool { return false }

// MaxBatch is any number: no lock is taken a key.
func (s *inlineSession) MaxBatch() int { return 0 }

// Tidy has nothing to remove.
func (s *inlineSession) Tidy(context.Context) error { return nil }

func (s *inlineSession) Settle(context.Context, sleepFunc) (string, error) { return "", nil }

// MarkPage lists one page and has every source asked about it.
func (s *inlineSession) MarkPage(ctx context.Context, elsewhere askFunc) (page markedPage, more bool, err error) {
	listed, err := s.host.tier.List(ctx, s.cursor, s.host.pool.cfg.Limits.Page)
	if err != nil {
		return page, false, fmt.Errorf("list a page: %w", err)
	}
	page.Scanned, page.Foreign = len(listed.Objects)+listed.Foreign, listed.Foreign
	keys := make([]blob.Key, len(listed.Objects))
	for i, o := range listed.Objects {
		keys[i] = o.Key
	}
	answers := make([]liveness.Answer, len(keys)) // without a source everything is kept
	if elsewhere != nil && len(keys) > 0 {
		if answers, err = elsewhere(ctx, keys); err != nil {
			return page, false, err
		}
	}
	fresh := make([]bool, len(keys))
	for i := range fresh {
		fresh[i] = true
	}
	s.host.pool.local.unpinned(keys, fresh)
	for i, a := range answers {
		switch {
		case a.Verdict != liveness.Unreferenced:
			page.Referenced++
		case fresh[i]:
			page.Candidates++
			s.spool = append(s.spool, keys[i])
			s.marked[keys[i]] = listed.Objects[i]
		}
	}
	s.cursor = listed.Next
	return page, listed.More, nil
}

// StagePage stages everything: it is in memory already.
func (s *inlineSession) StagePage(ctx context.Context, deadline blob.Instant) (staged int, more bool, err error) {
	rows := make([]window.Row, len(s.spool))
	for i, key := range s.spool {
		rows[i] = window.Row{Key: key, VisibleAfter: deadline}
	}
	s.spool = nil
	staged, err = s.window.StageKeepFirst(ctx, rows)
	return staged, false, err
}

// InTx runs fn. There is nothing to commit: what is in memory needs no recovery,
// and what is outside can't be rolled back.
func (s *inlineSession) InTx(ctx context.Context, step step, fn func(context.Context, tx) error) error {
	if err := fn(ctx, &inlineTx{session: s}); err != nil {
		return fmt.Errorf("%s: %w", step, err)
	}
	return nil
}

type inlineTx struct{ session *inlineSession }

// LockSources locks nothing: every source is in another database.
func (t *inlineTx) LockSources(context.Context) error { return nil }

// Verify has nothing to compare: the lease is a lock of this process, and the
// sources verify themselves whenever they answer.
func (t *inlineTx) Verify(context.Context) error { return nil }

func (t *inlineTx) Window() deleteWindow { return t.session.window }

// Lock only looks: nothing outside a database can be locked.
func (t *inlineTx) Lock(ctx context.Context, keys []blob.Key) ([]blob.Hold, error) {
	return t.Look(ctx, keys)
}

func (t *inlineTx) Look(ctx context.Context, keys []blob.Key) ([]blob.Hold, error) {
	objects, err := t.session.host.tier.Stat(ctx, keys)
	if err != nil {
		return nil, fmt.Errorf("look at objects: %w", err)
	}
	sizes := make(map[blob.Key]int64, len(objects))
	for _, o := range objects {
		sizes[o.Key] = o.Size
	}
	holds := make([]blob.Hold, len(keys))
	for i, key := range keys {
		holds[i].State = blob.Absent
		if size, ok := sizes[key]; ok {
			holds[i] = blob.Hold{State: blob.Held, Size: size}
		}
	}
	return holds, nil
}

// Arbitrate leaves the answer to the sources of other databases, of which an
// inline pool has at least one, or nothing would be known to be dead.
func (t *inlineTx) Arbitrate(_ context.Context, keys []blob.Key) ([]verdict, error) {
	verdicts := make([]verdict, len(keys))
	if !t.session.host.pool.silent(0) {
		return verdicts, nil
	}
	for i := range verdicts {
		verdicts[i].cause = causeDead
	}
	return verdicts, nil
}

// Delete deletes the very versions that were marked.
func (t *inlineTx) Delete(ctx context.Context, keys []blob.Key) ([]blob.Deletion, error) {
	seen := make([]blob.Object, len(keys))
	for i, key := range keys {
		seen[i] = t.session.marked[key]
	}
	deletions, err := t.session.host.tier.Delete(ctx, seen)
	if err != nil {
		return nil, fmt.Errorf("delete objects: %w", err)
	}
	if len(deletions) != len(keys) {
		return nil, fmt.Errorf("delete objects: %d asked for, %d answered", len(keys), len(deletions))
	}
	return deletions, nil
}
