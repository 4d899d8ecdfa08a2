package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/postgres"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/liveness"
	"github.com/alkblobs/gc-agent/window"

	"github.com/jackc/pgx/v5"
)

// postgresHost is a Postgres database that holds a pool's window and its blobs.
type postgresHost struct {
	pool *Pool
	db   *pgdb.DB
}

func (h *postgresHost) form() Form { return Durable }

// open takes the lease on a connection of its own, on which the whole sweep
// then runs: when the session dies, the lease and the delete die together.
func (h *postgresHost) open(ctx context.Context, why purpose) (session, bool, error) {
	conn, err := h.db.Dedicated(ctx)
	if err != nil {
		return nil, false, err
	}
	s := &postgresSession{pool: h.pool, cfg: h.pool.cfg, db: h.db, conn: conn, dry: why.dry()}
	if !why.leased() {
		if err := fleet.CheckSession(conn); err != nil {
			return nil, false, errors.Join(h.refusal(err), conn.Close(ctx))
		}
		return s, true, nil
	}
	lease, ok, err := fleet.SweepLockAcquire(ctx, conn, h.pool.cfg.Schema)
	if err != nil || !ok {
		return nil, false, errors.Join(h.refusal(err), conn.Close(ctx))
	}
	s.lease = lease
	return s, true, nil
}

// refusal makes a pooler a mistake in the configuration. It is one for whatever
// purpose: what can't be swept should not look as if it could.
func (h *postgresHost) refusal(err error) error {
	if !errors.Is(err, fleet.ErrPooled) {
		return err
	}
	bad := &MisconfiguredError{Pool: h.pool.cfg.Name}
	bad.Findings.Add(finding.Misconfigured, h.pool.cfg.Path+".database", "database %s: %v", h.pool.cfg.Host, fleet.ErrPooled)
	return bad
}

// postgresSession is the lease on a Postgres host.
type postgresSession struct {
	pool  *Pool
	cfg   config.Pool
	db    *pgdb.DB
	conn  *pgdb.Conn
	lease *fleet.Lease // nil in one that inspects
	dry   bool

	tiers     []*postgres.Table
	sources   *liveness.Postgres
	hasWindow bool
	hasPins   bool
	maxBatch  int
	marking   postgresMark

	keepersAway bool // it has the mark of pins in memory, shared
}

// Close gives the lease back. The temporary table goes with the connection.
func (s *postgresSession) Close(ctx context.Context) error {
	var err error
	if s.lease != nil {
		err = s.lease.Release(ctx)
	}
	return errors.Join(err, s.conn.Close(ctx))
}

// Now reads clock_timestamp(), and notices when that has jumped.
func (s *postgresSession) Now(ctx context.Context) (blob.Instant, error) {
	if s.cfg.Mode != config.ModeEnforce {
		return s.pool.hostClock.read(ctx, s.conn) // which executes nothing anyway
	}
	return s.pool.hostClock.readAndMeasure(ctx, s.conn)
}

// Consult resolves tiers and sources in one read-only transaction, so that they
// are seen in one state of the catalogue.
func (s *postgresSession) Consult(ctx context.Context) (found finding.List, err error) {
	err = s.conn.InTx(ctx, pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) error {
		if found, err = s.resolveTiers(ctx, tx); err != nil {
			return err
		}
		if err := s.checkTiers(ctx, tx, &found); err != nil {
			return err
		}
		if err := s.checkOwn(ctx, tx, &found); err != nil || len(s.tiers) == 0 {
			return err // without a tier no source can be judged
		}
		more, err := s.resolveSources(ctx, tx)
		found = append(found, more...)
		return err
	})
	return found, err
}

func (s *postgresSession) resolveTiers(ctx context.Context, q pgdb.Querier) (found finding.List, err error) {
	s.tiers, found, err = resolveTiers(s.pool, func(t config.Tier) (*postgres.Table, finding.List, error) {
		return postgres.Resolve(ctx, q, postgresConfig(t), s.cfg.Mode == config.ModeEnforce)
	})
	return found, err
}

func postgresConfig(t config.Tier) postgres.Config {
	return postgres.Config{Path: t.Path, Schema: t.Table.Schema, Table: t.Table.Name, Column: t.Column, Size: t.Size}
}

