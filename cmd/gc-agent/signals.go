package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
)

// errCut ends the context of a command that wouldn't stop, or not soon enough.
var errCut = errors.New("cut off by a second signal")

// interrupts turns signals into what they ask for: the first closes stop, which
// lets the batch at hand finish, the second ends the context, and a third kills.
// Release, called once, gives the signals back.
func interrupts(parent context.Context) (ctx context.Context, stop <-chan struct{}, release func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	stopped, released := make(chan struct{}), make(chan struct{})
	go func() {
		for _, act := range []func(){func() { close(stopped) }, func() { cancel(errCut) }} {
			select {
			case <-signals:
				act()
			case <-released:
				return
			}
		}
		signal.Stop(signals)
	}()
	return ctx, stopped, func() {
		signal.Stop(signals)
		close(released)
		cancel(nil)
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
