package liveness_test

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

const (
	pgNoForeignKey = "M:liveness[0].guard: source r (public.r.b) has no foreign key to a tier's table" + pgNoTrigger + pgLeft + "add a foreign key from the column to the blobs' table, or " + pgInstall + "write guard: settle"
	pgNoTrigger    = " and has no guard trigger"
	pgInstall      = "run gc-agent guard install --source r (guard sql prints what it does), or "
	pgLeft         = ", so only guard settle is left, which misses a reference whose transaction starts writing after the wait and commits after the check; "
	pgGap          = "M:liveness[0].guard: source r (public.r.b) isn't guarded by foreign key r_fk"
	pgChange       = pgNoTrigger + pgLeft + "change that, or " + pgInstall + "write guard: settle"
)

func pgIntPool(table, column string) pgPool {
	return pgPool{Options: liveness.Options{Kind: blob.KindInt, Enforce: true}, table: table, column: column}
}

// wantGuards checks the first source's guard.
func wantGuard(t *testing.T, name string, p *liveness.Postgres, want liveness.Guard) {
	t.Helper()
	if p == nil {
		t.Errorf("%s: no registry", name)
		return
	}
	if info := p.Sources()[0]; info.Guard != want || info.LeavesOpen == "" {
		t.Errorf("%s: %+v, want guard %s", name, info, want)
	}
	if p.NeedsSettle() != (want == liveness.Settle) {
		t.Errorf("%s: settle is needed: %t", name, p.NeedsSettle())
	}
}

