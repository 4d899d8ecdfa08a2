// Package bench measures whole sweeps at size: throughput beside the plain SQL
// that one would write by hand, memory and transactions of the real binary, and
// what a writer of the application notices.
//
// It owns the generated applications, the processes that it starts, and the
// figures read from outside of them. `make bench` runs it at full size; tests of
// package agent run slices of it. It must not know how a sweep works.
package bench
