package torture_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/jackc/pgx/v5"
)

// chaos ends processes and sessions, one thing after the other.
type chaos struct {
	run  *run
	conn *pgx.Conn
	rng  *rand.Rand
	acts []act
}

// act is one thing that chaos does.
type act struct {
	// race is what it is meant to meet, or what it is counted as where that is left
	// to chance.
	race string
	do   func(context.Context, <-chan struct{}) error
}

func (r *run) newChaos(seed, n uint64) *chaos {
	return &chaos{run: r, conn: pgtest.Connect(r.t, r.url), rng: rand.New(rand.NewPCG(seed, n<<32))}
}

// ofSessions returns what happens to sessions.
func (c *chaos) ofSessions() []act {
	return []act{{terminated, c.terminateBatch}, {"writers terminated", c.terminateWriter}, {"agents' sessions terminated", c.terminateAgent}}
}

// ofKills returns how processes are killed.
func (c *chaos) ofKills() []act {
	return []act{{takenOver, c.killInBatch}, {"agents killed", c.killAny}}
}

// ofStops returns how processes are stopped and continued.
func (c *chaos) ofStops() []act {
	return []act{{replaced, c.replace}, {"agents stopped", c.stop}}
}

// rest is for how long, at most, nothing happens between two acts: most batches are
// left alone, since without deletes there are no races.
const rest = 700 * time.Millisecond

// rage acts until stop is closed. What it has done the least of comes first, more
// often than not.
func (c *chaos) rage(ctx context.Context, stop <-chan struct{}) error {
	for !closed(stop) {
		next := c.acts[c.rng.IntN(len(c.acts))]
		if c.rng.IntN(4) > 0 {
			next = slices.MinFunc(c.acts, func(a, b act) int {
				return cmp.Compare(c.run.counts.total(a.race), c.run.counts.total(b.race))
			})
		}
		if err := next.do(ctx, stop); err != nil {
			return fmt.Errorf("chaos: %s: %w", next.race, err)
		}
		most := rest
		if !slices.ContainsFunc(c.acts, func(a act) bool { return c.run.counts.total(a.race) < enough }) {
			most *= 4 // the batches are the others' now
		}
		if err := pause(ctx, time.Duration(c.rng.Int64N(int64(most)))); err != nil {
			return err
		}
	}
	return nil
}

// batch is a transaction of an agent's that has begun to lock blobs.
type batch struct {
	pid   uint32
	agent *agentProcess
	xid   string
	pool  string
}

// A batch takes this lock on the blobs' table before anything else of it; nothing
// else of the agent's does. The server shows the lower half of the transaction's id.
const selectBatch = `
SELECT a.pid, a.usename::text, n.nspname::text,
	((pg_snapshot_xmax(pg_current_snapshot())::text::bigint >> 32 << 32) + a.backend_xid::text::bigint)::text
FROM pg_locks l
JOIN pg_stat_activity a ON a.pid = l.pid
JOIN pg_class c ON c.oid = l.relation
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.granted AND c.relname = 'blobs'
	AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
	AND a.usename = ANY ($1) AND a.backend_xid IS NOT NULL
ORDER BY random() LIMIT 1`

// batch waits for an agent to be in the middle of a batch; false when stop comes
// first.
func (c *chaos) batch(ctx context.Context, stop <-chan struct{}) (b batch, ok bool, err error) {
	for !closed(stop) {
		var role string
		err := c.conn.QueryRow(ctx, selectBatch, c.run.roles()).Scan(&b.pid, &role, &b.pool, &b.xid)
		switch {
		case err == nil:
			b.agent = c.run.agentOf(role)
			// Anywhere in it, not at its beginning.
			return b, true, pause(ctx, time.Duration(c.rng.IntN(20))*time.Millisecond)
		case !errors.Is(err, pgx.ErrNoRows):
			return b, false, fmt.Errorf("look for a batch: %w", err)
		}
		if err := pause(ctx, poll); err != nil {
			return b, false, err
		}
	}
	return b, false, nil
}

// rolledBack says whether the batch was, once its session has ended.
func (c *chaos) rolledBack(ctx context.Context, b batch) (bool, error) {
	committed, err := outcome(ctx, c.conn, b.xid)
	return !committed, err
}

func (c *chaos) terminate(ctx context.Context, pid uint32) error {
	_, err := c.conn.Exec(ctx, `SELECT pg_terminate_backend($1, 10000)`, int32(pid))
	return err
}

