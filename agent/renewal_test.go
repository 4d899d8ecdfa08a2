package agent_test

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"

	"github.com/jackc/pgx/v5"
)

// renewalYAML is a configuration of one pool with owners of pins, swept at no
// time that a test reaches unless it says when.
func renewalYAML(a *app, pins, extra string) string {
	if !strings.Contains(extra, "schedule:") {
		extra += `, schedule: "0 0 1 1 *"`
	}
	if !strings.Contains(extra, "mode:") {
		extra += ", mode: enforce"
	}
	return fmt.Sprintf(`
databases: {app: {url: %q}}
pools:
  - {name: p, database: app, fleet: true, window: 0s, pins: {%s}, brakes: {off: [max_dead_ratio]},
     blobs: [{type: table, table: blobs, column: id, size: size}],
     liveness: [{name: refs, table: refs, column: blob, guard: settle}]%s}
`, a.url, pins, extra)
}

// newRenewal makes an application, the pool's schema in it, and a daemon.
func newRenewal(t *testing.T, pins, extra string, opts agent.Options) (*app, *daemon) {
	t.Helper()
	a := newPostgresApp(t)
	return a, renewalOf(t, a, pins, extra, opts)
}

func renewalOf(t *testing.T, a *app, pins, extra string, opts agent.Options) *daemon {
	t.Helper()
	a.library(4)
	d := newDaemon(t, renewalYAML(a, pins, extra), opts)
	if err := d.pool().EnsureSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *daemon) pool() *agent.Pool { return d.agent.Pools()[0] }

// turn lets so much time pass and waits until all are asleep again.
func (d *daemon) turn(by time.Duration, asleep int) {
	d.t.Helper()
	d.clock.advance(by)
	d.clock.await(d.t, asleep)
}

func (a *app) pin(key, owner, ttl string) {
	a.t.Helper()
	a.exec(fmt.Sprintf(`SELECT gc_agent.pin(%s, '%s'::bytea, interval '%s')`, a.literal(key), owner, ttl))
}

// expire writes the expiry of an owner's pins, so long from now.
func (a *app) expire(owner string, in time.Duration) {
	a.t.Helper()
	a.pastTrigger(fmt.Sprintf(`UPDATE gc_agent.gc_pins SET expiry = %s + %d WHERE owner = '%s'`, sqlNow, in.Nanoseconds(), owner))
}

// pastTrigger writes pins whatever their expiry.
func (a *app) pastTrigger(sql string) {
	a.t.Helper()
	a.exec(`BEGIN; ALTER TABLE gc_agent.gc_pins DISABLE TRIGGER gc_pins_expired; ` + sql +
		`; ALTER TABLE gc_agent.gc_pins ENABLE ALWAYS TRIGGER gc_pins_expired; COMMIT`)
}

const sqlNow = `(extract(epoch FROM clock_timestamp()) * 1000000)::bigint * 1000`

// left returns how long the pin still lives, by the host's clock.
func (a *app) left(key, owner string) time.Duration {
	a.t.Helper()
	return time.Duration(a.number(fmt.Sprintf(`SELECT expiry - %s FROM gc_agent.gc_pins WHERE key = %s AND owner = '%s'`, sqlNow, a.literal(key), owner)))
}

// wantLeft expects a pin to live for more than the one and at most the other.
func (a *app) wantLeft(key, owner string, over, most time.Duration) {
	a.t.Helper()
	if got := a.left(key, owner); got <= over || got > most {
		a.t.Errorf("the pin of %s for %s lives for %s, want over %s and at most %s", key, owner, got, over, most)
	}
}

const always = "ttl: 600s, owners: [{name: me, alive: {always: true}}]"

// Pins of the owners are renewed every third of their life, and no others; none is
// shortened.
func TestPinsAreRenewed(t *testing.T) {
	t.Parallel()
	a, d := newRenewal(t, always, "", agent.Options{})
	a.pin("b2", "me", "300 seconds")
	a.pin("b3", "me", "2 hours")
	a.pin("b2", "you", "300 seconds")
	d.start()
	d.clock.await(t, 2)
	a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
	a.expire("me", 300*time.Second)
	a.pin("b3", "me", "2 hours")
	d.turn(200*time.Second-time.Millisecond, 2)
	a.wantLeft("b2", "me", 0, 300*time.Second)
	d.turn(time.Millisecond, 2)
	a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
	a.wantLeft("b3", "me", time.Hour, 2*time.Hour)
	a.wantLeft("b2", "you", 0, 300*time.Second)
	if got, want := d.pool().PinCounts(), (agent.PinCounts{Renewed: 4}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if n := strings.Count(d.log.String(), "the owner is alive"); n != 1 {
		t.Errorf("said %d times", n)
	}
}

// owner is something that can be alive or not.
type owner struct {
	alive      string // as the configuration has it
	start, end func()
}

func httpOwner(t *testing.T) owner {
	var mu sync.Mutex
	status := http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		w.WriteHeader(status)
	}))
	t.Cleanup(server.Close)
	set := func(to int) func() {
		return func() {
			mu.Lock()
			defer mu.Unlock()
			status = to
		}
	}
	return owner{fmt.Sprintf("{http: %q}", server.URL), set(http.StatusNoContent), set(http.StatusServiceUnavailable)}
}

