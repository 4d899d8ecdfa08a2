package liveness_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

func locked(s liveness.Source) liveness.Source { return guarded(s, liveness.TableLock) }

// lockable is a database in which sources read tables in several ways.
func lockable(t *testing.T) *pgWorld {
	return newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); INSERT INTO blobs VALUES (1), (2);
		CREATE TABLE r (b int UNIQUE, gone boolean); INSERT INTO r VALUES (1);
		CREATE TABLE a (b int) PARTITION BY LIST (b); CREATE TABLE a1 PARTITION OF a FOR VALUES IN (1); CREATE TABLE a2 PARTITION OF a FOR VALUES IN (2); INSERT INTO a VALUES (1);
		CREATE TABLE hidden (b int); INSERT INTO hidden VALUES (1);
		CREATE VIEW v AS SELECT b FROM hidden;
		CREATE FUNCTION reads() RETURNS SETOF int LANGUAGE plpgsql STABLE AS 'BEGIN RETURN QUERY SELECT b FROM public.hidden; END';
		CREATE FUNCTION seen() RETURNS SETOF int LANGUAGE sql STABLE AS 'SELECT b FROM public.hidden'`)
}

// lockTables runs LockTables in a transaction that then, unless it is held up, does
// what fn does.
func (w *pgWorld) lockTables(t *testing.T, p *liveness.Postgres, fn func(tx pgx.Tx)) (holdup string) {
	t.Helper()
	err := w.agent.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) (err error) {
		if holdup, err = p.LockTables(ctx, tx); err == nil && holdup == "" {
			fn(tx)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return holdup
}

// What a source reads is locked, and nothing else.
func TestTableLockTables(t *testing.T) {
	t.Parallel()
	w := lockable(t)
	pool := pgIntPool("blobs", "id")
	for name, c := range map[string]struct {
		source liveness.Source
		want   string
	}{
		"a table":          {pgSource("r", "b", ""), "r"},
		"where":            {filtered(pgSource("r", "b", ""), "NOT gone"), "r"},
		"partitions":       {pgSource("a", "b", ""), "a a1 a2"},
		"a view":           {pgSource("v", "b", ""), "hidden"},
		"a query":          {pgQuery("SELECT r.b FROM public.r JOIN public.v USING (b) WHERE EXISTS (SELECT FROM public.a)", ""), "a a1 a2 hidden r"},
		"a function's SQL": {pgQuery("SELECT seen FROM public.seen()", ""), "hidden"},
		"built-ins":        {pgQuery("SELECT length(repeat('a', b)) + abs(b) FROM public.r GROUP BY b HAVING count(*) > 0", ""), "r"},
	} {
		p := w.mustResolve(t, pool, locked(c.source))
		wantGuard(t, name, p, liveness.TableLock)
		holdup := w.lockTables(t, p, func(tx pgx.Tx) {
			var got string
			const locks = `SELECT coalesce(string_agg(relation::regclass::text, ' ' ORDER BY relation::regclass::text), '') FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'ShareLock' AND locktype = 'relation'`
			if err := tx.QueryRow(t.Context(), locks).Scan(&got); err != nil {
				t.Fatal(err)
			}
			if got = strings.ReplaceAll(got, "public.", ""); got != c.want {
				t.Errorf("%s: locked %s, want %s", name, got, c.want)
			}
		})
		if holdup != "" {
			t.Errorf("%s: held up by %s", name, holdup)
		}
	}
}

// What nobody can tell the tables of is refused.
func TestTableLockRefused(t *testing.T) {
	t.Parallel()
	w := lockable(t)
	pool := pgIntPool("blobs", "id")
	for query, calls := range map[string]string{
		"SELECT reads FROM public.reads()":                                                          "public.reads",
		"SELECT b FROM public.r WHERE b IN (SELECT public.reads())":                                 "public.reads",
		"SELECT (xpath('1', query_to_xml('SELECT 1', true, true, '')))[1]::text::int FROM public.r": "query_to_xml",
	} {
		w.wantFindings(t, query, pool, []liveness.Source{locked(pgQuery(query, ""))},
			"M:liveness[0].guard: source query calls "+calls+", and nobody can tell which tables that reads and would have to be locked; register the tables, or write guard: settle")
	}
	// A plan doesn't show what a cast calls, nor that there is one.
	const query = "SELECT a::text::int FROM public.a"
	for cast, refused := range map[string]bool{"": false, "text": true, "json": false, "json AS IMPLICIT": true, "bigint AS ASSIGNMENT": false} {
		to, context, _ := strings.Cut(cast, " ")
		if cast != "" {
			pgtest.Exec(t, w.app, "CREATE FUNCTION behind(public.a) RETURNS "+to+" LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT min(b) FROM public.hidden); END'; CREATE CAST (public.a AS "+to+") WITH FUNCTION behind(public.a) "+context)
		}
		var want []string
		if refused {
			want = []string{"M:liveness[0].guard: source query calls public.behind, and nobody can tell which tables that reads and would have to be locked; register the tables, or write guard: settle"}
		}
		w.wantFindings(t, "cast to "+cast, pool, []liveness.Source{locked(pgQuery(query, ""))}, want...)
		pgtest.Exec(t, w.app, "DROP FUNCTION IF EXISTS behind(public.a) CASCADE")
	}
	s := filtered(pgSource("r", "b", ""), "b IN (SELECT b FROM public.hidden)")
	w.wantFindings(t, "a subquery", pool, []liveness.Source{locked(s)},
		"M:liveness[0].guard: no lock keeps source r from referring to more: its where can turn true without a write to the row: it isn't made of the row's own columns and immutable functions alone; write guard: settle")
	pool = pgPool{Options: liveness.Options{Kind: blob.KindInt, Enforce: true, Elsewhere: true}}
	w.wantFindings(t, "elsewhere", pool, []liveness.Source{locked(pgSource("r", "b", ""))},
		"M:liveness[0].guard: a lock on a table of another database isn't held by the transaction that deletes; write guard: settle")
}

// The least right that a lock takes is what `check` asks for, and enough.
func TestTableLockRights(t *testing.T) {
	t.Parallel()
	w := lockable(t)
	name, url := pgtest.Role(t, w.url, "")
	pgtest.Exec(t, w.app, "GRANT SELECT ON r, blobs TO "+name)
	role, pool := w.as(t, url), pgIntPool("blobs", "id")
	right := "UPDATE"
	if pgCount(t, w.app, "SELECT current_setting('server_version_num')::int") >= 170000 {
		right = "MAINTAIN"
	}
	grant := fmt.Sprintf(`GRANT %s ON "public"."r" TO %s`, right, name)
	role.wantFindings(t, "missing", pool, []liveness.Source{locked(pgSource("r", "b", ""))},
		`U:liveness[0]: this role (`+name+`) may not lock public.r; run: `+grant)
	pgtest.Exec(t, w.app, grant)
	p := role.wantFindings(t, "granted", pool, []liveness.Source{locked(pgSource("r", "b", ""))})
	if holdup := role.lockTables(t, p, func(pgx.Tx) {}); holdup != "" {
		t.Error(holdup)
	}
	pool.Enforce = false
	pgtest.Exec(t, w.app, strings.Replace(strings.Replace(grant, "GRANT", "REVOKE", 1), " TO ", " FROM ", 1))
	role.wantFindings(t, "observe", pool, []liveness.Source{locked(pgSource("r", "b", ""))})
}

// execute is what a batch does about key 2, with the lock or without it.
func (w *pgWorld) execute(t *testing.T, p *liveness.Postgres, lock bool) (deleted bool, holdup string) {
	t.Helper()
	run := func(tx pgx.Tx) {
		answers, err := p.Answers(t.Context(), tx, []blob.Key{"2"})
		if err != nil {
			t.Fatal(err)
		}
		if deleted = answers[0].Verdict == liveness.Unreferenced; deleted {
			pgtest.Exec(t, tx, "DELETE FROM public.blobs WHERE id = 2")
		}
	}
	if lock {
		holdup = w.lockTables(t, p, run)
		return deleted, holdup
	}
	err := w.agent.InTx(t.Context(), pgdb.ReadWrite, func(_ context.Context, tx pgx.Tx) error {
		run(tx)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return deleted, ""
}

// A writer that has begun is waited for, and seen once it has ended; without the
// lock its reference is missed, and the blob lost.
func TestTableLockSeesWriters(t *testing.T) {
	t.Parallel()
	for _, prepared := range []bool{false, true} {
		for _, lock := range []bool{true, false} {
			t.Run(fmt.Sprintf("prepared %t, lock %t", prepared, lock), func(t *testing.T) {
				t.Parallel()
				w := lockable(t)
				p := w.mustResolve(t, pgIntPool("blobs", "id"), locked(pgSource("r", "b", "")))
				pgtest.Exec(t, w.app, "BEGIN; INSERT INTO r VALUES (2)")
				who, commit := fmt.Sprint("pid ", w.app.PgConn().PID()), "COMMIT"
				if prepared {
					id := "'" + w.app.Config().Database + "'"
					pgtest.Exec(t, w.app, "PREPARE TRANSACTION "+id)
					who, commit = "a prepared transaction", "COMMIT PREPARED "+id
				}
				deleted, holdup := w.execute(t, p, lock)
				pgtest.Exec(t, w.app, commit)
				if !lock {
					if !deleted {
						t.Error("the blob is there still")
					}
					return
				}
				if deleted || !strings.Contains(holdup, who) || !strings.Contains(holdup, `"public"."r"`) {
					t.Errorf("deleted: %t, held up by %q, want %s", deleted, holdup, who)
				}
				if deleted, holdup = w.execute(t, p, true); deleted || holdup != "" {
					t.Errorf("once it has ended: deleted: %t, held up by %q", deleted, holdup)
				}
			})
		}
	}
}
