package torture_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/bench"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
)

const (
	poll = 3 * time.Millisecond
	// patience is for a machine that is busy.
	patience = time.Minute
)

// run is one torture: the application, its writers, the agents and the judge.
type run struct {
	t       *testing.T
	url     string
	admin   *pgxpool.Pool
	binary  bench.Binary
	pools   []*pool
	agents  []*agentProcess
	writers []*writer
	counts  *counts
	numbers atomic.Int64 // incarnations, ids and attempts

	mu      sync.Mutex // guards what follows
	history *history
	calm    time.Time // since when nothing is ended or killed; zero: it may be
	watches map[*watching]bool
}

// watching waits for sweeps of a pool.
type watching struct {
	pool   string
	sweeps chan swept
}

type swept struct {
	by    *agentProcess
	began time.Time
}

// newRun makes the application.
func newRun(t *testing.T, pools []*pool, seed uint64) *run {
	t.Helper()
	r := &run{
		t: t, url: pgtest.Database(t), pools: pools, counts: newCounts(pools), history: newHistory(pools), watches: map[*watching]bool{},
	}
	if err := r.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, p := range pools {
		if _, err := r.admin.Exec(t.Context(), p.schema()); err != nil {
			t.Fatalf("make pool %s: %v", p.name, err)
		}
		for n := range p.writers {
			owner := fmt.Sprintf("%s-%d", p.name, n)
			w := &writer{run: r, pool: p, owner: owner, rng: rand.New(rand.NewPCG(seed, uint64(len(r.writers)))), refs: map[int64]reference{}}
			t.Cleanup(func() { w.close(context.WithoutCancel(t.Context())) })
			r.writers = append(r.writers, w)
		}
	}
	return r
}

func (r *run) open(ctx context.Context) (err error) {
	if r.admin, err = pgxpool.New(ctx, r.url); err != nil {
		return err
	}
	r.t.Cleanup(r.admin.Close)
	return nil
}

// judge begins to judge what is committed, from here to the test's end.
func (r *run) judge() {
	r.t.Helper()
	ctx := r.t.Context()
	var level string
	if err := r.admin.QueryRow(ctx, `SHOW wal_level`).Scan(&level); err != nil {
		r.t.Fatal(err)
	}
	if level != "logical" {
		r.t.Skip("the server's wal_level isn't logical: run make torture, which starts one whose is")
	}
	var published []string
	for _, p := range r.pools {
		published = append(published, p.published()...)
	}
	cfg, err := pgconn.ParseConfig(r.url)
	if err != nil {
		r.t.Fatal(err)
	}
	cfg.RuntimeParams["replication"] = "database"
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	w, err := openWAL(ctx, r.admin, conn, cfg.Database, published)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- w.stream(ctx, r.apply) }()
	r.t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, conn.Close(context.WithoutCancel(ctx))); err != nil {
			r.t.Error(err)
		}
	})
}

func (r *run) apply(tx transaction) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history.apply(tx)
}

