package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/alkblobs/gc-agent/internal/demo"
)

// demoStock says what there is, and what of it is dead.
func demoStock(s demo.Stock) string {
	dead := s.Dead()
	trashed := 0
	for d := range dead {
		if s.Trashed[d] {
			trashed++
		}
	}
	return "An application keeps photos in an SQLite file.\n\n" + align([]line{
		{"blobs", number(s.Blobs), ""},
		{"attached", number(s.Attached), `named by attachments, as "sha256:" and hex`},
		{"avatars", number(s.Avatars), "named by users, as bytes"},
		{"dead", number(dead), fmt.Sprintf("%d named only by attachments in the trash, %d by nothing", trashed, len(dead)-trashed)},
	})
}

func number(set map[demo.Digest]bool) int64 { return int64(len(set)) }

func demoStart(s demo.Stock, window time.Duration) string {
	return demoStock(s) + fmt.Sprintf(`
The first sweep finds what is dead and stages it. It is kept for the length of the
window, which is %s here, and may then be deleted.

`, span(window))
}

func demoBetween(window time.Duration, title string) string {
	return fmt.Sprintf(`
Meanwhile somebody uploads %q again, one of those that are staged: a new
attachment names it. Waiting for the window to pass, %s …

The second sweep looks at what is staged once more, in the transaction that
deletes it.

`, title, span(window))
}

func demoEnd(shop *demo.App, before demo.Stock, title string) string {
	dead := before.Dead()
	kept := number(before.Blobs) - number(dead)
	return fmt.Sprintf(`
What happened:
  - Gone are %[1]s, exactly those that are dead by the demo's own count.
    What only the trash names is among them, since the configuration says
    where: "deleted_at IS NULL".
  - %[2]q was staged as well. The second sweep saw its new attachment
    and kept it (cancelled: live).
  - The other %[3]s were never candidates: an attachment or a user names
    each of them.
`, some(number(dead), "blob"), title, count(kept-1)) + demoFiles(shop) + demoNext(shop, program(os.Args[0]), "demo")
}

func demoLiveStart(shop *demo.App, s demo.Stock, window time.Duration) string {
	return demoStock(s) + fmt.Sprintf(`
It goes on adding photos and removing them. The daemon sweeps every 2 seconds, as
the configuration says, and deletes what was dead for %s and still is.
`, span(window)) + demoFiles(shop) + "\nCtrl-C ends it.\n\n"
}

func demoLiveEnd(shop *demo.App, s demo.Stock) string {
	return fmt.Sprintf("\nStopped, with %s. Everything that is referred to is there.\n", some(number(s.Blobs), "blob")) + demoNext(shop, program(os.Args[0]), "demo --once")
}

// demoLine is one sweep of the daemon's.
func demoLine(s swept) string {
	at := s.Time
	if t, err := time.Parse(time.RFC3339, s.Time); err == nil {
		at = t.Format(time.TimeOnly)
	}
	text := fmt.Sprintf("%s  scanned %3d, staged %2d, unstaged %2d, deleted %2d, kept %2d", at,
		s.Scanned, s.CandidatesStaged, s.Unstaged, s.Deleted, s.Cancelled)
	if s.BytesReclaimed > 0 {
		text += ", freed " + size(s.BytesReclaimed)
	}
	return text + "\n"
}

// demoFiles says where the files are.
func demoFiles(shop *demo.App) string {
	return fmt.Sprintf("\nFiles:\n  %s\n  %s\n", shop.Config(), shop.Database())
}

// demoNext says what to do with the files, and what else there is to see.
func demoNext(shop *demo.App, program, other string) string {
	return fmt.Sprintf(`
Next:
  %[1]s check -c %[2]s
  %[1]s sweep -c %[2]s
  %[1]s window list -c %[2]s photos
  %[1]s %[3]s
`, program, quoteArg(shop.Config()), other)
}

// goRunRE is where go run leaves what it has built, new or cached.
var goRunRE = regexp.MustCompile(`(/go-build[0-9]+/b[0-9]+/exe|/[0-9a-f]{64}-d)/[^/]+$`)

// program is what runs the program again: what ran it, save under go run, which
// gives it a path of its own.
func program(run string) string {
	if goRunRE.MatchString(run) {
		return "go run ./cmd/gc-agent"
	}
	return quoteArg(run)
}

// quoteArg quotes a path for a shell where it needs that.
func quoteArg(s string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-"
	if strings.Trim(s, plain) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
