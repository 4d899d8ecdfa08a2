package agent

import (
	"context"
	"errors"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
	"github.com/alkblobs/gc-agent/liveness"

	"github.com/jackc/pgx/v5"
)

// postgresOracle asks the sources of a Postgres database that isn't the host.
// Its transactions only read.
type postgresOracle struct {
	pool    *Pool
	name    string // of the database
	conn    *pgdb.Conn
	db      *pgdb.DB
	sources *liveness.Postgres
}

func openPostgresOracle(ctx context.Context, pool *Pool, name string, db *pgdb.DB) (oracle, error) {
	conn, err := db.Dedicated(ctx)
	if err != nil {
		return nil, err
	}
	return &postgresOracle{pool: pool, name: name, conn: conn, db: db}, nil
}

func (o *postgresOracle) Close(ctx context.Context) error { return o.conn.Close(ctx) }

func (o *postgresOracle) Consult(ctx context.Context) (found finding.List, err error) {
	err = o.conn.InTx(ctx, pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) error {
		opts := o.pool.elsewhereOptions()
		opts.Denied = o.pool.denied(o.db, nil)
		o.sources, found, err = liveness.ResolvePostgres(ctx, tx, opts, o.pool.sourcesIn(o.name), nil)
		return err
	})
	return found, err
}

func (o *postgresOracle) Evidence(ctx context.Context) (Evidence, error) {
	return postgresEvidence(ctx, o.sources, o.conn.InTx)
}

func (o *postgresOracle) Settle(ctx context.Context, sleep sleepFunc) (string, error) {
	return liveness.SettlePostgres(ctx, o.conn, o.pool.cfg.Limits.SettleTimeout, sleep)
}

func (o *postgresOracle) Infos() []liveness.Info { return o.sources.Sources() }

// AllowEmpty lets sources be empty for this sweep.
func (o *postgresOracle) AllowEmpty(empty []liveness.Info) { o.sources.AllowEmpty(empty) }

// Scanned says whether a source is read whole by every statement.
func (o *postgresOracle) Scanned() bool { return o.sources.Scanned() }

func (o *postgresOracle) Answers(ctx context.Context, keys []blob.Key) (answers []liveness.Answer, err error) {
	err = o.conn.InTx(ctx, pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) (err error) {
		same := func() error {
			changed, err := o.sources.Changed(ctx, tx)
			return errors.Join(err, changedError(changed))
		}
		if err := same(); err != nil {
			return err
		}
		if answers, err = o.sources.Answers(ctx, tx, keys); err != nil {
			return err
		}
		// Once more: what was read can't become another before the transaction ends.
		return same()
	})
	return answers, err
}

// sqliteOracle asks the sources of an SQLite file that isn't the host.
type sqliteOracle struct {
	pool    *Pool
	name    string // of the database
	conn    *sqlitedb.Conn
	sources *liveness.SQLite
}

func openSQLiteOracle(ctx context.Context, pool *Pool, name string, db *sqlitedb.DB) (oracle, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	return &sqliteOracle{pool: pool, name: name, conn: conn}, nil
}

func (o *sqliteOracle) Close(context.Context) error { return o.conn.Close() }

func (o *sqliteOracle) Consult(ctx context.Context) (found finding.List, err error) {
	err = o.conn.InTx(ctx, sqlitedb.Read, func(ctx context.Context, q sqlitedb.Querier) error {
		o.sources, found, err = liveness.ResolveSQLite(ctx, q, o.pool.elsewhereOptions(), o.pool.sourcesIn(o.name), nil)
		return err
	})
	return found, err
}

func (o *sqliteOracle) Evidence(ctx context.Context) (Evidence, error) {
	return sqliteEvidence(ctx, o.sources, o.conn)
}

func (o *sqliteOracle) Settle(ctx context.Context, _ sleepFunc) (string, error) {
	return liveness.SettleSQLite(ctx, o.conn, o.pool.cfg.Limits.SettleTimeout)
}

func (o *sqliteOracle) Infos() []liveness.Info { return o.sources.Sources() }

// AllowEmpty lets sources be empty for this sweep.
func (o *sqliteOracle) AllowEmpty(empty []liveness.Info) { o.sources.AllowEmpty(empty) }

// Scanned says whether a source is read whole by every statement.
func (o *sqliteOracle) Scanned() bool { return o.sources.Scanned() }

func (o *sqliteOracle) Answers(ctx context.Context, keys []blob.Key) (answers []liveness.Answer, err error) {
	if err := sameFile(o.conn); err != nil {
		return nil, err
	}
	err = o.conn.InTx(ctx, sqlitedb.Read, func(ctx context.Context, q sqlitedb.Querier) error {
		changed, err := o.sources.Changed(ctx, q)
		if err := errors.Join(err, changedError(changed)); err != nil {
			return err
		}
		answers, err = o.sources.Answers(ctx, q, keys)
		return err
	})
	return answers, err
}

// elsewhereOptions are those of a database that holds sources, but not the blobs.
func (p *Pool) elsewhereOptions() liveness.Options {
	return liveness.Options{Kind: p.Kind(), Pool: p.cfg.Name, Enforce: p.cfg.Mode == config.ModeEnforce, Elsewhere: true}
}

// silent says that the host's database, with n sources, has no say: all the
// sources that there are stand elsewhere. A pool with no source at all isn't
// silent but knows of nothing that is dead.
func (p *Pool) silent(n int) bool { return n == 0 && len(p.elsewhere) > 0 }

// unreferenced is the host's predicate for a mark.
func (p *Pool) unreferenced(r registry, key liveness.KeyRef) string {
	if p.silent(r.Len()) {
		return "true"
	}
	return r.Unreferenced(key)
}

// registry is the resolved sources of one database, of either engine.
type registry interface {
	Len() int
	Unreferenced(key liveness.KeyRef) string
	Sources() []liveness.Info
}

// fold turns the answers of the host's sources into verdicts.
func (p *Pool) fold(r registry, answers []liveness.Answer) []verdict {
	if !p.silent(r.Len()) {
		return foldAnswers(answers, r.Sources())
	}
	verdicts := make([]verdict, len(answers))
	for i := range verdicts {
		verdicts[i].cause = causeDead
	}
	return verdicts
}

// sourcesIn returns the pool's sources in one database.
func (p *Pool) sourcesIn(database string) []liveness.Source {
	var sources []liveness.Source
	for _, s := range p.cfg.Liveness {
		if s.Database != database {
			continue
		}
		sources = append(sources, liveness.Source{
			Path: s.Path, Name: s.Name,
			Schema: s.Table.Schema, Table: s.Table.Name, Column: s.Column, Where: s.Where, Query: s.Query,
			Format: s.Format, Guard: liveness.Guard(s.Guard),
			AllowEmpty: s.AllowEmpty, IgnoreUnparseable: s.OnUnparseable == config.UnparseableIgnore,
		})
	}
	return sources
}
