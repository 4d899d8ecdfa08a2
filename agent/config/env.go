package config

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// maxFile is the largest configuration file, and the largest url_file, in bytes.
const maxFile = 1 << 20

// Env is what a configuration depends on beside its file. A nil field stands for
// that of OSEnv.
type Env struct {
	// Lookup returns a variable and whether it is set.
	Lookup func(name string) (string, bool)
	// Hostname stands in for the variable HOSTNAME where that isn't set.
	Hostname func() (string, error)
	// ReadFile returns a file's content.
	ReadFile func(path string) ([]byte, error)
	// Resolve returns the one path of the file that path leads to.
	Resolve func(path string) (string, error)
	// Now tells whether a window fits into what can be written down.
	Now func() time.Time
}

// OSEnv returns the environment of the process.
func OSEnv() Env {
	return Env{
		Lookup:   os.LookupEnv,
		Hostname: os.Hostname,
		ReadFile: readFile,
		Resolve:  resolve,
		Now:      time.Now,
	}
}

func (e Env) orOS() Env {
	actual := OSEnv()
	if e.Lookup == nil {
		e.Lookup = actual.Lookup
	}
	if e.Hostname == nil {
		e.Hostname = actual.Hostname
	}
	if e.ReadFile == nil {
		e.ReadFile = actual.ReadFile
	}
	if e.Resolve == nil {
		e.Resolve = actual.Resolve
	}
	if e.Now == nil {
		e.Now = actual.Now
	}
	return e
}

// variable returns what ${name} stands for.
func (e Env) variable(name string) (string, bool) {
	text, ok := e.Lookup(name)
	if ok || name != "HOSTNAME" {
		return text, ok
	}
	host, err := e.Hostname()
	return host, err == nil
}

// readFile reads no more than it takes to know that a file is too long: a path
// may lead to a device.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return data, nil
}

// resolve follows links. A file that doesn't exist yet still has a directory.
func resolve(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("make %s absolute: %w", path, err)
	}
	if actual, err := filepath.EvalSymlinks(abs); err == nil {
		return actual, nil
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if err != nil {
		return "", fmt.Errorf("resolve %s: %w", path, err)
	}
	return filepath.Join(dir, filepath.Base(abs)), nil
}
