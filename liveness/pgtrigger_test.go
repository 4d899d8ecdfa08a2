package liveness_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

// triggerPool is a pool whose guard triggers are about to be made.
func triggerPool(kind blob.Kind, column string) pgPool {
	return pgPool{Options: liveness.Options{Kind: kind, Pool: "p", Schema: "gc_agent", AnyGuard: true}, table: "blobs", column: column}
}

// enforced is what the pool is once they are there.
func (p pgPool) enforced() pgPool {
	p.AnyGuard, p.Enforce = false, true
	return p
}

// install makes the trigger of each source.
func (w *pgWorld) install(t testing.TB, pool pgPool, deferrable bool, sources ...liveness.Source) {
	t.Helper()
	for _, plan := range w.mustResolve(t, pool, sources...).TriggerPlans(deferrable) {
		if plan.Why != "" {
			t.Fatalf("source %s: %s", plan.Source, plan.Why)
		}
		err := w.agent.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error { return plan.Install(ctx, tx) })
		if err != nil {
			t.Fatal(err)
		}
	}
}

// write runs a statement of the application's and returns its SQLSTATE.
func (w *pgWorld) write(t testing.TB, sql string) string {
	t.Helper()
	_, err := w.app.Exec(t.Context(), sql)
	if err != nil && pgdb.Code(err) == "" {
		t.Fatalf("%s: %v", sql, err)
	}
	return pgdb.Code(err)
}

const (
	gone     = pgdb.ForeignKeyViolation
	misspelt = "23514"
)

// Every format and type is read as the source reads it; what names no key isn't
// the trigger's business.
func TestTriggerReadsValues(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kind         blob.Kind
		blobs        string // the type of the key column
		key          string
		refs, format string
		held, absent []string
		ignored      []string
		respelt      []string
	}{
		"bytes":  {blob.KindBytes, "bytea", `'\xabcd'`, "bytea", "", []string{`'\xabcd'`}, []string{`'\xabce'`, `''`}, nil, nil},
		"hex":    {blob.KindBytes, "bytea", `'\xabcd'`, "text", "sha256:{hex}", []string{`'sha256:abcd'`}, []string{`'sha256:abce'`}, []string{`'abcd'`, `'sha256:xy'`, `''`}, []string{`'sha256:ABcd'`}},
		"base64": {blob.KindBytes, "bytea", `'\xabcd'`, "varchar", "{base64}", []string{`'q80='`}, []string{`'q84='`}, []string{`'?'`}, []string{`'q80'`}},
		"text":   {blob.KindText, "text", `'a''b'`, "text", "", []string{`'a''b'`}, []string{`'a'`, `''`}, nil, nil},
		"char":   {blob.KindText, "text", `'ab'`, "char(5)", "", []string{`'ab'`}, []string{`'a'`}, nil, nil},
		"url":    {blob.KindText, "text", `'ü'`, "text", "/v1/{text}", []string{`'/v1/ü'`}, []string{`'/v1/u'`}, []string{`'ü'`}, nil},
		"uuid":   {blob.KindUUID, "uuid", `'0000000a-0000-0000-0000-000000000001'`, "uuid", "", []string{`'0000000A-0000-0000-0000-000000000001'`}, []string{`'0000000a-0000-0000-0000-000000000002'`}, nil, nil},
		"urn":    {blob.KindUUID, "uuid", `'0000000a-0000-0000-0000-000000000001'`, "text", "urn:{uuid}", []string{`'urn:0000000a-0000-0000-0000-000000000001'`}, []string{`'urn:0000000a-0000-0000-0000-000000000002'`}, []string{`'urn:1'`}, []string{`'urn:0000000A-0000-0000-0000-000000000001'`}},
		"int":    {blob.KindInt, "smallint", `7`, "bigint", "", []string{`7`}, []string{`8`, `9000000000`}, nil, nil},
		"oid":    {blob.KindInt, "bigint", `7`, "text", "urn:oid:{int}", []string{`'urn:oid:7'`}, []string{`'urn:oid:8'`}, []string{`'urn:oid:x'`, `'urn:oid:99999999999999999999'`}, []string{`'urn:oid:007'`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newPGWorld(t, fmt.Sprintf(`CREATE TABLE blobs (key %s PRIMARY KEY); INSERT INTO blobs VALUES (%s); CREATE TABLE r (key %s, n int)`, c.blobs, c.key, c.refs))
			s := pgSource("r", "key", c.format)
			w.install(t, triggerPool(c.kind, "key"), false, s)
			wantGuardOf(t, w, triggerPool(c.kind, "key").enforced(), s, liveness.Trigger)
			for code, values := range map[string][]string{"": append(append([]string{"NULL"}, c.held...), c.ignored...), gone: c.absent, misspelt: c.respelt} {
				for _, v := range values {
					if got := w.write(t, "INSERT INTO r VALUES ("+v+")"); got != code {
						t.Errorf("insert %s: %q, want %q", v, got, code)
					}
					pgtest.Exec(t, w.app, "INSERT INTO r VALUES (NULL)")
					if got := w.write(t, "WITH one AS (SELECT ctid FROM r WHERE key IS NULL LIMIT 1) UPDATE r SET key = "+v+" FROM one WHERE r.ctid = one.ctid"); got != code {
						t.Errorf("update to %s: %q, want %q", v, got, code)
					}
				}
			}
			if got := w.write(t, "UPDATE r SET n = 1"); got != "" {
				t.Errorf("update of another column: %s", got)
			}
		})
	}
}