// T07: a foreign key that nobody registered.
func TestPostgresUnregisteredForeignKey(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE blobs (id int PRIMARY KEY, content bytea); INSERT INTO blobs SELECT generate_series(1, 5), '';
		CREATE TABLE audits (blob int REFERENCES blobs); INSERT INTO audits VALUES (1); CREATE INDEX ON audits (blob);
		CREATE TABLE sub_att (blob int REFERENCES blobs); INSERT INTO sub_att VALUES (2), (NULL); CREATE INDEX ON sub_att (blob);
		CREATE TABLE form_att (blob int REFERENCES blobs); INSERT INTO form_att VALUES (3); CREATE INDEX ON form_att (blob);
		CREATE TABLE form_defs (xls int REFERENCES blobs); INSERT INTO form_defs VALUES (4); CREATE INDEX ON form_defs (xls)`)
	sources := []liveness.Source{pgSource("audits", "blob", ""), pgSource("sub_att", "blob", ""), pgSource("form_att", "blob", "")}
	w.wantFindings(t, "unregistered", pgIntPool("blobs", "id"), sources,
		"M:liveness: foreign key form_defs_xls_fkey of public.form_defs (xls) refers to public.blobs (id), and no source registers it; add {table: public.form_defs, column: xls}")
	// A query may read the column, but nobody can tell.
	query := pgQuery("SELECT xls FROM public.form_defs", "")
	query.Guard = liveness.Settle
	w.wantFindings(t, "a query", pgIntPool("blobs", "id"), append(sources, query),
		"M:liveness: foreign key form_defs_xls_fkey of public.form_defs (xls) refers to public.blobs (id), and no source registers it; add {table: public.form_defs, column: xls}")

	p := w.wantFindings(t, "registered", pgIntPool("blobs", "id"), append(sources, pgSource("form_defs", "xls", "")))
	wantGuard(t, "registered", p, liveness.ForeignKey)
	if dead := w.dead(t, p, "1", "2", "3", "4", "5"); !cmp.Equal(dead, []blob.Key{"5"}) {
		t.Errorf("dead: %q", dead)
	}
}

// Each foreign key is the only one of its table; r is what is registered.
func TestPostgresForeignKeyShapes(t *testing.T) {
	t.Parallel()
	const blobs = `CREATE TABLE blobs (id int PRIMARY KEY, other int UNIQUE, tenant int NOT NULL, name int NOT NULL, parent int, UNIQUE (tenant, id), UNIQUE (tenant, name));
		INSERT INTO blobs SELECT n, n + 10, 1, n + 20 FROM generate_series(1, 3) n;`
	const unregistered = "M:liveness: foreign key r_fk of public.r (b) refers to public.blobs (id), and no source registers it; add {table: public.r, column: b}"
	reg := func(column string) liveness.Source { return pgSource("r", column, "") }
	tests := []struct {
		name   string
		setup  string
		source liveness.Source
		guard  liveness.Guard // that the source gets
		want   []string       // findings
		dead   []blob.Key     // of 1, 2, 3
	}{
		{
			"plain", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs); INSERT INTO r VALUES (1), (NULL)`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"of another integer type", `CREATE TABLE r (b bigint UNIQUE CONSTRAINT r_fk REFERENCES blobs); INSERT INTO r VALUES (1)`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"not registered", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs, c int UNIQUE); INSERT INTO r VALUES (1)`,
			reg("c"), "",
			[]string{strings.Replace(pgNoForeignKey, "r.b", "r.c", 1), unregistered},
			nil,
		},
		{
			"of a misspelt source", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs)`,
			reg("bb"), "",
			[]string{`U:liveness[0].column: table public.r has no column "bb"; correct the name`, unregistered},
			nil,
		},
		{
			"not valid", `CREATE TABLE r (b int UNIQUE); INSERT INTO r VALUES (1), (99); ALTER TABLE r ADD CONSTRAINT r_fk FOREIGN KEY (b) REFERENCES blobs NOT VALID`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"not valid, not registered", `CREATE TABLE r (b int UNIQUE, c int UNIQUE); ALTER TABLE r ADD CONSTRAINT r_fk FOREIGN KEY (b) REFERENCES blobs NOT VALID`,
			reg("c"), "",
			[]string{strings.Replace(pgNoForeignKey, "r.b", "r.c", 1), unregistered},
			nil,
		},
		{
			"deferrable", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs DEFERRABLE INITIALLY DEFERRED); INSERT INTO r VALUES (1)`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"self-referencing", `ALTER TABLE blobs ADD CONSTRAINT r_fk FOREIGN KEY (parent) REFERENCES blobs; UPDATE blobs SET parent = 1 WHERE id = 2; CREATE INDEX ON blobs (parent)`,
			pgSource("blobs", "parent", ""), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"through another unique column", `CREATE TABLE r (o int UNIQUE CONSTRAINT r_fk REFERENCES blobs (other)); INSERT INTO r VALUES (11), (NULL)`,
			reg("o"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"through another unique column, with a format", `CREATE TABLE r (o int UNIQUE CONSTRAINT r_fk REFERENCES blobs (other))`,
			pgSource("r", "o", "{int}"), "",
			[]string{"M:liveness[0].format: by foreign key r_fk the values of public.r.o aren't keys, the key is looked up by them; leave format out"},
			nil,
		},
		{
			"through another unique column, not registered", `CREATE TABLE r (o int UNIQUE CONSTRAINT r_fk REFERENCES blobs (other), c int UNIQUE)`,
			reg("c"), "",
			[]string{
				strings.Replace(pgNoForeignKey, "r.b", "r.c", 1),
				"M:liveness: foreign key r_fk of public.r (o) refers to public.blobs (other), and no source registers it; add {table: public.r, column: o}",
			},
			nil,
		},
		{
			"of several columns", `CREATE TABLE r (t int NOT NULL, b int UNIQUE NOT NULL, CONSTRAINT r_fk FOREIGN KEY (t, b) REFERENCES blobs (tenant, id)); INSERT INTO r VALUES (1, 1)`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"of several columns, the key's NULL", `CREATE TABLE r (t int NOT NULL, b int UNIQUE, CONSTRAINT r_fk FOREIGN KEY (t, b) REFERENCES blobs (tenant, id)); INSERT INTO r VALUES (1, 1), (9, NULL)`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"of several columns, MATCH FULL", `CREATE TABLE r (t int, b int UNIQUE, CONSTRAINT r_fk FOREIGN KEY (t, b) REFERENCES blobs (tenant, id) MATCH FULL); INSERT INTO r VALUES (1, 1), (NULL, NULL)`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"of several columns, one NULL", `CREATE TABLE r (t int, b int UNIQUE NOT NULL, CONSTRAINT r_fk FOREIGN KEY (t, b) REFERENCES blobs (tenant, id))`,
			reg("b"), "",
			[]string{pgGap + " (it has several columns, and doesn't check a row in which one is NULL; make them NOT NULL or the key MATCH FULL)" + pgChange},
			nil,
		},
		{
			"of several columns, the wrong one registered", `CREATE TABLE r (t int NOT NULL, b int UNIQUE NOT NULL, c int UNIQUE, CONSTRAINT r_fk FOREIGN KEY (t, b) REFERENCES blobs (tenant, id))`,
			reg("c"), "",
			[]string{
				strings.Replace(pgNoForeignKey, "r.b", "r.c", 1),
				"M:liveness: foreign key r_fk of public.r (t, b) refers to public.blobs (tenant, id), and no source registers it; add {table: public.r, column: b}",
			},
			nil,
		},
		{
			"of several columns, none the key", `CREATE TABLE r (t int, n int UNIQUE, CONSTRAINT r_fk FOREIGN KEY (t, n) REFERENCES blobs (tenant, name)); INSERT INTO r VALUES (1, 21), (NULL, 22)`,
			reg("n"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"two, one within the other", `CREATE TABLE r (t int, o int UNIQUE CONSTRAINT r_fk REFERENCES blobs (other), UNIQUE (t, o)); ALTER TABLE blobs ADD UNIQUE (tenant, other);
			ALTER TABLE r ADD CONSTRAINT r_fk2 FOREIGN KEY (t, o) REFERENCES blobs (tenant, other); INSERT INTO r VALUES (1, 11), (NULL, 12)`,
			reg("o"), liveness.ForeignKey, nil,
			[]blob.Key{"3"},
		},
		{
			"trigger disabled", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs); ALTER TABLE r DISABLE TRIGGER ALL`,
			reg("b"), "",
			[]string{pgGap + " (a trigger of it is disabled (ALTER TABLE ... ENABLE TRIGGER ALL))" + pgChange},
			nil,
		},
		{
			"trigger disabled on the blobs", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs); ALTER TABLE blobs DISABLE TRIGGER ALL`,
			reg("b"), "",
			[]string{pgGap + " (a trigger of it is disabled (ALTER TABLE ... ENABLE TRIGGER ALL))" + pgChange},
			nil,
		},
		{
			"trigger disabled on a partition", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs) PARTITION BY LIST (b); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1); ALTER TABLE r1 DISABLE TRIGGER ALL`,
			reg("b"), "",
			[]string{pgGap + " (a trigger of it is disabled (ALTER TABLE ... ENABLE TRIGGER ALL))" + pgChange},
			nil,
		},
		{
			"trigger always on", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs); INSERT INTO r VALUES (1); DO $$ DECLARE n text; BEGIN
			FOR n IN SELECT tgname FROM pg_trigger WHERE tgrelid = 'r'::regclass LOOP EXECUTE format('ALTER TABLE r ENABLE ALWAYS TRIGGER %I', n); END LOOP; END $$`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"of a partitioned table", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs) PARTITION BY LIST (b); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1); INSERT INTO r VALUES (1)`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"of one partition", `CREATE TABLE r (b int UNIQUE) PARTITION BY LIST (b); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1); CREATE TABLE r2 PARTITION OF r FOR VALUES IN (2);
			ALTER TABLE r1 ADD CONSTRAINT r_fk FOREIGN KEY (b) REFERENCES blobs; INSERT INTO r VALUES (1), (2)`,
			settled(reg("b")), liveness.Settle, nil,
			[]blob.Key{"3"},
		},
		{
			"of one partition, to another column", `CREATE TABLE r (o int UNIQUE) PARTITION BY LIST (o); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (11);
			ALTER TABLE r1 ADD CONSTRAINT r_fk FOREIGN KEY (o) REFERENCES blobs (other); INSERT INTO r VALUES (11)`,
			settled(reg("o")), "",
			[]string{"M:liveness: foreign key r_fk of public.r1 (o) refers to public.blobs (other), and no source registers it; add {table: public.r1, column: o}"},
			nil,
		},
		{
			"with children that inherit", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs); CREATE TABLE child () INHERITS (r); INSERT INTO r VALUES (1); INSERT INTO child VALUES (2)`,
			reg("b"), "",
			[]string{pgGap + ", which doesn't hold for the tables that inherit from public.r and can have no guard trigger (tables inherit from public.r, and rows of theirs fire no trigger of it)" + pgLeft + "change that, or write guard: settle"},
			nil,
		},
		{
			"with children that inherit, settled", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs); CREATE TABLE child () INHERITS (r); INSERT INTO r VALUES (1); INSERT INTO child VALUES (2)`,
			settled(reg("b")), liveness.Settle, nil,
			[]blob.Key{"3"},
		},
		{
			"settled all the same", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs); INSERT INTO r VALUES (1)`,
			settled(reg("b")), liveness.Settle, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"asked for, and there", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs); INSERT INTO r VALUES (1)`,
			guarded(reg("b"), liveness.ForeignKey), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
		{
			"asked for, and not there", `CREATE TABLE r (b int UNIQUE)`,
			guarded(reg("b"), liveness.ForeignKey), "",
			[]string{pgNoForeignKey},
			nil,
		},
		{
			"asked for by a query", `CREATE TABLE r (b int UNIQUE)`,
			guarded(pgQuery("SELECT b FROM public.r", ""), liveness.ForeignKey), "",
			[]string{"M:liveness[0].guard: source query (a query) has no foreign key and can have no guard trigger, as a query" + pgLeft + "register the table that has one, or write guard: settle"},
			nil,
		},
		{
			"where", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs, gone boolean); INSERT INTO r VALUES (1, true), (2, false)`,
			filtered(reg("b"), "NOT gone"), liveness.ForeignKey,
			[]string{"W:liveness[0].where: it has no effect: foreign key r_fk holds a blob for the rows that it leaves out as well"},
			[]blob.Key{"3"},
		},
		{
			"where that changes by itself", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs, until timestamptz); INSERT INTO r VALUES (1, '2000-01-01')`,
			filtered(reg("b"), "until > now()"), liveness.ForeignKey,
			[]string{"W:liveness[0].where: it has no effect: foreign key r_fk holds a blob for the rows that it leaves out as well"},
			[]blob.Key{"2", "3"},
		},
		{
			"where that changes by itself, without a foreign key", `CREATE TABLE r (b int UNIQUE, until timestamptz); INSERT INTO r VALUES (1, '2000-01-01'), (2, 'infinity')`,
			settled(filtered(reg("b"), "until > now()")), liveness.Settle, nil,
			[]blob.Key{"1", "3"},
		},
		{
			"where, through another column", `CREATE TABLE r (o int UNIQUE CONSTRAINT r_fk REFERENCES blobs (other), gone boolean); INSERT INTO r VALUES (11, true)`,
			filtered(reg("o"), "NOT gone"), liveness.ForeignKey,
			[]string{"W:liveness[0].where: it has no effect: foreign key r_fk holds a blob for the rows that it leaves out as well"},
			[]blob.Key{"2", "3"},
		},
		{
			"where, of several columns", `CREATE TABLE r (t int, b int UNIQUE, gone boolean, CONSTRAINT r_fk FOREIGN KEY (t, b) REFERENCES blobs (tenant, id)); INSERT INTO r VALUES (1, 1, true), (NULL, 2, true)`,
			settled(filtered(reg("b"), "NOT gone")), liveness.Settle,
			[]string{"W:liveness[0].where: it has no effect: foreign key r_fk holds a blob for the rows that it leaves out as well"},
			[]blob.Key{"3"},
		},
		{
			"where, of one partition", `CREATE TABLE r (b int UNIQUE, gone boolean) PARTITION BY LIST (b); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1);
			ALTER TABLE r1 ADD CONSTRAINT r_fk FOREIGN KEY (b) REFERENCES blobs; INSERT INTO r VALUES (1, true)`,
			settled(filtered(reg("b"), "NOT gone")), liveness.Settle,
			[]string{"W:liveness[0].where: it has no effect: foreign key r_fk holds a blob for the rows that it leaves out as well"},
			[]blob.Key{"2", "3"},
		},
		{
			"where and ON DELETE CASCADE", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs ON DELETE CASCADE, gone boolean)`,
			filtered(reg("b"), "NOT gone"), "",
			[]string{takesAlong},
			nil,
		},
		{
			"where and ON DELETE SET NULL", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs ON DELETE SET NULL, gone boolean)`,
			filtered(reg("b"), "NOT gone"), "",
			[]string{takesAlong},
			nil,
		},
		{
			"where and ON DELETE SET DEFAULT", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs ON DELETE SET DEFAULT, gone boolean)`,
			filtered(reg("b"), "NOT gone"), "",
			[]string{takesAlong},
			nil,
		},
		{
			"where and ON DELETE CASCADE of a partition", `CREATE TABLE r (b int UNIQUE, gone boolean) PARTITION BY LIST (b); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1);
			ALTER TABLE r1 ADD CONSTRAINT r_fk FOREIGN KEY (b) REFERENCES blobs ON DELETE CASCADE`,
			settled(filtered(reg("b"), "NOT gone")), "",
			[]string{takesAlong},
			nil,
		},
		{
			"where and ON DELETE RESTRICT", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs ON DELETE RESTRICT, gone boolean); INSERT INTO r VALUES (1, true)`,
			filtered(reg("b"), "NOT gone"), liveness.ForeignKey,
			[]string{"W:liveness[0].where: it has no effect: foreign key r_fk holds a blob for the rows that it leaves out as well"},
			[]blob.Key{"2", "3"},
		},
		{
			"ON DELETE CASCADE without where", `CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs ON DELETE CASCADE); INSERT INTO r VALUES (1)`,
			reg("b"), liveness.ForeignKey, nil,
			[]blob.Key{"2", "3"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newPGWorld(t, blobs+tt.setup)
			p := w.wantFindings(t, tt.name, pgIntPool("blobs", "id"), []liveness.Source{tt.source}, tt.want...)
			if tt.guard == "" {
				return // refused
			}
			wantGuard(t, tt.name, p, tt.guard)
			if p != nil && !cmp.Equal(w.dead(t, p, "1", "2", "3"), tt.dead) {
				t.Errorf("dead: %q, want %q", w.dead(t, p, "1", "2", "3"), tt.dead)
			}
		})
	}
}

