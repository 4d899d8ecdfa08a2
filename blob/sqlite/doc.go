// Package sqlite is the tier that keeps one blob a row of an SQLite table.
//
// It knows the table and its key column, lists and looks up and deletes rows. It
// knows neither what refers to a row nor when a row may go.
package sqlite
