// Package blob names blobs and the places that hold them.
//
// It owns the canonical key, the instant, the formats that map a stored value
// to a key and back, the decoder that reads all keys that a value names, the folding
// under which keys are compared, and, in packages below it, the tiers: a Postgres table, an
// SQLite table, memory. It must not know why a blob is kept or deleted: windows,
// pins, liveness and the sweep stand above it.
package blob
