package postgres_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/postgres"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// world is a database of a test's own, the application's connection to it and
// the agent's.
type world struct {
	url   string
	app   *pgx.Conn
	agent *pgdb.Conn
}

func newWorld(t testing.TB, setup string) *world {
	t.Helper()
	url := pgtest.Database(t)
	w := &world{url: url, app: pgtest.Connect(t, url)}
	pgtest.Exec(t, w.app, setup)
	w.agent = connect(t, url)
	return w
}

func connect(t testing.TB, url string) *pgdb.Conn {
	t.Helper()
	timeouts := pgdb.Timeouts{Lock: 5 * time.Second, Statement: time.Minute, Idle: time.Minute}
	return pgtest.Session(t, url, pgdb.Options{Timeouts: timeouts})
}

var errRollback = errors.New("roll back")

// tx runs fn in one of the agent's transactions, which commits.
func (w *world) tx(t testing.TB, fn func(ctx context.Context, tx pgx.Tx)) {
	t.Helper()
	err := w.agent.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
		fn(ctx, tx)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// dry runs fn in one of the agent's transactions, which is rolled back.
func (w *world) dry(t testing.TB, fn func(ctx context.Context, tx pgx.Tx)) {
	t.Helper()
	err := w.agent.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
		fn(ctx, tx)
		return errRollback
	})
	if !errors.Is(err, errRollback) {
		t.Fatal(err)
	}
}

func config(table, column, size string) postgres.Config {
	return postgres.Config{Path: "blobs[0]", Schema: "public", Table: table, Column: column, Size: size}
}

func resolve(t testing.TB, conn *pgdb.Conn, cfg postgres.Config, deletes bool) (table *postgres.Table, found finding.List) {
	t.Helper()
	err := conn.InTx(t.Context(), pgdb.ReadOnly, func(ctx context.Context, tx pgx.Tx) (err error) {
		table, found, err = postgres.Resolve(ctx, tx, cfg, deletes)
		return err
	})
	if err != nil {
		t.Fatalf("resolve %s.%s: %v", cfg.Table, cfg.Column, err)
	}
	if table == nil && found.Worst() <= finding.Warning {
		t.Fatalf("a table: %t; findings: %v", table != nil, found)
	}
	return table, found
}

// table resolves a tier that nothing is wrong with.
func (w *world) table(t testing.TB, name, column, size string) *postgres.Table {
	t.Helper()
	table, found := resolve(t, w.agent, config(name, column, size), true)
	if len(found) != 0 {
		t.Fatalf("findings: %v", found)
	}
	return table
}

func lines(found finding.List) (lines []string) {
	for _, f := range found {
		lines = append(lines, map[finding.Severity]string{finding.Warning: "W:", finding.Unreadable: "U:", finding.Misconfigured: "M:"}[f.Severity]+f.String())
	}
	return lines
}