func unixOwner(t *testing.T) owner {
	path := filepath.Join(t.TempDir(), "s")
	var l net.Listener
	o := owner{alive: fmt.Sprintf("{unix: %q}", path)}
	o.start = func() {
		var err error
		if l, err = net.Listen("unix", path); err != nil {
			t.Fatal(err)
		}
	}
	o.end = func() {
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	o.start()
	t.Cleanup(func() { _ = l.Close() }) // it may have been closed
	return o
}

func processOwner(t *testing.T) owner {
	path := filepath.Join(t.TempDir(), "pid")
	var cmd *exec.Cmd
	o := owner{alive: fmt.Sprintf("{pid_file: %q}", path)}
	o.start = func() {
		cmd = exec.Command("sleep", "3600")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, fmt.Append(nil, cmd.Process.Pid), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	o.end = func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // it says that it was killed
	}
	o.start()
	t.Cleanup(func() { o.end() })
	return o
}

// Once its owner is dead a pin isn't renewed, so that it is gone within its time
// to live; once the owner is back it is renewed again, if it is live still.
func TestPinsOfTheDead(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*testing.T) owner{"http": httpOwner, "unix": unixOwner, "pid_file": processOwner} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := start(t)
			a, d := newRenewal(t, "ttl: 600s, owners: [{name: me, alive: "+o.alive+"}, {name: other, alive: {always: true}}]", "", agent.Options{})
			a.pin("b2", "me", "300 seconds")
			a.pin("b3", "me", "300 seconds")
			a.pin("b2", "other", "300 seconds")
			d.start()
			d.clock.await(t, 2)
			a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
			o.end()
			died := a.number("SELECT " + sqlNow)
			for range 3 {
				a.expire("other", 300*time.Second)
				d.turn(200*time.Second, 2)
				a.wantLeft("b2", "other", 300*time.Second, 600*time.Second)
			}
			if n := a.number(fmt.Sprintf(`SELECT count(*) FROM gc_agent.gc_pins WHERE owner = 'me' AND expiry > %d`, died+600e9)); n != 0 {
				t.Errorf("%d pins outlive their owner by more than their life", n)
			}
			if n := strings.Count(d.log.String(), "the owner isn't alive"); n != 1 {
				t.Errorf("its death is logged %d times", n)
			}
			a.exec(`UPDATE gc_agent.gc_pins SET expiry = ` + sqlNow + ` + 100000000000 WHERE owner = 'me'`)
			a.pastTrigger(`UPDATE gc_agent.gc_pins SET expiry = 1 WHERE key = 'b3'`)
			o.start()
			d.turn(200*time.Second, 2)
			a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
			if left := a.left("b3", "me"); left > 0 {
				t.Errorf("an expired pin lives for %s", left)
			}
			if n := d.pool().PinCounts().Lost; n != 0 {
				t.Errorf("%d pins are lost, want none: their owner was dead", n)
			}
		})
	}
}

// Renewals come in batches, in the order of the keys.
func TestPinsAreRenewedInBatches(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var from [][]byte
	a, d := newRenewal(t, always, ", limits: {batch: 3}", agent.Options{PostgresTracer: postgresHook(func(_ *pgx.Conn, data pgx.TraceQueryStartData) {
		if strings.Contains(data.SQL, "renewed AS") && len(data.Args) > 1 {
			mu.Lock()
			defer mu.Unlock()
			from = append(from, data.Args[1].([]byte))
		}
	})})
	for i := range 10 {
		a.pin(fmt.Sprint("k", 9-i), "me", "300 seconds")
	}
	d.start()
	d.clock.await(t, 2)
	mu.Lock()
	defer mu.Unlock()
	if want := [][]byte{{}, []byte("k2"), []byte("k5"), []byte("k8")}; !bytes.Equal(bytes.Join(from, []byte{','}), bytes.Join(want, []byte{','})) {
		t.Errorf("batches began at %q, want %q", from, want)
	}
	if n := a.number(`SELECT count(*) FROM gc_agent.gc_pins WHERE expiry > ` + sqlNow + ` + 300000000000`); n != 10 {
		t.Errorf("%d pins are renewed, want all", n)
	}
}

