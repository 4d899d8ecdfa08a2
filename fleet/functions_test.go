package fleet_test

import (
	"context"
	"errors"
	"fmt"
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

// A pin is written whether the blob is there or not, lives for its time from the
// call on, and says which it found.
func TestPin(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	putBlob(t, conn, "there")
	for key, want := range map[blob.Key]bool{"there": true, "absent": false, "": false} {
		before := hostNow(t, conn)
		equal(t, pinKey(t, conn, key, "me", time.Minute), want)
		lives(t, expiryOf(t, conn, key, "me"), before, hostNow(t, conn), time.Minute)
	}
	// Another's pin is another pin; the same owner's is renewed, and never shortened.
	pinKey(t, conn, "there", "\x00", time.Hour)
	equal(t, countPins(t, conn), 4)
	before := hostNow(t, conn)
	pinKey(t, conn, "there", "me", time.Hour)
	long := expiryOf(t, conn, "there", "me")
	lives(t, long, before, hostNow(t, conn), time.Hour)
	pinKey(t, conn, "there", "me", time.Minute)
	equal(t, expiryOf(t, conn, "there", "me"), long)
	// An expired one may be pinned again: the blob is looked for, too.
	agedPin(t, conn, "old", "me", past)
	equal(t, pinKey(t, conn, "old", "me", fleet.MaxTTL), false)
	if expiryOf(t, conn, "old", "me") == past {
		t.Error("the expired pin wasn't written again")
	}
}

// The clock is that of the call, not of the transaction's or statement's start.
func TestPinClock(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	other := connect(t, url, patient)
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		pass(t, other, hostNow(t, tx))
		before := hostNow(t, other)
		pinKey(t, tx, "a", "me", time.Second)
		lives(t, expiryOf(t, tx, "a", "me"), before, hostNow(t, other), time.Second)
		return nil
	})
}

// Many keys at once: the answers are in the order given, repeated keys included.
func TestPinMany(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	putBlob(t, conn, "b", "d", "é")
	many := keysNamed("many ", 600)
	putBlob(t, conn, many[17])
	for _, c := range []struct {
		keys []blob.Key
		want []bool
	}{
		{[]blob.Key{"d", "c", "b", "d", "", "é", "\xff"}, []bool{true, false, true, true, false, true, false}},
		{[]blob.Key{"b"}, []bool{true}},
		{nil, nil},
		{many, func() []bool { want := make([]bool, 600); want[17] = true; return want }()},
	} {
		before := hostNow(t, conn)
		there, err := call[[]bool](t.Context(), conn, pinAll, pgdb.Bytes(c.keys), []byte("me"), time.Minute)
		check(t, err)
		equal(t, there, c.want)
		after := hostNow(t, conn)
		for _, key := range c.keys {
			lives(t, expiryOf(t, conn, key, "me"), before, after, time.Minute)
		}
		pgtest.Exec(t, conn, "DELETE FROM "+table)
	}
}

// Calls for up to 500 keys lock them one by one; a call for more, or one that would
// make more in its transaction, takes the pool's lock, which is one however many
// they are. Repeats don't count, nor do calls for one key, nor what was rolled back.
func TestPinLocks(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	observer := connect(t, url, patient)
	keys := keysNamed("k", 501)
	free := func(number int64) bool {
		return ask[bool](t, observer, "SELECT pg_try_advisory_xact_lock($1)", number)
	}
	pin := func(tx pgx.Tx, keys []blob.Key, pool bool) {
		t.Helper()
		_, err := call[[]bool](t.Context(), tx, pinAll, pgdb.Bytes(keys), []byte("me"), time.Minute)
		check(t, err)
		equal(t, free(fleet.PoolLock(schema)), !pool)
		equal(t, free(keyLock(schema, keys[0])), pool)
	}
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		pin(tx, append(keys[:500:500], keys[:500]...), false)
		return nil
	})
	inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
		pin(tx, keys, true)
		return nil
	})
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		pin(tx, keys[:400], false)
		sub, err := tx.Begin(ctx)
		check(t, err)
		pin(sub, keys[400:500], false)
		check(t, sub.Rollback(ctx))
		pin(tx, keys[401:500], false)
		pinKey(t, tx, "one", "me", time.Minute)
		equal(t, free(keyLock(schema, "one")), false)
		equal(t, ask[bool](t, observer, "SELECT pg_try_advisory_xact_lock_shared($1)", keyLock(schema, "one")), true)
		pin(tx, []blob.Key{"another"}, false)
		pin(tx, []blob.Key{"and another"}, true)
		return nil
	})
}

