// Package state keeps what an agent remembers between sweeps: how many rows each
// source had, how many keys a pool had, how its sweeps ended. It is an SQLite file of the
// agent's own. Losing it loses no blob: what isn't remembered keeps.
package state
