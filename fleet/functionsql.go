package fleet

import (
	"fmt"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// mostKeyLocks is how many keys a transaction's calls of pin for arrays lock one
// by one. A call with more, or after so many, takes the one lock of the pool, so
// that it needs no room in the lock table.
const mostKeyLocks = 500

// maxOwnerLen leaves room for the longest key beside it in an entry of an index.
const maxOwnerLen = 1000

// functions returns everything that FunctionsDDL makes, helpers first.
func functions(schema string, tiers []PinTier, without omit) []function {
	helpers := []function{{
		name: "pin_expired", returns: "trigger", volatility: "v", body: fill(schema, pinExpiredBody),
	}}
	for _, t := range tiers {
		if t.Kind == blob.KindText {
			helpers = append(helpers, function{
				name: "pin_text", args: "key bytea", returns: "text", volatility: "s", caller: true, body: pinTextBody,
			})
			break
		}
	}
	return append(helpers, callable(schema, tiers, without)...)
}

// callable returns the functions that applications call.
func callable(schema string, tiers []PinTier, without omit) []function {
	var look, lookAll strings.Builder
	for _, t := range tiers {
		table, column := t.Table, "t."+pgdb.Ident(t.KeyColumn)
		lock, lockAll := " FOR KEY SHARE", " FOR KEY SHARE OF t"
		if without.BlobRow {
			lock, lockAll = "", ""
		}
		isTable := fmt.Sprintf(isTableSQL, literal(table), literal("pin: "+table+" isn't a table any more, and the agent runs nobody's view: "+
			"put the table back, or change the pool's blobs in the agent's configuration and run gc-agent schema ensure"))
		look.WriteString(isTable)
		fmt.Fprintf(&look, lookSQL, table, column, native(schema, t.Kind, "pin.key"), lock)
		lookAll.WriteString(isTable)
		fmt.Fprintf(&lookAll, lookAllSQL, native(schema, t.Kind, "k"), table, column, lockAll)
	}
	return []function{
		{
			name: "pin", args: "key bytea, owner bytea, ttl interval", returns: "boolean", volatility: "v",
			body: fill(schema, pinBody, "{key lock}", keyLockSQL(schema, "pin.key"), "{look}", look.String()),
		},
		{
			name: "pin", args: "keys bytea[], owner bytea, ttl interval", returns: "boolean[]", volatility: "v",
			body: fill(schema, pinAllBody, "{key lock}", keyLockSQL(schema, "k"), "{look}", lookAll.String()),
		},
		{
			name: "unpin", args: "key bytea, owner bytea", returns: "boolean", volatility: "v", body: fill(schema, unpinBody),
		},
		{
			name: "renew", args: "owner bytea, ttl interval", fallback: "'60 seconds'", returns: "bigint", volatility: "v",
			body: fill(schema, renewBody, "{renewed}", renewedSQL(schema, "h.owner = renew.owner ORDER BY h.key", renewalLock, "lifetime")),
		},
	}
}

// native is SQL for the value that a key, SQL of a bytea, has in a column of the
// kind; NULL where it can be none there.
func native(schema string, kind blob.Kind, key string) string {
	// What isn't plain ASCII has backslashes in this encoding.
	ascii := "pg_catalog.encode(" + key + ", 'escape')"
	switch kind {
	case blob.KindBytes:
		return key
	case blob.KindText:
		return pgdb.Ident(schema, "pin_text") + "(" + key + ")"
	case blob.KindUUID:
		return "CASE WHEN " + ascii + " ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN " + ascii + "::uuid END"
	case blob.KindInt:
		return "CASE WHEN " + ascii + " ~ '^(0|-?[1-9][0-9]{0,18})$' THEN" +
			" CASE WHEN " + ascii + "::numeric BETWEEN -9223372036854775808 AND 9223372036854775807 THEN " + ascii + "::bigint END END"
	default:
		panic("fleet: key kind not set")
	}
}

// fill puts SQL into a body, once: what is put in isn't looked through again.
func fill(schema, body string, pairs ...string) string {
	pairs = append(pairs,
		"{pins}", pgdb.Ident(schema, pinsTable),
		"{now}", pgdb.Now,
		"{pool lock}", fmt.Sprint(poolLock(schema)),
		"{most key locks}", fmt.Sprint(mostKeyLocks),
		"{max key}", fmt.Sprint(blob.MaxKeyLen),
		"{max owner}", fmt.Sprint(maxOwnerLen),
		"{max ttl}", fmt.Sprint(int64(MaxTTL.Seconds())),
	)
	return strings.NewReplacer(pairs...).Replace(body)
}

// The key lock comes first: whoever has it looks at a blob that no sweep is about
// to delete. A key that no pool can have is pinned by nobody, and needs no pin.
const pinBody = `
#variable_conflict use_column
DECLARE
	until bigint;
	there boolean := false;
BEGIN
	IF pin.key IS NULL OR pin.owner IS NULL OR pin.ttl IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'pin: key, owner and ttl must not be NULL';
	END IF;` + checkPinArgs + `
	PERFORM pg_advisory_xact_lock_shared({key lock});
	until := {now} + (extract(epoch FROM pin.ttl) * 1000000)::bigint * 1000;
	IF octet_length(pin.key) <= {max key} THEN
		INSERT INTO {pins} AS p (key, owner, expiry) VALUES (pin.key, pin.owner, until)
		ON CONFLICT (key, owner) DO UPDATE SET expiry = greatest(p.expiry, excluded.expiry);
	END IF;
{look}	RETURN there;
END
`

// isTableSQL comes before a look. A view under the table's name would run functions of
// its owner's with the rights of the agent.
const isTableSQL = `	IF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = %s::regclass AND c.relkind IN ('r', 'p')) THEN
		RAISE EXCEPTION USING ERRCODE = '42809', MESSAGE = %s;
	END IF;
`

// lookSQL keeps the row from being deleted, by whomever, until the transaction
// ends.
const lookSQL = `	PERFORM FROM %s AS t WHERE %s = %s%s;
	there := there OR FOUND;
`

// pinAllBody does for each distinct key, in key order, what pinBody does for one.
// The number of locks is remembered in a setting, which ends with the transaction
// and rolls back with a savepoint, as they do.
const pinAllBody = `
#variable_conflict use_column
DECLARE
	sorted bytea[];
	locks bigint;
	until bigint;
	there bytea[] := '{}';
BEGIN
	IF pin.keys IS NULL OR pin.owner IS NULL OR pin.ttl IS NULL
		OR EXISTS (SELECT FROM unnest(pin.keys) AS k WHERE k IS NULL) THEN
		RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'pin: keys, each of them, owner and ttl must not be NULL';
	END IF;` + checkPinArgs + `
	sorted := ARRAY(SELECT DISTINCT k FROM unnest(pin.keys) AS k ORDER BY k);
	locks := coalesce(nullif(current_setting('gc_agent.key_locks', true), ''), '0')::bigint + cardinality(sorted);
	IF locks > {most key locks} THEN
		PERFORM pg_advisory_xact_lock_shared({pool lock});
	ELSE
		PERFORM set_config('gc_agent.key_locks', locks::text, true);
		PERFORM pg_advisory_xact_lock_shared({key lock}) FROM unnest(sorted) AS k;
	END IF;
	until := {now} + (extract(epoch FROM pin.ttl) * 1000000)::bigint * 1000;
	INSERT INTO {pins} AS p (key, owner, expiry)
	SELECT k, pin.owner, until FROM unnest(sorted) AS k WHERE octet_length(k) <= {max key}
	ON CONFLICT (key, owner) DO UPDATE SET expiry = greatest(p.expiry, excluded.expiry);
{look}	RETURN ARRAY(
		SELECT f.k IS NOT NULL
		FROM unnest(pin.keys) WITH ORDINALITY AS u (k, ord)
		LEFT JOIN (SELECT DISTINCT k FROM unnest(there) AS k) f ON f.k = u.k
		ORDER BY u.ord);
END
`

const lookAllSQL = `	there := there || ARRAY(
		SELECT w.k FROM (SELECT k, %s AS native FROM unnest(sorted) AS k) w
		JOIN %s AS t ON %s = w.native ORDER BY w.k%s);
`

// A time to live below a microsecond can't be written, and one without end would
// be a pin that nobody takes back.
const checkPinArgs = `
	IF octet_length(pin.owner) > {max owner} THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'pin: owner is longer than {max owner} bytes';
	END IF;
	IF extract(epoch FROM pin.ttl) NOT BETWEEN 0.000001 AND {max ttl} THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'pin: ttl must be above 0 and at most {max ttl} seconds';
	END IF;`

const unpinBody = `
#variable_conflict use_column
BEGIN
	IF unpin.key IS NULL OR unpin.owner IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'unpin: key and owner must not be NULL';
	END IF;
	DELETE FROM {pins} AS p WHERE p.key = unpin.key AND p.owner = unpin.owner;
	RETURN FOUND;
END
`

const renewBody = `
#variable_conflict use_column
DECLARE
	lifetime bigint;
	n bigint;
BEGIN
	IF renew.owner IS NULL OR renew.ttl IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'renew: owner and ttl must not be NULL';
	END IF;
	IF extract(epoch FROM renew.ttl) NOT BETWEEN 0.000001 AND {max ttl} THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'renew: ttl must be above 0 and at most {max ttl} seconds';
	END IF;
	lifetime := (extract(epoch FROM renew.ttl) * 1000000)::bigint * 1000;
	{renewed}
	SELECT count(*) INTO n FROM renewed;
	RETURN n;
END
`

// Whoever commits a pin was told that it protects. The row may have been written
// again, or removed, later in the same transaction.
const pinExpiredBody = `
BEGIN
	IF NEW.expiry <= {now} THEN
		PERFORM FROM {pins} AS p WHERE p.key = NEW.key AND p.owner = NEW.owner AND p.expiry <= {now};
		IF FOUND THEN
			RAISE EXCEPTION USING ERRCODE = '40001',
				MESSAGE = 'a pin has expired before its transaction committed',
				DETAIL = 'The key is ' || left(NEW.key::text, 100) || '.',
				HINT = 'Retry the transaction, or pin for longer.';
		END IF;
	END IF;
	RETURN NULL;
END
`

const pinTextBody = `
BEGIN
	RETURN pg_catalog.convert_from(key, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
	RETURN NULL;
END
`
