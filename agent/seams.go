package agent

import (
	"context"
	"errors"
	"time"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/liveness"
	"github.com/alkblobs/gc-agent/window"
)

// host is where a pool's window lives.
type host interface {
	// open takes the pool's lease where the purpose needs it; ok is false while
	// another holds it.
	open(ctx context.Context, why purpose) (s session, ok bool, err error)
	// form names the form of the sweep that this topology leads to.
	form() Form
	// exists says whether the pool has the blobs of keys, in their order, as of some
	// moment after the call.
	exists(ctx context.Context, keys []blob.Key) ([]bool, error)
	// markPins takes the mark of who keeps the pool's pins in memory; who, not empty,
	// says who else has it.
	markPins(ctx context.Context) (mark pinMark, who string, err error)
}

// purpose is what a session is opened for. The zero value is the one that can
// do least.
type purpose uint8

const (
	inspect purpose = iota // read, without the lease
	prepare                // make the schema, without the lease
	preview                // under the lease, writing nothing and locking no row
	write                  // under the lease
)

func (p purpose) dry() bool    { return p == inspect || p == preview }
func (p purpose) leased() bool { return p == preview || p == write }

// session is the lease, and the connection it lives on. Whoever has one may
// sweep. It belongs to one goroutine.
type session interface {
	consulter
	marker
	transactor
	// Tidy removes what the agent's own tables no longer need, a bounded part of it.
	Tidy(ctx context.Context) error
	// KeepPinKeepersAway sees to it, until the session is closed, that no other
	// process keeps pins of the pool in memory; who, not empty, says that one does. It
	// may be repeated, which makes sure of it once more.
	KeepPinKeepersAway(ctx context.Context) (who string, err error)
	// Close gives the lease back and forgets what was spooled.
	Close(ctx context.Context) error
}

// consulter looks at the host's database before anything is decided.
type consulter interface {
	// Consult resolves the tiers and the sources of the host's database. What it
	// resolved is what the session works with from then on.
	Consult(ctx context.Context) (finding.List, error)
	// Evidence returns what of the resolved sources speaks against a sweep:
	// sources that are empty, a value that no probe finds.
	Evidence(ctx context.Context) (Evidence, error)
	// EnsureSchema creates the window where it is missing. A dry session only
	// notes whether it is there.
	EnsureSchema(ctx context.Context) error
	// AllowEmpty lets sources that are empty be so, for this sweep.
	AllowEmpty(empty []liveness.Info)
	// Infos describes the resolved sources.
	Infos() []liveness.Info
	// Scanned says whether a resolved source is read whole by every statement.
	Scanned() bool
	// MaxBatch is the most keys that one batch may lock, 0 for any number.
	MaxBatch() int
}

// Evidence is what the values of the sources say against a sweep.
type Evidence struct {
	Empty    []liveness.Info
	BadValue *liveness.BadValue
}

// marker walks the tiers and spools the candidates. Both methods go on where
// the last call ended.
type marker interface {
	// MarkPage marks the next page; more is false after the last. The sources of
	// other databases are asked through elsewhere, which is nil without any.
	MarkPage(ctx context.Context, elsewhere askFunc) (page markedPage, more bool, err error)
	// StagePage stages the next page of what was spooled; more is false after the
	// last. Keys that are in the window keep their deadline and don't count.
	StagePage(ctx context.Context, deadline blob.Instant) (staged int, more bool, err error)
}

// markedPage is what one page of the mark found, in blobs.
type markedPage struct {
	Scanned    int // all that stands there
	Foreign    int // what can't be a key of the pool
	Referenced int // what a source refers to
	Candidates int // what nothing refers to, no pin protects and the window hasn't
}

// askFunc answers for keys, in their order.
type askFunc func(ctx context.Context, keys []blob.Key) ([]liveness.Answer, error)

// transactor runs the steps of a sweep.
type transactor interface {
	// Now reads the host clock, the only maker of an instant that decides.
	Now(ctx context.Context) (blob.Instant, error)
	// InTx runs fn in one transaction, commits when fn returns nil, and rolls back
	// otherwise. fn may run again after a conflict, so it begins by forgetting what
	// it found. The step names the transaction in errors and traces.
	InTx(ctx context.Context, step step, fn func(context.Context, tx) error) error
	// Settle waits until every transaction that may have written a reference when
	// it was called has ended, where a source's guard is settle. It holds no lock
	// meanwhile. A non-empty holdup says who didn't end in time. An error of sleep,
	// which waits between two looks, ends it.
	Settle(ctx context.Context, sleep sleepFunc) (holdup string, err error)
}

type sleepFunc func(ctx context.Context, d time.Duration) error

// step names a transaction of the sweep's.
type step string

const (
	stepPreview step = "preview"
	stepUnstage step = "unstage"
	stepExecute step = "execute"
)

