package fleet_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/alkblobs/gc-agent/fleet"
)

func TestFileLockContention(t *testing.T) {
	t.Parallel()
	path := databaseFile(t)
	lease := acquireFile(t, path)
	contendedFile(t, path)
	contendedFile(t, filepath.Join(filepath.Dir(path), ".", filepath.Base(path)))
	other := acquireFile(t, databaseFile(t))
	check(t, other.Release(t.Context()))

	check(t, lease.Release(t.Context()))
	next := acquireFile(t, path)
	check(t, lease.Release(t.Context())) // takes nothing from the next holder
	contendedFile(t, path)
	check(t, next.Release(t.Context()))
}

// Two names of one file are one lease: a link to it, and one to its directory.
func TestFileLockThroughLinks(t *testing.T) {
	t.Parallel()
	path := databaseFile(t)
	dir := t.TempDir()
	toFile, toDir := filepath.Join(dir, "link.db"), filepath.Join(dir, "dir")
	check(t, os.Symlink(path, toFile))
	check(t, os.Symlink(filepath.Dir(path), toDir))
	throughDir := filepath.Join(toDir, filepath.Base(path))
	names := []string{path, toFile, throughDir}
	for _, held := range names {
		lease := acquireFile(t, held)
		for _, name := range names {
			contendedFile(t, name)
		}
		check(t, lease.Release(t.Context()))
	}
}

// The lock file is for the agent's user alone, says who has the lease, and stays.
func TestFileLockFile(t *testing.T) {
	t.Parallel()
	path := databaseFile(t)
	lockPath := path + ".gc-agent.lock"
	check(t, os.WriteFile(lockPath, []byte("123456789 and more\n"), 0o600))
	lease := acquireFile(t, path)
	content, err := os.ReadFile(lockPath)
	check(t, err)
	equal(t, string(content), strconv.Itoa(os.Getpid())+"\n")
	contendedFile(t, path)
	check(t, lease.Release(t.Context()))
	if _, err := os.Stat(lockPath); err != nil {
		t.Errorf("after Release: %v", err)
	}

	check(t, os.Remove(lockPath))
	check(t, acquireFile(t, path).Release(t.Context()))
	info, err := os.Stat(lockPath)
	check(t, err)
	equal(t, info.Mode().Perm(), 0o600)
}

func TestFileLockMissingDatabase(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "none.db")
	if _, held, err := fleet.FileLockAcquire(path); err == nil || held || !strings.Contains(err.Error(), path) {
		t.Errorf("got held %t and error %v, want one that names %s", held, err, path)
	}
	if _, err := os.Lstat(path + ".gc-agent.lock"); err == nil {
		t.Error("a lock file was made for no database")
	}
}

// A link in the lock file's place isn't followed: it could lead to any file.
func TestFileLockPlantedLink(t *testing.T) {
	t.Parallel()
	path := databaseFile(t)
	victim := filepath.Join(t.TempDir(), "victim")
	check(t, os.WriteFile(victim, []byte("precious"), 0o600))
	check(t, os.Symlink(victim, path+".gc-agent.lock"))
	if _, held, err := fleet.FileLockAcquire(path); err == nil || held || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("got held %t and error %v, want one about the link", held, err)
	}
	content, err := os.ReadFile(victim)
	check(t, err)
	equal(t, string(content), "precious")
}

// Another process holds the lease until it ends, however it ends.
func TestFileLockOtherProcess(t *testing.T) {
	t.Parallel()
	path := databaseFile(t)
	child := childOf(t, os.Args[0], path)
	equal(t, firstLine(t, child), "held true, error <nil>")
	contendedFile(t, path)
	end(t, child)
	check(t, acquireFile(t, path).Release(t.Context()))
}

