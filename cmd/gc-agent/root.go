package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"
)

// app is what the commands share.
type app struct {
	stdout io.Writer
	stderr *terminal
	stop   <-chan struct{} // closed by the first signal

	configPath string
	json       bool
	cfg        *loadedConfig // once it was loaded
	status     status
}

const rootHelp = `gc-agent deletes blobs that nothing refers to any more from a database that is
in use. The application goes on writing its blobs itself; the agent is told in
YAML where they are and which tables refer to them. It marks what is dead,
keeps it in a delete window, and looks once more, under lock, before it deletes.

To see it work without a server and a configuration: gc-agent demo`

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "gc-agent",
		Short: "Collect dead blobs beside an existing database",
		Long: rootHelp + exits("done; or another agent is sweeping (sweeper_lock)",
			"something failed", "wrong usage, or the configuration is wrong or doesn't fit the database",
			"a sweep aborted: nothing was deleted") +
			"\n\nOf several pools the worst counts: 1, then 2, then 3.",
		SilenceUsage:       true,
		SilenceErrors:      true,
		DisableSuggestions: true, // they take several lines; unknownCommand has its own
		Args:               unknownCommand,
		RunE:               help,
		Version:            thisBuild().String(),

		DisableFlagsInUseLine: true,
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.PersistentFlags().StringVarP(&a.configPath, "config", "c", "",
		"the configuration `file` (default: "+localConfig+", else "+systemConfig+")")
	root.SetFlagErrorFunc(unknownFlag)
	root.SetHelpCommand(newHelp())
	root.AddCommand(newRun(a), newSweep(a), newCheck(a), newWindow(a), newPins(a), newSchema(a), newGuard(a), newGrants(a), newDemo(a), newVersion(a))
	finishCompletion(root)
	return root
}

// action makes a command's function of one that prints its own errors. The error
// that it returns to cobra is always nil.
func (a *app) action(fn func(ctx context.Context, args []string) status) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		a.status = fn(cmd.Context(), args)
		return nil
	}
}

// jsonFlag gives a command the flag --json.
func (a *app) jsonFlag(cmd *cobra.Command, usage string) {
	cmd.Flags().BoolVar(&a.json, "json", false, usage)
}

// print writes to standard output. Where nobody reads it any more, or the disk
// is full, the command has failed.
func (a *app) print(text string) status {
	if _, err := io.WriteString(a.stdout, text); err != nil {
		return a.fail(fmt.Errorf("write to standard output: %w", err))
	}
	return done
}

// printJSON writes one object on one line.
func (a *app) printJSON(v any) status {
	line, err := json.Marshal(v)
	if err != nil {
		return a.fail(fmt.Errorf("encode as JSON: %w", err))
	}
	return a.print(string(line) + "\n")
}
