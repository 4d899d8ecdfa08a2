package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/words"

	"github.com/spf13/cobra"
)

const guardHelp = `Guard is about the triggers by which tables on Postgres that have no foreign key to
the blobs keep a reference from being left dangling. Nothing makes them but these
commands. Without --source they are about the sources that ask for guard: trigger,
and those that ask for none and have no foreign key.`

func newGuard(a *app) *cobra.Command {
	return group("guard", "Triggers that guard references: print, install or remove them", guardHelp,
		newGuardSQL(a), newGuardInstall(a), newGuardRemove(a))
}

func newGuardSQL(a *app) *cobra.Command {
	var opts agent.GuardOptions
	cmd := &cobra.Command{
		Use:   "sql [POOL]",
		Short: "Print the statements that make the triggers",
		Long: `SQL prints the statements that make the guard triggers, for the migrations of the
application: of one pool or of all. They may be run again. It only reads.` +
			exits("done", "a database can't be asked", "wrong usage, or the configuration is wrong", ""),
		Args: atMostOnePool,
		RunE: a.action(func(ctx context.Context, args []string) status {
			return a.guards(ctx, args, opts.Source, func(ctx context.Context, p *agent.Pool) status {
				guards, err := p.GuardSQL(ctx, opts)
				return a.printGuards(p, guards, err, a.guardSQL)
			})
		}),
	}
	a.guardFlags(cmd, &opts)
	return cmd
}

func newGuardInstall(a *app) *cobra.Command {
	var opts agent.GuardOptions
	cmd := &cobra.Command{
		Use:   "install [POOL]",
		Short: "Make the triggers",
		Long: `Install makes the guard triggers that are missing or aren't as they should be, of
one pool or of all, each in a transaction of its own. The role has to own the
tables. Rows whose blob isn't there stay as they are, and are counted. It may be
repeated.` + exits("done", "one could not be made, which is said for each", "wrong usage, or the configuration is wrong", ""),
		Args: atMostOnePool,
		RunE: a.action(func(ctx context.Context, args []string) status {
			return a.guards(ctx, args, opts.Source, func(ctx context.Context, p *agent.Pool) status {
				guards, err := p.InstallGuards(ctx, opts)
				return a.printGuards(p, guards, err, a.guardInstalled)
			})
		}),
	}
	a.guardFlags(cmd, &opts)
	return cmd
}

func newGuardRemove(a *app) *cobra.Command {
	var source string
	cmd := &cobra.Command{
		Use:   "remove [POOL]",
		Short: "Drop the triggers",
		Long: `Remove drops the guard triggers and their functions, of one pool or of all: what
install made, and nothing else. Without --source it also drops those of sources
that the configuration no longer has.` + exits("done", "one could not be dropped, which is said for each", "wrong usage, or the configuration is wrong", ""),
		Args: atMostOnePool,
		RunE: a.action(func(ctx context.Context, args []string) status {
			// A source that is gone from the configuration can still be named.
			return a.guards(ctx, args, "", func(ctx context.Context, p *agent.Pool) status {
				guards, err := p.RemoveGuards(ctx, source)
				return a.printGuards(p, guards, err, a.guardRemoved)
			})
		}),
	}
	cmd.Flags().StringVar(&source, "source", "", "the source of this `name` alone")
	a.jsonFlag(cmd, "print a JSON object a pool, each on one line")
	return cmd
}

func (a *app) guardFlags(cmd *cobra.Command, opts *agent.GuardOptions) {
	cmd.Flags().StringVar(&opts.Source, "source", "", "the source of this `name` alone, whatever guard it asks for")
	cmd.Flags().BoolVar(&opts.Deferrable, "deferrable", false, "check at the commit, so that a blob may be stored after what refers to it")
	a.jsonFlag(cmd, "print a JSON object a pool, each on one line")
}

// guards runs fn for the pools of these names, or for all, that have the source.
func (a *app) guards(ctx context.Context, names []string, source string, fn func(context.Context, *agent.Pool) status) status {
	ctx, cancel := a.untilStopped(ctx)
	defer cancel()
	known := source == ""
	end := a.eachPool(names, func(p *agent.Pool) status {
		if source != "" && !slices.Contains(a.sourceNames(p), source) {
			return done
		}
		known = true
		return fn(ctx, p)
	})
	if !known && end == done {
		return a.fail(&usageError{fmt.Sprintf("there is no source %q; see gc-agent check", source)})
	}
	return end
}

