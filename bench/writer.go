package bench

import (
	"bufio"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"time"

	"github.com/alkblobs/gc-agent/internal/sqlitedb"
)

const (
	// writerVariable makes a process a writer, and names the SQLite file.
	writerVariable = "GC_AGENT_BENCH_WRITER"
	writerPace     = 20 * time.Millisecond
)

// Writing is what a writer saw.
type Writing struct {
	Writes int // transactions that were committed
	Busy   int // those that found the file locked for 5 s
	// How long a transaction took, its waits included.
	Median, P99, Longest time.Duration
}

// WriteDuring runs fn while another process, which is this binary once more,
// writes to the SQLite application 50 times a second, and returns what that one
// saw. A writer that fails for any reason but a locked file fails the test.
func (a *App) WriteDuring(fn func()) (w Writing) {
	a.t.Helper()
	exe, err := os.Executable()
	if err != nil {
		a.t.Fatal(err)
	}
	cmd := exec.CommandContext(a.t.Context(), exe)
	cmd.Env = append(os.Environ(), writerVariable+"="+a.path)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		a.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		a.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		a.t.Fatal(err)
	}
	out := bufio.NewReader(stdout)
	_, err = out.ReadString('\n')
	if err == nil {
		fn()
	}
	err = errors.Join(err, stdin.Close(), json.NewDecoder(out).Decode(&w), cmd.Wait())
	if err != nil {
		a.t.Fatalf("writer: %v", err)
	}
	return w
}

// WriterMain doesn't return in a process that WriteDuring has started. TestMain
// of whoever calls WriteDuring calls it first.
func WriterMain() {
	path := os.Getenv(writerVariable)
	if path == "" {
		return
	}
	if err := write(context.Background(), path); err != nil {
		fmt.Fprintln(os.Stderr, "writer:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// write writes until standard input ends. It prints a line once it has begun,
// and in the end what it saw.
func write(ctx context.Context, path string) (err error) {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(5000)&_pragma=foreign_keys(1)&_txlock=immediate")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	db.SetMaxOpenConns(1)

	stop := make(chan struct{})
	go func() {
		defer close(stop)
		// Nothing is ever sent; the end is what counts.
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	pace := time.NewTicker(writerPace)
	defer pace.Stop()
	var w Writing
	var took []time.Duration
	for i := 0; ; i++ {
		began := time.Now()
		err := writeOnce(ctx, db, i)
		switch took = append(took, time.Since(began)); {
		case sqlitedb.Busy(err):
			w.Busy++
		case err != nil:
			return err
		default:
			w.Writes++
		}
		if i == 0 {
			fmt.Println("writing")
		}
		select {
		case <-stop:
			slices.Sort(took)
			w.Median, w.P99, w.Longest = took[len(took)/2], took[len(took)*99/100], took[len(took)-1]
			return json.NewEncoder(os.Stdout).Encode(w)
		case <-pace.C:
		}
	}
}

// writeOnce is one transaction of an application's: mostly a new blob and what
// refers to it, at times the end of a reference or of both, at times a new
// reference to a blob that was dead and is still there.
func writeOnce(ctx context.Context, db *sql.DB, i int) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	exec := func(query string, args ...any) {
		if err == nil {
			_, err = tx.ExecContext(ctx, query, args...)
		}
	}
	switch i % 5 {
	case 0, 1:
		exec(`INSERT INTO blobs VALUES (?, ?, 'written', 7)`, writerKey(i), writerID(i))
		exec(`INSERT INTO attachments VALUES (?, ?)`, writerID(i), writerKey(i))
	case 2:
		exec(`INSERT INTO blobs VALUES (?, ?, 'written', 7)`, writerKey(i), writerID(i))
		exec(`INSERT INTO documents VALUES (?, ?)`, writerID(i), writerDigest(i))
		exec(`DELETE FROM attachments WHERE id = ?`, writerID(i-2))
	case 3:
		exec(`DELETE FROM documents WHERE id = ?`, writerID(i-6))
		exec(`DELETE FROM blobs WHERE key = ?`, writerKey(i-6))
	case 4:
		exec(`INSERT INTO documents SELECT ?1, 'sha256:' || lower(hex(key)) FROM blobs WHERE key > ?2 AND id % 10 < 3 ORDER BY key LIMIT 1`,
			writerID(i), writerKey(i))
	}
	if err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

func writerID(i int) int { return 1_000_000_000 + i }

func writerKey(i int) []byte {
	sum := sha256.Sum256([]byte("writer " + strconv.Itoa(i)))
	return sum[:]
}

func writerDigest(i int) string { return "sha256:" + hex.EncodeToString(writerKey(i)) }
