package torture_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// writerName is what writers call themselves to the server.
const writerName = "torture-writer"

// writer is one connection of the application, and its journal: what it was told.
type writer struct {
	run   *run
	pool  *pool
	owner string
	rng   *rand.Rand
	conn  *pgx.Conn
	refs  map[int64]reference
}

// reference is a row that its writer knows to be there.
type reference struct {
	table, key  string
	incarnation int64
	hidden      bool // soft-deleted
}

// plan is a transaction, drawn before it is tried, so that it can be tried again.
type plan struct {
	level    pgx.TxIsoLevel
	steps    []step
	rollback bool
}

// step is one operation and the dice for it.
type step struct {
	op    string
	key   string
	table string
	pick  int
	ttl   time.Duration
	rest  time.Duration // between the parts of it
	// making is how long the content takes to make, once the writer has seen whether
	// it is stored.
	making time.Duration
}

// The operations.
const (
	opUpload  = "upload"
	opRefer   = "refer"
	opRerefer = "refer to another"
	opMove    = "move"
	opDrop    = "drop"
	opHide    = "soft-delete"
	opShow    = "undelete"
	opPin     = "pin"
	opUnpin   = "unpin"
	opRenew   = "renew"
)

var (
	operations = []string{opUpload, opRefer, opRerefer, opMove, opDrop, opHide, opShow, opPin, opUnpin, opRenew}
	// SERIALIZABLE conflicts so often that little else would happen.
	levels = []pgx.TxIsoLevel{
		pgx.ReadCommitted, pgx.ReadCommitted, pgx.ReadCommitted, pgx.ReadCommitted,
		pgx.RepeatableRead, pgx.RepeatableRead, pgx.Serializable,
	}
)

// mostTries is how often a plan is tried; each time with pins that last twice as long.
const mostTries = 8

// mostRefs is about how many references a writer has: most keys are dead at any
// time.
const mostRefs = 2

// write writes until stop is closed.
func (w *writer) write(ctx context.Context, stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		if err := w.persist(ctx, w.draw(), stop); err != nil {
			return fmt.Errorf("writer %s: %w", w.owner, err)
		}
		if err := w.verify(ctx); err != nil {
			return fmt.Errorf("writer %s: verify: %w", w.owner, err)
		}
		if err := pause(ctx, time.Duration(w.rng.IntN(10))*time.Millisecond); err != nil {
			return err
		}
	}
}

// draw makes a plan. Some are held open for a long time between their steps.
func (w *writer) draw() plan {
	p := plan{level: levels[w.rng.IntN(len(levels))], rollback: w.rng.IntN(12) == 0}
	long := w.rng.IntN(50) == 0
	for range 1 + w.rng.IntN(3) {
		s := step{
			op: operations[w.rng.IntN(len(operations))], key: w.pool.keyOf(w.rng.IntN(keys)), table: tables[w.rng.IntN(len(tables))],
			pick: w.rng.IntN(1000), ttl: time.Duration(60+w.rng.IntN(250)) * time.Millisecond,
			rest: time.Duration(w.rng.IntN(4000)) * time.Microsecond, making: time.Duration(w.rng.IntN(50)) * time.Millisecond,
		}
		if s.op == opPin {
			s.ttl *= 3 // beyond the next sweep
		}
		switch {
		case long:
			s.rest *= 50
		case w.rng.IntN(5) == 0:
			s.rest *= 10
		}
		if pinning := s.op == opPin || s.op == opUnpin || s.op == opRenew; pinning && (w.pool.hold != byPin || w.rng.IntN(2) == 0) {
			s.op = opRefer
		}
		if s.op == opRefer && len(w.refs) >= mostRefs {
			s.op = opDrop
		}
		p.steps = append(p.steps, s)
	}
	return p
}

// persist tries a plan until it is through, as an application would.
func (w *writer) persist(ctx context.Context, p plan, stop <-chan struct{}) error {
	for n := 0; n < mostTries && !closed(stop); n++ {
		if w.conn == nil || w.conn.IsClosed() {
			if err := w.connect(ctx); err != nil {
				return err
			}
		}
		a := &attempt{writer: w, ctx: ctx, refs: maps.Clone(w.refs), number: w.run.numbers.Add(1), level: p.level}
		err := a.try(p)
		for i := range p.steps {
			p.steps[i].ttl *= 2
		}
		switch code := pgdb.Code(err); {
		case err == nil:
			return nil
		case code == pgdb.SerializationFailure && a.committing && w.pool.hold == byPin && p.level == pgx.ReadCommitted:
			// Nothing else fails a commit of that level so.
			w.run.counts.add(pinExpired, w.pool.name, 1)
		case code == pgdb.SerializationFailure, code == pgdb.DeadlockDetected:
			w.run.counts.add(conflict, w.pool.name, 1)
		case code == pgdb.ForeignKeyViolation:
			w.run.counts.add(refused, w.pool.name, 1)
		case pgdb.ConnectionLost(err):
			w.run.counts.add("writers' sessions lost", w.pool.name, 1)
		default:
			return err
		}
	}
	// A hot key under SERIALIZABLE may win every time: the next plan, then.
	w.run.counts.add("given up", w.pool.name, 1)
	return nil
}

