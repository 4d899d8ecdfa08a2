package bench_test

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/bench"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"
)

var (
	keys   = flag.Int64("keys", 200_000, "blobs of a pool, a multiple of 100")
	rounds = flag.Int("rounds", 3, "rounds of which the throughput is the median")
)

func TestMain(m *testing.M) {
	bench.WriterMain()
	goleak.VerifyTestMain(m)
}

// The benchmarks print tables. They measure what takes seconds, and run once.

// The agent's phases beside the one statement that one would write by hand,
// round by round in turn.
func BenchmarkThroughput(b *testing.B) {
	eachEngine(b, func(b *testing.B, open func(keys int64) *bench.App) {
		a := open(*keys)
		agents, plain := phases{}, phases{}
		var longest int64
		for range *rounds {
			plain.add(measurePlain(b, a))
			a.Fill()
			took, tx := measureAgent(b, a)
			agents.add(took)
			longest = max(longest, tx)
			a.CheckCollected()
			a.Fill()
		}
		t := newTable(fmt.Sprintf("%s, %d blobs, %d dead", a.Engine, a.Keys, a.Dead()), "agent, keys/s", "one statement, keys/s", "ratio of time")
		for _, phase := range []struct {
			name string
			keys int64
		}{{"mark", a.Keys}, {"stage", a.Dead()}, {"mark and stage", a.Keys}, {"delete", a.Dead()}} {
			rate, other, ratio := perSecond(phase.keys, agents.median(phase.name)), "", ""
			if base := plain.median(phase.name); base > 0 {
				other, ratio = perSecond(phase.keys, base), fmt.Sprintf("%.2f", agents.median(phase.name).Seconds()/base.Seconds())
			}
			t.row(phase.name, rate, other, ratio)
		}
		t.print()
		fmt.Printf("longest transaction: %d ms\n", longest)
	})
}

// The real binary's memory and transactions, at a size and at a tenth of it.
func BenchmarkScale(b *testing.B) {
	bin := bench.Build(b)
	eachEngine(b, func(b *testing.B, open func(keys int64) *bench.App) {
		t := newTable("the real binary", "first sweep (stages)", "second (deletes)", "VmHWM", "longest transaction")
		for _, n := range []int64{*keys / 10, *keys} {
			a := open(n)
			first, second := bin.Sweep(b, a), bin.Sweep(b, a)
			a.CheckCollected()
			peak, longest := max(first.PeakMiB, second.PeakMiB), max(first.LongestTx, second.LongestTx)
			if peak > 64 || longest > time.Second {
				b.Errorf("%d blobs: %.1f MiB, want under 64; a transaction of %s, want under 1 s", n, peak, longest)
			}
			if a.Engine == "sqlite" { // seen from inside only
				longest = time.Duration(max(first.LongestTxMS, second.LongestTxMS)) * time.Millisecond
			}
			t.row(fmt.Sprintf("%s, %d blobs", a.Engine, n), round(first.Took), round(second.Took), fmt.Sprintf("%.1f MiB", peak), round(longest))
		}
		t.print()
	})
}

// What an application that writes 50 times a second to an SQLite file notices.
func BenchmarkWriter(b *testing.B) {
	bin := bench.Build(b)
	t := newTable(fmt.Sprintf("a writer beside sweeps of %d blobs", *keys), "writes", "locked out", "median", "99 % within", "longest")
	for _, journal := range []string{"WAL", "DELETE"} {
		a := bench.NewSQLite(b, *keys, journal)
		row := func(beside string, w bench.Writing) {
			t.row(journal+", "+beside, fmt.Sprint(w.Writes), fmt.Sprint(w.Busy), round(w.Median), round(w.P99), round(w.Longest))
			if w.Busy > 0 {
				b.Errorf("%s: %d writes found the file locked for 5 s", journal, w.Busy)
			}
		}
		row("alone", a.WriteDuring(func() { <-time.After(5 * time.Second) }))
		a.Fill()
		row("mark and stage", a.WriteDuring(func() { bin.Sweep(b, a) }))
		a.Fill()
		bin.Sweep(b, a)
		row("mark and delete", a.WriteDuring(func() { bin.Sweep(b, a) }))
		a.CheckReferences()
	}
	t.print()
}

