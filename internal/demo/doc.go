// Package demo is the application of `gc-agent demo`: an SQLite file with photos
// and what refers to them, the agent's configuration for it, and a writer that
// keeps both changing.
//
// It owns the directory that it makes them in. It must not know the agent: what
// is dead it works out by itself, so that the two can be compared.
package demo
