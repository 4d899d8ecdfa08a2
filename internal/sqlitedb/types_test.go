package sqlitedb

import (
	"database/sql"
	"path/filepath"
	"testing"
)

// What a type does to values is SQLite's to say.
func TestClassifyAgreesWithSQLite(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("sqlite", filepath.Join(t.TempDir(), "types.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}()
	for declared, want := range map[string]Class{
		"": ClassAny, "INTEGER": ClassInt, "unsigned big int": ClassInt, "POINT": ClassInt, "CHARINT": ClassInt,
		"varchar(64)": ClassText, "Clob": ClassText, "TEXT": ClassText, "uuid_text": ClassText, "BLOBCHAR": ClassText,
		"BLOB": ClassBytes, "blob real": ClassBytes,
		"DOUBLE PRECISION": ClassReal, "float": ClassReal, "REAL": ClassReal,
		"UUID": ClassUUID, "guid": ClassUUID, "UniqueIdentifier": ClassUUID,
		"NUMERIC": ClassNumber, "decimal(10, 2)": ClassNumber, "NUMBER": ClassNumber,
		"STRING": ClassOther, "DATE": ClassOther, "ANY": ClassOther, "ınteger": ClassOther,
	} {
		class, affinity := classify(declared, false)
		if class != want {
			t.Errorf("%q: class %d, want %d", declared, class, want)
		}
		var fromText, fromInt string
		for _, stmt := range []string{`DROP TABLE IF EXISTS v`, `CREATE TABLE v (x ` + declared + `)`, `INSERT INTO v VALUES ('1'), (1)`} {
			if _, err := db.Exec(stmt); err != nil {
				t.Fatal(err)
			}
		}
		if err := db.QueryRow(`SELECT min(typeof(x)) FILTER (WHERE rowid = 1), min(typeof(x)) FILTER (WHERE rowid = 2) FROM v`).Scan(&fromText, &fromInt); err != nil {
			t.Fatal(err)
		}
		stored := map[Affinity][2]string{
			AffinityNone: {"text", "integer"}, AffinityText: {"text", "text"}, AffinityReal: {"real", "real"},
			AffinityInteger: {"integer", "integer"}, AffinityNumeric: {"integer", "integer"},
		}[affinity]
		if got := [2]string{fromText, fromInt}; got != stored {
			t.Errorf("%q: a text and an integer are stored as %v, want %v", declared, got, stored)
		}
	}
	if class, affinity := classify("ANY", true); class != ClassAny || affinity != AffinityNone {
		t.Errorf("ANY of a STRICT table: class %d, affinity %d", class, affinity)
	}
}

func TestSameName(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a, b string
		want bool
	}{{"Blobs", "bLOBS", true}, {"blob", "blobs", false}, {"Ä", "ä", false}, {"Kelvin", "\u212aelvin", false}} {
		if got := SameName(c.a, c.b); got != c.want {
			t.Errorf("%q and %q: %t", c.a, c.b, got)
		}
	}
}
