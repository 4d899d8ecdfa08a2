package liveness_test

import (
	"testing"

	"github.com/alkblobs/gc-agent/internal/pgtest"
	"github.com/alkblobs/gc-agent/liveness"
)

// A soft-deleted row is undeleted between the check and the delete. Its foreign key
// checks nothing, since the column isn't written, and takes the row along, or its
// reference, when the blob goes. So such a source is refused; and where the foreign
// key is of another kind the row holds its blob, whatever where says.
func TestRaceUndelete(t *testing.T) {
	t.Parallel()
	for name, action := range map[string]string{"cascade": "CASCADE", "set null": "SET NULL", "set default": "SET DEFAULT"} {
		for how, without := range map[string]liveness.Omit{"protected": {}, "without HeldRows": {HeldRows: true}} {
			t.Run(name+"/"+how, func(t *testing.T) {
				t.Parallel()
				if lost, want := undelete(t, action, without), without.HeldRows; lost != want {
					t.Errorf("the undeleted row has lost its blob: %t, want %t", lost, want)
				}
			})
		}
	}
}

// undelete says whether the row that was undeleted refers to nothing.
func undelete(t *testing.T, action string, without liveness.Omit) (lost bool) {
	t.Helper()
	w := newPGWorld(t, `CREATE TABLE blobs (id int PRIMARY KEY); INSERT INTO blobs VALUES (1), (2);
		CREATE TABLE r (b int UNIQUE REFERENCES blobs ON DELETE `+action+`, gone boolean);
		INSERT INTO r VALUES (1, false), (2, true)`)
	pool := pgIntPool("blobs", "id")
	pool.Options = pool.Omitting(without)
	if p, _ := w.resolve(t, pool, filtered(pgSource("r", "b", ""), "NOT gone")); p != nil {
		dead := w.dead(t, p, "2")
		pgtest.Exec(t, w.app, `UPDATE r SET gone = false WHERE b = 2`)
		if len(dead) == 1 {
			pgtest.Exec(t, w.app, `DELETE FROM blobs WHERE id = 2`)
		}
	} else {
		pgtest.Exec(t, w.app, `UPDATE r SET gone = false WHERE b = 2`)
	}
	return pgCount(t, w.app, `SELECT count(*) FROM r JOIN blobs ON r.b = blobs.id WHERE r.b = 2 AND NOT gone`) == 0
}
