package liveness_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

// pgWorld is a database of a test's own: the application's connection, and the
// agent's, which has its limits and runs its transactions.
type pgWorld struct {
	url    string
	app    *pgx.Conn
	agent  *pgdb.Conn
	tracer *pgTracer
}

func newPGWorld(t testing.TB, setup string) *pgWorld {
	t.Helper()
	url := pgtest.Database(t)
	w := &pgWorld{url: url, app: pgtest.Connect(t, url), tracer: &pgTracer{}}
	pgtest.Exec(t, w.app, setup)
	w.agent = pgConnect(t, url, w.tracer)
	return w
}

// as returns the world with the agent connected by another URL.
func (w *pgWorld) as(t testing.TB, url string) *pgWorld {
	t.Helper()
	tracer := &pgTracer{}
	return &pgWorld{url: w.url, app: w.app, agent: pgConnect(t, url, tracer), tracer: tracer}
}

func pgConnect(t testing.TB, url string, tracer pgx.QueryTracer) *pgdb.Conn {
	t.Helper()
	timeouts := pgdb.Timeouts{Lock: 5 * time.Second, Statement: time.Minute, Idle: time.Minute}
	return pgtest.Session(t, url, pgdb.Options{Timeouts: timeouts, Tracer: tracer})
}

// pgTracer remembers the last statement.
type pgTracer struct {
	sql  string
	args []any
}

func (p *pgTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	p.sql, p.args = data.SQL, data.Args
	return ctx
}

func (p *pgTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// read runs fn in one of the agent's read-only transactions.
func (w *pgWorld) read(t testing.TB, fn func(ctx context.Context, tx pgx.Tx)) {
	t.Helper()
	err := w.agent.InTx(t.Context(), pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) error {
		fn(ctx, tx)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// run is a liveness.RunTx.
func (w *pgWorld) run(ctx context.Context, fn func(context.Context, pgx.Tx) error) error {
	return w.agent.InTx(ctx, pgdb.ReadOnly, fn)
}

// pool says what the sources are resolved for.
type pgPool struct {
	liveness.Options
	table  string // of schema public; none where the blobs are elsewhere
	column string
}

func (w *pgWorld) resolve(t testing.TB, pool pgPool, sources ...liveness.Source) (p *liveness.Postgres, found finding.List) {
	t.Helper()
	w.read(t, func(ctx context.Context, tx pgx.Tx) {
		var targets []liveness.Target
		if pool.table != "" {
			rel, err := pgdb.LookupRelation(ctx, tx, "public", pool.table)
			if err != nil {
				t.Fatal(err)
			}
			col, ok := rel.Column(pool.column)
			if !ok {
				t.Fatalf("no column %s", pool.column)
			}
			targets = append(targets, liveness.Target{Relation: rel, Key: col})
		}
		var err error
		if p, found, err = liveness.ResolvePostgres(ctx, tx, pool.Options, sources, targets); err != nil {
			t.Fatalf("resolve: %v", err)
		}
	})
	if (p == nil) != (found.Worst() > finding.Warning) {
		t.Fatalf("a registry: %t; findings: %v", p != nil, found)
	}
	return p, found
}

// mustResolve resolves sources that nothing is wrong with.
func (w *pgWorld) mustResolve(t testing.TB, pool pgPool, sources ...liveness.Source) *liveness.Postgres {
	t.Helper()
	p, found := w.resolve(t, pool, sources...)
	if p == nil {
		t.Fatalf("refused: %v", found)
	}
	return p
}

func (w *pgWorld) answers(t testing.TB, p *liveness.Postgres, keys ...blob.Key) (answers []liveness.Answer) {
	t.Helper()
	w.read(t, func(ctx context.Context, tx pgx.Tx) {
		var err error
		if answers, err = p.Answers(ctx, tx, keys); err != nil {
			t.Fatal(err)
		}
	})
	if len(answers) != len(keys) {
		t.Fatalf("%d answers about %d keys", len(answers), len(keys))
	}
	return answers
}

// dead returns those of the keys that no source refers to.
func (w *pgWorld) dead(t testing.TB, p *liveness.Postgres, keys ...blob.Key) []blob.Key {
	t.Helper()
	var dead []blob.Key
	for i, a := range w.answers(t, p, keys...) {
		if a.Verdict == liveness.Unreferenced {
			dead = append(dead, keys[i])
		}
	}
	return dead
}

func (w *pgWorld) empty(t testing.TB, p *liveness.Postgres) (names []string) {
	t.Helper()
	w.read(t, func(ctx context.Context, tx pgx.Tx) {
		empty, err := p.Empty(ctx, tx)
		if err != nil {
			t.Fatal(err)
		}
		for _, info := range empty {
			names = append(names, info.Name)
		}
	})
	return names
}

func (w *pgWorld) badValue(t testing.TB, p *liveness.Postgres) *liveness.BadValue {
	t.Helper()
	bad, err := p.BadValue(t.Context(), w.run)
	if err != nil {
		t.Fatal(err)
	}
	return bad
}

func pgSource(table, column, format string) liveness.Source {
	s := liveness.Source{Path: "liveness[0]", Name: table, Schema: "public", Table: table, Column: column, Guard: liveness.Auto}
	if format != "" {
		f, err := blob.ParseFormat(format)
		if err != nil {
			panic(err)
		}
		s.Format = &f
	}
	return s
}

func pgQuery(query, format string) liveness.Source {
	s := pgSource("", "", format)
	s.Name, s.Schema, s.Query = "query", "", query
	return s
}

var errPGRollback = errors.New("roll back")
