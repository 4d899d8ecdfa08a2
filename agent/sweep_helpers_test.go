package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"
)

// postgresHook is called before every statement of the agent's on Postgres.
type postgresHook func(conn *pgx.Conn, data pgx.TraceQueryStartData)

func (h postgresHook) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	h(conn, data)
	return ctx
}

func (postgresHook) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// sqliteHook is called before every statement of the agent's on SQLite.
type sqliteHook func(sql string)

func (h sqliteHook) Before(sql string) { h(sql) }
func (sqliteHook) After(string)        {}

// onStatement has fn called before every statement of the agent's, on either
// engine.
func onStatement(fn func(sql string)) agent.Options {
	return agent.Options{
		PostgresTracer: postgresHook(func(_ *pgx.Conn, data pgx.TraceQueryStartData) { fn(data.SQL) }),
		SQLiteTracer:   sqliteHook(fn),
	}
}

// once is a hook that runs fn before the first statement that contains all of
// the parts, from when it is armed.
type once struct {
	armed, done bool
	fn          func()
	parts       []string
}

func before(fn func(), parts ...string) *once { return &once{fn: fn, parts: parts} }

func (o *once) options() agent.Options { return onStatement(o.see) }

func (o *once) see(sql string) {
	if !o.armed || o.done {
		return
	}
	if !containsAll(sql, o.parts...) {
		return
	}
	o.done = true
	o.fn()
}

// Parts of the agent's statements, by which a hook finds its instant.
const (
	stmtLock    = "FOR UPDATE OF p SKIP LOCKED"
	stmtAnswers = "'asked'"
	stmtTake    = "DELETE FROM"
)

// library makes n blobs, b1 and on, of 10 bytes each, and a table of references
// to them, without a foreign key, in which b1 stands.
func (a *app) library(n int) {
	a.t.Helper()
	a.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer)`, `CREATE TABLE refs (blob text)`, `CREATE INDEX refs_blob ON refs (blob)`)
	a.fill("blobs", n)
	a.exec(`INSERT INTO refs VALUES ('b1')`)
}

// linkedLibrary is a library whose references are held by a foreign key.
func (a *app) linkedLibrary(n int) {
	a.t.Helper()
	a.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer)`,
		`CREATE TABLE refs (blob text REFERENCES blobs (id))`, `CREATE INDEX refs_blob ON refs (blob)`)
	a.fill("blobs", n)
	a.exec(`INSERT INTO refs VALUES ('b1')`)
}

func (a *app) fill(table string, n int) {
	a.t.Helper()
	a.exec(fmt.Sprintf(`INSERT INTO %s (id, size) WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d) SELECT 'b' || i, 10 FROM n`, table, n))
}

// refs is the library's source.
func (a *app) refs() []string {
	return []string{"{name: refs, table: refs, column: blob, guard: " + a.settle() + "}"}
}

// linkedRefs is the linked library's.
func linkedRefs() []string { return []string{"{name: refs, table: refs, column: blob}"} }

// names returns b<from> to b<to>, both included.
func names(from, to int) []string {
	var all []string
	for i := from; i <= to; i++ {
		all = append(all, fmt.Sprint("b", i))
	}
	return all
}

func (a *app) wantBlobs(want ...string) {
	a.t.Helper()
	wantColumn(a.t, a, `SELECT id FROM blobs`, want...)
}

func (a *app) wantWindow(want ...string) {
	a.t.Helper()
	got := a.window()
	slices.Sort(want)
	if !slices.Equal(got, want) {
		a.t.Errorf("window\n got %v\nwant %v", got, want)
	}
}

// literal is text as the window's keys are written in SQL.
func (a *app) literal(key string) string {
	if a.engine == "postgres" {
		return fmt.Sprintf(`'\x%x'::bytea`, key)
	}
	return fmt.Sprintf(`x'%x'`, key)
}

