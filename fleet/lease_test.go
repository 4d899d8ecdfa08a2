package fleet_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

func TestLeaseContention(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	first, second := connect(t, url, patient), connect(t, url, patient)
	lease := acquire(t, first, schema)
	contended(t, second, schema)
	// Re-entrant to Postgres, and yet a second sweep.
	contended(t, first, schema)
	contended(t, &pgdb.Conn{Conn: first.Conn}, schema)

	// Another pool, and the same schema of another database, is another lease.
	other := acquire(t, first, "other")
	elsewhere := acquire(t, connect(t, pgtest.Database(t), patient), schema)

	check(t, lease.Release(t.Context()))
	lease = acquire(t, second, schema)
	contended(t, first, schema)
	contended(t, second, "other")
	for _, l := range []*fleet.Lease{lease, other, elsewhere} {
		check(t, l.Release(t.Context()))
	}
}

// Of many that try at once, on connections of their own and on a shared one that
// is busy, one gets it.
func TestLeaseRaced(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conns := make([]*pgdb.Conn, 8)
	for i := range conns {
		conns[i] = connect(t, url, patient)
	}
	for range 10 {
		leases := make([]*fleet.Lease, 2*len(conns))
		errs := make([]error, len(leases))
		var wg sync.WaitGroup
		for i := range leases {
			wg.Go(func() { leases[i], _, errs[i] = fleet.SweepLockAcquire(t.Context(), conns[i%len(conns)], schema) })
		}
		wg.Wait()
		check(t, errors.Join(errs...))
		held := 0
		for _, lease := range leases {
			if lease != nil {
				held++
				check(t, lease.Release(t.Context()))
			}
		}
		equal(t, held, 1)
	}
}

func TestLeaseReleaseRepeated(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn, other := connect(t, url, patient), connect(t, url, patient)
	ctx, cancel := context.WithCancel(t.Context())
	lease, held, err := fleet.SweepLockAcquire(ctx, conn, schema)
	check(t, err)
	equal(t, held, true)
	cancel()
	// Releasing works although the sweep's time is over.
	check(t, lease.Release(ctx))
	next := acquire(t, other, schema)
	// Repeating it doesn't take the lease from the next holder, nor from the same
	// session when that is the next one.
	check(t, lease.Release(t.Context()))
	check(t, next.Verify(t.Context(), other))
	check(t, next.Release(t.Context()))
	again := acquire(t, conn, schema)
	check(t, lease.Release(t.Context()))
	check(t, again.Verify(t.Context(), conn))
	contended(t, conn, schema)
	check(t, again.Release(t.Context()))
}

// In a transaction that has failed the server answers nothing: the lease is still
// held, and known to be.
func TestLeaseReleaseFails(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	lease := acquire(t, conn, schema)
	tx, err := conn.Begin(t.Context())
	check(t, err)
	if _, err := tx.Exec(t.Context(), "SELECT 1/0"); err == nil {
		t.Fatal("the statement succeeded")
	}
	if err := lease.Release(t.Context()); err == nil {
		t.Error("Release succeeded in a failed transaction")
	}
	contended(t, conn, schema)
	check(t, tx.Rollback(t.Context()))
	check(t, lease.Verify(t.Context(), conn))
	check(t, lease.Release(t.Context()))
}

func TestLeaseVerify(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn, other := connect(t, url, patient), connect(t, url, patient)
	lease := acquire(t, conn, schema)
	check(t, lease.Verify(t.Context(), conn))
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error { return lease.Verify(ctx, tx) })
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		// Neither the two halves as a key of two numbers are the lease, nor is the
		// lock in shared mode.
		var high, low int32
		check(t, tx.QueryRow(ctx, `SELECT (classid::bit(32))::int, (objid::bit(32))::int FROM
			(SELECT classid::bigint, objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) l`).Scan(&high, &low))
		key := int64(high)<<32 | int64(uint32(low))
		pgtest.Exec(t, tx, "SELECT pg_advisory_unlock_all()")
		lost(t, lease, tx)
		pgtest.Exec(t, tx, "SELECT pg_advisory_lock($1::int, $2::int)", high, low)
		lost(t, lease, tx)
		pgtest.Exec(t, tx, "SELECT pg_advisory_lock_shared($1::bigint)", key)
		lost(t, lease, tx)
		pgtest.Exec(t, tx, "SELECT pg_advisory_lock($1::bigint)", key)
		return lease.Verify(ctx, tx)
	})
	// Another session's lease isn't the own one, nor is another pool's.
	lost(t, lease, other)
	elsewhere := acquire(t, other, "other")
	lost(t, lease, other)
	check(t, elsewhere.Release(t.Context()))
	check(t, lease.Release(t.Context()))
	lost(t, lease, conn)
}

