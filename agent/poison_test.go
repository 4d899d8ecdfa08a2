package agent_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/agent"

	"github.com/rs/zerolog"
)

// Of 5,000 dead blobs one can't be deleted, for as long as anybody looks. One sweep
// deletes the 4,999 others, and names the one in its report and in its log.
func TestPoisonKey(t *testing.T) {
	t.Parallel()
	const tombstones = `CREATE TABLE owners (id text PRIMARY KEY); CREATE TABLE tombstones (blob text, owner text REFERENCES owners (id)%s);
		CREATE FUNCTION bury() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.tombstones VALUES (old.id, 'nobody'); RETURN old; END $$;
		CREATE TRIGGER bury BEFORE DELETE ON blobs FOR EACH ROW WHEN (old.id = 'b2500') EXECUTE FUNCTION bury()`
	for name, c := range map[string]struct {
		setup string // of the application's
		held  string // in a transaction that never ends
		cause string
		why   string
	}{
		"foreign key that nobody can satisfy":          {strings.Replace(tombstones, "%s", "", 1), "", "failed", "23503"},
		"deferred foreign key that nobody can satisfy": {strings.Replace(tombstones, "%s", " DEFERRABLE INITIALLY DEFERRED", 1), "", "failed", "23503"},
		"hot row that its delete waits for": {
			`CREATE TABLE tally (n integer); INSERT INTO tally VALUES (0);
			CREATE FUNCTION count_it() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN UPDATE public.tally SET n = n + 1; RETURN old; END $$;
			CREATE TRIGGER tally BEFORE DELETE ON blobs FOR EACH ROW WHEN (old.id = 'b2500') EXECUTE FUNCTION count_it()`,
			`UPDATE tally SET n = 0`, "failed", "55P03",
		},
		"hot row of its own": {`SELECT`, `SELECT FROM blobs WHERE id = 'b2500' FOR NO KEY UPDATE`, "locked", "locked by another transaction"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			a.linkedLibrary(5001)
			a.exec(c.setup)
			var log logBuffer
			cfg := poolYAML{liveness: linkedRefs(), databases: map[string]string{"app": a.url}}
			p := agentOf(t, cfg.String(), agent.Options{Log: log.logger().Level(zerolog.InfoLevel)}).Pools()[0]
			sweep(t, p)
			if c.held != "" {
				a.session("BEGIN", c.held)
			}
			d := decided{}
			rep := sweepWith(t, p, d.options())
			if by := rep.CancelledBy; rep.Overdue != 5000 || rep.Deleted != 4999 || rep.Cancelled != 1 || by.Failed+by.Locked != 1 {
				t.Errorf("%+v", rep)
			}
			if got := d["b2500"]; got.Cause != c.cause || !strings.Contains(got.Detail, c.why) {
				t.Errorf("b2500 is %+v, want %s, because of %s", got, c.cause, c.why)
			}
			a.wantBlobs("b1", "b2500")
			a.wantWindow("b2500")
			wantNamed(t, log.String(), "b2500", c.why)
		})
	}
}

// wantNamed wants one event that names the key, and no other key.
func wantNamed(t *testing.T, log, key, why string) {
	t.Helper()
	var events []string
	for line := range strings.Lines(log) {
		var event map[string]any
		if err := json.Unmarshal([]byte(line), &event); err != nil {
			t.Fatal(err)
		}
		if named, ok := event["key"]; ok {
			events = append(events, line)
			if named != key || !strings.Contains(line, why) {
				t.Errorf("want key %s and %s in %s", key, why, line)
			}
		}
	}
	if len(events) != 1 {
		t.Errorf("%d events name a key, want one:\n%s", len(events), log)
	}
}