// wantGuardOf resolves the one source, which nothing is wrong with, and checks its
// guard.
func wantGuardOf(t *testing.T, w *pgWorld, pool pgPool, s liveness.Source, want liveness.Guard) {
	t.Helper()
	p := w.mustResolve(t, pool, s)
	if info := p.Sources()[0]; info.Guard != want || info.LeavesOpen == "" || info.WouldClose == "" {
		t.Errorf("%+v, want guard %s", info, want)
	}
}

// A value that a look-up by its key doesn't find is refused, until an index by which
// every spelling is found makes the trigger stricter than it has to be.
func TestTriggerSpellings(t *testing.T) {
	t.Parallel()
	for _, deferrable := range []bool{false, true} {
		w := newPGWorld(t, `CREATE TABLE blobs (id bytea PRIMARY KEY); INSERT INTO blobs VALUES ('\xab'); CREATE TABLE r (id int, b text, gone boolean); CREATE INDEX ON r (b);
			INSERT INTO r VALUES (1, 'AB', false), (2, 'ab', true), (3, 'zz', false)`)
		pool, s := triggerPool(blob.KindBytes, "id"), filtered(pgSource("r", "b", "{hex}"), "gone IS NOT TRUE")
		w.install(t, pool, deferrable, s)
		if open := w.mustResolve(t, pool.enforced(), s).Sources()[0].LeavesOpen; strings.Contains(open, "spelling") {
			t.Errorf("it leaves open %s", open)
		}
		before := ""
		if deferrable {
			before = misspelt // it can't rely on the version before
		}
		for _, c := range []struct{ sql, want string }{
			{`UPDATE r SET id = 1 WHERE b = 'AB'`, before},
			{`UPDATE r SET b = 'aB' WHERE id = 1`, misspelt},
			{`UPDATE r SET b = 'Ab' WHERE id = 2`, ""},
			{`UPDATE r SET gone = false WHERE id = 2`, misspelt},
			{`UPDATE r SET b = 'aB' WHERE id = 3`, misspelt},
			{`INSERT INTO r VALUES (4, 'aB', true)`, ""},
			{`INSERT INTO r VALUES (5, 'CD')`, misspelt},
		} {
			if got := w.write(t, c.sql); got != c.want {
				t.Errorf("deferrable %t: %s: %q, want %q", deferrable, c.sql, got, c.want)
			}
		}
		if got, want := w.write(t, `BEGIN; INSERT INTO r VALUES (6, 'aB'); UPDATE r SET b = 'ab' WHERE id = 6; COMMIT`), misspelt; deferrable == (got == want) {
			t.Errorf("deferrable %t, put right in the transaction: %q", deferrable, got)
		}
		pgtest.Exec(t, w.app, "ROLLBACK; DELETE FROM r")
		_, err := w.app.Exec(t.Context(), `INSERT INTO r VALUES (7, 'AB')`)
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) {
			t.Fatal(err)
		}
		const index = `CREATE INDEX CONCURRENTLY ON "public"."r" (lower("b"))`
		if want := "Write it as {hex}, in lower case; or, so that every spelling is found, run " + index + " and install the trigger again."; pgErr.Hint != want || pgErr.ConstraintName == "" {
			t.Errorf("hint %q, want %q", pgErr.Hint, want)
		}
		pgtest.Exec(t, w.app, index)
		wantGuardOf(t, w, pool.enforced(), s, liveness.Trigger)
		if w.mustResolve(t, pool, s).TriggerPlans(deferrable)[0].There {
			t.Error("nothing is to be installed, though the trigger is too strict")
		}
		w.install(t, pool, deferrable, s)
		wantGuardOf(t, w, pool.enforced(), s, liveness.Trigger)
		if got := w.write(t, `INSERT INTO r VALUES (7, 'AB')`); got != "" {
			t.Errorf("with the index: %q", got)
		}
		pgtest.Exec(t, w.app, "DROP INDEX r_lower_idx")
		if _, found := w.resolve(t, pool.enforced(), guarded(s, liveness.Trigger)); len(found) != 1 || !strings.Contains(found[0].Message, "its function isn't the one") {
			t.Errorf("without the index again: %v", found)
		}
	}
}

