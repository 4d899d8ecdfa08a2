package docs_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/internal/pgtest"
)

// What may stand in the comment before a block of shell commands.
const (
	runs      = "test: "       // then the name of the walk that it is part of
	stays     = "not tested: " // then why
	atRoot    = " (in the repository)"
	shows     = "output" // before a block of text: what the block before it prints
	blockTime = 5 * time.Minute
)

// walk is blocks of shell commands that are run one after the other.
type walk struct {
	name   string
	atRoot bool
	steps  []step
}

type step struct {
	commands fence
	output   *fence // nil: not shown
}

// Every block of shell commands is run, or says why not.
func TestReadme(t *testing.T) {
	t.Parallel()
	for _, w := range readWalks(t, "README.md") {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			w.run(t)
		})
	}
}

func readWalks(t *testing.T, page string) []*walk {
	t.Helper()
	var walks []*walk
	byName := map[string]*walk{}
	var last *step
	for _, f := range readFences(t, page) {
		name, tested := strings.CutPrefix(f.note, runs)
		switch {
		case f.lang == "sh" && tested:
			name, inRoot := strings.CutSuffix(name, atRoot)
			w := byName[name]
			if w == nil {
				w = &walk{name: name, atRoot: inRoot}
				walks, byName[name] = append(walks, w), w
			}
			w.steps = append(w.steps, step{commands: f})
			last = &w.steps[len(w.steps)-1]
		case f.lang == "sh" && !strings.HasPrefix(f.note, stays):
			t.Errorf("%s: %s has neither %q nor %q in a comment before it", page, f, runs, stays)
		case f.note == shows && last != nil:
			last.output, last = &f, nil
		case f.note == shows:
			t.Errorf("%s: %s is the output of nothing", page, f)
		}
	}
	if len(walks) == 0 {
		t.Errorf("%s: nothing in it is tested", page)
	}
	return walks
}

// run runs the steps in a directory and, if they speak of one, with a database
// of their own.
func (w *walk) run(t *testing.T) {
	env := append(os.Environ(),
		"PATH="+binary(t)+string(os.PathListSeparator)+os.Getenv("PATH"),
		"TMPDIR="+t.TempDir(),
		"CGO_ENABLED=0", "PSQLRC=/dev/null", "LC_ALL=C.UTF-8", "PAGER=")
	needs(t, "bash")
	if w.speaksOf("DATABASE_URL") {
		needs(t, "psql")
		env = append(env, "DATABASE_URL="+pgtest.Database(t))
	}
	dir := t.TempDir()
	if w.atRoot {
		dir = root
	}
	for _, s := range w.steps {
		got := runBlock(t, s.commands, dir, env)
		if s.output == nil {
			continue
		}
		if diff := cmp.Diff(loosely(s.output.contents), loosely(got)); diff != "" {
			t.Fatalf("%s doesn't print what the page shows (- page, + printed):\n%s\nprinted:\n%s", s.commands, diff, got)
		}
	}
}

func (w *walk) speaksOf(what string) bool {
	return slices.ContainsFunc(w.steps, func(s step) bool { return strings.Contains(s.commands.contents, what) })
}

func needs(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("%s isn't installed", program)
	}
}

// runBlock runs the commands as one script and returns all that they print.
func runBlock(t *testing.T, commands fence, dir string, env []string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), blockTime)
	defer cancel()
	script := "set -o pipefail\n" + commands.contents
	cmd := exec.CommandContext(ctx, "bash", "-eu", "-c", script)
	cmd.Dir, cmd.Env = dir, env
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", commands, err, output)
	}
	return string(output)
}

// built is the program, built once for all walks.
var built struct {
	once sync.Once
	dir  string
	err  error
}

// binary returns the directory that holds the program.
func binary(t *testing.T) string {
	t.Helper()
	built.once.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "gc-agent-docs-*"); built.err != nil {
			return
		}
		cmd := exec.Command("go", "build", "-buildvcs=false", "-o", filepath.Join(built.dir, "gc-agent"), "./cmd/gc-agent")
		cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
		if output, err := cmd.CombinedOutput(); err != nil {
			built.err = errors.New(err.Error() + "\n" + string(output))
		}
	})
	if built.err != nil {
		t.Fatalf("build the program: %v", built.err)
	}
	return built.dir
}

// TestMain removes the program.
func TestMain(m *testing.M) {
	status := m.Run()
	if built.dir != "" {
		_ = os.RemoveAll(built.dir) // a temporary directory that stays harms nobody
	}
	os.Exit(status)
}

// What differs from one run to the next. Counts don't: they are the point.
var varying = []struct {
	re *regexp.Regexp
	by string
}{
	{regexp.MustCompile(`\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}(:?\d{2})?)?`), "TIME"},
	{regexp.MustCompile(`\b\d+(\.\d+)? ?(ms|s|min|h)\b( \d+ (s|min)\b)?`), "DURATION"},
	{regexp.MustCompile(`[ \t]+`), " "},
}

// loosely returns the lines of an output without what varies.
func loosely(output string) []string {
	for _, v := range varying {
		output = v.re.ReplaceAllString(output, v.by)
	}
	lines := strings.Split(strings.TrimSpace(output), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return lines
}

// Every configuration that the README shows can be read.
func TestReadmeConfigurations(t *testing.T) {
	t.Parallel()
	env := config.OSEnv()
	env.Lookup = func(string) (string, bool) { return "postgres://localhost/app", true }
	found := false
	for _, f := range readFences(t, "README.md") {
		if f.lang != "yaml" {
			continue
		}
		found = true
		if _, err := config.Parse("README.md", []byte(f.contents), env); err != nil {
			t.Errorf("%s: %v", f, err)
		}
	}
	if !found {
		t.Error("there is none")
	}
}
