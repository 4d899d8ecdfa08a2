package agent

import (
	"context"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/liveness"

	"github.com/jackc/pgx/v5"
)

// omit leaves protections of a batch on Postgres out. Only tests set any of it, to
// show that each protection is what stands between its race and a lost blob.
type omit struct {
	RowLocks     bool // the blobs' rows are looked at, not locked
	LocksFirst   bool // they are locked once it is decided
	Settle       bool // nobody is waited for
	OneStatement bool // each source is asked in a statement of its own
	AskAgain     bool // each of several databases is asked once
	OneSession   bool // the delete runs on another session than the lease's
	Lease        bool // nobody looks whether the lease is still held
	Keeper       bool // nobody looks whether another process keeps pins in memory
}

// answers asks the sources about keys.
func (s *postgresSession) answers(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]liveness.Answer, error) {
	if s.pool.without.OneStatement {
		return s.answersOfEach(ctx, q, keys)
	}
	return s.sources.Answers(ctx, q, keys)
}

func (s *postgresSession) answersOfEach(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]liveness.Answer, error) {
	merged := make([]liveness.Answer, len(keys))
	for n, source := range s.pool.sourcesIn(s.cfg.Host) {
		one, _, err := liveness.ResolvePostgres(ctx, q, liveness.Options{Kind: s.pool.Kind()}, []liveness.Source{source}, nil)
		if err != nil {
			return nil, err
		}
		answers, err := one.Answers(ctx, q, keys)
		if err != nil {
			return nil, err
		}
		for i, a := range answers {
			if n == 0 || merged[i].Verdict == liveness.Unreferenced {
				a.Source = n
				merged[i] = a
			}
		}
	}
	return merged, nil
}

// deleteOnAnother is Delete on a session that knows nothing of the batch.
func (t *postgresTx) deleteOnAnother(ctx context.Context, keys []blob.Key) (deleted []blob.Deletion, err error) {
	conn, err := t.session.pool.host.(*postgresHost).db.Dedicated(ctx)
	if err != nil {
		return nil, err
	}
	// A test's session, which ends with its connection.
	defer func() { _ = conn.Close(ctx) }()
	err = conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
		deleted, err = t.tiers.delete(ctx, tx, keys)
		return err
	})
	return deleted, err
}
