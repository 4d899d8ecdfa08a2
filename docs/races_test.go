package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	caseNameRE = regexp.MustCompile(`\*([^*|]+)\*`)
	switchRE   = regexp.MustCompile("`(fleet|agent|liveness)` ([A-Za-z]+)")
)

// The page names the cases of tests and the switches as the code has them, and every
// switch that the code has.
func TestRacesPage(t *testing.T) {
	t.Parallel()
	page, tests := readPage(t, "docs/races.md"), sources(t, "_test.go")
	for line := range strings.Lines(page) {
		if !strings.HasPrefix(line, "|") {
			continue
		}
		for _, m := range caseNameRE.FindAllStringSubmatch(line, -1) {
			if !strings.Contains(tests, `"`+m[1]+`"`) && !strings.Contains(tests, `"reference, `+m[1]+`"`) {
				t.Errorf("no test has a case %q", m[1])
			}
		}
	}
	named := map[string]bool{}
	for _, m := range switchRE.FindAllStringSubmatch(page, -1) {
		named[m[1]+" "+m[2]] = true
	}
	there := switches(t)
	for name := range named {
		if !there[name] {
			t.Errorf("there is no switch %s", name)
		}
	}
	for name := range there {
		if !named[name] {
			t.Errorf("the switch %s isn't on the page", name)
		}
	}
}

var (
	omitRE  = regexp.MustCompile(`(?s)\ntype omit struct \{\n(.*?)\n\}`)
	fieldRE = regexp.MustCompile(`(?m)^\t([A-Z][A-Za-z]+) +bool`)
)

// switches returns the fields of the packages' omit, with the package's name.
func switches(t *testing.T) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for file, pkg := range map[string]string{"fleet/omit.go": "fleet", "agent/omit.go": "agent", "liveness/pgresolve.go": "liveness"} {
		omit := omitRE.FindStringSubmatch(readPage(t, file))
		if omit == nil {
			t.Fatalf("%s has no omit", file)
		}
		for _, m := range fieldRE.FindAllStringSubmatch(omit[1], -1) {
			all[pkg+" "+m[1]] = true
		}
	}
	return all
}

// sources returns the text of all files of the repository whose name ends so.
func sources(t *testing.T, suffix string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && path != root {
			return fs.SkipDir
		}
		if entry.IsDir() || !strings.HasSuffix(path, suffix) {
			return nil
		}
		text, err := os.ReadFile(path)
		b.Write(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}
