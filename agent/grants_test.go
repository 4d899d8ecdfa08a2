package agent_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/jackc/pgx/v5"
)

// grantsWorld is an application of whose databases nobody has any right but their
// owner, and a role that has nothing.
type grantsWorld struct {
	*app
	other *app // another database of the application's

	role  string
	as    app    // the first database, through the role
	url   string // of the other one, for the role
	yaml  poolYAML
	admin *agent.Agent

	granted bool // something, at least
}

const (
	revokeDatabase = `REVOKE ALL ON DATABASE %s FROM PUBLIC`
	revokePublic   = `REVOKE ALL ON SCHEMA public FROM PUBLIC`
)

// newGrantsWorld has a source, a tier and a guard of each kind.
func newGrantsWorld(t *testing.T, mode string) *grantsWorld {
	t.Helper()
	w := &grantsWorld{app: newPostgresApp(t), other: newPostgresApp(t)}
	for _, a := range []*app{w.app, w.other} {
		a.exec(fmt.Sprintf(revokeDatabase, pgx.Identifier{a.column(`SELECT current_database()`)[0]}.Sanitize()), revokePublic)
	}
	w.exec(`CREATE SCHEMA "the App"`, `CREATE SCHEMA views`,
		`CREATE TABLE blobs (id text PRIMARY KEY, size integer, num integer NOT NULL UNIQUE, secret text)`,
		`CREATE TABLE "the App"."Old blobs" (id text PRIMARY KEY, secret text) PARTITION BY RANGE (id)`,
		`CREATE TABLE "the App".old_all PARTITION OF "the App"."Old blobs" FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`,
		`CREATE TABLE refs (id integer PRIMARY KEY, blob text REFERENCES blobs, secret text)`, `CREATE INDEX ON refs (blob)`,
		`CREATE TABLE covers (num integer REFERENCES blobs (num) ON DELETE CASCADE, secret text)`, `CREATE INDEX ON covers (num)`,
		`CREATE TABLE exports (id integer PRIMARY KEY, name text UNIQUE, deleted_at timestamptz, secret text)`,
		`CREATE TABLE "the App".docs (id integer PRIMARY KEY, body jsonb, secret text)`,
		`CREATE TABLE counted (id integer)`, `CREATE TABLE wholes (id integer, blob text, secret text)`,
		`INSERT INTO counted VALUES (1)`, `INSERT INTO wholes VALUES (1, 'b1')`,
		`CREATE FUNCTION "the App".files(body jsonb) RETURNS SETOF text LANGUAGE sql SECURITY DEFINER AS $$ SELECT jsonb_array_elements_text(body) $$`,
		`CREATE FUNCTION views.clean(text) RETURNS text LANGUAGE sql AS 'SELECT lower($1)'`,
		`REVOKE ALL ON FUNCTION "the App".files(jsonb), views.clean(text) FROM PUBLIC`,
		`CREATE VIEW views.by_owner AS SELECT id, views.clean(name) AS name FROM public.exports`,
		`CREATE VIEW views.by_caller AS SELECT secret, blob FROM public.refs WHERE id > 0`,
		`INSERT INTO blobs (id, size, num) SELECT 'b' || i, 10, i FROM generate_series(1, 9) AS i`,
		`INSERT INTO "the App"."Old blobs" SELECT 'o' || i FROM generate_series(1, 3) AS i`,
		`INSERT INTO refs VALUES (1, 'b1')`, `INSERT INTO covers VALUES (2)`,
		`INSERT INTO exports VALUES (1, 'x:b3')`, `INSERT INTO "the App".docs VALUES (1, '["b4", "o1"]')`)
	if w.number(`SELECT current_setting('server_version_num')::int`) >= 150000 {
		w.exec(`ALTER VIEW views.by_caller SET (security_invoker = true)`)
	}
	w.other.exec(`CREATE TABLE invoices (id integer PRIMARY KEY, scan text UNIQUE, secret text)`, `INSERT INTO invoices VALUES (1, 'b5')`)
	w.yaml = poolYAML{
		mode: mode, extra: "fleet: true",
		blobs: "{type: table, table: blobs, column: id, size: size}\n      - {type: table, table: 'the App.Old blobs', column: id}",
		liveness: []string{
			"{name: refs, table: refs, column: blob}",
			"{name: covers, table: covers, column: num}",
			`{name: exports, table: exports, column: name, format: "x:{text}", where: "deleted_at IS NULL", guard: settle}`,
			`{name: docs, query: 'SELECT f FROM "the App".docs d, "the App".files(d.body) AS f', guard: settle}`,
			`{name: by_owner, table: views.by_owner, column: name, format: "x:{text}", guard: settle, on_unparseable: ignore}`,
			`{name: by_caller, query: "SELECT blob FROM views.by_caller WHERE (SELECT count(*) FROM public.counted) > 0", guard: settle}`,
			`{name: whole, query: "SELECT to_jsonb(w) ->> 'blob' FROM public.wholes w WHERE w.id > 0", guard: table_lock}`,
			"{name: invoices, database: other, table: invoices, column: scan, guard: settle}",
		},
		databases: map[string]string{"other": w.other.url},
	}
	w.admin = w.agent(w.yaml, agent.Options{})

	w.role, w.as.url = pgtest.Role(t, w.app.url, "NOSUPERUSER")
	w.as.t, w.as.engine, w.as.db = t, w.engine, w.db
	w.url = strings.Replace(w.as.url, w.column(`SELECT current_database()`)[0], w.other.column(`SELECT current_database()`)[0], 1)
	t.Cleanup(func() { w.run("DROP OWNED BY " + w.role) })
	return w
}

