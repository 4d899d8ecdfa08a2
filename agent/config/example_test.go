package config

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"
)

const exampleFile = "../../config.example.yaml"

func readExample(tb testing.TB) string {
	tb.Helper()
	data, err := os.ReadFile(exampleFile)
	if err != nil {
		tb.Fatal(err)
	}
	return string(data)
}

func exampleEnv() Env {
	return testEnv(map[string]string{"DATABASE_URL": "postgres://gc@localhost/app"},
		map[string]string{"/run/secrets/billing-database-url": "postgres://gc@localhost/billing\n"}, nil)
}

func TestExampleLoads(t *testing.T) {
	t.Parallel()
	c := mustParse(t, readExample(t), exampleEnv())
	pool, _ := c.Pool("attachments")
	notes, _ := c.Pool("notes")
	if len(pool.Liveness) != 3 || notes.Host != "notes" {
		t.Errorf("pools: %+v, %+v", pool, notes)
	}
	// The example says of these that they are what leaving them out gives.
	plain, _ := mustParse(t, base(), exampleEnv()).Pool("p")
	plain.Brakes.Off = nil
	for what, diff := range map[string]string{
		"brakes": cmp.Diff(plain.Brakes, pool.Brakes), "limits": cmp.Diff(plain.Limits, pool.Limits),
		"schedule": cmp.Diff(plain.Schedule.Spec, pool.Schedule.Spec), "window": cmp.Diff(plain.Window, pool.Window),
		"mode": cmp.Diff(plain.Mode, pool.Mode), "schema": cmp.Diff(plain.Schema, pool.Schema),
		"log": cmp.Diff(mustParse(t, base(), exampleEnv()).Log(), c.Log()),
	} {
		if diff != "" {
			t.Errorf("%s (-default +example):\n%s", what, diff)
		}
	}
}

var (
	knownRE = regexp.MustCompile(`: unknown field "no_such_field": known here are (.*)$`)
	indexRE = regexp.MustCompile(`\[\d+\]|databases\.\w+`)
)

// Each mapping of the example is given a field that nobody knows: the message
// then lists those that are known, and the example must hold them all.
func TestExampleIsComplete(t *testing.T) {
	t.Parallel()
	var root yaml.Node
	if err := yaml.Unmarshal([]byte(readExample(t)), &root); err != nil {
		t.Fatal(err)
	}
	held := map[string]bool{}
	spoil(root.Content[0], "", held)
	text, err := yaml.Marshal(&root)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, line := range problems(t, string(text), exampleEnv()) {
		m := knownRE.FindStringSubmatch(line)
		if m == nil {
			t.Fatalf("unexpected problem: %s", line)
		}
		_, path, _ := strings.Cut(strings.TrimSuffix(line, m[0]), ": ")
		for name := range strings.SplitSeq(m[1], ", ") {
			known[strings.TrimSuffix(generic(path), "no_such_field")+name] = true
		}
	}
	for _, field := range slices.Sorted(maps.Keys(known)) {
		if !held[field] {
			t.Errorf("the example lacks %s", field)
		}
	}
	if len(known) < 45 {
		t.Errorf("only %d fields found: %q", len(known), slices.Sorted(maps.Keys(known)))
	}
}

// generic drops what differs between the elements of a list and of databases.
func generic(path string) string { return indexRE.ReplaceAllString(path, "[]") }

// spoil adds a field to every mapping of known fields, and notes the paths of all.
func spoil(n *yaml.Node, path string, held map[string]bool) {
	held[strings.TrimPrefix(path, ".")] = true
	if n.Kind == yaml.SequenceNode {
		for _, item := range n.Content {
			spoil(item, path+"[]", held)
		}
	}
	if n.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i < len(n.Content); i += 2 {
		child := path + "." + n.Content[i].Value
		if path == ".databases" {
			child = ".[]"
		}
		spoil(n.Content[i+1], child, held)
	}
	if path != ".databases" {
		field := []*yaml.Node{{Kind: yaml.ScalarNode, Value: "no_such_field"}, {Kind: yaml.ScalarNode, Value: "x"}}
		n.Content = append(n.Content, field...)
	}
}
