// Package fleet keeps several processes that work on one pool out of each
// other's way: agents that would sweep it at once, and applications that are about
// to refer to a blob which a sweep is about to delete.
//
// It owns the sweep lease, on Postgres and beside an SQLite file, and the table
// gc_pins. It must not know windows, liveness or tiers: it answers who may sweep,
// and whether a key is pinned, and deletes nothing.
//
// # The lease
//
// Only one agent sweeps a pool at a time. Two are seldom meant, but easily made:
// the service runs, and somebody starts a sweep from a shell; a container is
// replaced, and the old one isn't gone yet. The window hands no row out twice
// anyway. What two sweeps would break is whatever spans several transactions: the
// brakes, which judge one whole mark, the counts of a report, and the rule that a
// sweep executes nothing that it has staged itself.
//
// On Postgres the lease is a session-level advisory lock. Its key follows from the
// pool's schema, and Postgres keeps the advisory locks of different databases
// apart, so two agents with the same pool in their configuration contend without
// having to agree on anything else. Contention is an answer, not an error: the
// other agent does the work.
//
// A lock of the session was chosen over a row with a deadline because no clock is
// in it. A holder that is paused, swapped out or cut off from the network doesn't
// know that its deadline has passed. A session has no deadline; it ends when its
// connection does. That helps only if nothing can be deleted after it has ended,
// and so the lease belongs to the very connection on which the deletes run. When
// the session dies, the server rolls back the open batch and frees the lock, both
// before another agent can get it. A batch that isn't sure asks: Lease.Verify, in
// the transaction that deletes, looks the lock up among those of its own session.
// A statement that succeeded before the session died proves nothing about the
// next; only the commit on the same session does.
//
// The connection is therefore one that nobody shares, pools or recycles, without
// an idle timeout, with TCP keepalives, so that the server learns within about a
// minute when the agent's host is gone. Behind a pooler that gives each transaction
// whichever session is free, a session lock would belong to nobody: Acquire sees
// that it isn't talking to the session it was introduced to, and refuses.
//
// Session locks can be taken again by the session that has them. The second
// acquire on a connection is refused within the process, before Postgres is asked.
//
// An SQLite file lies on one machine, so a lock on a file beside it does the same:
// the kernel frees it when the process ends, however it ends.
//
// # Pins
//
// A pin says: keep this key until then, whatever the tables say. It is a row of
// gc_pins (key, owner, expiry). An application that is about to refer to a blob
// pins it first; one owner's pin ends nobody else's. Where the table exists it is
// honoured, whether or not the pool's configuration speaks of a fleet: somebody
// wrote the pin. Expiries are compared with the clock of the database that holds
// them and with no other.
//
// A check locks the rows of its keys before it reads them, expired or not. It
// doesn't wait for a row that somebody else has locked, and doesn't overlook it:
// it may be a renewal about to commit, so its key is Locked, which is no
// permission. With the locks taken it reads, in a later statement, what the rows
// say now.
//
// # The race that a row lock can't close
//
// Locking the rows of a key says nothing about a row that doesn't exist yet:
//
//	sweep    locks the blob's row, looks for pins of its key, finds none
//	writer   wants to store the same blob, finds its row there and doesn't wait
//	writer   inserts a pin for the key, commits
//	sweep    deletes the blob, commits
//
// The writer now holds a pin on nothing. No order of row locks helps, because the
// two never want the same row. What does is a lock that is named after the key and
// not after a row: the pin takes it, shared, before it looks at anything, and the
// check takes it, exclusively, before it looks.
//
// This key lock isn't there yet, nor are the SQL functions through which
// applications would pin under it. Until they are, a pin protects from every check
// that begins after the pin has committed, and not from one that is under way.
package fleet