// deadline returns when the key may be deleted.
func (a *app) deadline(key string) int64 {
	a.t.Helper()
	return a.number(`SELECT visible_after FROM ` + a.windowTable() + ` WHERE key = ` + a.literal(key))
}

// age lets the window's rows be staged so much earlier.
func (a *app) age(by time.Duration) {
	a.t.Helper()
	a.exec(fmt.Sprintf(`UPDATE %s SET visible_after = visible_after - %d`, a.windowTable(), by.Nanoseconds()))
}

func (a *app) poolWith(p poolYAML, opts agent.Options) *agent.Pool {
	a.t.Helper()
	pool, ok := a.agent(p, opts).Pool("p")
	if !ok {
		a.t.Fatal("no pool p")
	}
	return pool
}

// dump is everything that stands in the database.
func (a *app) dump() string {
	a.t.Helper()
	var tables, list []string
	if a.engine == "sqlite" {
		tables, list = a.column(`SELECT name FROM sqlite_master WHERE type = 'table'`), a.column(`SELECT type || ' ' || name || ' ' || coalesce(sql, '') FROM sqlite_master`)
	} else {
		const own = ` FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'`
		tables = a.column(`SELECT format('%I.%I', n.nspname, c.relname)` + own + ` AND c.relkind = 'r'`)
		list = append(a.column(`SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp'`), a.column(`SELECT c.relkind::text || ' ' || c.oid::regclass::text || ' ' || c.relfilenode`+own)...)
	}
	for _, table := range tables {
		list = append(list, table)
		list = append(list, a.rows(`SELECT * FROM `+table)...)
	}
	return strings.Join(list, "\n")
}

// rows returns a query's rows as text, sorted.
func (a *app) rows(query string) []string {
	a.t.Helper()
	rows, err := a.db.QueryContext(a.t.Context(), query)
	if err != nil {
		a.t.Fatalf("%s: %v", query, err)
	}
	defer func() {
		if err := rows.Close(); err != nil {
			a.t.Error(err)
		}
	}()
	columns, err := rows.Columns()
	if err != nil {
		a.t.Fatal(err)
	}
	var all []string
	for rows.Next() {
		values := make([]any, len(columns))
		for i := range values {
			values[i] = new(any)
		}
		if err := rows.Scan(values...); err != nil {
			a.t.Fatal(err)
		}
		var b strings.Builder
		for _, v := range values {
			fmt.Fprintf(&b, "%q ", fmt.Sprint(*v.(*any)))
		}
		all = append(all, b.String())
	}
	if err := rows.Err(); err != nil {
		a.t.Fatalf("%s: %v", query, err)
	}
	slices.Sort(all)
	return all
}

// unchanged fails the test when fn changes anything in the database.
func (a *app) unchanged(fn func()) {
	a.t.Helper()
	was := a.dump()
	fn()
	if is := a.dump(); is != was {
		a.t.Errorf("the database was changed from\n%s\nto\n%s", was, is)
	}
}

// decided gathers what a sweep decides, by key.
type decided map[string]agent.Decision

func (d decided) options() agent.SweepOptions {
	return agent.SweepOptions{Decided: func(x agent.Decision) { d[string(x.Key)] = x }}
}

// causes returns the keys by cause.
func (d decided) causes() map[string][]string {
	all := map[string][]string{}
	for key, x := range d {
		all[x.Cause] = append(all[x.Cause], key)
	}
	for _, keys := range all {
		slices.Sort(keys)
	}
	return all
}

func (d decided) want(t testing.TB, causes map[string][]string) {
	t.Helper()
	if diff := cmp.Diff(causes, d.causes()); diff != "" {
		t.Errorf("decided -want +got:\n%s", diff)
	}
}

// protector is a hook that an application serves: it answers each call with the
// next of the statuses, and calls fn before the n-th, counted from 1.
type protector struct {
	*httptest.Server
	calls atomic.Int64
	fn    func(call int64)
	reply func(call int64, w http.ResponseWriter, r *http.Request)
}

