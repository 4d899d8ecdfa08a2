package fleet

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// Sources are the tables that may refer to keys.
type Sources interface {
	// Unreferenced says for each key, in the order of keys, whether nothing refers
	// to it, from one statement on q. A key that it can't answer for is false.
	Unreferenced(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]bool, error)
}

// Verdict is the arbitration's answer for one key. The zero value keeps it.
type Verdict struct {
	Decision Decision
	// Until is when the last of the live pins expires, 0 unless Pinned.
	Until blob.Instant
}

// Decision says whether the blob of a key may be deleted, or what keeps it.
type Decision uint8

// The decisions.
const (
	// Contended means that somebody is pinning the key, or changing a pin of it,
	// right now.
	Contended Decision = iota
	// Referenced means that a source refers to it.
	Referenced
	// Pinned means that a pin of it is live.
	Pinned
	// Dead means that the transaction may delete it, and that nobody can pin it
	// before the transaction has ended.
	Dead
)

// String returns the decision's name as it stands in messages.
func (d Decision) String() string {
	switch d {
	case Referenced:
		return "referenced"
	case Pinned:
		return "pinned"
	case Dead:
		return "dead"
	default:
		return "contended"
	}
}

// Arbitrate is ArbitrateBatch for one key.
func Arbitrate(ctx context.Context, tx pgx.Tx, schema string, key blob.Key, sources Sources) (Verdict, error) {
	verdicts, err := ArbitrateBatch(ctx, tx, schema, []blob.Key{key}, sources)
	if err != nil {
		return Verdict{}, err
	}
	return verdicts[0], nil
}

// ArbitrateBatch decides about keys, in their order, in the transaction that is
// to delete the blobs of those that are dead: READ COMMITTED, and no more keys
// than MaxBatch says. It waits for no lock but the pool's (LockKeys). The steps are
// statements of their own, each younger than the ones before: the key locks, the
// locks on the keys' pins, expired or not, the clock and the pins, the sources. Who
// writes pins without the functions of FunctionsDDL and without JointPut must take
// the key lock first, or isn't seen.
//
// Until the transaction ends nobody can pin any of the keys, so it should be
// short; the sources' statement is cancelled (SQLSTATE 57014) after two seconds.
// After an error nothing is known of any key.
func ArbitrateBatch(ctx context.Context, tx pgx.Tx, schema string, keys []blob.Key, sources Sources) ([]Verdict, error) {
	return arbitrate(ctx, tx, schema, keys, sources, omit{})
}

func arbitrate(ctx context.Context, tx pgx.Tx, schema string, keys []blob.Key, sources Sources, without omit) ([]Verdict, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	locked, err := lockKeys(ctx, tx, schema, keys, without)
	if err != nil {
		return nil, err
	}
	check := checkPins
	if without.PinRows {
		check = LivePins
	}
	var unreferenced []bool
	if without.PinsFirst {
		if unreferenced, err = askSources(ctx, tx, sources, keys); err != nil {
			return nil, err
		}
	}
	pins, err := check(ctx, tx, schema, keys)
	if err != nil {
		return nil, err
	}
	if !without.PinsFirst {
		if unreferenced, err = askSources(ctx, tx, sources, keys); err != nil {
			return nil, err
		}
	}
	verdicts := make([]Verdict, len(keys))
	for i := range keys {
		verdicts[i] = decide(locked[i], pins[i], unreferenced[i])
	}
	return verdicts, nil
}

func lockKeys(ctx context.Context, tx pgx.Tx, schema string, keys []blob.Key, without omit) ([]bool, error) {
	switch {
	case without.KeyLock:
		locked := make([]bool, len(keys))
		for i := range locked {
			locked[i] = true
		}
		return locked, nil
	case without.PoolLock:
		return lockEach(ctx, tx, schema, keys)
	default:
		return lockKeysOmitting(ctx, tx, schema, keys, without)
	}
}

// decide: a reference that is seen protects, with or without the lock, and is the
// answer that lasts longest.
func decide(locked bool, pin Pin, unreferenced bool) Verdict {
	switch {
	case !unreferenced:
		return Verdict{Decision: Referenced}
	case !locked:
		return Verdict{}
	case pin.State == Protected:
		return Verdict{Decision: Pinned, Until: pin.Until}
	case pin.State == Unprotected:
		return Verdict{Decision: Dead}
	default:
		return Verdict{}
	}
}

// limitScan is for how long the sources may be read while writers wait for the
// key locks: two seconds, or less where the transaction says so.
const limitScan = `SELECT before, pg_catalog.set_config('statement_timeout',
	CASE WHEN before::interval > '0' AND before::interval < '2 s' THEN before ELSE '2s' END, true)
	FROM (SELECT pg_catalog.current_setting('statement_timeout') AS before) s`

func askSources(ctx context.Context, tx pgx.Tx, sources Sources, keys []blob.Key) ([]bool, error) {
	var before, limit string
	if err := tx.QueryRow(ctx, limitScan).Scan(&before, &limit); err != nil {
		return nil, fmt.Errorf("limit the time of the sources' statement: %w", err)
	}
	unreferenced, err := sources.Unreferenced(ctx, tx, keys)
	if err != nil {
		return nil, err
	}
	if len(unreferenced) != len(keys) {
		return nil, fmt.Errorf("the sources answered for %d keys, %d were asked about", len(unreferenced), len(keys))
	}
	// After an error above there is no transaction left to restore it in.
	if _, err := tx.Exec(ctx, "SELECT pg_catalog.set_config('statement_timeout', $1, true)", before); err != nil {
		return nil, fmt.Errorf("restore statement_timeout: %w", err)
	}
	return unreferenced, nil
}
