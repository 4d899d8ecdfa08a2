package config

import (
	"errors"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/robfig/cron/v3"

	"github.com/alkblobs/gc-agent/blob"
)

// noon is the present of every test.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// testEnv has variables, and files by their path; a link leads to its content.
func testEnv(vars, files, links map[string]string) Env {
	return Env{
		Lookup:   func(name string) (string, bool) { v, ok := vars[name]; return v, ok },
		Hostname: func() (string, error) { return "host-1", nil },
		ReadFile: func(path string) ([]byte, error) {
			if text, ok := files[path]; ok {
				return []byte(text), nil
			}
			return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
		},
		Resolve: func(path string) (string, error) {
			if to, ok := links[path]; ok {
				return to, nil
			}
			return path, nil
		},
		Now: func() time.Time { return noon },
	}
}

func mustParse(t *testing.T, text string, env Env) *Validated {
	t.Helper()
	c, err := Parse("/etc/gc/config.yaml", []byte(text), env)
	if err != nil {
		t.Fatalf("Parse:\n%v", err)
	}
	return c
}

// problems parses text and returns what is wrong with it, without the file's name.
func problems(t *testing.T, text string, env Env) []string {
	t.Helper()
	c, err := Parse("c.yaml", []byte(text), env)
	if err == nil {
		return nil
	}
	if c != nil {
		t.Error("Parse returned a configuration beside an error")
	}
	var errs *Errors
	if !errors.As(err, &errs) {
		t.Fatalf("Parse returned a %T: %v", err, err)
	}
	lines := strings.Split(errs.Error(), "\n")
	if len(lines) != len(errs.Problems) {
		t.Errorf("%d problems on %d lines", len(errs.Problems), len(lines))
	}
	for i, line := range lines {
		short, ok := strings.CutPrefix(line, "c.yaml:")
		if !ok {
			t.Errorf("line doesn't begin with the file: %s", line)
		}
		lines[i] = strings.TrimSpace(short)
	}
	return lines
}

var compare = cmp.Options{
	cmpopts.IgnoreUnexported(Database{}),
	cmp.Comparer(func(a, b cron.Schedule) bool { return a.Next(noon).Equal(b.Next(noon)) }),
	cmp.Comparer(func(a, b *blob.Format) bool {
		return (a == nil) == (b == nil) && (a == nil || a.String() == b.String())
	}),
}

func schedule(t *testing.T, spec string) Schedule {
	t.Helper()
	s, err := cron.ParseStandard(spec)
	if err != nil {
		t.Fatal(err)
	}
	return Schedule{Spec: spec, Schedule: s}
}

func TestParseDefaults(t *testing.T) {
	t.Parallel()
	c := mustParse(t, `
pools:
  - name: images
    database: app
    blobs: [{type: table, table: blobs, column: id}]
    liveness: [{name: posts, table: web.posts, column: image}]
databases:
  app: {url: "postgres://u:pw@db/app"}
`, testEnv(nil, nil, nil))
	want := []Pool{{
		Path: "pools[0]", Name: "images", Database: "app", Host: "app", Schema: "gc_agent",
		Mode: ModeObserve, Schedule: schedule(t, "*/15 * * * *"), Window: 7 * 24 * time.Hour,
		Blobs: []Tier{{
			Path: "pools[0].blobs[0]", Type: TierTable, Database: "app", Table: Table{"public", "blobs"}, Column: "id",
		}},
		Liveness: []Source{{
			Path: "pools[0].liveness[0]", Name: "posts", Database: "app", Table: Table{"web", "posts"}, Column: "image",
			Guard: GuardAuto, OnUnparseable: UnparseableAbort,
		}},
		Pins:   Pins{TTL: time.Minute},
		Brakes: Brakes{MaxDeadRatio: 0.5, MinDeadKeys: 100},
		Limits: Limits{
			Batch: 1000, BatchBytes: 256 << 20, Page: 10_000,
			LockTimeout: 100 * time.Millisecond, SettleTimeout: 2 * time.Second, StatementTimeout: 30 * time.Second,
		},
	}}
	if diff := cmp.Diff(want, c.Pools(), compare); diff != "" {
		t.Errorf("pools (-want +got):\n%s", diff)
	}
	wantDatabases := []Database{{Name: "app", Engine: Postgres, URL: NewSecret("postgres://u:pw@db/app")}}
	if diff := cmp.Diff(wantDatabases, c.Databases(), compare); diff != "" {
		t.Errorf("databases (-want +got):\n%s", diff)
	}
	if c.MaxConcurrentSweeps() != 4 || c.Log() != (Log{Level: "info", Format: "json"}) {
		t.Errorf("got %d sweeps and log %+v", c.MaxConcurrentSweeps(), c.Log())
	}
}

