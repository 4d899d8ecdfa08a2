package control_test

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite" // the driver

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/agent/control"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// daemon is an agent that is served, over an application's database.
type daemon struct {
	t      *testing.T
	socket string
	cfg    *config.Validated
	client *http.Client
	stop   func()
	cut    func()
	ended  <-chan error
}

const appSchema = `CREATE TABLE blobs (id TEXT PRIMARY KEY NOT NULL);
CREATE TABLE refs (blob TEXT);
CREATE INDEX refs_blob ON refs (blob);
INSERT INTO blobs VALUES ('a'), ('b'), ('c');
INSERT INTO refs VALUES ('a')`

// hook is called before every statement of the agent's.
type hook func(sql string)

func (h hook) Before(sql string) { h(sql) }
func (hook) After(string)        {}

// newSQLiteApp returns the path of an application's file.
func newSQLiteApp(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "app.db")
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(wal)")
	check(t, err)
	_, err = db.ExecContext(t.Context(), appSchema)
	check(t, errors.Join(err, db.Close()))
	return path
}

func sqliteDaemon(t *testing.T, before hook) *daemon {
	t.Helper()
	return serve(t, "sqlite:"+newSQLiteApp(t), "serial", "", before)
}

// serve starts a daemon for the pool p; nothing of it is on a schedule.
func serve(t *testing.T, url, guard, extra string, before hook) *daemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "gc-agent-control-") // short enough for a socket
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	d := &daemon{t: t, socket: filepath.Join(dir, "s")}
	text := fmt.Sprintf(`
databases: {app: {url: %q}}
admin: {socket: %q}
pools:
  - name: p
    database: app
    mode: enforce
    window: 0s
    schedule: "@every 1h"
    brakes: {off: [max_dead_ratio]}
    limits: {batch: 1}
    %s
    blobs: [{type: table, table: blobs, column: id}]
    liveness: [{name: refs, table: refs, column: blob, guard: %s}]
`, url, d.socket, extra, guard)
	d.cfg, err = config.Parse("test.yaml", []byte(text), config.OSEnv())
	check(t, err)
	opts := agent.Options{Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel)}
	if before != nil {
		opts.SQLiteTracer = before
	}
	ag, err := agent.New(d.cfg, opts)
	check(t, err)
	l, err := control.Listen(d.socket)
	check(t, err)
	ctx, cut := context.WithCancel(t.Context())
	stop, ended := make(chan struct{}), make(chan error, 1)
	d.stop, d.cut, d.ended = sync.OnceFunc(func() { close(stop) }), cut, ended
	served := make(chan struct{})
	go func() {
		defer close(served)
		ended <- control.NewServer(control.Options{Agent: ag, Config: d.cfg, Log: opts.Log}).Serve(ctx, l, stop)
	}()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", d.socket)
	}}
	d.client = &http.Client{Transport: transport}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		cut()
		<-served
		check(t, ag.Close())
	})
	return d
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ask sends a request and returns the status and the answer, on one line.
func (d *daemon) ask(method, path, body string) (status int, answer string) {
	d.t.Helper()
	req, err := http.NewRequestWithContext(d.t.Context(), method, "http://gc-agent"+path, strings.NewReader(body))
	check(d.t, err)
	resp, err := d.client.Do(req)
	check(d.t, err)
	defer func() { check(d.t, resp.Body.Close()) }()
	data, err := io.ReadAll(resp.Body)
	check(d.t, err)
	return resp.StatusCode, strings.TrimSpace(string(data))
}

func (d *daemon) wants(method, path, body string, status int, want string) {
	d.t.Helper()
	got, answer := d.ask(method, path, body)
	if path == swept && got == 200 { // a stream, whose last line tells
		answer = answer[strings.LastIndexByte(answer, '\n')+1:]
	}
	if got != status || !strings.Contains(answer, want) || strings.Count(answer, "\n") != 0 {
		d.t.Errorf("%s %s %.200s\n got %d %s\nwant %d %s", method, path, body, got, answer, status, want)
	}
}

