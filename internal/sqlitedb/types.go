package sqlitedb

import "strings"

// Class is what a declared type says that a column is meant to hold. SQLite
// stores any value in any column, unless the table is STRICT.
type Class uint8

// The classes. The zero value is a column without a type.
const (
	ClassAny Class = iota
	ClassInt
	ClassText
	ClassUUID
	ClassBytes
	ClassReal
	ClassNumber
	// ClassOther is a type whose name SQLite doesn't know.
	ClassOther
)

// Affinity is the storage class that SQLite tries to give a column's values.
type Affinity uint8

// The affinities, https://www.sqlite.org/datatype3.html. The zero value converts
// nothing.
const (
	AffinityNone Affinity = iota
	AffinityText
	AffinityInteger
	AffinityReal
	AffinityNumeric
)

// classify follows SQLite's own rules, which look for parts of the type's name,
// in this order.
func classify(declared string, strict bool) (Class, Affinity) {
	t := foldASCII(declared)
	has := func(parts ...string) bool {
		for _, p := range parts {
			if strings.Contains(t, p) {
				return true
			}
		}
		return false
	}
	switch {
	case has("int"):
		return ClassInt, AffinityInteger
	case has("char", "clob", "text"):
		return ClassText, AffinityText
	case has("blob"):
		return ClassBytes, AffinityNone
	case t == "", strict && t == "any":
		return ClassAny, AffinityNone
	case has("real", "floa", "doub"):
		return ClassReal, AffinityReal
	case has("uuid", "guid", "uniqueidentifier"):
		return ClassUUID, AffinityNumeric
	case has("num", "dec"):
		return ClassNumber, AffinityNumeric
	default:
		return ClassOther, AffinityNumeric
	}
}

// ClassOf returns the class of a declared type that isn't a STRICT table's ANY.
func ClassOf(declared string) Class {
	class, _ := classify(declared, false)
	return class
}
