package pgdb

import (
	"fmt"

	"github.com/alkblobs/gc-agent/blob"
)

// Canon returns SQL for the canonical bytes (a bytea) of a key column or value
// of the given kind.
func Canon(kind blob.Kind, expr string) string {
	switch kind {
	case blob.KindBytes:
		return expr
	case blob.KindText:
		return "convert_to(" + expr + ", 'UTF8')"
	default:
		// uuid and integers print as the ASCII of their canonical key.
		return "convert_to((" + expr + ")::text, 'UTF8')"
	}
}

// Type returns the SQL type that a key parameter of the kind has.
func Type(kind blob.Kind) string {
	switch kind {
	case blob.KindBytes:
		return "bytea"
	case blob.KindText:
		return "text"
	case blob.KindUUID:
		return "uuid"
	case blob.KindInt:
		return "bigint"
	default:
		panic("pgdb: key kind not set")
	}
}

// Array returns keys as the parameter of an array of Type(kind). A key that
// isn't one of the kind is an error that names it.
func Array(kind blob.Kind, keys []blob.Key) (any, error) {
	for _, key := range keys {
		if err := kind.Valid(key); err != nil {
			return nil, err
		}
	}
	switch kind {
	case blob.KindBytes:
		return Bytes(keys), nil
	case blob.KindText, blob.KindUUID:
		out := make([]string, len(keys))
		for i, key := range keys {
			out[i] = string(key)
		}
		return out, nil
	case blob.KindInt:
		out := make([]int64, len(keys))
		for i, key := range keys {
			out[i], _ = key.Int() // valid, so it has one
		}
		return out, nil
	default:
		return nil, fmt.Errorf("key kind %d isn't known", kind)
	}
}

// Bytes returns keys as the parameter of a bytea[].
func Bytes(keys []blob.Key) [][]byte {
	out := make([][]byte, len(keys))
	for i, key := range keys {
		out[i] = []byte(key)
	}
	return out
}
