package docs_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const root = ".."

// fence is a fenced block of a page.
type fence struct {
	line     int    // of the page, from 1
	lang     string // sh, text, yaml
	note     string // the HTML comment on the line before it
	contents string
}

// String says where the block is.
func (f fence) String() string { return fmt.Sprintf("the %s block at line %d", f.lang, f.line) }

var noteRE = regexp.MustCompile(`^<!-- (.*) -->$`)

// readFences returns the fenced blocks of a page in their order.
func readFences(t *testing.T, page string) []fence {
	t.Helper()
	var fences []fence
	var open *fence
	var note string
	for i, line := range strings.Split(readPage(t, page), "\n") {
		lang, isFence := strings.CutPrefix(line, "```")
		switch {
		case open == nil && isFence:
			open = &fence{line: i + 1, lang: lang, note: note}
		case isFence:
			fences, open = append(fences, *open), nil
		case open != nil:
			open.contents += line + "\n"
		}
		note = ""
		if m := noteRE.FindStringSubmatch(line); m != nil {
			note = m[1]
		}
	}
	if open != nil {
		t.Fatalf("%s: %s isn't closed", page, open)
	}
	return fences
}

func readPage(t *testing.T, page string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, page))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
