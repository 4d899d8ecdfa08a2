// Package agent is the sweep and the daemon around it.
//
// Read sweep.go first: it is the protocol, step by step, written once over the
// seams in seams.go. What differs between hosts stands in the files named after
// them: postgres*.go and sqlite*.go run a batch in one transaction of the
// database that holds both window and blobs, inline.go keeps the window of a
// pool without such a database in memory. The rest says what a sweep did
// (report.go), what stops it (brakes.go), what a person asks (check.go,
// admin.go), when it runs (daemon.go), whose pins the agent keeps meanwhile
// (renewal.go, alive.go), and what it does when the host's clock jumps
// (hostclock.go).
//
// Two rules run through all of it. In doubt a blob is kept: every zero value
// means keep. And only the host's clock makes anything deletable.
package agent
