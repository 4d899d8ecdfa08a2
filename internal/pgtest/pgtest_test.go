package pgtest_test

import (
	"errors"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/alkblobs/gc-agent/internal/pgtest"
)

func TestDatabaseIsTheTestsOwn(t *testing.T) {
	t.Parallel()
	for range 8 {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			conn := pgtest.Connect(t, pgtest.Database(t))
			pgtest.Exec(t, conn, "CREATE TABLE blobs (key bytea); CREATE TABLE refs (key bytea)")
			pgtest.Exec(t, conn, "INSERT INTO blobs VALUES ($1)", []byte("k"))
			if n := count(t, conn, "SELECT count(*) FROM blobs"); n != 1 {
				t.Errorf("rows of the test's own table: %d, want 1", n)
			}
		})
	}
}

func TestDatabaseIsDroppedWithWhateverIsLeftInIt(t *testing.T) {
	t.Parallel()
	server := superuser(t)
	outer := t // what is connected for the outer test stays open as the inner one ends
	var database, role string
	t.Run("leaves everything behind", func(t *testing.T) {
		database = pgtest.Database(t)
		var roleURL string
		role, roleURL = pgtest.Role(t, database, "CREATEROLE")
		pgtest.Exec(t, pgtest.Connect(t, database), "GRANT CREATE ON SCHEMA public TO "+role)

		conn := pgtest.Connect(outer, roleURL)
		pgtest.Exec(t, conn, "CREATE TABLE blobs (key bytea); CREATE TABLE refs (key bytea)")
		pgtest.Exec(t, conn, "BEGIN; LOCK TABLE blobs; PREPARE TRANSACTION 'left''over "+role+"'")
		pgtest.Exec(t, conn, "BEGIN; LOCK TABLE refs")
	})
	name := strings.TrimPrefix(parse(t, database).Path, "/")
	for query, arg := range map[string]string{
		"SELECT count(*) FROM pg_database WHERE datname = $1":        name,
		"SELECT count(*) FROM pg_prepared_xacts WHERE database = $1": name,
		"SELECT count(*) FROM pg_roles WHERE rolname = $1":           role,
	} {
		if n := count(t, server, query, arg); n != 0 {
			t.Errorf("%s with %q after the test: %d, want 0", query, arg, n)
		}
	}
}

func TestDatabaseIsDroppedWhileItsSlotIsRead(t *testing.T) {
	t.Parallel()
	server := superuser(t)
	if count(t, server, "SELECT count(*) FROM pg_settings WHERE name = 'wal_level' AND setting = 'logical'") == 0 {
		t.Skip("the server's wal_level isn't logical: run make test, which starts one whose is")
	}
	outer := t
	var name string
	t.Run("reads the slot", func(t *testing.T) {
		database := pgtest.Database(t)
		u := parse(t, database)
		name = strings.TrimPrefix(u.Path, "/")
		pgtest.Exec(t, pgtest.Connect(t, database), "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", name)

		query := u.Query()
		query.Set("replication", "database")
		u.RawQuery = query.Encode()
		startReplication(t, pgtest.Connect(outer, u.String()), name)
	})
	if n := count(t, server, "SELECT count(*) FROM pg_database WHERE datname = $1", name); n != 0 {
		t.Errorf("databases named %s after the test: %d, want 0", name, n)
	}
}

func TestRoleHasTheRightsItIsGiven(t *testing.T) {
	t.Parallel()
	database := pgtest.Database(t)
	pgtest.Exec(t, pgtest.Connect(t, database), "CREATE TABLE blobs (key bytea)")
	name, roleURL := pgtest.Role(t, database, "NOINHERIT")
	conn := pgtest.Connect(t, roleURL)

	if n := count(t, conn, "SELECT count(*) FROM pg_roles WHERE rolname = current_user AND rolname = $1 AND NOT rolinherit", name); n != 1 {
		t.Errorf("the session isn't that of role %s", name)
	}
	_, err := conn.Exec(t.Context(), "SELECT FROM blobs")
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "42501" {
		t.Errorf("read of a table without a grant: %v, want insufficient privilege", err)
	}
}

func TestDatabaseSkipsWithoutAServer(t *testing.T) {
	t.Setenv(pgtest.Variable, "")
	var skipped bool
	t.Run("", func(t *testing.T) {
		defer func() { skipped = t.Skipped() }()
		pgtest.Database(t)
	})
	if !skipped {
		t.Error("a test that needs a server ran without one")
	}
}

func TestProgramsAreTheServers(t *testing.T) {
	t.Parallel()
	programs, conn := pgtest.Programs(t), superuser(t)
	for _, program := range []string{"initdb", "pg_ctl", "postgres"} {
		out, err := exec.CommandContext(t.Context(), filepath.Join(programs, program), "--version").Output()
		if err != nil {
			t.Fatal(err)
		}
		var server string
		if err := conn.QueryRow(t.Context(), "SHOW server_version").Scan(&server); err != nil {
			t.Fatal(err)
		}
		version, _, _ := strings.Cut(server, " ")
		if !strings.Contains(string(out), " "+version) {
			t.Errorf("%s says %q, the server is %s", program, out, server)
		}
	}
}

// startReplication returns once the slot is in use.
func startReplication(t *testing.T, conn *pgx.Conn, slot string) {
	t.Helper()
	frontend := conn.PgConn().Frontend()
	frontend.SendQuery(&pgproto3.Query{
		String: "START_REPLICATION SLOT " + slot + " LOGICAL 0/0 (proto_version '1', publication_names 'none')",
	})
	if err := frontend.Flush(); err != nil {
		t.Fatal(err)
	}
	for {
		message, err := conn.PgConn().ReceiveMessage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, started := message.(*pgproto3.CopyBothResponse); started {
			return
		}
	}
}

// superuser opens a connection to the server, or skips the test without one.
func superuser(t *testing.T) *pgx.Conn {
	t.Helper()
	pgtest.Database(t)
	return pgtest.Connect(t, os.Getenv(pgtest.Variable))
}

func parse(t *testing.T, rawURL string) *url.URL {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func count(t *testing.T, conn *pgx.Conn, query string, args ...any) int {
	t.Helper()
	var n int
	if err := conn.QueryRow(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}