func newProtector(t testing.TB) *protector {
	p := &protector{}
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		call := p.calls.Add(1)
		if p.fn != nil {
			p.fn(call)
		}
		if p.reply != nil {
			p.reply(call, w, r)
		}
	}))
	// On a connection that was used before, a client asks a second time.
	p.Config.SetKeepAlivesEnabled(false)
	p.Start()
	t.Cleanup(p.Close)
	return p
}

func (p *protector) extra() string { return fmt.Sprintf("protect: {http: %q}", p.URL) }

// beforeExecute runs fn when the hook is asked for the second time in a sweep: the
// sources were consulted, the mark is through, nothing was executed yet.
func beforeExecute(t testing.TB, fn func()) *protector {
	p := newProtector(t)
	p.fn = func(call int64) {
		if call == 2 {
			fn()
		}
	}
	return p
}

// proxy passes connections on to a server, and may be stopped and started.
type proxy struct {
	t      testing.TB
	addr   string
	target string

	mu       sync.Mutex
	listener net.Listener
	conns    []net.Conn
	group    sync.WaitGroup
}

// newProxy returns a proxy that isn't running, and the url that leads through it.
func newProxy(t testing.TB, server string) (p *proxy, through string) {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p = &proxy{t: t, addr: listener.Addr().String(), target: u.Host}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	u.Host = p.addr
	t.Cleanup(p.stop)
	return p, u.String()
}

func (p *proxy) start() {
	p.t.Helper()
	listener, err := net.Listen("tcp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	p.listener = listener
	p.mu.Unlock()
	p.group.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			p.connect(client)
		}
	})
}

func (p *proxy) connect(client net.Conn) {
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		_ = client.Close()
		return
	}
	p.mu.Lock()
	p.conns = append(p.conns, client, server)
	p.mu.Unlock()
	pass := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		_, _ = to.Close(), from.Close()
	}
	p.group.Go(func() { pass(server, client) })
	p.group.Go(func() { pass(client, server) })
}

// stop cuts every connection and accepts no more.
func (p *proxy) stop() {
	p.mu.Lock()
	if p.listener != nil {
		_ = p.listener.Close()
	}
	p.listener = nil
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
	p.mu.Unlock()
	p.group.Wait()
}

// stepClock goes on by itself: a sleep takes no time and moves it.
type stepClock struct {
	mu      sync.Mutex
	now     time.Time
	slept   time.Duration
	onSleep func(slept time.Duration)
}

func newStepClock() *stepClock { return &stepClock{now: time.Now().Round(0)} }

func (c *stepClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *stepClock) Sleep(ctx context.Context, d time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	c.now = c.now.Add(d)
	c.slept += d
	slept, fn := c.slept, c.onSleep
	c.mu.Unlock()
	if fn != nil {
		fn(slept)
	}
	return nil
}

// manualClock stands still until a test moves it, and says who sleeps.
type manualClock struct {
	mu       sync.Mutex
	changed  chan struct{} // closed when a sleeper comes or goes
	now      time.Time
	sleepers map[*sleeper]bool
}

type sleeper struct {
	until time.Time
	wake  chan struct{}
}

func newManualClock() *manualClock {
	return &manualClock{now: time.Now().Round(0).Truncate(time.Second), changed: make(chan struct{}), sleepers: map[*sleeper]bool{}}
}

func (c *manualClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *manualClock) Sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	s := c.lie(d)
	defer c.rise(s)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.wake:
		return nil
	}
}

func (c *manualClock) lie(d time.Duration) *sleeper {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &sleeper{until: c.now.Add(d), wake: make(chan struct{})}
	c.sleepers[s] = true
	c.tell()
	return s
}

func (c *manualClock) rise(s *sleeper) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.sleepers, s)
	c.tell()
}

