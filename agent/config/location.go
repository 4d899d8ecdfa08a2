package config

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// No error of this file quotes what it is about: it may hold a password, and in
// a malformed URL the password may be anywhere.
var (
	errScheme     = errors.New("unknown kind of URL: want postgres://…, postgresql://… or sqlite:PATH")
	errURL        = errors.New("isn't a well-formed URL: characters such as @ : / ? # % and spaces in a password are written as %40 %3A %2F %3F %23 %25 %20")
	errSigns      = errors.New("has more than one @: escape the one in a user or a password as %40")
	errParameters = errors.New("isn't a URL that Postgres takes: check the host, the port, and parameters such as sslmode, sslrootcert and connect_timeout")
	errMemory     = errors.New("an SQLite database in memory belongs to one process, and its blobs aren't the agent's: want sqlite:PATH")
	errPath       = errors.New("want sqlite:PATH with a plain path, such as sqlite:/var/lib/app/app.db: no //, no file:, no ? and parameters")
	errHTTP       = errors.New("want the URL of a host, http://… or https://…")
)

// locate finds out from its URL what kind of a database db is, and where. A
// relative path is relative to the directory of the configuration.
func (d *decoder) locate(db *Database, text string) error {
	text = strings.TrimSpace(text)
	db.URL = NewSecret(text)
	path, isFile := strings.CutPrefix(text, "sqlite:")
	switch {
	case isFile:
		return d.locateFile(db, path)
	case strings.HasPrefix(text, "postgres://") || strings.HasPrefix(text, "postgresql://"):
		return locateServer(db, text)
	}
	return errScheme
}

func (d *decoder) locateFile(db *Database, path string) error {
	switch {
	case strings.Contains(path, ":memory:") || strings.Contains(path, "mode=memory"):
		return errMemory
	case path == "" || strings.HasPrefix(path, "//") || strings.HasPrefix(path, "file:") || strings.Contains(path, "?"):
		return errPath
	}
	db.Engine = SQLite
	db.Path = d.beside(path)
	if absolute, err := filepath.Abs(db.Path); err == nil { // else the working directory is gone
		db.Path = absolute
	}
	actual, err := d.env.Resolve(db.Path)
	if err != nil {
		actual = db.Path // a directory that isn't there yet: compared as it is spelled
	}
	db.identity = "sqlite " + actual
	return nil
}

// beside returns a path as seen from the directory of the configuration.
func (d *decoder) beside(path string) string {
	if filepath.IsAbs(path) {
		return filepath.Clean(path)
	}
	return filepath.Join(filepath.Dir(d.file), path)
}

func locateServer(db *Database, text string) error {
	if err := checkReadings(text); err != nil {
		return err
	}
	if _, err := url.Parse(text); err != nil {
		return errURL
	}
	pool, err := pgxpool.ParseConfig(text)
	if err != nil {
		return errParameters
	}
	db.Engine = Postgres
	db.identity = serverIdentity(&pool.ConnConfig.Config)
	return nil
}

// checkReadings refuses a URL of which a part of the password could be taken for
// the host or the database, which errors of a connection name: readers of URLs
// differ about which @ ends the password, and whether # ends everything.
func checkReadings(text string) error {
	_, rest, _ := strings.Cut(text, "://")
	beforeParameters, _, _ := strings.Cut(rest, "?")
	authority := rest[:strings.IndexAny(rest+"/", "/?")]
	switch {
	case strings.Count(beforeParameters, "@") > 1:
		return errSigns
	case strings.Contains(rest[len(authority):], "@"), strings.Contains(rest, "#"):
		return errURL
	}
	return nil
}

// Is says whether a connection that is made by c leads to the database, as the
// same user.
func (db Database) Is(c *pgconn.Config) bool {
	if db.Engine != Postgres {
		return false
	}
	own, err := pgconn.ParseConfig(db.URL.Reveal())
	return err == nil && own.User == c.User && db.identity == serverIdentity(c)
}

func serverIdentity(c *pgconn.Config) string {
	hosts := []string{address(c.Host, c.Port)}
	for _, f := range c.Fallbacks {
		hosts = append(hosts, address(f.Host, f.Port))
	}
	slices.Sort(hosts)
	return fmt.Sprintf("postgres %q %q", slices.Compact(hosts), cmp.Or(c.Database, c.User))
}

// address spells a server in one way. A host that is a path is a socket's directory.
func address(host string, port uint16) string {
	if !strings.HasPrefix(host, "/") {
		host = strings.ToLower(host)
	}
	return fmt.Sprintf("%s:%d", host, port)
}

// readURLFile returns the one line that a url_file holds.
func (d *decoder) readURLFile(path string) (string, error) {
	data, err := d.env.ReadFile(d.beside(path))
	if err != nil {
		return "", fmt.Errorf("the file can't be read: %s", reason(err))
	}
	text := strings.TrimSpace(string(data))
	switch {
	case text == "":
		return "", errors.New("the file is empty: it holds the database's URL and nothing else")
	case len(data) > maxFile || !utf8.ValidString(text) || strings.ContainsAny(text, "\r\n\x00"):
		return "", errors.New("the file isn't one line of UTF-8: it holds the database's URL and nothing else")
	}
	return text, nil
}

// reason is why a file can't be read, without its path.
func reason(err error) string {
	var number syscall.Errno
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "it doesn't exist"
	case errors.Is(err, fs.ErrPermission):
		return "the agent's user may not read it"
	case errors.As(err, &number):
		return number.Error()
	}
	return "reading it failed"
}

func checkHTTP(text string) error {
	u, err := url.Parse(text)
	if err != nil {
		return errURL
	}
	if (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" {
		return errHTTP
	}
	return nil
}
