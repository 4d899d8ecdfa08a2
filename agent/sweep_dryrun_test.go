package agent_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"
)

// A dry run changes no byte, and no transaction of it could have: none is given
// an id.
func TestDryRunWritesNothing(t *testing.T) {
	for _, mode := range []string{"enforce", "observe"} {
		t.Run(mode, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				a.due(poolYAML{liveness: a.refs()})
				a.exec(`INSERT INTO refs VALUES ('b2')`)
				var watch *pgx.Conn
				opts := agent.Options{PostgresTracer: postgresHook(func(conn *pgx.Conn, data pgx.TraceQueryStartData) {
					var id *string
					err := watch.QueryRow(t.Context(), `SELECT backend_xid::text FROM pg_stat_activity WHERE pid = $1`, conn.PgConn().PID()).Scan(&id)
					if err != nil || id != nil {
						t.Errorf("before %q: transaction %v, %v", data.SQL, id, err)
					}
				})}
				var files map[string]string
				if a.engine == "postgres" {
					watch = pgtest.Connect(t, a.url)
				} else {
					files = a.files()
				}
				p := a.poolWith(poolYAML{liveness: a.refs(), mode: mode}, opts)
				a.unchanged(func() {
					rep := sweepWith(t, p, agent.SweepOptions{DryRun: mode == "enforce"})
					if !rep.DryRun || rep.Aborted != nil {
						t.Errorf("%+v", rep)
					}
					wantCounts(t, rep, agent.Report{
						Scanned: 5, Referenced: 2, CandidatesStaged: 1, Overdue: 3, Deleted: 2, Cancelled: 1,
						CancelledBy: agent.CancelledBy{Live: 1}, BytesReclaimed: 20,
					})
				})
				if files != nil {
					if diff := cmp.Diff(files, a.files()); diff != "" {
						t.Errorf("files -was +is:\n%.2000s", diff)
					}
				}
			})
		})
	}
}

// Before the first sweep there is no window, and a dry run makes none.
func TestDryRunOnAVirginDatabase(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.library(4)
		a.unchanged(func() {
			rep := sweepWith(t, a.pool(poolYAML{liveness: a.refs()}), agent.SweepOptions{DryRun: true})
			wantCounts(t, rep, agent.Report{Scanned: 4, Referenced: 1, CandidatesStaged: 3})
		})
	})
}

// To observe takes the right to read and no schema. Where another agent has made
// one, its window and pins have to be readable as well.
func TestObserveNeedsSelectAlone(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(4)
	role, roleURL := pgtest.Role(t, a.url, "NOSUPERUSER")
	a.exec(`GRANT SELECT ON blobs, refs TO ` + role)
	plain := *a
	plain.url = roleURL
	want := agent.Report{Scanned: 4, Referenced: 1, CandidatesStaged: 3}
	p := plain.pool(poolYAML{liveness: []string{"{name: refs, table: refs, column: blob}"}, mode: "observe"})
	a.unchanged(func() { wantCounts(t, sweep(t, p), want) })
	if a.hasWindow() {
		t.Error("it made a schema")
	}

	// Another agent collects: its window stays its own.
	sweep(t, a.pool(poolYAML{liveness: a.refs()}))
	_, err := p.Sweep(t.Context(), agent.SweepOptions{})
	wantMisconfigured(t, err, `GRANT USAGE ON SCHEMA "gc_agent" TO `, `GRANT SELECT ON "gc_agent"."gc_pins" TO `)
	a.exec(`GRANT USAGE ON SCHEMA gc_agent TO `+role, `GRANT SELECT ON ALL TABLES IN SCHEMA gc_agent TO `+role)
	wantCounts(t, sweep(t, p), agent.Report{Scanned: 4, Referenced: 1, Overdue: 3, Deleted: 3, BytesReclaimed: 30})
}

// state is an application at some moment of its life.
type state struct {
	// Blobs, by number, and which of them refs and docs refer to. Of docs only
	// those rows count that aren't hidden.
	Blobs, Refs, Docs, Hidden []int
	// Window holds when each key is due; a key need not be a blob's any more.
	Window map[int]bool
	Pinned []int
	Batch  int
}

const (
	stateBlobs = 12
	mostBatch  = 5
)

func states() *rapid.Generator[state] {
	some := rapid.SliceOfNDistinct(rapid.IntRange(1, stateBlobs), 0, stateBlobs, rapid.ID[int])
	return rapid.Custom(func(t *rapid.T) state {
		return state{
			Blobs: some.Draw(t, "blobs"), Refs: some.Draw(t, "refs"), Docs: some.Draw(t, "docs"), Hidden: some.Draw(t, "hidden"),
			Window: rapid.MapOf(rapid.IntRange(1, stateBlobs+2), rapid.Bool()).Draw(t, "window"),
			Pinned: some.Draw(t, "pinned"), Batch: rapid.IntRange(1, mostBatch).Draw(t, "batch"),
		}
	})
}

