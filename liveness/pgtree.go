package liveness

import (
	"errors"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// columnsRead is what the server checks the right to SELECT on.
type columnsRead struct {
	relation uint32
	columns  []int16 // attribute numbers, sorted; those of the system's are negative
	whole    bool    // a whole row is read, so every column
}

const (
	aclSelect = 1 << 1 // ACL_SELECT
	// The set of columns counts from here: FirstLowInvalidHeapAttributeNumber.
	lowestAttribute = -7
)

// What the server notes of a relation in a query tree, as it prints it: up to
// version 15 with the relation, later in a list of its own.
var treePermissions = regexp.MustCompile(`:requiredPerms (\d+) :checkAsUser \d+ :selectedCols \(b([ \d]*)\)`)

// readsOf returns the relations that a query tree of the catalogue's reads,
// everywhere in it, each once. A tree that isn't as expected is an error: to
// overlook a right would be to print too few.
func readsOf(tree string) ([]columnsRead, error) {
	var reads []columnsRead
	found := false
	for _, piece := range strings.Split(tree, ":relid ")[1:] {
		end := strings.IndexByte(piece, ' ')
		// The first permissions after a relation are its own. Of a relation whose
		// permissions stand elsewhere none follow before the next relation.
		m := treePermissions.FindStringSubmatch(piece)
		if end < 0 || m == nil {
			continue
		}
		relation, err := strconv.ParseUint(piece[:end], 10, 32)
		if err != nil {
			return nil, errors.New("a view's definition isn't as expected")
		}
		found = true
		if perms, err := strconv.Atoi(m[1]); err != nil || perms&aclSelect == 0 {
			continue
		}
		if reads, err = addRead(reads, uint32(relation), strings.Fields(m[2])); err != nil {
			return nil, err
		}
	}
	if !found && strings.Contains(tree, ":relid ") {
		return nil, errors.New("a view's definition isn't as expected")
	}
	return reads, nil
}

func addRead(reads []columnsRead, relation uint32, bits []string) ([]columnsRead, error) {
	at := slices.IndexFunc(reads, func(r columnsRead) bool { return r.relation == relation })
	if at < 0 {
		at = len(reads)
		reads = append(reads, columnsRead{relation: relation, columns: []int16{}})
	}
	r := &reads[at]
	for _, bit := range bits {
		n, err := strconv.ParseInt(bit, 10, 16)
		if err != nil {
			return nil, errors.New("a view's definition isn't as expected")
		}
		switch column := int16(n) + lowestAttribute; {
		case column == 0:
			r.whole = true
		case !slices.Contains(r.columns, column):
			r.columns = append(r.columns, column)
		}
	}
	slices.Sort(r.columns)
	return reads, nil
}
