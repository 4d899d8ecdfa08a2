// Package config reads the agent's configuration: strict YAML in, a Validated
// out, or every problem of the file at once, each with its line, its path and
// what to do about it.
//
// It owns the fields, their defaults, the expansion of variables and the checks
// that need nothing but the file. It must not know how a database is talked to:
// whether a table exists, or may be read, is asked elsewhere, which reports what
// it finds through [Validated.Problem], in the same form.
//
// A database's URL is a secret. No problem ever quotes one, nor anything that
// comes from a variable: messages quote the file as it is written.
package config
