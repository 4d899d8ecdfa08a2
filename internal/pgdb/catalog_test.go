package pgdb_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

func TestLookupRelation(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	pgtest.Exec(t, conn, `CREATE SCHEMA "S s"; CREATE DOMAIN word AS text COLLATE "C"; CREATE DOMAIN name2 AS word; CREATE TYPE mood AS ENUM ('a');
		CREATE COLLATION "S s"."L l" (provider = icu, locale = 'und', deterministic = false);
		CREATE TABLE "S s"."T t" (gone int, id int NOT NULL, t text, w word, n name2, v varchar(9), e mood, l text COLLATE "S s"."L l", "C ""c" bytea);
		ALTER TABLE "S s"."T t" DROP gone`)
	rel, err := pgdb.LookupRelation(t.Context(), conn, "S s", "T t")
	if err != nil {
		t.Fatal(err)
	}
	if rel.SQL() != `"S s"."T t"` || rel.String() != "S s.T t" || !rel.IsTable() || rel.RowSecurity || rel.OID == 0 {
		t.Errorf("%+v", rel)
	}
	var got []string
	for _, c := range rel.Columns {
		got = append(got, fmt.Sprintf("%d %s: %s, %s, not null %t, %s, %t", c.Num, c.Name, c.Type, c.Base, c.NotNull, c.CollationSQL, c.Deterministic))
	}
	want := []string{
		`2 id: integer, int4, not null true, , true`,
		`3 t: text, text, not null false, pg_catalog."default", true`,
		`4 w: word, text, not null false, pg_catalog."C", true`,
		`5 n: name2, text, not null false, pg_catalog."C", true`,
		`6 v: character varying(9), varchar, not null false, pg_catalog."default", true`,
		`7 e: mood, enum, not null false, , true`,
		`8 l: text, text, not null false, "S s"."L l", false`,
		`9 C "c: bytea, bytea, not null false, , true`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("columns (-want +got):\n%s", diff)
	}
	if c, _ := rel.Column("t"); c.Collation != pgdb.DefaultCollation {
		t.Errorf("the default collation is %d", c.Collation)
	}
	if _, ok := rel.Column("gone"); ok {
		t.Error("a dropped column is found")
	}
	for _, name := range []string{"t t", "T T", "none", ""} {
		if _, err := pgdb.LookupRelation(t.Context(), conn, "S s", name); !errors.Is(err, pgdb.ErrNoRelation) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestParts(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	pgtest.Exec(t, conn, `CREATE TABLE p (k int) PARTITION BY LIST (k); CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1) PARTITION BY LIST (k); CREATE TABLE "P 11" PARTITION OF p1 FOR VALUES IN (1);
		CREATE TABLE a (k int); CREATE TABLE b (k int); CREATE TABLE ab () INHERITS (a, b); CREATE TABLE below () INHERITS (ab)`)
	for name, want := range map[string][]string{"p": {"p p", "p p1", `r "P 11"`}, "p1": {"p p1", `r "P 11"`}, "a": {"r a", "r ab", "r below"}, "below": {"r below"}} {
		rel, err := pgdb.LookupRelation(t.Context(), conn, "public", name)
		if err != nil {
			t.Fatal(err)
		}
		parts, err := pgdb.Parts(t.Context(), conn, rel)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, part := range parts {
			got = append(got, part.Kind+" "+strings.TrimPrefix(part.Name, "public."))
		}
		slices.Sort(got)
		slices.Sort(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// state is a server in a given state: a test can't have a standby.
type state struct {
	pgdb.Querier
	standby, readOnly bool
	encoding          string
}

func (s state) QueryRow(context.Context, string, ...any) pgx.Row { return s }

func (s state) Scan(dest ...any) error {
	*dest[0].(*bool), *dest[1].(*bool), *dest[2].(*string), *dest[3].(*string) = s.standby, s.readOnly, s.encoding, "agent"
	return nil
}

func TestUnfit(t *testing.T) {
	t.Parallel()
	tests := []struct {
		state state
		want  string
	}{
		{state{encoding: "UTF8"}, ""},
		{state{encoding: "UTF8", standby: true, readOnly: true}, "the server is a standby, which may not show a reference yet; point the database's url at the primary"},
		{state{encoding: "UTF8", readOnly: true}, "the server is read-only (default_transaction_read_only is on); make it writable or point the url at one that is"},
		{state{encoding: "WIN1252"}, "the connection's client_encoding is WIN1252, so that text would be misread; run: ALTER ROLE agent SET client_encoding = 'UTF8'"},
	}
	for _, tt := range tests {
		if got, err := pgdb.Unfit(t.Context(), tt.state); got != tt.want || err != nil {
			t.Errorf("%+v: %q, %v", tt.state, got, err)
		}
	}
	conn := pgtest.Connect(t, pgtest.Database(t))
	if got, err := pgdb.Unfit(t.Context(), conn); got != "" || err != nil {
		t.Errorf("the test server: %q, %v", got, err)
	}
	pgtest.Exec(t, conn, "SET client_encoding = latin1")
	if got, err := pgdb.Unfit(t.Context(), conn); !strings.Contains(got, "LATIN1") || err != nil {
		t.Errorf("another encoding: %q, %v", got, err)
	}
}
