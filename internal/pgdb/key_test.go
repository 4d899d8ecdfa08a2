package pgdb_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// What goes to the server as a key comes back as the same canonical bytes.
func TestKeysRoundTrip(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	for kind, keys := range map[blob.Kind][]blob.Key{
		blob.KindBytes: {"", "\x00", "\xff\xfe", "plain", "é"},
		blob.KindText:  {"", "a b", "é", "e\u0301", `\x00`, "it's", "😀", "\n"},
		blob.KindUUID:  {"00000000-0000-0000-0000-000000000000", "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "ffffffff-ffff-ffff-ffff-ffffffffffff"},
		blob.KindInt:   {"0", "-1", "9223372036854775807", "-9223372036854775808"},
	} {
		param, err := pgdb.Array(kind, keys)
		if err != nil {
			t.Fatal(err)
		}
		var canon [][]byte
		sql := "SELECT array_agg(" + pgdb.Canon(kind, "k.key") + " ORDER BY k.ord) FROM unnest($1::" + pgdb.Type(kind) + "[]) WITH ORDINALITY k (key, ord)"
		if err := conn.QueryRow(t.Context(), sql, param).Scan(&canon); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		if diff := cmp.Diff(pgdb.Bytes(keys), canon); diff != "" {
			t.Errorf("%s (-want +got):\n%s", kind, diff)
		}
	}
}

func TestArrayRefuses(t *testing.T) {
	t.Parallel()
	for kind, key := range map[blob.Kind]blob.Key{
		blob.KindBytes: blob.Key(strings.Repeat("x", blob.MaxKeyLen+1)),
		blob.KindText:  "\xff",
		blob.KindUUID:  "6BA7B810-9DAD-11D1-80B4-00C04FD430C8",
		blob.KindInt:   "01",
		0:              "x",
	} {
		if _, err := pgdb.Array(kind, []blob.Key{key}); err == nil || !strings.Contains(err.Error(), kind.Display(key)) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if _, err := pgdb.Array(0, nil); err == nil {
		t.Error("keys of no kind are no error")
	}
}