const (
	pins  = "/v1/pools/p/pins"
	renew = "/v1/pools/p/pins/renew"
	drop  = "/v1/pools/p/window/drop"
	swept = "/v1/pools/p/sweep"
)

// eachPlace runs a test over pins in memory and over pins in a database.
func eachPlace(t *testing.T, test func(t *testing.T, d *daemon)) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		test(t, sqliteDaemon(t, nil))
	})
	for name, extra := range map[string]string{"postgres": "", "fleet": "fleet: true"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := pgtest.Database(t)
			pgtest.Exec(t, pgtest.Connect(t, url), appSchema)
			d := serve(t, url, "settle", extra, nil)
			d.wants("POST", swept, `{}`, 200, `"candidates_staged":2`) // which makes the schema
			d.wants("POST", drop, `{"all": true}`, 200, `{"dropped":2,"missing":0}`)
			test(t, d)
		})
	}
}

func TestPins(t *testing.T) {
	eachPlace(t, func(t *testing.T, d *daemon) {
		d.wants("POST", pins, `{"keys": ["a", "x", "a"], "owner": "me", "ttl": "50s"}`, 200, `{"exists":[true,false,true]}`)
		d.wants("POST", pins, `{"keys_hex": ["62"], "owner_hex": "ff", "ttl": "20s"}`, 200, `{"exists":[true]}`)
		d.wants("POST", pins, `{"keys": ["\"b\""], "owner": ""}`, 200, `{"exists":[true]}`)
		var list control.PinsAnswer
		_, answer := d.ask("GET", pins, "")
		check(t, json.Unmarshal([]byte(answer), &list))
		for i := range list.Pins {
			if ms := list.Pins[i].ExpiresInMS; ms <= 0 || ms > 60_000 {
				t.Errorf("%d ms are left", ms)
			}
			list.Pins[i].ExpiresInMS = 0
		}
		want := control.PinsAnswer{Pins: []control.Pin{
			{Key: "a", KeyHex: "61", Owner: "me", OwnerHex: "6d65"},
			{Key: "b", KeyHex: "62"},
			{Key: "b", KeyHex: "62", OwnerHex: "ff"},
			{Key: "x", KeyHex: "78", Owner: "me", OwnerHex: "6d65"},
		}}
		if diff := cmp.Diff(want, list); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		d.wants("GET", pins+"?limit=1&owner=me", "", 200, `"next":"61.6d65"`)
		d.wants("GET", pins+"?limit=1&owner=me&after=61.6d65", "", 200, `"key":"x"`)
		d.wants("GET", pins+"?key=b&owner_hex=ff", "", 200, `[{"key":"b","key_hex":"62","owner":"","owner_hex":"ff"`)
		d.wants("GET", pins+"?key_hex=7a", "", 200, `{"pins":[]}`)
		d.wants("POST", renew, `{"owner": "me"}`, 200, `{"renewed":2,"lost":0}`)
		d.wants("POST", renew, `{"owner": "nobody", "ttl": "1s"}`, 200, `{"renewed":0,"lost":0}`)
		d.wants("DELETE", pins, `{"keys": ["x", "y", "a"], "owner": "me"}`, 200, `{"removed":[true,false,true]}`)
	})
}