// The error names what refers and what it says, shortened, in words and in the
// fields that drivers read.
func TestTriggerError(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id text PRIMARY KEY); CREATE TABLE "R 's" ("b'" text)`)
	w.install(t, triggerPool(blob.KindText, "id"), false, pgSource("R 's", "b'", ""))
	_, err := w.app.Exec(t.Context(), `INSERT INTO "R 's" VALUES ($1)`, strings.Repeat("x", 100))
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		t.Fatal(err)
	}
	want := pgconn.PgError{
		Code: gone, Message: "public.R 's.b' refers to a blob that is not there: " + strings.Repeat("x", 64),
		SchemaName: "public", TableName: "R 's", ColumnName: "b'", ConstraintName: liveness.TriggerName("gc_agent", "R 's"),
	}
	got := pgconn.PgError{Code: pgErr.Code, Message: pgErr.Message, SchemaName: pgErr.SchemaName, TableName: pgErr.TableName, ColumnName: pgErr.ColumnName, ConstraintName: pgErr.ConstraintName}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(pgconn.PgError{})); diff != "" {
		t.Error(diff)
	}
}

// Names of the application's columns that the function uses for itself, a where
// that ends in a comment, literals of the session's: none of it means anything
// else inside the function.
func TestTriggerOddTables(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET TimeZone = ''Asia/Tokyo''', current_database()); END $$;
		CREATE TABLE blobs (key text PRIMARY KEY, named text, guard text, there boolean, t text, k text); INSERT INTO blobs VALUES ('a'), ('b');
		CREATE TABLE r (key text, named text, guard text, there boolean, attempt int, s text, k text, new text, old text, at timestamptz)`)
	s := filtered(pgSource("r", "key", ""), `named IS NULL AND key <> '\x' AND there IS NOT TRUE AND s.k IS NULL AND new IS NULL AND at > '2020-01-01' -- not gone $gc$`)
	for _, deferrable := range []bool{false, true} {
		w.install(t, triggerPool(blob.KindText, "key"), deferrable, s)
		wantGuardOf(t, w, triggerPool(blob.KindText, "key").enforced(), s, liveness.Trigger)
		pgtest.Exec(t, w.app, `SET standard_conforming_strings = off; SET DateStyle = 'SQL, DMY'; SET TimeZone = 'Pacific/Kiritimati'; SET search_path = public, pg_catalog`)
		for _, c := range []struct{ sql, want string }{
			{`INSERT INTO r (key, at) VALUES ('a', now())`, ""},
			{`INSERT INTO r (key, at) VALUES ('c', now())`, gone},
			{`INSERT INTO r (key, at, there) VALUES ('c', now(), true)`, ""},
			{`INSERT INTO r (key, at, new) VALUES ('c', now(), '')`, ""},
			{`INSERT INTO r (key) VALUES ('c')`, ""},
			{`INSERT INTO r (key, at) VALUES ('d', '2019-12-31 23:59 Etc/UTC')`, ""}, // in UTC
			{`INSERT INTO r (key, at) VALUES ('d', '2020-01-01 00:01 Etc/UTC')`, gone},
			{`UPDATE r SET there = false WHERE there AND key = 'c'`, gone}, // it counts again
			{`UPDATE r SET there = true, attempt = 1 WHERE key = 'a' AND there IS NULL`, ""},
		} {
			if got := w.write(t, c.sql); got != c.want {
				t.Errorf("deferrable %t: %s: %q, want %q", deferrable, c.sql, got, c.want)
			}
		}
		pgtest.Exec(t, w.app, `RESET ALL; DELETE FROM r`)
	}
}

