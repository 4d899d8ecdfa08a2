package agent_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// guardsPage returns what docs/guards.md shows in a language, in its order.
func guardsPage(t *testing.T, lang string) []string {
	t.Helper()
	page, err := os.ReadFile("../docs/guards.md")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, part := range strings.Split(string(page), "\n```"+lang+"\n")[1:] {
		block, _, _ := strings.Cut(part, "\n```\n")
		found = append(found, block)
	}
	return found
}

// documented is the page's application, with the tables and the foreign key, and a
// pool of the page's source.
func documented(t *testing.T, opts agent.GuardOptions, more agent.Options) (*app, *agent.Pool) {
	t.Helper()
	sql, yaml := guardsPage(t, "sql"), guardsPage(t, "yaml")
	if len(sql) != 4 || len(yaml) != 1 {
		t.Fatalf("the page has %d blocks of SQL and %d of YAML", len(sql), len(yaml))
	}
	a := newPostgresApp(t)
	a.exec(sql[0], sql[1], `INSERT INTO blobs VALUES ('\x01', '')`, `INSERT INTO attachments (blob) VALUES ('\x01')`, `INSERT INTO documents (file) VALUES ('sha256:01')`)
	p := a.poolWith(poolYAML{
		blobs:    "{type: table, table: blobs, column: sha256}",
		liveness: []string{strings.TrimPrefix(yaml[0], "- "), "{name: attachments, table: attachments, column: blob}"},
	}, more)
	opts.Source = "documents"
	a.install(p, opts)
	return a, p
}

// The SQL of the page runs, and gives what the page says.
func TestDocumentedGuards(t *testing.T) {
	t.Parallel()
	a, p := documented(t, agent.GuardOptions{Deferrable: true}, agent.Options{})
	check, err := p.Check(t.Context())
	if err != nil || check.Bad() {
		t.Fatalf("%v, %v", check.Findings, err)
	}
	if check.Sources[0].Guard != "trigger" || check.Sources[1].Guard != "foreign_key" {
		t.Errorf("%+v", check.Sources)
	}
	sql := guardsPage(t, "sql")
	a.exec(sql[2], sql[3])
	if n := a.number(`SELECT count(*) FROM documents`); n != 3 {
		t.Errorf("%d documents", n)
	}
	a.exec(`BEGIN; UPDATE documents SET deleted_at = now(); DELETE FROM blobs WHERE sha256 <> '\x01'; COMMIT`)
	if _, err := a.db.ExecContext(t.Context(), `UPDATE documents SET deleted_at = NULL`); pgdb.Code(err) != pgdb.ForeignKeyViolation {
		t.Errorf("undeleted: %v", err)
	}

	lite := newSQLiteApp(t)
	lite.exec(`CREATE TABLE blobs (sha256 BLOB PRIMARY KEY NOT NULL, content TEXT)`, `CREATE TABLE attachments (blob BLOB)`)
	lite.exec(guardsPage(t, "sqlite")...)
	if n := lite.number(`SELECT count(*) FROM attachments JOIN blobs ON sha256 = blob`); n != 1 {
		t.Errorf("%d references", n)
	}
}

// The Go of the page is this file's, and gets over a sweep that deletes its blob
// while it refers to it.
func TestDocumentedGuardRetry(t *testing.T) {
	t.Parallel()
	code := guardsPage(t, "go")
	self, err := os.ReadFile("guards_docs_test.go")
	if err != nil {
		t.Fatal(err)
	}
	if len(code) != 1 || !strings.Contains(string(self), code[0]) {
		t.Fatal("the Go of the page isn't what is tested here")
	}
	var a *app
	ended := make(chan error, 1)
	o := before(func() {
		writer := pgtest.Connect(t, a.url)
		go func() { ended <- attach(t.Context(), writer, []byte("hello")) }()
		a.waitUntilBlocked(writer.PgConn().PID(), ended)
	}, stmtTake, `"blobs"`)
	a, p := documented(t, agent.GuardOptions{}, o.options())
	a.exec(`INSERT INTO blobs VALUES (sha256('hello'), 'hello')`)
	sweep(t, p)
	o.armed = true
	if rep := sweep(t, p); !o.done || rep.Deleted != 1 {
		t.Errorf("%+v", rep)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if got := a.column(`SELECT convert_from(content, 'UTF8') FROM blobs`); !slices.Equal(got, []string{"", "hello"}) {
		t.Errorf("blobs: %q", got)
	}
}

func attach(ctx context.Context, conn *pgx.Conn, content []byte) error {
	key := sha256.Sum256(content)
	for attempt := 0; ; attempt++ {
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			const store = "INSERT INTO blobs VALUES ($1, $2) ON CONFLICT DO NOTHING"
			if _, err := tx.Exec(ctx, store, key[:], content); err != nil {
				return err
			}
			const refer = "INSERT INTO documents (file) VALUES ('sha256:' || encode($1, 'hex'))"
			_, err := tx.Exec(ctx, refer, key[:])
			return err
		})
		var pgErr *pgconn.PgError
		retry := errors.As(err, &pgErr) && (pgErr.Code == "23503" || pgErr.Code == "40001" || pgErr.Code == "40P01")
		if !retry || attempt == 5 {
			return err
		}
	}
}
