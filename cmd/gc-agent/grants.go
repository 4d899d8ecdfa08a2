package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/internal/words"

	"github.com/spf13/cobra"
)

const grantsHelp = `Grants prints, for each database, the GRANT statements that give the agent's role
what it needs for this configuration, and nothing beyond: for one pool or for
all. A pool that observes needs to read, one that enforces also to lock and to
delete. What is printed doesn't depend on what the role has already; standard
error, and missing in the comments and in JSON, say what it hasn't.

The role is that of each database's URL, unless --role names another. Where it
can't connect yet, or can't look up what a source's SQL names, not all can be
seen: run what is printed, then grants again, or run it once with a URL of the
tables' owner, or of a superuser, and with --role. Of several databases each has
statements of its own: give --database to pass them to psql. What the agent needs
changes once its own tables are there, whoever makes them (see schema sql).`

func newGrants(a *app) *cobra.Command {
	var role, database string
	cmd := &cobra.Command{
		Use:   "grants [POOL]",
		Short: "Print exactly what the agent's role has to be granted",
		Long: grantsHelp + exits("done", "a database can't be asked, or what a source reads can't all be seen: the rest is printed",
			"wrong usage, or the configuration is wrong", ""),
		Args: atMostOnePool,
		RunE: a.action(func(ctx context.Context, args []string) status { return a.grants(ctx, args, role, database) }),
	}
	cmd.Flags().StringVar(&role, "role", "", "the role of this `name` instead of that of the URL")
	cmd.Flags().StringVar(&database, "database", "", "print what is needed in the database of this `name` in the configuration alone")
	a.jsonFlag(cmd, "print a JSON object a database, each on one line")
	return cmd
}

func (a *app) grants(ctx context.Context, names []string, role, database string) status {
	ctx, cancel := a.untilStopped(ctx)
	defer cancel()
	ag, pools, err := a.agent(noteLog, names...)
	if err != nil {
		return a.fail(err)
	}
	defer a.closeAgent(ag)
	if _, ok := a.cfg.Database(database); database != "" && !ok {
		return a.fail(&usageError{fmt.Sprintf("there is no database %q in %s", database, a.cfg.file)})
	}
	all, err := ag.Grants(ctx, role, pools)
	if err != nil {
		return a.fail(err)
	}
	end, printed := done, 0
	for _, d := range all {
		if database != "" && d.Database != database {
			continue
		}
		if printed++; printed > 1 && !a.json {
			end = end.worse(a.print("\n"))
		}
		end = end.worse(a.printGrants(d))
	}
	return end
}

// grantsOf is what is printed of a database as a JSON object.
type grantsOf struct {
	Database string      `json:"database"` // as the configuration names it
	Engine   string      `json:"engine"`
	Name     string      `json:"name"` // the database's own; a file's path
	Role     string      `json:"role,omitempty"`
	Complete bool        `json:"complete"` // all could be seen
	Grants   []jsonGrant `json:"grants"`
	Notes    []string    `json:"notes"`
	Unseen   []string    `json:"unseen"`
}

type jsonGrant struct {
	Statement string `json:"statement"`
	Why       string `json:"why"`
	Missing   bool   `json:"missing"`
	Optional  bool   `json:"optional"`
}

func (a *app) printGrants(d agent.DatabaseGrants) status {
	g := grantsOf{
		Database: d.Database, Engine: d.Engine.String(), Name: d.Name, Role: d.Role, Complete: len(d.Unseen) == 0,
		Grants: []jsonGrant{}, Notes: append([]string{}, d.Notes...), Unseen: append([]string{}, d.Unseen...),
	}
	missing := int64(0)
	for _, r := range d.Grants {
		g.Grants = append(g.Grants, jsonGrant{r.Statement, r.Why, r.Missing, r.Optional})
		if r.Missing && !r.Optional {
			missing++
		}
	}
	end := done
	if a.json {
		end = a.printJSON(g)
	} else {
		end = a.print(g.text(d.Engine))
	}
	if missing > 0 && g.Complete {
		a.stderr.line("database %s: before these, role %s lacks %s", d.Database, d.Role, some(missing, "right"))
	}
	for _, why := range d.Unseen {
		a.stderr.line("%s", words.OneLine(why))
		end = end.worse(failed)
	}
	return end
}

// text is SQL that psql runs as it is.
func (g grantsOf) text(engine config.Engine) string {
	var b strings.Builder
	comment := func(format string, args ...any) {
		b.WriteString("-- " + words.OneLine(fmt.Sprintf(format, args...)) + "\n")
	}
	if engine == config.SQLite {
		comment("database %s, SQLite: a file has permissions, and no roles", g.Database)
	} else {
		comment("database %s: to be run in %s by the owner of its tables, or by a superuser", g.Database, g.Name)
	}
	for _, note := range g.Notes {
		comment("note: %s", note)
	}
	for _, why := range g.Unseen {
		comment("not complete: %s", why)
	}
	for _, r := range g.Grants {
		mark := ""
		if r.Missing {
			mark = "missing: "
		}
		if r.Optional {
			mark += "optional: "
		}
		comment("%sto %s", mark, r.Why)
		b.WriteString(r.Statement + ";\n")
	}
	return b.String()
}