// tx is what a batch may do, bound to one transaction.
type tx interface {
	// LockSources locks the tables of sources whose guard is table_lock against
	// writers. It is the first lock of its transaction. An error that wraps errHeldUp
	// says that somebody writes there and didn't end in time.
	LockSources(ctx context.Context) error
	// Verify fails unless the lease is held by this very session and every tier and
	// source is still the object that was consulted. It is errHeldUp where the host's
	// clock has jumped.
	Verify(ctx context.Context) error
	Window() deleteWindow
	batchTx
}

// batchTx is what decides about a batch, in the order of a batch's steps.
type batchTx interface {
	// Lock locks the blobs of keys in every tier, in key order, waiting for nobody.
	Lock(ctx context.Context, keys []blob.Key) ([]blob.Hold, error)
	// Look finds out the same and locks nothing.
	Look(ctx context.Context, keys []blob.Key) ([]blob.Hold, error)
	// Arbitrate folds pins and the host's sources into one verdict a key. What it
	// sees is younger than what Lock locked.
	Arbitrate(ctx context.Context, keys []blob.Key) ([]verdict, error)
	// Delete deletes the blobs of keys, which were locked, from every tier that has
	// them, and returns what became of each, in the order of keys. After a rejection
	// it has deleted none of them and the transaction goes on.
	Delete(ctx context.Context, keys []blob.Key) ([]blob.Deletion, error)
}

// rejection is an error of Delete's that may be one key's fault: a constraint, a
// trigger, a lock, a right.
type rejection struct{ error }

func (r rejection) Unwrap() error { return r.error }

func isRejection(err error) bool {
	var r rejection
	return errors.As(err, &r)
}

// deleteWindow is the window of the pool, within a transaction.
type deleteWindow interface {
	// Take removes and returns the rows due at now, at most limit of them, the
	// oldest deadline first, sorted by key.
	Take(ctx context.Context, now blob.Instant, limit int) ([]window.Row, error)
	// Stage writes rows, over those that are there.
	Stage(ctx context.Context, rows []window.Row) error
	// Unstage removes rows and returns how many were there.
	Unstage(ctx context.Context, keys []blob.Key) (int, error)
	windowReader
}

// windowReader looks into a window. Without a schema it is empty.
type windowReader interface {
	// List returns at most n rows in key order, from a key on.
	List(ctx context.Context, from blob.Key, n int) ([]window.Row, error)
	// Peek returns what Take would, and removes nothing.
	Peek(ctx context.Context, now blob.Instant, limit int) ([]window.Row, error)
	Count(ctx context.Context) (int64, error)
}

// oracle is the sources of one database other than the host's.
type oracle interface {
	Consult(ctx context.Context) (finding.List, error)
	Evidence(ctx context.Context) (Evidence, error)
	AllowEmpty(empty []liveness.Info)
	Settle(ctx context.Context, sleep sleepFunc) (holdup string, err error)
	sourceReader
}

// sourceReader asks resolved sources.
type sourceReader interface {
	// Answers verifies that the sources are still what was consulted, and answers
	// for keys in one statement.
	Answers(ctx context.Context, keys []blob.Key) ([]liveness.Answer, error)
	Infos() []liveness.Info
	Scanned() bool
	Close(ctx context.Context) error
}

// verdict is the arbitration's answer for one key. The zero value keeps it and
// takes it out of the window.
type verdict struct {
	cause cause
	// until is a pin's expiry.
	until blob.Instant
	// why says it for people: the source that refers to the key.
	why string
}

// cause says what becomes of an overdue key.
type cause uint8

const (
	causeLive     cause = iota // a source refers to it: out of the window, kept
	causePinned                // back into the window until the pin's expiry
	causeLocked                // somebody holds it right now: back, next sweep
	causeFailed                // its delete was rejected: back, later
	causeVanished              // it was gone already: done
	causeDead                  // deleted
	causeLeft                  // not tried: back as it was, for the next batch
)

// String returns the name as the report has it.
func (c cause) String() string {
	switch c {
	case causePinned:
		return "pinned"
	case causeLocked:
		return "locked"
	case causeFailed:
		return "failed"
	case causeVanished:
		return "vanished"
	case causeDead:
		return "deleted"
	default:
		return "live"
	}
}

// errTooSlow marks a transaction that ran into one of its own time limits: a
// smaller one may not.
var errTooSlow = errors.New("ran into a time limit")

// errSlowDelete marks one whose delete it was that took too long.
var errSlowDelete = errors.New("the delete took too long")

// errHeldUp ends the execution, not the sweep: what is overdue waits for the next.
var errHeldUp = errors.New("what is overdue waits for the next sweep")

// errChanged marks a tier or a source that isn't the object that was consulted.
var errChanged = errors.New("changed since the sweep began")

// Clock is the agent's own clock. It paces and reports; it never makes anything
// deletable where a host has a clock.
type Clock interface {
	Now() time.Time
	// Sleep returns early, with ctx's error, when ctx ends.
	Sleep(ctx context.Context, d time.Duration) error
}

// SystemClock is the machine's clock.
type SystemClock struct{}

// Now returns the time, with its monotonic reading.
func (SystemClock) Now() time.Time { return time.Now() }

// Sleep waits for d.
func (SystemClock) Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
