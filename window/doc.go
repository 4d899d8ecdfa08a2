// Package window is the durable delete window: the keys that were found dead,
// each with the instant from which it may be deleted.
//
// It owns one table, gc_window, on Postgres and on SQLite, and the same in memory
// for pools that have no database to keep it in. The three engines answer alike,
// and the suite in windowtest is what says so. An engine on a database does its
// work in one statement a call, so that it is as atomic as the statement and part
// of the transaction that it is given; it never commits one.
//
// A database where nobody has made the table is a window without rows: reads ask
// the catalogue first, because an error caught afterwards would have spoilt the
// caller's transaction. Writes fail there with the database's own error, and
// never make a schema silently.
//
// The package must not know why a key was staged or what becomes of one that is
// taken: liveness, pins, leases and tiers stand beside it or above it.
package window