// Who may not write there reads which file it is about and what to do. Root may
// write everywhere, so where it runs the test the child is somebody else.
func TestFileLockPermission(t *testing.T) {
	t.Parallel()
	path := databaseFile(t)
	binary := filepath.Join(filepath.Dir(path), "test")
	content, err := os.ReadFile(os.Args[0])
	check(t, err)
	check(t, os.WriteFile(binary, content, 0o755))
	child := childOf(t, binary, path)
	if os.Getuid() == 0 {
		const nobody = 65534
		child.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	check(t, os.Chmod(filepath.Dir(filepath.Dir(path)), 0o755))
	check(t, os.Chmod(filepath.Dir(path), 0o555))
	t.Cleanup(func() { check(t, os.Chmod(filepath.Dir(path), 0o755)) })
	out := firstLine(t, child)
	end(t, child)
	for _, part := range []string{"held false", path + ".gc-agent.lock: permission denied", "run every agent of this database as the same user"} {
		if !strings.Contains(out, part) {
			t.Errorf("got %q, want it to say %q", out, part)
		}
	}
}

const childVariable = "GC_AGENT_TEST_LOCK"

// TestFileLockChild is the other process. It says what it got, and waits.
func TestFileLockChild(t *testing.T) {
	path := os.Getenv(childVariable)
	if path == "" {
		t.Skip("it is a part of other tests")
	}
	_, held, err := fleet.FileLockAcquire(path)
	fmt.Printf("held %t, error %v\n", held, err)
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// childOf returns the other process, not started yet.
func childOf(t *testing.T, binary, path string) *exec.Cmd {
	t.Helper()
	child := exec.CommandContext(t.Context(), binary, "-test.run=^TestFileLockChild$")
	child.Env = append(os.Environ(), childVariable+"="+path)
	child.Dir = "/"
	child.Stderr = os.Stderr
	return child
}

// firstLine starts the process and returns the first line that it prints.
func firstLine(t *testing.T, child *exec.Cmd) string {
	t.Helper()
	stdin, err := child.StdinPipe()
	check(t, err)
	t.Cleanup(func() { _ = stdin.Close() })
	stdout, err := child.StdoutPipe()
	check(t, err)
	check(t, child.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	check(t, err)
	return strings.TrimSpace(line)
}

// end kills the process, which therefore can't end well.
func end(t *testing.T, child *exec.Cmd) {
	t.Helper()
	check(t, child.Process.Kill())
	_ = child.Wait()
}

func databaseFile(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	check(t, err)
	path := filepath.Join(dir, "app.db")
	check(t, os.WriteFile(path, nil, 0o644))
	return path
}

func acquireFile(t *testing.T, path string) *fleet.FileLease {
	t.Helper()
	lease, held, err := fleet.FileLockAcquire(path)
	check(t, err)
	if !held || lease == nil {
		t.Fatalf("somebody else has the lease of %s", path)
	}
	return lease
}

func contendedFile(t *testing.T, path string) {
	t.Helper()
	lease, held, err := fleet.FileLockAcquire(path)
	check(t, err)
	if held || lease != nil {
		t.Fatalf("the lease of %s was given twice", path)
	}
}

// Any number may look at once, and none while a sweep is under way, nor the other
// way round. Where nobody has swept there is nothing to lock, and nothing is made.
func TestFileLockShare(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	take := func(acquire func(string) (*fleet.FileLease, bool, error), want bool) *fleet.FileLease {
		t.Helper()
		l, ok, err := acquire(path)
		if err != nil || ok != want {
			t.Fatalf("held %t, %v; want %t", ok, err, want)
		}
		return l
	}
	release := func(l *fleet.FileLease) {
		t.Helper()
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	release(take(fleet.FileLockShare, true))
	if _, err := os.Lstat(path + ".gc-agent.lock"); !os.IsNotExist(err) {
		t.Errorf("a look made the lock file: %v", err)
	}
	sweep := take(fleet.FileLockAcquire, true)
	take(fleet.FileLockShare, false)
	release(sweep)
	one, two := take(fleet.FileLockShare, true), take(fleet.FileLockShare, true)
	take(fleet.FileLockAcquire, false)
	release(one)
	release(two)
	release(take(fleet.FileLockAcquire, true))
	if _, ok, err := fleet.FileLockShare(path + "-gone"); ok || err == nil {
		t.Errorf("a database that isn't there: held %t, %v", ok, err)
	}
}

// The lock file names who has the lease.
func TestFileLockPID(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	check(t, os.WriteFile(path, nil, 0o600))
	if pid, ok := fleet.FileLockPID(path); ok {
		t.Errorf("without a lock file: pid %d", pid)
	}
	lease, _, err := fleet.FileLockAcquire(path)
	check(t, err)
	pid, ok := fleet.FileLockPID(path)
	equal(t, ok, true)
	equal(t, pid, os.Getpid())
	check(t, lease.Release(t.Context()))
}
