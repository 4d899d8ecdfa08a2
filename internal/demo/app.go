package demo

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"

	_ "modernc.org/sqlite" // the driver
)

// Digest names a blob: the SHA-256 of its content.
type Digest [sha256.Size]byte

// String returns the digest as attachments spell it.
func (d Digest) String() string { return "sha256:" + hex.EncodeToString(d[:]) }

// App is the application. Its methods may be called at once.
type App struct {
	dir string
	db  *sql.DB
}

const schema = `
CREATE TABLE blobs (
	digest  BLOB PRIMARY KEY NOT NULL, -- the SHA-256 of content
	size    INTEGER NOT NULL,
	content BLOB NOT NULL
);
CREATE TABLE attachments (
	id         INTEGER PRIMARY KEY,
	title      TEXT NOT NULL,
	blob       TEXT NOT NULL, -- sha256: and the digest in hex
	deleted_at TEXT           -- set while the attachment is in the trash
);
CREATE INDEX attachments_blob ON attachments (blob);
CREATE TABLE users (
	id     INTEGER PRIMARY KEY,
	name   TEXT NOT NULL,
	avatar BLOB -- a digest, or NULL
);
CREATE INDEX users_avatar ON users (avatar);`

// Create makes the application and its configuration in dir, which is made too
// where it is missing. An earlier demo's files are replaced; a directory that
// holds anything else is refused with ErrForeign.
func Create(ctx context.Context, dir string) (*App, error) {
	if err := prepare(dir); err != nil {
		return nil, err
	}
	a := &App{dir: dir}
	dsn := "file:" + (&url.URL{Path: a.Database()}).EscapedPath() + "?_pragma=busy_timeout(5000)&_txlock=immediate"
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, fmt.Errorf("open the demo's database: %w", err)
	}
	a.db = db
	if err := a.fill(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("fill the demo's database: %w", err), db.Close())
	}
	return a, nil
}

// Close closes the database. The files stay.
func (a *App) Close() error { return a.db.Close() }

// Config returns the path of the agent's configuration.
func (a *App) Config() string { return filepath.Join(a.dir, configFile) }

// Database returns the path of the SQLite file.
func (a *App) Database() string { return filepath.Join(a.dir, databaseFile) }

func (a *App) fill(ctx context.Context) error {
	// The number comes first, while it goes into the file's header and not into a
	// log beside it.
	for _, s := range []string{fmt.Sprintf("PRAGMA application_id = %d", applicationID), "PRAGMA journal_mode = WAL"} {
		if _, err := a.db.ExecContext(ctx, s); err != nil {
			return err
		}
	}
	return a.inTx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, schema); err != nil {
			return err
		}
		return seed(ctx, tx)
	})
}

// How many blobs the application begins with, and what becomes of them.
const (
	attachedBlobs = 150
	avatarBlobs   = 16
	trashedBlobs  = 12
	unnamedBlobs  = 22
)

func seed(ctx context.Context, tx *sql.Tx) error {
	for n := range attachedBlobs + avatarBlobs + trashedBlobs + unnamedBlobs {
		digest, err := upload(ctx, tx, n)
		if err != nil {
			return err
		}
		switch {
		case n < attachedBlobs:
			err = attach(ctx, tx, title(n), digest)
		case n < attachedBlobs+avatarBlobs:
			_, err = tx.ExecContext(ctx, `INSERT INTO users (name, avatar) VALUES (?, ?)`, fmt.Sprintf("user %d", n), digest[:])
		case n < attachedBlobs+avatarBlobs+trashedBlobs:
			_, err = tx.ExecContext(ctx, `INSERT INTO attachments (title, blob, deleted_at) VALUES (?, ?, datetime('now', '-40 days'))`, title(n), digest.String())
		}
		if err != nil {
			return err
		}
	}
	// Rows that must change nothing: a user without a picture, and a copy in the
	// trash of what is attached elsewhere.
	_, err := tx.ExecContext(ctx, `
		INSERT INTO users (name) VALUES ('user without a picture');
		INSERT INTO attachments (title, blob, deleted_at) SELECT title || ', a copy', blob, datetime('now') FROM attachments WHERE id = 1`)
	return err
}

func title(n int) string { return fmt.Sprintf("photo %d", n) }

// upload stores the n-th photo, if it isn't there.
func upload(ctx context.Context, tx *sql.Tx, n int) (Digest, error) {
	content := []byte(strings.Repeat(title(n)+"\n", 50+n%50))
	digest := Digest(sha256.Sum256(content))
	_, err := tx.ExecContext(ctx, `INSERT INTO blobs (digest, size, content) VALUES (?, ?, ?) ON CONFLICT DO NOTHING`, digest[:], len(content), content)
	return digest, err
}

func attach(ctx context.Context, tx *sql.Tx, title string, digest Digest) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO attachments (title, blob) VALUES (?, ?)`, title, digest.String())
	return err
}

func (a *App) inTx(ctx context.Context, fn func(*sql.Tx) error) error {
	tx, err := a.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := fn(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}
