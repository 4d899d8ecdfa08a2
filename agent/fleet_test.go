package agent_test

import (
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// The functions that applications pin by come with fleet: true, and what they
// wrote is what arbitration reads.
func TestFleetPins(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.library(4)
	p := a.pool(poolYAML{liveness: a.refs(), extra: "fleet: true"})
	ddl, err := p.SchemaSQL(t.Context())
	if err != nil || !strings.Contains(strings.Join(ddl, "\n"), "FUNCTION") {
		t.Fatalf("err = %v, want functions in\n%s", err, strings.Join(ddl, "\n"))
	}
	sweep(t, p)
	a.exec(`SELECT gc_agent.pin('b2'::bytea, 'uploader'::bytea, interval '10 minutes')`)
	rep := sweep(t, p)
	if rep.Deleted != 2 || rep.CancelledBy.Pinned != 1 {
		t.Errorf("%+v", rep)
	}
	a.wantBlobs("b1", "b2")
	a.wantWindow("b2")
	a.exec(`SELECT gc_agent.unpin('b2'::bytea, 'uploader'::bytea)`, `UPDATE gc_agent.gc_window SET visible_after = 0`,
		`ALTER TABLE gc_agent.gc_pins DISABLE TRIGGER USER`, // which refuses a pin that has run out
		`INSERT INTO gc_agent.gc_pins VALUES ('b9', 'gone', 1)`)
	if rep := sweep(t, p); rep.Deleted != 1 {
		t.Errorf("once it is unpinned: %+v", rep)
	}
	if n := a.number(`SELECT count(*) FROM gc_agent.gc_pins`); n != 0 {
		t.Errorf("%d pins are left, one of which ran out long ago", n)
	}
}

// A key that is being pinned at this moment is locked, and the others go.
func TestPinUnderWay(t *testing.T) {
	t.Parallel()
	a := newPostgresApp(t)
	a.exec(`CREATE TABLE blobs (id text PRIMARY KEY NOT NULL, size integer)`,
		`CREATE TABLE refs (blob text REFERENCES blobs (id))`, `CREATE INDEX ON refs (blob)`)
	a.fill("blobs", 4)
	a.exec(`INSERT INTO refs VALUES ('b1')`)
	p := a.pool(poolYAML{liveness: []string{"{name: refs, table: refs, column: blob}"}, extra: "fleet: true"})
	sweep(t, p)
	pinning := a.session("BEGIN", `SELECT gc_agent.pin('b2'::bytea, 'uploader'::bytea, interval '10 minutes')`)
	if rep := sweep(t, p); rep.Deleted != 2 || rep.CancelledBy.Locked != 1 {
		t.Errorf("while it is being pinned: %+v", rep)
	}
	pgtest.Exec(t, pinning, "COMMIT")
	if rep := sweep(t, p); rep.Deleted != 0 || rep.CancelledBy.Pinned != 1 {
		t.Errorf("once it is pinned: %+v", rep)
	}
	a.wantBlobs("b1", "b2")
}
