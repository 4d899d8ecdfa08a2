package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// lockFile is a kind of lock on a file beside a database.
type lockFile struct {
	suffix string // appended to the path of the database
	what   string // for errors
}

var (
	sweepLeaseFile = lockFile{".gc-agent.lock", "acquire sweep lease"}
	pinMarkFile    = lockFile{".gc-agent.pins", "mark the pins in memory"}
)

// FileLease is the exclusive right to sweep the pools of an SQLite file, until it
// is released or the process ends.
type FileLease struct {
	mu   sync.Mutex
	file *os.File // nil once released, or where there was nothing to lock
}

// FileLockAcquire takes the lease of the SQLite file at path, without waiting. It
// returns false, and no error, while anybody holds it, this process included. The
// file must exist. Its names through symbolic links share one lease; hard links
// don't.
//
// The lock is on a file of its own beside the database, since locks on the
// database are SQLite's. It holds the process id of who has the lease, or had it
// last, for people to read.
func FileLockAcquire(path string) (*FileLease, bool, error) {
	l, ok, err := sweepLeaseFile.acquire(path, os.O_RDWR|os.O_CREATE, syscall.LOCK_EX)
	if ok {
		writePID(l.file)
	}
	return l, ok, err
}

// FileLockShare keeps sweeps away for as long as somebody looks, and is false
// while one is under way. It writes nothing: where there is no lock file, nobody
// has ever swept, and there is nothing to lock.
func FileLockShare(path string) (*FileLease, bool, error) {
	l, ok, err := sweepLeaseFile.acquire(path, os.O_RDONLY, syscall.LOCK_SH)
	if errors.Is(err, fs.ErrNotExist) {
		if _, statErr := os.Stat(path); statErr == nil {
			return &FileLease{}, true, nil
		}
	}
	return l, ok, err
}

func (f lockFile) acquire(path string, flags, how int) (*FileLease, bool, error) {
	lockPath, err := f.pathOf(path)
	if err != nil {
		return nil, false, fmt.Errorf("%s of %s: %w", f.what, path, err)
	}
	file, err := openLock(lockPath, flags)
	if err != nil {
		return nil, false, fmt.Errorf("%s of %s: %w", f.what, path, err)
	}
	switch err := flock(file, how|syscall.LOCK_NB); {
	case errors.Is(err, syscall.EWOULDBLOCK):
		return nil, false, file.Close()
	case err != nil:
		_ = file.Close() // it holds no lock
		return nil, false, fmt.Errorf("%s of %s: lock %s: %w", f.what, path, lockPath, err)
	}
	return &FileLease{file: file}, true, nil
}

func (f lockFile) pathOf(path string) (string, error) {
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", err
	}
	return resolved + f.suffix, nil
}

// openLock follows no link: whoever may write to the application's directory
// could put one there, and have a file of the agent's choosing overwritten.
func openLock(lockPath string, flags int) (*os.File, error) {
	file, err := os.OpenFile(lockPath, flags|syscall.O_NOFOLLOW, 0o600)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%w: run every agent of this database as the same user, one who may write to %s, "+
			"or remove a lock file of another user's while no agent runs", err, filepath.Dir(lockPath))
	case errors.Is(err, syscall.ELOOP):
		return nil, fmt.Errorf("%w: it is a symbolic link, which no agent makes: remove it", err)
	}
	return file, err
}

// writePID fails on a full disk, say. Nothing depends on it: the lock is held.
func writePID(file *os.File) {
	if err := file.Truncate(0); err == nil {
		_, _ = file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
}

// FileLockPID returns the process id in the lock file of the SQLite file at path: that
// of who has the lease for a sweep, or had it last. It is false where none is to be read.
func FileLockPID(path string) (pid int, ok bool) { return sweepLeaseFile.pid(path) }

func (f lockFile) pid(path string) (pid int, ok bool) {
	lockPath, err := f.pathOf(path)
	if err != nil {
		return 0, false
	}
	file, err := openLock(lockPath, os.O_RDONLY)
	if err != nil {
		return 0, false
	}
	text, err := io.ReadAll(io.LimitReader(file, 32))
	_ = file.Close() // it was only read
	if err != nil {
		return 0, false
	}
	pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
	return pid, err == nil
}

// Release gives the lease up. It may be repeated, and doesn't wait.
//
// The lock file stays. If it were removed, an agent that has just opened it would
// get a lock on a file without a name, and the next one would make a new file and
// get a lock on that: two holders.
func (l *FileLease) Release(context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	// Closing alone wouldn't do while a child that is being started still has a
	// copy of the descriptor.
	err := errors.Join(flock(l.file, syscall.LOCK_UN), l.file.Close())
	l.file = nil
	if err != nil {
		return fmt.Errorf("release sweep lease: %w", err)
	}
	return nil
}

// flock goes through SyscallConn so that the descriptor stays non-blocking and
// can't be closed meanwhile.
func flock(file *os.File, how int) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var lockErr error
	if err := raw.Control(func(fd uintptr) { lockErr = syscall.Flock(int(fd), how) }); err != nil {
		return err
	}
	return lockErr
}
