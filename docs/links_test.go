package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var pages = []string{
	"README.md", "CHANGELOG.md", "CONTRIBUTING.md",
	"docs/control-socket.md", "docs/design.md", "docs/guards.md", "docs/pins.md", "docs/races.md",
}

var (
	linkRE    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	headingRE = regexp.MustCompile(`(?m)^#+ (.*)$`)
	notSlugRE = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// Links within the repository lead somewhere.
func TestLinks(t *testing.T) {
	t.Parallel()
	for _, page := range pages {
		for _, m := range linkRE.FindAllStringSubmatch(readPage(t, page), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			target := page
			if file != "" {
				target = filepath.Join(filepath.Dir(page), file)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s: %s: %v", page, m[1], err)
				continue
			}
			if anchor != "" && !hasHeading(readPage(t, target), anchor) {
				t.Errorf("%s: %s: %s has no such heading", page, m[1], target)
			}
		}
	}
}

// hasHeading says whether a heading of the page has the anchor.
func hasHeading(page, anchor string) bool {
	for _, m := range headingRE.FindAllStringSubmatch(page, -1) {
		slug := notSlugRE.ReplaceAllString(strings.ToLower(m[1]), "")
		if strings.ReplaceAll(slug, " ", "-") == anchor {
			return true
		}
	}
	return false
}

var (
	testNameRE = regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Z]\\w*)`")
	testFuncRE = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
)

// Tests that a page names exist.
func TestNamedTests(t *testing.T) {
	t.Parallel()
	tests := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != root:
			return fs.SkipDir
		case !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		source, err := os.ReadFile(path)
		for _, m := range testFuncRE.FindAllSubmatch(source, -1) {
			tests[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		for _, m := range testNameRE.FindAllStringSubmatch(readPage(t, page), -1) {
			if !tests[m[1]] {
				t.Errorf("%s: there is no test %s", page, m[1])
			}
		}
	}
}
