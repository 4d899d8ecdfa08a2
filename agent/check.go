package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/liveness"
)

// PoolCheck is what a look at a pool's configuration and databases found.
type PoolCheck struct {
	Pool     string
	Form     Form
	Mode     string
	Schedule string
	Next     time.Time
	Window   time.Duration
	Host     string // the database that holds the window; empty when inline
	Keys     string // the kind of the keys; empty where no tier could be resolved
	Sources  []liveness.Info
	Findings finding.List
	// Against is what of the sources' values would abort a sweep now.
	Against []Objection
}

// Objection is a reason for a sweep to abort: its cause, where in the configuration
// it belongs, and a sentence.
type Objection struct {
	Cause   Cause
	Path    string
	Message string
}

// Bad says whether a sweep would be refused or abort as things stand.
func (c *PoolCheck) Bad() bool {
	return c.Findings.Worst() > finding.Warning || len(c.Against) > 0
}

// Check looks at everything a sweep would consult, reads only, and gathers all
// that is wrong. It needs no lease. An error means that a database could not be
// asked at all.
func (p *Pool) Check(ctx context.Context) (check PoolCheck, err error) {
	defer p.recovered(&err)
	now := p.clock.Now()
	check = PoolCheck{
		Pool: p.cfg.Name, Form: p.host.form(), Mode: string(p.cfg.Mode), Schedule: p.cfg.Schedule.Spec,
		Next: p.cfg.Schedule.Next(now), Window: p.cfg.Window, Host: p.cfg.Host,
	}
	if len(p.cfg.Liveness) == 0 {
		check.Findings.Add(finding.Misconfigured, p.cfg.Path+".liveness", "no liveness source is registered, so nothing is known to be dead")
	}
	session, _, err := p.host.open(ctx, inspect)
	var bad *MisconfiguredError
	if errors.As(err, &bad) {
		check.Findings = append(check.Findings, bad.Findings...)
		return check, nil
	}
	if err != nil {
		return check, fmt.Errorf("open pool %s: %w", p.cfg.Name, err)
	}
	s := &sweep{pool: p, clock: p.clock, log: p.log, session: session}
	defer func() {
		s.closeElsewhere(ctx)
		if closeErr := session.Close(ctx); closeErr != nil && err == nil {
			err = fmt.Errorf("close pool %s: %w", p.cfg.Name, closeErr)
		}
	}()
	if err := p.warnSuperuser(ctx, session, &check.Findings); err != nil {
		return check, err
	}
	found, err := s.lookUp(ctx)
	check.Findings = append(check.Findings, found...)
	if err != nil {
		return check, err
	}
	if kind := p.Kind(); kind != 0 {
		check.Keys = kind.String()
	}
	if found.Worst() > finding.Warning {
		return check, nil
	}
	return check, s.describe(ctx, &check)
}

// describe adds what the resolved sources are and hold.
func (s *sweep) describe(ctx context.Context, check *PoolCheck) error {
	for _, r := range s.evidenceReaders() {
		check.Sources = append(check.Sources, r.Infos()...)
		e, err := r.Evidence(ctx)
		if err != nil {
			return fmt.Errorf("read the sources of pool %s: %w", s.pool.cfg.Name, err)
		}
		if s.braked(config.BrakeEmptySource) {
			for _, info := range e.Empty {
				check.Against = append(check.Against, Objection{CauseEmptySource, info.Path, emptyDetail([]liveness.Info{info})})
			}
		}
		if e.BadValue != nil {
			check.Against = append(check.Against, Objection{CauseProtectFailed, e.BadValue.Source.Path, e.BadValue.String()})
		}
	}
	return nil
}
