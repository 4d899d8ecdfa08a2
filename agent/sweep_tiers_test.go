package agent_test

import (
	"fmt"
	"testing"

	"github.com/alkblobs/gc-agent/agent"
)

// twoTiers is a pool over two tables that share a key space: a has b1 to b4, b
// has b3 to b6.
func (a *app) twoTiers(extra string) poolYAML {
	a.t.Helper()
	a.exec(`CREATE TABLE a (id text PRIMARY KEY NOT NULL, size integer)`, `CREATE TABLE b (id text PRIMARY KEY NOT NULL, size integer)`,
		`CREATE TABLE refs (blob text)`, `INSERT INTO refs VALUES ('b1'), ('b4')`)
	for _, n := range []int{1, 2, 3, 4} {
		a.exec(fmt.Sprintf(`INSERT INTO a VALUES ('b%d', 1)`, n), fmt.Sprintf(`INSERT INTO b VALUES ('b%d', 10)`, n+2))
	}
	return poolYAML{liveness: a.refs(), extra: extra, blobs: "{type: table, table: a, column: id, size: size}\n      - {type: table, table: b, column: id, size: size}"}
}

func (a *app) wantTiers(inA, inB []string) {
	a.t.Helper()
	wantColumn(a.t, a, `SELECT id FROM a`, inA...)
	wantColumn(a.t, a, `SELECT id FROM b`, inB...)
}

func TestKeyInTwoTiersIsDeletedFromBoth(t *testing.T) {
	for name, limits := range map[string]string{"at once": "", "one by one": "limits: {batch: 1, page: 1}"} {
		t.Run(name, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				p := a.pool(a.twoTiers(limits))
				wantCounts(t, sweep(t, p), agent.Report{Scanned: 8, Referenced: 3, CandidatesStaged: 4})
				a.wantWindow("b2", "b3", "b5", "b6")
				executed := agent.Report{Scanned: 8, Referenced: 3, Overdue: 4, Deleted: 4, BytesReclaimed: 1 + 11 + 10 + 10}
				wantCounts(t, sweepWith(t, p, agent.SweepOptions{DryRun: true}), executed)
				wantCounts(t, sweep(t, p), executed)
				a.wantTiers([]string{"b1", "b4"}, []string{"b4"})
			})
		})
	}
}

// A key that can't be deleted from one tier is deleted from none.
func TestKeyInTwoTiersFailsInOne(t *testing.T) {
	for _, tier := range []string{"a", "b"} {
		t.Run(tier, func(t *testing.T) {
			eachEngine(t, func(t *testing.T, a *app) {
				p := a.pool(a.twoTiers(""))
				sweep(t, p)
				if a.engine == "postgres" {
					a.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$`,
						`CREATE TRIGGER poison AFTER DELETE ON `+tier+` FOR EACH ROW WHEN (old.id = 'b3') EXECUTE FUNCTION refuse()`)
				} else {
					a.exec(`CREATE TRIGGER poison AFTER DELETE ON ` + tier + ` WHEN old.id = 'b3' BEGIN SELECT RAISE(ABORT, 'not this one'); END`)
				}
				d := decided{}
				rep := sweepWith(t, p, d.options())
				if rep.BytesReclaimed != 21 {
					t.Errorf("%+v", rep)
				}
				d.want(t, map[string][]string{"failed": {"b3"}, "deleted": {"b2", "b5", "b6"}})
				a.wantTiers([]string{"b1", "b3", "b4"}, []string{"b3", "b4"})
			})
		})
	}
}

func TestKeyInTwoTiersLockedInOne(t *testing.T) {
	t.Parallel()
	for _, tier := range []string{"a", "b"} {
		t.Run(tier, func(t *testing.T) {
			t.Parallel()
			a := newPostgresApp(t)
			cfg := a.twoTiers("")
			// With a foreign key settle isn't what stops the sweep.
			a.exec(`ALTER TABLE refs ADD FOREIGN KEY (blob) REFERENCES a (id)`)
			cfg.liveness = linkedRefs()
			p := a.pool(cfg)
			sweep(t, p)
			a.session("BEGIN", `SELECT 1 FROM `+tier+` WHERE id = 'b3' FOR UPDATE`)
			d := decided{}
			sweepWith(t, p, d.options())
			d.want(t, map[string][]string{"locked": {"b3"}, "deleted": {"b2", "b5", "b6"}})
			a.wantTiers([]string{"b1", "b3", "b4"}, []string{"b3", "b4"})
		})
	}
}
