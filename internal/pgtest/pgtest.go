package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Variable names the environment variable that holds the server's URL: a
// postgres:// URL of a superuser in any of the server's databases.
const Variable = "GC_AGENT_TEST_POSTGRES_URL"

// ProgramsVariable names the environment variable that holds the directory of the
// server's programs. scripts/postgres sets it, and uses it where it is set.
const ProgramsVariable = "GC_AGENT_POSTGRES_BIN"

// limit bounds whatever a function of this package does on the server.
const limit = time.Minute

// SQLSTATEs that another test's work on the same server can cause.
const (
	uniqueViolation = "23505"
	objectInUse     = "55006"
)

// execer is a connection, a pool or a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Database creates an empty database and returns its URL, for the superuser of
// the server's own URL. When the test ends the database is dropped, whatever
// connections, prepared transactions or replication slots are left in it.
// Without a server the test is skipped.
func Database(t testing.TB) string {
	t.Helper()
	server := os.Getenv(Variable)
	if server == "" {
		t.Skipf("%s is not set: run make test, which starts a Postgres server, or set it to a superuser's URL on a server of your own", Variable)
	}
	name := randomName("gc_test_")
	database, err := withURL(server, func(u *url.URL) { u.Path = "/" + name })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	err = withConn(ctx, server, func(conn *pgx.Conn) error {
		return retry(ctx, func() error {
			_, err := conn.Exec(ctx, "CREATE DATABASE "+quote(name)+" TEMPLATE template0")
			return err
		}, objectInUse, uniqueViolation)
	})
	if err != nil {
		t.Fatalf("create a test database: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		if err := dropDatabase(ctx, server, database, name); err != nil {
			t.Errorf("drop test database %s: %v", name, err)
		}
	})
	return database
}

// Programs returns the directory of initdb, pg_ctl and postgres, of the version of
// the server that the other functions use, for a test that starts a server of its
// own. Where no script has started that server the test is skipped: any other
// version that is installed would be tested instead.
func Programs(t testing.TB) string {
	t.Helper()
	dir := os.Getenv(ProgramsVariable)
	if dir == "" || os.Getenv(Variable) == "" {
		t.Skipf("%s is not set, where initdb and pg_ctl are: run make test, which starts a Postgres server", ProgramsVariable)
	}
	return dir
}

func dropDatabase(ctx context.Context, server, database, name string) error {
	return withConn(ctx, server, func(conn *pgx.Conn) error {
		// Neither a prepared transaction nor a replication slot in use yields to FORCE.
		if err := rollbackPrepared(ctx, conn, database, name); err != nil {
			return err
		}
		return retry(ctx, func() error {
			_, err := conn.Exec(ctx, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
			if err != nil {
				return err
			}
			_, err = conn.Exec(ctx, "DROP DATABASE IF EXISTS "+quote(name)+" WITH (FORCE)")
			return err
		}, objectInUse)
	})
}

// Connect opens a connection, which is closed when the test ends. A test that
// can't connect fails.
func Connect(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatalf("connect to the test database: %v", err)
	}
	t.Cleanup(func() { closeConn(t.Context(), conn) })
	return conn
}

// Exec runs a statement on a connection, a pool or a transaction, and fails the
// test on an error. Without arguments sql may hold several statements.
func Exec(t testing.TB, conn execer, sql string, args ...any) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("exec %q: %v", sql, err)
	}
}

// Role creates a role that may log in, with whatever more the options of CREATE
// ROLE give it, and returns its name and its URL for the database of the given
// superuser's URL. When the test ends the role is dropped: its sessions and that
// database's prepared transactions end, and what it owns there goes to the
// superuser.
func Role(t testing.TB, database, options string) (name, roleURL string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()

	name = randomName("gc_role_")
	// For a server that asks for one. It is letters and digits and needs no quoting.
	password := randomName("")
	err := withConn(ctx, database, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD '%s' %s", quote(name), password, options))
		return err
	})
	if err != nil {
		t.Fatalf("create a test role: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		err := withConn(ctx, database, func(conn *pgx.Conn) error { return dropRole(ctx, conn, database, name) })
		if err != nil {
			t.Errorf("drop test role %s: %v", name, err)
		}
	})
	roleURL, err = withURL(database, func(u *url.URL) { u.User = url.UserPassword(name, password) })
	if err != nil {
		t.Fatal(err)
	}
	return name, roleURL
}

func dropRole(ctx context.Context, conn *pgx.Conn, database, name string) error {
	// What still runs as the role holds locks that DROP OWNED would wait for.
	if err := rollbackPrepared(ctx, conn, database, conn.Config().Database); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", name)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, strings.ReplaceAll(
		"REASSIGN OWNED BY $role TO CURRENT_USER; DROP OWNED BY $role; DROP ROLE $role", "$role", quote(name)))
	return err
}

// rollbackPrepared ends the prepared transactions of the database of that name
// and URL, which only a session in it can do. Any session can list them.
func rollbackPrepared(ctx context.Context, conn *pgx.Conn, database, name string) error {
	rows, err := conn.Query(ctx, "SELECT gid FROM pg_prepared_xacts WHERE database = $1", name)
	if err != nil {
		return err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(ids) == 0 {
		return err
	}
	return withConn(ctx, database, func(conn *pgx.Conn) error {
		for _, id := range ids {
			literal := "'" + strings.ReplaceAll(id, "'", "''") + "'"
			if _, err := conn.Exec(ctx, "ROLLBACK PREPARED "+literal); err != nil {
				return err
			}
		}
		return nil
	})
}

// withConn lends fn a connection.
func withConn(ctx context.Context, url string, fn func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer closeConn(ctx, conn)
	return fn(conn)
}

func closeConn(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	// A session that can't be told to end has ended, or does when its database is dropped.
	_ = conn.Close(ctx)
}

// retry calls fn until it succeeds, fails with an SQLSTATE that isn't among the
// given ones, or ctx ends. It returns fn's last error.
func retry(ctx context.Context, fn func() error, codes ...string) error {
	for {
		err := fn()
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || !slices.Contains(codes, pgErr.Code) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func withURL(server string, change func(*url.URL)) (string, error) {
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		// The URL isn't shown, since it may hold a password.
		return "", fmt.Errorf("%s must be a postgres:// URL", Variable)
	}
	change(u)
	return u.String(), nil
}

func randomName(prefix string) string {
	return prefix + strings.ToLower(rand.Text())
}

func quote(identifier string) string {
	return pgx.Identifier{identifier}.Sanitize()
}