func TestParseEverything(t *testing.T) {
	t.Parallel()
	c := mustParse(t, `
databases:
  app: {url_file: secrets/url}
  notes: {url: "sqlite:data/notes.db"}
pools:
  - name: images
    schema: gc_images
    mode: enforce
    schedule: "CRON_TZ=Europe/Berlin 0 3 * * *"
    window: 1d12h
    blobs: [{type: table, database: app, table: '"odd.schema"."Blobs"', column: '"a.b"', size: bytes}]
    liveness:
      - {name: m.d, database: app, table: m, column: d, where: " d <> '$x' ", format: "sha256:{hex}", guard: foreign_key}
      - name: q
        database: notes
        query: |
          SELECT d FROM l
        allow_empty: true
        on_unparseable: ignore
    pins:
      ttl: 2m
      owners:
        - {name: web, alive: {http: "http://u:pw@web/ok"}}
        - {name: "${HOSTNAME}", alive: {unix: run/a.sock}}
        - {name: job, alive: {pid_file: /run/job.pid}}
        - {name: mine, alive: {always: true}}
    brakes: {max_dead_ratio: 1, min_dead_keys: 0, max_dead_count: 7, off: [empty_source]}
    limits: {batch: 20000, batch_bytes: 1048576, page: "${PAGE}", lock_timeout: 1s, settle_timeout: 1m, statement_timeout: 1h}
    protect: {http: "https://u:pw@hook/ask"}
  - name: notes
    database: notes
    window: 0
    blobs: [{type: table, table: parts, column: id}]
    liveness: [{name: "${HOSTNAME}", table: msgs, column: part, guard: serial}]
max_concurrent_sweeps: 2
admin: {socket: run/admin.sock}
log: {level: debug, format: console}
`, testEnv(map[string]string{"PAGE": "500"}, map[string]string{"/etc/gc/secrets/url": "\n postgresql:///app \n"}, nil))

	hex, err := blob.ParseFormat("sha256:{hex}")
	if err != nil {
		t.Fatal(err)
	}
	want := Pool{
		Path: "pools[0]", Name: "images", Host: "app", Schema: "gc_images",
		Mode: ModeEnforce, Schedule: schedule(t, "CRON_TZ=Europe/Berlin 0 3 * * *"), Window: 36 * time.Hour,
		Blobs: []Tier{{
			Path: "pools[0].blobs[0]", Type: TierTable, Database: "app", Table: Table{"odd.schema", "Blobs"}, Column: "a.b", Size: "bytes",
		}},
		Liveness: []Source{{
			Path: "pools[0].liveness[0]", Name: "m.d", Database: "app", Table: Table{"public", "m"}, Column: "d",
			Where: "d <> '$x'", Format: &hex, Guard: GuardForeignKey, OnUnparseable: UnparseableAbort,
		}, {
			Path: "pools[0].liveness[1]", Name: "q", Database: "notes", Query: "SELECT d FROM l",
			Guard: GuardAuto, AllowEmpty: true, OnUnparseable: UnparseableIgnore,
		}},
		Pins: Pins{TTL: 2 * time.Minute, Owners: []PinOwner{
			{Path: "pools[0].pins.owners[0]", Name: "web", Alive: Alive{HTTP: NewSecret("http://u:pw@web/ok")}},
			{Path: "pools[0].pins.owners[1]", Name: "host-1", Alive: Alive{Unix: "/etc/gc/run/a.sock"}},
			{Path: "pools[0].pins.owners[2]", Name: "job", Alive: Alive{PIDFile: "/run/job.pid"}},
			{Path: "pools[0].pins.owners[3]", Name: "mine", Alive: Alive{Always: true}},
		}},
		Brakes: Brakes{MaxDeadRatio: 1, MaxDeadCount: 7, Off: []Brake{BrakeEmptySource}},
		Limits: Limits{
			Batch: 20_000, BatchBytes: 1 << 20, Page: 500,
			LockTimeout: time.Second, SettleTimeout: time.Minute, StatementTimeout: time.Hour,
		},
		Protect: Protect{HTTP: NewSecret("https://u:pw@hook/ask")},
	}
	got, ok := c.Pool("images")
	if !ok {
		t.Fatal("no pool images")
	}
	if diff := cmp.Diff(want, got, compare); diff != "" {
		t.Errorf("pool (-want +got):\n%s", diff)
	}
	notes, _ := c.Pool("notes")
	if notes.Schema != "" || notes.Window != 0 || notes.Host != "notes" || notes.Liveness[0].Name != "host-1" {
		t.Errorf("pool on SQLite: %+v", notes)
	}
	if notes.Blobs[0].Table != (Table{Name: "parts"}) {
		t.Errorf("table on SQLite: %+v", notes.Blobs[0].Table)
	}
	db, _ := c.Database("notes")
	if db.Engine != SQLite || db.Path != "/etc/gc/data/notes.db" {
		t.Errorf("database: %+v", db)
	}
	if c.Admin() != (Admin{Socket: "/etc/gc/run/admin.sock"}) {
		t.Errorf("admin: %+v", c.Admin())
	}
	if c.MaxConcurrentSweeps() != 2 || c.Log() != (Log{Level: "debug", Format: "console"}) {
		t.Errorf("got %d sweeps and log %+v", c.MaxConcurrentSweeps(), c.Log())
	}
}