func (a *app) sourceNames(p *agent.Pool) []string {
	cfg, _ := a.cfg.Pool(p.Name())
	var names []string
	for _, s := range cfg.Liveness {
		names = append(names, s.Name)
	}
	return names
}

// guardLine is a guard as JSON has it.
type guardLine struct {
	Source     string   `json:"source"`
	Table      string   `json:"table,omitempty"`
	Trigger    string   `json:"trigger,omitempty"`
	Skipped    string   `json:"skipped,omitempty"`
	There      bool     `json:"there"`                // it was there already
	Dangling   *int64   `json:"dangling,omitempty"`   // of install; left out where it isn't known
	Statements []string `json:"statements,omitempty"` // of sql
	Error      string   `json:"error,omitempty"`
}

// printGuards prints what was done about a pool's guards; text has one guard's
// words for people, and fills in what only one command knows.
func (a *app) printGuards(p *agent.Pool, guards []agent.Guard, err error, text func(*agent.Pool, agent.Guard, *guardLine) string) status {
	if err != nil {
		return a.fail(err)
	}
	end, out, lines := done, "", []guardLine{}
	for _, g := range guards {
		line := guardLine{Source: g.Source, Table: g.Table, Trigger: g.Name, Skipped: g.Skipped, There: g.There}
		words := text(p, g, &line)
		if g.Err != nil {
			line.Error = g.Err.Error()
			a.stderr.line("pool %s: source %s: %v", p.Name(), g.Source, a.explain(g.Err))
			end = failed
		} else {
			out += words
		}
		lines = append(lines, line)
	}
	if a.json {
		return end.worse(a.printJSON(struct {
			Pool   string      `json:"pool"`
			Guards []guardLine `json:"guards"`
		}{p.Name(), lines}))
	}
	if len(guards) == 0 {
		out = fmt.Sprintf("-- pool %s: no guard trigger\n", p.Name())
	}
	return end.worse(a.print(out))
}

const guardSQLNote = `-- Run it as the owner of %s, in one transaction. Whoever runs it owns
-- the function, which locks the blobs' rows: that takes SELECT and UPDATE on them.
`

func (a *app) guardSQL(p *agent.Pool, g agent.Guard, line *guardLine) string {
	title := fmt.Sprintf("-- pool %s, source %s: ", p.Name(), g.Source)
	if g.Skipped != "" {
		return title + "no trigger, since " + words.OneLine(g.Skipped) + "\n"
	}
	line.Statements = g.Statements
	var b strings.Builder
	b.WriteString(title + "the guard trigger of " + words.OneLine(g.Table) + "\n")
	fmt.Fprintf(&b, guardSQLNote, words.OneLine(g.Table))
	for _, s := range g.Statements {
		b.WriteString(s + ";\n")
	}
	return b.String()
}

func (a *app) guardInstalled(p *agent.Pool, g agent.Guard, line *guardLine) string {
	title := fmt.Sprintf("pool %s: source %s: ", p.Name(), g.Source)
	if g.Skipped != "" {
		return title + "no trigger, since " + words.OneLine(g.Skipped) + "\n"
	}
	done := "installed"
	if g.There {
		done = "there already"
	}
	text := title + fmt.Sprintf("trigger %s of %s: %s\n", g.Name, words.OneLine(g.Table), done)
	switch {
	case g.Dangling < 0:
		text += title + "whether any row refers to a blob that is not there took too long to count\n"
	case g.Dangling > 0:
		text += title + fmt.Sprintf("warning: %s to a blob that is not there; no trigger changes that\n", plural(g.Dangling, "row refers", "rows refer"))
	}
	if g.Dangling >= 0 && g.Err == nil {
		line.Dangling = &g.Dangling
	}
	return text
}

func plural(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return count(n) + " " + many
}

func (a *app) guardRemoved(p *agent.Pool, g agent.Guard, _ *guardLine) string {
	of := ""
	if g.Table != "" {
		of = " of " + words.OneLine(g.Table)
	}
	return fmt.Sprintf("pool %s: trigger %s%s: removed\n", p.Name(), g.Name, of)
}