// Who installs the trigger may have other settings than the role that sweeps.
func TestTriggerOfAnotherSession(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); CREATE TABLE r (b int UNIQUE, at timestamptz, took interval)`)
	s := filtered(pgSource("r", "b", ""), "at > '2020-01-02' AND took < '-1 day 2:00'")
	name, url := pgtest.Role(t, w.url, "")
	pgtest.Exec(t, w.app, `GRANT SELECT ON r, blobs TO `+name+`; ALTER ROLE `+name+` SET TimeZone = 'Asia/Tokyo'; ALTER ROLE `+name+` SET DateStyle = 'SQL, DMY';
		ALTER ROLE `+name+` SET IntervalStyle = 'sql_standard'; ALTER ROLE `+name+` SET bytea_output = 'escape'; ALTER ROLE `+name+` SET extra_float_digits = 0`)
	w.install(t, triggerPool(blob.KindInt, "id"), false, s)
	agent := w.as(t, url)
	wantGuardOf(t, agent, triggerPool(blob.KindInt, "id").enforced(), s, liveness.Trigger)
	agent.read(t, func(ctx context.Context, tx pgx.Tx) {
		for _, setting := range pgdb.ReadSettings() {
			name, want, _ := strings.Cut(setting, "=")
			var got string
			if err := tx.QueryRow(ctx, "SELECT current_setting($1)", name).Scan(&got); err != nil || got != want {
				t.Errorf("%s is %s in a transaction of the agent's, %v", setting, got, err)
			}
		}
	})
}

// A blob is there if any tier has it.
func TestTriggerTiers(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); CREATE TABLE cold (id bigint PRIMARY KEY); INSERT INTO blobs VALUES (1), (3); INSERT INTO cold VALUES (2), (3); CREATE TABLE r (b int)`)
	s := pgSource("r", "b", "")
	w.read(t, func(ctx context.Context, tx pgx.Tx) {
		var targets []liveness.Target
		for _, table := range []string{"blobs", "cold"} {
			rel, err := pgdb.LookupRelation(ctx, tx, "public", table)
			if err != nil {
				t.Fatal(err)
			}
			targets = append(targets, liveness.Target{Relation: rel, Key: rel.Columns[0]})
		}
		p, found, err := liveness.ResolvePostgres(ctx, tx, triggerPool(blob.KindInt, "id").Options, []liveness.Source{s}, targets)
		if err != nil || p == nil {
			t.Fatal(err, found)
		}
		for _, sql := range p.TriggerPlans(false)[0].Statements {
			pgtest.Exec(t, w.app, sql)
		}
	})
	for n, want := range map[int]string{1: "", 2: "", 3: "", 4: gone} {
		if got := w.write(t, fmt.Sprintf("INSERT INTO r VALUES (%d)", n)); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

// What the writer's snapshot doesn't show: a blob that went, one that went and was
// stored again, one that came.
func TestTriggerSnapshots(t *testing.T) {
	t.Parallel()
	const again = `BEGIN; DELETE FROM blobs WHERE id = 'a'; INSERT INTO blobs VALUES ('a'); COMMIT`
	for _, deferrable := range []bool{false, true} {
		for level, want := range map[string][3]string{ // of what happened to a
			"READ COMMITTED":  {gone, "", ""},
			"REPEATABLE READ": {pgdb.SerializationFailure, pgdb.SerializationFailure, gone},
			"SERIALIZABLE":    {pgdb.SerializationFailure, pgdb.SerializationFailure, gone},
		} {
			for i, happened := range []string{`DELETE FROM blobs WHERE id = 'a'`, again, `INSERT INTO blobs VALUES ('new')`} {
				t.Run(fmt.Sprintf("%s, deferrable %t, %s", level, deferrable, happened), func(t *testing.T) {
					t.Parallel()
					w := newPGWorld(t, `CREATE TABLE blobs (id text PRIMARY KEY); INSERT INTO blobs VALUES ('a'); CREATE TABLE r (b text)`)
					w.install(t, triggerPool(blob.KindText, "id"), deferrable, pgSource("r", "b", ""))
					writer := pgtest.Connect(t, w.url)
					pgtest.Exec(t, writer, "BEGIN ISOLATION LEVEL "+level+"; SELECT count(*) FROM blobs")
					pgtest.Exec(t, w.app, happened)
					_, err := writer.Exec(t.Context(), fmt.Sprintf("INSERT INTO r VALUES ('%s'); COMMIT", []string{"a", "a", "new"}[i]))
					if got := pgdb.Code(err); got != want[i] {
						t.Errorf("%q, want %q", got, want[i])
					}
				})
			}
		}
	}
}

// A writer that waits for a delete goes on if the blob was stored again in the
// same transaction. Its first look can't see that; without a second one it fails.
func TestTriggerStoredAgain(t *testing.T) {
	t.Parallel()
	for again, want := range map[bool]string{true: "", false: gone} {
		t.Run(fmt.Sprint(again), func(t *testing.T) {
			t.Parallel()
			w := newPGWorld(t, `CREATE TABLE blobs (id text PRIMARY KEY); INSERT INTO blobs VALUES ('a'); CREATE TABLE r (b text)`)
			w.install(t, triggerPool(blob.KindText, "id"), false, pgSource("r", "b", ""))
			pgtest.Exec(t, w.app, "BEGIN; DELETE FROM blobs")
			writer := pgtest.Connect(t, w.url)
			ended := make(chan error, 1)
			go func() {
				_, err := writer.Exec(t.Context(), "INSERT INTO r VALUES ('a')")
				ended <- err
			}()
			waitUntilBlocked(t, w.url, writer.PgConn().PID(), ended)
			if again {
				pgtest.Exec(t, w.app, "INSERT INTO blobs VALUES ('a')")
			}
			pgtest.Exec(t, w.app, "COMMIT")
			if got := pgdb.Code(<-ended); got != want {
				t.Errorf("%q, want %q", got, want)
			}
		})
	}
}

func waitUntilBlocked(t *testing.T, url string, pid uint32, ended <-chan error) {
	t.Helper()
	conn := pgtest.Connect(t, url)
	for limit := time.After(30 * time.Second); ; {
		if pgCount(t, conn, `SELECT count(*)::int FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'`, pid) > 0 {
			return
		}
		select {
		case err := <-ended:
			t.Fatalf("it didn't wait, and ended with %v", err)
		case <-limit:
			t.Fatal("it doesn't wait")
		default:
		}
	}
}

// A deferred trigger judges what the transaction leaves behind.
func TestTriggerDeferred(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id bytea PRIMARY KEY); CREATE TABLE r (b text, gone boolean)`)
	s := filtered(pgSource("r", "b", "{hex}"), "gone IS NOT TRUE")
	w.install(t, triggerPool(blob.KindBytes, "id"), true, s)
	for name, c := range map[string]struct{ sql, want string }{
		"the blob later":                  {`INSERT INTO r VALUES ('aa'); INSERT INTO blobs VALUES ('\xaa')`, ""},
		"no blob":                         {`INSERT INTO r VALUES ('bb')`, gone},
		"the reference deleted again":     {`INSERT INTO r VALUES ('bb'); DELETE FROM r WHERE b = 'bb'`, ""},
		"the reference changed":           {`INSERT INTO r VALUES ('bb'); UPDATE r SET b = NULL WHERE b = 'bb'`, ""},
		"the reference left out":          {`INSERT INTO r VALUES ('bb'); UPDATE r SET gone = true WHERE b = 'bb'`, ""},
		"left out, and counted again":     {`INSERT INTO r VALUES ('bc'); UPDATE r SET gone = true; UPDATE r SET gone = false`, gone},
		"respelt, and still naming it":    {`INSERT INTO r VALUES ('bb'); UPDATE r SET b = 'BB' WHERE b = 'bb'`, misspelt},
		"another column, and no blob":     {`INSERT INTO r VALUES ('bd'); UPDATE r SET gone = false WHERE b = 'bd'`, gone},
		"immediately, by SET CONSTRAINTS": {`SET CONSTRAINTS ALL IMMEDIATE; INSERT INTO r VALUES ('ab'); INSERT INTO blobs VALUES ('\xab')`, gone},
	} {
		if got := w.write(t, "BEGIN; "+c.sql+"; COMMIT"); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		pgtest.Exec(t, w.app, "ROLLBACK")
	}
}

// What isn't the trigger that this configuration makes is no guard, and to make it
// again helps.
func TestTriggerStates(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); INSERT INTO blobs VALUES (1);
		CREATE TABLE r (b int UNIQUE, gone boolean) PARTITION BY LIST (b); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1) PARTITION BY LIST (b);
		CREATE TABLE r11 PARTITION OF r1 FOR VALUES IN (1); CREATE TABLE r2 PARTITION OF r FOR VALUES IN (2)`)
	other, _ := pgtest.Role(t, w.url, "")
	pool, s := triggerPool(blob.KindInt, "id"), filtered(pgSource("r", "b", ""), "gone IS NOT TRUE")
	name := liveness.TriggerName("gc_agent", "r")
	function := "gc_agent." + name + "()"
	const changed = "its function isn't the one that this configuration asks for"
	for _, c := range []struct{ change, undo, gap string }{
		{"SELECT", "SELECT", ""},
		{"ALTER TABLE r DISABLE TRIGGER " + name, "SELECT", "it isn't ENABLE ALWAYS"},
		{"ALTER TABLE r ENABLE TRIGGER " + name, "SELECT", "it isn't ENABLE ALWAYS"},
		{"ALTER TABLE r ENABLE REPLICA TRIGGER " + name, "SELECT", "it isn't ENABLE ALWAYS"},
		{"ALTER TABLE r11 DISABLE TRIGGER " + name, "SELECT", "rows of public.r11 don't fire it"},
		{"CREATE TABLE r3 PARTITION OF r FOR VALUES IN (3)", "SELECT", ""},
		{"ALTER FUNCTION " + function + " SECURITY INVOKER", "SELECT", changed},
		{"ALTER FUNCTION " + function + " SET search_path = public", "SELECT", changed},
		{"ALTER FUNCTION " + function + " RESET TimeZone", "SELECT", changed},
		{"ALTER FUNCTION " + function + " SET work_mem = '64kB'", "ALTER FUNCTION " + function + " RESET work_mem", changed},
		{"GRANT USAGE, CREATE ON SCHEMA gc_agent TO " + other + "; ALTER FUNCTION " + function + " OWNER TO " + other, "ALTER FUNCTION " + function + " OWNER TO CURRENT_USER", "its function belongs to somebody else than the table"},
		{"DROP TRIGGER " + name + " ON r; CREATE TRIGGER " + name + " AFTER INSERT OR UPDATE OF b ON r FOR EACH ROW EXECUTE FUNCTION " + function + "; ALTER TABLE r ENABLE ALWAYS TRIGGER " + name, "SELECT", "it doesn't fire for every row that is inserted or updated"},
		{"DROP TRIGGER " + name + " ON r; CREATE TRIGGER " + name + " AFTER INSERT ON r FOR EACH ROW EXECUTE FUNCTION " + function + "; ALTER TABLE r ENABLE ALWAYS TRIGGER " + name, "SELECT", "it doesn't fire for every row that is inserted or updated"},
		{"DROP TRIGGER " + name + " ON r; CREATE TRIGGER " + name + " AFTER INSERT OR UPDATE ON r FOR EACH ROW WHEN (NEW.b > 1) EXECUTE FUNCTION " + function + "; ALTER TABLE r ENABLE ALWAYS TRIGGER " + name, "SELECT", "it doesn't fire for every row that is inserted or updated"},
	} {
		for _, deferrable := range []bool{false, true} {
			w.install(t, pool, deferrable, s)
			wantGuardOf(t, w, pool.enforced(), s, liveness.Trigger)
			if strings.HasPrefix(c.change, "CREATE TABLE") && deferrable {
				continue
			}
			pgtest.Exec(t, w.app, c.change)
			if c.gap == "" {
				wantGuardOf(t, w, pool.enforced(), s, liveness.Trigger)
				continue
			}
			w.wantFindings(t, c.change, pool.enforced(), []liveness.Source{guarded(s, liveness.Trigger)},
				"M:liveness[0].guard: source r (public.r.b) isn't guarded by trigger "+name+" ("+c.gap+")"+pgLeft+strings.Replace(pgInstall, "install", "install p", 1)+"write guard: settle")
			pgtest.Exec(t, w.app, c.undo)
		}
	}
	// Another configuration asks for another trigger.
	w.install(t, pool, false, s)
	s.Where = "gone = false"
	_, found := w.resolve(t, pool.enforced(), s)
	if len(found) == 0 || !strings.Contains(found[0].Message, changed) {
		t.Errorf("another where: %v", found)
	}
}

