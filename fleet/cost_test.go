package fleet_test

import (
	"slices"
	"testing"

	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// costSQL makes a function that writes n references to blobs from the first on,
// and returns how many microseconds each took inside the server: without a pin, or
// each after one of its own, or all after one call. What waits for the commit is
// counted.
const costSQL = `CREATE FUNCTION cost(how text, first int, n int) RETURNS float8 LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := ARRAY(SELECT encode(sha256(i::text::bytea), 'hex') FROM generate_series(first, first + n - 1) i);
	key text;
	began timestamptz := clock_timestamp();
BEGIN
	IF how = 'all' THEN
		PERFORM {schema}.pin(ARRAY(SELECT convert_to(k, 'UTF8') FROM unnest(keys) k), 'me', '60 s');
	END IF;
	FOREACH key IN ARRAY keys LOOP
		IF how = 'one' THEN
			PERFORM {schema}.pin(convert_to(key, 'UTF8'), 'me', '60 s');
		END IF;
		INSERT INTO refs VALUES (key);
	END LOOP;
	SET CONSTRAINTS ALL IMMEDIATE;
	RETURN extract(epoch FROM clock_timestamp() - began) * 1000000 / n;
END $$`

// A pin costs a writer less than 50 µs of the server's time a reference, on a
// machine that is otherwise idle. One that is busy with other tests is allowed
// more: the quickest round says best what a pin costs, and the middle one only that
// it isn't out of all proportion.
func TestPinCost(t *testing.T) {
	t.Parallel()
	// Rounds so short that some run through without being interrupted.
	const rounds, n = 150, 50
	_, conn := newPool(t)
	pgtest.Exec(t, conn, replaceSchema(costSQL))
	pgtest.Exec(t, conn, `INSERT INTO "Blobs" SELECT encode(sha256(i::text::bytea), 'hex') FROM generate_series(1, 30000) i; ANALYZE "Blobs"`)
	measured := map[string][]float64{}
	first := 1
	for range rounds {
		for _, how := range []string{"none", "one", "all"} {
			measured[how] = append(measured[how], ask[float64](t, conn, "SELECT cost($1, $2, $3)", how, first, n))
			first += n
		}
	}
	for _, how := range []string{"one", "all"} {
		lowest := slices.Min(measured[how]) - slices.Min(measured["none"])
		middle := median(measured[how]) - median(measured["none"])
		t.Logf("pin %s: %.1f µs a reference in the median, %.1f at the least (without: %.1f, %.1f)",
			how, middle, lowest, median(measured["none"]), slices.Min(measured["none"]))
		if lowest > 100 || middle > 2000 {
			t.Errorf("pin %s costs %.1f µs a reference, %.1f in the median", how, lowest, middle)
		}
	}
}

func median(values []float64) float64 {
	values = slices.Sorted(slices.Values(values))
	return values[len(values)/2]
}
