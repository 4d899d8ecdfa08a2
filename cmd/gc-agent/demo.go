package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/demo"

	"github.com/spf13/cobra"
)

const demoHelp = `Demo makes a small application on SQLite, with blobs and what refers to them, and a
configuration for it. Then it runs the daemon on it, while the application keeps
adding and removing references, until a signal. It needs no server and no
configuration.

With --once the application stands still, but for one change: two sweeps show what
is staged, what is deleted and what is kept, and why.`

// demoFlags are the flags of demo.
type demoFlags struct {
	once bool
	dir  string
}

func newDemo(a *app) *cobra.Command {
	var flags demoFlags
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show it at work, on an application made for it",
		Long: demoHelp + exits("done", "something failed, or other blobs were deleted than were dead",
			"wrong usage, or the directory holds what isn't a demo's", ""),
		Args: noArgs,
		RunE: a.action(func(ctx context.Context, _ []string) status { return a.demo(ctx, flags) }),
	}
	cmd.Flags().BoolVar(&flags.once, "once", false, "run two sweeps and exit")
	cmd.Flags().StringVar(&flags.dir, "dir", "", "make the application in this `directory` (default: a new temporary one)")
	a.jsonFlag(cmd, "print a JSON object a sweep, each on one line, and nothing else")
	return cmd
}

func (a *app) demo(ctx context.Context, flags demoFlags) status {
	shop, err := newShop(ctx, flags.dir)
	if err != nil {
		return a.fail(err)
	}
	defer func() {
		if err := shop.Close(); err != nil {
			a.stderr.line("gc-agent: close the demo's database: %v", err)
		}
	}()
	a.configPath = shop.Config()
	if flags.once {
		err = a.demoOnce(ctx, shop)
	} else {
		err = a.demoLive(ctx, shop)
	}
	if err != nil {
		return a.fail(err)
	}
	return done
}

func newShop(ctx context.Context, dir string) (*demo.App, error) {
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "gc-agent-demo-"); err != nil {
			return nil, fmt.Errorf("make a directory for the demo: %w", err)
		}
	}
	shop, err := demo.Create(ctx, dir)
	if errors.Is(err, demo.ErrForeign) {
		return nil, &usageError{err.Error()}
	}
	return shop, err
}

// demoOnce sweeps twice, with the window and one change between, and compares
// what is gone with what was dead.
func (a *app) demoOnce(ctx context.Context, shop *demo.App) error {
	ag, pools, err := a.agent(noteLog)
	if err != nil {
		return err
	}
	defer a.closeAgent(ag)
	pool := pools[0]
	start, err := shop.Take(ctx)
	if err != nil {
		return err
	}
	window := a.window(pool)
	a.tell(demoStart(start, window))
	if _, err := a.demoSweep(ctx, pool); err != nil {
		return err
	}
	title, err := shop.AttachDead(ctx)
	if err != nil {
		return err
	}
	a.tell(demoBetween(window, title))
	if err := a.wait(ctx, window); err != nil {
		return err
	}
	before, err := shop.Take(ctx)
	if err != nil {
		return err
	}
	rep, err := a.demoSweep(ctx, pool)
	if err != nil {
		return err
	}
	after, err := shop.Take(ctx)
	if err != nil {
		return err
	}
	if err := exactlyTheDead(before, after, rep); err != nil {
		return err
	}
	a.tell(demoEnd(shop, before, title))
	return nil
}

// window is for how long the pool keeps what is dead.
func (a *app) window(p *agent.Pool) time.Duration {
	cfg, _ := a.cfg.Pool(p.Name())
	return cfg.Window
}

// tell prints what is for people only.
func (a *app) tell(text string) {
	if !a.json {
		// A demo that nobody reads still has to clean up and to compare.
		_ = a.print(text)
	}
}

var errInterrupted = errors.New("stopped by a signal before the demo was through")

func (a *app) demoSweep(ctx context.Context, p *agent.Pool) (agent.Report, error) {
	rep, err := p.Sweep(ctx, agent.SweepOptions{Stop: a.stop})
	switch {
	case err != nil:
		return rep, err
	case rep.Aborted != nil:
		return rep, fmt.Errorf("the sweep aborted: %s: %s", *rep.Aborted, rep.Detail)
	case a.stopped():
		return rep, errInterrupted
	}
	if end := a.printReport(rep, nil); end != done {
		return rep, errUnread
	}
	return rep, nil
}

func (a *app) wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-a.stop:
		return errInterrupted
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// exactlyTheDead compares the blobs before and after a sweep with what the
// application itself knows to be dead.
func exactlyTheDead(before, after demo.Stock, rep agent.Report) error {
	dead, gone := before.Dead(), 0
	for d := range before.Blobs {
		switch {
		case after.Blobs[d] && dead[d]:
			return fmt.Errorf("blob %s is dead and was kept", d)
		case !after.Blobs[d] && !dead[d]:
			return fmt.Errorf("blob %s is referred to and was deleted", d)
		case !after.Blobs[d]:
			gone++
		}
	}
	if int64(gone) != rep.Deleted {
		return fmt.Errorf("%d blobs are gone, the report says %d", gone, rep.Deleted)
	}
	return nil
}
