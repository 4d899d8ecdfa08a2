package fleet_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

func entry(key blob.Key, data string) fleet.Entry {
	return fleet.Entry{PinTier: tier, Key: key, Columns: map[string]any{"data": data}}
}

func begin(t *testing.T, conn *pgdb.Conn) *fleet.JointTx {
	t.Helper()
	jt, err := fleet.BeginJointTx(t.Context(), conn, schema)
	check(t, err)
	return jt
}

func put(t *testing.T, jt *fleet.JointTx, e fleet.Entry, owner fleet.Owner, ttl time.Duration) bool {
	t.Helper()
	inserted, err := fleet.JointPut(t.Context(), jt, e, owner, ttl)
	check(t, err)
	return inserted
}

func dataOf(t *testing.T, q pgdb.Querier, key blob.Key) string {
	t.Helper()
	return ask[string](t, q, `SELECT data FROM public."Blobs" WHERE "Id" = $1`, string(key))
}

// Entries and pins appear together, at the commit and not before it. The first
// writer's entry stays.
func TestJointPut(t *testing.T) {
	t.Parallel()
	url, conn := newPool(t)
	other := connect(t, url, patient)
	putBlob(t, conn, "there")
	jt := begin(t, conn)
	before := hostNow(t, other)
	equal(t, put(t, jt, entry("new", "mine"), "me", time.Minute), true)
	equal(t, put(t, jt, entry("there", "mine"), "me", time.Hour), false)
	equal(t, put(t, jt, entry("new", "mine again"), "me", time.Minute), false)
	equal(t, hasBlob(t, other, "new"), false)
	equal(t, countPins(t, other), 0)
	after := hostNow(t, other)
	check(t, fleet.PinCommit(t.Context(), jt))

	equal(t, dataOf(t, other, "new"), "mine")
	equal(t, dataOf(t, other, "there"), "data")
	equal(t, countPins(t, other), 2)
	lives(t, expiryOf(t, other, "new", "me"), before, after, time.Minute)
	lives(t, expiryOf(t, other, "there", "me"), before, after, time.Hour)
}

// A second put by the same owner renews its pin and never shortens it; another
// owner's put is another pin.
func TestJointPutRenews(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	var last blob.Instant
	for _, c := range []struct {
		owner fleet.Owner
		ttl   time.Duration
		pins  int
	}{{"me", time.Minute, 1}, {"me", time.Hour, 1}, {"me", time.Second, 1}, {"you", time.Minute, 2}} {
		jt := begin(t, conn)
		put(t, jt, entry("a", string(c.owner)), c.owner, c.ttl)
		check(t, fleet.PinCommit(t.Context(), jt))
		equal(t, countPins(t, conn), c.pins)
		expiry := expiryOf(t, conn, "a", "me")
		if expiry < last || (expiry == last) != (c.ttl == time.Second || c.owner == "you") {
			t.Errorf("after a put for %s by %s the pin expires at %d, before at %d", c.ttl, c.owner, expiry, last)
		}
		last = expiry
	}
	equal(t, dataOf(t, conn, "a"), "me")
}

// Whatever ended the transaction, it can't be used any more, and leaves the
// connection fit for the next one.
func TestJointTxEnds(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	ended := func(jt *fleet.JointTx) {
		t.Helper()
		if _, err := fleet.JointPut(t.Context(), jt, entry("late", ""), "me", time.Minute); !errors.Is(err, fleet.ErrJointDone) {
			t.Errorf("JointPut: got error %v, want that the transaction has ended", err)
		}
		if err := fleet.PinCommit(t.Context(), jt); !errors.Is(err, fleet.ErrJointDone) {
			t.Errorf("PinCommit: got error %v, want that the transaction has ended", err)
		}
		check(t, jt.Rollback(t.Context()))
		equal(t, conn.PgConn().TxStatus(), 'I')
	}
	jt := begin(t, conn)
	check(t, fleet.PinCommit(t.Context(), jt))
	ended(jt)
	jt = begin(t, conn)
	put(t, jt, entry("a", ""), "me", time.Minute)
	check(t, jt.Rollback(t.Context()))
	ended(jt)
	jt = begin(t, conn)
	put(t, jt, entry("a", ""), "me", time.Minute)
	if _, err := fleet.JointPut(t.Context(), jt, entry("\xff", ""), "me", time.Minute); err == nil {
		t.Error("a key that isn't text was put")
	}
	ended(jt)
	jt = begin(t, conn)
	put(t, jt, entry("a", ""), "me", time.Millisecond)
	pass(t, conn, expiryOf(t, conn, "a", "me"))
	code(t, fleet.PinCommit(t.Context(), jt), pgdb.SerializationFailure)
	ended(jt)
	equal(t, hasBlob(t, conn, "a"), false)
	equal(t, countPins(t, conn), 0)
}

