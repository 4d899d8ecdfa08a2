package main

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// build is what is known about how the binary was made.
type build struct {
	Version  string `json:"version"`
	Revision string `json:"revision"`
	Modified bool   `json:"modified"` // the source wasn't quite the revision's
	Time     string `json:"time"`     // of the revision
	Go       string `json:"go"`
}

func newVersion(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Say which build this is",
		Long:  "Version says which build of the agent this is." + exits("done", "", "wrong usage", ""),
		Args:  noArgs,
		RunE: a.action(func(context.Context, []string) status {
			if a.json {
				return a.printJSON(thisBuild())
			}
			return a.print(thisBuild().String() + "\n")
		}),
	}
	a.jsonFlag(cmd, "print a JSON object")
	return cmd
}

// thisBuild prefers the version that the linker was given to that of the module.
func thisBuild() build {
	b := build{Version: version}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	b.Go = info.GoVersion
	if b.Version == "" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		case "vcs.time":
			b.Time = s.Value
		}
	}
	return b
}

// String returns the build in one line.
func (b build) String() string {
	s := "gc-agent " + b.Version
	if b.Revision != "" {
		s += fmt.Sprintf(", revision %.12s", b.Revision)
		if b.Modified {
			s += " (modified)"
		}
		if b.Time != "" {
			s += " of " + b.Time
		}
	}
	return s + ", " + b.Go
}