func TestResolveFindings(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `
		CREATE DOMAIN word AS text; CREATE DOMAIN must AS text NOT NULL; CREATE DOMAIN small AS int2;
		CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false); CREATE TYPE mood AS ENUM ('a');
		CREATE TABLE b (b bytea PRIMARY KEY, t text NOT NULL UNIQUE, v varchar(9) NOT NULL UNIQUE, u uuid NOT NULL UNIQUE, i2 int2 NOT NULL UNIQUE, i4 int4 NOT NULL UNIQUE, i8 int8 NOT NULL UNIQUE,
			w word NOT NULL UNIQUE, s small NOT NULL UNIQUE, icu text COLLATE "en-x-icu" NOT NULL UNIQUE, "Odd ""Name" text NOT NULL UNIQUE,
			c char(9) NOT NULL UNIQUE, l text COLLATE loose NOT NULL UNIQUE, o oid NOT NULL UNIQUE, j jsonb NOT NULL UNIQUE, e mood NOT NULL UNIQUE, n numeric NOT NULL UNIQUE, a name NOT NULL UNIQUE,
			loose text NOT NULL, bare text UNIQUE, dm must UNIQUE, size bigint, small small, big numeric);
		CREATE TABLE u (part text NOT NULL, expr text NOT NULL, late text NOT NULL UNIQUE DEFERRABLE, pair text NOT NULL, other text NOT NULL, broken text NOT NULL, incl text NOT NULL, second text NOT NULL);
		CREATE UNIQUE INDEX ON u (part) WHERE part <> ''; CREATE UNIQUE INDEX ON u (lower(expr)); CREATE UNIQUE INDEX ON u (pair, other);
		CREATE UNIQUE INDEX ON u (incl) INCLUDE (other); CREATE INDEX ON u (second);
		INSERT INTO u VALUES ('', '', '1', '1', '', 'x', '1', ''), ('a', 'a', '2', '2', '', 'x', '2', '');
		CREATE VIEW v AS SELECT b FROM b; CREATE MATERIALIZED VIEW m AS SELECT b FROM b;
		CREATE FOREIGN DATA WRAPPER far; CREATE SERVER far FOREIGN DATA WRAPPER far; CREATE FOREIGN TABLE f (b bytea NOT NULL) SERVER far;
		CREATE TABLE p (k int PRIMARY KEY, s bigint) PARTITION BY LIST (k); CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1);
		CREATE TABLE fp (k int NOT NULL) PARTITION BY LIST (k); CREATE FOREIGN TABLE fp1 PARTITION OF fp FOR VALUES IN (1) SERVER far;
		CREATE TABLE mother (k int PRIMARY KEY); CREATE TABLE child () INHERITS (mother);
		CREATE FUNCTION loose() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
		CREATE FUNCTION tight() RETURNS trigger LANGUAGE plpgsql SET search_path = public AS 'BEGIN RETURN OLD; END';
		CREATE TABLE g (k int PRIMARY KEY);
		CREATE TRIGGER a_tight BEFORE DELETE ON g FOR EACH ROW EXECUTE FUNCTION tight(); CREATE TRIGGER b_loose AFTER INSERT OR DELETE ON g FOR EACH STATEMENT EXECUTE FUNCTION loose();
		CREATE TRIGGER c_insert BEFORE INSERT ON g FOR EACH ROW EXECUTE FUNCTION loose(); CREATE TRIGGER d_off BEFORE DELETE ON g FOR EACH ROW EXECUTE FUNCTION loose(); ALTER TABLE g DISABLE TRIGGER d_off`)
	// A unique index that failed to build stays behind, and isn't valid.
	if _, err := w.app.Exec(t.Context(), "CREATE UNIQUE INDEX CONCURRENTLY broken ON u (broken)"); pgdb.Code(err) != "23505" { // unique_violation
		t.Fatalf("an index over duplicates: %v", err)
	}
	const keyTypes = "; a key column is bytea, text, varchar, uuid, smallint, integer or bigint"
	notUnique := func(column string) string {
		return "M:blobs[0].column: public.u." + column + " isn't unique; a key column needs a primary key, a unique constraint or a unique index of its own"
	}
	tests := []struct {
		table, column, size string
		kind                blob.Kind
		want                []string
	}{
		{"b", "b", "", blob.KindBytes, nil},
		{"b", "t", "size", blob.KindText, nil},
		{"b", "v", "i2", blob.KindText, nil},
		{"b", "u", "small", blob.KindUUID, nil},
		{"b", "i2", "", blob.KindInt, nil},
		{"b", "i4", "", blob.KindInt, nil},
		{"b", "i8", "", blob.KindInt, nil},
		{"b", "w", "", blob.KindText, nil},
		{"b", "s", "", blob.KindInt, nil},
		{"b", "icu", "", blob.KindText, nil},
		{"b", `Odd "Name`, "", blob.KindText, nil},
		{"u", "incl", "", blob.KindText, nil},
		{"p", "k", "s", blob.KindInt, nil},
		{"p1", "k", "s", blob.KindInt, nil},

		{"none", "b", "", 0, []string{"M:blobs[0].table: there is no table public.none in the database; create it or correct the name"}},
		{"v", "b", "", 0, []string{"M:blobs[0].table: public.v isn't a table; name the table that stores the blobs"}},
		{"m", "b", "", 0, []string{"M:blobs[0].table: public.m isn't a table; name the table that stores the blobs"}},
		{"f", "b", "", 0, []string{"M:blobs[0].table: public.f isn't a table; name the table that stores the blobs"}},
		{"fp", "k", "", 0, []string{
			"M:blobs[0].column: public.fp.k isn't unique; a key column needs a primary key, a unique constraint or a unique index of its own",
			"M:blobs[0].table: public.fp1, a partition of public.fp, is a foreign table; blobs are rows of this database",
		}},
		{"mother", "k", "", 0, []string{"M:blobs[0].table: public.child inherits from public.mother, so that a key can be there twice; detach it (ALTER TABLE ... NO INHERIT)"}},
		{"b", "x", "y", 0, []string{`M:blobs[0].column: table public.b has no column "x"; correct the name`, `M:blobs[0].size: table public.b has no column "y"; correct the name or leave size out`}},
		{"b", "B", "", 0, []string{`M:blobs[0].column: table public.b has no column "B"; correct the name`}},
		{"b", "b", "big", 0, []string{"M:blobs[0].size: public.b.big is numeric; a size column is smallint, integer or bigint"}},
		{"b", "c", "", 0, []string{"M:blobs[0].column: public.b.c is character(9)" + keyTypes}},
		{"b", "o", "", 0, []string{"M:blobs[0].column: public.b.o is oid" + keyTypes}},
		{"b", "j", "", 0, []string{"M:blobs[0].column: public.b.j is jsonb" + keyTypes}},
		{"b", "e", "", 0, []string{"M:blobs[0].column: public.b.e is public.mood" + keyTypes}},
		{"b", "n", "", 0, []string{"M:blobs[0].column: public.b.n is numeric" + keyTypes}},
		{"b", "a", "", 0, []string{"M:blobs[0].column: public.b.a is name" + keyTypes}},
		{"b", "l", "", 0, []string{"M:blobs[0].column: public.b.l has a nondeterministic collation, under which different bytes are one key; use a deterministic one"}},
		{"b", "loose", "", 0, []string{"M:blobs[0].column: public.b.loose isn't unique; a key column needs a primary key, a unique constraint or a unique index of its own"}},
		{"b", "bare", "", 0, []string{"M:blobs[0].column: public.b.bare may be NULL; a key column must be NOT NULL"}},
		{"b", "dm", "", 0, []string{"M:blobs[0].column: public.b.dm may be NULL; a key column must be NOT NULL"}},
		{"b", "size", "", 0, []string{
			"M:blobs[0].column: public.b.size may be NULL; a key column must be NOT NULL",
			"M:blobs[0].column: public.b.size isn't unique; a key column needs a primary key, a unique constraint or a unique index of its own",
		}},
		{"u", "part", "", 0, []string{notUnique("part")}},
		{"u", "expr", "", 0, []string{notUnique("expr")}},
		{"u", "late", "", 0, []string{notUnique("late")}},
		{"u", "pair", "", 0, []string{notUnique("pair")}},
		{"u", "other", "", 0, []string{notUnique("other")}},
		{"u", "broken", "", 0, []string{notUnique("broken")}},
		{"u", "second", "", 0, []string{notUnique("second")}},
		{"g", "k", "", blob.KindInt, []string{"W:blobs[0]: trigger b_loose of public.g runs public.loose(), which finds no table by its bare name when the agent deletes: the agent has no search_path; " +
			"run: ALTER FUNCTION public.loose() SET search_path = ..."}},
	}
	for _, tt := range tests {
		table, found := resolve(t, w.agent, config(tt.table, tt.column, tt.size), true)
		if diff := cmp.Diff(tt.want, lines(found)); diff != "" {
			t.Errorf("%s.%s (-want +got):\n%s", tt.table, tt.column, diff)
		}
		if found.Worst() <= finding.Warning && (table.Kind() != tt.kind || table.KeyColumn().Name != tt.column || table.String() != "public."+tt.table) {
			t.Errorf("%s.%s: %s of %s, key %s", tt.table, tt.column, table, table.Kind(), table.KeyColumn().Name)
		}
	}
	if _, found := resolve(t, w.agent, config("g", "k", ""), false); len(found) != 0 {
		t.Errorf("a trigger matters to who deletes alone: %v", found)
	}
}

