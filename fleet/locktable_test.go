package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

func replaceSchema(sql string) string { return strings.ReplaceAll(sql, "{schema}", pgdb.Ident(schema)) }

// One transaction pins 20,000 keys by calls for a thousand, or a hundred, and
// twenty at once pin a thousand each: they need few locks, and leave the rest of
// the lock table alone.
func TestLockTableManyKeys(t *testing.T) {
	t.Parallel()
	url, observer := newPool(t)
	locks := func() int {
		return ask[int](t, observer, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	}
	for each, most := range map[int]int{1000: 1, 100: 501} {
		inTx(t, observer, func(ctx context.Context, tx pgx.Tx) error {
			for i := range 20_000 / each {
				_, err := call[[]bool](ctx, tx, pinAll, pgdb.Bytes(keysNamed(fmt.Sprint(i, "."), each)), []byte("me"), time.Minute)
				check(t, err)
			}
			equal(t, locks(), most)
			return nil
		})
		equal(t, countPins(t, observer), 20_000)
		pgtest.Exec(t, observer, "DELETE FROM "+table)
	}

	// All are done pinning before the first one commits.
	var pinned, wg sync.WaitGroup
	pinned.Add(20)
	errs := make([]error, 20)
	all := make(chan int, 1)
	go func() { pinned.Wait(); close(all) }()
	for i := range errs {
		conn := connect(t, url, patient)
		wg.Go(func() {
			errs[i] = conn.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
				_, err := call[[]bool](ctx, tx, pinAll, pgdb.Bytes(keysNamed(fmt.Sprint(i, "."), 1000)), []byte(fmt.Sprint(i)), time.Minute)
				pinned.Done()
				<-all
				return err
			})
		})
	}
	wg.Wait()
	check(t, errors.Join(errs...))
	equal(t, countPins(t, observer), 20_000)
}

// No row and no lock is everybody's: while many transactions hold what they have
// pinned, each its own keys and all of them one that they share, none waits for another.
// Whoever had to wait would fail at once.
func TestNoSharedHotRow(t *testing.T) {
	t.Parallel()
	url, observer := newPool(t)
	putBlob(t, observer, "shared")
	const writers = 30
	all := make(chan int)
	errs := make([]error, writers)
	var pinned, wg sync.WaitGroup
	pinned.Add(writers)
	for i := range errs {
		conn := connect(t, url, pgdb.Timeouts{Lock: time.Millisecond})
		wg.Go(func() {
			errs[i] = conn.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
				owner := []byte(fmt.Sprint("owner ", i))
				_, err := call[bool](ctx, tx, pinOne, []byte("shared"), owner, time.Minute)
				if err == nil {
					_, err = call[[]bool](ctx, tx, pinAll, pgdb.Bytes(keysNamed(fmt.Sprint(i, "."), 10)), owner, time.Minute)
				}
				if err == nil {
					_, err = call[int64](ctx, tx, "renew($1::bytea)", owner)
				}
				pinned.Done()
				<-all // nobody has committed before the last one has pinned
				return err
			})
		})
	}
	pinned.Wait()
	equal(t, countPins(t, observer), 0)
	close(all)
	wg.Wait()
	check(t, errors.Join(errs...))
	equal(t, countPins(t, observer), writers*11)
}

// exhausting says that this is the test's process of its own, on a server whose
// lock table no other test needs.
const exhausting = "GC_AGENT_TEST_EXHAUST_LOCK_TABLE"

// Single calls in one transaction beyond the lock table get the server's error.
// Nothing of the transaction is left, and nothing is lost: the keys can be pinned
// again, and a sweep goes on.
func TestLockTableExhausted(t *testing.T) {
	t.Parallel()
	if os.Getenv(exhausting) == "" {
		onServerOfItsOwn(t)
		return
	}
	_, conn := newPool(t)
	pgtest.Exec(t, conn, `INSERT INTO "Blobs" SELECT i FROM generate_series(1, 100000) i`)
	_, err := conn.Exec(t.Context(), replaceSchema(`DO $$ BEGIN
		FOR i IN 1..100000 LOOP PERFORM {schema}.pin(convert_to(i::text, 'UTF8'), 'me', '1 h'); END LOOP;
	END $$`))
	code(t, err, "53200") // out_of_memory
	equal(t, countPins(t, conn), 0)
	equal(t, ask[int](t, conn, `SELECT count(*) FROM "Blobs"`), 100_000)

	n, err := fleet.MaxBatch(t.Context(), conn)
	check(t, err)
	equal(t, pinKey(t, conn, "1", "me", time.Minute), true)
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		keys := make([]blob.Key, n)
		for i := range keys {
			keys[i] = blob.Key(fmt.Sprint(i + 1))
		}
		for i, verdict := range arbitrate(t, tx, keys) {
			if (verdict.Decision == fleet.Dead) != (i > 0) {
				t.Fatalf("key %s is %s", keys[i], verdict.Decision)
			}
		}
		return nil
	})
}

// onServerOfItsOwn runs the test again, in another process beside another server.
func onServerOfItsOwn(t *testing.T) {
	t.Helper()
	pgtest.Programs(t)
	self, err := os.Executable()
	check(t, err)
	cmd := exec.CommandContext(t.Context(), "../scripts/postgres", "run", "--", self, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), exhausting+"=1", pgtest.Variable+"=")
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("in a process of its own: %v\n%s", err, out)
	}
}
