// Command gc-agent collects dead blobs beside an existing database.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	// Schedules name time zones, and a container may have none of its own.
	_ "time/tzdata"
)

// version is set by the linker.
var version string

func main() {
	os.Exit(int(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)))
}

// run runs one command line and returns its exit status. It prints all that is
// to be said and never a stack trace.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) (end status) {
	out := newTerminal(stderr)
	defer func() {
		if r := recover(); r != nil {
			out.line("gc-agent: internal error: %v", r)
			end = failed
		}
	}()
	ctx, stop, release := interrupts(ctx)
	defer release()
	a := &app{stdout: stdout, stderr: out, stop: stop}
	root := newRoot(a) //nolint:contextcheck // cobra hands the context to each command
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(out)
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil {
		// Commands say what went wrong themselves, so this is about the command line.
		return a.fail(&usageError{fmt.Sprintf("%v; see %s --help", err, cmd.CommandPath())})
	}
	return a.status
}