// fails is what *testing.T and *rapid.T have in common.
type fails interface {
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// become puts the application into the state.
func (a *app) become(s state) {
	a.t.Helper()
	var sql strings.Builder
	sql.WriteString(`BEGIN; DELETE FROM blobs; DELETE FROM refs; DELETE FROM docs; DELETE FROM ` + a.windowTable() + `;`)
	insert := func(table, values string, numbers []int) {
		for _, n := range numbers {
			fmt.Fprintf(&sql, `INSERT INTO %s VALUES (%s);`, table, strings.ReplaceAll(values, "#", fmt.Sprint(n)))
		}
	}
	insert("blobs", "'b#', #", s.Blobs)
	insert("refs", "'b#'", s.Refs)
	insert("docs", "'b#', 0", s.Docs)
	insert("docs", "'b#', 1", s.Hidden)
	for n, due := range s.Window {
		deadline := "4000000000000000000"
		if due {
			deadline = fmt.Sprint(n % 3)
		}
		insert(a.windowTable(), a.literal(fmt.Sprint("b", n))+", "+deadline, []int{n})
	}
	if a.engine == "postgres" {
		sql.WriteString(`DELETE FROM gc_agent.gc_pins;`)
		for _, n := range s.Pinned {
			insert("gc_agent.gc_pins", a.literal(fmt.Sprint("b", n))+", 'one', 4000000000000000000", []int{n})
		}
	}
	a.exec(sql.String() + ` COMMIT`)
}

// predicts compares a dry run with the sweep that follows, and the sweep with
// what is right.
func (a *predictor) predicts(t fails, s state) {
	a.become(s)
	p := a.pools[s.Batch]
	sweepAs := func(dry bool) (agent.Report, decided) {
		d := decided{}
		opts := d.options()
		opts.DryRun = dry
		rep, err := p.Sweep(a.t.Context(), opts)
		if err != nil || rep.Aborted != nil {
			t.Fatalf("dry run %t: %v, %+v", dry, err, rep)
		}
		return rep, d
	}
	was := a.dump()
	dryRep, dry := sweepAs(true)
	if is := a.dump(); is != was {
		t.Errorf("a dry run has changed the database from\n%s\nto\n%s", was, is)
	}
	rep, done := sweepAs(false)
	if diff := cmp.Diff(counts(rep), counts(dryRep)); diff != "" {
		t.Errorf("-done +predicted:\n%s", diff)
	}
	if diff := cmp.Diff(done.causes(), dry.causes()); diff != "" {
		t.Errorf("-done +predicted:\n%s", diff)
	}
	a.checkSwept(t, s, done)
}

// checkSwept says from the state alone what a sweep does about it.
func (a *app) checkSwept(t fails, s state, d decided) {
	has := func(numbers []int, n int) bool {
		for _, m := range numbers {
			if m == n {
				return true
			}
		}
		return false
	}
	var blobs, window []string
	for n := 1; n <= stateBlobs+2; n++ {
		key := fmt.Sprint("b", n)
		there, live := has(s.Blobs, n), has(s.Refs, n) || has(s.Docs, n)
		pinned := a.engine == "postgres" && has(s.Pinned, n)
		due, staged := s.Window[n]
		want := ""
		switch {
		case staged && due && !there:
			want = "vanished"
		case staged && due && live:
			want = "live"
		case staged && due && pinned:
			want = "pinned"
		case staged && due:
			want = "deleted"
		}
		if got := d[key].Cause; got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
		if there && want != "deleted" {
			blobs = append(blobs, key)
		}
		if waits := staged && !due && !live && there; waits || want == "pinned" || there && !staged && !live && !pinned {
			window = append(window, key)
		}
	}
	if diff := cmp.Diff(sortedKeys(blobs), a.column(`SELECT id FROM blobs`)); diff != "" {
		t.Errorf("blobs -want +got:\n%s", diff)
	}
	if diff := cmp.Diff(sortedKeys(window), a.window()); diff != "" {
		t.Errorf("window -want +got:\n%s", diff)
	}
}

func sortedKeys(keys []string) []string {
	slices.Sort(keys)
	return keys
}

// predictor is a library with two sources.
type predictor struct {
	*app
	pools []*agent.Pool // by the size of their batches
}

// newPredictor makes the tables, and with a first sweep those of the agent.
func newPredictor(a *app) *predictor {
	a.library(1)
	a.exec(`CREATE TABLE docs (blob text, hidden integer)`, `CREATE INDEX docs_blob ON docs (blob)`)
	p := &predictor{app: a, pools: make([]*agent.Pool, 1)}
	guard := "allow_empty: true, guard: " + a.settle()
	for batch := 1; batch <= mostBatch; batch++ {
		p.pools = append(p.pools, a.pool(poolYAML{extra: fmt.Sprintf("limits: {batch: %d, page: 3}", batch), liveness: []string{
			"{name: refs, table: refs, column: blob, " + guard + "}",
			"{name: docs, table: docs, column: blob, where: hidden = 0, " + guard + "}",
		}}))
	}
	sweep(a.t, p.pools[1])
	return p
}

func TestDryRunPredictsTheSweep(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		p := newPredictor(newSQLiteApp(t))
		rapid.Check(t, func(t *rapid.T) { p.predicts(t, states().Draw(t, "state")) })
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		p := newPredictor(newPostgresApp(t))
		for seed := range 20 {
			p.predicts(t, states().Example(seed))
		}
	})
}
