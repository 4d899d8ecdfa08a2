package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alkblobs/gc-agent/agent"
)

// errCut ends the context of a command that wouldn't stop, or not soon enough.
var errCut = errors.New("cut off by a second signal")

// interrupts turns signals into what they ask for: the first closes stop, which
// lets the batch at hand finish, the second ends the context, and a third kills.
// One of the same kind within a moment of the first is the same one.
// Release, called once, gives the signals back.
func interrupts(parent context.Context) (ctx context.Context, stop <-chan struct{}, release func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	stopped, released := make(chan struct{}), make(chan struct{})
	go func() {
		takeSignals(signals, released, agent.SystemClock{}.Now, func() { close(stopped) }, func() { cancel(errCut) })
		signal.Stop(signals)
	}()
	return ctx, stopped, func() {
		signal.Stop(signals)
		close(released)
		cancel(nil)
	}
}

// sameSignal is for how long another signal of the same kind may be the same one:
// timeout(1), for one, sends its signal to the process and to its group.
const sameSignal = time.Second

// takeSignals calls first at the first signal, then second at the next one, unless
// it is released before.
func takeSignals(signals <-chan os.Signal, released <-chan struct{}, now func() time.Time, first, second func()) {
	var kind os.Signal
	var since time.Time
	for {
		select {
		case sig := <-signals:
			switch {
			case kind == nil:
				kind, since = sig, now()
				first()
			case sig != kind || now().Sub(since) >= sameSignal:
				second()
				return
			}
		case <-released:
			return
		}
	}
}

// untilStopped returns a context that ends at the first signal, for what needs
// no graceful end.
func (a *app) untilStopped(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-a.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

func (a *app) stopped() bool {
	select {
	case <-a.stop:
		return true
	default:
		return false
	}
}
