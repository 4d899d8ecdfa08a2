// Package torture runs the real agent, several times at once, against an
// application that writes as fast as it can, while agents are killed and sessions
// ended in the middle of what they do, and then judges the whole history.
//
// It holds tests alone. They own the application, its writers, the agents'
// processes and the judge, which reads what was committed, in the order in which it
// was, from the server's write-ahead log. They must not know how a sweep works: an
// agent is a process with a configuration.
package torture
