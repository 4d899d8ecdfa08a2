package demo

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// ErrForeign means that a directory holds what isn't the demo's: it is left as
// it is.
var ErrForeign = errors.New("it isn't the demo's; name an empty directory")

const (
	databaseFile = "app.db"
	configFile   = "config.yaml"
	// applicationID tells the demo's databases from others, in their header.
	applicationID = 0x67632d64
)

// own are the files that the demo, SQLite and the agent make.
var own = map[string]bool{
	configFile: true, databaseFile: true, databaseFile + "-wal": true, databaseFile + "-shm": true,
	databaseFile + "-journal": true, databaseFile + ".gc-agent.lock": true, databaseFile + ".gc-agent.pins": true,
}

//go:embed config.yaml
var configText []byte

// prepare makes dir, or empties it of an earlier demo, and writes the
// configuration.
func prepare(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the demo's directory: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read the demo's directory: %w", err)
	}
	for _, e := range entries {
		if err := checkOwn(dir, e); err != nil {
			return err
		}
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("remove an earlier demo: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, configFile), configText, 0o644); err != nil {
		return fmt.Errorf("write the demo's configuration: %w", err)
	}
	return nil
}

// checkOwn refuses a file that an earlier demo hasn't made.
func checkOwn(dir string, e fs.DirEntry) error {
	path := filepath.Join(dir, e.Name())
	ok := own[e.Name()] && e.Type().IsRegular()
	var err error
	switch e.Name() {
	case databaseFile:
		ok, err = isDatabase(path)
	case configFile:
		ok, err = isConfig(path)
	}
	if err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	if !ok {
		return fmt.Errorf("%s is there already: %w", path, ErrForeign)
	}
	return nil
}

// isDatabase reads the application's number, which stands in the header of an
// SQLite file.
func isDatabase(path string) (bool, error) {
	const magic, idAt = "SQLite format 3\x00", 68
	head, err := readHead(path, idAt+4)
	return len(head) == idAt+4 && bytes.HasPrefix(head, []byte(magic)) && binary.BigEndian.Uint32(head[idAt:]) == applicationID, err
}

// isConfig compares the first line, so that a configuration that somebody has
// played with still counts.
func isConfig(path string) (bool, error) {
	first, _, _ := bytes.Cut(configText, []byte("\n"))
	head, err := readHead(path, len(first))
	return bytes.Equal(head, first), err
}

// readHead reads the first n bytes, fewer where the file is shorter.
func readHead(path string, n int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	return io.ReadAll(io.LimitReader(f, int64(n)))
}
