package fleet_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// TestMain wants, once all tests have run, that every switch has lost a blob.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		whole := flag.Lookup("test.run").Value.String() == "" && flag.Lookup("test.list").Value.String() == "" &&
			flag.Lookup("test.skip").Value.String() == "" && os.Getenv(pgtest.Variable) != ""
		if names := unraced(); code == 0 && whole && len(names) > 0 {
			fmt.Fprintf(os.Stderr, "no race has lost its blob without %v\n", names)
			code = 1
		}
		os.Exit(code)
	}))
}

const schema = `Gc "Agent"`

// patient makes a test that waits for itself fail.
var patient = pgdb.Timeouts{Lock: 10 * time.Second}

// connect opens a connection that the test may close before its end.
func connect(t *testing.T, url string, timeouts pgdb.Timeouts) *pgdb.Conn {
	t.Helper()
	return pgtest.Session(t, url, pgdb.Options{Timeouts: timeouts})
}

func inTx(t *testing.T, conn *pgdb.Conn, fn func(context.Context, pgx.Tx) error) {
	t.Helper()
	check(t, conn.InTx(t.Context(), pgdb.ReadWrite, fn))
}

func equal[T any](t *testing.T, got, want T) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
