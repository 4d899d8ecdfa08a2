package agent

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/postgres"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/liveness"

	"github.com/jackc/pgx/v5"
)

// postgresMark is where the mark stands. Candidates are spooled in a temporary
// table of the lease's session, numbered by page.
type postgresMark struct {
	tier   int
	span   postgres.Span
	page   int // pages spooled so far
	staged int // pages staged so far
	spool  bool
}

const (
	createSpool = `CREATE TEMPORARY TABLE IF NOT EXISTS gc_candidates (page integer NOT NULL, key bytea NOT NULL)`
	indexSpool  = `CREATE INDEX IF NOT EXISTS gc_candidates_page ON pg_temp.gc_candidates (page)`
	// scannedPage is the size of a page where a source has to be read whole for each.
	scannedPage = 100_000
)

// MarkPage marks one page inside the database: only counts travel, unless
// sources of other databases have to be asked about the keys.
func (s *postgresSession) MarkPage(ctx context.Context, elsewhere askFunc) (page markedPage, more bool, err error) {
	m := &s.marking
	if m.tier == len(s.tiers) {
		return markedPage{}, false, nil
	}
	tier := s.tiers[m.tier]
	size := s.cfg.Limits.Page
	if s.sources.Scanned() {
		size = max(size, scannedPage)
	}
	var next postgres.Span
	var last bool
	err = s.conn.InTx(ctx, pgdb.Access(!s.dry), func(ctx context.Context, tx pgx.Tx) (err error) {
		if err := s.ensureSpool(ctx, tx); err != nil {
			return err
		}
		if next, last, err = tier.NextSpan(ctx, tx, m.span, size); err != nil {
			return err
		}
		if elsewhere == nil {
			page, err = s.countPage(ctx, tx, tier, tier.Page(next))
			return err
		}
		page, err = s.askPage(ctx, tx, tier, tier.Page(next), elsewhere)
		return err
	})
	if err != nil {
		return markedPage{}, false, fmt.Errorf("mark a page of %s: %w", tier, err)
	}
	m.page++
	m.span, m.spool = next, !s.dry
	if last {
		m.tier, m.span = m.tier+1, postgres.Span{}
	}
	return page, m.tier < len(s.tiers), nil
}

func (s *postgresSession) ensureSpool(ctx context.Context, tx pgx.Tx) error {
	if s.dry || s.marking.spool {
		return nil
	}
	for _, sql := range []string{createSpool, indexSpool} {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return fmt.Errorf("make the candidates' temporary table: %w", err)
		}
	}
	return nil
}

// pageSQL returns the common table expressions dead, what no source of the
// database refers to, and fresh, what of it is neither staged nor pinned, with
// the parameters of both.
func (s *postgresSession) pageSQL(tier *postgres.Table, p postgres.Page) (sql string, args []any) {
	args = slices.Clone(p.Args)
	key := liveness.KeyRef{Expr: p.Key, Lo: p.Lo, Hi: p.Hi, Collation: tier.KeyColumn().Collation}
	sql = `WITH dead AS MATERIALIZED (
	SELECT ` + p.Canon + ` AS key, ` + p.Key + ` AS native FROM ` + p.Table + `
	WHERE ` + p.Where + ` AND octet_length(` + p.Canon + `) <= ` + strconv.Itoa(blob.MaxKeyLen) + `
	AND ` + s.pool.unreferenced(s.sources, key) + `
), fresh AS MATERIALIZED (
	SELECT d.key FROM dead d WHERE true`
	for _, earlier := range s.tiers[:s.marking.tier] {
		// A key of two tiers is one candidate.
		column, native := earlier.KeyColumn(), "d.native"
		if column.CollationSQL != "" {
			native += " COLLATE " + column.CollationSQL
		}
		sql += `
	AND NOT EXISTS (SELECT 1 FROM ` + earlier.Relation().SQL() + ` e WHERE e.` + pgdb.Ident(column.Name) + ` = ` + native + `)`
	}
	if s.hasWindow {
		sql += `
	AND NOT EXISTS (SELECT 1 FROM ` + pgdb.Ident(s.cfg.Schema, "gc_window") + ` w WHERE w.key = d.key)`
	}
	if s.hasPins {
		sql += `
	AND NOT EXISTS (SELECT 1 FROM ` + pgdb.Ident(s.cfg.Schema, "gc_pins") + ` n WHERE n.key = d.key AND n.expiry > ` + pgdb.Now + `)`
	}
	if pinned := s.pool.local.keys(); len(pinned) > 0 {
		args = append(args, pgdb.Bytes(pinned))
		sql += fmt.Sprintf(`
	AND NOT EXISTS (SELECT 1 FROM unnest($%d::bytea[]) AS m (key) WHERE m.key = d.key)`, len(args))
	}
	return sql + "\n)", args
}

