package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/window"
)

// ErrSweeping means that a sweep of the pool is under way and has the lease.
var ErrSweeping = errors.New("another agent is sweeping this pool; try again when it is through")

// WindowRows calls fn with the pool's window, a page at a time, in key order.
// Rows may come and go meanwhile.
func (p *Pool) WindowRows(ctx context.Context, fn func([]window.Row) error) error {
	return p.administer(ctx, inspect, func(s session) error {
		walk := windowWalk{page: p.cfg.Limits.Page}
		for !walk.done {
			var rows []window.Row
			err := s.InTx(ctx, stepPreview, func(ctx context.Context, tx tx) (err error) {
				rows, err = walk.rows(ctx, tx.Window(), func(window.Row) bool { return true })
				return err
			})
			if err != nil {
				return err
			}
			if err := fn(rows); err != nil {
				return err
			}
			walk.turn()
		}
		return nil
	})
}

// DropKeys takes keys out of the window and returns how many were there. They
// are kept, and begin anew when a sweep finds them dead again.
func (p *Pool) DropKeys(ctx context.Context, keys []blob.Key) (dropped int, err error) {
	err = p.administer(ctx, write, func(s session) error {
		return s.InTx(ctx, stepUnstage, func(ctx context.Context, tx tx) error {
			dropped, err = tx.Window().Unstage(ctx, keys)
			return err
		})
	})
	return dropped, err
}

// DropAll takes every key out of the window, a page at a time.
func (p *Pool) DropAll(ctx context.Context) (dropped int64, err error) {
	err = p.administer(ctx, write, func(s session) error {
		for {
			var n int
			err := s.InTx(ctx, stepUnstage, func(ctx context.Context, tx tx) error {
				rows, err := tx.Window().List(ctx, "", p.cfg.Limits.Page)
				if err != nil {
					return err
				}
				n, err = tx.Window().Unstage(ctx, keysOf(rows))
				return err
			})
			if err != nil || n == 0 {
				return err
			}
			dropped += int64(n)
		}
	})
	return dropped, err
}

// administer runs fn in a session on the pool's host, once the tiers, and with
// them the kind of the keys, were looked up.
func (p *Pool) administer(ctx context.Context, why purpose, fn func(session) error) (err error) {
	if p.host.form() == Inline {
		return fmt.Errorf("pool %s has no window between two sweeps: it works inline", p.cfg.Name)
	}
	s, ok, err := p.host.open(ctx, why)
	if err != nil {
		return fmt.Errorf("open pool %s: %w", p.cfg.Name, err)
	}
	if !ok {
		return fmt.Errorf("pool %s: %w", p.cfg.Name, ErrSweeping)
	}
	defer func() {
		if closeErr := s.Close(ctx); closeErr != nil && err == nil {
			err = fmt.Errorf("close pool %s: %w", p.cfg.Name, closeErr)
		}
	}()
	found, err := s.Consult(ctx)
	if err != nil {
		return fmt.Errorf("look up pool %s: %w", p.cfg.Name, err)
	}
	if p.Kind() == 0 {
		return &MisconfiguredError{Pool: p.cfg.Name, Findings: found}
	}
	return fn(s)
}

// Spell writes a key of the pool for people, in a form that ParseKey reads. It
// knows how once the tiers were looked up.
func (p *Pool) Spell(key blob.Key) string { return p.Kind().Spell(key) }

// ParseKey reads a key as a person writes it.
func (p *Pool) ParseKey(ctx context.Context, s string) (key blob.Key, err error) {
	if err := p.ResolveKind(ctx); err != nil {
		return "", err
	}
	return p.Kind().ParseKey(s)
}

// ResolveKind finds out what the keys of the pool are, unless it is known.
func (p *Pool) ResolveKind(ctx context.Context) error {
	if p.Kind() != 0 {
		return nil
	}
	if host, inline := p.host.(*inlineHost); inline {
		p.setKind(host.tier.Kind())
		return nil
	}
	return p.administer(ctx, inspect, func(session) error { return nil })
}

// SchemaSQL returns the statements that make the pool's schema, for a role that
// may run them in the agent's place. It connects only for a pool with a fleet,
// whose functions depend on the tiers.
func (p *Pool) SchemaSQL(ctx context.Context) (ddl []string, err error) {
	switch p.host.(type) {
	case *sqliteHost:
		return window.SQLiteDDL(), nil
	case *postgresHost:
		ddl = append(window.PostgresDDL(p.cfg.Schema), ownerDDL(p.cfg))
		ddl = append(ddl, fleet.PinsDDL(p.cfg.Schema)...)
	}
	if !p.cfg.Fleet {
		return ddl, nil
	}
	err = p.administer(ctx, inspect, func(s session) error {
		if host, ok := s.(*postgresSession); ok {
			ddl = append(ddl, fleet.FunctionsDDL(p.cfg.Schema, host.pinTiers())...)
		}
		return nil
	})
	return ddl, err
}

// EnsureSchema makes the pool's schema where it is missing. It may be called by
// any number of agents at once, and while a sweep is under way.
func (p *Pool) EnsureSchema(ctx context.Context) error {
	return p.administer(ctx, prepare, func(s session) error {
		if err := s.EnsureSchema(ctx); err != nil {
			return fmt.Errorf("ensure the schema of pool %s: %w", p.cfg.Name, err)
		}
		return nil
	})
}

// Lines returns the findings that make the error, one a line.
func (e *MisconfiguredError) Lines() []finding.Finding {
	var lines []finding.Finding
	for _, f := range e.Findings {
		if f.Severity > finding.Warning {
			lines = append(lines, f)
		}
	}
	return lines
}
