package torture_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/alkblobs/gc-agent/bench"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// The torture convicts a collector that is wrong: one that looks, and then deletes
// what it found, honouring references and live pins alike, but locking nothing.
func TestRogueIsConvicted(t *testing.T) {
	t.Parallel()
	binary := bench.Build(t)
	for _, p := range pools() {
		if p.constrained() {
			continue // the database itself refuses such a delete
		}
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			r := newRun(t, []*pool{p}, 1)
			r.binary, r.agents = binary, []*agentProcess{r.newAgent("never started", "run")}
			r.ensureSchema()
			r.judge()
			for deadline := time.Now().Add(patience); r.lost() == 0; {
				if time.Now().After(deadline) {
					t.Fatalf("not convicted within %s, %d deletes", patience, r.counts.total("blobs deleted"))
				}
				r.round(time.Second, func(ctx context.Context, stop <-chan struct{}) error { return r.rogue(ctx, p, stop) })
				if err := r.caughtUp(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			t.Logf("convicted after %d deletes: %s", r.counts.total("blobs deleted"), r.violations())
		})
	}
}

// rogue collects as one would by hand.
func (r *run) rogue(ctx context.Context, p *pool, stop <-chan struct{}) error {
	var conditions []string
	for _, table := range tables {
		conditions = append(conditions, `NOT EXISTS (SELECT FROM `+p.name+`.`+table+` r WHERE r.deleted_at IS NULL AND r.blob = `+p.referable()+`)`)
	}
	if p.hold == byPin {
		conditions = append(conditions, `NOT EXISTS (SELECT FROM `+ownSchema+p.name+`.gc_pins n WHERE n.key = b.key AND n.expiry > `+pgdb.Now+`)`)
	}
	dead := `SELECT b.key::text FROM ` + p.name + `.blobs b WHERE ` + strings.Join(conditions, " AND ")
	for !closed(stop) {
		err := pgx.BeginFunc(ctx, r.admin, func(tx pgx.Tx) error {
			rows, err := tx.Query(ctx, dead)
			if err != nil {
				return err
			}
			found, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				return err
			}
			tag, err := tx.Exec(ctx, `DELETE FROM `+p.name+`.blobs WHERE key::text = ANY ($1)`, found)
			r.counts.add("blobs deleted", p.name, tag.RowsAffected())
			return err
		})
		if code := pgdb.Code(err); err != nil && code != pgdb.DeadlockDetected {
			return errors.Join(errors.New("rogue"), err)
		}
		if err := pause(ctx, poll); err != nil {
			return err
		}
	}
	return nil
}