// The function runs as the table's owner, whoever has made it, since the owner can put
// into it what it runs. A view in place of the blobs runs nothing at all.
func TestTriggerRunsAsOwner(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); INSERT INTO blobs VALUES (1); CREATE TABLE r (b int UNIQUE, who text);
		CREATE FUNCTION runs_as(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN $1 = current_user; END'`)
	owner, _ := pgtest.Role(t, w.url, "")
	pgtest.Exec(t, w.app, `ALTER TABLE r OWNER TO `+owner+`; GRANT SELECT, UPDATE ON blobs TO `+owner)
	pool, s := triggerPool(blob.KindInt, "id"), filtered(pgSource("r", "b", ""), "public.runs_as(who)")
	w.install(t, pool, false, s)
	wantGuardOf(t, w, pool.enforced(), s, liveness.Trigger)
	for who, want := range map[string]string{"'" + owner + "'": gone, "current_user": ""} {
		if got := w.write(t, `INSERT INTO r VALUES (2, `+who+`)`); got != want {
			t.Errorf("a row that counts as %s: %q, want %q", who, got, want)
		}
		pgtest.Exec(t, w.app, `DELETE FROM r`)
	}
	pgtest.Exec(t, w.app, `ALTER TABLE blobs RENAME TO kept; CREATE VIEW blobs AS SELECT * FROM kept; GRANT SELECT, UPDATE ON blobs TO `+owner)
	if got := w.write(t, `INSERT INTO r VALUES (1, '`+owner+`')`); got != "42703" { // there is no such column
		t.Errorf("a view in place of the blobs: %q", got)
	}
	pgtest.Exec(t, w.app, `DROP VIEW blobs; ALTER TABLE kept RENAME TO blobs; ALTER FUNCTION gc_agent.`+liveness.TriggerName("gc_agent", "r")+`() OWNER TO CURRENT_USER`)
	if _, found := w.resolve(t, pool.enforced(), guarded(s, liveness.Trigger)); len(found) != 1 || !strings.Contains(found[0].Message, "belongs to somebody else than the table") {
		t.Errorf("a function of the superuser's: %v", found)
	}
}

