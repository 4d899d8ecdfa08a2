package main

import (
	"context"
	"strings"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/control"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
)

const runHelp = `Run keeps every pool on its schedule until it gets a signal, and logs to standard
error. A sweep that fails is logged and tried again at the next tick; a database
that is down is waited for.

The first signal (SIGTERM or SIGINT) lets the batches at hand finish and ends the
daemon within 10 seconds. The second cuts them off, which loses nothing; one of the
same kind within a second of the first isn't counted.`

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
	socket, err := a.listen(log)
	if err != nil {
		return a.fail(err)
	}
	return a.daemon(ctx, ag, socket, log)
}

// listen makes the control socket, if there is to be one.
func (a *app) listen(log zerolog.Logger) (*control.Listener, error) {
	path := a.cfg.Admin().Socket
	if path == "" {
		return nil, nil // none is configured
	}
	socket, err := control.Listen(path)
	if err == nil {
		log.Info().Str("socket", path).Msg("the control socket is open")
	}
	return socket, err
}

// serve runs the agent and, where there is one, its control socket. When one of the
// two fails the other is stopped.
func (a *app) serve(ctx context.Context, ag *agent.Agent, socket *control.Listener, log zerolog.Logger, stop <-chan struct{}) error {
	if socket == nil {
		return ag.Run(ctx, stop)
	}
	group, ctx := errgroup.WithContext(ctx)
	server := control.NewServer(control.Options{Agent: ag, Config: a.cfg.Validated, Log: log, Explain: a.explain})
	group.Go(func() error { return server.Serve(ctx, socket, stop) })
	group.Go(func() error { return ag.Run(ctx, stop) })
	return group.Wait()
}

// daemon runs the agent until a signal, or the end of ctx. It takes the socket
// over, nil for none.
func (a *app) daemon(ctx context.Context, ag *agent.Agent, socket *control.Listener, log zerolog.Logger) status {
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
	err := a.serve(ctx, ag, socket, log, stop)
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
