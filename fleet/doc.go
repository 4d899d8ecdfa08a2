// Package fleet keeps several processes that work on one pool out of each
// other's way: agents that would sweep it at once, and applications that are about
// to refer to a blob which a sweep is about to delete.
//
// It owns the sweep lease, on Postgres and beside an SQLite file, the table gc_pins
// with the functions through which applications write it, and the decision about
// a key at the time of its delete. It must not know windows, liveness or how tiers
// delete: it answers who may sweep, and what keeps a key, and deletes no blob.
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
// an idle timeout. A lease is freed when the server learns that its session's client
// is gone. Of a process that was killed it learns within two seconds, also in the
// middle of a statement (client_connection_check_interval; on a server whose system
// hasn't got it, when the statement ends). Of a host or a network that fell silent it
// learns within a minute, by TCP keepalives where nothing is under way and by
// tcp_user_timeout where something is. Behind a pooler that gives each transaction
// whichever session is free, a session lock would belong to nobody: SweepLockAcquire sees
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
// A writer that pins goes through these steps, in one transaction:
//
//	pin       takes the key lock, writes the pin, looks whether the blob is there
//	upload    if it isn't
//	refer
//	commit    which fails if the pin has expired by then
//
// An arbitration, in the transaction that deletes, goes through these. Each is a
// statement of its own, so that what it sees is younger than the locks before it:
//
//	lock      queues for the pool's lock, as long as lock_timeout, and tries each
//	          key's, exclusively
//	hold      locks all rows of the keys' pins, expired or not, passing over those
//	          that somebody else has locked
//	clock     reads the clock, and what the pins say now
//	sources   asks, in one statement, whether anything refers to the keys
//	delete    what is dead: its lock was had, no pin of it is live, nothing refers
//
// A key whose lock, or one of whose pins, was held by somebody else is contended,
// which is no permission. It is the zero value of a verdict, and the answer
// whenever something isn't known.
//
// # Pins in process
//
// A pool whose database has no table of pins keeps them in the memory of the one
// process that sweeps it, InProcess, under the same protocol: the lock of a key, which
// a pin takes, shared, before it looks, and a batch tries, exclusively, before it
// looks at pins, and has until its transaction has ended. What is different follows
// from the place:
//
//   - A pin is in force once it is written, not once somebody commits. One that has run
//     out by the time its blob was looked for is an error instead of 40001.
//   - Expiries are compared with a clock of the process that never goes back. What is
//     said of them to others is how long is left, and no instant.
//   - The process forgets them when it ends. Whoever sweeps next deletes nothing for as
//     long as one may have been asked to live.
//   - A delete can outlive the connection that the process had to its session, and the
//     lock in its memory with it. On Postgres whoever looks for the blob therefore shares
//     the database's key lock too (ShareKeys), which goes with the session.
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
// not after a row: an advisory lock whose number is a hash of the schema and the
// key. A pin takes it, shared, before it looks at anything, and has it until its
// transaction ends. An arbitration tries it, exclusively, before it looks. Of the
// two orders in which they can come, both are right:
//
//   - The pin has the lock: the key is contended. The sweep that gets the lock later
//     sees the committed pin.
//   - The arbitration has the lock: the pin waits for the end of its transaction.
//     Then it sees the blob, or sees that it has gone, and the writer uploads it.
//
// Two keys whose hashes are equal share a lock, and wait for each other once in a
// while; nothing else comes of it.
//
// # What else can happen between two steps
//
// A renewal. It moves the expiry of a pin that is live still, just before the pin
// expires, and its commit is slow. To everybody else the pin is expired. It takes no
// key lock, since it looks at no blob; what protects it is that the arbitration
// locks expired rows too, finds this one locked, and calls its key contended. The
// other way round the renewal finds its row locked by an arbitration, and waits; by
// the time it goes on its pin has expired, the arbitration has seen that, and the
// blob is gone. So a renewal, too, locks its rows first and reads the clock after
// that: it then finds its pin expired, and says so. An expired pin is never
// renewed, only pinned again, under the key lock.
//
// A transaction that outlives its pin. Its writer would be told that the blob is
// safe, and it is safe no more once the key lock has gone. A deferred constraint
// trigger on gc_pins looks at every pin that a transaction has written, at its
// commit, and raises 40001 if one has expired.
//
// A put before the pin. A writer that stores the entry first (ON CONFLICT DO
// NOTHING: somebody else has stored it) and pins then, has looked before it had the
// lock. JointPut takes the lock first. An application that calls pin too late is
// told by its answer that the blob has gone.
//
// A reference that replaces a pin: one transaction refers and unpins. Pins are read
// before the sources, so that whoever misses the one sees the other.
//
// Each of these is a test that forces the interleaving, and a second one that
// leaves the protection out and loses the blob.
//
// # Locks and their order
//
// An arbitration waits for no lock of another's but the pool's: it tries, or passes over
// what is locked. For the pool's it waits for lock_timeout, or clients that pin very many
// keys, each before the last has ended, would keep it out for ever; where one of those waits
// for a blob's row that the sweep has locked, this time ends the circle. So whoever waits for it waits for the end of a short transaction, and no
// circle of waiting goes through it, save through what the delete itself sets off
// in the application's tables, and lock_timeout ends that. Its order is: the pool's
// lock, the locks of keys, the rows of pins. A sweep has the rows of blobs locked
// before, as it passes over what it can't have.
//
// A writer waits. Its key locks are shared with all other writers, and never make
// one wait for another. Rows of pins do, where two transactions pin the same key for
// the same owner, and so do the rows of blobs, locked FOR KEY SHARE, where somebody
// other than a sweep deletes them. Each call takes what it takes in key order; two
// transactions that make several calls in different orders can still deadlock over
// those rows, and Postgres then ends one of them with 40P01.
//
// The server's table of locks is shared by everybody and has a fixed size. A call of
// pin for more than 500 keys therefore takes the pool's lock, shared, instead of one
// a key, and so does a later call in a transaction that has taken 500 already: the
// whole pool is contended while it lasts. Calls for single keys take one lock each.
// A transaction that makes too many of them fails with the server's error, and
// leaves nothing. An arbitration locks at most MaxBatch keys.
//
// # What a crash leaves
//
// Key locks and row locks end with the transaction, however it ends; that of a
// prepared transaction, which outlives its session, ends when it is committed or
// rolled back. A pin that was committed lives until its expiry, whether its owner
// does or not, and protects a blob for that long. An entry and the pins of a joint
// transaction are there together or not at all. Nothing needs to be cleaned up: the
// expired rows that DeleteExpired removes protect nothing.
//
// # Isolation levels
//
// The agent's own transactions are READ COMMITTED, so that each statement sees what
// was committed before it. A writer's may be anything. Under REPEATABLE READ and
// SERIALIZABLE its snapshot can be older than the key lock: it may then look for a
// blob that it sees and that has been deleted since. Locking the blob's row finds
// that out, and raises 40001, as it does for a pin that somebody else has written
// since. A blob that has appeared since the snapshot isn't there for such a
// transaction; inserting it raises 40001 or a violation of uniqueness. After 40001
// and 40P01 the whole transaction is to be tried again, whatever the level.
package fleet
