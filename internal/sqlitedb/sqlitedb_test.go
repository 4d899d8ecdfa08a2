package sqlitedb

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// What can't be read as a database is named, and not at some later statement.
func TestConnNamesTheFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "notes.txt")
	if err := os.WriteFile(path, []byte(strings.Repeat("no database ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := Open(path, Options{BusyTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}()
	if c, err := db.Conn(t.Context()); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("connection %v, error %v", c, err)
	}
}
