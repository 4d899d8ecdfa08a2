package fleet

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/owntable"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

const pinsTable = "gc_pins"

// Owner names whoever a pin belongs to. It is bytes, not necessarily text.
type Owner string

// Pin is what the pins of one key say.
type Pin struct {
	State PinState
	// Until is when the last of the live pins expires, 0 unless Protected.
	Until blob.Instant
}

// PinState says whether pins protect a key. The zero value keeps it.
type PinState uint8

// The states of a key's pins.
const (
	// Locked means that somebody else is changing a pin of the key right now, so
	// that it isn't known.
	Locked PinState = iota
	// Unprotected means that no pin of the key is live.
	Unprotected
	// Protected means that at least one is.
	Protected
)

// String returns the state's name as it stands in messages.
func (s PinState) String() string {
	switch s {
	case Unprotected:
		return "unprotected"
	case Protected:
		return "protected"
	default:
		return "locked"
	}
}

// PinsDDL returns the statements that make the table of pins in a schema that is
// there, in their order. Each may be run again.
//
// The table is logged: a crash that emptied it would unprotect everything.
func PinsDDL(schema string) []string {
	return []string{
		"CREATE TABLE IF NOT EXISTS " + pgdb.Ident(schema, pinsTable) +
			" (key bytea, owner bytea, expiry bigint NOT NULL, PRIMARY KEY (key, owner))",
	}
}

// EnsureSchema makes the table of pins, and the schema where there is none. Where
// the table is there already it changes nothing, and needs no right to; a table
// that isn't that of the pins is an error that says what differs. It is all or
// nothing, safe to repeat, and safe when any number of agents run it at once.
func EnsureSchema(ctx context.Context, q pgdb.Querier, schema string) error {
	if err := own(schema).Ensure(ctx, q, schema); err != nil {
		return fmt.Errorf("ensure schema of pins: %w", err)
	}
	return nil
}

// CheckSchema says whether the table of pins is there. One that isn't that of the
// pins is an error that says what differs, an owntable.ErrDifferent.
func CheckSchema(ctx context.Context, q pgdb.Querier, schema string) (bool, error) {
	there, err := own(schema).Check(ctx, q, schema)
	if err != nil {
		return false, fmt.Errorf("check schema of pins: %w", err)
	}
	return there, nil
}

func own(schema string) owntable.Table {
	return owntable.Table{
		Name:  pinsTable,
		Shape: []string{"ordinary table", "key bytea NOT NULL", "owner bytea NOT NULL", "expiry bigint NOT NULL", "PRIMARY KEY (key, owner)"},
		DDL:   PinsDDL(schema),
	}
}

// PinCheck says whether any pin of the key is live at this moment: Protected or
// Unprotected, never Locked. It locks nothing and decides nothing: the answer may
// be out of date when it arrives. Without the table it is an error.
func PinCheck(ctx context.Context, q pgdb.Querier, schema string, key blob.Key) (PinState, error) {
	var live bool
	err := q.QueryRow(ctx, fmt.Sprintf("SELECT EXISTS (SELECT FROM %s WHERE key = $1 AND expiry > %s)",
		pgdb.Ident(schema, pinsTable), pgdb.Now), []byte(key)).Scan(&live)
	switch {
	case err != nil:
		return Locked, fmt.Errorf("check pins in %s: %w", pgdb.Ident(schema, pinsTable), err)
	case live:
		return Protected, nil
	default:
		return Unprotected, nil
	}
}

// LivePins says for each key, in the order of the keys, whether a pin protects
// it. It is for looking: it locks nothing, no key is Locked, and the answer may be
// out of date when it arrives. A pin is live while its expiry is after the clock of
// the database. Without the table every key is Unprotected. After an error nothing
// is known of any key.
func LivePins(ctx context.Context, q pgdb.Querier, schema string, keys []blob.Key) ([]Pin, error) {
	pins, err := pinsOf(ctx, q, schema, keys, false)
	if err != nil {
		return nil, fmt.Errorf("read pins in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	return pins, nil
}

// checkPins is LivePins with a lock on every pin row of the keys until the
// transaction ends: q must be one, READ COMMITTED. A row that another transaction
// has locked makes its key Locked and no other.
func checkPins(ctx context.Context, q pgdb.Querier, schema string, keys []blob.Key) ([]Pin, error) {
	pins, err := pinsOf(ctx, q, schema, keys, true)
	if err != nil {
		return nil, fmt.Errorf("check pins in %s: %w", pgdb.Ident(schema, pinsTable), err)
	}
	return pins, nil
}

func pinsOf(ctx context.Context, q pgdb.Querier, schema string, keys []blob.Key, lock bool) ([]Pin, error) {
	pins := make([]Pin, len(keys))
	there, err := owntable.HasTable(ctx, q, schema, pinsTable)
	if err != nil {
		return nil, err
	}
	if !there {
		for i := range pins {
			pins[i].State = Unprotected
		}
		return pins, nil
	}
	var locked map[blob.Key]int64
	if lock {
		if locked, err = lockPins(ctx, q, schema, keys); err != nil {
			return nil, err
		}
	}
	rows, err := readPins(ctx, q, schema, keys)
	if err != nil {
		return nil, err
	}
	for i, key := range keys {
		if r := rows[key]; !lock || r.count == locked[key] {
			pins[i] = r.pin()
		}
	}
	return pins, nil
}

// lockPins locks the pin rows of the keys, in their order, and returns how many
// each key has. It is a statement of its own so that what is read next is younger
// than the locks.
func lockPins(ctx context.Context, q pgdb.Querier, schema string, keys []blob.Key) (map[blob.Key]int64, error) {
	rows, err := q.Query(ctx, fmt.Sprintf(`
		SELECT key, pg_catalog.count(*) FROM (
			SELECT key FROM %s WHERE key = ANY($1::bytea[]) ORDER BY key, owner FOR UPDATE SKIP LOCKED
		) locked GROUP BY key`, pgdb.Ident(schema, pinsTable)), pgdb.Bytes(keys))
	if err != nil {
		return nil, err
	}
	locked := make(map[blob.Key]int64)
	var key []byte
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&key, &n}, func() error {
		locked[blob.Key(key)] = n
		return nil
	})
	return locked, err
}

// pinRows is what the pin rows of one key say together; the zero value is no row.
type pinRows struct {
	count  int64
	latest blob.Instant // the last of their expiries
	now    blob.Instant // the database's clock, after they were read
}

func (r pinRows) pin() Pin {
	if r.count > 0 && r.latest > r.now {
		return Pin{State: Protected, Until: r.latest}
	}
	return Pin{State: Unprotected}
}

func readPins(ctx context.Context, q pgdb.Querier, schema string, keys []blob.Key) (map[blob.Key]pinRows, error) {
	// The clock is read beside the aggregates, so once they are complete.
	rows, err := q.Query(ctx, fmt.Sprintf(`
		SELECT key, pg_catalog.count(*), pg_catalog.max(expiry), %s
		FROM %s WHERE key = ANY($1::bytea[]) GROUP BY key`, pgdb.Now, pgdb.Ident(schema, pinsTable)), pgdb.Bytes(keys))
	if err != nil {
		return nil, err
	}
	found := make(map[blob.Key]pinRows)
	var key []byte
	var n, latest, now int64
	_, err = pgx.ForEachRow(rows, []any{&key, &n, &latest, &now}, func() error {
		found[blob.Key(key)] = pinRows{count: n, latest: blob.Instant(latest), now: blob.Instant(now)}
		return nil
	})
	return found, err
}
