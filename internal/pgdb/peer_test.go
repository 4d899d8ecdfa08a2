package pgdb_test

import (
	"maps"
	"net/url"
	"testing"

	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"

	"github.com/google/go-cmp/cmp"
)

// A client that vanishes is noticed within about a minute, whatever the server's own
// settings are. What the URL says of it goes first.
func TestSilentClientIsNoticed(t *testing.T) {
	t.Parallel()
	server := pgtest.Database(t)
	if u, err := url.Parse(server); err != nil || u.Hostname() == "" || u.Query().Has("host") {
		t.Skip("the server isn't reached by TCP")
	}
	want := map[string]string{
		"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "3",
		"tcp_user_timeout": "60000", "client_connection_check_interval": "2000",
	}
	if diff := cmp.Diff(want, peerSettings(t, server, want)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	given := map[string]string{"tcp_keepalives_idle": "7", "tcp_user_timeout": "9000", "client_connection_check_interval": "0"}
	maps.Copy(want, given)
	if diff := cmp.Diff(want, peerSettings(t, withParameters(t, server, given), want)); diff != "" {
		t.Errorf("as the URL says: -want +got:\n%s", diff)
	}
}

func peerSettings(t *testing.T, server string, names map[string]string) map[string]string {
	t.Helper()
	conn := pgtest.Session(t, server, pgdb.Options{})
	if conn.Pooled() {
		t.Error("a connection to the server itself counts as pooled")
	}
	got := map[string]string{}
	for name := range names {
		var value string
		if err := conn.QueryRow(t.Context(), `SELECT setting FROM pg_settings WHERE name = $1`, name).Scan(&value); err != nil {
			t.Fatal(err)
		}
		got[name] = value
	}
	return got
}

func withParameters(t *testing.T, server string, parameters map[string]string) string {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	for name, value := range parameters {
		query.Set(name, value)
	}
	u.RawQuery = query.Encode()
	return u.String()
}
