package agent_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
)

// Inputs from the field, each with its one right answer. "Dead" is what two
// sweeps delete.

// T05: a key became referenced after it was staged (immich 30933).
func TestReferencedAfterStaged(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer)`, `CREATE TABLE asset (path text)`,
			`INSERT INTO blobs VALUES ('m/1.mov', 10), ('m/2.mov', 20)`)
		p := a.pool(poolYAML{liveness: []string{"{name: asset, table: asset, column: path, allow_empty: true, guard: " + a.settle() + "}"}})
		if rep := sweep(t, p); rep.CandidatesStaged != 2 || rep.Deleted != 0 {
			t.Fatalf("first sweep: %+v", rep)
		}
		a.exec(`INSERT INTO asset VALUES ('m/1.mov')`)
		rep := sweep(t, p)
		if rep.Deleted != 1 || rep.CancelledBy.Live != 1 || rep.BytesReclaimed != 20 {
			t.Errorf("second sweep: %+v", rep)
		}
		wantColumn(t, a, `SELECT id FROM blobs`, "m/1.mov")
		if got := a.window(); len(got) != 0 {
			t.Errorf("window still holds %v", got)
		}
	})
}

// T07: a foreign key that nobody registered (getodk central-backend 452, 1174).
func TestUnregisteredForeignKey(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.exec(`CREATE TABLE blobs (id integer PRIMARY KEY NOT NULL, content text, size integer)`,
			`CREATE TABLE audits (blob integer)`, `CREATE TABLE sub_att (blob integer)`, `CREATE TABLE form_att (blob integer)`,
			`CREATE TABLE form_defs (xls integer REFERENCES blobs (id))`,
			`INSERT INTO blobs (id) VALUES (1), (2), (3), (4), (5)`,
			`INSERT INTO audits VALUES (1)`, `INSERT INTO sub_att VALUES (2), (NULL)`, `INSERT INTO form_att VALUES (3)`, `INSERT INTO form_defs VALUES (4)`)
		pool := poolYAML{}
		for _, table := range []string{"audits", "sub_att", "form_att"} {
			pool.liveness = append(pool.liveness, fmt.Sprintf("{name: %s, table: %s, column: blob, guard: %s}", table, table, a.settle()))
		}
		_, err := a.pool(pool).Sweep(t.Context(), agent.SweepOptions{})
		var bad *agent.MisconfiguredError
		if !errors.As(err, &bad) || !strings.Contains(err.Error(), "form_defs") || !strings.Contains(err.Error(), "foreign key") {
			t.Fatalf("err = %v, want a refusal that names the foreign key of form_defs", err)
		}
		if a.hasWindow() {
			t.Error("a refused configuration touched the database")
		}
		pool.liveness = append(pool.liveness, "{name: form_defs, table: form_defs, column: xls}")
		p := a.pool(pool)
		sweep(t, p)
		sweep(t, p)
		wantColumn(t, a, `SELECT id FROM blobs`, "1", "2", "3", "4")
	})
}

// T08: NULLs and a soft-delete flag (MeshCentral 7798, thunderbird-android 2137).
func TestNullsAndSoftDelete(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		a.exec(`CREATE TABLE blobs (id integer PRIMARY KEY NOT NULL, size integer)`, `CREATE TABLE msgs (part_id integer, deleted integer)`,
			`INSERT INTO blobs (id) VALUES (1), (2), (3)`, `INSERT INTO msgs VALUES (1, 0), (NULL, 0), (2, 1)`)
		p := a.pool(poolYAML{liveness: []string{"{name: msgs, table: msgs, column: part_id, where: deleted = 0, guard: " + a.settle() + "}"}})
		sweep(t, p)
		if rep := sweep(t, p); rep.Deleted != 2 {
			t.Errorf("second sweep: %+v", rep)
		}
		wantColumn(t, a, `SELECT id FROM blobs`, "1")
	})
}

// T16: a reference table that lies (gitea 36227, harbor 15445).
func TestLyingReferenceTable(t *testing.T) {
	setup := func(a *app) {
		a.exec(`CREATE TABLE blobs (id integer PRIMARY KEY NOT NULL, size integer)`, `CREATE TABLE refs (blob integer)`,
			`INSERT INTO blobs (id) WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) SELECT i FROM n`)
	}
	pool := func(a *app) poolYAML {
		return poolYAML{brakes: "{}", liveness: []string{"{name: refs, table: refs, column: blob, guard: " + a.settle() + "}"}}
	}
	t.Run("missing", func(t *testing.T) {
		eachEngine(t, func(t *testing.T, a *app) {
			setup(a)
			a.exec(`DROP TABLE refs`)
			rep := wantAbort(t, a.pool(pool(a)), agent.SweepOptions{}, agent.CauseProtectFailed)
			if !strings.Contains(rep.Detail, "refs") {
				t.Errorf("detail = %q, want the table named", rep.Detail)
			}
			wantUntouched(t, a, 1000)
		})
	})
	t.Run("empty", func(t *testing.T) {
		eachEngine(t, func(t *testing.T, a *app) {
			setup(a)
			rep := wantAbort(t, a.pool(pool(a)), agent.SweepOptions{}, agent.CauseEmptySource)
			if !strings.Contains(rep.Detail, "refs") {
				t.Errorf("detail = %q, want the source named", rep.Detail)
			}
			wantUntouched(t, a, 1000)
		})
	})
	t.Run("connection cut", func(t *testing.T) {
		t.Parallel()
		a := newPostgresApp(t)
		setup(a)
		// A set-returning function that ends its own session after 500 rows.
		a.exec(`INSERT INTO refs SELECT generate_series(1, 1000)`, `CREATE FUNCTION lie() RETURNS SETOF integer LANGUAGE plpgsql AS $$
			DECLARE r record; n integer := 0;
			BEGIN
				FOR r IN SELECT blob FROM public.refs LOOP
					n := n + 1;
					IF n > 500 THEN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(10); END IF;
					RETURN NEXT r.blob;
				END LOOP;
			END $$`)
		p := a.pool(poolYAML{brakes: "{}", liveness: []string{`{name: refs, query: "SELECT public.lie()", guard: settle}`}})
		wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed)
		wantUntouched(t, a, 1000)
	})
}

func wantUntouched(t *testing.T, a *app, blobs int64) {
	t.Helper()
	if n := a.number(`SELECT count(*) FROM blobs`); n != blobs {
		t.Errorf("%d blobs are left of %d", n, blobs)
	}
	if a.hasWindow() {
		if n := a.number(`SELECT count(*) FROM ` + a.windowTable()); n != 0 {
			t.Errorf("%d keys are staged", n)
		}
	}
}

// T19: one digest, three spellings (OCFL spec 461, go-digest 3).
func TestThreeSpellings(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		bytesType, raw := "bytea", `'\x%s'::bytea`
		if a.engine == "sqlite" {
			bytesType, raw = "BLOB", "x'%s'"
		}
		h := make([]string, 5)
		for i := range h {
			h[i] = strings.Repeat(fmt.Sprintf("a%d", i), 32)
		}
		a.exec(`CREATE TABLE blobs (id `+bytesType+` PRIMARY KEY NOT NULL, size integer)`,
			`CREATE TABLE m (d text)`, `CREATE TABLE l (d text)`, `CREATE TABLE c (r `+bytesType+`)`)
		for _, digits := range h[1:] {
			a.exec(`INSERT INTO blobs (id) VALUES (` + fmt.Sprintf(raw, digits) + `)`)
		}
		a.exec(`INSERT INTO m VALUES ('sha256:`+h[1]+`')`, `INSERT INTO l VALUES ('`+strings.ToUpper(h[2])+`')`, `INSERT INTO c VALUES (`+fmt.Sprintf(raw, h[3])+`)`)
		guard := "guard: " + a.settle()
		p := a.pool(poolYAML{liveness: []string{
			`{name: m, table: m, column: d, format: "sha256:{hex}", ` + guard + `}`,
			`{name: l, table: l, column: d, format: "{HEX}", ` + guard + `}`,
			`{name: c, table: c, column: r, ` + guard + `}`,
		}})
		sweep(t, p)
		sweep(t, p)
		wantColumn(t, a, a.hexIDs(), h[1], h[2], h[3])
	})
}

// hexIDs reads keys that are bytes.
func (a *app) hexIDs() string {
	if a.engine == "postgres" {
		return `SELECT encode(id, 'hex') FROM blobs`
	}
	return `SELECT lower(hex(id)) FROM blobs`
}

// The same upper-case digests, registered as {hex}: a probe would miss them.
func TestOtherSpellingStopsTheSweep(t *testing.T) {
	eachEngine(t, func(t *testing.T, a *app) {
		bytesType, key := "bytea", `'\xa1'::bytea`
		if a.engine == "sqlite" {
			bytesType, key = "BLOB", "x'a1'"
		}
		a.exec(`CREATE TABLE blobs (id `+bytesType+` PRIMARY KEY NOT NULL, size integer)`, `CREATE TABLE l (d text)`,
			`INSERT INTO blobs (id) VALUES (`+key+`)`, `INSERT INTO l VALUES ('A1')`)
		a.exec(`CREATE INDEX l_d ON l (d)`)
		p := a.pool(poolYAML{liveness: []string{`{name: l, table: l, column: d, format: "{hex}", guard: ` + a.settle() + `}`}})
		rep := wantAbort(t, p, agent.SweepOptions{}, agent.CauseProtectFailed)
		if !strings.Contains(rep.Detail, `"A1"`) || !strings.Contains(rep.Detail, "CREATE INDEX") {
			t.Errorf("detail = %q, want the value and the index", rep.Detail)
		}
		_, index, _ := strings.Cut(rep.Detail, "or run: ")
		a.exec(index)
		sweep(t, p)
		sweep(t, p)
		wantColumn(t, a, a.hexIDs(), "a1")
	})
}