// caughtUp waits until everything that was committed before it was called is
// judged: a transaction of its own has come by.
func (r *run) caughtUp(ctx context.Context) error {
	number := r.numbers.Add(1)
	text, err := json.Marshal(said{Number: number})
	if err != nil {
		return err
	}
	if _, err := r.admin.Exec(ctx, say, string(text)); err != nil {
		return err
	}
	r.tell(number, true)
	for deadline := time.Now().Add(patience); !r.logged(number); {
		if time.Now().After(deadline) {
			return fmt.Errorf("the write-ahead log isn't read to its end within %s", patience)
		}
		if err := pause(ctx, poll); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) logged(number int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.history.logged[number]
}

// round writes for d beside whatever the others do, and judges meanwhile.
func (r *run) round(d time.Duration, others ...func(context.Context, <-chan struct{}) error) {
	r.t.Helper()
	stopOthers, stopWriters, stopReaders := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var groups [3]*errgroup.Group
	var ctx [3]context.Context
	for i := range groups {
		groups[i], ctx[i] = errgroup.WithContext(r.t.Context())
	}
	for _, other := range others {
		groups[0].Go(func() error { return other(ctx[0], stopOthers) })
	}
	for _, w := range r.writers {
		groups[1].Go(func() error { return w.write(ctx[1], stopWriters) })
	}
	for _, read := range []func(context.Context, <-chan struct{}) error{r.readState, r.readWaits} {
		groups[2].Go(func() error { return read(ctx[2], stopReaders) })
	}
	r.until(ctx, d)
	for i, stop := range []chan struct{}{stopOthers, stopWriters, stopReaders} {
		close(stop)
		if err := groups[i].Wait(); err != nil {
			r.t.Error(err)
		}
	}
	if r.t.Failed() {
		r.t.FailNow()
	}
}

// until waits for d, or less where something has failed or was convicted.
func (r *run) until(failed [3]context.Context, d time.Duration) {
	end := time.After(d)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for r.lost() == 0 {
		select {
		case <-end:
			return
		case <-failed[0].Done():
			return
		case <-failed[1].Done():
			return
		case <-failed[2].Done():
			return
		case <-tick.C:
			for _, a := range r.agents {
				a.look()
			}
		}
	}
}

// dangling selects what is referred to and isn't there, at one moment.
func (p *pool) dangling() string {
	var selects []string
	for _, table := range tables {
		where := ""
		if !p.constrained() {
			where = " AND r.deleted_at IS NULL"
		}
		selects = append(selects, fmt.Sprintf(`SELECT '%[2]s ' || r.id || ': ' || r.blob::text FROM %[1]s.%[2]s r
			WHERE NOT EXISTS (SELECT FROM %[1]s.blobs b WHERE %[3]s = r.blob)%[4]s`, p.name, table, p.referable(), where))
	}
	return strings.Join(selects, " UNION ALL ")
}

// referable is SQL for the value by which a row refers to the blob b.
func (p *pool) referable() string {
	switch {
	case p.format != "":
		return "'sha256:' || encode(b.key, 'hex')"
	case strings.HasPrefix(p.blob, "bigint"):
		return "b.incarnation"
	default:
		return "b.key"
	}
}

// readState looks at the tables, as any reader would.
func (r *run) readState(ctx context.Context, stop <-chan struct{}) error {
	for !closed(stop) {
		for _, p := range r.pools {
			rows, err := r.admin.Query(ctx, p.dangling())
			if err != nil {
				return err
			}
			found, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				return err
			}
			for _, row := range found {
				r.violation("%s: %s refers to nothing", p.name, row)
			}
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// selectWaits selects the writers that wait for a batch at this moment.
const selectWaits = `
SELECT w.pid || ' ' || w.query_start, w.wait_event = 'advisory', split_part(w.query, '.', 1)
FROM pg_stat_activity w
WHERE w.datname = current_database() AND w.application_name = '` + writerName + `' AND w.wait_event_type = 'Lock'
	AND EXISTS (SELECT FROM pg_stat_activity a WHERE a.usename = ANY ($1) AND a.pid = ANY (pg_blocking_pids(w.pid)))`

// readWaits counts those that it sees, each once. There are more.
func (r *run) readWaits(ctx context.Context, stop <-chan struct{}) error {
	seen := map[string]bool{}
	for !closed(stop) {
		rows, err := r.admin.Query(ctx, selectWaits, r.roles())
		if err != nil {
			return err
		}
		var wait, query string
		var advisory bool
		_, err = pgx.ForEachRow(rows, []any{&wait, &advisory, &query}, func() error {
			if seen[wait] {
				return nil
			}
			seen[wait] = true
			race := rowWaited
			if advisory {
				race = pinWaited
			}
			r.counts.add(race, r.poolIn(query), 1)
			return nil
		})
		if err != nil {
			return err
		}
		if err := pause(ctx, 8*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// poolIn returns the pool whose table or function a statement names first.
func (r *run) poolIn(query string) string {
	words := strings.Fields(query)
	if len(words) == 0 {
		return everywhere
	}
	name := strings.TrimPrefix(words[len(words)-1], ownSchema)
	if slices.ContainsFunc(r.pools, func(p *pool) bool { return p.name == name }) {
		return name
	}
	return everywhere
}

// swept takes in how a sweep ended.
func (r *run) swept(by *agentProcess, e event) {
	began := e.began()
	r.counts.add("sweeps", e.Pool, 1)
	r.counts.add("blobs deleted", e.Pool, e.Deleted)
	r.counts.add(live, e.Pool, e.CancelledBy.Live)
	r.counts.add(pinnedKey, e.Pool, e.CancelledBy.Pinned)
	r.counts.add(locked, e.Pool, e.CancelledBy.Locked)
	failed := e.Error != "" || e.Aborted != nil && !e.Skipped()
	switch {
	case failed:
		r.counts.add("sweeps failed", e.Pool, 1)
	case e.Skipped():
		r.counts.add(leaseHeld, e.Pool, 1)
	case e.HeldUp():
		r.counts.add(heldUp, e.Pool, 1)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.CancelledBy.Failed > 0 {
		r.history.violation("%s: agent %s could not delete %d keys", e.Pool, by.name, e.CancelledBy.Failed)
	}
	if failed && !r.calm.IsZero() && began.After(r.calm) {
		r.history.violation("%s: with nobody around, a sweep of agent %s failed: %s %s", e.Pool, by.name, e.Error, e.Detail)
	}
	if failed || e.Skipped() {
		return
	}
	for w := range r.watches {
		if w.pool == e.Pool {
			select {
			case w.sweeps <- swept{by, began}:
			default: // a sweep comes again
			}
		}
	}
}

// watch returns the sweeps of a pool that come to their end from now on.
func (r *run) watch(pool string) (sweeps <-chan swept, forget func()) {
	w := &watching{pool: pool, sweeps: make(chan swept, 16)}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watches[w] = true
	return w.sweeps, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.watches, w)
	}
}

func (r *run) setCalm(since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calm = since
}

func (r *run) tell(number int64, committed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history.tell(number, committed)
}

func (r *run) violation(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.history.violation(format, args...)
}

func (r *run) lost() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.history.lost()
}

func (r *run) violations() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.history.violations, "\n")
}

func (r *run) roles() []string {
	var roles []string
	for _, a := range r.agents {
		roles = append(roles, a.role)
	}
	return roles
}

func (r *run) agentOf(role string) *agentProcess {
	return r.agents[slices.IndexFunc(r.agents, func(a *agentProcess) bool { return a.role == role })]
}

// pause waits for d.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
