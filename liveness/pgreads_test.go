package liveness_test

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

// What a source may not read directly it may not read behind a query, a view or
// a condition either, and only the source that does is refused.
func TestPostgresReadsOfAnotherTime(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE refs (b int UNIQUE, "On" boolean); CREATE MATERIALIZED VIEW m AS SELECT b FROM refs; CREATE VIEW vm AS SELECT b FROM m; CREATE VIEW vvm AS SELECT b FROM vm; CREATE VIEW v AS SELECT b FROM refs;
		CREATE FOREIGN DATA WRAPPER far; CREATE SERVER far FOREIGN DATA WRAPPER far; CREATE FOREIGN TABLE f (b int) SERVER far;
		CREATE TABLE "P p" (b int) PARTITION BY LIST (b); CREATE FOREIGN TABLE fp PARTITION OF "P p" FOR VALUES IN (1) SERVER far`)
	const (
		past  = "it reads public.m, a materialized view, which shows the past; read the tables behind it"
		there = "a foreign table; register the database it stands in under databases: and the source there"
	)
	tests := []struct {
		name   string
		source liveness.Source
		want   []string
	}{
		{"a query", pgQuery("SELECT b FROM public.m", ""), []string{"M:liveness[0].query: " + past}},
		{"a query that needn't read it", pgQuery("SELECT b FROM public.refs UNION ALL SELECT b FROM public.m WHERE false", ""), []string{"M:liveness[0].query: " + past}},
		{"a query of a view", pgQuery("SELECT b FROM public.vvm", ""), []string{"M:liveness[0].query: " + past}},
		{"a view", pgSource("vm", "b", ""), []string{"M:liveness[0]: " + past}},
		{"a condition", filtered(pgSource("refs", "b", ""), "EXISTS (SELECT 1 FROM public.vm WHERE vm.b = s.b)"), []string{"M:liveness[0]: " + past}},
		{"a foreign table", pgQuery("SELECT b FROM public.f", ""), []string{"M:liveness[0].query: it reads public.f, " + there}},
		{"a foreign partition", pgQuery(`SELECT b FROM public."P p"`, ""), []string{`M:liveness[0].query: it reads public."P p", of which public.fp is ` + there}},
		{"a view of a table", pgSource("v", "b", ""), nil},
		{"a condition over a table", filtered(pgSource("refs", "b", ""), `"On" OR b IN (SELECT b FROM public.v)`), nil},
	}
	pool := pgObserve(blob.KindInt)
	for _, tt := range tests {
		clean := pgQuery("SELECT b FROM public.refs", "")
		clean.Path = "liveness[1]"
		w.wantFindings(t, tt.name, pool, []liveness.Source{tt.source, clean}, tt.want...)
	}
}

// A relation behind a source that isn't what it was is a change.
func TestPostgresReadsChange(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, "CREATE SCHEMA s")
	const swap = "ALTER TABLE s.refs RENAME TO old; CREATE TABLE s.refs (id int, b int UNIQUE, live boolean, spare boolean)"
	query, view := pgQuery("SELECT b FROM s.refs", ""), pgSource("v", "b", "")
	view.Schema = "s"
	condition := filtered(pgSource("other", "b", ""), "EXISTS (SELECT 1 FROM s.refs r WHERE r.b = s.b AND r.live)")
	tests := []struct {
		name   string
		source liveness.Source
		change string
		want   []string
	}{
		{"nothing", query, "SELECT 1", nil},
		{"rows", query, "INSERT INTO s.refs VALUES (1); TRUNCATE s.refs; VACUUM FULL s.refs", nil},
		{"a new column", query, "ALTER TABLE s.refs ADD c int", nil},
		{"a partition of a query's table", pgQuery("SELECT b FROM s.parts", ""), "CREATE TABLE s.parts_1 PARTITION OF s.parts FOR VALUES IN (1)", nil},
		{"a query's table", query, swap, []string{"s.refs"}},
		{"a query's column", query, "ALTER TABLE s.refs RENAME b TO old; ALTER TABLE s.refs RENAME id TO b", []string{"s.refs"}},
		{"a query's schema", query, "ALTER SCHEMA s RENAME TO old; CREATE SCHEMA s; CREATE TABLE s.refs (b int)", []string{"s.refs"}},
		{"a view", view, "CREATE OR REPLACE VIEW s.v AS SELECT b FROM s.refs WHERE b = 3", []string{"s.v"}},
		{"a view behind a query", pgQuery("SELECT b FROM s.v", ""), "CREATE OR REPLACE VIEW s.v AS SELECT b FROM s.refs WHERE b = 3", []string{"s.v"}},
		{"a view behind a view", pgQuery("SELECT b FROM s.vv", ""), "CREATE OR REPLACE VIEW s.v AS SELECT b FROM s.refs WHERE b = 3", []string{"s.v"}},
		{"a view's table", view, swap, []string{"s.refs"}},
		{"a condition's table", condition, swap, []string{"s.refs"}},
		{"a condition's column", condition, "ALTER TABLE s.refs RENAME live TO old; ALTER TABLE s.refs RENAME spare TO live", []string{"s.refs"}},
	}
	for _, tt := range tests {
		pgtest.Exec(t, w.app, "DROP SCHEMA s CASCADE; DROP SCHEMA IF EXISTS old CASCADE; DROP TABLE IF EXISTS other")
		pgtest.Exec(t, w.app, `CREATE SCHEMA s; CREATE TABLE s.refs (id int, b int UNIQUE, live boolean, spare boolean); CREATE TABLE s.parts (b int) PARTITION BY LIST (b);
			CREATE VIEW s.v AS SELECT b FROM s.refs; CREATE VIEW s.vv AS SELECT b FROM s.v; CREATE TABLE other (b int UNIQUE)`)
		p := w.mustResolve(t, pgObserve(blob.KindInt), tt.source, pgSource("other", "b", ""))
		for _, change := range strings.Split(tt.change, "; ") {
			pgtest.Exec(t, w.app, change)
		}
		w.read(t, func(ctx context.Context, tx pgx.Tx) {
			got, err := p.Changed(ctx, tx)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.name, diff)
			}
		})
	}
}

// A role without rights on what a view reads can resolve it and look for changes.
func TestPostgresReadsOfAnOwner(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE SCHEMA closed; CREATE TABLE closed.refs (b int UNIQUE); INSERT INTO closed.refs VALUES (1); CREATE VIEW v AS SELECT b FROM closed.refs`)
	name, url := pgtest.Role(t, w.url, "")
	pgtest.Exec(t, w.app, "GRANT SELECT ON v TO "+name)
	role := w.as(t, url)
	p := role.mustResolve(t, pgObserve(blob.KindInt), pgSource("v", "b", ""))
	role.read(t, func(ctx context.Context, tx pgx.Tx) {
		if changed, err := p.Changed(ctx, tx); err != nil || len(changed) != 0 {
			t.Errorf("changed: %q, %v", changed, err)
		}
	})
}

// Resolving holds no lock on what it looked at.
func TestPostgresReadsGiveLocksBack(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE refs (b int UNIQUE); CREATE VIEW v AS SELECT b FROM refs`)
	err := w.run(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := liveness.ResolvePostgres(ctx, tx, pgObserve(blob.KindInt).Options, []liveness.Source{
			pgQuery("SELECT b FROM public.v", ""), filtered(pgSource("refs", "b", ""), "b > 0"), pgQuery("SELECT nothing FROM public.refs", ""),
		}, nil)
		if err != nil {
			return err
		}
		var locks int
		err = tx.QueryRow(ctx, "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation IN ('public.refs'::regclass, 'public.v'::regclass)").Scan(&locks)
		if locks != 0 {
			t.Errorf("%d locks are left", locks)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