// The keys of leases are all over the 64 bits; pg_locks shows their halves.
func TestLeaseVerifyEveryKey(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	for i := range 50 {
		lease := acquire(t, conn, fmt.Sprint(i))
		check(t, lease.Verify(t.Context(), conn))
		check(t, lease.Release(t.Context()))
		lost(t, lease, conn)
	}
}

// When the session is terminated the lease is gone: its holder learns of it, in a
// transaction and outside, releasing it is no error, and another gets it.
func TestLeaseDiesWithItsSession(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	other := connect(t, url, patient)
	for _, inTransaction := range []bool{false, true} {
		conn := connect(t, url, patient)
		lease := acquire(t, conn, schema)
		var q pgdb.Querier = conn
		if inTransaction {
			tx, err := conn.Begin(t.Context())
			check(t, err)
			check(t, lease.Verify(t.Context(), tx))
			q = tx
		}
		terminate(t, other, conn)
		next := acquire(t, other, schema)
		lost(t, lease, q)
		check(t, lease.Release(t.Context()))
		check(t, lease.Release(t.Context()))
		check(t, next.Verify(t.Context(), other))
		check(t, next.Release(t.Context()))
	}
}

// Release meets the dead session first.
func TestLeaseReleaseAfterTermination(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn, other := connect(t, url, patient), connect(t, url, patient)
	lease := acquire(t, conn, schema)
	terminate(t, other, conn)
	check(t, lease.Release(t.Context()))
	lost(t, lease, conn)
	check(t, acquire(t, other, schema).Release(t.Context()))
}

// After an error the lease isn't held, by the server or in the process.
func TestLeaseAcquireFails(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conn, other := connect(t, url, patient), connect(t, url, patient)
	tx, err := conn.Begin(t.Context())
	check(t, err)
	if _, err := tx.Exec(t.Context(), "SELECT 1/0"); err == nil {
		t.Fatal("the statement succeeded")
	}
	if _, held, err := fleet.SweepLockAcquire(t.Context(), conn, schema); err == nil || held {
		t.Errorf("in a failed transaction: got held %t and error %v", held, err)
	}
	check(t, tx.Rollback(t.Context()))
	check(t, acquire(t, other, schema).Release(t.Context()))
	check(t, acquire(t, conn, schema).Release(t.Context()))
}

// A pooler introduces its client to a session that isn't the server's.
func TestLeaseRefusedBehindPooler(t *testing.T) {
	t.Parallel()
	direct := pgtest.Database(t)
	conn := connect(t, poolerTo(t, direct), patient)
	_, held, err := fleet.SweepLockAcquire(t.Context(), conn, schema)
	if held || err == nil || !strings.Contains(err.Error(), "pooler") {
		t.Errorf("got held %t and error %v, want one about the pooler", held, err)
	}
	check(t, acquire(t, connect(t, direct, patient), schema).Release(t.Context()))
}

func acquire(t *testing.T, conn *pgdb.Conn, schema string) *fleet.Lease {
	t.Helper()
	lease, held, err := fleet.SweepLockAcquire(t.Context(), conn, schema)
	check(t, err)
	if !held || lease == nil {
		t.Fatalf("somebody else has the lease of schema %s", schema)
	}
	return lease
}

func contended(t *testing.T, conn *pgdb.Conn, schema string) {
	t.Helper()
	lease, held, err := fleet.SweepLockAcquire(t.Context(), conn, schema)
	check(t, err)
	if held || lease != nil {
		t.Fatalf("the lease of schema %s was given twice", schema)
	}
}

