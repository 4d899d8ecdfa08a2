package pgtest

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Server starts a Postgres server of the test's own, with more in its environment
// than in the test's, and returns the URL of its superuser. The server ends with
// the test, or with the test's process. Where tests run without a server it is
// skipped.
func Server(t testing.TB, env ...string) string {
	t.Helper()
	if os.Getenv(Variable) == "" {
		t.Skipf("%s is not set: run make test", Variable)
	}
	// It prints the server's URL and stays until its standard input ends.
	cmd := exec.Command(filepath.Join(moduleRoot(t), "scripts", "postgres"), "run", "--", "sh", "-c", `echo "$`+Variable+`"; exec cat`)
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, Variable+"=") }), env...)
	cmd.Stderr = t.Output()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(stdin.Close(), cmd.Wait()); err != nil {
			t.Errorf("end the test's own server: %v", err)
		}
	})
	url, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("start a server of the test's own: %v", err)
	}
	return strings.TrimSpace(url)
}

// moduleRoot is the directory that go.mod is in.
func moduleRoot(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	for err == nil {
		if _, err = os.Stat(filepath.Join(dir, "go.mod")); errors.Is(err, fs.ErrNotExist) && dir != filepath.Dir(dir) {
			dir, err = filepath.Dir(dir), nil
			continue
		}
		break
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
