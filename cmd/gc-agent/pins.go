package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/agent/control"
	"github.com/alkblobs/gc-agent/fleet"

	"github.com/spf13/cobra"
)

func newPins(a *app) *cobra.Command {
	return group("pins", "Look at pins, add and remove them",
		`Pins is about the pins of a pool: each keeps a key until it expires, whatever the
tables say. They go through the daemon where one answers on admin.socket, and else
to the database, where the pool has fleet: true.`,
		newPinsList(a), newPinsAdd(a), newPinsRemove(a))
}

var pinsExits = exits("done", "the daemon or the database can't be asked, or refused",
	"wrong usage, or the configuration is wrong, or another than the daemon's", "")

func newPinsList(a *app) *cobra.Command {
	var owner string
	cmd := &cobra.Command{
		Use:   "list POOL",
		Short: "List the live pins",
		Long: `List prints the live pins of a pool in the order of their keys, with how long each
lives on, its owner, and its key as window list writes it.` + pinsExits,
		Args: onePool,
	}
	cmd.Flags().StringVar(&owner, "owner", "", "those of this `owner` alone")
	a.jsonFlag(cmd, "print a JSON object a pin, each on one line")
	cmd.RunE = a.action(func(ctx context.Context, args []string) status {
		var only *string
		if cmd.Flags().Changed("owner") {
			only = &owner
		}
		return a.listPins(ctx, args[0], only)
	})
	return cmd
}

func newPinsAdd(a *app) *cobra.Command {
	var owner, ttl string
	cmd := &cobra.Command{
		Use:   "add POOL KEY...",
		Short: "Pin keys, and say whether their blobs are there",
		Long: `Add pins keys for an owner, so that nothing deletes them before the pins expire,
and prints of each key whether its blob is there. A pin that is there already is
never shortened. Keys are written as window list prints them.` + pinsExits,
		Args: poolAndKeys,
		RunE: a.action(func(ctx context.Context, args []string) status {
			return a.addPins(ctx, args[0], args[1:], owner, ttl)
		}),
	}
	ownerFlag(cmd, &owner)
	cmd.Flags().StringVar(&ttl, "ttl", "", "for this `long`: 90s, 10m (default: pins.ttl of the pool)")
	a.jsonFlag(cmd, "print a JSON object a key, each on one line")
	return cmd
}

func newPinsRemove(a *app) *cobra.Command {
	var owner string
	cmd := &cobra.Command{
		Use:   "remove POOL KEY...",
		Short: "Take pins back",
		Long: `Remove takes an owner's pins of keys back. Whatever else keeps a key goes on doing
so. Keys are written as window list prints them.` + pinsExits,
		Args: poolAndKeys,
		RunE: a.action(func(ctx context.Context, args []string) status {
			return a.removePins(ctx, args[0], args[1:], owner)
		}),
	}
	ownerFlag(cmd, &owner)
	a.jsonFlag(cmd, "print a JSON object")
	return cmd
}

func ownerFlag(cmd *cobra.Command, owner *string) {
	cmd.Flags().StringVar(owner, "owner", "", "whose pins they are (required)")
	if err := cmd.MarkFlagRequired("owner"); err != nil {
		panic(err) // there is such a flag
	}
}

func poolAndKeys(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return nil
	}
	return &usageError{below(cmd) + " takes the name of a pool, then keys"}
}

// withPins runs one of the two: through the daemon where one answers, else on the
// pool itself, whose pins have to be in its database then.
func (a *app) withPins(ctx context.Context, name string, daemon func(context.Context, control.Pool) error, direct func(context.Context, *agent.Pool) error) status {
	ctx, cancel := a.untilStopped(ctx)
	defer cancel()
	client, err := a.throughDaemon(ctx)
	if err != nil {
		return a.fail(err)
	}
	if client != nil {
		if err := a.knownPools([]string{name}); err != nil {
			return a.fail(err)
		}
		if err := daemon(ctx, a.daemonPool(client, name)); err != nil {
			return a.daemonFail(err)
		}
		return done
	}
	ag, pools, err := a.agent(noteLog, name)
	if err != nil {
		return a.fail(err)
	}
	defer a.closeAgent(ag)
	switch err := direct(ctx, pools[0]); {
	case errors.Is(err, agent.ErrPinsElsewhere):
		return a.fail(fmt.Errorf("%w, and none answers on %s; start it with gc-agent run", err, a.cfg.Admin().Socket))
	case errors.Is(err, agent.ErrNoPins), errors.Is(err, agent.ErrBadPin):
		return a.fail(&usageError{err.Error()})
	case err != nil:
		return a.fail(err)
	}
	return done
}

const pinFormat = "%-12s  %-20s  %s\n"

