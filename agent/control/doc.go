// Package control is the daemon's control socket: HTTP with JSON over a unix
// socket, through which applications pin, and through which commands of the same
// configuration do what the daemon must not be passed over in. docs/control-socket.md
// is its contract.
//
// It owns the socket, the requests and the answers, on both ends. It decides
// nothing about blobs: that is the agent's.
package control