func (w *writer) connect(ctx context.Context) (err error) {
	cfg, err := pgx.ParseConfig(w.run.url)
	if err != nil {
		return err
	}
	cfg.RuntimeParams["application_name"] = writerName
	w.conn, err = pgx.ConnectConfig(ctx, cfg)
	return err
}

func (w *writer) close(ctx context.Context) {
	if w.conn != nil {
		// A session that was ended can't be told to end.
		_ = w.conn.Close(ctx)
	}
}

// verify looks whether what the writer was told is true.
func (w *writer) verify(ctx context.Context) error {
	ids := slices.Sorted(maps.Keys(w.refs))
	if len(ids) == 0 || w.conn.IsClosed() {
		return nil
	}
	ref := w.refs[ids[w.rng.IntN(len(ids))]]
	if ref.hidden && !w.pool.constrained() {
		return nil
	}
	var have string
	err := w.conn.QueryRow(ctx, `SELECT coalesce(max(content), 'nothing') FROM `+w.pool.name+`.blobs WHERE key = $1`, ref.key).Scan(&have)
	if err != nil && pgdb.ConnectionLost(err) {
		return nil
	}
	if err == nil && have != content(ref.key, ref.incarnation) {
		w.run.violation("%s: a writer refers to blob %d of %s, and reads %s", w.pool.name, ref.incarnation, ref.key, have)
	}
	return err
}

// attempt is one try of a plan.
type attempt struct {
	*writer
	ctx    context.Context
	tx     pgx.Tx
	refs   map[int64]reference // as they will be
	number int64
	level  pgx.TxIsoLevel
	rest   time.Duration

	done       []string // operations
	claims     []claim
	pinned     []string
	renews     time.Duration // the longest
	committing bool
}

// try does the steps and commits, and takes in what it was told.
func (a *attempt) try(p plan) (err error) {
	if a.tx, err = a.conn.BeginTx(a.ctx, pgx.TxOptions{IsoLevel: p.level}); err != nil {
		return err
	}
	if a.pool.hold == byTableLock {
		// Before the snapshot, so that this is younger than the lock.
		lock := fmt.Sprintf(`LOCK TABLE %[1]s.%[2]s, %[1]s.%[3]s IN ROW EXCLUSIVE MODE`, a.pool.name, tables[0], tables[1])
		if _, err = a.tx.Exec(a.ctx, lock); err != nil {
			return err
		}
	}
	xid, err := a.steps(p)
	if err != nil || p.rollback {
		a.told(false)
		rollback := a.tx.Rollback(context.WithoutCancel(a.ctx))
		if err == nil {
			a.run.counts.add("rolled back", a.pool.name, 1)
			err = rollback
		}
		return err
	}
	a.committing = true
	committed, err := a.commit(xid)
	a.told(committed)
	if committed {
		a.writer.refs = a.refs
		for _, op := range a.done {
			a.run.counts.add(op, a.pool.name, 1)
		}
	}
	return err
}

func (a *attempt) told(committed bool) { a.run.tell(a.number, committed) }

// commit says whether it was committed. Where the answer got lost the server
// knows.
func (a *attempt) commit(xid string) (bool, error) {
	err := a.tx.Commit(a.ctx)
	if err == nil || !pgdb.ConnectionLost(err) {
		return err == nil, err
	}
	committed, asking := outcome(a.ctx, a.run.admin, xid)
	if asking != nil {
		return false, errors.Join(asking, err)
	}
	if committed {
		return true, nil
	}
	return false, err
}

func (a *attempt) steps(p plan) (xid string, err error) {
	for _, s := range p.steps {
		a.rest = s.rest
		if err := a.step(s); err != nil {
			return "", err
		}
		if err := a.pause(); err != nil {
			return "", err
		}
	}
	text, err := json.Marshal(said{Pool: a.pool.name, Number: a.number, Claims: a.claims, Pinned: a.pinned, Renews: a.renews.Nanoseconds()})
	if err != nil {
		return "", err
	}
	if err := a.tx.QueryRow(a.ctx, say, string(text)).Scan(&xid); err != nil {
		return "", err
	}
	return xid, a.pause()
}

func (a *attempt) pause() error { return pause(a.ctx, a.rest) }

// step does one operation. One that needs a reference does nothing without.
func (a *attempt) step(s step) error {
	switch s.op {
	case opUpload:
		if _, err := a.put(s.key, 0); err != nil {
			return err
		}
	case opRefer:
		return a.refer(s)
	case opPin:
		return a.pinOnly(s)
	case opUnpin:
		return a.exec(s.op, `SELECT `+ownSchema+a.pool.name+`.unpin($1::bytea, $2)`, s.key, []byte(a.owner))
	case opRenew:
		a.renews = max(a.renews, s.ttl)
		return a.exec(s.op, `SELECT `+ownSchema+a.pool.name+`.renew($1, $2)`, []byte(a.owner), s.ttl)
	default:
		return a.change(s)
	}
	a.done = append(a.done, s.op)
	return nil
}

// exec does an operation that is one statement, whose answer is of no interest.
func (a *attempt) exec(op, sql string, args ...any) error {
	a.done = append(a.done, op)
	_, err := a.tx.Exec(a.ctx, sql, args...)
	return err
}