// A put that can't be is refused, and nothing of its transaction is left.
func TestJointPutRefused(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	pgtest.Exec(t, conn, `ALTER TABLE "Blobs" ADD UNIQUE (data); INSERT INTO "Blobs" VALUES ('other', 'taken');
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON `+table+` FOR EACH ROW WHEN (NEW.owner = 'unwanted') EXECUTE FUNCTION refuse();
		CREATE CONSTRAINT TRIGGER later AFTER INSERT ON "Blobs" DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW WHEN (NEW.data = 'unwanted later') EXECUTE FUNCTION refuse()`)
	missing := entry("a", "")
	missing.Table = "public.missing"
	twice := entry("a", "")
	twice.Columns["Id"] = "b"
	unknown := entry("a", "")
	unknown.Columns["unknown"] = 1
	for name, c := range map[string]struct {
		entry fleet.Entry
		owner fleet.Owner
		ttl   time.Duration
	}{
		"no ttl":                {entry("a", ""), "me", 0},
		"ttl above the ceiling": {entry("a", ""), "me", fleet.MaxTTL + 1},
		"no key of the column":  {entry("\x00", ""), "me", time.Minute},
		"key column repeated":   {twice, "me", time.Minute},
		"unknown column":        {unknown, "me", time.Minute},
		"missing table":         {missing, "me", time.Minute},
		"another unique column": {entry("a", "taken"), "me", time.Minute},
		"pin refused":           {entry("a", ""), "unwanted", time.Minute},
		"refused at the commit": {entry("a", "unwanted later"), "me", time.Minute},
	} {
		jt := begin(t, conn)
		put(t, jt, entry("first", "first"), "me", time.Minute)
		_, err := fleet.JointPut(t.Context(), jt, c.entry, c.owner, c.ttl)
		if err == nil {
			err = fleet.PinCommit(t.Context(), jt)
		}
		if err == nil {
			t.Errorf("%s: it was put", name)
		}
		equal(t, hasBlob(t, conn, "first"), false)
		equal(t, countPins(t, conn), 0)
	}
}

// A failure before or after any statement of the joint transaction leaves
// nothing: no entry, no pin. Only when the commit has been carried out are both
// there, whether the client was told or not.
func TestJointTxFailsAnywhere(t *testing.T) {
	t.Parallel()
	url, observer := newPool(t)
	cancelled := func(ctx context.Context, _ *pgdb.Conn) context.Context {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		return ctx
	}
	terminated := func(ctx context.Context, conn *pgdb.Conn) context.Context {
		terminate(t, observer, conn)
		return ctx
	}
	for _, way := range []struct {
		name   string
		before bool
		fail   func(context.Context, *pgdb.Conn) context.Context
	}{
		{"cancelled before", true, cancelled},
		{"terminated before", true, terminated},
		{"terminated after", false, terminated},
	} {
		k := 1
		for reached := true; reached; k++ {
			var done bool
			var err error
			reached, done, err = jointFailing(t, url, k, way.before, way.fail)
			if (err == nil) != done {
				t.Errorf("%s statement %d: got error %v", way.name, k, err)
			}
			left := ask[int](t, observer, `SELECT count(*) FROM "Blobs"`) + countPins(t, observer)
			if want := map[bool]int{true: 4}[done]; left != want {
				t.Errorf("%s statement %d: %d rows are left, want %d", way.name, k, left, want)
			}
			pgtest.Exec(t, observer, `DELETE FROM "Blobs"; DELETE FROM `+table)
		}
		equal(t, k-2, 9) // begin, its settings, three a put, commit
	}
}

