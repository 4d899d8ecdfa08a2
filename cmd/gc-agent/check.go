package main

import (
	"context"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/words"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
)

const checkHelp = `Check looks at everything that a sweep would consult, and only reads: where the
blobs are, what refers to them, how each reference is guarded and looked for,
what that leaves open, what would close it, and what would stop a sweep now.`

func newCheck(a *app) *cobra.Command {
	var names []string
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Look at configuration and databases, and say what is wrong",
		Long: checkHelp + exits("nothing stops a sweep", "a database can't be asked",
			"wrong usage, the configuration is wrong, or a sweep would be refused or abort", "") +
			"\n\nOf several pools the worst counts: 1, then 2.",
		Args: noArgs,
		RunE: a.action(func(ctx context.Context, _ []string) status { return a.check(ctx, names) }),
	}
	cmd.Flags().StringSliceVar(&names, "pool", nil, "check the pool of this `name` alone; may be repeated")
	a.jsonFlag(cmd, "print a JSON object a pool, each on one line")
	return cmd
}

// silent is for a command that reports the findings itself.
func silent(*app) zerolog.Logger { return zerolog.Nop() }

func (a *app) check(ctx context.Context, names []string) status {
	ctx, cancel := a.untilStopped(ctx)
	defer cancel()
	ag, pools, err := a.agent(silent, names...)
	if err != nil {
		return a.fail(err)
	}
	defer a.closeAgent(ag)
	end := done
	for i, p := range pools {
		if i > 0 && !a.json {
			end = end.worse(a.print("\n"))
		}
		end = end.worse(a.checkPool(ctx, p))
	}
	return end
}

func (a *app) checkPool(ctx context.Context, p *agent.Pool) status {
	check, err := p.Check(ctx)
	c := a.describe(check, err)
	var end status
	if a.json {
		end = a.printJSON(c)
	} else {
		end = a.print(c.text(time.Now()))
	}
	switch {
	case err != nil:
		a.stderr.line("pool %s: can't be checked: %v", p.Name(), a.explain(err))
		return end.worse(failed)
	case check.Bad():
		return end.worse(misused)
	}
	return end
}

// checked is a check with what only the configuration knows. Its fields are the
// JSON object's.
type checked struct {
	Pool     string    `json:"pool"`
	Ready    bool      `json:"ready"` // nothing stops a sweep
	Form     string    `json:"form"`
	Mode     string    `json:"mode"`
	Schedule string    `json:"schedule"`
	Next     time.Time `json:"next"`
	WindowMS int64     `json:"window_ms"`
	Host     *place    `json:"host"` // of the window; null when inline
	Keys     string    `json:"keys"`
	Tiers    []tier    `json:"tiers"`
	Sources  []source  `json:"sources"`
	Findings []found   `json:"findings"`
	Against  []against `json:"against"` // what of the sources' values stops a sweep
	Error    string    `json:"error,omitempty"`
}

type place struct {
	Database string `json:"database"`
	Engine   string `json:"engine"`
	Schema   string `json:"schema,omitempty"`
}

type tier struct {
	Type     string `json:"type"`
	Database string `json:"database"`
	Table    string `json:"table"`
	Column   string `json:"column"`
}

type source struct {
	Name       string `json:"name"`
	Path       string `json:"path"`
	Guard      string `json:"guard"`
	LeavesOpen string `json:"leaves_open"`
	WouldClose string `json:"would_close"`
	Probe      string `json:"probe"`
	Indexed    bool   `json:"indexed"`
	AllowEmpty bool   `json:"allow_empty"`
}

type against struct {
	Cause   string `json:"cause"` // of the abort
	File    string `json:"file"`
	Line    int    `json:"line"`
	Path    string `json:"path"`
	Message string `json:"message"`
}

type found struct {
	Severity string `json:"severity"` // warning or problem
	File     string `json:"file"`
	Line     int    `json:"line"`
	Path     string `json:"path"`
	Message  string `json:"message"`
}

func (a *app) describe(check agent.PoolCheck, err error) checked {
	cfg, _ := a.cfg.Pool(check.Pool)
	c := checked{
		Pool: check.Pool, Ready: err == nil && !check.Bad(), Form: string(check.Form), Mode: check.Mode,
		Schedule: check.Schedule, Next: check.Next, WindowMS: check.Window.Milliseconds(), Keys: check.Keys,
		Tiers: []tier{}, Sources: []source{}, Findings: []found{}, Against: []against{},
	}
	if db, ok := a.cfg.Database(check.Host); ok {
		c.Host = &place{Database: db.Name, Engine: db.Engine.String(), Schema: cfg.Schema}
	}
	for _, t := range cfg.Blobs {
		table := t.Table.Name
		if t.Table.Schema != "" {
			table = t.Table.Schema + "." + table
		}
		c.Tiers = append(c.Tiers, tier{t.Type, t.Database, table, t.Column})
	}
	for _, s := range check.Sources {
		c.Sources = append(c.Sources, source{s.Name, s.Path, string(s.Guard), s.LeavesOpen, s.WouldClose, s.Probe, s.Indexed, s.AllowEmpty})
	}
	for _, f := range check.Findings {
		p, severity := a.problem(check.Pool, f), "problem"
		if f.Severity == finding.Warning {
			severity = "warning"
		}
		c.Findings = append(c.Findings, found{severity, p.File, p.Line, p.Path, p.Message})
	}
	for _, o := range check.Against {
		p := a.cfg.Problem(o.Path, o.Message)
		c.Against = append(c.Against, against{string(o.Cause), p.File, p.Line, p.Path, p.Message})
	}
	if err != nil {
		c.Error = words.OneLine(a.explain(err).Error())
	}
	return c
}