const takesAlong = "M:liveness[0].where: foreign key r_fk takes its rows along when a blob goes (ON DELETE CASCADE, SET NULL or SET DEFAULT), " +
	"those that where leaves out too; make it ON DELETE NO ACTION or RESTRICT, or leave where out"

func guarded(s liveness.Source, guard liveness.Guard) liveness.Source {
	s.Guard = guard
	return s
}

func settled(s liveness.Source) liveness.Source { return guarded(s, liveness.Settle) }

func filtered(s liveness.Source, where string) liveness.Source {
	s.Where = where
	return s
}

// The blobs' table is partitioned, and referred to as a whole and in part.
func TestPostgresForeignKeyToPartitions(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE blobs (id int PRIMARY KEY) PARTITION BY RANGE (id);
		CREATE TABLE blobs_1 PARTITION OF blobs FOR VALUES FROM (1) TO (3) PARTITION BY LIST (id);
		CREATE TABLE blobs_11 PARTITION OF blobs_1 FOR VALUES IN (1); CREATE TABLE blobs_12 PARTITION OF blobs_1 FOR VALUES IN (2);
		CREATE TABLE blobs_3 PARTITION OF blobs FOR VALUES FROM (3) TO (9);
		INSERT INTO blobs SELECT generate_series(1, 4);
		CREATE TABLE whole (b int UNIQUE REFERENCES blobs) PARTITION BY LIST (b); CREATE TABLE whole_1 PARTITION OF whole FOR VALUES IN (1);
		CREATE TABLE deep (b int UNIQUE REFERENCES blobs_12);
		INSERT INTO whole VALUES (1); INSERT INTO deep VALUES (2)`)
	w.wantFindings(t, "to a partition, unregistered", pgIntPool("blobs", "id"), []liveness.Source{pgSource("whole", "b", "")},
		"M:liveness: foreign key deep_b_fkey of public.deep (b) refers to public.blobs (id), and no source registers it; add {table: public.deep, column: b}")
	// Each is named once, although the server hands it down to the partitions.
	w.wantFindings(t, "nothing registered", pgIntPool("blobs", "id"), nil,
		"M:liveness: foreign key deep_b_fkey of public.deep (b) refers to public.blobs (id), and no source registers it; add {table: public.deep, column: b}",
		"M:liveness: foreign key whole_b_fkey of public.whole (b) refers to public.blobs (id), and no source registers it; add {table: public.whole, column: b}")
	p := w.wantFindings(t, "registered", pgIntPool("blobs", "id"), []liveness.Source{pgSource("whole", "b", ""), pgSource("deep", "b", "")})
	wantGuard(t, "registered", p, liveness.ForeignKey)
	if dead := w.dead(t, p, "1", "2", "3", "4"); !cmp.Equal(dead, []blob.Key{"3", "4"}) {
		t.Errorf("dead: %q", dead)
	}
	// A tier may be one partition: what leads to the whole leads to it.
	_, found := w.resolve(t, pgIntPool("blobs_3", "id"), settled(pgSource("deep", "b", "")))
	// The server numbers the name of what it hands down.
	if len(found) != 1 || !strings.Contains(found[0].Message, "of public.whole (b) refers to public.blobs_3 (id), and no source registers it") {
		t.Errorf("the tier is a partition: %v", found)
	}
	p = w.wantFindings(t, "the tier is a partition, registered", pgIntPool("blobs_3", "id"), []liveness.Source{pgSource("whole", "b", "")})
	wantGuard(t, "the tier is a partition, registered", p, liveness.ForeignKey)
}

// A key that is text or bytes: a foreign key says that the values are the keys.
func TestPostgresForeignKeyAndFormat(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (name text PRIMARY KEY); INSERT INTO blobs VALUES ('xa'), ('a'), ('b');
		CREATE TABLE r (b text UNIQUE CONSTRAINT r_fk REFERENCES blobs); INSERT INTO r VALUES ('xa')`)
	pool := pgPool{Options: liveness.Options{Kind: blob.KindText, Enforce: true}, table: "blobs", column: "name"}
	w.wantFindings(t, "a format", pool, []liveness.Source{pgSource("r", "b", "x{text}")},
		"M:liveness[0].format: by foreign key r_fk the values of public.r.b are keys as they are; leave format out")
	p := w.wantFindings(t, "the format that it has", pool, []liveness.Source{pgSource("r", "b", "{text}")})
	if dead := w.dead(t, p, "a", "b", "xa"); !cmp.Equal(dead, []blob.Key{"a", "b"}) {
		t.Errorf("dead: %q", dead)
	}
}

