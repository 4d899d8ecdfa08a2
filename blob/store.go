package blob

// Cursor is a place in a store's listing. Only the store that made it can read
// it; "" is the beginning. It stays good when the object it stands at is gone.
type Cursor string

// Object is a blob as a store saw it.
type Object struct {
	Key Key
	// Size is in bytes.
	Size int64
	// Version is what the store calls this very content: another content under
	// the same key has another version. Only the store that made it can read it.
	Version string
}

// Page is a stretch of a store's listing.
type Page struct {
	// Objects are in key order, each key once. There may be fewer than were asked
	// for, or none, before the end.
	Objects []Object
	// Foreign counts what stands in this stretch and can't be a key of the pool:
	// it is never listed and never touched.
	Foreign int
	// Next is where the following page begins, if there is More.
	Next Cursor
	More bool
}

// Deletion is what became of one object that a store was asked to delete.
type Deletion struct {
	Key Key
	// Size is the bytes that became free: 0 unless the outcome is Deleted.
	Size    int64
	Outcome Outcome
	// Err says why the outcome is Failed. It is nil otherwise.
	Err error
}

// Outcome is how a deletion ended. The zero value is Failed: the object may
// still be there.
type Outcome uint8

// The outcomes. After any but Failed there is nothing to do again.
const (
	// Failed deleted nothing that is known of.
	Failed Outcome = iota
	// Deleted removed the version that was seen.
	Deleted
	// Vanished found nothing under the key: it counts as done.
	Vanished
	// Changed found another version than the one that was seen, and kept it.
	Changed
)

// String returns the outcome's name as it stands in messages.
func (o Outcome) String() string {
	switch o {
	case Deleted:
		return "deleted"
	case Vanished:
		return "vanished"
	case Changed:
		return "changed"
	default:
		return "failed"
	}
}
