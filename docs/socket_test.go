package docs_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const socketPage = "docs/control-socket.md"

const (
	partsConfig = `
databases: {app: {url: "sqlite:app.db"}}
admin: {socket: gc-agent.sock}
pools:
  - name: parts
    database: app
    mode: enforce
    schedule: "@every 24h"
    window: 0
    blobs: [{type: table, table: parts, column: id}]
    liveness: [{name: msgs, table: msgs, column: part_id}]
`
	partsSchema = `CREATE TABLE parts (id INTEGER PRIMARY KEY); CREATE TABLE msgs (part_id INTEGER);
CREATE INDEX msgs_part ON msgs (part_id); INSERT INTO parts VALUES (1), (2); INSERT INTO msgs VALUES (1);`

	filesConfig = `
databases: {app: {url: "sqlite:app.db"}}
admin: {socket: gc-agent.sock}
pools:
  - name: files
    database: app
    mode: enforce
    schedule: "@every 24h"
    window: 0
    blobs: [{type: table, table: blobs, column: sha256}]
    liveness: [{name: attachments, table: attachments, column: blob}]
`
	filesSchema = `CREATE TABLE blobs (sha256 BLOB PRIMARY KEY NOT NULL, content BLOB); CREATE TABLE attachments (blob BLOB);
CREATE INDEX attachments_blob ON attachments (blob);`
)

// startDaemon starts the daemon on an application's SQLite file, in a directory of
// its own, and returns that once the socket is open.
func startDaemon(t *testing.T, config, schema string) (dir string, env []string) {
	t.Helper()
	needs(t, "python3")
	dir, err := os.MkdirTemp("", "gc-agent-docs-") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	python(t, dir, "import sqlite3\nsqlite3.connect('app.db').executescript('''"+schema+"''')")
	cmd := exec.Command(filepath.Join(binary(t), "gc-agent"), "run")
	var log bytes.Buffer
	cmd.Dir, cmd.Stderr = dir, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("the daemon ended with %v\n%s", err, &log)
		}
	})
	for deadline := time.Now().Add(30 * time.Second); ; {
		if _, err := os.Stat(filepath.Join(dir, "gc-agent.sock")); err == nil {
			return dir, append(os.Environ(), "LC_ALL=C.UTF-8")
		}
		if time.Now().After(deadline) {
			t.Fatal("the socket isn't there")
		}
	}
}

func python(t *testing.T, dir, code string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "python3", "-c", code)
	cmd.Dir = dir
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	return string(output)
}

// Every request that the page shows is sent to a daemon, and answered so.
func TestControlSocketRequests(t *testing.T) {
	t.Parallel()
	needs(t, "curl")
	dir, env := startDaemon(t, partsConfig, partsSchema)
	for _, w := range readWalks(t, socketPage) {
		if len(w.steps) != 7 {
			t.Errorf("%d requests are shown", len(w.steps))
		}
		for _, s := range w.steps {
			if s.output == nil {
				t.Fatalf("the answer to %s isn't shown", s.commands)
			}
			got := runBlock(t, s.commands, dir, env)
			if diff := cmp.Diff(s.output.contents, got); diff != "" {
				t.Errorf("%s isn't answered as the page shows (- page, + answered):\n%s", s.commands, diff)
			}
		}
	}
}

// The upload that the page shows stores a content once, pins while it does, and
// what it refers to is there.
func TestControlSocketUpload(t *testing.T) {
	t.Parallel()
	dir, _ := startDaemon(t, filesConfig, filesSchema)
	var code string
	for _, f := range readFences(t, socketPage) {
		if f.lang == "python" {
			code += f.contents
		}
	}
	got := python(t, dir, code+`
db, agent = sqlite3.connect("app.db"), Agent("gc-agent.sock")
for content in b"hello", b"hello", b"world":
    attach(db, agent, content)
print(agent.ask("GET", "/v1/pools/files/pins"))
print(*db.execute("SELECT count(*), count(DISTINCT blob) FROM attachments JOIN blobs ON sha256 = blob").fetchone())
try:
    agent.ask("POST", "/v1/pools/files/pins", keys=["zz"], owner="web-1")
except RuntimeError as e:
    print(e)
`)
	if want := "{'pins': []}\n3 2\n"; !strings.HasPrefix(got, want) || !strings.Contains(got, "isn't hex") {
		t.Errorf("printed %s", got)
	}
}
