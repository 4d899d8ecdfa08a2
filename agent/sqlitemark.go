package agent

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/sqlite"
	"github.com/alkblobs/gc-agent/internal/sqlitedb"
	"github.com/alkblobs/gc-agent/liveness"
	"github.com/alkblobs/gc-agent/window"
)

// sqliteMark is where the mark stands.
type sqliteMark struct {
	tier  int
	span  sqlite.Span
	spool *spool
}

// MarkPage marks one page in one read transaction. In rollback-journal mode it
// keeps writers out for as long as it lasts, so pages are short.
func (s *sqliteSession) MarkPage(ctx context.Context, elsewhere askFunc) (page markedPage, more bool, err error) {
	m := &s.marking
	if m.spool == nil {
		if m.spool, err = newSpool(); err != nil {
			return page, false, err
		}
	}
	if m.tier == len(s.tiers) {
		return page, false, nil
	}
	tier := s.tiers[m.tier]
	size := s.cfg.Limits.Page
	if s.sources.Scanned() {
		size = max(size, scannedPage)
	}
	var next sqlite.Span
	var last bool
	var u unreferenced
	err = s.conn.InTx(ctx, sqlitedb.Read, func(ctx context.Context, q sqlitedb.Querier) (err error) {
		if next, last, err = tier.NextSpan(ctx, q, m.span, size); err != nil {
			return err
		}
		page, u, err = s.readPage(ctx, q, tier.Page(next))
		return err
	})
	if err != nil {
		return page, false, fmt.Errorf("mark a page of %s: %w", tier, err)
	}
	s.pool.local.unpinned(u.keys, u.fresh)
	candidates, err := u.candidates(ctx, elsewhere, &page)
	if err != nil {
		return page, false, err
	}
	if !s.dry {
		if err := m.spool.add(candidates); err != nil {
			return page, false, err
		}
	}
	if m.span = next; last {
		m.tier, m.span = m.tier+1, sqlite.Span{}
	}
	return page, m.tier < len(s.tiers), nil
}

// readPage counts a page and returns what no source of this database refers to.
func (s *sqliteSession) readPage(ctx context.Context, q sqlitedb.Querier, p sqlite.Page) (page markedPage, u unreferenced, err error) {
	count := `SELECT count(*), count(*) FILTER (WHERE ` + p.Foreign + `) FROM ` + p.Table + ` WHERE ` + p.Where
	if err := q.QueryRow(ctx, count, p.Args...).Scan(&page.Scanned, &page.Foreign); err != nil {
		return page, u, err
	}
	staged := "0"
	if s.hasWindow {
		staged = `EXISTS (SELECT 1 FROM main.gc_window w WHERE w.key = ` + p.Canon + `)`
	}
	for _, earlier := range s.tiers[:s.marking.tier] {
		// A key of two tiers is one candidate.
		staged += ` OR EXISTS (SELECT 1 FROM main.` + sqlitedb.Ident(earlier.Name()) + ` e WHERE e.` + sqlitedb.Ident(earlier.KeyColumn()) + ` = ` + p.Key + `)`
	}
	dead := `SELECT ` + p.Canon + `, ` + staged + ` FROM ` + p.Table + ` WHERE ` + p.Where + ` AND NOT ` + p.Foreign +
		` AND ` + s.pool.unreferenced(s.sources, liveness.KeyRef{Expr: p.Key, Lo: p.Lo, Hi: p.Hi})
	rows, err := q.Query(ctx, dead, p.Args...)
	if err != nil {
		return page, u, err
	}
	defer func() {
		// What a read that failed to close has returned was read all the same.
		_ = rows.Close()
	}()
	for rows.Next() {
		var key sql.RawBytes
		var staged bool
		if err := rows.Scan(&key, &staged); err != nil {
			return page, u, err
		}
		u.keys, u.fresh = append(u.keys, blob.Key(key)), append(u.fresh, !staged)
	}
	return page, u, rows.Err()
}

// stagePage bounds how long staging holds the write lock.
const stagePage = 2_000

// StagePage stages the next spooled keys.
func (s *sqliteSession) StagePage(ctx context.Context, deadline blob.Instant) (staged int, more bool, err error) {
	keys, err := s.marking.spool.next(stagePage)
	if err != nil || len(keys) == 0 {
		return 0, false, err
	}
	rows := make([]window.Row, len(keys))
	for i, key := range keys {
		rows[i] = window.Row{Key: key, VisibleAfter: deadline}
	}
	err = s.conn.InTx(ctx, sqlitedb.Write, func(ctx context.Context, q sqlitedb.Querier) (err error) {
		staged, err = window.NewSQLite(q).StageKeepFirst(ctx, rows)
		return err
	})
	return staged, s.marking.spool.left() > 0, err
}
