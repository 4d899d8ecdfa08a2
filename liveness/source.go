package liveness

import (
	"fmt"

	"github.com/alkblobs/gc-agent/blob"
)

// Source is a liveness source as it is registered. Exactly one of Query and
// Table is set.
type Source struct {
	Path string // where it stands in the configuration
	Name string

	Schema string // of Table; empty on SQLite
	Table  string
	Column string
	Where  string
	Query  string

	Format            *blob.Format // nil: by the column's type
	Guard             Guard
	AllowEmpty        bool
	IgnoreUnparseable bool
}

// Guard names what stops a reference from appearing between the check and the
// delete.
type Guard string

// The guards. Auto takes the strongest that is found.
const (
	Auto       Guard = "auto"
	ForeignKey Guard = "foreign_key"
	Trigger    Guard = "trigger"
	TableLock  Guard = "table_lock" // never taken by Auto
	Settle     Guard = "settle"
	Serial     Guard = "serial"
)

// allowEmpty allows the source to be empty if it is among them.
func (s *Source) allowEmpty(among []Info) {
	for _, info := range among {
		s.AllowEmpty = s.AllowEmpty || info.Path == s.Path
	}
}

// Verdict says whether any source refers to a key. The zero value keeps it.
type Verdict uint8

// The verdicts.
const (
	Referenced Verdict = iota
	Unreferenced
)

// Answer is the registry's answer for one key.
type Answer struct {
	Verdict Verdict
	// Source indexes Sources(): which source keeps the key, one of them where
	// several do.
	Source int
	// Empty says that the source refers to nothing at all at this moment, where
	// it isn't allowed to, and so keeps every key.
	Empty bool
}

// Info is what `check` says about a source that could be resolved.
type Info struct {
	Path  string
	Name  string
	Guard Guard
	// LeavesOpen says in a sentence what the guard doesn't stop; empty when
	// nothing that is known of.
	LeavesOpen string
	// WouldClose says what would close that; empty when nothing is known to.
	WouldClose string
	// Probe says how a key is looked for.
	Probe string
	// Indexed says that the probe has an index to go by.
	Indexed bool
	// AllowEmpty repeats the registration.
	AllowEmpty bool
}

// tally gathers the rows, in any order, of the statement that asks all sources
// of a database about some keys. Every answer is "kept" until finish.
type tally struct {
	answers []Answer
	refers  []bool
	empty   int // a source that is empty and must not be; -1 for none
	asked   int
}

// The kinds of rows: how many keys the statement read, a source that refers to
// nothing at all, a source that refers to a key.
const (
	rowAsked  = "asked"
	rowEmpty  = "empty"
	rowRefers = "refers"
)

func newTally(keys int) *tally {
	return &tally{answers: make([]Answer, keys), refers: make([]bool, keys), empty: -1, asked: -1}
}

// add takes a row: ord is the key's place, from 0, n a source's index or a count.
func (t *tally) add(ord int, kind string, n int) error {
	switch {
	case kind == rowAsked:
		t.asked = n
	case kind == rowEmpty:
		t.empty = n
	case kind == rowRefers && ord >= 0 && ord < len(t.answers):
		t.answers[ord].Source, t.refers[ord] = n, true
	default:
		return fmt.Errorf("unexpected row %q for key %d", kind, ord)
	}
	return nil
}

// finish makes the keys that no source refers to Unreferenced. The count of the
// keys that were read is the statement's own proof that it answered for all.
func (t *tally) finish() ([]Answer, error) {
	if t.asked != len(t.answers) {
		return nil, fmt.Errorf("%d keys were asked about, %d were read", len(t.answers), t.asked)
	}
	for i := range t.answers {
		switch {
		case t.empty >= 0:
			t.answers[i] = Answer{Source: t.empty, Empty: true}
		case !t.refers[i]:
			t.answers[i].Verdict = Unreferenced
		}
	}
	return t.answers, nil
}

// fits says whether the format's keys can be keys of the kind.
func fits(kind blob.Kind, format blob.Format, explicit bool) bool {
	switch format.Kind() {
	case kind:
		return true
	case blob.KindText:
		// Raw bytes that happen to be text: only where somebody says so, since
		// bytes are far more often written in hex.
		return kind == blob.KindBytes && explicit
	case blob.KindUUID, blob.KindInt:
		// Their canonical keys are ASCII, so a text key can be one.
		return kind == blob.KindText
	default:
		return false
	}
}

// suggest names the formats that give keys of the kind.
func suggest(kind blob.Kind) string {
	switch kind {
	case blob.KindBytes:
		return `"{hex}" or "{base64}"`
	case blob.KindText:
		return `"{text}"`
	case blob.KindUUID:
		return `"{uuid}"`
	default:
		return `"{int}"`
	}
}