func postgresTargets(tiers []*postgres.Table) (targets []liveness.Target) {
	for _, t := range tiers {
		targets = append(targets, liveness.Target{Relation: t.Relation(), Key: t.KeyColumn()})
	}
	return targets
}

func (s *postgresSession) resolveSources(ctx context.Context, q pgdb.Querier) (found finding.List, err error) {
	s.sources, found, err = liveness.ResolvePostgres(ctx, q, s.sourceOptions(), s.pool.sourcesIn(s.cfg.Host), s.targets())
	return found, err
}

func (s *postgresSession) sourceOptions() liveness.Options {
	return liveness.Options{
		Kind: s.pool.Kind(), Pool: s.cfg.Name, Schema: s.cfg.Schema, Enforce: s.cfg.Mode == config.ModeEnforce,
		Denied: s.pool.denied(s.db, s.targets()),
	}
}

func (s *postgresSession) targets() []liveness.Target { return postgresTargets(s.tiers) }

// Evidence reads what the sources hold.
func (s *postgresSession) Evidence(ctx context.Context) (Evidence, error) {
	return postgresEvidence(ctx, s.sources, s.conn.InTx)
}

// Infos describes the host's sources.
func (s *postgresSession) Infos() []liveness.Info { return s.sources.Sources() }

// AllowEmpty lets sources be empty for this sweep.
func (s *postgresSession) AllowEmpty(empty []liveness.Info) { s.sources.AllowEmpty(empty) }

// Scanned says whether a source is read whole by every statement.
func (s *postgresSession) Scanned() bool { return s.sources.Scanned() }

// EnsureSchema creates gc_window and gc_pins where they are missing, and, for a
// fleet, the functions to pin by.
func (s *postgresSession) EnsureSchema(ctx context.Context) (err error) {
	if !s.dry {
		if err := s.createSchema(ctx); err != nil {
			return err
		}
		s.hasWindow, s.hasPins = true, true
	}
	s.maxBatch, err = fleet.MaxBatch(ctx, s.conn)
	return err
}

func (s *postgresSession) createSchema(ctx context.Context) error {
	if err := window.NewPostgres(s.conn, s.cfg.Schema).EnsureSchema(ctx); err != nil {
		return err
	}
	if err := s.markOwner(ctx); err != nil {
		return err
	}
	if err := fleet.EnsureSchema(ctx, s.conn, s.cfg.Schema); err != nil || !s.cfg.Fleet {
		return err
	}
	return fleet.EnsureFunctions(ctx, s.conn, s.cfg.Schema, s.pinTiers())
}

func (s *postgresSession) pinTiers() []fleet.PinTier { return pinTiers(s.tiers) }

func pinTiers(tables []*postgres.Table) []fleet.PinTier {
	tiers := make([]fleet.PinTier, len(tables))
	for i, t := range tables {
		tiers[i] = fleet.PinTier{Table: t.Relation().SQL(), KeyColumn: t.KeyColumn().Name, Kind: t.Kind()}
	}
	return tiers
}

// MaxBatch is bounded by the server's lock table, which everybody shares.
func (s *postgresSession) MaxBatch() int { return s.maxBatch }

// expiredPins bounds what one sweep removes of the pins that have run out.
const expiredPins = 10_000

// Tidy removes pins that have run out. They protect nothing; they only take room.
// Those that a jump of the clock has made run out show for how long it matters,
// and those that the agent has failed to renew are still to be counted.
func (s *postgresSession) Tidy(ctx context.Context) error {
	if s.pool.renewal != nil && s.pool.renewal.behind.Load() {
		return nil
	}
	err := s.conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := fleet.DeleteExpired(ctx, tx, s.cfg.Schema, expiredPins); err != nil {
			return err
		}
		return s.pool.hostClock.steady(ctx, tx)
	})
	if errors.Is(err, errHeldUp) {
		return s.pool.hostClock.measure(ctx, s.conn)
	}
	return err
}