func eachEngine(b *testing.B, run func(b *testing.B, open func(keys int64) *bench.App)) {
	b.Run("postgres", func(b *testing.B) {
		run(b, func(keys int64) *bench.App { return bench.NewPostgres(b, keys) })
	})
	b.Run("sqlite", func(b *testing.B) {
		run(b, func(keys int64) *bench.App { return bench.NewSQLite(b, keys, "WAL") })
	})
}

// measureAgent stages in one sweep and deletes in the next.
func measureAgent(b *testing.B, a *bench.App) (took map[string]time.Duration, longestTxMS int64) {
	cfg, err := config.Load(a.Config, config.OSEnv())
	if err != nil {
		b.Fatal(err)
	}
	ag, err := agent.New(cfg, agent.Options{Log: zerolog.Nop()})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := ag.Close(); err != nil {
			b.Error(err)
		}
	}()
	sweep := func() (marked, all time.Duration) {
		began := time.Now()
		rep, err := ag.Pools()[0].Sweep(b.Context(), agent.SweepOptions{Progress: func(p agent.Progress) {
			if p.Phase == "mark" {
				marked = time.Since(began)
			}
		}})
		if err != nil || rep.Aborted != nil {
			b.Fatalf("sweep: %v %+v", err, rep)
		}
		longestTxMS = max(longestTxMS, rep.LongestTxMS)
		return marked, time.Since(began)
	}
	marked, all := sweep()
	markedAgain, allAgain := sweep()
	return map[string]time.Duration{
		"mark": marked, "stage": all - marked, "mark and stage": all, "delete": allAgain - markedAgain,
	}, longestTxMS
}

// measurePlain does the same with one statement each.
func measurePlain(b *testing.B, a *bench.App) map[string]time.Duration {
	bytes, hex := "bytea", "encode(b.key, 'hex')"
	del := `DELETE FROM blobs b USING plain_window w WHERE w.key = b.key`
	if a.Engine == "sqlite" {
		bytes, hex = "BLOB", "lower(hex(b.key))"
		del = `DELETE FROM blobs WHERE key IN (SELECT key FROM plain_window)`
	}
	timed := func(statement string) time.Duration {
		began := time.Now()
		if _, err := a.DB.ExecContext(context.WithoutCancel(b.Context()), statement); err != nil {
			b.Fatalf("%s: %v", statement, err)
		}
		return time.Since(began)
	}
	a.Exec(`CREATE TABLE plain_window (key `+bytes+` PRIMARY KEY NOT NULL, visible_after bigint NOT NULL)`,
		`CREATE INDEX plain_window_visible_after ON plain_window (visible_after, key)`)
	took := map[string]time.Duration{
		"mark and stage": timed(`INSERT INTO plain_window SELECT b.key, 0 FROM blobs b
			WHERE NOT EXISTS (SELECT 1 FROM attachments r WHERE r.blob = b.key)
				AND NOT EXISTS (SELECT 1 FROM documents r WHERE r.digest = 'sha256:' || ` + hex + `)`),
		"delete": timed(del),
	}
	a.CheckCollected()
	a.Exec(`DROP TABLE plain_window`)
	return took
}

// phases holds what each phase took, round by round.
type phases map[string][]time.Duration

func (p phases) add(took map[string]time.Duration) {
	for phase, d := range took {
		p[phase] = append(p[phase], d)
	}
}

func (p phases) median(phase string) time.Duration {
	if len(p[phase]) == 0 {
		return 0
	}
	slices.Sort(p[phase])
	return p[phase][len(p[phase])/2]
}

func perSecond(n int64, d time.Duration) string { return fmt.Sprintf("%.0f", float64(n)/d.Seconds()) }

func round(d time.Duration) string { return d.Round(time.Millisecond / 10).String() }

// table is printed in columns, its title over the first.
type table struct{ rows [][]string }

func newTable(title string, columns ...string) *table {
	t := &table{}
	t.row(append([]string{title}, columns...)...)
	return t
}

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) print() {
	fmt.Println()
	for _, row := range t.rows {
		for column, cell := range row {
			width := 0
			for _, other := range t.rows {
				width = max(width, len(other[column]))
			}
			fmt.Printf("%-*s  ", width, cell)
		}
		fmt.Println()
	}
}