// What becomes of a trigger while a sweep runs is a change.
func TestTriggerChanges(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); CREATE TABLE r (b int UNIQUE)`)
	pool, s := triggerPool(blob.KindInt, "id"), pgSource("r", "b", "")
	w.install(t, pool, false, s)
	name := liveness.TriggerName("gc_agent", "r")
	for change, want := range map[string]bool{
		"CREATE INDEX ON r (b)":                 false,
		"ALTER TABLE r ADD extra int":           false,
		"ALTER TABLE r DISABLE TRIGGER USER":    true,
		"DROP TRIGGER " + name + " ON r":        true,
		"CREATE TABLE child () INHERITS (r)":    true,
		"DROP FUNCTION gc_agent." + name + "()": true, // with CASCADE
	} {
		p := w.mustResolve(t, pool.enforced(), s)
		if strings.HasPrefix(change, "DROP FUNCTION") {
			change += " CASCADE"
		}
		pgtest.Exec(t, w.app, change)
		w.read(t, func(ctx context.Context, tx pgx.Tx) {
			got, err := p.Changed(ctx, tx)
			if err != nil {
				t.Fatal(err)
			}
			if want != cmp.Equal(got, []string{"trigger " + name + " of public.r"}) {
				t.Errorf("%s: %v", change, got)
			}
		})
		pgtest.Exec(t, w.app, "DROP TABLE IF EXISTS child")
		w.install(t, pool, false, s)
	}
}

// A where that depends on nothing but the row is one that a trigger can guard.
func TestTriggerWhere(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); CREATE TABLE u (id int);
		CREATE TABLE r (b int UNIQUE, kind text, gone boolean, today boolean, until timestamptz, day date, doc jsonb);
		CREATE FUNCTION stable(text) RETURNS boolean LANGUAGE plpgsql STABLE AS 'BEGIN RETURN $1 = ''a''; END';
		CREATE FUNCTION frozen(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN $1 = ''a''; END'`)
	for where, want := range map[string]bool{
		"until IS NULL": true, "NOT gone": true, "gone IS NOT TRUE": true, "gone": true, "kind = 'x' AND until IS NULL": true,
		"kind IN ('a', 'b') OR b > 3": true, "coalesce(gone, false) = false": true, "doc ->> 'state' = 'live'": true,
		"CASE WHEN b > 3 THEN gone ELSE true END": true, "lower(kind) LIKE 'a%' -- so": true, "day > '2020-01-01'": true,
		"public.frozen(kind)": true, "true": true, "NOT (gone AND b > 3)": true, "(b, kind) = (1, 'a')": true,

		`kind = 'known' AND "today"`: true, "today -- it's now": true, "kind ~ '^\\d+$' AND s.today": true, "kind = 'nowhere'": true,
		"until < 'now'": false, "until < ' NOW '": false, "until < 'now'::timestamptz": false, "until < timestamp with time zone 'today'": false, "day < date 'tomorrow'": false,
		"day = 'yesterday'::date - 1": false, "until < 'today'::date + interval '1 day'": false, "until < 'today10:00'": false, "until < '_now'": false, "until = ANY ('{2020-01-01,now}'::timestamptz[])": false,
		"until < $x$now$x$": false, "until < E'n\\157w'": false, "until < E'no\\w'": false, "until < U&'n\\006fw'": false, "until < 'no'\n'w'": false, "until < 'no' -- a\n -- b\n 'w'": false,
		"kind <> 'it''s' AND until < 'now'": false, `kind <> '"' AND until < 'now' AND kind <> '"'`: false, "/* ' */ until < 'now' /* ' */": false, "kind <> E'\\'' AND until < 'now'": false,

		"until > now()": false, "until IS NULL OR until > now()": false, "NOT gone AND until > now()": false, "day > CURRENT_DATE": false,
		"b IN (SELECT id FROM public.u)": false, "EXISTS (SELECT 1 FROM public.u WHERE u.id = s.b)": false, "random() < 0.5": false,
		"public.stable(kind)": false, "kind = current_user": false, "until::text LIKE '2%'": false, "day < '2020-01-01'::timestamptz": false,
		"current_setting('x', true) IS NULL": false, "s.tableoid > 0": false, "xmin IS NOT NULL": false, "(SELECT true)": false, "until > clock_timestamp()": false,
	} {
		s := filtered(pgSource("r", "b", ""), where)
		plan := w.mustResolve(t, triggerPool(blob.KindInt, "id"), s).TriggerPlans(false)[0]
		if (plan.Why == "") != want {
			t.Errorf("%s: %q", where, plan.Why)
		}
		if !want {
			_, found := w.resolve(t, triggerPool(blob.KindInt, "id").enforced(), s)
			if len(found) == 0 || !strings.Contains(found[0].Message, "its where can turn true without a write") || !strings.Contains(found[0].Message, "guard: settle") {
				t.Errorf("%s: %v", where, found)
			}
		}
	}
}

