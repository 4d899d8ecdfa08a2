package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/internal/pgtest"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver
	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"
)

// TestMain makes the agent, and a client for either database, commands that
// scripts and tests run as processes of their own.
func TestMain(m *testing.M) {
	testscript.Main(leakChecked{m}, map[string]func(){
		"gc-agent": main,
		"sqlite":   func() { client("sqlite", "file:"+os.Args[1]+"?_pragma=busy_timeout(5000)") },
		"pgsql":    func() { client("pgx", os.Args[1]) },
	})
}

type leakChecked struct{ m *testing.M }

func (l leakChecked) Run() int {
	code := l.m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// client runs the SQL of its second argument, or of a file that ends in .sql,
// and prints the rows of its last statement, columns joined by a bar.
func client(driver, dsn string) {
	if err := runSQL(driver, dsn, os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func runSQL(driver, dsn, text string) (err error) {
	if strings.HasSuffix(text, ".sql") {
		data, err := os.ReadFile(text)
		if err != nil {
			return err
		}
		text = string(data)
	}
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if !strings.HasPrefix(text, "SELECT") {
		_, err := db.ExecContext(context.Background(), text)
		return err
	}
	rows, err := db.QueryContext(context.Background(), text)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		if err := printRow(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

func printRow(rows *sql.Rows) error {
	columns, err := rows.Columns()
	if err != nil {
		return err
	}
	values, into := make([]sql.NullString, len(columns)), make([]any, len(columns))
	for i := range values {
		into[i] = &values[i]
	}
	if err := rows.Scan(into...); err != nil {
		return err
	}
	var texts []string
	for _, v := range values {
		texts = append(texts, v.String)
	}
	fmt.Println(strings.Join(texts, "|"))
	return nil
}

// scriptExits runs a command and compares its exit status: exits 2 gc-agent check.
func scriptExits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits STATUS COMMAND [ARG...]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	err = ts.Exec(args[1], args[2:]...)
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		got = exit.ExitCode()
	case err != nil:
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("exit status %d, want %d", got, want)
	}
}

// raceAtOnce has processes of a race-detecting build end without a pause.
const raceAtOnce = "atexit_sleep_ms=0"

var scriptCommands = map[string]func(*testscript.TestScript, bool, []string){"exits": scriptExits}

func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script", Cmds: scriptCommands, RequireExplicitExec: true, RequireUniqueNames: true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("GORACE", raceAtOnce)
			return nil
		},
	})
}

// TestPostgresScripts gives each script a database of its own, $DATABASE_URL, and a
// role without rights, $ROLE, by whose $ROLE_URL it is reached too.
func TestPostgresScripts(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/postgres/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			t.Parallel()
			url := pgtest.Database(t)
			role, roleURL := pgtest.Role(t, url, "NOSUPERUSER")
			testscript.Run(t, testscript.Params{
				Files: []string{file}, Cmds: scriptCommands, RequireExplicitExec: true, RequireUniqueNames: true,
				Setup: func(env *testscript.Env) error {
					env.Setenv("GORACE", raceAtOnce)
					env.Setenv("DATABASE_URL", url)
					env.Setenv("ROLE", role)
					env.Setenv("ROLE_URL", roleURL)
					return nil
				},
			})
		})
	}
}