// terminateBatch ends the session of a batch under way.
func (c *chaos) terminateBatch(ctx context.Context, stop <-chan struct{}) error {
	b, ok, err := c.batch(ctx, stop)
	if err != nil || !ok {
		return err
	}
	if err := c.terminate(ctx, b.pid); err != nil {
		return err
	}
	c.run.counts.add("agents' sessions terminated", b.pool, 1)
	gone, err := c.rolledBack(ctx, b)
	if gone {
		c.run.counts.add(terminated, b.pool, 1)
	}
	return err
}

// terminateWriter ends the session of a writer that has written something.
func (c *chaos) terminateWriter(ctx context.Context, _ <-chan struct{}) error {
	tag, err := c.conn.Exec(ctx, `
		SELECT pg_terminate_backend(pid) FROM (
			SELECT pid FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = '`+writerName+`' AND backend_xid IS NOT NULL
			ORDER BY random() LIMIT 1) w`)
	c.run.counts.add("writers terminated", everywhere, tag.RowsAffected())
	return err
}

// terminateAgent ends any session of an agent's, whatever it does.
func (c *chaos) terminateAgent(ctx context.Context, _ <-chan struct{}) error {
	tag, err := c.conn.Exec(ctx, `
		SELECT pg_terminate_backend(pid) FROM (
			SELECT pid FROM pg_stat_activity WHERE usename = ANY ($1) ORDER BY random() LIMIT 1) s`, c.run.roles())
	c.run.counts.add("agents' sessions terminated", everywhere, tag.RowsAffected())
	return err
}

// killInBatch kills an agent in the middle of a batch, and sees another one sweep
// the pool.
func (c *chaos) killInBatch(ctx context.Context, stop <-chan struct{}) error {
	b, ok, err := c.batch(ctx, stop)
	if err != nil || !ok || !b.agent.signal(syscall.SIGKILL) {
		return err
	}
	c.run.counts.add("agents killed", b.pool, 1)
	gone, err := c.rolledBack(ctx, b)
	if err != nil || !gone {
		return err
	}
	c.run.counts.add(killed, b.pool, 1)
	return c.successor(ctx, b, takenOver)
}

// replace stops an agent in the middle of a batch and ends its session, so that
// another one sweeps the pool; then lets it go on, as if nothing had been.
func (c *chaos) replace(ctx context.Context, stop <-chan struct{}) error {
	b, ok, err := c.batch(ctx, stop)
	if err != nil || !ok || !b.agent.signal(syscall.SIGSTOP) {
		return err
	}
	defer b.agent.signal(syscall.SIGCONT)
	c.run.counts.add("agents stopped", b.pool, 1)
	if err := c.terminate(ctx, b.pid); err != nil {
		return err
	}
	gone, err := c.rolledBack(ctx, b)
	if err != nil || !gone {
		return err
	}
	return c.successor(ctx, b, replaced)
}

// successor waits until another agent has swept the pool from beginning to end.
func (c *chaos) successor(ctx context.Context, b batch, race string) error {
	began := time.Now()
	sweeps, forget := c.run.watch(b.pool)
	defer forget()
	timeout := time.After(patience)
	for {
		select {
		case s := <-sweeps:
			if s.by != b.agent && s.began.After(began) {
				c.run.counts.add(race, b.pool, 1)
				return nil
			}
		case <-timeout:
			return fmt.Errorf("no other agent has swept pool %s for %s", b.pool, patience)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// stop stops an agent in the middle of a batch, with its locks and its lease, and
// lets it go on.
func (c *chaos) stop(ctx context.Context, stop <-chan struct{}) error {
	b, ok, err := c.batch(ctx, stop)
	if err != nil || !ok || !b.agent.signal(syscall.SIGSTOP) {
		return err
	}
	defer b.agent.signal(syscall.SIGCONT)
	c.run.counts.add("agents stopped", b.pool, 1)
	return pause(ctx, time.Duration(50+c.rng.IntN(300))*time.Millisecond)
}

// killAny kills an agent, whatever it does.
func (c *chaos) killAny(context.Context, <-chan struct{}) error {
	if c.run.agents[c.rng.IntN(len(c.run.agents))].signal(syscall.SIGKILL) {
		c.run.counts.add("agents killed", everywhere, 1)
	}
	return nil
}
