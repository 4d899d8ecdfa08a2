package pgtest

import (
	"context"
	"testing"

	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// Session opens a connection as the agent's are. The test may close it before its
// end.
func Session(t testing.TB, url string, opts pgdb.Options) *pgdb.Conn {
	t.Helper()
	db, err := pgdb.Open(url, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	conn, err := db.Dedicated(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}