func lost(t *testing.T, lease *fleet.Lease, q pgdb.Querier) {
	t.Helper()
	if err := lease.Verify(t.Context(), q); !errors.Is(err, fleet.ErrLeaseLost) {
		t.Fatalf("Verify: got error %v, want that the lease is lost", err)
	}
}

// terminate ends the session of conn and returns when it has ended.
func terminate(t *testing.T, by, conn *pgdb.Conn) {
	t.Helper()
	var ended bool
	pid := conn.PgConn().PID()
	check(t, by.QueryRow(t.Context(), "SELECT pg_terminate_backend($1, 30000)", pid).Scan(&ended))
	if !ended {
		t.Fatal("the session didn't end")
	}
}

// poolerTo returns the URL of a pooler's stand-in: it hands everything on, and
// tells the client another process id than the server's.
func poolerTo(t *testing.T, direct string) string {
	t.Helper()
	u, err := url.Parse(direct)
	check(t, err)
	cfg, err := pgx.ParseConfig(direct)
	check(t, err)
	network, address := pgconnAddress(cfg.Host, cfg.Port)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	var wg sync.WaitGroup
	t.Cleanup(func() {
		_ = listener.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { relay(client, network, address) })
		}
	})
	query := u.Query()
	query.Set("sslmode", "disable")
	query.Del("host")
	query.Del("port")
	u.Host, u.RawQuery = listener.Addr().String(), query.Encode()
	return u.String()
}

func pgconnAddress(host string, port uint16) (network, address string) {
	if strings.HasPrefix(host, "/") {
		return "unix", fmt.Sprintf("%s/.s.PGSQL.%d", host, port)
	}
	return "tcp", net.JoinHostPort(host, fmt.Sprint(port))
}

func relay(client net.Conn, network, address string) {
	defer func() { _ = client.Close() }()
	server, err := net.DialTimeout(network, address, 10*time.Second)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	go func() {
		_, _ = io.Copy(server, client)
		_ = server.Close()
	}()
	if relayStartup(client, server) == nil {
		_, _ = io.Copy(client, server)
	}
}

// relayStartup hands the server's messages on up to BackendKeyData, in which it
// changes the process id.
// https://www.postgresql.org/docs/15/protocol-message-formats.html
func relayStartup(client, server net.Conn) error {
	for {
		header := make([]byte, 5)
		if _, err := io.ReadFull(server, header); err != nil {
			return err
		}
		body := make([]byte, binary.BigEndian.Uint32(header[1:])-4)
		if _, err := io.ReadFull(server, body); err != nil {
			return err
		}
		if header[0] == 'K' {
			binary.BigEndian.PutUint32(body, binary.BigEndian.Uint32(body)+1)
		}
		if _, err := client.Write(append(header, body...)); err != nil || header[0] == 'K' {
			return err
		}
	}
}

// Whoever doesn't get the lease can be told who has it.
func TestFindLeaseHolder(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	one, two := connect(t, url, patient), connect(t, url, patient)
	_, ok, err := fleet.FindLeaseHolder(t.Context(), two, schema)
	check(t, err)
	equal(t, ok, false)
	lease, _, err := fleet.SweepLockAcquire(t.Context(), one, schema)
	check(t, err)
	pgtest.Exec(t, one, "SET application_name = 'first'")
	_, ok, err = fleet.FindLeaseHolder(t.Context(), two, "another")
	check(t, err)
	equal(t, ok, false)
	found, ok, err := fleet.FindLeaseHolder(t.Context(), two, schema)
	check(t, err)
	equal(t, ok, true)
	equal(t, uint32(found.PID), one.PgConn().PID())
	equal(t, found.Application, "first")
	equal(t, found.Since.IsZero(), false)
	for _, part := range []string{fmt.Sprint("pid ", found.PID), "application first", "connected since 20"} {
		if !strings.Contains(found.String(), part) {
			t.Errorf("%q lacks %q", found, part)
		}
	}
	check(t, lease.Release(t.Context()))
}
