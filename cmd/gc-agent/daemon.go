package main

import (
	"context"
	"strings"

	"github.com/alkblobs/gc-agent/agent"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
)

const runHelp = `Run keeps every pool on its schedule until it gets a signal, and logs to standard
error. A sweep that fails is logged and tried again at the next tick; a database
that is down is waited for.

The first signal (SIGTERM or SIGINT) lets the batches at hand finish and ends the
daemon within 10 seconds. The second cuts them off, which loses nothing.`

func newRun(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "run",
		Short: "Keep every pool on its schedule (the daemon)",
		Long: runHelp + exits("stopped by a signal", "something failed, or a second signal cut it off",
			"wrong usage, or the configuration is wrong", ""),
		Args: noArgs,
		RunE: a.action(func(ctx context.Context, _ []string) status { return a.run(ctx) }),
	}
}

func (a *app) run(ctx context.Context) status {
	ag, pools, err := a.agent(daemonLog)
	if err != nil {
		return a.fail(err)
	}
	defer a.closeAgent(ag)
	log := daemonLog(a)
	var names []string
	for _, p := range pools {
		names = append(names, p.Name())
	}
	log.Info().Str("version", thisBuild().Version).Str("config", a.cfg.file).
		Str("pools", strings.Join(names, ", ")).Msg("gc-agent is starting")
	return a.daemon(ctx, ag, log)
}

// daemon runs the agent until a signal, or the end of ctx.
func (a *app) daemon(ctx context.Context, ag *agent.Agent, log zerolog.Logger) status {
	stop, ended := make(chan struct{}), make(chan struct{})
	defer close(ended)
	go func() {
		select {
		case <-a.stop:
			// Said before the agent hears of it, which may stop within the moment.
			log.Info().Msg("stopping: batches at hand are finished first; another signal cuts them off")
			close(stop)
		case <-ended:
		}
	}()
	err := ag.Run(ctx, stop)
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		log.Error().Err(err).Msg("gc-agent failed")
		return failed
	}
	log.Info().Msg("gc-agent has stopped")
	return done
}
