package torture_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// refer makes a new reference, and uploads its blob where that is missing.
func (a *attempt) refer(s step) error {
	incarnation, err := a.hold(s)
	if err != nil {
		return err
	}
	id := a.run.numbers.Add(1)
	a.refs[id] = reference{table: s.table, key: s.key}
	err = a.exec(s.op, fmt.Sprintf(`INSERT INTO %s.%s (id, blob) VALUES ($1, $2)`, a.pool.name, s.table), id, a.pool.refer(s.key, incarnation))
	if err != nil {
		return err
	}
	return a.claim(id)
}

// change changes one of the writer's references.
func (a *attempt) change(s step) error {
	ids := slices.Sorted(maps.Keys(a.refs))
	if len(ids) == 0 {
		return nil
	}
	id := ids[s.pick%len(ids)]
	ref := a.refs[id]
	table := a.pool.name + "." + ref.table
	switch s.op {
	case opRerefer:
		return a.rerefer(s, id)
	case opMove:
		return a.move(s, id)
	case opShow:
		s.key = ref.key
		return a.rerefer(s, id)
	case opDrop:
		delete(a.refs, id)
		return a.exec(s.op, `DELETE FROM `+table+` WHERE id = $1`, id)
	case opHide:
		ref.hidden = true
		a.refs[id] = ref
		return a.exec(s.op, `UPDATE `+table+` SET deleted_at = now() WHERE id = $1`, id)
	default:
		return fmt.Errorf("unknown operation %q", s.op)
	}
}

// rerefer leads a reference to a key, which may be the one that it leads to
// already, and makes it count again if it was soft-deleted.
func (a *attempt) rerefer(s step, id int64) error {
	incarnation, err := a.hold(s)
	if err != nil {
		return err
	}
	ref := a.refs[id]
	ref.key, ref.hidden = s.key, false
	a.refs[id] = ref
	err = a.exec(s.op, fmt.Sprintf(`UPDATE %s.%s SET blob = $2, deleted_at = NULL WHERE id = $1`, a.pool.name, ref.table), id, a.pool.refer(s.key, incarnation))
	if err != nil {
		return err
	}
	return a.claim(id)
}

// move moves a reference to the other table. Its key is referred to at every
// moment, so nothing needs to be held.
func (a *attempt) move(s step, id int64) error {
	ref := a.refs[id]
	from := ref.table
	ref.table = tables[(slices.Index(tables, from)+1)%len(tables)]
	a.refs[id] = ref
	var value string
	var hidden bool
	err := a.tx.QueryRow(a.ctx, fmt.Sprintf(`DELETE FROM %s.%s WHERE id = $1 RETURNING blob::text, deleted_at IS NOT NULL`, a.pool.name, from), id).Scan(&value, &hidden)
	if err != nil {
		return fmt.Errorf("move a reference that is there: %w", err)
	}
	if err := a.pause(); err != nil {
		return err
	}
	err = a.exec(s.op, fmt.Sprintf(`INSERT INTO %s.%s (id, blob, deleted_at) VALUES ($1, $2, CASE WHEN $3 THEN now() END)`, a.pool.name, ref.table), id, value, hidden)
	if err != nil || hidden && !a.pool.constrained() {
		return err
	}
	return a.claim(id)
}

// pinOnly pins a key, and stores its blob where that is missing.
func (a *attempt) pinOnly(s step) error {
	if _, err := a.hold(s); err != nil {
		return err
	}
	incarnation, err := a.look(s.key, "")
	a.done = append(a.done, s.op)
	a.claims = append(a.claims, claim{s.key, incarnation})
	return err
}

// claim notes which blob the writer relies on for a reference that it has just
// written.
func (a *attempt) claim(id int64) error {
	ref := a.refs[id]
	incarnation, err := a.look(ref.key, "")
	ref.incarnation = incarnation
	a.refs[id] = ref
	// An earlier claim of this transaction about the key holds as well.
	a.claims = append(a.claims, claim{ref.key, incarnation})
	return err
}

// hold makes sure, as the pool's guard asks it of a writer, that the blob of the
// key is there and stays, and returns its incarnation.
func (a *attempt) hold(s step) (incarnation int64, err error) {
	// As an application looks that wants to know whether it has to upload.
	seen, err := a.look(s.key, "")
	if err != nil {
		return 0, err
	}
	if err := pause(a.ctx, s.making); err != nil {
		return 0, err
	}
	switch a.pool.hold {
	case byPin:
		there, err := a.pin(s)
		if err != nil {
			return 0, a.met(pinMetDelete, seen, err)
		}
		if there {
			return a.look(s.key, "")
		}
		if seen != 0 {
			a.run.counts.add(pinMetDelete, a.pool.name, 1)
		}
	case byLook:
		locked, err := a.look(s.key, " FOR KEY SHARE")
		if err != nil || locked != 0 {
			return locked, a.met(lookMetDelete, seen, err)
		}
		if seen != 0 {
			a.run.counts.add(lookMetDelete, a.pool.name, 1)
		}
	}
	if incarnation, err = a.put(s.key, seen); err != nil {
		return 0, err
	}
	// The moment in which only the guard protects it.
	return incarnation, a.pause()
}

// met counts a race that shows as an error, which it returns: under REPEATABLE READ
// a row can't be locked that the snapshot has and that was deleted since. Nothing
// else makes these statements fail so, and nobody updates a blob.
func (a *attempt) met(race string, seen int64, err error) error {
	if seen != 0 && a.level == pgx.RepeatableRead && pgdb.Code(err) == pgdb.SerializationFailure {
		a.run.counts.add(race, a.pool.name, 1)
	}
	return err
}

func (a *attempt) pin(s step) (there bool, err error) {
	a.pinned = append(a.pinned, s.key)
	err = a.tx.QueryRow(a.ctx, `SELECT `+ownSchema+a.pool.name+`.pin($1::bytea, $2, $3)`, s.key, []byte(a.owner), s.ttl).Scan(&there)
	return there, err
}

// put stores the blob of a key unless it is there, and returns whichever is.
func (a *attempt) put(key string, seen int64) (int64, error) {
	lock := ""
	if a.pool.hold == byLook {
		lock = " FOR KEY SHARE"
	}
	for range 100 {
		incarnation := a.run.numbers.Add(1)
		tag, err := a.tx.Exec(a.ctx, `INSERT INTO `+a.pool.name+`.blobs (key, incarnation, content) VALUES ($1, $2, $3) ON CONFLICT (key) DO NOTHING`,
			key, incarnation, content(key, incarnation))
		if err != nil {
			return 0, err
		}
		if tag.RowsAffected() == 1 {
			if seen != 0 && a.pool.hold == byConstraint {
				a.run.counts.add(putMetDelete, a.pool.name, 1)
			}
			return incarnation, nil
		}
		// It is there, unless it has gone since.
		if there, err := a.look(key, lock); err != nil || there != 0 {
			return there, err
		}
		seen = 1
	}
	return 0, errors.New("a blob was there for every put and for no look")
}

// look returns the incarnation of the key's blob, 0 if there is none. A transaction
// whose snapshot is old sees two where it has stored the blob again: the one that was
// deleted since, and its own.
func (a *attempt) look(key, lock string) (incarnation int64, err error) {
	err = a.tx.QueryRow(a.ctx, `SELECT incarnation FROM `+a.pool.name+`.blobs WHERE key = $1 ORDER BY incarnation DESC LIMIT 1`+lock, key).Scan(&incarnation)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil
	}
	return incarnation, err
}
