package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/agent/control"

	"github.com/spf13/cobra"
)

const sweepHelp = `Sweep sweeps pools once, one after the other, and prints a report of each: it
deletes what was staged and is due, after another look, and stages what it finds
dead. In mode observe and with --dry-run it changes nothing and says what it
would do.

Where a daemon answers on admin.socket it is the daemon that sweeps, since it alone
knows the pins in its memory.

The first signal lets the batch at hand finish and stops, the second cuts it off,
or no longer waits for the daemon.`

// sweepFlags are the flags of sweep.
type sweepFlags struct {
	pools    []string
	dryRun   bool
	override []string
}

func newSweep(a *app) *cobra.Command {
	var flags sweepFlags
	cmd := &cobra.Command{
		Use:   "sweep",
		Short: "Sweep pools once and report",
		Long: sweepHelp + exits("done; or another agent is sweeping (sweeper_lock)",
			"a sweep failed, or was stopped by a signal",
			"wrong usage, or the configuration is wrong or doesn't fit the database",
			"a sweep aborted: nothing was deleted") +
			"\n\nOf several pools the worst counts: 1, then 2, then 3.",
		Args: noArgs,
		RunE: a.action(func(ctx context.Context, _ []string) status { return a.sweep(ctx, flags) }),
	}
	cmd.Flags().StringSliceVar(&flags.pools, "pool", nil, "sweep the pool of this `name` alone; may be repeated")
	cmd.Flags().BoolVar(&flags.dryRun, "dry-run", false, "change nothing")
	cmd.Flags().StringSliceVar(&flags.override, "override", nil,
		"pass the brake of this `cause` once: "+strings.Join(brakeNames(), ", ")+"; may be repeated")
	a.jsonFlag(cmd, "print a JSON object a pool, each on one line")
	return cmd
}

func brakeNames() []string {
	var names []string
	for _, b := range control.Brakes {
		names = append(names, string(b))
	}
	return names
}

func parseBrakes(names []string) ([]config.Brake, error) {
	var found []config.Brake
	for _, name := range names {
		if !slices.Contains(control.Brakes, config.Brake(name)) {
			return nil, &usageError{fmt.Sprintf("no brake is named %q: want %s", name, strings.Join(brakeNames(), ", "))}
		}
		found = append(found, config.Brake(name))
	}
	return found, nil
}

func (a *app) sweep(ctx context.Context, flags sweepFlags) status {
	override, err := parseBrakes(flags.override)
	if err != nil {
		return a.fail(err)
	}
	ag, pools, err := a.agent(noteLog, flags.pools...)
	if err != nil {
		return a.fail(err)
	}
	defer a.closeAgent(ag)
	client, err := a.throughDaemon(ctx)
	if err != nil {
		return a.fail(err)
	}
	opts := agent.SweepOptions{DryRun: flags.dryRun, Override: override, Stop: a.stop, Progress: a.progress()}
	sweep := func(p *agent.Pool) status {
		rep, err := p.Sweep(ctx, opts)
		return a.conclude(ctx, p.Name(), rep, err)
	}
	if client != nil {
		sweep = func(p *agent.Pool) status {
			req := control.SweepRequest{DryRun: flags.dryRun, Override: flags.override}
			rep, err := a.daemonSweep(ctx, a.daemonPool(client, p.Name()), req, opts.Progress)
			if errors.As(err, new(*control.Error)) {
				return a.daemonFail(err)
			}
			return a.conclude(ctx, p.Name(), rep, err)
		}
	}
	end := done
	for i, p := range pools {
		if a.stopped() {
			a.stderr.line("pool %s: not swept: stopped by a signal", p.Name())
			end = end.worse(failed)
			continue
		}
		if i > 0 && !a.json {
			end = end.worse(a.print("\n"))
		}
		end = end.worse(sweep(p))
	}
	return end
}

// conclude prints the report of a sweep, and what kept it from its end.
func (a *app) conclude(ctx context.Context, pool string, rep agent.Report, err error) status {
	a.stderr.wipe()
	if printed := a.printReport(rep, err); printed != done {
		return printed
	}
	var misconfigured *agent.MisconfiguredError
	switch {
	case errors.As(err, &misconfigured):
		return a.fail(err)
	case err != nil && ctx.Err() != nil:
		a.stderr.line("pool %s: %v: %v", pool, context.Cause(ctx), a.explain(err))
		return failed
	case err != nil:
		a.stderr.line("pool %s: failed: %v", pool, a.explain(err))
		return failed
	case rep.Skipped():
		return done
	case rep.Aborted != nil:
		a.stderr.line("pool %s: aborted: %s: %s", pool, *rep.Aborted, rep.Detail)
		return aborted
	case rep.Stopped():
		a.stderr.line("pool %s: %s", pool, rep.Detail)
		return failed
	}
	return done
}
