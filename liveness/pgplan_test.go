package liveness_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

// pgPlan is a node of a plan that was executed.
type pgPlan struct {
	Node     string   `json:"Node Type"`
	Relation string   `json:"Relation Name"`
	Loops    float64  `json:"Actual Loops"`
	Hit      int      `json:"Shared Hit Blocks"`
	Read     int      `json:"Shared Read Blocks"`
	Plans    []pgPlan `json:"Plans"`
}

func explainPG(ctx context.Context, t *testing.T, tx pgx.Tx, sql string, args ...any) pgPlan {
	t.Helper()
	var raw []byte
	if err := tx.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, TIMING off, FORMAT JSON) "+sql, args...).Scan(&raw); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	var plans []struct{ Plan pgPlan }
	if err := json.Unmarshal(raw, &plans); err != nil || len(plans) != 1 {
		t.Fatalf("%s: %v", raw, err)
	}
	return plans[0].Plan
}

func (p pgPlan) buffers() int { return p.Hit + p.Read }

// scans returns how often a relation was read by a node of the type.
func (p pgPlan) scans(node, relation string) (loops float64) {
	if p.Node == node && p.Relation == relation {
		loops = max(p.Loops, 1)
	}
	for _, child := range p.Plans {
		loops += child.scans(node, relation)
	}
	return loops
}