// What no trigger can guard says why.
func TestTriggerImpossible(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id text PRIMARY KEY, other int UNIQUE); CREATE TABLE r (b text UNIQUE, u uuid UNIQUE, o int UNIQUE REFERENCES blobs (other)); CREATE TABLE child () INHERITS (r);
		CREATE TABLE plain (b text UNIQUE, u uuid UNIQUE, o int UNIQUE REFERENCES blobs (other)); CREATE VIEW v AS SELECT b FROM plain; ALTER TABLE plain DISABLE TRIGGER ALL`)
	foreign := settled(pgSource("plain", "o", ""))
	for want, s := range map[string]liveness.Source{
		"it is a query":           pgQuery("SELECT b FROM public.plain", "{text}"),
		"public.v is a view":      pgSource("v", "b", ""),
		"tables inherit from":     pgSource("r", "b", ""),
		"spells a uuid":           pgSource("plain", "u", ""),
		"its values aren't keys":  foreign,
		"the blobs are in anoth":  pgSource("plain", "b", ""),
		"foreign key r_fk guards": pgSource("linked", "b", ""),
	} {
		sources := []liveness.Source{s}
		pool := triggerPool(blob.KindText, "id")
		switch {
		case strings.HasPrefix(want, "the blobs"):
			pool.table, pool.Elsewhere = "", true
		case s.Table == "linked":
			pgtest.Exec(t, w.app, "CREATE TABLE linked (b text UNIQUE CONSTRAINT r_fk REFERENCES blobs)")
		}
		if !pool.Elsewhere && s.Column != "o" {
			sources = append(sources, foreign)
		}
		p, found := w.resolve(t, pool, append(sources, settled(pgSource("r", "o", "")))...)
		if pool.Elsewhere {
			p, found = w.resolve(t, pool, s)
		}
		if p == nil {
			t.Errorf("%s: %v", want, found)
			continue
		}
		if why := p.TriggerPlans(false)[0].Why; !strings.Contains(why, want) {
			t.Errorf("%q, want %q", why, want)
		}
		if want != "foreign key r_fk guards" {
			continue
		}
		pgtest.Exec(t, w.app, "DROP TABLE linked")
	}
}

// A subscription applies rows without firing a foreign key, and fires the trigger.
func TestGuardsUnderSubscription(t *testing.T) {
	t.Parallel()
	publisher := pgtest.Database(t)
	pgtest.Exec(t, pgtest.Connect(t, publisher), "CREATE TABLE r (b int); CREATE TABLE l (b int); CREATE PUBLICATION pub FOR ALL TABLES")
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); CREATE TABLE r (b int UNIQUE); CREATE TABLE l (b int UNIQUE REFERENCES blobs)`)
	sources := []liveness.Source{pgSource("r", "b", ""), pgSource("l", "b", "")}
	for _, sql := range w.mustResolve(t, triggerPool(blob.KindInt, "id"), sources...).TriggerPlans(false)[0].Statements {
		pgtest.Exec(t, w.app, sql)
	}
	pgtest.Exec(t, w.app, "CREATE SUBSCRIPTION applied CONNECTION '"+publisher+"' PUBLICATION pub WITH (slot_name = NONE, enabled = false, create_slot = false)")
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), w.url)
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := conn.Exec(context.Background(), "DROP SUBSCRIPTION applied"); err != nil {
			t.Error(err)
		}
		_ = conn.Close(context.Background())
	})
	infos := w.mustResolve(t, triggerPool(blob.KindInt, "id").enforced(), sources...).Sources()
	for i, want := range []string{"subscription applied applies: they fire the trigger too", "subscription applied applies, which fire no foreign key"} {
		if !strings.Contains(infos[i].LeavesOpen, want) {
			t.Errorf("%s leaves open %q, want %q", infos[i].Guard, infos[i].LeavesOpen, want)
		}
	}
}

