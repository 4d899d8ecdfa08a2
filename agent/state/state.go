package state

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"time"

	_ "modernc.org/sqlite" // the driver
)

// busyTimeout is how long a write waits for another process of the agent's.
const busyTimeout = 5 * time.Second

// applicationID, "gcag", tells a state database from any other, and version its
// schema from later ones. Both are written into the file's header.
const (
	applicationID = 0x67636167
	version       = 1
)

var schema = []string{
	`CREATE TABLE pools (
		pool    TEXT PRIMARY KEY NOT NULL,
		scanned INTEGER NOT NULL,
		braked  TEXT NOT NULL,
		covered TEXT NOT NULL
	) STRICT`,
	`CREATE TABLE source_rows (
		pool   TEXT NOT NULL,
		source TEXT NOT NULL,
		rows   INTEGER NOT NULL,
		PRIMARY KEY (pool, source)
	) STRICT, WITHOUT ROWID`,
	`CREATE TABLE sweeps (
		id       INTEGER PRIMARY KEY,
		pool     TEXT NOT NULL,
		started  INTEGER NOT NULL,
		report   TEXT NOT NULL
	) STRICT`,
	`CREATE INDEX sweeps_by_pool ON sweeps (pool, id)`,
	fmt.Sprintf(`PRAGMA application_id = %d`, applicationID),
	fmt.Sprintf(`PRAGMA user_version = %d`, version),
}

// Store is an open state database. It may be used by any number of goroutines,
// and its file by any number of processes, at once.
type Store struct {
	db   *sql.DB
	path string
	keep int // sweeps of a pool
}

// Open opens the file at path, and makes it where there is none; its directory
// has to be there. A file that isn't a state database of this version or an
// earlier one is an error, and left alone.
func Open(ctx context.Context, path string) (*Store, error) {
	dsn := "file:" + (&url.URL{Path: path}).EscapedPath() +
		fmt.Sprintf("?_pragma=busy_timeout(%d)&_pragma=synchronous(normal)&_txlock=immediate", busyTimeout.Milliseconds())
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, fmt.Errorf("open state database %s: %w", path, err)
	}
	s := &Store{db: db, path: path, keep: keptSweeps}
	err = s.inTx(ctx, ensure)
	if err == nil {
		// Only now: it writes to the file.
		_, err = db.ExecContext(ctx, "PRAGMA journal_mode = wal")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open state database %s: %w; a lost one loses no blob: move it away to begin anew", path, err), db.Close())
	}
	return s, nil
}

func ensure(ctx context.Context, tx *sql.Tx) error {
	const query = "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id, pragma_user_version"
	var id, have, tables int
	err := tx.QueryRowContext(ctx, query).Scan(&id, &have, &tables)
	switch {
	case err != nil:
		return err
	case id == applicationID && have > version:
		return fmt.Errorf("it was written by a later version of the agent (%d, this one knows %d)", have, version)
	case id == applicationID:
		return nil
	case id != 0 || have != 0 || tables > 0:
		return errors.New("it is a database of something else")
	}
	for _, ddl := range schema {
		if _, err := tx.ExecContext(ctx, ddl); err != nil {
			return err
		}
	}
	return nil
}

// Close closes the file.
func (s *Store) Close() error { return s.db.Close() }

func (s *Store) inTx(ctx context.Context, fn func(context.Context, *sql.Tx) error) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := fn(ctx, tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

// Pool is what is remembered of a pool. The zero value is a pool of which nothing
// is.
type Pool struct {
	// Known says that a sweep has passed before, so that there is something to
	// compare with.
	Known bool
	// Scanned is how many keys the pool had in the last sweep that passed.
	Scanned int64
	// SourceRows is how many rows each source had then, by the source's name.
	SourceRows map[string]int64
	// Braked names the brake that stopped the last sweep; empty where none did.
	Braked string
	// Covered is the registration of sources under which references nobody
	// registered were looked for and not found.
	Covered string
}

// Pool returns what is remembered of the pool of that name.
func (s *Store) Pool(ctx context.Context, name string) (Pool, error) {
	p := Pool{SourceRows: map[string]int64{}}
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		const query = "SELECT scanned >= 0, max(scanned, 0), braked, covered FROM pools WHERE pool = ?"
		err := tx.QueryRowContext(ctx, query, name).Scan(&p.Known, &p.Scanned, &p.Braked, &p.Covered)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		return readSourceRows(ctx, tx, name, p.SourceRows)
	})
	if err != nil {
		return Pool{}, s.failed("read what is remembered of pool", name, err)
	}
	return p, nil
}

func readSourceRows(ctx context.Context, tx *sql.Tx, pool string, into map[string]int64) error {
	rows, err := tx.QueryContext(ctx, "SELECT source, rows FROM source_rows WHERE pool = ?", pool)
	if err != nil {
		return err
	}
	defer rows.Close() //nolint:errcheck // rows.Err says what matters
	for rows.Next() {
		var source string
		var n int64
		if err := rows.Scan(&source, &n); err != nil {
			return err
		}
		into[source] = n
	}
	return rows.Err()
}

// Passed remembers a sweep that no brake stopped: its counts are what the next
// one is compared with. Sources that aren't among rows are forgotten.
func (s *Store) Passed(ctx context.Context, pool string, scanned int64, rows map[string]int64) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		const note = `INSERT INTO pools (pool, scanned, braked, covered) VALUES (?, ?, '', '')
			ON CONFLICT (pool) DO UPDATE SET scanned = excluded.scanned, braked = ''`
		if _, err := tx.ExecContext(ctx, note, pool, scanned); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "DELETE FROM source_rows WHERE pool = ?", pool); err != nil {
			return err
		}
		for source, n := range rows {
			if _, err := tx.ExecContext(ctx, "INSERT INTO source_rows (pool, source, rows) VALUES (?, ?, ?)", pool, source, n); err != nil {
				return err
			}
		}
		return nil
	})
	return s.failed("remember a sweep of pool", pool, err)
}

// Braked remembers that a brake stopped a sweep. What brakes compare with stays.
func (s *Store) Braked(ctx context.Context, pool, brake string) error {
	const note = `INSERT INTO pools (pool, scanned, braked, covered) VALUES (?, -1, ?, '')
		ON CONFLICT (pool) DO UPDATE SET braked = excluded.braked`
	_, err := s.db.ExecContext(ctx, note, pool, brake)
	return s.failed("remember the brake of pool", pool, err)
}

// Covered remembers that under this registration of sources no column was found
// that refers to blobs and isn't registered.
func (s *Store) Covered(ctx context.Context, pool, registration string) error {
	const note = `INSERT INTO pools (pool, scanned, braked, covered) VALUES (?, -1, '', ?)
		ON CONFLICT (pool) DO UPDATE SET covered = excluded.covered`
	_, err := s.db.ExecContext(ctx, note, pool, registration)
	return s.failed("remember what was looked at of pool", pool, err)
}

func (s *Store) failed(what, pool string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s in state database %s: %w", what, pool, s.path, err)
}