// The cost of a page is that of its keys, not of the tables; and what can't be
// looked up is read once a statement, not once a key.
func TestPostgresPlans(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE blobs (b bytea UNIQUE, n bigint UNIQUE, u uuid UNIQUE, c text COLLATE "C" UNIQUE, i text COLLATE "en-x-icu" UNIQUE);
		INSERT INTO blobs SELECT sha256(n::text::bytea), n, md5(n::text)::uuid, md5(n::text), md5(n::text) FROM generate_series(1, 200000) n;
		CREATE TABLE refs (b bytea, n int, u uuid, c varchar COLLATE "C", i text COLLATE "en-x-icu", hex text, bare int);
		INSERT INTO refs SELECT b, n, u, c, i, 'sha256:' || encode(b, 'hex'), n FROM blobs ORDER BY i;
		CREATE INDEX ON refs (b); CREATE INDEX ON refs (n); CREATE INDEX ON refs (u); CREATE INDEX ON refs (c); CREATE INDEX ON refs (i); CREATE INDEX ON refs (hex)`)
	pgtest.Exec(t, w.app, "VACUUM ANALYZE blobs, refs")
	tests := []struct {
		kind               blob.Kind
		key, value, format string
		most               int // buffers for a page of 10,000 keys
	}{
		{blob.KindBytes, "b", "b", "", 500},
		{blob.KindInt, "n", "n", "", 500},
		{blob.KindUUID, "u", "u", "", 500},
		{blob.KindText, "c", "c", "", 500},
		{blob.KindText, "i", "i", "", 500},
		{blob.KindBytes, "b", "hex", "sha256:{hex}", 50_000},
		{blob.KindText, "c", "i", "", 50_000}, // in another order
	}
	for _, tt := range tests {
		p := w.mustResolve(t, pgPool{Options: liveness.Options{Kind: tt.kind}}, pgSource("refs", tt.value, tt.format))
		w.read(t, func(ctx context.Context, tx pgx.Tx) {
			plan := explainPG(ctx, t, tx, pgPageSQL(ctx, t, tx, p, tt.kind, tt.key), pgPageBounds(ctx, t, tx, tt.kind, tt.key)...)
			if plan.scans("Seq Scan", "refs") != 0 || plan.scans("Seq Scan", "blobs") != 0 || plan.buffers() > tt.most {
				t.Errorf("%s, %s: a page touched %d buffers, at most %d wanted: %+v", tt.key, tt.value, plan.buffers(), tt.most, plan)
			}
		})
	}
	t.Run("answers", func(t *testing.T) { w.checkAnswerPlans(t) })
}

func pgPageSQL(ctx context.Context, t *testing.T, tx pgx.Tx, p *liveness.Postgres, kind blob.Kind, key string) string {
	t.Helper()
	rel, err := pgdb.LookupRelation(ctx, tx, "public", "blobs")
	if err != nil {
		t.Fatal(err)
	}
	col, _ := rel.Column(key)
	ref := liveness.KeyRef{Expr: "p." + key, Lo: "$1::" + pgdb.Type(kind), Hi: "$2::" + pgdb.Type(kind), Collation: col.Collation}
	return fmt.Sprintf("SELECT %s FROM public.blobs p WHERE %[2]s > %[3]s AND %[2]s <= %[4]s AND %[5]s", pgdb.Canon(kind, ref.Expr), ref.Expr, ref.Lo, ref.Hi, p.Unreferenced(ref))
}

// pgPageBounds returns the bounds of a page of 10,000 keys late in the table.
func pgPageBounds(ctx context.Context, t *testing.T, tx pgx.Tx, kind blob.Kind, key string) []any {
	t.Helper()
	bounds := make([]any, 2)
	for i, offset := range []int{170_000, 180_000} {
		sql := fmt.Sprintf("SELECT %[1]s::%[2]s FROM public.blobs ORDER BY %[1]s OFFSET %[3]d LIMIT 1", key, pgdb.Type(kind), offset)
		if err := tx.QueryRow(ctx, sql).Scan(&bounds[i]); err != nil {
			t.Fatal(err)
		}
	}
	return bounds
}

func (w *pgWorld) checkAnswerPlans(t *testing.T) {
	keys := make([]blob.Key, 1000)
	for i := range keys {
		keys[i] = blob.Key(strconv.Itoa(i*300 + 1))
	}
	pages := pgCount(t, w.app, "SELECT relpages FROM pg_class WHERE relname = 'refs'")
	tests := []struct {
		name   string
		source liveness.Source
		scans  float64 // of refs, from end to end
		most   int     // buffers
	}{
		// Once to its first row, for EXISTS, and once for the keys, whatever their number.
		{"an index", pgSource("refs", "n", ""), 1, 5 * len(keys)},
		{"an index and where", filtered(pgSource("refs", "n", ""), "bare + 0 = n"), 1, 10 * len(keys)},
		{"no index", pgSource("refs", "bare", ""), 2, pages + 100},
		{"no index and a volatile where", filtered(pgSource("refs", "bare", ""), "clock_timestamp() IS NOT NULL"), 2, pages + 100},
		{"a query", pgQuery("SELECT n FROM public.refs", ""), 2, pages + 100},
		{"a query of text", pgQuery("SELECT n::text FROM public.refs", "{int}"), 2, pages + 100},
		{"a query with a join", pgQuery("SELECT r.n FROM public.refs r JOIN public.blobs b ON b.n = r.n WHERE r.bare > 0", ""), 2, 2*pages + 20_000},
		{"a union", pgQuery("SELECT n FROM public.refs UNION SELECT n FROM public.refs", ""), 4, 4*pages + 100},
	}
	for _, tt := range tests {
		p := w.mustResolve(t, pgPool{Options: liveness.Options{Kind: blob.KindInt}}, tt.source)
		w.read(t, func(ctx context.Context, tx pgx.Tx) {
			answers, err := p.Answers(ctx, tx, keys)
			if err != nil {
				t.Fatal(err)
			}
			live := slices.IndexFunc(answers, func(a liveness.Answer) bool { return a.Verdict == liveness.Unreferenced })
			if live != slices.IndexFunc(keys, func(key blob.Key) bool { n, _ := key.Int(); return n > 200_000 }) {
				t.Errorf("%s: the first dead key is number %d", tt.name, live)
			}
			plan := explainPG(ctx, t, tx, w.tracer.sql, w.tracer.args...)
			if plan.scans("Seq Scan", "refs") > tt.scans || plan.buffers() > tt.most {
				t.Errorf("%s: refs was read %g times, %g wanted, and %d buffers touched, at most %d wanted: %+v",
					tt.name, plan.scans("Seq Scan", "refs"), tt.scans, plan.buffers(), tt.most, plan)
			}
		})
	}
}
