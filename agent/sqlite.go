package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/sqlite"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
	"github.com/alkblobs/gc-agent/liveness"
	"github.com/alkblobs/gc-agent/window"
)

// sqliteHost is an SQLite file that holds a pool's window and its blobs. The
// application is another process and goes on writing.
type sqliteHost struct {
	pool *Pool
	db   *sqlitedb.DB
}

func (h *sqliteHost) form() Form { return Durable }

// open takes the lease: a lock on a file beside the database.
func (h *sqliteHost) open(ctx context.Context, why purpose) (_ session, ok bool, err error) {
	s := &sqliteSession{pool: h.pool, cfg: h.pool.cfg, dry: why.dry()}
	defer func() {
		if !ok {
			err = errors.Join(err, s.Close(ctx))
		}
	}()
	acquire := map[purpose]func(string) (*fleet.FileLease, bool, error){preview: fleet.FileLockShare, write: fleet.FileLockAcquire}[why]
	if acquire != nil {
		if s.lease, ok, err = acquire(h.db.Path()); err != nil || !ok {
			return nil, false, err
		}
	}
	if s.conn, err = h.db.Conn(ctx); err != nil {
		return nil, false, err
	}
	if s.dry {
		if _, err := s.conn.Exec(ctx, "PRAGMA query_only = 1"); err != nil {
			return nil, false, fmt.Errorf("make the connection read-only: %w", err)
		}
	}
	return s, true, nil
}

// sqliteSession is the lease on an SQLite host.
type sqliteSession struct {
	pool  *Pool
	cfg   config.Pool
	conn  *sqlitedb.Conn
	lease *fleet.FileLease // nil in one that inspects
	dry   bool

	tiers     []*sqlite.Table
	sources   *liveness.SQLite
	hasWindow bool
	marking   sqliteMark

	keepersAway *fleet.FileLease // the mark of pins in memory, shared; nil without it
}

// Close closes the connection before it gives the lease back.
func (s *sqliteSession) Close(ctx context.Context) error {
	var errs []error
	if s.marking.spool != nil {
		errs = append(errs, s.marking.spool.close())
	}
	if s.conn != nil {
		errs = append(errs, s.conn.Close())
	}
	if s.keepersAway != nil {
		errs = append(errs, s.keepersAway.Release(ctx))
	}
	if s.lease != nil {
		errs = append(errs, s.lease.Release(ctx))
	}
	return errors.Join(errs...)
}

// Now reads the machine's clock: the file is on this machine, and so is every
// writer of it.
func (s *sqliteSession) Now(context.Context) (blob.Instant, error) {
	return blob.InstantOf(s.pool.clock.Now())
}

// Consult resolves tiers and sources in one read transaction.
func (s *sqliteSession) Consult(ctx context.Context) (found finding.List, err error) {
	err = s.conn.InTx(ctx, sqlitedb.Read, func(ctx context.Context, q sqlitedb.Querier) error {
		if found, err = s.resolveTiers(ctx, q); err != nil || len(s.tiers) == 0 {
			return err // without a tier no source can be judged
		}
		s.hasWindow, err = window.NewSQLite(q).CheckSchema(ctx)
		if err = notOurs(err, s.cfg.Path, &found); err != nil {
			return err
		}
		var targets []liveness.SQLiteTarget
		for _, t := range s.tiers {
			targets = append(targets, liveness.SQLiteTarget{Table: t.Name(), Key: t.KeyColumn()})
		}
		opts := liveness.Options{Kind: s.pool.Kind(), Enforce: s.cfg.Mode == config.ModeEnforce}
		sources, more, err := liveness.ResolveSQLite(ctx, q, opts, s.pool.sourcesIn(s.cfg.Host), targets)
		s.sources, found = sources, append(found, more...)
		return err
	})
	return found, err
}

func (s *sqliteSession) resolveTiers(ctx context.Context, q sqlitedb.Querier) (found finding.List, err error) {
	s.tiers, found, err = resolveTiers(s.pool, func(t config.Tier) (*sqlite.Table, finding.List, error) {
		return sqlite.Resolve(ctx, q, sqlite.Config{Path: t.Path, Table: t.Table.Name, Column: t.Column, Size: t.Size})
	})
	return found, err
}

// Evidence reads what the sources hold.
func (s *sqliteSession) Evidence(ctx context.Context) (Evidence, error) {
	return sqliteEvidence(ctx, s.sources, s.conn)
}

// Infos describes the host's sources.
func (s *sqliteSession) Infos() []liveness.Info { return s.sources.Sources() }

// AllowEmpty lets sources be empty for this sweep.
func (s *sqliteSession) AllowEmpty(empty []liveness.Info) { s.sources.AllowEmpty(empty) }

// Scanned says whether a source is read whole by every statement.
func (s *sqliteSession) Scanned() bool { return s.sources.Scanned() }

