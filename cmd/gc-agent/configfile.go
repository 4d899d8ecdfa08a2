package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/internal/finding"

	"github.com/rs/zerolog"
)

const (
	localConfig  = "./config.yaml"
	systemConfig = "/etc/gc-agent/config.yaml"
)

// loadedConfig is a configuration and the file that it came from.
type loadedConfig struct {
	*config.Validated
	file string
}

// findConfig returns the file to read. A file that is named is taken as it is.
func findConfig(named string) (string, error) {
	if named != "" {
		return named, nil
	}
	for _, path := range []string{localConfig, systemConfig} {
		// What can't be looked at is there, as far as anybody knows: reading it says why.
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return filepath.Clean(path), nil
		}
	}
	return "", &usageError{fmt.Sprintf("no configuration: neither %s nor %s is there; name a file with --config, or try gc-agent demo",
		localConfig, systemConfig)}
}

// load reads the configuration.
func (a *app) load() error {
	file, err := findConfig(a.configPath)
	if err != nil {
		return err
	}
	cfg, err := config.Load(file, config.OSEnv())
	if err != nil {
		return err
	}
	a.cfg = &loadedConfig{Validated: cfg, file: file}
	return nil
}

// agent makes the agent of the configuration, which is loaded unless it is
// already, and the pools of these names: all of them when none is given.
func (a *app) agent(log func(*app) zerolog.Logger, names ...string) (*agent.Agent, []*agent.Pool, error) {
	if a.cfg == nil {
		if err := a.load(); err != nil {
			return nil, nil, err
		}
	}
	if err := a.knownPools(names); err != nil {
		return nil, nil, err
	}
	ag, err := agent.New(a.cfg.Validated, agent.Options{Log: log(a)})
	if err != nil {
		// It connects to nothing, so the configuration is at fault.
		return nil, nil, &usageError{err.Error()}
	}
	if len(names) == 0 {
		return ag, ag.Pools(), nil
	}
	var pools []*agent.Pool
	for _, name := range names {
		if p, ok := ag.Pool(name); ok && !slices.Contains(pools, p) {
			pools = append(pools, p)
		}
	}
	return ag, pools, nil
}

// knownPools makes a name that no pool has an error that lists those there are.
func (a *app) knownPools(names []string) error {
	var known []string
	for _, p := range a.cfg.Pools() {
		known = append(known, p.Name)
	}
	for _, name := range names {
		if !slices.Contains(known, name) {
			return &usageError{fmt.Sprintf("there is no pool %q in %s: it has %s", name, a.cfg.file, strings.Join(known, ", "))}
		}
	}
	return nil
}

// closeAgent closes the agent's connections. Whatever is wrong then, all that
// had to be written has been.
func (a *app) closeAgent(ag *agent.Agent) {
	if err := ag.Close(); err != nil {
		a.stderr.line("gc-agent: close the databases: %v", err)
	}
}

// problem gives a finding about a pool its place in the configuration file.
func (a *app) problem(pool string, f finding.Finding) config.Problem {
	return a.cfg.Problem(a.pathIn(pool, f.Path), f.Message)
}

// pathIn completes a path that begins below its pool.
func (a *app) pathIn(pool, path string) string {
	p, ok := a.cfg.Pool(pool)
	switch {
	case !ok || path == p.Path || strings.HasPrefix(path, p.Path+"."):
		return path
	case path == "":
		return p.Path
	}
	return p.Path + "." + path
}