// The locks are had before anything is looked at or written: whoever waits for
// one has touched nothing.
func TestPinWaitsFirst(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	writer, observer := connect(t, url, patient), connect(t, url, patient)
	putBlob(t, conn, "a")
	many := append(keysNamed("k", 500), "a")
	for _, pin := range []func() (bool, error){
		func() (bool, error) {
			return call[bool](t.Context(), writer, pinOne, []byte("a"), []byte("me"), time.Minute)
		},
		func() (bool, error) {
			there, err := call[[]bool](t.Context(), writer, pinAll, pgdb.Bytes(many), []byte("me"), time.Minute)
			return err == nil && there[500], err
		},
	} {
		var done <-chan outcome
		inTx(t, conn, func(_ context.Context, tx pgx.Tx) error {
			lock(t, tx, []blob.Key{"a"})
			done = start(pin)
			equal(t, untilBlocked(t, observer, writer, done), true)
			equal(t, ask[bool](t, observer, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND backend_xid IS NOT NULL)`,
				writer.PgConn().PID()), false)
			return nil
		})
		told(t, <-done, true)
	}
}

// The row that pin has found stays for the transaction: another's delete waits,
// an update of the rest of the row doesn't.
func TestPinKeepsRow(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	other := connect(t, url, pgdb.Timeouts{Lock: time.Millisecond})
	putBlob(t, conn, "one", "many")
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		pinKey(t, tx, "one", "me", time.Minute)
		_, err := call[[]bool](ctx, tx, pinAll, [][]byte{[]byte("many")}, []byte("me"), time.Minute)
		check(t, err)
		for _, key := range []string{"one", "many"} {
			_, err := other.Exec(ctx, `DELETE FROM "Blobs" WHERE "Id" = $1`, key)
			code(t, err, pgdb.LockNotAvailable)
			pgtest.Exec(t, other, `UPDATE "Blobs" SET data = 'new' WHERE "Id" = $1`, key)
		}
		return nil
	})
}

// Keys of every kind of column are found by their canonical bytes and no others;
// what can be no key of the column isn't there, and no error.
func TestPinKinds(t *testing.T) {
	t.Parallel()
	const id = "0f8fad5b-d9cb-469f-a165-70867728950e"
	for _, c := range []struct {
		column string
		kind   blob.Kind
		values string
		there  []blob.Key
		absent []blob.Key
	}{
		{"bytea", blob.KindBytes, `('\x00ff'), ('')`, []blob.Key{"\x00\xff", ""}, []blob.Key{"\x00", `\x00ff`}},
		{"text", blob.KindText, `('é'), ('')`, []blob.Key{"é", ""}, []blob.Key{"\xe9", "\x00", "é\x00", "\xed\xa0\x80", "e"}},
		{"varchar(9)", blob.KindText, `('a b')`, []blob.Key{"a b"}, []blob.Key{"a b ", "much longer than nine"}},
		{`text COLLATE "C"`, blob.KindText, `('a')`, []blob.Key{"a"}, []blob.Key{"A"}},
		{"uuid", blob.KindUUID, `('` + id + `')`, []blob.Key{id}, []blob.Key{
			blob.Key(strings.ToUpper(id)), "{" + id + "}", id + "\n", blob.Key(strings.ReplaceAll(id, "-", "")), "", "\xff",
		}},
		{"int2", blob.KindInt, "(7), (-7), (0)", []blob.Key{"7", "-7", "0"}, []blob.Key{"07", "+7", "-0", "7 ", "\x007", "65543", "x", ""}},
		{"int4", blob.KindInt, "(-2147483648)", []blob.Key{"-2147483648"}, []blob.Key{"2147483648", "7"}},
		{
			"int8", blob.KindInt, "(9223372036854775807), (-9223372036854775808)",
			[]blob.Key{"9223372036854775807", "-9223372036854775808"},
			[]blob.Key{"9223372036854775808", "-9223372036854775809", "99999999999999999999999"},
		},
		{"word", blob.KindText, "('a')", []blob.Key{"a"}, []blob.Key{"\xff"}},
		{"number", blob.KindInt, "(7)", []blob.Key{"7"}, []blob.Key{"8", "300"}},
	} {
		t.Run(c.column, func(t *testing.T) {
			t.Parallel()
			conn := connect(t, pgtest.Database(t), patient)
			pgtest.Exec(t, conn, `CREATE DOMAIN word AS text CHECK (length(VALUE) < 99); CREATE DOMAIN number AS int4 CHECK (VALUE < 100);
				CREATE TABLE first (k `+c.column+` PRIMARY KEY); CREATE TABLE second (k `+c.column+` PRIMARY KEY)
					PARTITION BY HASH (k); CREATE TABLE part PARTITION OF second FOR VALUES WITH (MODULUS 1, REMAINDER 0);
				INSERT INTO second VALUES `+c.values)
			check(t, fleet.EnsureSchema(t.Context(), conn, schema))
			check(t, fleet.EnsureFunctions(t.Context(), conn, schema, []fleet.PinTier{
				{Table: "public.first", KeyColumn: "k", Kind: c.kind}, {Table: "public.second", KeyColumn: "k", Kind: c.kind},
			}))
			want := make([]bool, len(c.there)+len(c.absent))
			for i := range c.there {
				want[i] = true
			}
			keys := append(c.there[:len(c.there):len(c.there)], c.absent...)
			there, err := call[[]bool](t.Context(), conn, pinAll, pgdb.Bytes(keys), []byte("me"), time.Minute)
			check(t, err)
			equal(t, there, want)
			for i, key := range keys {
				equal(t, pinKey(t, conn, key, "me", time.Minute), want[i])
			}
			equal(t, countPins(t, conn), len(keys))
		})
	}
}

// A key is found through the index of its column.
func TestPinUsesIndex(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	pgtest.Exec(t, conn, `INSERT INTO "Blobs" SELECT 'blob ' || i FROM generate_series(1, 5000) i; ANALYZE "Blobs"`)
	inTx(t, conn, func(ctx context.Context, tx pgx.Tx) error {
		scans := func() int {
			return ask[int](t, tx, "SELECT coalesce(sum(seq_scan), 0) FROM pg_stat_xact_user_tables WHERE relname = 'Blobs'")
		}
		before := scans()
		for i := range 12 { // past the point where a plan is made once for all
			equal(t, pinKey(t, tx, blob.Key(fmt.Sprint("blob ", i+1)), "me", time.Minute), true)
			_, err := call[[]bool](ctx, tx, pinAll, pgdb.Bytes(keysNamed("blob ", 20)), []byte("me"), time.Minute)
			check(t, err)
		}
		equal(t, scans(), before)
		return nil
	})
}

// A key longer than any pool has is foreign: nobody deletes it, it needs no pin.
func TestPinForeignKey(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	longest, foreign := blob.Key(strings.Repeat("k", blob.MaxKeyLen)), blob.Key(strings.Repeat("k", 3000))
	pgtest.Exec(t, conn, `ALTER TABLE "Blobs" DROP CONSTRAINT "Blobs_pkey"`)
	putBlob(t, conn, foreign)
	owner := fleet.Owner(strings.Repeat("\xf0", 1000))
	equal(t, pinKey(t, conn, longest, owner, time.Minute), false)
	equal(t, pinKey(t, conn, foreign, owner, time.Minute), true)
	there, err := call[[]bool](t.Context(), conn, pinAll, pgdb.Bytes([]blob.Key{longest, foreign}), []byte(owner), time.Minute)
	check(t, err)
	equal(t, there, []bool{false, true})
	equal(t, countPins(t, conn), 1)
}

func TestPinArguments(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	for expr, want := range map[string]string{
		"pin(NULL::bytea, 'o', '1 s')":                     "22004",
		"pin('k'::bytea, NULL, '1 s')":                     "22004",
		"pin('k'::bytea, 'o', NULL)":                       "22004",
		"pin(NULL::bytea[], 'o', '1 s')":                   "22004",
		"pin('{a,NULL}'::bytea[], 'o', '1 s')":             "22004",
		"pin('{a}'::bytea[], NULL, '1 s')":                 "22004",
		"pin('{a}'::bytea[], 'o', NULL)":                   "22004",
		"pin('k'::bytea, 'o', '0')":                        "22023",
		"pin('k'::bytea, 'o', '-1 s')":                     "22023",
		"pin('k'::bytea, 'o', '24 h 1 us')":                "22023",
		"pin('k'::bytea, 'o', '1 year -359 days')":         "22023",
		"pin('{a}'::bytea[], 'o', '2 days')":               "22023",
		"pin('{}'::bytea[], 'o', '0')":                     "22023",
		"pin('k'::bytea, repeat('o', 1001)::bytea, '1 s')": "22023",
		"unpin(NULL, 'o')":                                 "22004",
		"unpin('k', NULL)":                                 "22004",
		"renew(NULL)":                                      "22004",
		"renew('o', NULL)":                                 "22004",
		"renew('o', '0')":                                  "22023",
		"renew('o', '25 h')":                               "22023",
	} {
		_, err := conn.Exec(t.Context(), "SELECT "+pgdb.Ident(schema)+"."+expr)
		if pgdb.Code(err) != want {
			t.Errorf("%s: got error %v, want SQLSTATE %s", expr, err, want)
		}
	}
	for _, expr := range []string{
		"pin('k'::bytea, 'o', '1 day')", "pin(key => 'k', owner => 'o', ttl => '1 s')",
		"pin(keys => '{{a},{b}}', owner => 'o', ttl => '1 s')", "renew(owner => 'o')",
	} {
		pgtest.Exec(t, conn, "SELECT "+pgdb.Ident(schema)+"."+expr)
	}
	equal(t, countPins(t, conn), 3)
}

func TestUnpin(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	unpin := func(key, owner string) bool {
		was, err := call[bool](t.Context(), conn, "unpin($1, $2)", []byte(key), []byte(owner))
		check(t, err)
		return was
	}
	pinKey(t, conn, "a", "me", time.Minute)
	pinKey(t, conn, "a", "you", time.Minute)
	agedPin(t, conn, "old", "me", past)
	equal(t, unpin("a", "nobody"), false)
	equal(t, unpin("b", "me"), false)
	equal(t, unpin("a", "me"), true)
	equal(t, unpin("a", "me"), false)
	equal(t, unpin("old", "me"), true)
	equal(t, countPins(t, conn), 1)
}

// A pin that has expired by its commit raises a serialization failure, which
// leaves nothing. What counts is the row as it is then.
func TestPinExpiredAtCommit(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	observer := connect(t, url, patient)
	putBlob(t, conn, "a")
	const brief = time.Millisecond
	for _, c := range []struct {
		name string
		then string // after the pin has expired
		want string
	}{
		{"pinned briefly", "SELECT 1", pgdb.SerializationFailure},
		{"pinned again", "SELECT %s.pin('a'::bytea, 'me', '1 min')", ""},
		{"pinned again as briefly", "SELECT %s.pin('a'::bytea, 'me', '1 us')", pgdb.SerializationFailure},
		{"unpinned", "SELECT %s.unpin('a', 'me')", ""},
		{"renewed too late", "SELECT %s.renew('me')", pgdb.SerializationFailure},
		{"checked before the commit", "SET CONSTRAINTS ALL IMMEDIATE", pgdb.SerializationFailure},
	} {
		err := conn.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
			pinKey(t, tx, "a", "me", brief)
			pass(t, observer, expiryOf(t, tx, "a", "me"))
			sql := c.then
			if strings.Contains(sql, "%s") {
				sql = fmt.Sprintf(sql, pgdb.Ident(schema))
			}
			_, err := tx.Exec(ctx, sql)
			return err
		})
		if pgdb.Code(err) != c.want || (err != nil) != (c.want != "") {
			t.Errorf("%s: got error %v, want SQLSTATE %q", c.name, err, c.want)
		}
		pgtest.Exec(t, conn, "DELETE FROM "+table)
	}
}

// Under REPEATABLE READ and SERIALIZABLE a row that was deleted after the
// transaction's snapshot is a failure that may be tried again; one that is younger
// isn't there. The next try finds out.
func TestPinIsolation(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	writer := connect(t, url, patient)
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, many := range []bool{false, true} {
			pin := func(q pgdb.Querier, key string) (bool, error) {
				if !many {
					return call[bool](t.Context(), q, pinOne, []byte(key), []byte("me"), time.Minute)
				}
				there, err := call[[]bool](t.Context(), q, pinAll, [][]byte{[]byte(key)}, []byte("me"), time.Minute)
				return err == nil && there[0], err
			}
			putBlob(t, conn, "deleted", "kept")
			tx, err := writer.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			check(t, err)
			equal(t, hasBlob(t, tx, "deleted"), true)
			inTx(t, conn, func(ctx context.Context, sweep pgx.Tx) error {
				verdict, err := fleet.Arbitrate(ctx, sweep, schema, "deleted", refs{})
				check(t, err)
				equal(t, verdict, fleet.Verdict{Decision: fleet.Dead})
				pgtest.Exec(t, sweep, `DELETE FROM public."Blobs" WHERE "Id" = 'deleted'`)
				return nil
			})
			putBlob(t, conn, "new")
			for key, want := range map[string]bool{"kept": true, "absent": false, "new": level == pgx.ReadCommitted} {
				there, err := pin(tx, key)
				check(t, err)
				equal(t, there, want)
			}
			there, err := pin(tx, "deleted")
			equal(t, there, false)
			if level != pgx.ReadCommitted {
				code(t, err, pgdb.SerializationFailure)
				check(t, tx.Rollback(t.Context()))
				there, err = pin(writer, "deleted")
				equal(t, there, false)
			} else {
				check(t, tx.Commit(t.Context()))
			}
			check(t, err)
			pgtest.Exec(t, conn, `DELETE FROM "Blobs"; DELETE FROM `+table)
		}
	}
}

// The application's role needs rights on the schema and on the functions, and on
// nothing else. What stands in its own search_path has no effect.
func TestPinRights(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	putBlob(t, conn, "a")
	role, roleURL := pgtest.Role(t, url, "")
	app := connect(t, roleURL, patient)
	expressions := []string{
		"pin('a'::bytea, 'me', '1 min')", "pin('{a}'::bytea[], 'me', '1 min')", "renew('me')", "unpin('a', 'me')",
	}
	forbidden := func() {
		for _, expr := range expressions {
			_, err := app.Exec(t.Context(), "SELECT "+pgdb.Ident(schema)+"."+expr)
			code(t, err, pgdb.InsufficientPrivilege)
		}
	}
	forbidden()
	grants := fleet.PinGrants(schema, role)
	pgtest.Exec(t, conn, grants[0])
	forbidden()
	for _, grant := range grants[1:] {
		pgtest.Exec(t, conn, grant)
	}
	pgtest.Exec(t, app, `CREATE TEMP TABLE gc_pins (key bytea, owner bytea, expiry bigint);
		CREATE FUNCTION pg_temp.octet_length(bytea) RETURNS int LANGUAGE sql AS 'SELECT 1/0';
		SET search_path = pg_temp, pg_catalog`)
	for _, expr := range expressions {
		pgtest.Exec(t, app, "SELECT "+pgdb.Ident(schema)+"."+expr)
	}
	pgtest.Exec(t, app, "BEGIN; SELECT "+pgdb.Ident(schema)+".pin('a'::bytea, 'me', '1 min'); SET CONSTRAINTS ALL IMMEDIATE; COMMIT")
	for _, sql := range []string{
		"SELECT FROM " + table, "DELETE FROM " + table, `SELECT FROM public."Blobs"`,
		"SELECT " + pgdb.Ident(schema) + ".pin_text('a')",
	} {
		_, err := app.Exec(t.Context(), sql)
		code(t, err, pgdb.InsufficientPrivilege)
	}
	// Another tier replaces a function, and keeps what was granted on it.
	check(t, fleet.EnsureFunctions(t.Context(), conn, schema, nil))
	equal(t, ask[bool](t, app, "SELECT "+pgdb.Ident(schema)+".pin('a'::bytea, 'me', '1 min')"), false)
}

// Eight agents that make the functions at once make them once; whoever comes
// later writes nothing, and needs no right to.
func TestEnsureFunctionsRaced(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t)
	conns := make([]*pgdb.Conn, 8)
	for i := range conns {
		conns[i] = connect(t, url, pgdb.Timeouts{Lock: 10 * time.Millisecond})
	}
	pgtest.Exec(t, conns[0], `CREATE TABLE "Blobs" ("Id" text PRIMARY KEY)`)
	errs := make([]error, len(conns))
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for i, conn := range conns {
		wg.Go(func() {
			<-begin
			if errs[i] = fleet.EnsureSchema(t.Context(), conn, schema); errs[i] == nil {
				errs[i] = fleet.EnsureFunctions(t.Context(), conn, schema, []fleet.PinTier{tier})
			}
		})
	}
	close(begin)
	wg.Wait()
	check(t, errors.Join(errs...))
	equal(t, relations(t, conns[0]), []string{"gc_pins", "gc_pins_pkey"})

	made := versions(t, conns[0])
	equal(t, len(made), 7)
	_, roleURL := pgtest.Role(t, url, "")
	powerless := connect(t, roleURL, patient)
	check(t, fleet.EnsureSchema(t.Context(), powerless, schema))
	check(t, fleet.EnsureFunctions(t.Context(), powerless, schema, []fleet.PinTier{tier}))
	equal(t, versions(t, conns[0]), made)
}

// Only what differs is made anew.
func TestEnsureFunctionsReplaces(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	made := versions(t, conn)
	for _, change := range []struct{ sql, name string }{
		{"ALTER FUNCTION %s.unpin(bytea, bytea) SECURITY INVOKER", "unpin(bytea, bytea)"},
		{"ALTER FUNCTION %s.unpin(bytea, bytea) RESET search_path", "unpin(bytea, bytea)"},
		{"ALTER FUNCTION %s.pin(bytea, bytea, interval) STABLE", "pin(bytea, bytea, interval)"},
		{"CREATE OR REPLACE FUNCTION %s.renew(owner bytea, ttl interval DEFAULT '1 h') RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'", "renew(bytea, interval)"},
		{"DROP FUNCTION %s.pin_text", "pin_text(bytea)"},
		{"DROP TRIGGER gc_pins_expired ON %s.gc_pins", "gc_pins_expired"},
		{"ALTER TABLE %s.gc_pins DISABLE TRIGGER gc_pins_expired", "gc_pins_expired"},
		{"ALTER TABLE %s.gc_pins ENABLE TRIGGER gc_pins_expired", "gc_pins_expired"},
		{`DROP TRIGGER gc_pins_expired ON %[1]s.gc_pins; CREATE CONSTRAINT TRIGGER gc_pins_expired AFTER INSERT ON %[1]s.gc_pins
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION %[1]s.pin_expired()`, "gc_pins_expired"},
		{`DROP TRIGGER gc_pins_expired ON %[1]s.gc_pins; CREATE CONSTRAINT TRIGGER gc_pins_expired AFTER INSERT OR UPDATE ON %[1]s.gc_pins
			DEFERRABLE INITIALLY IMMEDIATE FOR EACH ROW EXECUTE FUNCTION %[1]s.pin_expired()`, "gc_pins_expired"},
		{`DROP TRIGGER gc_pins_expired ON %[1]s.gc_pins; CREATE CONSTRAINT TRIGGER gc_pins_expired AFTER INSERT OR UPDATE ON %[1]s.gc_pins
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()`, "gc_pins_expired"},
	} {
		pgtest.Exec(t, conn, fmt.Sprintf(change.sql, pgdb.Ident(schema)))
		check(t, fleet.EnsureFunctions(t.Context(), conn, schema, []fleet.PinTier{tier}))
		now := versions(t, conn)
		for name := range made {
			if (now[name] != made[name]) != (name == change.name) {
				t.Errorf("after %s: %s was at %q and is at %q", change.sql, name, made[name], now[name])
			}
		}
		made = now
	}
	pinKey(t, conn, "a", "me", time.Minute)
}

// A function of that name that can't be replaced is named, and nothing is made.
func TestEnsureFunctionsForeign(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ sql, want string }{
		"returns":   {"FUNCTION %s.renew(owner bytea, ttl interval) RETURNS text LANGUAGE sql AS 'SELECT 1::text'", `"renew"(bytea, interval)`},
		"arguments": {"FUNCTION %s.pin(k bytea, who bytea, ttl interval) RETURNS boolean LANGUAGE sql AS 'SELECT true'", `"pin"(bytea, bytea, interval)`},
		"defaults":  {"FUNCTION %s.unpin(key bytea, owner bytea DEFAULT '') RETURNS boolean LANGUAGE sql AS 'SELECT true'", `"unpin"(bytea, bytea)`},
		"procedure": {"PROCEDURE %s.unpin(key bytea, owner bytea) LANGUAGE sql AS 'SELECT true'", `"unpin"(bytea, bytea)`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := connect(t, pgtest.Database(t), patient)
			check(t, fleet.EnsureSchema(t.Context(), conn, schema))
			pgtest.Exec(t, conn, "CREATE "+fmt.Sprintf(c.sql, pgdb.Ident(schema)))
			_, checked := fleet.CheckFunctions(t.Context(), conn, schema, nil)
			for _, err := range []error{checked, fleet.EnsureFunctions(t.Context(), conn, schema, nil)} {
				if !errors.Is(err, fleet.ErrForeignFunction) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "drop it") {
					t.Errorf("got error %v, want one that names the function and says what to do", err)
				}
			}
			equal(t, len(versions(t, conn)), 1)
		})
	}
}

// Nobody's view runs with the agent's rights, whoever put it where the table was.
func TestPinRefusesView(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	pinKey(t, conn, "before", "me", time.Minute) // its plan is made
	pgtest.Exec(t, conn, `CREATE TABLE ran (what text);
		CREATE FUNCTION trap(id text) RETURNS text LANGUAGE sql AS $$ INSERT INTO public.ran VALUES (id) RETURNING what $$;
		ALTER TABLE "Blobs" RENAME TO stolen; INSERT INTO stolen VALUES ('a');
		CREATE VIEW "Blobs" AS SELECT trap("Id") AS "Id", data FROM stolen`)
	_, one := call[bool](t.Context(), conn, pinOne, []byte("a"), []byte("me"), time.Minute)
	_, all := call[[]bool](t.Context(), conn, pinAll, [][]byte{[]byte("a")}, []byte("me"), time.Minute)
	for _, err := range []error{one, all} {
		code(t, err, "42809")
		if !strings.Contains(fmt.Sprint(err), `"public"."Blobs" isn't a table any more`) {
			t.Errorf("got error %v, want one that names the table", err)
		}
	}
	equal(t, ask[int](t, conn, "SELECT count(*) FROM ran"), 0)
}

// A policy of the table's owner isn't run either, and hides no blob.
func TestPinRefusesPolicy(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	role, roleURL := pgtest.Role(t, url, "")
	putBlob(t, conn, "a")
	pgtest.Exec(t, conn, `GRANT SELECT, UPDATE ON "Blobs" TO `+pgdb.Ident(role)+`; GRANT CREATE ON DATABASE `+
		pgdb.Ident(ask[string](t, conn, "SELECT current_database()"))+` TO `+pgdb.Ident(role)+`;
		ALTER TABLE "Blobs" ENABLE ROW LEVEL SECURITY; CREATE POLICY none ON "Blobs" USING (false)`)
	agent := connect(t, roleURL, patient)
	check(t, fleet.EnsureSchema(t.Context(), agent, "other"))
	check(t, fleet.EnsureFunctions(t.Context(), agent, "other", []fleet.PinTier{tier}))
	pgtest.Exec(t, agent, "SET row_security = on")
	_, err := agent.Exec(t.Context(), "SELECT other.pin('a'::bytea, 'me', '1 min')")
	code(t, err, "42501")
}

// The trigger fires where the session plays a replica, too.
func TestPinExpiredOnReplica(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	pgtest.Exec(t, conn, "SET session_replication_role = replica")
	_, err := conn.Exec(t.Context(), "INSERT INTO "+table+" VALUES ('a', 'me', 1)")
	code(t, err, pgdb.SerializationFailure)
}

// What is printed for people to run makes what EnsureFunctions makes, and can be
// run again; names may be anything.
func TestFunctionsDDL(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t), patient)
	const odd = `$gc$ 'o"\{look}$1`
	pgtest.Exec(t, conn, "SET standard_conforming_strings = off; CREATE TABLE "+pgdb.Ident("public", odd)+" ("+pgdb.Ident(odd)+" text PRIMARY KEY)")
	tiers := []fleet.PinTier{{Table: pgdb.Ident("public", odd), KeyColumn: odd, Kind: blob.KindText}}
	check(t, fleet.EnsureSchema(t.Context(), conn, odd))
	for range 2 {
		for _, statement := range fleet.FunctionsDDL(odd, tiers) {
			pgtest.Exec(t, conn, statement)
		}
	}
	made := versions(t, conn)
	check(t, fleet.EnsureFunctions(t.Context(), conn, odd, tiers))
	equal(t, versions(t, conn), made)
	check(t, fleet.EnsureSchema(t.Context(), conn, odd))
	pgtest.Exec(t, conn, "INSERT INTO "+pgdb.Ident("public", odd)+" VALUES ('a')")
	equal(t, ask[bool](t, conn, "SELECT "+pgdb.Ident(odd)+".pin('a'::bytea, 'me', '1 min')"), true)
	equal(t, ask[int](t, conn, "SELECT "+pgdb.Ident(odd)+".renew('me')"), 1)
}

// versions tells one making of the functions and the trigger from the next.
func versions(t *testing.T, q pgdb.Querier) map[string]string {
	t.Helper()
	rows, err := q.Query(t.Context(), `
		SELECT p.proname || '(' || oidvectortypes(p.proargtypes) || ')', p.xmin || ' ' || p.ctid
		FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname NOT IN ('pg_catalog', 'information_schema')
		UNION ALL SELECT tgname, xmin || ' ' || ctid FROM pg_trigger WHERE NOT tgisinternal`)
	check(t, err)
	found := map[string]string{}
	var name, version string
	_, err = pgx.ForEachRow(rows, []any{&name, &version}, func() error {
		found[name] = version
		return nil
	})
	check(t, err)
	return found
}