// EnsureSchema creates gc_window where it is missing.
func (s *sqliteSession) EnsureSchema(ctx context.Context) error {
	if s.dry {
		return nil
	}
	s.hasWindow = true
	return window.NewSQLite(s.conn).EnsureSchema(ctx)
}

// MaxBatch is any number: no lock is taken a key.
func (s *sqliteSession) MaxBatch() int { return 0 }

// Tidy has nothing to remove.
func (s *sqliteSession) Tidy(context.Context) error { return nil }

// Settle isn't needed: a batch holds the write lock, so no writer is open.
func (s *sqliteSession) Settle(context.Context, sleepFunc) (string, error) { return "", nil }

// InTx runs a step. One that may write takes the write lock at its beginning,
// so that nothing slips between the check and the delete.
func (s *sqliteSession) InTx(ctx context.Context, step step, fn func(context.Context, tx) error) error {
	access := sqlitedb.Write
	if s.dry || step == stepPreview {
		access = sqlitedb.Read
	}
	err := s.conn.InTx(ctx, access, func(ctx context.Context, q sqlitedb.Querier) error {
		return fn(ctx, &sqliteTx{session: s, q: q, tiers: newTierSet[sqlitedb.Querier](s.tiers)})
	})
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s: %w", step, err)
	if sqlitedb.Constraint(err) {
		// A deferred constraint speaks at the commit, and a trigger of the application's
		// may roll back the whole transaction: both may be one key's fault.
		return rejection{err}
	}
	return err
}

// sqliteTx is one transaction on the lease's connection.
type sqliteTx struct {
	session *sqliteSession
	q       sqlitedb.Querier
	tiers   tierSet[sqlitedb.Querier]
}

// LockSources locks nothing: the transaction has the only write lock of the file.
func (t *sqliteTx) LockSources(context.Context) error { return nil }

// Verify compares every table with what was consulted. The lease is a lock that
// this process holds until it gives it back.
func (t *sqliteTx) Verify(ctx context.Context) error {
	if err := sameFile(t.session.conn); err != nil {
		return err
	}
	var changed []string
	for _, tier := range t.session.tiers {
		same, err := tier.Same(ctx, t.q)
		if err != nil {
			return err
		}
		if !same {
			changed = append(changed, tier.String())
		}
	}
	more, err := t.session.sources.Changed(ctx, t.q)
	if err != nil {
		return err
	}
	return changedError(append(changed, more...))
}

func (t *sqliteTx) Window() deleteWindow { return window.NewSQLite(t.q) }

// Lock has nothing to lock: a batch has the write lock, and a preview only looks.
func (t *sqliteTx) Lock(ctx context.Context, keys []blob.Key) ([]blob.Hold, error) {
	return t.tiers.lock(ctx, t.q, keys)
}

func (t *sqliteTx) Look(ctx context.Context, keys []blob.Key) ([]blob.Hold, error) {
	return t.tiers.look(ctx, t.q, keys)
}

func (t *sqliteTx) Arbitrate(ctx context.Context, keys []blob.Key) ([]verdict, error) {
	answers, err := t.session.sources.Answers(ctx, t.q, keys)
	if err != nil {
		return nil, err
	}
	return t.session.pool.fold(t.session.sources, answers), nil
}

// Delete deletes inside a savepoint, which an error rolls back to.
func (t *sqliteTx) Delete(ctx context.Context, keys []blob.Key) ([]blob.Deletion, error) {
	if _, err := t.q.Exec(ctx, "SAVEPOINT gc_delete"); err != nil {
		return nil, fmt.Errorf("set a savepoint: %w", err)
	}
	deleted, err := t.tiers.delete(ctx, t.q, keys)
	end := "RELEASE gc_delete"
	if err != nil {
		end = "ROLLBACK TO gc_delete"
	}
	if _, endErr := t.q.Exec(ctx, end); endErr != nil {
		// Where the application rolled back the transaction, the savepoint is gone too.
		return nil, errors.Join(err, fmt.Errorf("end the savepoint: %w", endErr))
	}
	if sqlitedb.Constraint(err) || errors.Is(err, errSuppressed) {
		return nil, rejection{err}
	}
	return deleted, err
}

// sameFile fails once another file stands at the database's path.
func sameFile(conn *sqlitedb.Conn) error {
	replaced, err := conn.Replaced()
	if err == nil && replaced {
		err = changedError([]string{"the database file"})
	}
	return err
}

func sqliteEvidence(ctx context.Context, sources *liveness.SQLite, conn *sqlitedb.Conn) (e Evidence, err error) {
	run := func(ctx context.Context, fn func(context.Context, sqlitedb.Querier) error) error {
		return conn.InTx(ctx, sqlitedb.Read, fn)
	}
	err = run(ctx, func(ctx context.Context, q sqlitedb.Querier) error {
		e.Empty, err = sources.Empty(ctx, q)
		return err
	})
	if err != nil {
		return e, err
	}
	e.BadValue, err = sources.BadValue(ctx, run)
	return e, err
}
