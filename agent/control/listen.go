package control

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	socketMode = 0o660
	// lockSuffix is appended to the path of the socket.
	lockSuffix = ".lock"
	// mostConns bounds how many connections are open at once; others wait.
	mostConns = 128
	// dialTimeout is how long somebody may take to answer who has the socket already.
	dialTimeout = 2 * time.Second
)

// Listener is the control socket, open and in its place. It is removed when it is
// closed.
type Listener struct {
	*net.UnixListener
	path  string
	made  os.FileInfo
	lock  *os.File
	slots chan struct{}

	closing sync.Once
	closed  chan struct{}
}

// ErrTaken means that another daemon has the socket.
var ErrTaken = errors.New("another daemon has it")

// Listen makes the socket at path, with mode 0660 from its first moment there. Its
// directory must exist. A socket that a daemon left behind is replaced; one on
// which somebody answers, and whatever isn't a socket, is left alone, which is an
// error.
//
// A lock on a file beside it is held until Unlock: two daemons that start at once
// would both find nobody, and one that is stopping still answers.
func Listen(path string) (*Listener, error) {
	lock, err := lockFile(path + lockSuffix)
	if err != nil {
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	l, err := listen(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("control socket %s: %w", path, err), lock.Close())
	}
	l.lock = lock
	return l, nil
}

func lockFile(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	switch {
	case errors.Is(err, syscall.ELOOP):
		return nil, fmt.Errorf("%w: it is a symbolic link, which no daemon makes: remove it", err)
	case err != nil:
		return nil, err
	}
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	var lockErr error
	err = raw.Control(func(fd uintptr) { lockErr = syscall.Flock(int(fd), syscall.LOCK_EX|syscall.LOCK_NB) })
	switch {
	case errors.Is(lockErr, syscall.EWOULDBLOCK):
		return nil, errors.Join(ErrTaken, file.Close())
	case err != nil || lockErr != nil:
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, errors.Join(err, lockErr)), file.Close())
	}
	return file, nil
}

func listen(path string) (*Listener, error) {
	if err := clearStale(path); err != nil {
		return nil, err
	}
	// Made in a directory that nobody else may enter, given its mode there, and linked
	// to its place, which fails where something stands by now. How long this path is,
	// package config knows.
	hidden := filepath.Join(filepath.Dir(path), "."+strconv.FormatUint(rand.Uint64N(36*36*36*36), 36))
	if err := os.Mkdir(hidden, 0o700); err != nil {
		return nil, err
	}
	defer func() {
		// It may be empty already; what stays harms nobody.
		_ = os.RemoveAll(hidden)
	}()
	inside := filepath.Join(hidden, "s")
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: inside, Net: "unix"})
	if err != nil {
		return nil, err
	}
	socket.SetUnlinkOnClose(false)
	made, err := place(inside, path)
	if err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	return &Listener{UnixListener: socket, path: path, made: made, slots: make(chan struct{}, mostConns), closed: make(chan struct{})}, nil
}

func place(inside, path string) (os.FileInfo, error) {
	if err := os.Chmod(inside, socketMode); err != nil {
		return nil, err
	}
	if err := os.Link(inside, path); err != nil {
		return nil, err
	}
	return os.Lstat(path)
}

// clearStale removes a socket on which nobody answers.
func clearStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("something that isn't a socket is there, and is left alone")
	}
	conn, err := net.DialTimeout("unix", path, dialTimeout)
	switch {
	case err == nil:
		return errors.Join(ErrTaken, conn.Close())
	case !errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("it isn't known whether somebody has it: %w", err)
	}
	return os.Remove(path)
}

// Accept waits for a connection, and for room for one.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	conn, err := l.UnixListener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &slotConn{Conn: conn, free: sync.OnceFunc(func() { <-l.slots })}, nil
}

// slotConn makes room when it is closed.
type slotConn struct {
	net.Conn
	free func()
}

func (c *slotConn) Close() error {
	defer c.free()
	return c.Conn.Close()
}

// Close ends listening and removes the socket, unless another file stands there by
// now. It may be repeated.
func (l *Listener) Close() (err error) {
	l.closing.Do(func() {
		close(l.closed)
		if info, statErr := os.Lstat(l.path); statErr == nil && os.SameFile(info, l.made) {
			err = os.Remove(l.path)
		}
		err = errors.Join(err, l.UnixListener.Close())
	})
	return err
}

// Unlock closes the listener and lets another daemon have the socket. It comes
// when nothing is answered any more.
func (l *Listener) Unlock() error {
	return errors.Join(l.Close(), l.lock.Close())
}
