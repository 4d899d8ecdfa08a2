// Package liveness answers one question: does a registered source refer to this
// key?
//
// A source is a column of the application's, or a query; its values pass through
// a format and name keys. All sources of one database are resolved against its
// catalogue together, and answer for a batch of keys in one statement, hence
// from one snapshot: a row that moves from one table to another is seen in one
// of them. In doubt a key is referred to: the zero Verdict keeps, and a source
// that has no rows, where it isn't allowed to be empty, keeps everything.
//
// The package must not know the window, the pins or the sweep.
package liveness
