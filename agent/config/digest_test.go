package config

import (
	"reflect"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/blob"
)

func digestOf(t *testing.T, text string) string {
	t.Helper()
	c, err := Parse("c.yaml", []byte(text), testEnv(nil, nil, nil))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	digest := c.PoolDigest("p")
	if len(digest) != 64 || c.PoolDigest("p") != digest || c.PoolDigest("other") != "" {
		t.Fatalf("digest %q", digest)
	}
	return digest
}

// Whatever changes what a pool does changes its digest; where it stands doesn't.
func TestPoolDigest(t *testing.T) {
	t.Parallel()
	const base = `databases: {app: {url: "postgres://u:one@h/d"}, far: {url: "postgres://h/f"}}
pools:
  - name: p
    database: app
    window: 1h
    schedule: "@every 1h"
    protect: {http: "http://u:pw@h/ok"}
    pins: {ttl: 60s, owners: [{name: o, alive: {http: "http://u:pw@h/alive"}}]}
    blobs: [{type: table, table: blobs, column: id}]
    liveness: [{name: r, table: refs, column: blob, format: "sha:{hex}", guard: settle}]
`
	seen := map[string]string{digestOf(t, base): "the base"}
	for _, c := range []struct{ from, to string }{
		{"u:one@h/d", "u:two@h/d"},
		{"window: 1h", "window: 2h"},
		{"@every 1h", "@every 2h"},
		{"u:pw@h/ok", "u:no@h/ok"},
		{"ttl: 60s", "ttl: 61s"},
		{"name: o,", "name: q,"},
		{"u:pw@h/alive", "u:no@h/alive"},
		{"table: blobs", "table: bytes"},
		{"column: blob,", "column: blub,"},
		{"sha:{hex}", "shb:{hex}"},
		{"guard: settle", "guard: auto"},
		{"table: refs,", "table: refs, database: far,"},
		{"    window", "    brakes: {min_dead_keys: 7}\n    window"},
		{"    window", "    mode: enforce\n    window"},
		{"    window", "    fleet: true\n    window"},
		{"    window", "    limits: {page: 77}\n    window"},
	} {
		text := strings.Replace(base, c.from, c.to, 1)
		if text == base {
			t.Fatalf("%q isn't in the base", c.from)
		}
		digest := digestOf(t, text)
		if other, same := seen[digest]; same {
			t.Errorf("%q has the digest of %s", c.to, other)
		}
		seen[digest] = c.to
	}
	moved := strings.Replace(base, "pools:\n", `pools:
  - {name: first, database: far, schedule: "@every 1h", window: 1h, blobs: [{type: table, table: b, column: id}]}
`, 1)
	if seen[digestOf(t, moved)] != "the base" {
		t.Error("the pool's place in the file changes its digest")
	}
}

// Whatever is added to a pool's configuration either encodes or is among what the
// digest takes apart itself.
func TestPoolDigestLeavesNothingOut(t *testing.T) {
	t.Parallel()
	apart := []reflect.Type{reflect.TypeFor[Secret](), reflect.TypeFor[Schedule](), reflect.TypeFor[*blob.Format]()}
	known := map[string]int{"Secret": 2, "Schedule": 1, "*blob.Format": 1}
	found := map[string]int{}
	var look func(t reflect.Type)
	look = func(typ reflect.Type) {
		for _, a := range apart {
			if typ == a {
				found[strings.TrimPrefix(typ.String(), "config.")]++
				return
			}
		}
		switch typ.Kind() {
		case reflect.Slice:
			look(typ.Elem())
		case reflect.Struct:
			for i := range typ.NumField() {
				if f := typ.Field(i); f.IsExported() {
					look(f.Type)
				} else {
					t.Errorf("%s.%s can't be encoded", typ, f.Name)
				}
			}
		case reflect.Pointer, reflect.Interface, reflect.Map, reflect.Func, reflect.Chan:
			t.Errorf("how does %s encode?", typ)
		}
	}
	look(reflect.TypeFor[Pool]())
	if !reflect.DeepEqual(found, known) {
		t.Errorf("found %v, the digest takes %v apart", found, known)
	}
}