// No two sources share a name, and none is too long.
func TestTriggerName(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, schema := range []string{"gc_agent", "gc", "GC"} {
		for _, source := range []string{"a", "A", "a.b", "a-b", "a_b", strings.Repeat("x", 100), strings.Repeat("x", 101)} {
			name := liveness.TriggerName(schema, source)
			if len(name) > 63 || seen[name] || pgdb.Ident(name) != `"`+strings.ToLower(name)+`"` {
				t.Errorf("%s, %s: %s", schema, source, name)
			}
			seen[name] = true
		}
	}
}

// A virtual generated column is NULL to a trigger, whatever it says.
func TestTriggerVirtualColumns(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY)`)
	if pgCount(t, w.app, "SELECT current_setting('server_version_num')::int") < 180000 {
		t.Skip("Postgres 18 was the first to have them")
	}
	pgtest.Exec(t, w.app, `CREATE TABLE r (a int UNIQUE, b int GENERATED ALWAYS AS (a + 1) VIRTUAL)`)
	for why, sources := range map[string][]liveness.Source{
		"a trigger can't see virtual generated columns": {pgSource("r", "b", ""), filtered(pgSource("r", "a", ""), "b > 3")},
		"": {pgSource("r", "a", "")},
	} {
		for _, s := range sources {
			if plan := w.mustResolve(t, triggerPool(blob.KindInt, "id"), s).TriggerPlans(false)[0]; plan.Why != why {
				t.Errorf("%s where %q: %q, want %q", s.Column, s.Where, plan.Why, why)
			}
		}
	}
}