// countPage spools the page's candidates and counts, in one statement and hence
// one snapshot.
func (s *postgresSession) countPage(ctx context.Context, tx pgx.Tx, tier *postgres.Table, p postgres.Page) (page markedPage, err error) {
	sql, args := s.pageSQL(tier, p)
	if !s.dry {
		sql += `, spooled AS (
	INSERT INTO pg_temp.gc_candidates (page, key) SELECT ` + strconv.Itoa(s.marking.page) + `, key FROM fresh
)`
	}
	sql += `
SELECT a.scanned, a.foreign, (SELECT count(*) FROM dead), (SELECT count(*) FROM fresh) FROM ` + countSQL(p)
	var dead int
	if err := tx.QueryRow(ctx, sql, args...).Scan(&page.Scanned, &page.Foreign, &dead, &page.Candidates); err != nil {
		return page, err
	}
	page.Referenced = page.Scanned - page.Foreign - dead
	return page, nil
}

func countSQL(p postgres.Page) string {
	return `(SELECT count(*) AS scanned, count(*) FILTER (WHERE octet_length(` + p.Canon + `) > ` + strconv.Itoa(blob.MaxKeyLen) + `) AS foreign
	FROM ` + p.Table + ` WHERE ` + p.Where + `) a`
}

// askPage has the other databases asked about what this one doesn't refer to.
func (s *postgresSession) askPage(ctx context.Context, tx pgx.Tx, tier *postgres.Table, p postgres.Page, elsewhere askFunc) (page markedPage, err error) {
	sql, args := s.pageSQL(tier, p)
	sql += `
SELECT a.scanned, a.foreign, u.keys, u.fresh FROM ` + countSQL(p) + `,
	(SELECT array_agg(d.key) AS keys, array_agg(EXISTS (SELECT 1 FROM fresh f WHERE f.key = d.key)) AS fresh FROM dead d) u`
	var bytes [][]byte
	var u unreferenced
	if err := tx.QueryRow(ctx, sql, args...).Scan(&page.Scanned, &page.Foreign, &bytes, &u.fresh); err != nil {
		return page, err
	}
	for _, b := range bytes {
		u.keys = append(u.keys, blob.Key(b))
	}
	candidates, err := u.candidates(ctx, elsewhere, &page)
	if err != nil || s.dry {
		return page, err
	}
	const spool = `INSERT INTO pg_temp.gc_candidates (page, key) SELECT $1, unnest($2::bytea[])`
	_, err = tx.Exec(ctx, spool, s.marking.page, pgdb.Bytes(candidates))
	return page, err
}

// StagePage moves one spooled page into the window.
func (s *postgresSession) StagePage(ctx context.Context, deadline blob.Instant) (staged int, more bool, err error) {
	m := &s.marking
	if m.staged >= m.page {
		return 0, false, nil
	}
	// Sorted, because random inserts into the window's index cost several times as
	// much. A key that is there keeps its deadline.
	sql := `INSERT INTO ` + pgdb.Ident(s.cfg.Schema, "gc_window") + ` (key, visible_after)
		SELECT key, $1 FROM pg_temp.gc_candidates WHERE page = $2 ORDER BY key
		ON CONFLICT (key) DO NOTHING`
	err = s.conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
		if err := s.lease.Verify(ctx, tx); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, sql, int64(deadline), m.staged)
		staged = int(tag.RowsAffected())
		return err
	})
	if err != nil {
		return 0, false, err
	}
	m.staged++
	return staged, m.staged < m.page, nil
}