func TestValidatedDoesNotChange(t *testing.T) {
	t.Parallel()
	c := mustParse(t, base("brakes: {off: [empty_source]}", "liveness: [{name: s, table: t, column: c}]"), testEnv(nil, nil, nil))
	p, _ := c.Pool("p")
	all := c.Pools()
	p.Blobs[0].Column, p.Liveness[0].Column, p.Brakes.Off[0] = "x", "x", BrakeMaxDeadRatio
	all[0].Name, all[0].Blobs[0].Column = "x", "x"
	c.Databases()[0].Name = "x"
	again, ok := c.Pool("p")
	if !ok || again.Blobs[0].Column != "id" || again.Liveness[0].Column != "c" || again.Brakes.Enabled(BrakeEmptySource) {
		t.Errorf("a caller changed the configuration: %+v", again)
	}
	if _, ok := c.Database("app"); !ok {
		t.Error("a caller changed the databases")
	}
	if _, ok := c.Pool("q"); ok {
		t.Error("found a pool that isn't there")
	}
}

func TestProblemFromElsewhere(t *testing.T) {
	t.Parallel()
	c := mustParse(t, base("liveness:", "- {name: s, table: t, column: c}"), testEnv(nil, nil, nil))
	for path, want := range map[string]string{
		"pools[0].liveness[0].table":  "/etc/gc/config.yaml:9: pools[0].liveness[0].table: no such table",
		"pools[0].liveness[0].format": "/etc/gc/config.yaml:9: pools[0].liveness[0].format: no such table",
		"pools[0].protect":            "/etc/gc/config.yaml:5: pools[0].protect: no such table",
		"state":                       "/etc/gc/config.yaml:1: state: no such table",
		"":                            "/etc/gc/config.yaml:1: no such table",
	} {
		if got := c.Problem(path, "no such table").String(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

func TestProblemIsOneLine(t *testing.T) {
	t.Parallel()
	p := Problem{File: "a\nb", Path: "x", Message: "no\r\ngood"}
	if got, want := p.String(), "a; b: x: no ; good"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// base returns a file of one good pool, p, and more of its fields, from line 8 on.
func base(more ...string) string {
	return `databases:
  app: {url: "postgres://u:s3cret@db:5432/app"}
  lite: {url: "sqlite:/lite.db"}
pools:
  - name: p
    database: app
    blobs: [{type: table, table: blobs, column: id}]
` + indent(more)
}

func indent(lines []string) string {
	var text strings.Builder
	for _, line := range lines {
		text.WriteString("    " + line + "\n")
	}
	return text.String()
}
