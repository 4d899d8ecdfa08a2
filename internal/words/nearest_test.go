package words_test

import (
	"testing"

	"github.com/alkblobs/gc-agent/internal/words"
)

func TestNearest(t *testing.T) {
	t.Parallel()
	known := []string{"url", "url_file", "column", "mode"}
	for word, want := range map[string]string{
		"colum": "column", "colums": "column", "Column": "column", "culomn": "column", "urlfile": "url_file", "ulr": "url",
		"mod": "mode", "": "", "host": "", "columnist": "", "mühde": "",
	} {
		if got := words.Nearest(word, known); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", word, got, want)
		}
	}
}