func TestResolveCitext(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "")
	var available bool
	if err := w.app.QueryRow(t.Context(), "SELECT count(*) > 0 FROM pg_available_extensions WHERE name = 'citext'").Scan(&available); err != nil {
		t.Fatal(err)
	}
	if !available {
		t.Skip("citext isn't installed on the server: install Postgres' contrib")
	}
	pgtest.Exec(t, w.app, "CREATE EXTENSION citext; CREATE TABLE b (k citext PRIMARY KEY)")
	_, found := resolve(t, w.agent, config("b", "k", ""), true)
	want := []string{"M:blobs[0].column: public.b.k is public.citext; a key column is bytea, text, varchar, uuid, smallint, integer or bigint"}
	if diff := cmp.Diff(want, lines(found)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestResolveRights(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE b (k text PRIMARY KEY, size int, content bytea); CREATE SCHEMA closed; CREATE TABLE closed.b (k text PRIMARY KEY)`)
	name, url := pgtest.Role(t, w.url, "")
	role := connect(t, url)
	neither := "U:blobs[0]: this role (" + name + `) may not read public.b; run: GRANT SELECT ("k") ON "public"."b" TO ` + name + `; GRANT SELECT ("size") ON "public"."b" TO ` + name
	noSelect := "U:blobs[0]: this role (" + name + `) may not read public.b; run: GRANT SELECT ("size") ON "public"."b" TO ` + name
	noDelete := "U:blobs[0]: this role (" + name + `) may not delete from public.b; run: GRANT DELETE ON "public"."b" TO ` + name
	nothing := "U:blobs[0]: this role (" + name + `) may not read, lock rows of, delete from public.b; run: GRANT SELECT ("k") ON "public"."b" TO ` + name + `; GRANT SELECT ("size") ON "public"."b" TO ` + name +
		`; GRANT UPDATE ("k") ON "public"."b" TO ` + name + `; GRANT DELETE ON "public"."b" TO ` + name
	check := func(what string, cfg postgres.Config, deletes bool, want ...string) *postgres.Table {
		t.Helper()
		table, found := resolve(t, role, cfg, deletes)
		if diff := cmp.Diff(want, lines(found)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		return table
	}
	check("nothing granted, observing", config("b", "k", "size"), false, neither)
	check("nothing granted", config("b", "k", "size"), true, nothing)
	pgtest.Exec(t, w.app, "GRANT SELECT (k), UPDATE (size) ON b TO "+name)
	check("the key granted", config("b", "k", ""), false)
	check("the size not granted", config("b", "k", "size"), false, noSelect)
	pgtest.Exec(t, w.app, "GRANT SELECT (size) ON b TO "+name)
	check("SELECT granted", config("b", "k", "size"), true, noDelete)
	pgtest.Exec(t, w.app, "GRANT DELETE ON b TO "+name)
	table := check("all granted", config("b", "k", "size"), true)

	// What was found to suffice suffices.
	pgtest.Exec(t, w.app, "INSERT INTO b VALUES ('a', 7)")
	err := role.InTx(t.Context(), pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
		if _, _, err := table.NextSpan(ctx, tx, postgres.Span{}, 1); err != nil {
			return err
		}
		if _, err := table.Lock(ctx, tx, []blob.Key{"a"}); err != nil {
			return err
		}
		_, err := table.Delete(ctx, tx, []blob.Key{"a"})
		return err
	})
	if err != nil {
		t.Error(err)
	}

	cfg := config("b", "k", "")
	cfg.Schema = "closed"
	pgtest.Exec(t, w.app, "GRANT SELECT ON closed.b TO "+name)
	check("a closed schema", cfg, false, "U:blobs[0]: this role ("+name+`) may not use schema closed; run: GRANT USAGE ON SCHEMA "closed" TO `+name)

	pgtest.Exec(t, w.app, "ALTER TABLE b ENABLE ROW LEVEL SECURITY")
	check("hidden rows", config("b", "k", ""), false, "U:blobs[0]: row-level security hides rows of public.b from this role; give the role BYPASSRLS or exempt it")
	pgtest.Exec(t, w.app, "ALTER ROLE "+name+" BYPASSRLS")
	check("rows that aren't hidden", config("b", "k", ""), false)

	pgtest.Exec(t, w.app, "ALTER ROLE "+name+" SET default_transaction_read_only = on")
	role = connect(t, url)
	check("read-only", config("b", "k", ""), false, "U:blobs[0]: the server is read-only (default_transaction_read_only is on); make it writable or point the url at one that is")
}

// The owner of a table sees all rows, until the policies are forced on it.
func TestResolveOwnerAndRowSecurity(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE b (k text PRIMARY KEY); ALTER TABLE b ENABLE ROW LEVEL SECURITY`)
	name, url := pgtest.Role(t, w.url, "")
	pgtest.Exec(t, w.app, "ALTER TABLE b OWNER TO "+name)
	role := connect(t, url)
	if _, found := resolve(t, role, config("b", "k", ""), true); len(found) != 0 {
		t.Errorf("an owner: %v", found)
	}
	pgtest.Exec(t, w.app, "ALTER TABLE b FORCE ROW LEVEL SECURITY")
	if _, found := resolve(t, role, config("b", "k", ""), true); len(found) != 1 {
		t.Errorf("an owner, forced: %v", found)
	}
}

func TestFingerprint(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `CREATE TABLE b (k text PRIMARY KEY, size int)`)
	table := w.table(t, "b", "k", "size")
	changed := func() (changed []string) {
		w.dry(t, func(ctx context.Context, tx pgx.Tx) {
			var err error
			if changed, err = pgdb.Changed(ctx, tx, []pgdb.Fingerprint{table.Fingerprint()}); err != nil {
				t.Error(err)
			}
		})
		return changed
	}
	if got := changed(); len(got) != 0 {
		t.Errorf("changed: %q", got)
	}
	pgtest.Exec(t, w.app, "DROP TABLE b; CREATE TABLE b (k text PRIMARY KEY, size int)")
	if got := changed(); !cmp.Equal(got, []string{`"public"."b".k`}) {
		t.Errorf("changed: %q", got)
	}
}
