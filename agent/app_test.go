package agent_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/rs/zerolog"
)

// app is an application with a database of its own, as the agent meets it.
type app struct {
	t      testing.TB
	engine string
	url    string
	db     *sql.DB
}

func newPostgresApp(t testing.TB) *app {
	t.Helper()
	return openApp(t, "postgres", "pgx", pgtest.Database(t))
}

func newSQLiteApp(t testing.TB) *app {
	t.Helper()
	path := filepath.Join(t.TempDir(), "app.db")
	a := openApp(t, "sqlite", "sqlite", "file:"+path+"?_pragma=busy_timeout(5000)&_pragma=synchronous(0)")
	a.url = "sqlite:" + path
	a.exec("PRAGMA journal_mode = WAL")
	return a
}

func openApp(t testing.TB, engine, driver, dsn string) *app {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return &app{t: t, engine: engine, url: dsn, db: db}
}

// eachEngine runs a test of what both engines promise.
func eachEngine(t *testing.T, test func(t *testing.T, a *app)) {
	t.Parallel()
	for name, open := range map[string]func(testing.TB) *app{"postgres": newPostgresApp, "sqlite": newSQLiteApp} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

func (a *app) exec(statements ...string) {
	a.t.Helper()
	for _, s := range statements {
		if _, err := a.db.ExecContext(a.t.Context(), s); err != nil {
			a.t.Fatalf("%s: %v", s, err)
		}
	}
}

// column returns the first column of a query's rows, as text, sorted.
func (a *app) column(query string) []string {
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
	var values []string
	for rows.Next() {
		var v string
		if err := rows.Scan(&v); err != nil {
			a.t.Fatal(err)
		}
		values = append(values, v)
	}
	if err := rows.Err(); err != nil {
		a.t.Fatalf("%s: %v", query, err)
	}
	slices.Sort(values)
	return values
}

func (a *app) number(query string) (n int64) {
	a.t.Helper()
	if err := a.db.QueryRowContext(a.t.Context(), query).Scan(&n); err != nil {
		a.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// windowTable is the pool's window as this engine names it.
func (a *app) windowTable() string {
	if a.engine == "postgres" {
		return "gc_agent.gc_window"
	}
	return "gc_window"
}

func (a *app) window() []string {
	a.t.Helper()
	if a.engine == "postgres" {
		return a.column(`SELECT convert_from(key, 'UTF8') FROM gc_agent.gc_window`)
	}
	return a.column(`SELECT CAST(key AS TEXT) FROM gc_window`)
}

func (a *app) hasWindow() bool {
	a.t.Helper()
	if a.engine == "postgres" {
		return a.number(`SELECT count(*) FROM pg_tables WHERE schemaname = 'gc_agent' AND tablename = 'gc_window'`) > 0
	}
	return a.number(`SELECT count(*) FROM sqlite_master WHERE name = 'gc_window'`) > 0
}

// settle is a guard that the engine takes for a source without a foreign key.
func (a *app) settle() string {
	if a.engine == "postgres" {
		return "settle"
	}
	return "serial"
}

// poolYAML is a configuration of one pool over the table blobs(id, ...), with
// a window of zero and the brakes off, as the cases from the field want it.
type poolYAML struct {
	name, mode, window, blobs, brakes, extra string
	column                                   string
	liveness                                 []string
	databases                                map[string]string
}

func (p poolYAML) String() string {
	def := func(s *string, value string) {
		if *s == "" {
			*s = value
		}
	}
	def(&p.name, "p")
	def(&p.mode, "enforce")
	def(&p.window, "0s")
	def(&p.column, "id")
	def(&p.blobs, "{type: table, table: blobs, column: "+p.column+", size: size}")
	def(&p.brakes, "{off: [max_dead_ratio, max_dead_count, empty_source]}")
	var b strings.Builder
	b.WriteString("databases:\n")
	for name, url := range p.databases {
		fmt.Fprintf(&b, "  %s: {url: %q}\n", name, url)
	}
	fmt.Fprintf(&b, "pools:\n  - name: %s\n    database: app\n    mode: %s\n    window: %s\n    schedule: \"@every 1s\"\n    brakes: %s\n", p.name, p.mode, p.window, p.brakes)
	fmt.Fprintf(&b, "    blobs:\n      - %s\n", p.blobs)
	if len(p.liveness) > 0 {
		b.WriteString("    liveness:\n")
	}
	for _, l := range p.liveness {
		fmt.Fprintf(&b, "      - %s\n", l)
	}
	if p.extra != "" {
		fmt.Fprintf(&b, "    %s\n", p.extra)
	}
	return b.String()
}

// agent makes an agent for the pool.
func (a *app) agent(p poolYAML, opts agent.Options) *agent.Agent {
	a.t.Helper()
	if p.databases == nil {
		p.databases = map[string]string{}
	}
	p.databases["app"] = a.url
	cfg, err := config.Parse("test.yaml", []byte(p.String()), config.OSEnv())
	if err != nil {
		a.t.Fatalf("%v\n%s", err, p)
	}
	opts.Log = zerolog.New(zerolog.NewTestWriter(a.t)).Level(zerolog.InfoLevel)
	ag, err := agent.New(cfg, opts)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() {
		if err := ag.Close(); err != nil {
			a.t.Error(err)
		}
	})
	return ag
}

func (a *app) pool(p poolYAML) *agent.Pool {
	a.t.Helper()
	return a.agent(p, agent.Options{}).Pools()[0]
}

// sweep sweeps once and fails the test on an error or an abort.
func sweep(t testing.TB, p *agent.Pool) agent.Report {
	t.Helper()
	rep := sweepWith(t, p, agent.SweepOptions{})
	if rep.Aborted != nil {
		t.Fatalf("aborted: %s: %s", *rep.Aborted, rep.Detail)
	}
	return rep
}

func sweepWith(t testing.TB, p *agent.Pool, opts agent.SweepOptions) agent.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	rep, err := p.Sweep(ctx, opts)
	if err != nil {
		t.Fatalf("sweep: %v", err)
	}
	checkCounts(t, rep)
	return rep
}

// checkCounts holds for every report.
func checkCounts(t testing.TB, rep agent.Report) {
	t.Helper()
	by := rep.CancelledBy
	if rep.Overdue != rep.Deleted+rep.Cancelled || rep.Cancelled != by.Live+by.Pinned+by.Vanished+by.Locked+by.Failed {
		t.Errorf("the counts don't add up: %+v", rep)
	}
}

// wantAbort sweeps and expects an abort that left everything as it was.
func wantAbort(t testing.TB, p *agent.Pool, opts agent.SweepOptions, cause agent.Cause) agent.Report {
	t.Helper()
	rep := sweepWith(t, p, opts)
	if rep.Aborted == nil || *rep.Aborted != cause {
		t.Fatalf("aborted = %v, want %s (%s)", rep.Aborted, cause, rep.Detail)
	}
	if rep.Deleted != 0 || rep.CandidatesStaged != 0 {
		t.Errorf("an aborted sweep deleted %d and staged %d", rep.Deleted, rep.CandidatesStaged)
	}
	return rep
}

func wantColumn(t testing.TB, a *app, query string, want ...string) {
	t.Helper()
	got := a.column(query)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%s\n got %v\nwant %v", query, got, want)
	}
}
