package main

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/alkblobs/gc-agent/agent/config"

	"github.com/jackc/pgx/v5/pgconn"
)

// explain gives the error of a database that can't be reached the name that the
// configuration has for it, and leaves out on whose behalf it was opened.
func (a *app) explain(err error) error {
	if a.cfg == nil {
		return err
	}
	var connect *pgconn.ConnectError
	var file *fs.PathError
	switch {
	case errors.As(err, &connect):
		for _, db := range a.cfg.Databases() {
			if db.Is(connect.Config) {
				return fmt.Errorf("database %s: can't connect: %w", db.Name, connect.Unwrap())
			}
		}
	case errors.As(err, &file):
		for _, db := range a.cfg.Databases() {
			if db.Engine == config.SQLite && db.Path == file.Path {
				return fmt.Errorf("database %s: can't be opened: %w", db.Name, file)
			}
		}
	}
	return err
}
