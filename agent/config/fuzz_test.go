package config

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// FuzzParse: no input makes Parse panic, leaves a problem without a place and a
// message, or lets out what a variable holds; and what passes keeps its promises.
func FuzzParse(f *testing.F) {
	f.Add([]byte(readExample(f)))
	f.Add([]byte(base("schema: ${WORD}", "window: ${SECRET}", "schedule: ${SECRET}")))
	for _, tc := range problemCases {
		if len(tc.text) < 10_000 {
			f.Add([]byte(tc.text))
		}
	}
	for _, text := range secretCases {
		f.Add([]byte(strings.ReplaceAll(text, password, "${SECRET}")))
	}
	for _, text := range bombs() {
		f.Add([]byte(text[:min(len(text), 2000)]))
	}
	const secret = "\u2603hidden"
	env := testEnv(map[string]string{"SECRET": secret, "DATABASE_URL": "postgres://u:" + secret + "@h/d"},
		map[string]string{"/run/secrets/billing-database-url": "postgres://h/b"}, nil)
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("c.yaml", data, env)
		if err == nil {
			checkValidated(t, c)
			return
		}
		var errs *Errors
		if !errors.As(err, &errs) || len(errs.Problems) == 0 || c != nil {
			t.Fatalf("Parse returned %v and %v", c, err)
		}
		for _, p := range errs.Problems {
			if p.File != "c.yaml" || p.Message == "" || strings.Contains(p.String(), secret) || strings.ContainsAny(p.String(), "\n\r") {
				t.Errorf("problem %q", p)
			}
		}
		if strings.Count(err.Error(), "\n") != len(errs.Problems)-1 {
			t.Errorf("not one line a problem:\n%s", err)
		}
	})
}

func checkValidated(t *testing.T, c *Validated) {
	var names, windows []string
	for _, p := range c.Pools() {
		host, ok := c.Database(p.Host)
		if !ok || host.Engine == 0 || len(p.Blobs) == 0 || p.Window < 0 || p.Schedule.Schedule == nil {
			t.Errorf("pool %+v", p)
		}
		for _, tier := range p.Blobs {
			if tier.Database != p.Host || tier.Table.Name == "" || tier.Column == "" || (tier.Table.Schema == "") != (host.Engine == SQLite) {
				t.Errorf("tier %+v", tier)
			}
		}
		for _, s := range p.Liveness {
			if db, ok := c.Database(s.Database); !ok || db.Engine == 0 || s.Name == "" || (s.Query == "") == (s.Table.Name == "") {
				t.Errorf("source %+v", s)
			}
		}
		names, windows = append(names, p.Name), append(windows, host.identity+" "+p.Schema)
	}
	for _, list := range [][]string{names, windows} {
		slices.Sort(list)
		if len(slices.Compact(slices.Clone(list))) != len(list) {
			t.Errorf("not unique: %q", list)
		}
	}
}
