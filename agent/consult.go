package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/liveness"
)

// MisconfiguredError means that the configuration doesn't fit the database:
// nothing was touched, and only a change of one of them helps.
type MisconfiguredError struct {
	Pool     string
	Findings finding.List
}

// Error returns the findings in one line.
func (e *MisconfiguredError) Error() string {
	return "pool " + e.Pool + ": " + e.Findings.Of(finding.Misconfigured)
}

// consult makes sure that every source can be read, completely, and that
// nothing about the sources speaks against a sweep. It changes nothing but, at
// its very end, a schema that is missing.
func (s *sweep) consult(ctx context.Context) error {
	if len(s.pool.cfg.Liveness) == 0 {
		return &abort{CauseNoLivenessSources, "no liveness source is registered, so nothing is known to be dead; register the tables that refer to the blobs under liveness:"}
	}
	if err := s.resolve(ctx); err != nil {
		return err
	}
	if err := s.weigh(ctx); err != nil {
		return err
	}
	if err := s.pool.protect(ctx); err != nil {
		return &abort{CauseProtectFailed, err.Error()}
	}
	if err := s.session.EnsureSchema(ctx); err != nil {
		return fmt.Errorf("ensure the schema of pool %s: %w", s.pool.cfg.Name, err)
	}
	return nil
}

// resolve looks everything up that is registered, and judges what it finds.
func (s *sweep) resolve(ctx context.Context) error {
	found, err := s.lookUp(ctx)
	if err != nil {
		return unreadable(ctx, err)
	}
	for _, f := range found {
		if f.Severity == finding.Warning {
			s.log.Warn().Str("path", f.Path).Msg(f.Message)
		}
	}
	switch found.Worst() {
	case finding.Misconfigured:
		return &MisconfiguredError{Pool: s.pool.cfg.Name, Findings: found}
	case finding.Unreadable:
		return &abort{CauseProtectFailed, found.Of(finding.Unreadable)}
	}
	return nil
}

// lookUp gathers everything that is wrong in all databases of the pool.
func (s *sweep) lookUp(ctx context.Context) (finding.List, error) {
	found, err := s.session.Consult(ctx)
	if err != nil {
		return found, err
	}
	if s.pool.Kind() == 0 {
		return found, nil // without a tier no source can be judged
	}
	for _, open := range s.pool.elsewhere {
		o, err := open(ctx)
		if err != nil {
			return found, err
		}
		s.elsewhere = append(s.elsewhere, o)
		more, err := o.Consult(ctx)
		found = append(found, more...)
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

// weigh looks at what the sources hold.
func (s *sweep) weigh(ctx context.Context) error {
	for _, r := range s.evidenceReaders() {
		e, err := r.Evidence(ctx)
		if err != nil {
			return unreadable(ctx, err)
		}
		if len(e.Empty) > 0 {
			if s.braked(config.BrakeEmptySource) {
				return &abort{CauseEmptySource, emptyDetail(e.Empty)}
			}
			// Somebody took the brake off knowing this. What turns empty from now on still
			// protects every key.
			r.AllowEmpty(e.Empty)
		}
		if e.BadValue != nil {
			return &abort{CauseProtectFailed, e.BadValue.String()}
		}
	}
	return nil
}

func emptyDetail(empty []liveness.Info) string {
	var names []string
	for _, info := range empty {
		names = append(names, fmt.Sprintf("%s (source %s)", info.Path, info.Name))
	}
	return "no row refers to anything in " + strings.Join(names, ", ") + "; if that is right, set allow_empty: true"
}

// evidenceReader is the resolved sources of one database.
type evidenceReader interface {
	Infos() []liveness.Info
	AllowEmpty(empty []liveness.Info)
	Evidence(ctx context.Context) (Evidence, error)
}

func (s *sweep) evidenceReaders() []evidenceReader {
	readers := []evidenceReader{s.session}
	for _, o := range s.elsewhere {
		readers = append(readers, o)
	}
	return readers
}

// unreadable turns an error that came before anything was decided into an abort:
// a source that can't be read, completely, protects every key. The end of ctx
// says nothing about the sources, and a fault stays one.
func unreadable(ctx context.Context, err error) error {
	if ctx.Err() != nil || errors.As(err, new(fault)) {
		return err
	}
	return &abort{CauseProtectFailed, err.Error()}
}

// fault is an error that stays until somebody does something about it.
type fault struct{ error }

func (f fault) Unwrap() error { return f.error }

func (s *sweep) closeElsewhere(ctx context.Context) {
	for _, o := range s.elsewhere {
		if err := o.Close(ctx); err != nil {
			// Its transactions only read.
			s.log.Debug().Err(err).Msg("close a source's connection")
		}
	}
}
