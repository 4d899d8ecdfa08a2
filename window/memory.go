package window

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/alkblobs/gc-agent/blob"
)

// Memory is a window in the memory of the process, for the inline form: it
// outlives nothing. It has no schema, so it is never without one. It is safe for
// concurrent use.
type Memory struct {
	mu   sync.Mutex
	rows map[blob.Key]blob.Instant
}

// NewMemory returns an empty window.
func NewMemory() *Memory {
	return &Memory{rows: make(map[blob.Key]blob.Instant)}
}

// EnsureSchema does nothing.
func (m *Memory) EnsureSchema(ctx context.Context) error {
	return m.locked(ctx, "ensure schema of window", func() error { return nil })
}

// Stage is as Postgres.Stage.
func (m *Memory) Stage(ctx context.Context, rows []Row) error {
	return m.locked(ctx, "stage in window", func() error {
		rows, err := distinct(rows, lastCounts)
		for _, row := range rows {
			m.rows[row.Key] = row.VisibleAfter
		}
		return err
	})
}

// StageKeepFirst is as Postgres.StageKeepFirst.
func (m *Memory) StageKeepFirst(ctx context.Context, rows []Row) (staged int, err error) {
	err = m.locked(ctx, "stage in window", func() error {
		rows, err := distinct(rows, firstCounts)
		for _, row := range rows {
			if _, there := m.rows[row.Key]; !there {
				m.rows[row.Key] = row.VisibleAfter
				staged++
			}
		}
		return err
	})
	return staged, err
}

// Take is as Postgres.Take.
func (m *Memory) Take(ctx context.Context, now blob.Instant, limit int) (taken []Row, err error) {
	err = m.locked(ctx, "take from window", func() error {
		taken = m.overdue(now, limit)
		for _, row := range taken {
			delete(m.rows, row.Key)
		}
		return nil
	})
	return taken, err
}

// Peek is as Postgres.Peek.
func (m *Memory) Peek(ctx context.Context, now blob.Instant, limit int) (rows []Row, err error) {
	err = m.locked(ctx, "peek into window", func() error {
		rows = m.overdue(now, limit)
		return nil
	})
	return rows, err
}

// List is as Postgres.List.
func (m *Memory) List(ctx context.Context, from blob.Key, limit int) (rows []Row, err error) {
	err = m.locked(ctx, "list window", func() error {
		rows = m.sorted(func(row Row) bool { return row.Key >= from }, byKey, limit)
		return nil
	})
	return rows, err
}

// Unstage is as Postgres.Unstage.
func (m *Memory) Unstage(ctx context.Context, keys []blob.Key) (removed int, err error) {
	err = m.locked(ctx, "unstage from window", func() error {
		before := len(m.rows)
		for _, key := range keys {
			delete(m.rows, key)
		}
		removed = before - len(m.rows)
		return nil
	})
	return removed, err
}

// Count is as Postgres.Count.
func (m *Memory) Count(ctx context.Context) (n int64, err error) {
	err = m.locked(ctx, "count window", func() error {
		n = int64(len(m.rows))
		return nil
	})
	return n, err
}

func (m *Memory) locked(ctx context.Context, verb string, fn func() error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := ctx.Err()
	if err == nil {
		err = fn()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", verb, err)
	}
	return nil
}

// overdue returns what may be deleted now, chosen by deadline, in key order.
func (m *Memory) overdue(now blob.Instant, limit int) []Row {
	due := func(row Row) bool { return row.VisibleAfter <= now }
	oldestFirst := func(a, b Row) int { return cmp.Or(cmp.Compare(a.VisibleAfter, b.VisibleAfter), byKey(a, b)) }
	rows := m.sorted(due, oldestFirst, limit)
	slices.SortFunc(rows, byKey)
	return rows
}

// sorted returns the first of the wanted rows in the given order; a limit of 0 or
// less is none.
func (m *Memory) sorted(wanted func(Row) bool, order func(a, b Row) int, limit int) []Row {
	var rows []Row
	for key, at := range m.rows {
		if row := (Row{Key: key, VisibleAfter: at}); wanted(row) {
			rows = append(rows, row)
		}
	}
	slices.SortFunc(rows, order)
	if limit > 0 && len(rows) > limit {
		rows = rows[:limit]
	}
	return rows
}
