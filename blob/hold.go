package blob

// Hold is what a tier's attempt to lock a blob found. The zero value keeps the
// blob.
type Hold struct {
	State HoldState
	// Size is the blob's size in bytes where the tier knows it, else 0.
	Size int64
}

// HoldState says what a lock attempt found.
type HoldState uint8

// The states of a hold.
const (
	// Busy means that somebody else has the blob locked right now.
	Busy HoldState = iota
	// Held means that the blob is there and the transaction has it locked.
	Held
	// Absent means that there is no such blob.
	Absent
)
