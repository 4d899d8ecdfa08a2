package fleet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// Pins in memory are known to the process that keeps them, and to nobody else. So
// that process has a mark, exclusively, for as long as it gives pins, and whoever
// deletes without knowing them has the same mark, shared, meanwhile: the two keep
// each other out.

// pinMarkKey is where keepers of pins and the agents that sweep one schema meet.
func pinMarkKey(schema string) int64 { return lockID("pins in memory", schema) }

// MarkPinKeeper takes the mark of who keeps the pins of the schema's pool in
// memory, without waiting: false, and no error, while anybody has it, shared or not.
// It lasts as long as the session of conn, which must be used for nothing else that
// takes it. After an error the connection is to be closed.
func MarkPinKeeper(ctx context.Context, conn *pgdb.Conn, schema string) (bool, error) {
	return tryMark(ctx, conn, schema, "SELECT pg_catalog.pg_try_advisory_lock($1)")
}

// KeepPinKeepersAway takes the same mark, shared: false, and no error, while a
// process keeps pins in memory. For as long as the session of conn lives nobody can
// begin to.
func KeepPinKeepersAway(ctx context.Context, conn *pgdb.Conn, schema string) (bool, error) {
	return tryMark(ctx, conn, schema, "SELECT pg_catalog.pg_try_advisory_lock_shared($1)")
}

func tryMark(ctx context.Context, conn *pgdb.Conn, schema, query string) (got bool, err error) {
	if err = CheckSession(conn); err == nil {
		err = conn.QueryRow(ctx, query, pinMarkKey(schema)).Scan(&got)
	}
	if err != nil {
		return false, fmt.Errorf("mark the pins of schema %s: %w", pgdb.Ident(schema), err)
	}
	return got, nil
}

// HasPinMark says whether the session of q has the mark, shared or not, by asking
// the server.
func HasPinMark(ctx context.Context, q pgdb.Querier, schema string) (bool, error) {
	const query = `SELECT EXISTS (
		SELECT FROM pg_catalog.pg_locks
		WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid()
			AND (classid::bigint << 32) | objid::bigint = $1 AND objsubid = 1 AND granted)`
	var has bool
	if err := q.QueryRow(ctx, query, pinMarkKey(schema)).Scan(&has); err != nil {
		return false, fmt.Errorf("look for the mark of the pins of schema %s: %w", pgdb.Ident(schema), err)
	}
	return has, nil
}

// PinMarkHolders says, for people, who else has the mark: the server's processes,
// with as much of their sessions as the role may see. It is empty once nobody has.
func PinMarkHolders(ctx context.Context, q pgdb.Querier, schema string) (who string, err error) {
	const query = `
		SELECT coalesce(string_agg('pid ' || l.pid || coalesce(' (' || a.usename || coalesce(', ' || nullif(a.application_name, ''), '')
			|| coalesce(', from ' || host(a.client_addr), '') || ')', ''), ', ' ORDER BY l.pid), '')
		FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
		WHERE l.locktype = 'advisory' AND l.pid <> pg_catalog.pg_backend_pid()
			AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
			AND (l.classid::bigint << 32) | l.objid::bigint = $1 AND l.objsubid = 1 AND l.granted`
	if err := q.QueryRow(ctx, query, pinMarkKey(schema)).Scan(&who); err != nil {
		return "", fmt.Errorf("look who has the mark of the pins of schema %s: %w", pgdb.Ident(schema), err)
	}
	return who, nil
}

// FileMarkPinKeeper is MarkPinKeeper of the pool of an SQLite file: a lock on a
// file of its own beside it, which holds the keeper's process id for people. The
// mark lasts until it is released, or the process ends; the file stays.
func FileMarkPinKeeper(path string) (*FileLease, bool, error) {
	l, ok, err := pinMarkFile.acquire(path, os.O_RDWR|os.O_CREATE, syscall.LOCK_EX)
	if ok {
		writePID(l.file)
	}
	return l, ok, err
}

// FileKeepPinKeepersAway is KeepPinKeepersAway of the pool of an SQLite file.
func FileKeepPinKeepersAway(path string) (*FileLease, bool, error) {
	return pinMarkFile.acquire(path, os.O_RDWR|os.O_CREATE, syscall.LOCK_SH)
}

// FileSeePinKeepersAway is the same for who only looks: it makes no file, without
// which there is no keeper right now, and the lease is of nothing.
func FileSeePinKeepersAway(path string) (*FileLease, bool, error) {
	l, ok, err := pinMarkFile.acquire(path, os.O_RDONLY, syscall.LOCK_SH)
	if errors.Is(err, fs.ErrNotExist) {
		return &FileLease{}, true, nil
	}
	return l, ok, err
}

// FilePinKeeperPID returns, for people, the process that keeps the pins of an SQLite
// file, or did so last; it is false where that can't be told.
func FilePinKeeperPID(path string) (pid int, ok bool) { return pinMarkFile.pid(path) }

// Stands says whether the lock's file is still the one at its path. Where it was
// removed, others lock another one.
func (l *FileLease) Stands() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return false
	}
	mine, err := l.file.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(l.file.Name())
	return err == nil && os.SameFile(mine, there)
}
