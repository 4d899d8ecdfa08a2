package bench

import (
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/internal/pgtest"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver pgx
	_ "modernc.org/sqlite"             // the driver sqlite
)

// App is an application with blobs of 200 bytes, of which three in ten are dead.
// Four are referred to by a foreign key, three by a text like sha256:1f3a….
type App struct {
	Engine string // postgres or sqlite
	URL    string // as the configuration has it
	Config string // path of a configuration with the one pool "bench"
	Keys   int64
	DB     *sql.DB
	path   string // of an SQLite file
	t      testing.TB
}

// Dead is how many of the blobs nothing refers to.
func (a *App) Dead() int64 { return a.Keys / 10 * 3 }

// NewPostgres makes an application in a database of its own, or skips the test
// without a server. keys is a multiple of ten.
func NewPostgres(t testing.TB, keys int64) *App {
	t.Helper()
	url := pgtest.Database(t)
	return open(t, &App{Engine: "postgres", URL: url, Keys: keys}, "pgx", url)
}

// NewSQLite makes an application in a file of its own, in a journal mode, WAL or
// DELETE. keys is a multiple of ten.
func NewSQLite(t testing.TB, keys int64, journal string) *App {
	t.Helper()
	path := filepath.Join(t.TempDir(), "app.db")
	a := &App{Engine: "sqlite", URL: "sqlite:" + path, Keys: keys, path: path}
	return open(t, a, "sqlite", "file:"+path+"?_pragma=busy_timeout(5000)&_pragma=journal_mode("+journal+")")
}

func open(t testing.TB, a *App, driver, dsn string) *App {
	t.Helper()
	a.t = t
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	a.DB = db
	a.Config = filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(a.Config, []byte(a.configuration()), 0o600); err != nil {
		t.Fatal(err)
	}
	a.Fill()
	return a
}

func (a *App) configuration() string {
	guard := "settle"
	if a.Engine == "sqlite" {
		guard = "serial"
	}
	return fmt.Sprintf(`
databases:
  app: {url: %q}
pools:
  - name: bench
    database: app
    mode: enforce
    window: 0s
    schedule: "@every 1h"
    blobs:
      - {type: table, table: blobs, column: key, size: size}
    liveness:
      - {name: attachments, table: attachments, column: blob}
      - {name: documents, table: documents, column: digest, format: "sha256:{hex}", guard: %s}
`, a.URL, guard)
}

// dialect is how the two engines spell the same application.
type dialect struct {
	bytes, key, series, hex, unhex, vacuum string
}

// Keys look as random as digests do: i times an odd number is a permutation of
// 32 bits.
var dialects = map[string]dialect{
	"postgres": {
		bytes: "bytea", key: `decode(lpad(to_hex((i::bigint * 2654435761) % 4294967296), 8, '0') || repeat('00', 28), 'hex')`,
		series: `generate_series(1, %d) AS n (i)`, hex: "encode(%s, 'hex')", unhex: "decode(%s, 'hex')", vacuum: "VACUUM (ANALYZE)",
	},
	"sqlite": {
		bytes: "BLOB", key: `unhex(printf('%08x', (i * 2654435761) % 4294967296) || hex(zeroblob(28)))`,
		series: `(WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d) SELECT i FROM n)`,
		hex:    "lower(hex(%s))", unhex: "unhex(%s)", vacuum: "ANALYZE",
	},
}

// Fill makes the tables anew, as they were at first. The agent's own are gone.
func (a *App) Fill() {
	a.t.Helper()
	d := dialects[a.Engine]
	digest := `'sha256:' || ` + fmt.Sprintf(d.hex, "key")
	drop := []string{`DROP TABLE IF EXISTS gc_window`}
	if a.Engine == "postgres" {
		drop = []string{`DROP SCHEMA IF EXISTS gc_agent CASCADE`}
	}
	a.Exec(append(drop,
		`DROP TABLE IF EXISTS attachments`, `DROP TABLE IF EXISTS documents`, `DROP TABLE IF EXISTS blobs`,
		`CREATE TABLE blobs (key `+d.bytes+` PRIMARY KEY NOT NULL, id integer NOT NULL, payload text NOT NULL, size integer NOT NULL)`,
		`CREATE TABLE attachments (id integer PRIMARY KEY, blob `+d.bytes+` REFERENCES blobs (key))`,
		`CREATE TABLE documents (id integer PRIMARY KEY, digest text)`,
		`INSERT INTO blobs SELECT `+d.key+`, i, '`+strings.Repeat("x", 200)+`', 200 FROM `+fmt.Sprintf(d.series, a.Keys),
		`INSERT INTO attachments SELECT id, key FROM blobs WHERE id % 10 BETWEEN 3 AND 6`,
		`INSERT INTO documents SELECT id, `+digest+` FROM blobs WHERE id % 10 >= 7`,
		`CREATE INDEX attachments_blob ON attachments (blob)`, `CREATE INDEX documents_digest ON documents (digest)`,
		d.vacuum)...)
}

// Exec runs statements.
func (a *App) Exec(statements ...string) {
	a.t.Helper()
	for _, s := range statements {
		if _, err := a.DB.ExecContext(a.t.Context(), s); err != nil {
			a.t.Fatalf("%s: %v", s, err)
		}
	}
}

// Count returns the number that a query returns.
func (a *App) Count(query string) (n int64) {
	a.t.Helper()
	if err := a.DB.QueryRowContext(a.t.Context(), query).Scan(&n); err != nil {
		a.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// CheckCollected fails the test unless the dead blobs are gone, and no other.
func (a *App) CheckCollected() {
	a.t.Helper()
	if n := a.Count(`SELECT count(*) FROM blobs WHERE id % 10 < 3`); n != 0 {
		a.t.Errorf("%d dead blobs are left", n)
	}
	if n := a.Count(`SELECT count(*) FROM blobs WHERE id % 10 >= 3`); n != a.Keys-a.Dead() {
		a.t.Errorf("%d live blobs are left of %d", n, a.Keys-a.Dead())
	}
	a.CheckReferences()
}

// CheckReferences fails the test if anything refers to a blob that is gone.
func (a *App) CheckReferences() {
	a.t.Helper()
	named := fmt.Sprintf(dialects[a.Engine].unhex, `substr(digest, 8)`)
	for _, source := range []string{`SELECT blob AS key FROM attachments`, `SELECT ` + named + ` AS key FROM documents`} {
		if n := a.Count(`SELECT count(*) FROM (` + source + `) r WHERE NOT EXISTS (SELECT 1 FROM blobs b WHERE b.key = r.key)`); n != 0 {
			a.t.Errorf("%d blobs are gone that are referred to: %s", n, source)
		}
	}
}

// Unreferenced counts the blobs that nothing refers to.
func (a *App) Unreferenced() int64 {
	a.t.Helper()
	hex := fmt.Sprintf(dialects[a.Engine].hex, "b.key")
	return a.Count(`SELECT count(*) FROM blobs b WHERE NOT EXISTS (SELECT 1 FROM attachments r WHERE r.blob = b.key)
		AND NOT EXISTS (SELECT 1 FROM documents r WHERE r.digest = 'sha256:' || ` + hex + `)`)
}