// What a pin was answered for is kept by the sweep of the same daemon.
func TestSweepKeepsWhatWasPinned(t *testing.T) {
	eachPlace(t, func(_ *testing.T, d *daemon) {
		d.wants("POST", pins, `{"keys": ["b"], "owner": "me"}`, 200, `{"exists":[true]}`)
		d.wants("POST", swept, `{"dry_run": true}`, 200, `"candidates_staged":1`)
		d.wants("POST", swept, ``, 200, `"candidates_staged":1`)
		d.wants("POST", drop, `{"keys": ["b", "c", "c"]}`, 200, `{"dropped":1,"missing":1}`)
	})
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	d := sqliteDaemon(t, nil)
	long := strings.Repeat("k", 1501)
	var many []string
	for range 10_001 {
		many = append(many, `"k"`)
	}
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"GET", "/", "", 404, "there is no GET /"},
		{"PUT", pins, "{}", 404, "there is no PUT"},
		{"GET", "/v1/pools/other/pins", "", 404, `the daemon has no pool \"other\"`},
		{"POST", pins, `{"keys": ["a"], "owner": "me"`, 400, "isn't the JSON object"},
		{"POST", pins, `[]`, 400, "isn't the JSON object"},
		{"POST", pins, `{"keys": ["a"], "owner": "me"} {}`, 400, "goes on behind"},
		{"POST", pins, `{"keys": ["a"], "owner": "me", "tll": "1s"}`, 400, `unknown field \"tll\"`},
		{"POST", pins, `{"keys": ["a"], "owner": "me", "owner": "you"}`, 400, `the field \"owner\" twice`},
		{"POST", pins, `{"keys": ["a"], "Owner": "me"}`, 400, `unknown field \"Owner\"`},
		{"POST", pins, `{"\u017feys": ["a"], "\u212aeys": ["a"], "owner": "me"}`, 400, `unknown field`},
		{"POST", swept, `{"dry_run": true, "DRY_RUN": false}`, 400, `unknown field \"DRY_RUN\"`},
		{"POST", pins, `{"keys": "a", "owner": "me"}`, 400, "isn't the JSON object"},
		{"POST", pins, "{\"keys\": [\"a\xff\"], \"owner\": \"me\"}", 400, "isn't UTF-8"},
		{"POST", pins, `{"keys": ["\ud800"], "owner": "me"}`, 400, "U+FFFD"},
		{"POST", pins, `{"keys": ["a"], "owner": "\ufffd"}`, 400, "U+FFFD"},
		{"POST", pins, ``, 400, "give an owner"},
		{"POST", pins, `{"owner": "me"}`, 400, "at least one key"},
		{"POST", pins, `{"keys": ["a"]}`, 400, "give an owner"},
		{"POST", pins, `{"keys": ["a"], "owner": "me", "owner_hex": "00"}`, 400, "give an owner"},
		{"POST", pins, `{"keys": ["a"], "keys_hex": ["00"], "owner": "me"}`, 400, "not both"},
		{"POST", pins, `{"keys_hex": ["0g"], "owner": "me"}`, 400, "keys_hex"},
		{"POST", pins, `{"keys_hex": ["ff"], "owner": "me"}`, 400, `key \\xff isn't a key of a pool whose keys are text`},
		{"POST", pins, `{"keys": ["\\xzz"], "owner": "me"}`, 400, "isn't hex"},
		{"POST", pins, `{"keys": ["` + long + `"], "owner": "me"}`, 400, "1501 bytes"},
		{"POST", pins, `{"keys": ["a"], "owner": "` + long + `"}`, 400, "the owner is longer"},
		{"POST", pins, `{"keys": ["a"], "owner": "me", "ttl": "60"}`, 400, "needs a unit"},
		{"POST", pins, `{"keys": ["a"], "owner": "me", "ttl": 60}`, 400, "isn't the JSON object"},
		{"POST", pins, `{"keys": ["a"], "owner": "me", "ttl": "61s"}`, 400, "at most 1m0s (pins.ttl)"},
		{"POST", pins, `{"keys": ["a"], "owner": "me", "ttl": "0"}`, 400, "above 0"},
		{"POST", pins, `{"owner": "me", "keys": [` + strings.Join(many, ",") + `]}`, 400, "10001 keys"},
		{"POST", pins, `{"owner": "` + strings.Repeat(" ", 4<<20) + `"}`, 413, "longer than 4194304 bytes"},
		{"POST", renew, `{"owner": "me", "ttl": "61s"}`, 400, "at most"},
		{"GET", pins + "?limit=0", "", 400, "limit"},
		{"GET", pins + "?limit=1001", "", 400, "limit"},
		{"GET", pins + "?after=zz", "", 400, "after"},
		{"GET", pins + "?owner=a&owner=b", "", 400, "more than once"},
		{"GET", pins + "?what=a", "", 400, `not \"what\"`},
		{"POST", drop, `{"all": true, "keys": ["a"]}`, 400, "not both"},
		{"POST", drop, `{}`, 400, "at least one key"},
		{"POST", swept, `{"override": ["no_such_brake"]}`, 400, "no brake is named"},
		{"POST", swept + "/stop", `{"x": 1}`, 400, "unknown field"},
	} {
		d.wants(c.method, c.path, c.body, c.status, c.want)
		if _, answer := d.ask(c.method, c.path, c.body); !strings.HasPrefix(answer, `{"error":"`) {
			t.Errorf("%s %s: %s", c.method, c.path, answer)
		}
	}
	d.wants("GET", pins, "", 200, `{"pins":[]}`)
	d.wants("POST", swept+"/stop", ``, 200, `{"stopping":0}`)
}

