package pgdb

import (
	"errors"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// limitUnacknowledged is the server's tcp_user_timeout for this end: a statement that
// was sent into the void is given up as soon as a silent server is.
func limitUnacknowledged(network, _ string, c syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return nil
	}
	var set error
	err := c.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
	})
	return errors.Join(err, set)
}