// A pool that only observes changes nothing; before its schema is there, there is
// nothing to renew.
func TestPinsThatAreNotRenewed(t *testing.T) {
	t.Parallel()
	t.Run("observe", func(t *testing.T) {
		t.Parallel()
		a := newPostgresApp(t)
		a.library(4)
		sweep(t, a.pool(poolYAML{liveness: a.refs(), extra: "fleet: true"}))
		a.pin("b2", "me", "300 seconds")
		d := newDaemon(t, renewalYAML(a, always, ", mode: observe"), agent.Options{})
		d.start()
		d.clock.await(t, 1)
		d.turn(time.Hour, 1)
		d.stop()
		d.end()
		a.wantLeft("b2", "me", 0, 300*time.Second)
		if d.pool().PinCounts() != (agent.PinCounts{}) {
			t.Error("renewals are counted")
		}
	})
	t.Run("no schema", func(t *testing.T) {
		t.Parallel()
		a := newPostgresApp(t)
		a.library(4)
		d := newDaemon(t, renewalYAML(a, always, ""), agent.Options{})
		d.start()
		d.clock.await(t, 2)
		if err := d.pool().EnsureSchema(t.Context()); err != nil {
			t.Fatal(err)
		}
		a.pin("b2", "me", "300 seconds")
		d.turn(200*time.Second, 2)
		a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
		if strings.Contains(d.log.String(), `"level":"error"`) {
			t.Error("that there is no table yet is no error")
		}
	})
}

// When the daemon stops, pins are renewed for long enough that another one can
// take over; when it is cut off, they aren't.
func TestPinsAreRenewedAtTheStop(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		ttl        string
		end        func(*daemon)
		over, most time.Duration
	}{
		"stop":      {"600s", func(d *daemon) { d.stop() }, 10 * time.Minute, 10*time.Minute + agent.UpgradeGrace},
		"a day":     {"24h", func(d *daemon) { d.stop() }, 23 * time.Hour, 24 * time.Hour},
		"cut off":   {"600s", func(d *daemon) { d.cancel() }, 0, 5 * time.Minute},
		"both ways": {"600s", func(d *daemon) { d.stop(); d.cancel() }, 0, 10*time.Minute + agent.UpgradeGrace},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, d := newRenewal(t, strings.Replace(always, "600s", c.ttl, 1), "", agent.Options{})
			d.start()
			d.clock.await(t, 2)
			a.pin("b2", "me", "300 seconds")
			c.end(d)
			d.end()
			a.wantLeft("b2", "me", c.over, c.most)
		})
	}
}

// Renewals go on while a sweep takes its time, and while sweeps fail.
func TestPinsAreRenewedBesideSweeps(t *testing.T) {
	t.Parallel()
	const often = `, schedule: "@every 1s"`
	t.Run("slow", func(t *testing.T) {
		t.Parallel()
		g := newGate()
		a, d := newRenewal(t, always, often, agent.Options{PostgresTracer: postgresHook(func(_ *pgx.Conn, data pgx.TraceQueryStartData) {
			if strings.Contains(data.SQL, "CREATE TEMPORARY TABLE") {
				g.pass()
			}
		})})
		a.pin("b2", "me", "300 seconds")
		d.start()
		d.clock.await(t, 2)
		d.clock.advance(time.Second)
		g.await(t)
		for range 2 {
			a.expire("me", 300*time.Second)
			d.turn(200*time.Second, 1)
			a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
		}
		close(g.open)
	})
	t.Run("failing", func(t *testing.T) {
		t.Parallel()
		a, d := newRenewal(t, always, often, agent.Options{})
		a.pin("b2", "me", "300 seconds")
		a.exec(`ALTER TABLE blobs RENAME TO away`)
		d.start()
		d.clock.await(t, 2)
		a.expire("me", 300*time.Second)
		d.turn(200*time.Second, 2)
		a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
	})
}