// The blobs' table in another schema, and names that need quotes.
func TestPostgresForeignKeyOddNames(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs ("a""b" uuid PRIMARY KEY, "O o" int UNIQUE); INSERT INTO blobs VALUES ('00000000-0000-0000-0000-000000000001', 7), ('00000000-0000-0000-0000-000000000002', 8);
		CREATE TABLE "R r" ("c'd" int UNIQUE CONSTRAINT "F f" REFERENCES blobs ("O o"), "w""e" boolean); INSERT INTO "R r" VALUES (7)`)
	pool := pgPool{Options: liveness.Options{Kind: blob.KindUUID, Enforce: true}, table: "blobs", column: `a"b`}
	w.wantFindings(t, "unregistered", pool, nil,
		`M:liveness: foreign key F f of public."R r" (c'd) refers to public.blobs (O o), and no source registers it; add {table: public."R r", column: c'd}`)
	s := pgSource("R r", "c'd", "")
	s.Where = `"w""e" IS NULL`
	p := w.wantFindings(t, "registered", pool, []liveness.Source{s},
		"W:liveness[0].where: it has no effect: foreign key F f holds a blob for the rows that it leaves out as well")
	dead := w.dead(t, p, "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002")
	if !cmp.Equal(dead, []blob.Key{"00000000-0000-0000-0000-000000000002"}) {
		t.Errorf("dead: %q", dead)
	}
	if probe := p.Sources()[0].Probe; probe != "joined through public.blobs (O o)" {
		t.Errorf("probe: %s", probe)
	}
}

