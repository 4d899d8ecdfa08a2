package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// newHelp is cobra's help command with an error for what isn't one.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Explain a command",
		Long:  "Help explains a command." + exits("done", "", "there is no such command", ""),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, rest, err := cmd.Root().Find(args)
			if err != nil {
				return err
			}
			if len(rest) > 0 {
				return unknownCommand(target, rest)
			}
			target.InitDefaultHelpFlag()
			return target.Help()
		},
	}
}

// finishCompletion gives cobra's completion commands what the others have.
func finishCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() != "completion" {
			continue
		}
		cmd.Short = "Print a completion script for a shell"
		cmd.Args, cmd.RunE, cmd.DisableFlagsInUseLine = unknownCommand, help, true
		for _, c := range append(cmd.Commands(), cmd) {
			c.Long = strings.TrimSpace(c.Long) + exits("done", "", "wrong usage", "")
		}
	}
}

// group makes a command of commands.
func group(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long + exits("done", "", "wrong usage", ""),
		Args: unknownCommand, RunE: help, DisableFlagsInUseLine: true,
	}
	cmd.AddCommand(commands...)
	return cmd
}

func help(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// unknownCommand refuses what stands where a command belongs.
func unknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	message := fmt.Sprintf("unknown command %q for %q", args[0], cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = 1
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		message += fmt.Sprintf(" (did you mean %q?)", near[0])
	}
	return &usageError{message}
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return &usageError{fmt.Sprintf("%s takes flags alone, not %q", cmd.CommandPath(), args[0])}
}

func onePool(cmd *cobra.Command, args []string) error {
	if len(args) == 1 {
		return nil
	}
	return &usageError{cmd.CommandPath() + " takes the name of one pool"}
}

func atMostOnePool(cmd *cobra.Command, args []string) error {
	if len(args) <= 1 {
		return nil
	}
	return &usageError{cmd.CommandPath() + " takes the name of one pool, or none for all"}
}