// Settle waits for open writers where a source of this database needs it.
func (s *postgresSession) Settle(ctx context.Context, sleep sleepFunc) (string, error) {
	if !s.sources.NeedsSettle() || s.pool.without.Settle {
		return "", nil
	}
	return liveness.SettlePostgres(ctx, s.conn, s.cfg.Limits.SettleTimeout, sleep)
}

const conflictRetries = 3

// InTx runs a step. A conflict with another transaction rolls the step back,
// whole, and runs it again.
func (s *postgresSession) InTx(ctx context.Context, step step, fn func(context.Context, tx) error) error {
	access := pgdb.Access(!s.dry)
	for attempt := 0; ; attempt++ {
		err := s.conn.InTx(ctx, access, func(ctx context.Context, ptx pgx.Tx) error {
			return fn(ctx, &postgresTx{session: s, step: step, tx: ptx, tiers: newTierSet[pgdb.Querier](s.tiers)})
		})
		switch code := pgdb.Code(err); {
		case err == nil:
			return nil
		case (code == pgdb.SerializationFailure || code == pgdb.DeadlockDetected) && attempt < conflictRetries:
			continue
		case code == pgdb.QueryCanceled && ctx.Err() == nil, code == pgdb.LockNotAvailable:
			return fmt.Errorf("%s: %w: %w", step, errTooSlow, err)
		default:
			return fmt.Errorf("%s: %w", step, err)
		}
	}
}

// postgresTx is one transaction on the lease's connection.
type postgresTx struct {
	session *postgresSession
	step    step
	tx      pgx.Tx
	tiers   tierSet[pgdb.Querier]
}

// LockSources locks what guard table_lock asks for. Who writes there and doesn't
// end in time holds up what is overdue.
func (t *postgresTx) LockSources(ctx context.Context) error {
	holdup, err := t.session.sources.LockTables(ctx, t.tx)
	if err == nil && holdup != "" {
		err = heldUp(holdup)
	}
	return err
}

// Verify looks for the own lease in pg_locks, compares every table with what was
// consulted, by OID, and sees whether the clock goes on as it did.
func (t *postgresTx) Verify(ctx context.Context) error {
	if !t.session.pool.without.Lease {
		if err := t.session.lease.Verify(ctx, t.tx); err != nil {
			return err
		}
	}
	var prints []pgdb.Fingerprint
	for _, tier := range t.session.tiers {
		prints = append(prints, tier.Fingerprint())
	}
	changed, err := pgdb.Changed(ctx, t.tx, prints)
	if err != nil {
		return err
	}
	more, err := t.session.sources.Changed(ctx, t.tx)
	if err != nil {
		return err
	}
	if err := changedError(append(changed, more...)); err != nil {
		return err
	}
	clock := t.session.pool.hostClock
	err = clock.steady(ctx, t.tx)
	if errors.Is(err, errHeldUp) {
		if unknown := clock.measure(ctx, t.tx); unknown != nil {
			return unknown
		}
	}
	return err
}

func (t *postgresTx) Window() deleteWindow {
	return window.NewPostgres(t.tx, t.session.cfg.Schema)
}

func (t *postgresTx) Lock(ctx context.Context, keys []blob.Key) ([]blob.Hold, error) {
	if without := t.session.pool.without; without.RowLocks || without.LocksFirst {
		return t.tiers.look(ctx, t.tx, keys)
	}
	holds, err := t.tiers.lock(ctx, t.tx, keys)
	if errors.Is(err, postgres.ErrTableHeld) {
		err = fmt.Errorf("%w; %w", err, errHeldUp)
	}
	return holds, err
}

func (t *postgresTx) Look(ctx context.Context, keys []blob.Key) ([]blob.Hold, error) {
	return t.tiers.look(ctx, t.tx, keys)
}

// Arbitrate decides under the key locks where it is followed by a delete. Else
// it only looks: locks would just keep the owners of pins waiting.
func (t *postgresTx) Arbitrate(ctx context.Context, keys []blob.Key) ([]verdict, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	if t.step != stepExecute || t.session.dry {
		return t.look(ctx, keys)
	}
	asked := &askedSources{session: t.session}
	decisions, err := fleet.ArbitrateBatch(ctx, t.tx, t.session.cfg.Schema, keys, asked)
	if err != nil {
		return nil, err
	}
	for i, d := range decisions {
		switch d.Decision {
		case fleet.Dead, fleet.Referenced: // as the sources say
		case fleet.Pinned:
			asked.verdicts[i] = pinned(d.Until)
		default:
			asked.verdicts[i] = verdict{cause: causeLocked, why: pinnedNow}
		}
	}
	return asked.verdicts, t.namePoolHolder(ctx, decisions, asked.verdicts)
}

