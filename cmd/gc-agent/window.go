package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/control"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/window"

	"github.com/spf13/cobra"
)

func newWindow(a *app) *cobra.Command {
	return group("window", "Look at the delete window, and take keys out of it",
		"Window is about the keys that were found dead and wait to be deleted.",
		newWindowList(a), newWindowDrop(a))
}

func newWindowList(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list POOL",
		Short: "List what is staged, and from when it may be deleted",
		Long: `List prints the keys in a pool's delete window, in the order of their bytes, each
with the time from which it may be deleted and how long that is from now. Reading
takes no lock: rows may come and go meanwhile.` +
			exits("done", "the database can't be asked",
				"wrong usage, or the configuration is wrong or doesn't fit the database", ""),
		Args: onePool,
		RunE: a.action(func(ctx context.Context, args []string) status { return a.listWindow(ctx, args[0]) }),
	}
	a.jsonFlag(cmd, "print a JSON object a key, each on one line")
	return cmd
}

// jsonRow is a row of the window. VisibleAfter is nanoseconds since the Unix
// epoch.
type jsonRow struct {
	Key          string `json:"key"`
	KeyHex       string `json:"key_hex"`
	VisibleAfter int64  `json:"visible_after"`
}

const rowFormat = "%-30s  %-13s  %s\n"

// listWindow prints a page at a time, so that a window of any length fits.
func (a *app) listWindow(ctx context.Context, name string) status {
	ctx, cancel := a.untilStopped(ctx)
	defer cancel()
	ag, pools, err := a.agent(noteLog, name)
	if err != nil {
		return a.fail(err)
	}
	defer a.closeAgent(ag)
	listed, end := 0, done
	err = pools[0].WindowRows(ctx, func(rows []window.Row) error {
		if listed == 0 && len(rows) > 0 && !a.json {
			end = end.worse(a.print(fmt.Sprintf(rowFormat, "VISIBLE AFTER", "LEFT", "KEY")))
		}
		listed += len(rows)
		end = end.worse(a.printRows(pools[0], rows))
		if end != done {
			return errUnread
		}
		return nil
	})
	switch {
	case end != done:
		return end
	case err != nil:
		return a.fail(err)
	case listed == 0 && !a.json:
		return a.print(fmt.Sprintf("the window of pool %s is empty\n", name))
	}
	return done
}

// errUnread ends a listing that can't be printed.
var errUnread = errors.New("standard output can't be written to")

func (a *app) printRows(p *agent.Pool, rows []window.Row) status {
	if a.json {
		for _, row := range rows {
			r := jsonRow{p.Spell(row.Key), hex.EncodeToString([]byte(row.Key)), int64(row.VisibleAfter)}
			if end := a.printJSON(r); end != done {
				return end
			}
		}
		return done
	}
	var b strings.Builder
	now := time.Now()
	for _, row := range rows {
		at := row.VisibleAfter.Time()
		left := "overdue"
		if d := at.Sub(now); d > 0 {
			left = span(d)
		}
		fmt.Fprintf(&b, rowFormat, at.Format(exactTime), left, p.Spell(row.Key))
	}
	return a.print(b.String())
}

func newWindowDrop(a *app) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "drop POOL {KEY... | --all}",
		Short: "Take keys out of the window: they are kept",
		Long: `Drop takes keys out of a pool's delete window, so that nothing deletes them. A
sweep that finds them dead again stages them anew, with the whole window before
them. Keys are written as list prints them.` +
			exits("done, whether or not the keys were there", "the database can't be asked, or a sweep is under way",
				"wrong usage, a key that can't be read, or the configuration is wrong or doesn't fit the database", ""),
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return &usageError{"name a pool, then keys or --all"}
			case all && len(args) > 1:
				return &usageError{"give keys or --all, not both"}
			case !all && len(args) == 1:
				return &usageError{"name the keys to drop, or give --all"}
			}
			return nil
		},
		RunE: a.action(func(ctx context.Context, args []string) status { return a.dropWindow(ctx, args[0], args[1:]) }),
	}
	cmd.Flags().BoolVar(&all, "all", false, "drop every key")
	a.jsonFlag(cmd, "print a JSON object")
	return cmd
}

// dropWindow drops keys, all of them where none is given.
func (a *app) dropWindow(ctx context.Context, name string, spelled []string) status {
	ctx, cancel := a.untilStopped(ctx)
	defer cancel()
	client, err := a.throughDaemon(ctx)
	if err != nil {
		return a.fail(err)
	}
	ag, pools, err := a.agent(noteLog, name)
	if err != nil {
		return a.fail(err)
	}
	defer a.closeAgent(ag)
	if client != nil {
		req := control.DropRequest{Keys: control.Keys{Keys: spelled}, All: len(spelled) == 0}
		answer, err := a.daemonPool(client, name).Drop(ctx, req)
		if err != nil {
			return a.daemonFail(err)
		}
		return a.sayDropped(name, answer.Dropped, answer.Missing, nil)
	}
	if len(spelled) == 0 {
		dropped, err := pools[0].DropAll(ctx)
		return a.sayDropped(name, dropped, 0, err)
	}
	keys, err := parseKeys(ctx, pools[0], spelled)
	if err != nil {
		return a.fail(err)
	}
	dropped, err := pools[0].DropKeys(ctx, keys)
	return a.sayDropped(name, int64(dropped), int64(len(keys)-dropped), err)
}

// parseKeys reads keys as list prints them, each once, sorted.
func parseKeys(ctx context.Context, p *agent.Pool, spelled []string) ([]blob.Key, error) {
	keys, err := eachKey(ctx, p, spelled)
	slices.Sort(keys)
	return slices.Compact(keys), err
}

// eachKey reads keys as list prints them, in their order.
func eachKey(ctx context.Context, p *agent.Pool, spelled []string) ([]blob.Key, error) {
	keys := make([]blob.Key, len(spelled))
	for i, s := range spelled {
		key, err := p.ParseKey(ctx, s)
		switch {
		case err != nil && p.Kind() != 0: // the database was asked, so it is about the key
			return nil, &usageError{err.Error()}
		case err != nil:
			return nil, err
		}
		keys[i] = key
	}
	return keys, nil
}

func (a *app) sayDropped(pool string, dropped, missing int64, err error) status {
	if err != nil {
		return a.fail(err)
	}
	if a.json {
		return a.printJSON(struct {
			Pool    string `json:"pool"`
			Dropped int64  `json:"dropped"`
		}{pool, dropped})
	}
	text := fmt.Sprintf("dropped %s from the window of pool %s", some(dropped, "key"), pool)
	if missing > 0 {
		text += fmt.Sprintf("; not in it: %s", count(missing))
	}
	return a.print(text + "\n")
}
