package main

import (
	"context"
	"errors"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/control"
)

// throughDaemon returns the daemon to ask, nil where none answers or there is no
// socket to ask it through. The configuration is loaded unless it is already.
func (a *app) throughDaemon(ctx context.Context) (*control.Client, error) {
	if a.cfg == nil {
		if err := a.load(); err != nil {
			return nil, err
		}
	}
	socket := a.cfg.Admin().Socket
	if socket == "" {
		return nil, nil // no daemon is an answer
	}
	client, err := control.Dial(ctx, socket)
	if errors.Is(err, control.ErrNoDaemon) {
		return nil, nil // no daemon is an answer
	}
	return client, err
}

// daemonPool is a pool of the configuration, to be asked about through a daemon.
func (a *app) daemonPool(client *control.Client, name string) control.Pool {
	return control.Pool{Client: client, Name: name, Digest: a.cfg.PoolDigest(name)}
}

// daemonFail says what a daemon answered.
func (a *app) daemonFail(err error) status {
	var answer *control.Error
	if errors.As(err, &answer) && answer.Usage() {
		return a.fail(&usageError{answer.Message})
	}
	return a.fail(err)
}

const stopWithin = 5 * time.Second

// daemonSweep has the daemon sweep a pool. The first signal lets it finish the
// batch at hand and stop, the second ends the wait for that.
func (a *app) daemonSweep(ctx context.Context, pool control.Pool, req control.SweepRequest, progress func(agent.Progress)) (agent.Report, error) {
	ended := make(chan struct{})
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		select {
		case <-a.stop:
			ctx, cancel := context.WithTimeout(ctx, stopWithin)
			defer cancel()
			if _, err := pool.StopSweep(ctx); err != nil {
				a.stderr.line("pool %s: the daemon can't be told to stop: %v", pool.Name, err)
			}
		case <-ended:
		}
	}()
	rep, err := pool.Sweep(ctx, req, progress)
	close(ended)
	<-asked
	return rep, err
}
