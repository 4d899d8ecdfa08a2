package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/alkblobs/gc-agent/internal/words"

	"github.com/mattn/go-isatty"
)

// terminal is the standard error: whole lines, and on a terminal one more line
// that is written over and over. It may be used by several goroutines.
type terminal struct {
	w     io.Writer
	isTTY bool

	mu    sync.Mutex
	dirty bool // the passing line is on the screen
	last  time.Time
}

func newTerminal(w io.Writer) *terminal {
	f, ok := w.(*os.File)
	return &terminal{w: w, isTTY: ok && isatty.IsTerminal(f.Fd())}
}

// Write writes what is to stay.
func (t *terminal) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.clear()
	return t.w.Write(p)
}

// line writes one line: whatever it quotes can't make it two.
func (t *terminal) line(format string, args ...any) {
	// There is nowhere to report that standard error can't be written to.
	_, _ = io.WriteString(t, words.OneLine(fmt.Sprintf(format, args...))+"\n")
}

// often enough to look alive, seldom enough to cost nothing.
const passingEvery = 100 * time.Millisecond

// passing shows a line until something else is written. Off a terminal, and
// right after another one, it shows nothing.
func (t *terminal) passing(now time.Time, text func() string) {
	if !t.isTTY {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if now.Sub(t.last) < passingEvery {
		return
	}
	t.clear()
	t.last, t.dirty = now, true
	_, _ = io.WriteString(t.w, words.OneLine(text()))
}

// wipe takes the passing line away.
func (t *terminal) wipe() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.clear()
}

func (t *terminal) clear() {
	if t.dirty {
		_, _ = io.WriteString(t.w, "\r\x1b[K")
		t.dirty = false
	}
}
