package main

import (
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The network between the first agent and the server is cut without a word: no end
// of a connection hears of it, and nothing that is sent is acknowledged any more. The
// URL has the server look for that after seconds instead of a minute.
//
// Without the agent's settings the first case would take as long as the statement
// may, the second one a quarter of an hour, in which the server sends its answer again.
func TestTakeoverAfterNetworkCut(t *testing.T) {
	t.Parallel()
	for name, serverWaits := range map[string]bool{"while the server works": false, "while the server answers": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGated(t)
			w := newWire(t, g.url)
			g.takesOver(gatedDir(t, w.url), func(*process) {
				w.cut()
				if serverWaits {
					g.open()
				}
			})
		})
	}
}

// wire passes connections on to a server, until it is cut.
type wire struct {
	t   *testing.T
	url string // leads to the server

	mu    sync.Mutex
	conns []*net.TCPConn
}

func newWire(t *testing.T, server string) *wire {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	if u.Hostname() == "" || u.Query().Has("host") {
		t.Skip("the server isn't reached by TCP")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	target := net.JoinHostPort(u.Hostname(), portOr5432(u.Port()))
	query := u.Query()
	for name, value := range map[string]string{
		"tcp_keepalives_idle": "1", "tcp_keepalives_interval": "1", "tcp_keepalives_count": "2",
		"tcp_user_timeout": "3000", "client_connection_check_interval": "500",
	} {
		query.Set(name, value)
	}
	u.Host, u.RawQuery = listener.Addr().String(), query.Encode()
	w := &wire{t: t, url: u.String()}
	var group sync.WaitGroup
	t.Cleanup(func() {
		_ = listener.Close()
		w.mu.Lock()
		for _, conn := range w.conns {
			_ = conn.Close()
		}
		w.mu.Unlock()
		group.Wait()
	})
	group.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			w.connect(&group, client, target)
		}
	})
	return w
}

func portOr5432(port string) string {
	if port == "" {
		return "5432"
	}
	return port
}

func (w *wire) connect(group *sync.WaitGroup, client net.Conn, target string) {
	server, err := net.Dial("tcp", target)
	if err != nil {
		_ = client.Close()
		return
	}
	ends := []*net.TCPConn{client.(*net.TCPConn), server.(*net.TCPConn)}
	w.mu.Lock()
	w.conns = append(w.conns, ends...)
	w.mu.Unlock()
	for i, from := range ends {
		to := ends[1-i]
		group.Go(func() {
			_, _ = io.Copy(to, from)
			_, _ = to.Close(), from.Close()
		})
	}
}

// cut has the kernel throw away whatever arrives at either end of the connections
// that there are, keepalives and acknowledgements too, as if a cable were out.
func (w *wire) cut() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	for _, conn := range w.conns {
		// Nor does either end say anything by itself.
		if err := conn.SetKeepAlive(false); err != nil && !errors.Is(err, net.ErrClosed) {
			w.t.Fatal(err)
		}
		raw, err := conn.SyscallConn()
		if err != nil {
			w.t.Fatal(err)
		}
		var set error
		err = raw.Control(func(fd uintptr) {
			set = unix.SetsockoptSockFprog(int(fd), syscall.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing})
		})
		if err := errors.Join(err, set); err != nil && !errors.Is(err, net.ErrClosed) {
			w.t.Fatal(err)
		}
	}
}