func (t *postgresTx) look(ctx context.Context, keys []blob.Key) ([]verdict, error) {
	pins, err := fleet.LivePins(ctx, t.tx, t.session.cfg.Schema, keys)
	if err != nil {
		return nil, err
	}
	answers, err := t.session.sources.Answers(ctx, t.tx, keys)
	if err != nil {
		return nil, err
	}
	verdicts := t.session.pool.fold(t.session.sources, answers)
	for i, pin := range pins {
		if verdicts[i].cause == causeDead && pin.State != fleet.Unprotected {
			verdicts[i] = pinned(pin.Until)
		}
	}
	return verdicts, nil
}

func pinned(until blob.Instant) verdict {
	return verdict{cause: causePinned, until: until, why: "a pin"}
}

// askedSources shows the arbitration the sources of the host's database, and
// remembers what they said.
type askedSources struct {
	session  *postgresSession
	verdicts []verdict
}

// Unreferenced asks them all in one statement.
func (a *askedSources) Unreferenced(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]bool, error) {
	answers, err := a.session.answers(ctx, q, keys)
	if err != nil {
		return nil, err
	}
	a.verdicts = a.session.pool.fold(a.session.sources, answers)
	unreferenced := make([]bool, len(keys))
	for i, v := range a.verdicts {
		unreferenced[i] = v.cause == causeDead
	}
	return unreferenced, nil
}

// Delete deletes inside a savepoint, which an error rolls back to.
func (t *postgresTx) Delete(ctx context.Context, keys []blob.Key) (deleted []blob.Deletion, err error) {
	switch without := t.session.pool.without; {
	case without.OneSession:
		return t.deleteOnAnother(ctx, keys)
	case without.LocksFirst:
		if _, err := t.tiers.lock(ctx, t.tx, keys); err != nil {
			return nil, err
		}
	}
	err = pgx.BeginFunc(ctx, t.tx, func(sub pgx.Tx) error {
		deleted, err = t.tiers.delete(ctx, sub, keys)
		return err
	})
	switch {
	case err == nil:
		return deleted, nil
	case isPostgresRejection(err):
		return nil, rejection{err}
	case pgdb.Code(err) == pgdb.QueryCanceled:
		return nil, fmt.Errorf("%w: %w", errSlowDelete, err)
	default:
		return nil, err
	}
}

// isPostgresRejection says whether the error may be one row's fault. The classes
// that aren't end the connection or the transaction, whatever the key:
// https://www.postgresql.org/docs/15/errcodes-appendix.html
func isPostgresRejection(err error) bool {
	if errors.Is(err, errSuppressed) {
		return true
	}
	code := pgdb.Code(err)
	if code == "" || code == pgdb.QueryCanceled || code == pgdb.SerializationFailure || code == pgdb.DeadlockDetected {
		return false
	}
	switch code[:2] {
	case "08", "25", "40", "57":
		return false
	default:
		// A row that can't be read (XX001), and whatever a trigger raises, is one key's
		// fault too. What isn't costs a few keys their turn.
		return true
	}
}

// postgresEvidence reads, in short read-only transactions, what the sources hold.
func postgresEvidence(ctx context.Context, sources *liveness.Postgres, inTx func(context.Context, pgdb.Access, func(context.Context, pgx.Tx) error) error) (e Evidence, err error) {
	run := func(ctx context.Context, fn func(context.Context, pgx.Tx) error) error {
		return inTx(ctx, pgdb.ReadOnly, fn)
	}
	err = run(ctx, func(ctx context.Context, tx pgx.Tx) error {
		e.Empty, err = sources.Empty(ctx, tx)
		return err
	})
	if err != nil {
		return e, err
	}
	e.BadValue, err = sources.BadValue(ctx, run)
	return e, err
}
