package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"gopkg.in/yaml.v3"

	"github.com/alkblobs/gc-agent/internal/words"
)

const (
	// maxNodes bounds how far aliases can blow a small file up.
	maxNodes = 200_000
	// maxProblems bounds what a file of nothing but mistakes says.
	maxProblems = 1000
)

// decoder collects the problems of one file, and the lines of its fields.
type decoder struct {
	env      Env
	file     string
	lines    map[string]int
	problems []Problem
	nodes    int
}

func (d *decoder) fail(path, format string, args ...any) {
	if len(d.problems) >= maxProblems {
		return
	}
	d.problems = append(d.problems, Problem{
		File: d.file, Line: lineOf(d.lines, path), Path: path, Message: fmt.Sprintf(format, args...),
	})
}

// spend counts n more values and says whether the file may still have them.
func (d *decoder) spend(n int) bool {
	before := d.nodes
	d.nodes += n
	if d.nodes > maxNodes && before <= maxNodes {
		d.fail("", "more than %d values, once its aliases (*name) are followed: write fewer", maxNodes)
	}
	return d.nodes <= maxNodes && len(d.problems) < maxProblems
}

// value is one value of the file, or, with no node, a field that isn't there.
// Reading what isn't there does nothing, so that a default stays.
type value struct {
	d        *decoder
	path     string
	node     *yaml.Node
	required bool
}

func (d *decoder) at(path string, node *yaml.Node, line int) value {
	if node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	d.lines[path] = line
	return value{d: d, path: path, node: node}
}

func (v value) given() bool { return v.node != nil }

func (v value) fail(format string, args ...any) { v.d.fail(v.path, format, args...) }

// is says whether the value is there and of this kind; the wrong kind is a
// problem.
func (v value) is(kind yaml.Kind, want string) bool {
	switch {
	case !v.given():
		return false
	case v.node.ShortTag() == "!!null":
		v.fail("has no value: want %s", v.orNothing(want))
		return false
	case v.node.Kind != kind, kind == yaml.MappingNode && v.node.ShortTag() != "!!map",
		kind == yaml.SequenceNode && v.node.ShortTag() != "!!seq":
		v.fail("want %s, got %s", want, describe(v.node))
		return false
	}
	return true
}

// orNothing adds to what a field may hold that it may be left out.
func (v value) orNothing(want string) string {
	if v.required {
		return want
	}
	return want + ", or remove it"
}

// describe says what a node is, not what it holds: it may hold a secret.
func describe(n *yaml.Node) string {
	known := map[string]string{
		"!!map": "a mapping", "!!seq": "a list", "!!str": "a string", "!!int": "a number",
		"!!float": "a number", "!!bool": "true or false", "!!null": "nothing", "!!timestamp": "a date",
	}
	if what, ok := known[n.ShortTag()]; ok {
		return what
	}
	return "a value with a tag (!) of its own"
}

// empty says whether the value is a list with nothing in it.
func (v value) empty() bool {
	return v.given() && v.node.ShortTag() == "!!seq" && len(v.node.Content) == 0
}

// items returns the values of a list.
func (v value) items(want string) []value {
	if !v.is(yaml.SequenceNode, want) || !v.d.spend(len(v.node.Content)) {
		return nil
	}
	items := make([]value, len(v.node.Content))
	for i, n := range v.node.Content {
		items[i] = v.d.at(fmt.Sprintf("%s[%d]", v.path, i), n, n.Line)
	}
	return items
}

// entry is one key of a mapping and its value.
type entry struct {
	key string
	value
}

