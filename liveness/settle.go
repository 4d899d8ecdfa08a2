package liveness

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"

	"github.com/jackc/pgx/v5"
)

// writer is a transaction that may have written a reference.
type writer struct {
	xid  string
	name string // for people
}

// Every backend of this database that has a transaction id, whatever it is, and
// every prepared transaction. A backend's id is cleared only when its effects
// are visible to whoever looks next, so one that isn't here can't hide a row.
const selectWriters = `
SELECT backend_xid::text, 'pid ' || pid || coalesce(' (' || usename || ', ' || nullif(application_name, '') || ')', '')
	|| coalesce(', open since ' || xact_start::timestamp(0), '')
FROM pg_catalog.pg_stat_activity
WHERE datid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
	AND backend_xid IS NOT NULL AND pid <> pg_backend_pid()
UNION ALL
SELECT transaction::text, 'prepared transaction ' || gid
FROM pg_catalog.pg_prepared_xacts
WHERE database = current_database()`

const settlePoll = 10 * time.Millisecond

// SettlePostgres waits until every transaction of q's database that had written
// anything when it was called has ended, and at most for timeout. q must not be
// inside a transaction: it would wait while holding locks. A non-empty holdup
// names who didn't end. sleep waits between two looks.
//
// The id of another role's transaction is visible to everybody:
// https://www.postgresql.org/docs/15/monitoring-stats.html
func SettlePostgres(ctx context.Context, q pgdb.Querier, timeout time.Duration, sleep func(context.Context, time.Duration) error) (holdup string, err error) {
	waiting, err := writers(ctx, q)
	if err != nil {
		return "", err
	}
	for waited := time.Duration(0); len(waiting) > 0; waited += settlePoll {
		if waited >= timeout {
			return fmt.Sprintf("settle: still open after %s: %s", timeout, waiting[0].name), nil
		}
		if err := sleep(ctx, settlePoll); err != nil {
			return "", err
		}
		now, err := writers(ctx, q)
		if err != nil {
			return "", err
		}
		// Those that began since then are seen by the check, or never promised.
		waiting = slices.DeleteFunc(waiting, func(w writer) bool {
			return !slices.ContainsFunc(now, func(n writer) bool { return n.xid == w.xid })
		})
	}
	return "", nil
}

func writers(ctx context.Context, q pgdb.Querier) ([]writer, error) {
	rows, err := q.Query(ctx, selectWriters)
	if err != nil {
		return nil, fmt.Errorf("look for open transactions: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (writer, error) {
		var w writer
		err := row.Scan(&w.xid, &w.name)
		return w, err
	})
	if err != nil {
		return nil, fmt.Errorf("look for open transactions: %w", err)
	}
	return list, nil
}

// SettleSQLite waits until the write transaction that was open when it was
// called, if any, has ended, and at most for timeout: it takes the write lock,
// which SQLite gives to one connection at a time, and gives it back.
func SettleSQLite(ctx context.Context, conn *sqlitedb.Conn, timeout time.Duration) (holdup string, err error) {
	had, err := conn.HadWriteLock(ctx, timeout)
	if err != nil {
		return "", fmt.Errorf("settle: %w", err)
	}
	if !had {
		return fmt.Sprintf("settle: a write transaction of another process is still open after %s", timeout), nil
	}
	return "", nil
}
