package torture_test

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// ownSchema begins the name of the agent's schema of a pool; the application's
// tables of it stand in one that is named like the pool.
const ownSchema = "gc_"

// tables hold the references.
var tables = []string{"notes", "pages"}

// hold is what a writer does so that the blob it is about to refer to stays.
type hold int

const (
	// byConstraint refers, and begins again with the upload if that is refused.
	byConstraint hold = iota
	// byPin pins first, by the function of the agent's schema.
	byPin
	// byLook locks the blob's row FOR KEY SHARE before it refers.
	byLook
	// byTableLock begins by locking the tables of the references, as it will write
	// to them.
	byTableLock
)

// pool is one application and the guard that its references are under. Values
// stand here as text, in the form in which the server prints them.
type pool struct {
	name    string
	writers int
	guard   string // of both sources
	hold    hold
	key     string // type of the blobs' key column
	blob    string // type of the references' column, and its constraint
	// format is the sources', empty for the column's own.
	format string
	// refer is the value that refers to a blob, referred the key that it names.
	refer    func(key string, incarnation int64) string
	referred func(value string, keys map[int64]string) string
}

// pools are those of the torture: one a guard.
func pools() []*pool {
	return []*pool{
		{
			name: "fk", writers: 2, guard: "foreign_key", hold: byConstraint, key: "bytea",
			blob: "bytea REFERENCES fk.blobs", refer: asKey, referred: isKey,
		},
		{
			name: "fk_other", writers: 2, guard: "foreign_key", hold: byConstraint, key: "text",
			blob:  "bigint REFERENCES fk_other.blobs (incarnation)",
			refer: func(_ string, incarnation int64) string { return strconv.FormatInt(incarnation, 10) },
			referred: func(value string, keys map[int64]string) string {
				if key, ok := keys[number(value)]; ok {
					return key
				}
				return "incarnation " + value
			},
		},
		{
			name: "pin", writers: 4, guard: "settle", hold: byPin, key: "bytea", blob: "text", format: "sha256:{hex}",
			refer: asDigest, referred: isDigest,
		},
		{name: "look", writers: 2, guard: "settle", hold: byLook, key: "text", blob: "text", refer: asKey, referred: isKey},
		{
			name: "trigger", writers: 2, guard: "trigger", hold: byConstraint, key: "bytea", blob: "text", format: "sha256:{hex}",
			refer: asDigest, referred: isDigest,
		},
		{name: "locked", writers: 2, guard: "table_lock", hold: byTableLock, key: "text", blob: "text", refer: asKey, referred: isKey},
	}
}

func asKey(key string, _ int64) string              { return key }
func isKey(value string, _ map[int64]string) string { return value }

func asDigest(key string, _ int64) string { return "sha256:" + strings.TrimPrefix(key, `\x`) }
func isDigest(value string, _ map[int64]string) string {
	return `\x` + strings.TrimPrefix(value, "sha256:")
}

// constrained says whether a row keeps its blob even where the source's `where`
// sets the row aside: no database lets a foreign key dangle.
func (p *pool) constrained() bool { return p.guard == "foreign_key" }

// keys are few, so that writers and agents meet at them.
const keys = 16

func (p *pool) keyOf(n int) string {
	key := fmt.Sprintf("%s/%02d", p.name, n)
	if p.key == "bytea" {
		return `\x` + hex.EncodeToString([]byte(key))
	}
	return key
}

// schema makes the application's tables. Deletes dawdle, before and after: what
// happens between a check and its delete, and between that and the commit, is then
// no matter of microseconds.
func (p *pool) schema() string {
	sql := `
CREATE SCHEMA $pool;
CREATE TABLE $pool.blobs (key ` + p.key + ` PRIMARY KEY, incarnation bigint NOT NULL UNIQUE, content text NOT NULL);
CREATE FUNCTION $pool.dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_sleep(random() * ` + dawdle + `);
	RETURN NULL;
END $$;
CREATE TRIGGER dawdle_before BEFORE DELETE ON $pool.blobs FOR EACH STATEMENT EXECUTE FUNCTION $pool.dawdle();
CREATE TRIGGER dawdle_after AFTER DELETE ON $pool.blobs FOR EACH STATEMENT EXECUTE FUNCTION $pool.dawdle();`
	for _, table := range tables {
		sql += `
CREATE TABLE $pool.` + table + ` (id bigint PRIMARY KEY, blob ` + p.blob + `, deleted_at timestamptz);
CREATE INDEX ON $pool.` + table + ` (blob);`
	}
	return strings.ReplaceAll(sql, "$pool", p.name)
}

// dawdle is the most seconds that a batch sleeps before and again after its delete.
const dawdle = "0.06"

// published are the tables whose changes the judge reads.
func (p *pool) published() []string {
	names := []string{p.name + ".blobs"}
	for _, table := range tables {
		names = append(names, p.name+"."+table)
	}
	if p.hold == byPin {
		names = append(names, ownSchema+p.name+".gc_pins")
	}
	return names
}

// configuration is an agent's, with all pools.
func configuration(url string, pools []*pool) string {
	var yaml strings.Builder
	fmt.Fprintf(&yaml, "databases: {app: {url: %q}}\nmax_concurrent_sweeps: 16\npools:\n", url)
	for _, p := range pools {
		fmt.Fprintf(&yaml, `
  - name: %[1]s
    database: app
    schema: %[2]s
    mode: enforce
    fleet: %[3]t
    schedule: "@every 1s"
    window: 0s
    blobs: [{type: table, table: %[1]s.blobs, column: key}]
    brakes: {off: [max_dead_ratio]}
    limits: {batch: 8, settle_timeout: 300ms, lock_timeout: 300ms}
    liveness:
`, p.name, ownSchema+p.name, p.hold == byPin)
		for _, table := range tables {
			fmt.Fprintf(&yaml, "      - {name: %[2]s, table: %[1]s.%[2]s, column: blob, where: \"deleted_at IS NULL\", allow_empty: true, guard: %[3]s", p.name, table, p.guard)
			if p.format != "" {
				fmt.Fprintf(&yaml, ", format: %q", p.format)
			}
			yaml.WriteString("}\n")
		}
	}
	return yaml.String()
}
