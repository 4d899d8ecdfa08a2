package config

import "testing"

func TestParseTable(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		text   string
		engine Engine
		want   Table
	}{
		{"blobs", Postgres, Table{"public", "blobs"}},
		{"Media.Blobs", Postgres, Table{"Media", "Blobs"}},
		{`"a.b".c`, Postgres, Table{"a.b", "c"}},
		{`a."b""c"`, Postgres, Table{"a", `b"c`}},
		{`""""`, Postgres, Table{"public", `"`}},
		{`" x "`, Postgres, Table{"public", " x "}},
		{"größe blobs", Postgres, Table{"public", "größe blobs"}},
		{"blobs", SQLite, Table{"", "blobs"}},
		{`"main.blobs"`, SQLite, Table{"", "main.blobs"}},
	} {
		if got, err := parseTable(tc.text, tc.engine); err != nil || got != tc.want {
			t.Errorf("parseTable(%q, %s) = %+v, %v; want %+v", tc.text, tc.engine, got, err, tc.want)
		}
	}
	long := "x123456789012345678901234567890123456789012345678901234567890123"
	for text, engine := range map[string]Engine{
		"": Postgres, ".": Postgres, "a.": Postgres, ".a": Postgres, "a.b.c": Postgres, "a. b": Postgres, "a ": Postgres,
		`"a`: Postgres, `""`: Postgres, `"a"b`: Postgres, `a"b"`: Postgres, `"a""`: Postgres, long: Postgres,
		"a." + long: Postgres, "main.blobs": SQLite,
	} {
		if got, err := parseTable(text, engine); err == nil {
			t.Errorf("parseTable(%q, %s) = %+v; want an error", text, engine, got)
		}
	}
	if _, err := parseTable(long, SQLite); err != nil {
		t.Errorf("SQLite has no limit: %v", err)
	}
	if got, err := parseColumn("a.b", Postgres); err == nil {
		t.Errorf("parseColumn took a dotted name: %q", got)
	}
}