// A configuration that isn't the daemon's is told so, and so is a pool it doesn't
// know.
func TestOtherConfiguration(t *testing.T) {
	t.Parallel()
	d := sqliteDaemon(t, nil)
	client, err := control.Dial(t.Context(), d.socket)
	check(t, err)
	pool := control.Pool{Client: client, Name: "p", Digest: d.cfg.PoolDigest("p")}
	_, err = pool.Pins(t.Context(), nil, "")
	check(t, err)
	for _, other := range []control.Pool{{Client: client, Name: "p", Digest: "another"}, {Client: client, Name: "q", Digest: "another"}} {
		var answer *control.Error
		_, err = other.Sweep(t.Context(), control.SweepRequest{}, nil)
		if !errors.As(err, &answer) || !answer.Usage() || !strings.Contains(err.Error(), "another configuration") {
			t.Errorf("err = %v", err)
		}
	}
}

// holding lets statements pass until one contains all of the parts, from when it
// is armed, and keeps that one until it is let go.
type holding struct {
	mu      sync.Mutex
	parts   []string
	armed   bool
	reached chan struct{}
	letGo   chan struct{}
}

func hold(parts ...string) *holding {
	return &holding{parts: parts, reached: make(chan struct{}), letGo: make(chan struct{})}
}

func (h *holding) arm() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.armed = true
}

func (h *holding) see(sql string) {
	for _, part := range h.parts {
		if !strings.Contains(sql, part) {
			return
		}
	}
	h.mu.Lock()
	armed := h.armed
	h.armed = false
	h.mu.Unlock()
	if armed {
		close(h.reached)
		<-h.letGo
	}
}

// answered runs a request beside the test.
func (d *daemon) answered(method, path, body string) <-chan string {
	done := make(chan string, 1)
	go func() {
		_, answer := d.ask(method, path, body)
		done <- answer
	}()
	return done
}

// A sweep of a daemon streams how far it is, and stops after its batch when it is
// told to.
func TestSweepIsStopped(t *testing.T) {
	t.Parallel()
	h := hold("FILTER (WHERE")
	d := sqliteDaemon(t, h.see)
	client, err := control.Dial(t.Context(), d.socket)
	check(t, err)
	pool := control.Pool{Client: client, Name: "p", Digest: d.cfg.PoolDigest("p")}
	h.arm()
	var seen []string
	type ended struct {
		rep agent.Report
		err error
	}
	done := make(chan ended, 1)
	go func() {
		rep, err := pool.Sweep(t.Context(), control.SweepRequest{}, func(p agent.Progress) { seen = append(seen, p.Pool+" "+p.Phase) })
		done <- ended{rep, err}
	}()
	<-h.reached
	stopping, err := pool.StopSweep(t.Context())
	check(t, err)
	if stopping.Stopping != 1 {
		t.Errorf("%d were told", stopping.Stopping)
	}
	close(h.letGo)
	got := <-done
	check(t, got.err)
	if !got.rep.Stopped() || got.rep.Pool != "p" || len(seen) == 0 || seen[0] != "p mark" {
		t.Errorf("%+v, progress %v", got.rep, seen)
	}
}