// jointFailing runs a joint transaction that fails at its statement k, if there
// are so many, and says whether all should be there.
func jointFailing(t *testing.T, url string, k int, before bool, fail func(context.Context, *pgdb.Conn) context.Context) (reached, done bool, err error) {
	t.Helper()
	committed := false
	var conn *pgdb.Conn
	conn = connectTraced(t, url, func(ctx context.Context, n int, isBefore bool, sql string) context.Context {
		if n != k || isBefore != before {
			return ctx
		}
		reached, committed = true, sql == "commit" && !before
		return fail(ctx, conn)
	})
	err = joint(t.Context(), conn)
	return reached, committed || !reached, err
}

func joint(ctx context.Context, conn *pgdb.Conn) error {
	jt, err := fleet.BeginJointTx(ctx, conn, schema)
	if err != nil {
		return err
	}
	for _, key := range []blob.Key{"a", "b"} {
		if _, err := fleet.JointPut(ctx, jt, entry(key, ""), "me", time.Minute); err != nil {
			return err
		}
	}
	return fleet.PinCommit(ctx, jt)
}

// Two writers of one entry: the second waits for the first, and its entry counts
// only if the first one's doesn't.
func TestJointPutRaced(t *testing.T) {
	t.Parallel()
	url, observer := newPool(t)
	first, second := connect(t, url, patient), connect(t, url, patient)
	for _, commits := range []bool{true, false} {
		jt := begin(t, first)
		put(t, jt, entry("a", "first"), "first", time.Minute)
		later := begin(t, second)
		done := start(func() (bool, error) {
			return fleet.JointPut(t.Context(), later, entry("a", "second"), "second", time.Minute)
		})
		equal(t, untilBlocked(t, observer, second, done), true)
		if commits {
			check(t, fleet.PinCommit(t.Context(), jt))
		} else {
			check(t, jt.Rollback(t.Context()))
		}
		told(t, <-done, !commits)
		check(t, fleet.PinCommit(t.Context(), later))
		equal(t, dataOf(t, observer, "a"), map[bool]string{true: "first", false: "second"}[commits])
		equal(t, countPins(t, observer), map[bool]int{true: 2, false: 1}[commits])
		pgtest.Exec(t, observer, `DELETE FROM "Blobs"; DELETE FROM `+table)
	}
}

// Entries whose keys are of other kinds.
func TestJointPutKinds(t *testing.T) {
	t.Parallel()
	_, conn := newPool(t)
	for column, c := range map[string]struct {
		kind blob.Kind
		key  blob.Key
		want string
	}{
		"bytea": {blob.KindBytes, "\x00\xff", `\x00ff`},
		"uuid":  {blob.KindUUID, "0f8fad5b-d9cb-469f-a165-70867728950e", "0f8fad5b-d9cb-469f-a165-70867728950e"},
		"int2":  {blob.KindInt, "-7", "-7"},
		"tiny":  {blob.KindInt, "7", "7"},
	} {
		pgtest.Exec(t, conn, `DROP TABLE IF EXISTS odd; DROP DOMAIN IF EXISTS tiny; CREATE DOMAIN tiny AS int2;
			CREATE TABLE odd (k `+column+` PRIMARY KEY, "Né e" int[])`)
		jt := begin(t, conn)
		e := fleet.Entry{
			PinTier: fleet.PinTier{Table: "public.odd", KeyColumn: "k", Kind: c.kind},
			Key:     c.key, Columns: map[string]any{"Né e": []int{1, 2}},
		}
		equal(t, put(t, jt, e, "me", time.Minute), true)
		equal(t, put(t, jt, e, "me", time.Minute), false)
		check(t, fleet.PinCommit(t.Context(), jt))
		equal(t, ask[string](t, conn, `SELECT k::text || ' ' || "Né e"::text FROM odd`), c.want+" {1,2}")
	}
}