// nameRE is what a key may look like to be quoted. Anything else may be a
// piece of a secret that YAML took for a key.
var nameRE = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_-]{0,62}$`)

// entries returns a mapping's keys, in the order of the file, without those
// that can't be one.
func (v value) entries(want string) []entry {
	if !v.is(yaml.MappingNode, want) || !v.d.spend(len(v.node.Content)) {
		return nil
	}
	var found []entry
	first := map[string]int{}
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		key, node := v.node.Content[i], v.node.Content[i+1]
		e := entry{key: key.Value, value: v.d.at(v.child(key), node, key.Line)}
		switch line, twice := first[key.Value]; {
		case key.ShortTag() == "!!merge":
			e.fail("merge keys (<<) aren't supported: write the fields out")
		case key.Kind != yaml.ScalarNode:
			e.fail("want a name before the colon, got something else")
		case twice:
			e.fail("is given twice, first on line %d: remove one", line)
		default:
			first[key.Value] = key.Line
			found = append(found, e)
		}
	}
	return found
}

func (v value) child(key *yaml.Node) string {
	name := "?"
	if nameRE.MatchString(key.Value) || key.ShortTag() == "!!merge" {
		name = key.Value
	}
	if v.path == "" {
		return name
	}
	return v.path + "." + name
}

// fields is a mapping whose keys are known to the reader: it gets each of them
// in the order that it needs, and closes the mapping, which reports the rest.
type fields struct {
	value
	entries  []entry
	known    []string
	readable bool
}

// open starts reading the fields of a mapping.
func (v value) open(want string) *fields {
	f := &fields{value: v, entries: v.entries(want)}
	f.readable = v.given() && v.node.ShortTag() == "!!map" && v.d.spend(0)
	return f
}

// get returns the field, or a value that isn't there.
func (f *fields) get(name string) value {
	f.known = append(f.known, name)
	for _, e := range f.entries {
		if e.key == name {
			return e.value
		}
	}
	return value{d: f.d, path: strings.TrimPrefix(f.path+"."+name, ".")}
}

// need is get for a field that has no default. hint says what to give.
func (f *fields) need(name, hint string) value {
	v := f.get(name)
	v.required = true
	if f.readable && !v.given() {
		v.fail("is missing: %s", hint)
	}
	return v
}

// close reports every field that nobody asked for.
func (f *fields) close() {
	for _, e := range f.entries {
		if slices.Contains(f.known, e.key) {
			continue
		}
		name, near := strconv.Quote(e.key), words.Nearest(e.key, f.known)
		switch {
		case near != "":
			e.fail("unknown field %s: did you mean %q?", name, near)
		case !nameRE.MatchString(e.key), e.node.Value == "" && f.node.Style&yaml.FlowStyle != 0:
			f.fail("unknown field, not shown as it may be part of a value: put a space after the colon of a field, " +
				"and quotes around a value that has a comma, a colon, a brace or a #")
		default:
			e.fail("unknown field %s: known here are %s", name, strings.Join(f.known, ", "))
		}
	}
}

var errEmpty = errors.New("is empty: it needs databases and pools")

// parseYAML returns the one document of data. An error quotes nothing of it.
func parseYAML(data []byte) (root *yaml.Node, line int, err error) {
	// The library has panicked on malformed input before; a file must never
	// take the agent down.
	defer func() {
		if recover() != nil {
			root, line, err = nil, 0, errors.New("isn't YAML")
		}
	}()
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, next yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, 0, errEmpty
	case err != nil:
		line, err = syntaxError(err, data)
		return nil, line, err
	}
	switch err := dec.Decode(&next); {
	case err == nil:
		return nil, next.Line, errors.New("a second document (---) begins here: keep one")
	case !errors.Is(err, io.EOF):
		line, err = syntaxError(err, data)
		return nil, line, err
	}
	root = doc.Content[0]
	if root.ShortTag() == "!!null" {
		return nil, 0, errEmpty
	}
	return root, 0, nil
}

var (
	yamlErrorRE = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`)
	// parserErrorRE is what the library says with a line that counts from 0.
	parserErrorRE = regexp.MustCompile(`^did not find expected (?:key|node content|'-' indicator|',' or |<)`)
)

// syntaxError splits the line off the library's error. Its texts are fixed, but
// for the one that quotes the name of an alias.
func syntaxError(err error, data []byte) (line int, _ error) {
	m := yamlErrorRE.FindStringSubmatch(err.Error())
	switch {
	case m == nil:
		return 0, errors.New("isn't YAML")
	case strings.Contains(m[2], "unknown anchor"):
		return 0, errors.New("isn't YAML: an alias (*name) has no anchor (&name): quote a value that begins with *")
	}
	line, _ = strconv.Atoi(m[1]) // none at all is line 0, which isn't shown
	if parserErrorRE.MatchString(m[2]) {
		line = min(line+1, 1+bytes.Count(bytes.TrimRight(data, "\n"), []byte("\n")))
	}
	return line, fmt.Errorf("isn't YAML: %s", m[2])
}

// checkBytes says what makes data no text that YAML can be read from.
func checkBytes(data []byte) error {
	switch {
	case len(data) > maxFile:
		return fmt.Errorf("is longer than %d MiB, which no configuration should be", maxFile>>20)
	case !utf8.Valid(data):
		return errors.New("isn't UTF-8: save it as UTF-8")
	}
	return nil
}
