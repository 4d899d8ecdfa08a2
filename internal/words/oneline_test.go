package words_test

import (
	"testing"

	"github.com/alkblobs/gc-agent/internal/words"
)

func TestOneLine(t *testing.T) {
	t.Parallel()
	if got, want := words.OneLine("a\nb\x1b[2J\tc\n"), "a; b [2J c"; got != want {
		t.Errorf("OneLine = %q, want %q", got, want)
	}
}
