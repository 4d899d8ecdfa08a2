//go:build !linux

package pgdb

import "syscall"

// limitUnacknowledged does nothing where the system has no such limit: its own, some
// minutes, holds.
func limitUnacknowledged(_, _ string, _ syscall.RawConn) error { return nil }
