package window

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
)

// tableName is the window's only table. It is created under this name in the
// schema of its pool and never renamed: applications may read it.
const tableName = "gc_window"

// Row is a staged key and the first instant at which it may be deleted.
type Row struct {
	Key          blob.Key
	VisibleAfter blob.Instant
}

// After returns the first key that sorts after key: where the page of a List
// that follows key begins.
func After(key blob.Key) blob.Key { return key + "\x00" }

// repeated says which row counts when a key is staged twice in one call.
type repeated bool

const (
	firstCounts repeated = false
	lastCounts  repeated = true
)

// distinct returns the rows in key order, each key once, and refuses a key that
// no engine could be sure to hold.
func distinct(rows []Row, r repeated) ([]Row, error) {
	sorted := slices.Clone(rows)
	slices.SortStableFunc(sorted, byKey)
	out := sorted[:0]
	for _, row := range sorted {
		if len(row.Key) > blob.MaxKeyLen {
			return nil, fmt.Errorf("key %s is %d bytes long, more than %d", blob.KindText.Display(row.Key), len(row.Key), blob.MaxKeyLen)
		}
		switch n := len(out); {
		case n == 0 || out[n-1].Key != row.Key:
			out = append(out, row)
		case r == lastCounts:
			out[n-1] = row
		}
	}
	return out, nil
}

func byKey(a, b Row) int { return strings.Compare(string(a.Key), string(b.Key)) }