// When whoever asked for a sweep goes away it stops.
func TestSweepEndsWithItsClient(t *testing.T) {
	t.Parallel()
	h := hold("BEGIN IMMEDIATE")
	d := sqliteDaemon(t, h.see)
	h.arm()
	ctx, cancel := context.WithCancel(t.Context())
	client, err := control.Dial(ctx, d.socket)
	check(t, err)
	left := make(chan error, 1)
	go func() {
		_, err := control.Pool{Client: client, Name: "p"}.Sweep(ctx, control.SweepRequest{}, nil)
		left <- err
	}()
	<-h.reached
	cancel()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("err = %v", err)
	}
	// Its lease is given back once it has stopped.
	close(h.letGo)
	d.until(func() bool {
		_, answer := d.ask("POST", swept+"/stop", "")
		return answer == `{"stopping":0}`
	})
}

func (d *daemon) until(ok func() bool) {
	d.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			d.t.Fatal("it takes too long")
		}
	}
}

// A pin that is asked for while the daemon stops is answered; the socket is gone
// by then, and no other daemon may have it before the answer.
func TestStopFinishesWhatIsAtHand(t *testing.T) {
	t.Parallel()
	h := hold("FROM", "blobs", "p.")
	d := sqliteDaemon(t, h.see)
	h.arm()
	done := d.answered("POST", pins, `{"keys": ["a"], "owner": "me"}`)
	<-h.reached
	d.stop()
	d.until(func() bool {
		_, err := os.Lstat(d.socket)
		return errors.Is(err, fs.ErrNotExist)
	})
	if _, err := control.Dial(t.Context(), d.socket); !errors.Is(err, control.ErrNoDaemon) {
		t.Errorf("err = %v", err)
	}
	if _, err := control.Listen(d.socket); !errors.Is(err, control.ErrTaken) {
		t.Errorf("another daemon has the socket: err = %v", err)
	}
	close(h.letGo)
	if answer := <-done; answer != `{"exists":[true]}` {
		t.Errorf("answered %s", answer)
	}
	check(t, <-d.ended)
	l, err := control.Listen(d.socket)
	check(t, err)
	check(t, l.Unlock())
}

// A client that sends its request slowly, or never, keeps nobody else waiting.
func TestSlowClients(t *testing.T) {
	t.Parallel()
	d := sqliteDaemon(t, nil)
	for _, sent := range []string{"", "POST ", "POST " + pins + " HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"} {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", d.socket)
		check(t, err)
		defer func() { check(t, conn.Close()) }()
		_, err = io.WriteString(conn, sent)
		check(t, err)
		defer func() {
			check(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
			// Either nothing, or a refusal; and then the end.
			if answer, err := io.ReadAll(conn); err != nil || bytes.Contains(answer, []byte("200")) {
				t.Errorf("after %q: %s, %v", sent, answer, err)
			}
		}()
	}
	d.wants("POST", pins, `{"keys": ["a"], "owner": "me"}`, 200, `{"exists":[true]}`)
}

// What isn't HTTP, and headers without end, are answered and left.
func TestHostileBytes(t *testing.T) {
	t.Parallel()
	d := sqliteDaemon(t, nil)
	for _, sent := range []string{
		"\x00\xff\r\n\r\n", "GET / HTTP/1.1\r\n" + strings.Repeat("X: "+strings.Repeat("y", 1000)+"\r\n", 40) + "\r\n",
		"POST " + pins + " HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{}",
	} {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", d.socket)
		check(t, err)
		_, _ = io.WriteString(conn, sent) // the other end may have had enough
		check(t, conn.(*net.UnixConn).CloseWrite())
		check(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
		line, _ := bufio.NewReader(conn).ReadString('\n')
		if !strings.HasPrefix(line, "HTTP/1.1 4") {
			t.Errorf("answered %q", line)
		}
		check(t, conn.Close())
	}
	d.wants("GET", pins, "", 200, `{"pins":[]}`)
}

// Any number may pin at once.
func TestPinsAtOnce(t *testing.T) {
	t.Parallel()
	d := sqliteDaemon(t, nil)
	var group sync.WaitGroup
	for n := range 40 {
		group.Go(func() {
			owner := fmt.Sprintf(`"owner": "o%d"`, n%4)
			d.wants("POST", pins, `{"keys": ["a", "x"], `+owner+`}`, 200, `{"exists":[true,false]}`)
			d.wants("POST", renew, `{`+owner+`}`, 200, `"renewed":`)
			d.wants("POST", swept, `{"dry_run": true}`, 200, `"report"`)
		})
	}
	group.Wait()
	d.wants("GET", pins, "", 200, `"owner":"o3"`)
}

func TestSocketFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	l, err := control.Listen(path)
	check(t, err)
	info, err := os.Lstat(path)
	check(t, err)
	if got := info.Mode(); got != fs.ModeSocket|0o660 {
		t.Errorf("mode %s", got)
	}
	if _, err := control.Listen(path); !errors.Is(err, control.ErrTaken) {
		t.Errorf("a second daemon: err = %v", err)
	}
	check(t, l.Unlock())
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is there still: %v", err)
	}
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	check(t, err)
	hidden, err := filepath.Glob(filepath.Join(dir, ".*"))
	check(t, err)
	if diff := cmp.Diff([]string{path + ".lock"}, append(names, hidden...)); diff != "" {
		t.Errorf("left behind:\n%s", diff)
	}
}