// Two agents renew the pins of one owner, and go on when one of them has gone.
func TestTwoAgentsRenewPins(t *testing.T) {
	t.Parallel()
	a, first := newRenewal(t, always, "", agent.Options{})
	second := newDaemon(t, renewalYAML(a, always, ""), agent.Options{})
	a.pin("b2", "me", "300 seconds")
	for _, d := range []*daemon{first, second} {
		d.start()
		d.clock.await(t, 2)
	}
	for _, d := range []*daemon{first, second} {
		a.expire("me", 300*time.Second)
		d.turn(200*time.Second, 2)
		a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
	}
	first.cancel()
	first.end()
	a.expire("me", 300*time.Second)
	second.turn(200*time.Second, 2)
	a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
	if first.pool().PinCounts().Lost+second.pool().PinCounts().Lost != 0 {
		t.Error("pins were lost")
	}
}

// While the database is down for a short time no pin is lost.
func TestPinsOutliveAnOutage(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	proxy, through := newProxy(t, a.url)
	behind := *a
	behind.url = through
	proxy.start()
	d := renewalOf(t, &behind, always, "", agent.Options{})
	a.pin("b2", "me", "600 seconds")
	d.start()
	d.clock.await(t, 2)
	proxy.stop()
	d.turn(200*time.Second, 2)
	d.turn(50*time.Second, 2)
	a.expire("me", 300*time.Second)
	proxy.start()
	d.turn(50*time.Second, 2)
	a.wantLeft("b2", "me", 300*time.Second, 600*time.Second)
	for text, want := range map[string]int{"pins can't be renewed": 1, "pins are renewed again": 1, "have expired": 0} {
		if n := strings.Count(d.log.String(), text); n != want {
			t.Errorf("%q is logged %d times, want %d", text, n, want)
		}
	}
	if strings.Contains(d.log.String(), "postgres://") {
		t.Error("the log holds the database's url")
	}
}

// What expires while the database is down for too long is counted, once, even
// where a sweep comes first. What was only ever meant to live that long isn't, nor
// is what an owner lost that was dead meanwhile.
func TestLostPinsAreCounted(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	proxy, through := newProxy(t, a.url)
	behind := *a
	behind.url = through
	proxy.start()
	away := unixOwner(t)
	d := renewalOf(t, &behind, "ttl: 1s, owners: [{name: me, alive: {always: true}}, {name: you, alive: {always: true}}, {name: away, alive: "+away.alive+"}]", "", agent.Options{})
	d.start()
	d.clock.await(t, 2)
	for _, key := range []string{"b2", "b3", "b4"} {
		a.pin(key, "me", "1 second")
	}
	a.pin("b2", "you", "1 second")
	a.pin("b3", "other", "1 second")
	a.pin("b4", "away", "1 second")
	a.pastTrigger(`INSERT INTO gc_agent.gc_pins VALUES ('short', 'me', 1)`)
	proxy.stop()
	away.end()
	d.turn(334*time.Millisecond, 2)
	away.start()
	for limit := time.Now().Add(time.Minute); a.number(`SELECT count(*) FROM gc_agent.gc_pins WHERE expiry > `+sqlNow) > 0; {
		if time.Now().After(limit) {
			t.Fatal("the pins don't expire")
		}
	}
	proxy.start()
	sweep(t, d.pool())
	for range 5 {
		d.turn(334*time.Millisecond, 2)
	}
	if n := d.pool().PinCounts().Lost; n != 4 {
		t.Errorf("%d pins are lost, want 4", n)
	}
	if n := strings.Count(d.log.String(), `"pins":4,"message":"pins of owners that are alive have expired`); n != 1 {
		t.Errorf("it is logged %d times", n)
	}
	sweep(t, d.pool())
	if n := a.number(`SELECT count(*) FROM gc_agent.gc_pins`); n != 0 {
		t.Errorf("%d expired pins are left", n)
	}
}

// A jump of the clock is noticed by the renewals too, which come more often than
// sweeps. What it made expire is lost, and protected for as long as it was to live.
func TestRenewalNoticesAJump(t *testing.T) {
	t.Parallel()
	server := newMovedServer(t)
	a := server.app(t, "renewal")
	a.library(4)
	clock := newManualClock()
	log := &logBuffer{}
	ag := agentOf(t, renewalYAML(a, always, ""), agent.Options{Clock: clock, Log: log.logger()})
	d := &daemon{t: t, clock: clock, log: log, agent: ag, ended: make(chan error, 1)}
	sweep(t, d.pool())
	a.pin("b2", "me", "600 seconds")
	d.start()
	clock.await(t, 2)
	server.ahead(time.Hour)
	d.turn(200*time.Second, 2)
	for _, want := range []string{"the host's clock has jumped ahead", `"pins":1,"message":"pins of owners`} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log doesn't say %s", want)
		}
	}
	wantHeldUp(t, sweep(t, d.pool()))
	a.wantBlobs(names(1, 4)...)
}
