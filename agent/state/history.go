package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"
)

// keptSweeps is how many sweeps of a pool are remembered: a sweep each quarter of an
// hour for a month.
const keptSweeps = 3000

// Sweep is one sweep as it was reported.
type Sweep struct {
	// ID grows from sweep to sweep.
	ID      int64
	Started time.Time
	// Report is the JSON object that the sweep ended with.
	Report json.RawMessage
}

// AddSweep remembers how a sweep of a pool ended, and forgets its oldest where there are
// very many.
func (s *Store) AddSweep(ctx context.Context, pool string, started time.Time, report json.RawMessage) error {
	err := s.inTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO sweeps (pool, started, report) VALUES (?, ?, ?)", pool, started.UnixNano(), string(report))
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM sweeps WHERE pool = ?1 AND id <=
			(SELECT id FROM sweeps WHERE pool = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)`, pool, s.keep)
		return err
	})
	return s.failed("remember a sweep of pool", pool, err)
}

// Sweeps returns the latest sweeps of a pool, at most n, the latest first.
func (s *Store) Sweeps(ctx context.Context, pool string, n int) ([]Sweep, error) {
	rows, err := s.db.QueryContext(ctx, "SELECT id, started, report FROM sweeps WHERE pool = ? ORDER BY id DESC LIMIT ?", pool, n)
	if err != nil {
		return nil, s.failed("read the sweeps of pool", pool, err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err says what matters
	var sweeps []Sweep
	for rows.Next() {
		var sw Sweep
		var started int64
		var report string
		if err := rows.Scan(&sw.ID, &started, &report); err != nil {
			return nil, s.failed("read the sweeps of pool", pool, err)
		}
		sw.Started, sw.Report = time.Unix(0, started), json.RawMessage(report)
		sweeps = append(sweeps, sw)
	}
	return sweeps, s.failed("read the sweeps of pool", pool, rows.Err())
}
