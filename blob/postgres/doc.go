// Package postgres is the tier that keeps one blob a row of a Postgres table.
//
// It knows the table and its key column, lists and locks and deletes rows. It
// knows neither what refers to a row nor when a row may go.
package postgres