// Every path that a configuration may name has room for the one where the socket
// is made.
func TestLongestSocketPath(t *testing.T) {
	t.Parallel()
	root, err := os.MkdirTemp("/tmp", "gc")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(root)) })
	for n, want := range map[int]string{99: "", 100: "the path of its directory is longer than 99 bytes"} {
		dir := filepath.Join(root, strings.Repeat("d", n-len(root)-1))
		check(t, os.Mkdir(dir, 0o700))
		path := filepath.Join(dir, "s")
		_, err := config.Parse("test.yaml", []byte("admin: {socket: "+path+"}\n"), config.OSEnv())
		if got := fmt.Sprint(err); strings.Contains(got, "admin.socket") != (want != "") || !strings.Contains(got, want) {
			t.Errorf("a directory of %d bytes: %s", n, got)
		}
		if want == "" {
			for range 20 { // the name of where it is made is random
				l, err := control.Listen(path)
				check(t, err)
				check(t, l.Unlock())
			}
		}
	}
}

// At no moment is the socket more open than it is to be.
func TestSocketIsNeverMoreOpen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	done := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			info, err := os.Lstat(path)
			if err == nil && info.Mode().Perm() != 0o660 {
				t.Errorf("mode %s", info.Mode())
				return
			}
		}
	})
	for range 200 {
		l, err := control.Listen(path)
		check(t, err)
		check(t, l.Unlock())
	}
	close(done)
	group.Wait()
}

// What a daemon that was killed left behind is replaced, and nothing else is.
func TestStaleSocket(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	check(t, err)
	stale.SetUnlinkOnClose(false)
	// Somebody answers who isn't a daemon of ours.
	if _, err := control.Listen(path); !errors.Is(err, control.ErrTaken) {
		t.Errorf("err = %v", err)
	}
	check(t, stale.Close())
	l, err := control.Listen(path)
	check(t, err)

	// Whatever took its place stays there.
	check(t, os.Remove(path))
	check(t, os.WriteFile(path, []byte("mine"), 0o600))
	check(t, l.Unlock())
	if _, err := control.Listen(path); err == nil || !strings.Contains(err.Error(), "isn't a socket") {
		t.Errorf("err = %v", err)
	}
	data, err := os.ReadFile(path)
	check(t, err)
	if string(data) != "mine" {
		t.Errorf("the file holds %q", data)
	}
	if _, err := control.Listen(filepath.Join(dir, "nowhere", "s")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("err = %v", err)
	}
	// A link in the place of the lock isn't followed.
	check(t, os.Symlink(filepath.Join(dir, "victim"), filepath.Join(dir, "t.lock")))
	if _, err := control.Listen(filepath.Join(dir, "t")); !errors.Is(err, syscall.ELOOP) || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("err = %v", err)
	}
}
