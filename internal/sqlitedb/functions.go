package sqlitedb

import (
	"database/sql/driver"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/alkblobs/gc-agent/blob"

	"modernc.org/sqlite"
)

// The agent's own SQL functions read and write values through blob.Format, so
// that SQL and Go can't differ about what a value names.
const (
	keyFunction   = "gc_agent_key"
	valueFunction = "gc_agent_value"
)

// Every connection that is opened from now on has them.
func init() {
	register(keyFunction, func(f blob.Format, v driver.Value) driver.Value {
		if key, ok := decodeValue(f, v); ok {
			return []byte(key)
		}
		return nil
	})
	register(valueFunction, func(f blob.Format, v driver.Value) driver.Value {
		key, ok := v.([]byte)
		if !ok {
			return nil
		}
		return encodeValue(f, blob.Key(key))
	})
}

func register(name string, fn func(blob.Format, driver.Value) driver.Value) {
	sqlite.MustRegisterFunction(name, &sqlite.FunctionImpl{
		NArgs:         2,
		Deterministic: true,
		// Without it the driver ends a text at its first NUL. The arguments are good
		// until the call returns: nothing may keep them.
		VolatileArgs: true,
		Scalar: func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
			f, err := formatOf(args[0])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			return fn(f, args[1]), nil
		},
	})
}

// formats holds every format that was asked for, parsed. There are as many as
// the configuration names.
var formats sync.Map // string to blob.Format

func formatOf(v driver.Value) (blob.Format, error) {
	s, _ := v.(string)
	if f, ok := formats.Load(s); ok {
		return f.(blob.Format), nil
	}
	s = strings.Clone(s)
	f, err := blob.ParseFormat(s)
	if err == nil {
		formats.Store(s, f)
	}
	return f, err
}

// KeyOf returns SQL for the key, as canonical bytes, that the value expr names in
// any spelling; NULL where it names none. A BLOB is read as the text it may be,
// since some drivers store text so, and an integer as its digits; {bytes} reads
// nothing but a BLOB.
func KeyOf(f blob.Format, expr string) string {
	return keyFunction + "(" + Literal(f.String()) + ", " + expr + ")"
}

// ValueOf returns SQL for the canonical value that names the key canon, which is
// canonical bytes; NULL where none does. It is a BLOB for {bytes}, an integer for
// {int} without literals, else text, and it has no affinity: compared with a
// column it takes the column's.
func ValueOf(f blob.Format, canon string) string {
	return valueFunction + "(" + Literal(f.String()) + ", " + canon + ")"
}

// exactFloat is the first float that stands for more than one integer.
const exactFloat = 1 << 53

func decodeValue(f blob.Format, v driver.Value) (blob.Key, bool) {
	var text string
	switch v := v.(type) {
	case []byte:
		text = string(v)
	case string:
		text = v
	case int64:
		text = strconv.FormatInt(v, 10)
	case float64:
		// Whole numbers end up as floats where a library knows no NULL among integers.
		if v <= -exactFloat || v >= exactFloat || v != float64(int64(v)) {
			return "", false
		}
		text = strconv.FormatInt(int64(v), 10)
	default:
		return "", false
	}
	if _, isBlob := v.([]byte); f.Placeholder() == blob.Bytes && !isBlob {
		return "", false
	}
	key, _, ok := f.Decode(text)
	return key, ok
}

func encodeValue(f blob.Format, key blob.Key) driver.Value {
	value, ok := f.Encode(key)
	if !ok {
		return nil
	}
	bare := f.Prefix() == "" && f.Suffix() == ""
	switch n, isInt := key.Int(); {
	case f.Placeholder() == blob.Bytes:
		return []byte(value)
	case f.Placeholder() == blob.Int && bare && isInt:
		return n
	default:
		return value
	}
}

// Literal quotes a string without NUL.
func Literal(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