// run runs a statement in both databases.
func (w *grantsWorld) run(statement string) {
	for _, a := range []*app{w.app, w.other} {
		if _, err := a.db.ExecContext(context.Background(), statement); err != nil {
			w.t.Errorf("%s: %v", statement, err)
		}
	}
}

// pool is the pool through the role.
func (w *grantsWorld) pool() *agent.Pool {
	w.t.Helper()
	yaml := w.yaml
	yaml.databases = map[string]string{"other": w.url}
	return w.as.pool(yaml)
}

// grants asks for the role's, as the owner of everything.
func (w *grantsWorld) grants() []agent.DatabaseGrants {
	w.t.Helper()
	all, err := w.admin.Grants(w.t.Context(), w.role, w.admin.Pools())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, d := range all {
		if len(d.Unseen) > 0 {
			w.t.Errorf("database %s: unseen: %q", d.Database, d.Unseen)
		}
	}
	return all
}

func (w *grantsWorld) in(d agent.DatabaseGrants) *app {
	if d.Database == "other" {
		return w.other
	}
	return w.app
}

// grantAll runs what is printed, and sees that nothing is missing then and that the
// same is printed.
func (w *grantsWorld) grantAll() []agent.DatabaseGrants {
	w.t.Helper()
	before := w.grants()
	for _, d := range before {
		for _, g := range d.Grants {
			if !g.Missing && !w.granted {
				w.t.Errorf("%s isn't missing, and nothing was granted", g.Statement)
			}
			w.in(d).exec(g.Statement)
		}
	}
	w.granted = true
	after := w.grants()
	for i, d := range after {
		for k, g := range d.Grants {
			if g.Missing || g.Statement != before[i].Grants[k].Statement {
				w.t.Errorf("after all was granted: %+v, before: %+v", g, before[i].Grants[k])
			}
		}
	}
	return after
}

// faults is everything that check and a sweep that writes nothing complain of.
func (w *grantsWorld) faults() []string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	var list []string
	check, err := w.pool().Check(ctx)
	if err != nil {
		list = append(list, err.Error())
	}
	for _, f := range check.Findings {
		list = append(list, f.String())
	}
	for _, o := range check.Against {
		list = append(list, o.Message)
	}
	return list
}

