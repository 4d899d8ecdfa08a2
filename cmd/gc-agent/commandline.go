package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/internal/words"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
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
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return &usageError{fmt.Sprintf("unknown command %q for %q%s", args[0], cmd.CommandPath(), meant("", args[0], names))}
}

// unknownFlag adds to the error of a flag that isn't known one that is.
func unknownFlag(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return err
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return fmt.Errorf("%w%s", err, meant("--", unknown.GetSpecifiedName(), names))
}

// meant asks whether the nearest of the names was meant, if one is near.
func meant(prefix, word string, names []string) string {
	if near := words.Nearest(word, names); near != "" {
		return fmt.Sprintf(" (did you mean %q?)", prefix+near)
	}
	return ""
}

// below is a command as it is written behind the program's name, with which every
// error begins.
func below(cmd *cobra.Command) string {
	return strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return &usageError{fmt.Sprintf("%s takes flags alone, not %q", below(cmd), args[0])}
}

func onePool(cmd *cobra.Command, args []string) error {
	if len(args) == 1 {
		return nil
	}
	return &usageError{below(cmd) + " takes the name of one pool"}
}

func atMostOnePool(cmd *cobra.Command, args []string) error {
	if len(args) <= 1 {
		return nil
	}
	return &usageError{below(cmd) + " takes the name of one pool, or none for all"}
}