// The blobs are in another database: settle is the best there is.
func TestPostgresElsewhere(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); CREATE TABLE r (b int UNIQUE REFERENCES blobs); INSERT INTO blobs VALUES (1); INSERT INTO r VALUES (1)`)
	pool := pgPool{Options: liveness.Options{Kind: blob.KindInt, Enforce: true, Elsewhere: true}}
	const elsewhere = "M:liveness[0].guard: source r (public.r.b) refers to blobs in another database, where no foreign key leads" + pgLeft + "write guard: settle"
	w.wantFindings(t, "auto", pool, []liveness.Source{pgSource("r", "b", "")},
		elsewhere)
	w.wantFindings(t, "foreign_key", pool, []liveness.Source{guarded(pgSource("r", "b", ""), liveness.ForeignKey)},
		elsewhere)
	p := w.wantFindings(t, "settle", pool, []liveness.Source{settled(pgSource("r", "b", ""))})
	wantGuard(t, "settle", p, liveness.Settle)
	pool.Enforce = false
	p = w.wantFindings(t, "observe", pool, []liveness.Source{pgSource("r", "b", "")})
	wantGuard(t, "observe", p, liveness.Settle)
	if !strings.Contains(p.Sources()[0].LeavesOpen, "starts writing after the wait") {
		t.Errorf("left open: %s", p.Sources()[0].LeavesOpen)
	}
}

// Without a guard, observing is fine.
func TestPostgresObserveWithoutGuard(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); CREATE TABLE r (b int UNIQUE)`)
	pool := pgIntPool("blobs", "id")
	w.wantFindings(t, "enforce", pool, []liveness.Source{pgSource("r", "b", "")}, pgNoForeignKey)
	pool.Enforce = false
	wantGuard(t, "observe", w.wantFindings(t, "observe", pool, []liveness.Source{pgSource("r", "b", "")}), liveness.Settle)
	// A foreign key that appears covers it from then on.
	pgtest.Exec(t, w.app, "ALTER TABLE r ADD FOREIGN KEY (b) REFERENCES blobs")
	wantGuard(t, "with a foreign key", w.wantFindings(t, "with a foreign key", pool, []liveness.Source{pgSource("r", "b", "")}), liveness.ForeignKey)
}