func (a *app) listPins(ctx context.Context, name string, owner *string) status {
	end, listed := done, 0
	show := func(pins []control.Pin) error {
		if listed == 0 && len(pins) > 0 && !a.json {
			end = end.worse(a.print(fmt.Sprintf(pinFormat, "LEFT", "OWNER", "KEY")))
		}
		listed += len(pins)
		if end = end.worse(a.printPins(pins)); end != done {
			return errUnread
		}
		return nil
	}
	listing := a.withPins(ctx, name, func(ctx context.Context, pool control.Pool) error {
		for after := ""; ; {
			page, err := pool.Pins(ctx, owner, after)
			if err == nil {
				err = show(page.Pins)
			}
			if after = page.Next; err != nil || after == "" {
				return err
			}
		}
	}, func(ctx context.Context, p *agent.Pool) error { return directPins(ctx, p, owner, show) })
	switch {
	case end != done:
		return end
	case listing == done && listed == 0 && !a.json:
		return a.print(fmt.Sprintf("pool %s has no live pins\n", name))
	}
	return listing
}

const pinPage = 1000

func directPins(ctx context.Context, p *agent.Pool, owner *string, show func([]control.Pin) error) error {
	filter := fleet.PinFilter{Owner: (*fleet.Owner)(owner), Limit: pinPage}
	if err := p.ResolveKind(ctx); err != nil { // which it takes to spell them
		return err
	}
	for {
		rows, err := p.Pins(ctx, filter)
		if err != nil {
			return err
		}
		pins := make([]control.Pin, len(rows))
		for i, row := range rows {
			pins[i] = control.NewPin(p, row)
		}
		if err := show(pins); err != nil || len(rows) < filter.Limit {
			return err
		}
		filter.After = &rows[len(rows)-1]
	}
}

func (a *app) printPins(pins []control.Pin) status {
	if a.json {
		for _, pin := range pins {
			if end := a.printJSON(pin); end != done {
				return end
			}
		}
		return done
	}
	var b strings.Builder
	for _, pin := range pins {
		owner := pin.Owner
		if raw, err := hex.DecodeString(pin.OwnerHex); err != nil || string(raw) != owner || fmt.Sprintf("%q", owner) != `"`+owner+`"` {
			owner = `\x` + pin.OwnerHex
		}
		fmt.Fprintf(&b, pinFormat, span(time.Duration(pin.ExpiresInMS)*time.Millisecond), owner, pin.Key)
	}
	return a.print(b.String())
}

func (a *app) addPins(ctx context.Context, name string, spelled []string, owner, ttl string) status {
	var there []bool
	end := a.withPins(ctx, name, func(ctx context.Context, pool control.Pool) error {
		answer, err := pool.Pin(ctx, control.PinRequest{Keys: control.Keys{Keys: spelled}, Owner: control.Owner{Owner: &owner}, TTL: ttl})
		there = answer.Exists
		return err
	}, func(ctx context.Context, p *agent.Pool) error {
		lifetime := p.PinTTL()
		if ttl != "" {
			var err error
			if lifetime, err = config.ParseDuration(ttl); err != nil {
				return &usageError{fmt.Sprintf("--ttl %q: %v", ttl, err)}
			}
		}
		keys, err := eachKey(ctx, p, spelled)
		if err != nil {
			return err
		}
		there, err = p.Pin(ctx, keys, fleet.Owner(owner), lifetime)
		return err
	})
	if end != done {
		return end
	}
	for i, s := range spelled {
		if end := a.sayPinned(s, i < len(there) && there[i]); end != done {
			return end
		}
	}
	return done
}

func (a *app) sayPinned(key string, there bool) status {
	if a.json {
		return a.printJSON(struct {
			Key    string `json:"key"`
			Exists bool   `json:"exists"`
		}{key, there})
	}
	text := "pinned, and there: "
	if !there {
		text = "pinned; no such blob yet: "
	}
	return a.print(text + key + "\n")
}

func (a *app) removePins(ctx context.Context, name string, spelled []string, owner string) status {
	var removed []bool
	end := a.withPins(ctx, name, func(ctx context.Context, pool control.Pool) error {
		answer, err := pool.Unpin(ctx, control.UnpinRequest{Keys: control.Keys{Keys: spelled}, Owner: control.Owner{Owner: &owner}})
		removed = answer.Removed
		return err
	}, func(ctx context.Context, p *agent.Pool) error {
		keys, err := eachKey(ctx, p, spelled)
		if err != nil {
			return err
		}
		removed, err = p.Unpin(ctx, keys, fleet.Owner(owner))
		return err
	})
	if end != done {
		return end
	}
	n := int64(0)
	for _, r := range removed {
		if r {
			n++
		}
	}
	if a.json {
		return a.printJSON(struct {
			Pool    string `json:"pool"`
			Removed int64  `json:"removed"`
		}{name, n})
	}
	text := fmt.Sprintf("removed %s of pool %s", some(n, "pin"), name)
	if missing := int64(len(spelled)) - n; missing > 0 {
		text += "; not there: " + count(missing)
	}
	return a.print(text + "\n")
}
