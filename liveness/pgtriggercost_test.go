package liveness_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

// triggerCostSQL makes a function that refers to n blobs, from the first on, in a
// table, and returns how many microseconds each took inside the server, with what
// waits for the commit.
const triggerCostSQL = `CREATE FUNCTION cost(into_table text, first int, n int) RETURNS float8 LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := ARRAY(SELECT 'sha256:' || encode(sha256(i::text::bytea), 'hex') FROM generate_series(first, first + n - 1) i);
	key text;
	began timestamptz := clock_timestamp();
BEGIN
	FOREACH key IN ARRAY keys LOOP
		EXECUTE format('INSERT INTO %I (blob) VALUES ($1)', into_table) USING key;
	END LOOP;
	SET CONSTRAINTS ALL IMMEDIATE;
	RETURN extract(epoch FROM clock_timestamp() - began) * 1000000 / n;
END $$`

// The trigger costs a writer less than 50 µs of the server's time a reference, on
// a machine that is otherwise idle. One that is busy with other tests is allowed
// more: the quickest round says best what it costs, the middle one only that it
// isn't out of all proportion.
func TestTriggerCost(t *testing.T) {
	t.Parallel()
	const rounds, n = 150, 50
	w := newPGWorld(t, `CREATE TABLE blobs (id bytea PRIMARY KEY); INSERT INTO blobs SELECT sha256(i::text::bytea) FROM generate_series(1, 40000) i; ANALYZE blobs;`+triggerCostSQL)
	tables := []string{"bare", "guarded", "filtered", "deferred"}
	for _, table := range tables {
		pgtest.Exec(t, w.app, fmt.Sprintf(`CREATE TABLE %s (blob text, gone timestamptz); CREATE INDEX ON %[1]s (blob)`, table))
		s := pgSource(table, "blob", "sha256:{hex}")
		if table == "filtered" {
			s.Where = "gone IS NULL"
		}
		if table != "bare" {
			w.install(t, triggerPool(blob.KindBytes, "id"), table == "deferred", s)
			wantGuardOf(t, w, triggerPool(blob.KindBytes, "id").enforced(), s, liveness.Trigger)
		}
	}
	measured := map[string][]float64{}
	first := 1
	for range rounds {
		for _, table := range tables {
			var us float64
			if err := w.app.QueryRow(t.Context(), "SELECT cost($1, $2, $3)", table, first, n).Scan(&us); err != nil {
				t.Fatal(err)
			}
			measured[table] = append(measured[table], us)
			first += n
		}
	}
	middle := func(v []float64) float64 { return slices.Sorted(slices.Values(v))[len(v)/2] }
	for _, table := range tables[1:] {
		lowest, median := slices.Min(measured[table])-slices.Min(measured["bare"]), middle(measured[table])-middle(measured["bare"])
		t.Logf("trigger, %s: %.1f µs a reference in the median, %.1f at the least (without: %.1f, %.1f)",
			table, median, lowest, middle(measured["bare"]), slices.Min(measured["bare"]))
		if lowest > 100 || median > 2000 {
			t.Errorf("the trigger (%s) costs %.1f µs a reference, %.1f in the median", table, lowest, median)
		}
	}
}