// eachIsNeeded takes every right away in turn: check has to say so, with the very
// statement that grants prints.
func (w *grantsWorld) eachIsNeeded(all []agent.DatabaseGrants) {
	w.t.Helper()
	if faults := w.faults(); len(faults) > 0 {
		w.t.Fatalf("with all that is printed: %q", faults)
	}
	for _, d := range all {
		for _, g := range d.Grants {
			revoke := strings.TrimSuffix(strings.Replace(g.Statement, "GRANT", "REVOKE", 1), " TO "+w.role) + " FROM " + w.role
			w.in(d).exec(revoke)
			for _, other := range d.Grants {
				// To revoke it on a table is to revoke it on its columns.
				if other.Statement != g.Statement {
					w.in(d).exec(other.Statement)
				}
			}
			faults := strings.Join(w.faults(), "\n")
			if !w.names(faults, g.Statement) {
				w.t.Errorf("without %s in database %s, check says %q", g.Statement, d.Database, faults)
			}
			w.in(d).exec(g.Statement)
		}
	}
}

// names says whether check's faults say which right is missing. Without CONNECT it
// has the server's word alone, and so it has of what stands in the SQL of a source
// where it may not make the temporary view by which that is found out.
func (w *grantsWorld) names(faults, statement string) bool {
	switch {
	case strings.HasPrefix(statement, "GRANT CONNECT"):
		return strings.Contains(faults, "permission denied for database")
	case w.yaml.mode == "observe" && strings.Contains(faults, "grant this role ("+w.role+") what that needs"):
		return true
	default:
		return strings.Contains(faults, statement)
	}
}

func statements(all []agent.DatabaseGrants) (list []string) {
	for _, d := range all {
		for _, g := range d.Grants {
			list = append(list, d.Database+": "+g.Statement)
		}
	}
	return list
}

// Observing takes CONNECT, USAGE, SELECT and EXECUTE, and each of them.
func TestGrantsToObserve(t *testing.T) {
	t.Parallel()
	w := newGrantsWorld(t, "observe")
	all := w.grantAll()
	for _, s := range statements(all) {
		verb := strings.Fields(strings.SplitN(s, ": GRANT ", 2)[1])[0]
		if !slices.Contains([]string{"CONNECT", "USAGE", "SELECT", "EXECUTE"}, verb) {
			t.Errorf("to observe: %s", s)
		}
	}
	w.eachIsNeeded(all)
	rep := sweep(t, w.pool())
	wantCounts(t, rep, agent.Report{Scanned: 12, Referenced: 6, CandidatesStaged: 6})
}

// A role that has what is printed, and nothing else, makes its schema, stages,
// deletes, and tidies up.
func TestGrantsToEnforce(t *testing.T) {
	t.Parallel()
	w := newGrantsWorld(t, "enforce")
	w.eachIsNeeded(w.grantAll())
	w.collect()

	// The schema is the role's own by now.
	for _, s := range statements(w.grants()) {
		if strings.Contains(s, "gc_agent") || strings.Contains(s, "GRANT CREATE") {
			t.Errorf("of what the role owns: %s", s)
		}
	}
}

