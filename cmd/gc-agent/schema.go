package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/agent"

	"github.com/spf13/cobra"
)

func newSchema(a *app) *cobra.Command {
	return group("schema", "The agent's own tables: print them, or make them",
		`Schema is about the agent's own tables. A sweep in mode enforce makes them where
they are missing; these commands are for a role that may not.`,
		newSchemaSQL(a), newSchemaEnsure(a))
}

func newSchemaSQL(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "sql [POOL]",
		Short: "Print the statements that make the agent's tables",
		Long: "SQL prints the statements that make the agent's tables, of one pool or of all. It\nconnects only where a pool has fleet: true, whose functions depend on the tiers." +
			exits("done", "a database can't be asked", "wrong usage, or the configuration is wrong", ""),
		Args: atMostOnePool,
		RunE: a.action(func(ctx context.Context, args []string) status {
			ctx, cancel := a.untilStopped(ctx)
			defer cancel()
			return a.eachPool(args, func(p *agent.Pool) status { return a.printSchema(ctx, p) })
		}),
	}
	a.jsonFlag(cmd, "print a JSON object a pool, each on one line")
	return cmd
}

func (a *app) printSchema(ctx context.Context, p *agent.Pool) status {
	statements, err := p.SchemaSQL(ctx)
	if err != nil {
		return a.fail(err)
	}
	if a.json {
		return a.printJSON(struct {
			Pool       string   `json:"pool"`
			Statements []string `json:"statements"`
		}{p.Name(), append([]string{}, statements...)})
	}
	cfg, _ := a.cfg.Pool(p.Name())
	text := fmt.Sprintf("-- pool %s, in database %s\n", p.Name(), cfg.Host)
	for _, s := range statements {
		text += strings.TrimRight(strings.TrimSpace(s), ";") + ";\n"
	}
	return a.print(text)
}

func newSchemaEnsure(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ensure [POOL]",
		Short: "Make the agent's tables where they are missing",
		Long: `Ensure makes the agent's tables where they are missing, of one pool or of all. It
never changes a table of the application's, and may be repeated.` +
			exits("done", "a database can't be asked, or refused", "wrong usage, or the configuration is wrong", ""),
		Args: atMostOnePool,
		RunE: a.action(func(ctx context.Context, args []string) status {
			ctx, cancel := a.untilStopped(ctx)
			defer cancel()
			return a.eachPool(args, func(p *agent.Pool) status { return a.ensureSchema(ctx, p) })
		}),
	}
	a.jsonFlag(cmd, "print a JSON object a pool, each on one line")
	return cmd
}

func (a *app) ensureSchema(ctx context.Context, p *agent.Pool) status {
	if err := p.EnsureSchema(ctx); err != nil {
		return a.fail(err)
	}
	if a.json {
		return a.printJSON(struct {
			Pool string `json:"pool"`
		}{p.Name()})
	}
	what := "its tables are"
	if cfg, _ := a.cfg.Pool(p.Name()); cfg.Fleet {
		what = "its tables, and the functions to pin by, are"
	}
	return a.print(fmt.Sprintf("pool %s: %s there\n", p.Name(), what))
}

// eachPool runs fn for the pools of these names, or for all.
func (a *app) eachPool(names []string, fn func(*agent.Pool) status) status {
	ag, pools, err := a.agent(noteLog, names...)
	if err != nil {
		return a.fail(err)
	}
	defer a.closeAgent(ag)
	end := done
	for _, p := range pools {
		end = end.worse(fn(p))
	}
	return end
}
