package fleet_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

const pinsPage = "../docs/pins.md"

// blocks returns what the page shows in a language, in its order.
func blocks(t *testing.T, lang string) []string {
	t.Helper()
	page, err := os.ReadFile(pinsPage)
	check(t, err)
	var found []string
	for _, part := range strings.Split(string(page), "\n```"+lang+"\n")[1:] {
		block, _, _ := strings.Cut(part, "\n```\n")
		found = append(found, block)
	}
	return found
}

// newDocumentedPool makes the tables of the page and the pool beside them, and
// returns the application's connection and the agent's.
func newDocumentedPool(t *testing.T, tables, grants string) (app, agent *pgdb.Conn) {
	t.Helper()
	url := pgtest.Database(t)
	agent = connect(t, url, patient)
	pgtest.Exec(t, agent, tables)
	check(t, fleet.EnsureSchema(t.Context(), agent, "gc_agent"))
	check(t, fleet.EnsureFunctions(t.Context(), agent, "gc_agent", []fleet.PinTier{
		{Table: "public.blobs", KeyColumn: "sha256", Kind: blob.KindBytes},
	}))
	role, roleURL := pgtest.Role(t, url, "")
	pgtest.Exec(t, agent, strings.ReplaceAll(grants, "TO app;", "TO "+role+";"))
	pgtest.Exec(t, agent, "GRANT SELECT, INSERT ON blobs, attachments TO "+role+"; GRANT USAGE ON SEQUENCE attachments_id_seq TO "+role)
	return connect(t, roleURL, patient), agent
}

// The SQL of the page runs, as the application's role, and does what it says.
func TestDocumentedSQL(t *testing.T) {
	t.Parallel()
	sql := blocks(t, "sql")
	if len(sql) != 5 {
		t.Fatalf("%s has %d blocks of SQL", pinsPage, len(sql))
	}
	app, agent := newDocumentedPool(t, sql[1], sql[0])
	const pins = "SELECT count(*) FROM gc_agent.gc_pins WHERE owner = 'web-1'"
	pgtest.Exec(t, app, sql[2])
	equal(t, ask[int](t, agent, pins), 1)
	pgtest.Exec(t, app, sql[2])
	equal(t, ask[int](t, agent, "SELECT count(*) FROM attachments"), 2)
	equal(t, ask[string](t, agent, "SELECT convert_from(content, 'UTF8') FROM blobs"), "hello")
	equal(t, ask[int](t, agent, pins), 1)

	pgtest.Exec(t, app, sql[3])
	equal(t, ask[int](t, agent, "SELECT count(*) FROM attachments"), 3)
	equal(t, ask[int](t, agent, pins), 1)
	equal(t, ask[[]bool](t, app, strings.TrimSuffix(sql[4], ";")), []bool{true, false})
}

// The Go of the page is this file's, and runs.
func TestDocumentedGo(t *testing.T) {
	t.Parallel()
	code := blocks(t, "go")
	self, err := os.ReadFile("docs_test.go")
	check(t, err)
	if len(code) != 1 || !strings.Contains(string(self), code[0]) {
		t.Fatalf("the Go of %s isn't what is tested here", pinsPage)
	}
	sql := blocks(t, "sql")
	app, agent := newDocumentedPool(t, sql[1], sql[0])
	for range 2 {
		check(t, attach(t.Context(), app.Conn, []byte("hello")))
	}
	equal(t, ask[int](t, agent, "SELECT count(*) FROM blobs"), 1)
	equal(t, ask[int](t, agent, "SELECT count(*) FROM attachments"), 2)
	key := sha256.Sum256([]byte("hello"))
	state, err := fleet.PinCheck(t.Context(), agent, "gc_agent", blob.Key(key[:]))
	check(t, err)
	equal(t, state, fleet.Protected)
}

// attach stores the content, unless it is stored already, and refers to it.
func attach(ctx context.Context, conn *pgx.Conn, content []byte) error {
	key := sha256.Sum256(content)
	for {
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			var there bool
			const pin = "SELECT gc_agent.pin($1::bytea, 'web-1', '60 seconds')"
			if err := tx.QueryRow(ctx, pin, key[:]).Scan(&there); err != nil {
				return err
			}
			if !there {
				const upload = "INSERT INTO blobs (sha256, content) VALUES ($1, $2) ON CONFLICT DO NOTHING"
				if _, err := tx.Exec(ctx, upload, key[:], content); err != nil {
					return err
				}
			}
			_, err := tx.Exec(ctx, "INSERT INTO attachments (blob) VALUES ($1)", key[:])
			return err
		})
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && (pgErr.Code == "40001" || pgErr.Code == "40P01") {
			continue
		}
		return err
	}
}
