package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"
)

// Options are what an agent is given beside its configuration.
type Options struct {
	Log   zerolog.Logger
	Clock Clock // nil: the machine's
	// The tracers see every statement that the agent runs.
	PostgresTracer pgx.QueryTracer
	SQLiteTracer   sqlitedb.Tracer
}

// Agent holds the pools of a configuration. It connects when a pool is first
// swept. Its methods may be called at once.
type Agent struct {
	cfg       *config.Validated
	opts      Options
	pools     []*Pool
	databases databases
	slots     chan struct{} // a sweep each
}

// sqliteBusy is how long one attempt waits for another writer.
const sqliteBusy = 5 * time.Second

// New makes an agent. It connects to nothing; an error means that a database's
// configuration can't be used at all, and names it.
func New(cfg *config.Validated, opts Options) (*Agent, error) {
	if opts.Clock == nil {
		opts.Clock = SystemClock{}
	}
	a := newAgent(cfg, opts)
	for _, poolCfg := range cfg.Pools() {
		p, err := a.newPool(poolCfg)
		if err != nil {
			return nil, errors.Join(err, a.Close())
		}
		p.firstOnHost = !slices.ContainsFunc(a.pools, func(other *Pool) bool { return other.cfg.Host == p.cfg.Host })
		a.pools = append(a.pools, p)
	}
	return a, nil
}

func newAgent(cfg *config.Validated, opts Options) *Agent {
	return &Agent{
		cfg: cfg, opts: opts, databases: databases{cfg: cfg, opts: opts},
		slots: make(chan struct{}, cfg.MaxConcurrentSweeps()),
	}
}

func (a *Agent) newPool(cfg config.Pool) (*Pool, error) {
	p := &Pool{cfg: cfg, clock: a.opts.Clock, log: a.opts.Log.With().Str("pool", cfg.Name).Logger()}
	p.local = newLocalPins(a.cfg, cfg, a.opts.Clock)
	db, err := a.databases.get(cfg, cfg.Host)
	if err != nil {
		return nil, err
	}
	switch {
	case db.postgres != nil:
		p.host, p.pace = &postgresHost{pool: p, db: db.postgres}, postgresPace.within(cfg.Limits.Batch)
		p.hostClock = &hostClock{own: p.clock, log: p.log, schema: cfg.Schema, ttl: cfg.Pins.TTL}
	case db.sqlite != nil:
		p.host, p.pace = &sqliteHost{pool: p, db: db.sqlite}, sqlitePace.within(cfg.Limits.Batch)
	default:
		return nil, fmt.Errorf("pool %s: no tier of it stands in a database", cfg.Name)
	}
	if err := a.addRenewal(p); err != nil {
		return nil, err
	}
	return p, a.addElsewhere(p)
}

// addElsewhere notes the databases that hold sources of the pool and aren't its
// host, each once.
func (a *Agent) addElsewhere(p *Pool) error {
	var names []string
	for _, s := range p.cfg.Liveness {
		if s.Database != p.cfg.Host && !slices.Contains(names, s.Database) {
			names = append(names, s.Database)
		}
	}
	for _, name := range names {
		db, err := a.databases.get(p.cfg, name)
		if err != nil {
			return err
		}
		p.elsewhere = append(p.elsewhere, func(ctx context.Context) (oracle, error) {
			if db.postgres != nil {
				return openPostgresOracle(ctx, p, name, db.postgres)
			}
			return openSQLiteOracle(ctx, p, name, db.sqlite)
		})
	}
	return nil
}

// Close closes every connection. No sweep may be running.
func (a *Agent) Close() error {
	for _, p := range a.pools {
		p.releasePins()
	}
	return a.databases.close()
}

// Pools returns the pools in the order of the configuration.
func (a *Agent) Pools() []*Pool { return slices.Clone(a.pools) }

// Pool returns the pool of that name.
func (a *Agent) Pool(name string) (*Pool, bool) {
	i := slices.IndexFunc(a.pools, func(p *Pool) bool { return p.Name() == name })
	if i < 0 {
		return nil, false
	}
	return a.pools[i], true
}

// database is one opened database, of either engine.
type database struct {
	postgres *pgdb.DB
	sqlite   *sqlitedb.DB
}

// databases opens what the pools name. Pools have limits of their own, so each
// has its own connections.
type databases struct {
	cfg    *config.Validated
	opts   Options
	opened []database
}

func (d *databases) get(pool config.Pool, name string) (database, error) {
	db, err := d.open(pool, name)
	if err == nil {
		d.opened = append(d.opened, db)
	}
	return db, err
}

// open is get of a database that the caller closes.
func (d *databases) open(pool config.Pool, name string) (database, error) {
	cfg, ok := d.cfg.Database(name)
	if !ok {
		return database{}, fmt.Errorf("pool %s: there is no database %q", pool.Name, name)
	}
	var db database
	var err error
	switch cfg.Engine {
	case config.Postgres:
		db.postgres, err = pgdb.Open(cfg.URL.Reveal(), pgdb.Options{
			Timeouts: pgdb.Timeouts{Lock: pool.Limits.LockTimeout, Statement: pool.Limits.StatementTimeout, Idle: pool.Limits.StatementTimeout},
			Tracer:   d.opts.PostgresTracer,
		})
	case config.SQLite:
		db.sqlite, err = sqlitedb.Open(cfg.Path, sqlitedb.Options{BusyTimeout: sqliteBusy, Tracer: d.opts.SQLiteTracer})
	}
	if err != nil {
		return database{}, fmt.Errorf("database %s: %w", name, err)
	}
	return db, nil
}

func (d *databases) close() error {
	var errs []error
	for _, db := range d.opened {
		if db.postgres != nil {
			db.postgres.Close()
		}
		if db.sqlite != nil {
			errs = append(errs, db.sqlite.Close())
		}
	}
	d.opened = nil
	return errors.Join(errs...)
}
