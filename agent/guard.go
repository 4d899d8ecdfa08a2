package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/liveness"

	"github.com/jackc/pgx/v5"
)

// GuardOptions say which guard triggers of a pool are meant.
type GuardOptions struct {
	// Source names one source. Empty means those that would take a trigger as they
	// are configured: guard auto without a foreign key, and guard trigger.
	Source     string
	Deferrable bool
}

// Guard is a source's guard trigger, and what was done about it.
type Guard struct {
	Source string
	Table  string // quoted and qualified; empty for what has none
	Name   string // of the trigger
	// Skipped says why nothing is to be done.
	Skipped string
	// There says that the trigger was there already, as it should be.
	There bool
	// Statements make it.
	Statements []string
	// Dangling counts the rows that refer to a blob that isn't there, -1 where that
	// took too long. The trigger looks at none of them.
	Dangling int64
	// Err is why it could not be made.
	Err error
}

// GuardSQL plans the guard triggers and writes nothing. A pool whose blobs aren't
// in a Postgres database has none.
func (p *Pool) GuardSQL(ctx context.Context, opts GuardOptions) ([]Guard, error) {
	var guards []Guard
	err := p.planGuards(ctx, inspect, opts, func(_ *postgresSession, plans []liveness.TriggerPlan) error {
		for _, plan := range plans {
			guards = append(guards, opts.guard(plan))
		}
		return nil
	})
	return guards, err
}

// InstallGuards makes the guard triggers that are missing, or aren't as they should
// be, each in a transaction of its own. One that fails, which its Err says, keeps
// none of the others from being made. It is safe to repeat.
func (p *Pool) InstallGuards(ctx context.Context, opts GuardOptions) ([]Guard, error) {
	var guards []Guard
	err := p.planGuards(ctx, prepare, opts, func(s *postgresSession, plans []liveness.TriggerPlan) error {
		for _, plan := range plans {
			g := opts.guard(plan)
			if g.Skipped == "" {
				s.install(ctx, plan, &g)
			}
			guards = append(guards, g)
		}
		return nil
	})
	return guards, err
}

// guard says what is to be done about one source.
func (o GuardOptions) guard(plan liveness.TriggerPlan) Guard {
	g := Guard{Source: plan.Source, Table: plan.Table, Name: plan.Name, There: plan.There, Statements: plan.Statements, Skipped: plan.Why}
	if g.Skipped == "" && o.Source == "" && plan.Asked != liveness.Auto && plan.Asked != liveness.Trigger {
		g.Skipped = "it asks for guard: " + string(plan.Asked)
	}
	return g
}

// planGuards resolves the sources of the host's database, whatever guards them.
func (p *Pool) planGuards(ctx context.Context, why purpose, opts GuardOptions, fn func(*postgresSession, []liveness.TriggerPlan) error) error {
	if _, ok := p.host.(*postgresHost); !ok {
		return nil
	}
	return p.administer(ctx, why, func(s session) error {
		host, ok := s.(*postgresSession)
		if !ok {
			return nil
		}
		sources, err := host.resolveUnguarded(ctx)
		if err != nil {
			return err
		}
		var plans []liveness.TriggerPlan
		for _, plan := range sources.TriggerPlans(opts.Deferrable) {
			if opts.Source == "" || plan.Source == opts.Source {
				plans = append(plans, plan)
			}
		}
		return fn(host, plans)
	})
}

func (s *postgresSession) resolveUnguarded(ctx context.Context) (sources *liveness.Postgres, err error) {
	opts := s.sourceOptions()
	opts.AnyGuard = true
	var found finding.List
	err = s.conn.InTx(ctx, pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) error {
		if found, err = s.resolveTiers(ctx, tx); err != nil {
			return err
		}
		var more finding.List
		sources, more, err = liveness.ResolvePostgres(ctx, tx, opts, s.pool.sourcesIn(s.cfg.Host), s.targets())
		found = append(found, more...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look up pool %s: %w", s.cfg.Name, err)
	}
	if sources == nil || found.Worst() == finding.Misconfigured {
		return nil, &MisconfiguredError{Pool: s.cfg.Name, Findings: found}
	}
	s.sources = sources
	return sources, nil
}

// install makes one trigger and notes in g what came of it.
func (s *postgresSession) install(ctx context.Context, plan liveness.TriggerPlan, g *Guard) {
	g.Err = s.conn.InTx(ctx, pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) (err error) {
		g.Dangling, err = s.sources.Dangling(ctx, tx, plan)
		return err
	})
	if pgdb.Code(g.Err) == pgdb.QueryCanceled {
		g.Dangling, g.Err = -1, nil // it is for information alone
	}
	if g.Err != nil || g.There {
		return
	}
	g.Err = s.conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
		missing, err := s.sources.MissingToInstall(ctx, tx, plan)
		if err != nil {
			return err
		}
		if len(missing) > 0 {
			return errors.New(missing[0])
		}
		return plan.Install(ctx, tx)
	})
	if pgdb.Code(g.Err) == pgdb.LockNotAvailable {
		g.Err = tableInUse(plan.Table)
	}
}

func tableInUse(table string) error {
	return fmt.Errorf("%s is in use, and wasn't free within limits.lock_timeout; try again, or raise it", table)
}

// RemoveGuards drops the guard triggers of the pool, with their functions, or that
// of one source: what InstallGuards made, whether or not the source is configured
// still. Each goes in a transaction of its own; one that can't, which its Err says,
// keeps none of the others. Nothing to remove is no error.
func (p *Pool) RemoveGuards(ctx context.Context, source string) ([]Guard, error) {
	host, ok := p.host.(*postgresHost)
	if !ok {
		return nil, nil
	}
	conn, err := host.db.Dedicated(ctx)
	if err != nil {
		return nil, fmt.Errorf("open pool %s: %w", p.cfg.Name, err)
	}
	guards, err := p.removeGuards(ctx, conn, source)
	return guards, errors.Join(err, conn.Close(ctx))
}

func (p *Pool) removeGuards(ctx context.Context, conn *pgdb.Conn, source string) ([]Guard, error) {
	var installed []liveness.InstalledTrigger
	err := conn.InTx(ctx, pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) (err error) {
		installed, err = liveness.InstalledTriggers(ctx, tx, p.cfg.Schema)
		return err
	})
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for _, s := range p.cfg.Liveness {
		names[liveness.TriggerName(p.cfg.Schema, s.Name)] = s.Name
	}
	var guards []Guard
	for _, t := range installed {
		if source != "" && t.Name != liveness.TriggerName(p.cfg.Schema, source) {
			continue
		}
		g := Guard{Source: names[t.Name], Table: t.Table, Name: t.Name}
		g.Err = conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error { return t.Remove(ctx, tx, p.cfg.Schema) })
		switch pgdb.Code(g.Err) {
		case pgdb.LockNotAvailable:
			g.Err = tableInUse(t.Table)
		case pgdb.InsufficientPrivilege:
			g.Err = fmt.Errorf("%w; have the owner of the table and the function run it", g.Err)
		}
		guards = append(guards, g)
	}
	return guards, nil
}