// The same where the schema's owner is somebody else.
func TestGrantsOnASchemaOfAnother(t *testing.T) {
	t.Parallel()
	w := newGrantsWorld(t, "enforce")
	ddl, err := w.admin.Pools()[0].SchemaSQL(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	functions := slices.IndexFunc(ddl, func(s string) bool { return strings.Contains(s, "FUNCTION") })
	w.exec(ddl[:functions]...)
	w.grantAll()
	if faults := w.faults(); len(faults) != 1 || !strings.Contains(faults[0], "gc-agent schema sql p") {
		t.Errorf("without the functions, which the role may not make: %q", faults)
	}
	w.exec(ddl[functions:]...)
	all := w.grantAll()
	if list := strings.Join(statements(all), "\n"); strings.Contains(list, "GRANT CREATE") || strings.Contains(list, "GRANT EXECUTE ON FUNCTION \"gc_agent\"") {
		t.Errorf("nothing is left to make:\n%s", list)
	}
	w.eachIsNeeded(all)
	w.collect()
}

// collect sweeps through the role, beside an application's role that pins.
func (w *grantsWorld) collect() {
	t := w.t
	t.Helper()
	p := w.pool()
	wantCounts(t, sweep(t, p), agent.Report{Scanned: 12, Referenced: 6, CandidatesStaged: 6})

	role, roleURL := pgtest.Role(t, w.app.url, "NOSUPERUSER")
	w.exec(`GRANT CONNECT ON DATABASE ` + pgx.Identifier{w.column(`SELECT current_database()`)[0]}.Sanitize() + ` TO ` + role)
	w.exec(fleet.PinGrants("gc_agent", role)...)
	application := pgtest.Connect(t, roleURL)
	pgtest.Exec(t, application, `SELECT gc_agent.pin('b6'::bytea, 'uploader'::bytea, interval '10 minutes')`)
	w.exec(`ALTER TABLE gc_agent.gc_pins DISABLE TRIGGER USER`, // which refuses a pin that has run out
		`INSERT INTO gc_agent.gc_pins VALUES ('b9', 'gone', 1)`, `ALTER TABLE gc_agent.gc_pins ENABLE ALWAYS TRIGGER gc_pins_expired`)
	writer := w.session("BEGIN", `INSERT INTO "the App".docs VALUES (2, '["b7"]')`)
	if rep := sweep(t, p); rep.Overdue != 0 || !strings.Contains(rep.Detail, "settle") {
		t.Errorf("while a writer is open: %+v", rep)
	}
	pgtest.Exec(t, writer, "COMMIT")
	rep := sweep(t, p)
	wantCounts(t, rep, agent.Report{Scanned: 12, Referenced: 7, Overdue: 6, Deleted: 4, Cancelled: 2, CancelledBy: agent.CancelledBy{Live: 1, Pinned: 1}, BytesReclaimed: 20})
	w.wantBlobs(names(1, 7)...)
	wantColumn(t, w.app, `SELECT owner::text FROM gc_agent.gc_pins`, `\x75706c6f61646572`)

	// Put back by one sweep and taken by the next; what refers to it goes along,
	// with the rights of its owner.
	pgtest.Exec(t, application, `SELECT gc_agent.unpin('b6'::bytea, 'uploader'::bytea)`)
	w.exec(`UPDATE gc_agent.gc_window SET visible_after = 0`)
	if rep := sweep(t, p); rep.Deleted != 1 {
		t.Errorf("once it is unpinned: %+v", rep)
	}
	if faults := w.faults(); len(faults) > 0 {
		t.Errorf("in the end: %q", faults)
	}
}

// A role that may not even look finds out step by step, each time with more of the
// whole, and never with something that isn't part of it.
func TestGrantsStepByStep(t *testing.T) {
	t.Parallel()
	w := newGrantsWorld(t, "enforce")
	want := statements(w.grants())
	yaml := w.yaml
	yaml.databases = map[string]string{"other": w.url}
	plain := w.as.agent(yaml, agent.Options{})
	known := 0
	for step := range 4 {
		all, err := plain.Grants(t.Context(), "", plain.Pools())
		if err != nil {
			t.Fatal(err)
		}
		complete := true
		for _, d := range all {
			complete = complete && len(d.Unseen) == 0
			for _, g := range d.Grants {
				if unquoted := strings.ReplaceAll(d.Database+": "+g.Statement, `"`+w.role+`"`, w.role); !slices.Contains(want, unquoted) {
					t.Errorf("step %d: %s isn't needed", step, unquoted)
				}
				w.in(d).exec(g.Statement)
			}
		}
		list := statements(all)
		if complete {
			if len(list) != len(want) {
				t.Errorf("in the end\n%s\nwant\n%s", strings.Join(list, "\n"), strings.Join(want, "\n"))
			}
			return
		}
		if len(list) <= known {
			t.Fatalf("step %d found nothing new:\n%s", step, strings.Join(list, "\n"))
		}
		known = len(list)
	}
	t.Error("not complete after four steps")
}
