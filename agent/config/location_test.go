package config

import (
	"context"
	"errors"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"pgregory.net/rapid"
)

func locateAny(text string) (Database, error) {
	d := &decoder{env: testEnv(nil, nil, nil).orOS(), file: "c.yaml", lines: map[string]int{}}
	db := Database{Name: "a"}
	return db, d.locate(&db, text)
}

// connectError is what a client says that can reach nobody.
func connectError(t *testing.T, text string) string {
	t.Helper()
	c, err := pgconn.ParseConfig(text)
	if err != nil {
		t.Fatal(err)
	}
	c.LookupFunc = func(_ context.Context, host string) ([]string, error) { return nil, errors.New("lookup " + host) }
	c.DialFunc = func(_ context.Context, _, addr string) (net.Conn, error) { return nil, errors.New("dial " + addr) }
	conn, err := pgconn.ConnectConfig(t.Context(), c)
	if err == nil {
		t.Fatal("connected", conn)
	}
	return err.Error()
}

// A URL is refused, or no part of its password is in the error of a connection.
func TestPasswordsStayOutOfConnectErrors(t *testing.T) {
	t.Parallel()
	for text, accepted := range map[string]bool{
		"postgres://app:se@cret99@db.invalid/prod":           false,
		"postgres://app:Tr@vel/cret99@db.invalid/prod":       false,
		"postgres://app:12/cret99@db.invalid/prod":           false,
		"postgres://app:12?cret99@db.invalid/prod":           false,
		"postgres://app:12#cret99@db.invalid/prod":           false,
		"postgres://app:12#cret99":                           false,
		"postgres://app:x@y/prod?password=a@cret99":          false,
		"postgres://app:se%40cret99@db.invalid/prod":         true,
		"postgres://app:Tr%40vel%2Fcret99@db.invalid/prod":   true,
		"postgres://app:cret99@a.invalid,b.invalid:1/prod":   true,
		"postgresql://app:cret99@[::1]:1/prod?sslmode=allow": true,
		"postgres://app@db.invalid/prod?password=cret99":     true,
		"postgres:///prod?host=/nowhere&password=a%40cret99": true,
	} {
		_, err := locateAny(text)
		if (err == nil) != accepted {
			t.Errorf("%s: error %v", text, err)
		}
		said := connectErrorOrRefusal(t, text, err)
		if strings.Contains(said, "cret99") {
			t.Errorf("%s: the password is in: %s", text, said)
		}
	}
}

func connectErrorOrRefusal(t *testing.T, text string, refusal error) string {
	t.Helper()
	if refusal != nil {
		return refusal.Error()
	}
	return connectError(t, text)
}

// Of a URL that is accepted, net/url and pgx make the same user, password, host
// and database, so that what one of them hides isn't what the other shows.
func TestURLsHaveOneReading(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := "postgres://" + rapid.StringMatching(`[a-c1]{1,2}(:[a-c1@/?#]{1,6})?[@/?#]?[a-c1@/?#]{1,6}/[a-c@/#]{1,4}(\?[a-c]=[a-c@]{1,2})?`).Draw(t, "url")
		if _, err := locateAny(text); err != nil {
			return
		}
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		c, err := pgconn.ParseConfig(text)
		if err != nil {
			t.Fatal(err)
		}
		password, _ := u.User.Password()
		if name := u.User.Username(); name != "" && name != c.User || password != "" && password != c.Password {
			t.Errorf("%s: user %q, password %q; pgx has %q, %q", text, name, password, c.User, c.Password)
		}
		host, database := u.Hostname(), strings.TrimPrefix(u.Path, "/") // what is empty has a default
		if host != "" && host != c.Host || database != "" && database != c.Database {
			t.Errorf("%s: host %q, database %q; pgx has %q, %q", text, host, database, c.Host, c.Database)
		}
	})
}

func TestPathsAreAbsolute(t *testing.T) {
	t.Parallel()
	db, err := locateAny("sqlite:data/app.db")
	if err != nil {
		t.Fatal(err)
	}
	if want, err := filepath.Abs("data/app.db"); err != nil || db.Path != want {
		t.Errorf("path %q, want %q (%v)", db.Path, want, err)
	}
}

func TestDatabaseKnowsItsConnections(t *testing.T) {
	t.Parallel()
	db, err := locateAny("postgres://app@DB.invalid/prod?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	file, err := locateAny("sqlite:app.db")
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]bool{
		"postgres://app:x@db.invalid:5432/prod": true,
		"postgres://other@db.invalid/prod":      false,
		"postgres://app@db.invalid/test":        false,
		"postgres://app@db.invalid:5433/prod":   false,
	} {
		c, err := pgconn.ParseConfig(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := db.Is(c); got != want {
			t.Errorf("%s: %t", text, got)
		}
		if file.Is(c) {
			t.Errorf("%s: leads to an SQLite file", text)
		}
	}
}