// A foreign key that comes or goes during a sweep is a change: what it holds was
// never asked about, or nothing guards any more.
func TestPostgresForeignKeyChanges(t *testing.T) {
	t.Parallel()
	w := newPGWorld(t, `
		CREATE TABLE blobs (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE blobs_1 PARTITION OF blobs FOR VALUES FROM (1) TO (100);
		CREATE TABLE r (b int UNIQUE CONSTRAINT r_fk REFERENCES blobs) PARTITION BY LIST (b); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1)`)
	p := w.mustResolve(t, pgIntPool("blobs", "id"), pgSource("r", "b", ""))
	tests := []struct {
		name, change, undo string
		want               []string
	}{
		{"nothing", "SELECT", "SELECT", nil},
		{"a partition of the references", "CREATE TABLE r2 PARTITION OF r FOR VALUES IN (2)", "DROP TABLE r2", nil},
		{"a partition of the blobs", "CREATE TABLE blobs_2 PARTITION OF blobs FOR VALUES FROM (100) TO (200)", "SELECT", nil},
		{"an index", "CREATE INDEX extra ON r (b)", "DROP INDEX extra", nil},
		{"a new one", "CREATE TABLE n (b int CONSTRAINT n_fk REFERENCES blobs ON DELETE CASCADE)", "DROP TABLE n", []string{"foreign key n_fk of public.n"}},
		{"a new one to a partition", "CREATE TABLE n (b int CONSTRAINT n_fk REFERENCES blobs_1)", "DROP TABLE n", []string{"foreign key n_fk of public.n"}},
		{"disabled", "ALTER TABLE r1 DISABLE TRIGGER ALL", "ALTER TABLE r1 ENABLE TRIGGER ALL", []string{"foreign key r_fk of public.r"}},
		{"deferrable", "ALTER TABLE r ALTER CONSTRAINT r_fk DEFERRABLE", "ALTER TABLE r ALTER CONSTRAINT r_fk NOT DEFERRABLE", []string{"foreign key r_fk of public.r"}},
		{"nothing any more", "SELECT", "SELECT", nil},
		{"dropped", "ALTER TABLE r DROP CONSTRAINT r_fk", "ALTER TABLE r ADD CONSTRAINT r_fk FOREIGN KEY (b) REFERENCES blobs", []string{"foreign key r_fk of public.r"}},
		{"made anew, as it was", "SELECT", "SELECT", []string{"foreign key r_fk of public.r"}},
		{"made anew, to cascade", "ALTER TABLE r DROP CONSTRAINT r_fk; ALTER TABLE r ADD CONSTRAINT r_fk FOREIGN KEY (b) REFERENCES blobs ON DELETE CASCADE", "SELECT", []string{"foreign key r_fk of public.r"}},
	}
	for _, tt := range tests {
		pgtest.Exec(t, w.app, tt.change)
		w.read(t, func(ctx context.Context, tx pgx.Tx) {
			got, err := p.Changed(ctx, tx)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.name, diff)
			}
		})
		pgtest.Exec(t, w.app, tt.undo)
	}
}