func (c *manualClock) tell() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// advance moves the clock and wakes whose time has come; they no longer count as
// sleepers when it returns.
func (c *manualClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
	for s := range c.sleepers {
		if !s.until.After(c.now) {
			close(s.wake)
			delete(c.sleepers, s)
		}
	}
}

// await waits until exactly n are asleep.
func (c *manualClock) await(t testing.TB, n int) {
	t.Helper()
	for limit := time.After(time.Minute); ; {
		c.mu.Lock()
		asleep, changed := len(c.sleepers), c.changed
		c.mu.Unlock()
		if asleep == n {
			return
		}
		select {
		case <-changed:
		case <-limit:
			t.Fatalf("%d sleep, want %d", asleep, n)
		}
	}
}

// agentOf makes an agent of a whole configuration.
func agentOf(t testing.TB, yaml string, opts agent.Options) *agent.Agent {
	t.Helper()
	cfg, err := config.Parse("test.yaml", []byte(yaml), config.OSEnv())
	if err != nil {
		t.Fatalf("%v\n%s", err, yaml)
	}
	ag, err := agent.New(cfg, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ag.Close(); err != nil {
			t.Error(err)
		}
	})
	return ag
}

// logBuffer is a log that a test reads while others write.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *logBuffer) logger() zerolog.Logger { return zerolog.New(b) }

// session is a connection of the application's that is inside a transaction.
func (a *app) session(statements ...string) *pgx.Conn {
	a.t.Helper()
	conn := pgtest.Connect(a.t, a.url)
	for _, s := range statements {
		pgtest.Exec(a.t, conn, s)
	}
	return conn
}

// waitUntilBlocked waits until the session waits for a lock, and fails the test
// when what it does ends before.
func (a *app) waitUntilBlocked(pid uint32, ended <-chan error) {
	a.t.Helper()
	for limit := time.After(30 * time.Second); ; {
		if a.number(fmt.Sprintf(`SELECT count(*) FROM pg_stat_activity WHERE pid = %d AND wait_event_type = 'Lock'`, pid)) > 0 {
			return
		}
		select {
		case err := <-ended:
			a.t.Fatalf("it didn't wait, and ended with %v", err)
		case <-limit:
			a.t.Fatal("it doesn't wait")
		default:
		}
	}
}

// files returns the bytes of the database's files, without the index of its log,
// which readers write too, and the lock file, which is the lease.
func (a *app) files() map[string]string {
	a.t.Helper()
	path := strings.TrimPrefix(a.url, "sqlite:")
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		a.t.Fatal(err)
	}
	all := map[string]string{}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), "-shm") || strings.HasSuffix(e.Name(), ".lock") {
			continue
		}
		data, err := os.ReadFile(filepath.Join(filepath.Dir(path), e.Name()))
		if err != nil {
			a.t.Fatal(err)
		}
		all[e.Name()] = string(data)
	}
	return all
}

// sweepError sweeps and expects a fault that names what is given.
func sweepError(t testing.TB, p *agent.Pool, names ...string) (agent.Report, error) {
	t.Helper()
	rep, err := p.Sweep(t.Context(), agent.SweepOptions{})
	if err == nil {
		t.Fatalf("no error; want one that names %v: %+v", names, rep)
	}
	checkCounts(t, rep)
	for _, name := range names {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("error %q doesn't name %q", err, name)
		}
	}
	return rep, err
}

func wantMisconfigured(t testing.TB, err error, parts ...string) {
	t.Helper()
	var bad *agent.MisconfiguredError
	if !errors.As(err, &bad) {
		t.Fatalf("err = %v, want a refusal", err)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q doesn't say %q", err, part)
		}
	}
}

func containsAll(s string, parts ...string) bool {
	for _, part := range parts {
		if !strings.Contains(s, part) {
			return false
		}
	}
	return true
}

func keys(names ...string) []blob.Key {
	all := make([]blob.Key, len(names))
	for i, name := range names {
		all[i] = blob.Key(name)
	}
	return all
}
