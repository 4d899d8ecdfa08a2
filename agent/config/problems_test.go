package config

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// problemCases has one file for each kind of mistake, and what is said about it.
var problemCases = []struct {
	name string
	text string
	want []string
}{
	{"empty file", "", []string{
		`is empty: it needs databases and pools`,
	}},
	{"pins", base("pins: {ttl: 500ms, owners: [{name: a}, {alive: {}}, {name: a, alive: {always: false}}, {name: b, alive: {http: x, unix: y}}, {name: c, alive: {http: \"ftp://h\"}}, {name: d, alive: {unix: /" + strings.Repeat("s", 107) + "}}]}"), []string{
		`8: pools[0].pins.ttl: want whole seconds, from 1s to 24h`,
		`8: pools[0].pins.owners[0].alive: is missing: say how to find out whether the owner is alive: {http: URL}, {unix: SOCKET}, {pid_file: FILE} or {always: true}`,
		`8: pools[0].pins.owners[1].name: is missing: every owner has one, as applications give it to pin`,
		`8: pools[0].pins.owners[1].alive: has 0 of http, unix, pid_file and always: want one`,
		`8: pools[0].pins.owners[2].alive.always: want true, or another way to find out`,
		`8: pools[0].pins.owners[2]: has the name of pools[0].pins.owners[0] as well: list each owner once`,
		`8: pools[0].pins.owners[3].alive: has 2 of http, unix, pid_file and always: want one`,
		`8: pools[0].pins.owners[3].alive.http: want the URL of a host, http://… or https://…`,
		`8: pools[0].pins.owners[4].alive.http: want the URL of a host, http://… or https://…`,
		`8: pools[0].pins.owners[5].alive.unix: is longer than the 107 bytes that the path of a socket may have`,
	}},
	{"long owner", base("pins: {ttl: 25h, owners: [{name: " + strings.Repeat("o", 1001) + ", alive: {pid_file: p}}]}"), []string{
		`8: pools[0].pins.ttl: want whole seconds, from 1s to 24h`,
		`8: pools[0].pins.owners[0].name: is longer than 1000 bytes`,
	}},
	{"only comments", "# nothing\n", []string{
		`is empty: it needs databases and pools`,
	}},
	{"null document", "---\n", []string{
		`is empty: it needs databases and pools`,
	}},
	{"a string", "databases", []string{
		`1: want databases and pools, got a string`,
	}},
	{"a list", "- a\n", []string{
		`1: want databases and pools, got a list`,
	}},
	{"syntax", "databases:\n  app: {url: x\npools: []\n", []string{
		`2: isn't YAML: did not find expected ',' or '}'`,
	}},
	{"tab", "databases:\n\tapp: 1\n", []string{
		`2: isn't YAML: found character that cannot start any token`,
	}},
	{"several documents", base() + "---\n" + base(), []string{
		`8: a second document (---) begins here: keep one`,
	}},
	{"second document broken", base() + "---\n{", []string{
		`9: isn't YAML: did not find expected node content`,
	}},
	{"unknown anchor", base("schema: *x"), []string{
		`isn't YAML: an alias (*name) has no anchor (&name): quote a value that begins with *`,
	}},
	{"not UTF-8", base("schema: \"\xff\""), []string{
		`isn't UTF-8: save it as UTF-8`,
	}},
	{"UTF-16", "\xff\xfed\x00", []string{
		`isn't UTF-8: save it as UTF-8`,
	}},
	{"too long", base("# " + strings.Repeat("x", maxFile)), []string{
		`is longer than 1 MiB, which no configuration should be`,
	}},
	{"control character", base("schema: \"\x01\""), []string{
		`isn't YAML: control characters are not allowed`,
	}},
	{"nothing required is there", "log: {}\n", []string{
		`1: databases: is missing: name at least one: app: {url: …}`,
		`1: pools: is missing: name at least one store to collect`,
	}},
	{"null everywhere", "databases:\npools: ~\nlog:\n", []string{
		`1: databases: has no value: want names of databases, each with its url`,
		`2: pools: has no value: want a list of pools (- name: …)`,
		`3: log: has no value: want a mapping with level and format, or remove it`,
	}},
	{"empty lists", "databases: {}\npools: []\n", []string{
		`2: pools: is an empty list: name at least one store to collect`,
	}},
	{"wrong kinds", "databases: [a]\npools: {a: 1}\nlog: json\nmax_concurrent_sweeps: [1]\n", []string{
		`1: databases: want names of databases, each with its url, got a list`,
		`2: pools: want a list of pools (- name: …), got a mapping`,
		`3: log: want a mapping with level and format, got a string`,
		`4: max_concurrent_sweeps: want a whole number, got a list`,
	}},
	{"pool isn't a mapping", strings.Split(base(), "  - name")[0] + "  - p\n", []string{
		`5: pools[0]: want a mapping of a pool's fields, got a string`,
	}},
	{"unknown field, near", base("scheme: x"), []string{
		`8: pools[0].scheme: unknown field "scheme": did you mean "schema"?`,
	}},
	{"fleet on SQLite", "databases: {a: {url: 'sqlite:a.db'}}\npools:\n- {name: p, database: a, fleet: true, blobs: [{type: table, table: t, column: c}]}\n", []string{
		`3: pools[0].fleet: a fleet on SQLite isn't possible, where pins would be rows that every writer waits for: remove the field`,
	}},
	{"unknown field, far", base("replicas: true"), []string{
		`8: pools[0].replicas: unknown field "replicas": known here are name, database, blobs, liveness, schema, fleet, mode, schedule, window, pins, brakes, limits, protect`,
	}},
	{"unknown fields everywhere", base("limits: {bach: 1}", "brakes: {max: 1}", "protect: {http: 'http://h', https: x}", "liveness: [{name: s, table: t, column: c, match: x}]") + "admin: {}\nadmins: {}\nlog: {lvl: x}\n", []string{
		`8: pools[0].limits.bach: unknown field "bach": did you mean "batch"?`,
		`9: pools[0].brakes.max: unknown field "max": known here are max_dead_ratio, min_dead_keys, max_dead_count, off`,
		`10: pools[0].protect.https: unknown field "https": did you mean "http"?`,
		`11: pools[0].liveness[0].match: unknown field "match": known here are name, database, table, column, where, query, format, guard, allow_empty, on_unparseable`,
		`12: admin.socket: is missing: give the path of the control socket, or remove admin`,
		`13: admins: unknown field "admins": did you mean "admin"?`,
		`14: log.lvl: unknown field "lvl": did you mean "level"?`,
	}},
	{"unknown field of a later part, in the example's words", base("follow: {mode: stream}", "normalize: nfc") + "state: x\n", []string{
		`8: pools[0].follow: unknown field "follow": known here are name, database, blobs, liveness, schema, fleet, mode, schedule, window, pins, brakes, limits, protect`,
		`9: pools[0].normalize: unknown field "normalize": known here are name, database, blobs, liveness, schema, fleet, mode, schedule, window, pins, brakes, limits, protect`,
		`10: state: unknown field "state": known here are databases, pools, max_concurrent_sweeps, admin, log`,
	}},
	{"field twice", base("mode: observe", "mode: enforce"), []string{
		`9: pools[0].mode: is given twice, first on line 8: remove one`,
	}},
	{"pool field twice under another", base("database: lite"), []string{
		`8: pools[0].database: is given twice, first on line 6: remove one`,
	}},
	{"database twice", "databases:\n  a: {url: 'sqlite:/a'}\n  a: {url: 'sqlite:/b'}\npools: [{name: p, database: a, blobs: [{type: table, table: t, column: c}]}]\n", []string{
		`3: databases.a: is given twice, first on line 2: remove one`,
	}},
	{"merge key", base("<<: {mode: enforce}"), []string{
		`8: pools[0].<<: merge keys (<<) aren't supported: write the fields out`,
	}},
	{"key that isn't a name", base("? [a, b]", ": c", "1: x", "'a b': x"), []string{
		`5: pools[0]: unknown field, not shown as it may be part of a value: put a space after the colon of a field, and quotes around a value that has a comma, a colon, a brace or a #`,
		`5: pools[0]: unknown field, not shown as it may be part of a value: put a space after the colon of a field, and quotes around a value that has a comma, a colon, a brace or a #`,
		`8: pools[0].?: want a name before the colon, got something else`,
	}},
	{"tags", base("schema: !mine x", "limits: !mine {batch: 1}", "mode: !!binary b2JzZXJ2ZQ=="), []string{
		`8: pools[0].schema: want a string, got a value with a tag (!) of its own`,
		`9: pools[0].limits: want a mapping of limits, got a value with a tag (!) of its own`,
		`10: pools[0].mode: want a string, got a value with a tag (!) of its own`,
	}},
	{"a string that isn't one", base("schema: 12", "mode: true", "schedule: 2026-01-01"), []string{
		`8: pools[0].schema: want a string, got a number: put it in quotes`,
		`9: pools[0].mode: want a string, got true or false: put it in quotes`,
		`10: pools[0].schedule: want a schedule in quotes, got a date: put it in quotes`,
	}},
	{"number in quotes", base(`limits: {batch: "1"}`, `brakes: {max_dead_ratio: "0.5"}`), []string{
		`8: pools[0].limits.batch: want a whole number, got a string: write it without quotes`,
		`9: pools[0].brakes.max_dead_ratio: want a number, got a string: write it without quotes`,
	}},
	{"empty strings", base(`schema: ""`, `schedule: " "`), []string{
		`8: pools[0].schema: is empty: want a string, or remove it`,
		`9: pools[0].schedule: is empty: want a schedule in quotes, or remove it`,
	}},
	{"unset variables", base("schema: ${NOPE}", "window: ${NOPE}${NEITHER}", "limits: {batch: '${'}"), []string{
		`8: pools[0].schema: variable NOPE is not set: set it in the agent's environment, or write $${NOPE} where a dollar is meant`,
		`9: pools[0].window: variable NOPE is not set: set it in the agent's environment, or write $${NOPE} where a dollar is meant`,
		`9: pools[0].window: variable NEITHER is not set: set it in the agent's environment, or write $${NEITHER} where a dollar is meant`,
		`10: pools[0].limits.batch: ${ isn't followed by the name of a variable (letters, digits, _) and }: correct it, or write $${ where a dollar is meant`,
	}},
	{"wrong once expanded", base("schema: ${WORD}", "window: ${WORD}", "schedule: ${WORD}", "mode: ${WORD}", "limits: {batch: '${WORD}', batch_bytes: '${WORD}'}",
		"brakes: {max_dead_ratio: '${WORD}', off: ['${WORD}']}", "liveness: [{name: '-${WORD}', database: '${WORD}', table: 'a.${WORD}.b', column: c, format: '{${WORD}}', allow_empty: '${WORD}'}]"), []string{
		`8: pools[0].schema: "${WORD}" (expanded) isn't the name of a schema: want at most 63 lower-case letters, digits and _, not beginning with a digit`,
		`9: pools[0].window: "${WORD}" (expanded): want a number and a unit, such as 7d, 1d12h, 90m, 100ms`,
		`10: pools[0].schedule: "${WORD}" (expanded) isn't a schedule (want five fields, such as "*/15 * * * *", or @every 10m, or CRON_TZ=Europe/Berlin and five fields)`,
		`11: pools[0].mode: "${WORD}" (expanded) isn't known: want observe or enforce`,
		`12: pools[0].limits.batch: "${WORD}" (expanded) isn't a whole number of at most 64 bits, such as 1000`,
		`12: pools[0].limits.batch_bytes: "${WORD}" (expanded): want a whole number of bytes, or one with kB, MB, GB, KiB, MiB, GiB or TiB`,
		`13: pools[0].brakes.max_dead_ratio: "${WORD}" (expanded) isn't a number over 0 and at most 1, such as 0.5`,
		`13: pools[0].brakes.off[0]: "${WORD}" (expanded) isn't known: want max_dead_ratio, max_dead_count or empty_source`,
		`14: pools[0].liveness[0].name: "-${WORD}" (expanded) isn't a name: want at most 63 letters, digits, dots, _ and -`,
		`14: pools[0].liveness[0].database: "${WORD}" (expanded) isn't one of the databases of this file: app, lite`,
		`14: pools[0].liveness[0].table: "a.${WORD}.b" (expanded): too many dots: want schema.table`,
		`14: pools[0].liveness[0].format: "{${WORD}}" (expanded) isn't a format`,
		`14: pools[0].liveness[0].allow_empty: "${WORD}" (expanded) is neither true nor false`,
	}},
	{"variable that isn't UTF-8", base("schema: ${LATIN1}"), []string{
		`8: pools[0].schema: isn't UTF-8 without NUL`,
	}},

	{"database names", "databases: {App: {url: 'sqlite:/a'}, 'a b': {url: 'sqlite:/b'}}\npools: [{name: p, database: App, blobs: [{type: table, table: t, column: c}]}]\n", []string{
		`1: databases.App: what stands before the colon isn't a name: want a lower-case letter, then at most 62 lower-case letters, digits, _ and -`,
		`1: databases.?: what stands before the colon isn't a name: want a lower-case letter, then at most 62 lower-case letters, digits, _ and -`,
	}},
	{"database without url", "databases: {a: {}, b: {url: 'sqlite:/a', url_file: /b}}\npools: []\n", []string{
		`1: databases.a: has neither url nor url_file: give one of them`,
		`1: databases.b: has both url and url_file: keep one`,
		`1: databases.b.url_file: the file can't be read: it doesn't exist`,
		`2: pools: is an empty list: name at least one store to collect`,
	}},
	{"database is a string", "databases: {a: 'sqlite:/a'}\npools: []\n", []string{
		`1: databases.a: want a mapping with url or url_file, got a string`,
		`2: pools: is an empty list: name at least one store to collect`,
	}},
	{"sqlite paths", "databases:\n  a: {url: 'sqlite:'}\n  b: {url: 'sqlite::memory:'}\n  c: {url: 'sqlite:///a'}\n  d: {url: 'sqlite:file:a?mode=memory'}\n  e: {url: 'sqlite:a?x=y'}\n  f: {url: 'sqlite:file:a'}\npools: []\n", []string{
		`2: databases.a.url: want sqlite:PATH with a plain path, such as sqlite:/var/lib/app/app.db: no //, no file:, no ? and parameters`,
		`3: databases.b.url: an SQLite database in memory belongs to one process, and its blobs aren't the agent's: want sqlite:PATH`,
		`4: databases.c.url: want sqlite:PATH with a plain path, such as sqlite:/var/lib/app/app.db: no //, no file:, no ? and parameters`,
		`5: databases.d.url: an SQLite database in memory belongs to one process, and its blobs aren't the agent's: want sqlite:PATH`,
		`6: databases.e.url: want sqlite:PATH with a plain path, such as sqlite:/var/lib/app/app.db: no //, no file:, no ? and parameters`,
		`7: databases.f.url: want sqlite:PATH with a plain path, such as sqlite:/var/lib/app/app.db: no //, no file:, no ? and parameters`,
		`8: pools: is an empty list: name at least one store to collect`,
	}},
	{"postgres urls", "databases:\n  a: {url: 'mysql://a'}\n  b: {url: 'postgres://u:p#w@h/a'}\n  c: {url: 'postgres://h/a?sslmode=maybe'}\n  d: {url: 'host=h'}\npools: []\n", []string{
		`2: databases.a.url: unknown kind of URL: want postgres://…, postgresql://… or sqlite:PATH`,
		`3: databases.b.url: isn't a well-formed URL: characters such as @ : / ? # % and spaces in a password are written as %40 %3A %2F %3F %23 %25 %20`,
		`4: databases.c.url: isn't a URL that Postgres takes: check the host, the port, and parameters such as sslmode, sslrootcert and connect_timeout`,
		`5: databases.d.url: unknown kind of URL: want postgres://…, postgresql://… or sqlite:PATH`,
		`6: pools: is an empty list: name at least one store to collect`,
	}},
	{"postgres urls with two readings", "databases:\n  a: {url: 'postgres://u:p@w@h/a'}\n  b: {url: 'postgres://u:12/w@h/a'}\n  c: {url: 'postgres://u:12?w@h/a'}\n  d: {url: 'postgres://u:12#w@h/a'}\n  e: {url: 'postgres://u:p%40w@h/a#b'}\npools: []\n", []string{
		`2: databases.a.url: has more than one @: escape the one in a user or a password as %40`,
		`3: databases.b.url: isn't a well-formed URL: characters such as @ : / ? # % and spaces in a password are written as %40 %3A %2F %3F %23 %25 %20`,
		`4: databases.c.url: isn't a well-formed URL: characters such as @ : / ? # % and spaces in a password are written as %40 %3A %2F %3F %23 %25 %20`,
		`5: databases.d.url: isn't a well-formed URL: characters such as @ : / ? # % and spaces in a password are written as %40 %3A %2F %3F %23 %25 %20`,
		`6: databases.e.url: isn't a well-formed URL: characters such as @ : / ? # % and spaces in a password are written as %40 %3A %2F %3F %23 %25 %20`,
		`7: pools: is an empty list: name at least one store to collect`,
	}},
	{"url files", "databases: \n  a: {url_file: /missing}\n  b: {url_file: /empty}\n  c: {url_file: /two-lines}\n  d: {url_file: /mysql}\n  e: {url_file: /variable}\npools: []\n", []string{
		`2: databases.a.url_file: the file can't be read: it doesn't exist`,
		`3: databases.b.url_file: the file is empty: it holds the database's URL and nothing else`,
		`4: databases.c.url_file: the file isn't one line of UTF-8: it holds the database's URL and nothing else`,
		`5: databases.d.url_file: unknown kind of URL: want postgres://…, postgresql://… or sqlite:PATH`,
		`6: databases.e.url_file: unknown kind of URL: want postgres://…, postgresql://… or sqlite:PATH`,
		`7: pools: is an empty list: name at least one store to collect`,
	}},

	{"pool name", strings.Replace(base(), "name: p", "name: Images", 1), []string{
		`5: pools[0].name: "Images" isn't a name: want a lower-case letter, then at most 62 lower-case letters, digits, _ and -`,
	}},
	{"pool without tiers", "databases: {a: {url: 'sqlite:/a'}}\npools:\n- {name: p, database: a, blobs: []}\n", []string{
		`3: pools[0].blobs: is an empty list: a pool has at least one tier`,
	}},
	{"pool without anything", strings.Split(base(), "  - name")[0] + "  - {}\n", []string{
		`5: pools[0].name: is missing: every pool has one`,
		`5: pools[0].blobs: is missing: say where the blobs are: a list of tiers, such as {type: table, …}`,
	}},
	{"pool names twice", base() + pool("p", "app", "other", "schema: b"), []string{
		`8: pools[1].name: is the name of pools[0] as well: give each pool its own`,
	}},
	{"no database", "databases: {a: {url: 'sqlite:/a'}}\npools:\n- {name: p, window: 1h, blobs: [{type: table, table: t, column: c}], liveness: [{name: s, table: t, column: c}]}\n", []string{
		`3: pools[0].blobs[0].database: is missing: name a database here, or one for the pool`,
		`3: pools[0].liveness[0].database: is missing: name a database here, or one for the pool`,
	}},
	{"unknown database", "databases: {a: {url: 'sqlite:/a'}}\npools:\n- {name: p, database: a, blobs: [{type: table, database: b, table: t, column: c}], liveness: [{name: s, database: d, table: t, column: c}]}\n", []string{
		`3: pools[0].blobs[0].database: "b" isn't one of the databases of this file: a`,
		`3: pools[0].liveness[0].database: "d" isn't one of the databases of this file: a`,
	}},
	{"unknown database of the pool", "databases: {a: {url: 'sqlite:/a'}}\npools:\n- {name: p, database: b, window: 2h, blobs: [{type: table, table: t, column: c}], liveness: [{name: s, table: u, column: d}]}\n- {name: q, database: c, window: 2h, blobs: [{type: s3}]}\n", []string{
		`3: pools[0].database: "b" isn't one of the databases of this file: a`,
		`4: pools[1].database: "c" isn't one of the databases of this file: a`,
		`4: pools[1].blobs[0].type: unknown type "s3": want table`,
	}},
	{"inline window", "databases: {a: {url: 'sqlite:/a'}}\npools:\n- {name: p, window: 61m, blobs: [{type: s3, bucket: b}]}\n", []string{
		`3: pools[0].blobs[0].type: unknown type "s3": want table`,
		`3: pools[0].window: a window of over an hour needs a database to live in: name one for the pool, or want at most 1h`,
	}},
	{"schema", base("schema: pg_mine") + pool("q", "app", "t", "schema: information_schema") + pool("r", "app", "u", "schema: 1x") + pool("s", "lite", "v", "schema: x"), []string{
		`8: pools[0].schema: the schema belongs to Postgres itself: choose one that the agent has to itself, such as gc_agent`,
		`12: pools[1].schema: the schema belongs to Postgres itself: choose one that the agent has to itself, such as gc_agent`,
		`16: pools[2].schema: "1x" isn't the name of a schema: want at most 63 lower-case letters, digits and _, not beginning with a digit`,
		`20: pools[3].schema: SQLite has no schemas, the window is the table gc_window of the file: remove the field`,
	}},
	{"mode", base("mode: delete"), []string{
		`8: pools[0].mode: "delete" isn't known: want observe or enforce`,
	}},
	{"schedules", base(`schedule: "* * * *"`) + pool("q", "lite", "t", `schedule: "CRON_TZ=UTC"`) + pool("r", "app", "t", "schema: r", `schedule: "0 0 30 2 *"`) +
		pool("s", "app", "u", "schema: s", `schedule: "CRON_TZ=UTC @every -5m"`) + pool("t", "app", "v", "schema: t", `schedule: "CRON_TZ=Nowhere/Else 0 3 * * *"`), []string{
		`8: pools[0].schedule: "* * * *" isn't a schedule (want five fields, such as "*/15 * * * *", or @every 10m, or CRON_TZ=Europe/Berlin and five fields): expected exactly 5 fields, found 4: [* * * *]`,
		`12: pools[1].schedule: "CRON_TZ=UTC" isn't a schedule (want five fields, such as "*/15 * * * *", or @every 10m, or CRON_TZ=Europe/Berlin and five fields): a space and five fields belong after the zone`,
		`17: pools[2].schedule: "0 0 30 2 *" isn't a schedule (want five fields, such as "*/15 * * * *", or @every 10m, or CRON_TZ=Europe/Berlin and five fields): no such day comes within five years`,
		`22: pools[3].schedule: "CRON_TZ=UTC @every -5m" isn't a schedule (want five fields, such as "*/15 * * * *", or @every 10m, or CRON_TZ=Europe/Berlin and five fields): it can't be more often than every second`,
		`27: pools[4].schedule: "CRON_TZ=Nowhere/Else 0 3 * * *" isn't a schedule (want five fields, such as "*/15 * * * *", or @every 10m, or CRON_TZ=Europe/Berlin and five fields): provided bad location Nowhere/Else: unknown time zone Nowhere/Else`,
	}},
	{"windows", base("window: 7") + pool("q", "app", "t", "schema: q", "window: -1d") + pool("r", "app", "u", "schema: r", "window: 300000d") + pool("s", "app", "v", "schema: s", "window: 100000d") + pool("t", "app", "w", "schema: t", "window: [7d]"), []string{
		`8: pools[0].window: "7": a duration needs a unit: write 7d, 12h, 30s, 100ms`,
		`13: pools[1].window: "-1d": a duration can't be negative`,
		`18: pools[2].window: "300000d": longer than a duration can be (about 292 years)`,
		`23: pools[3].window: the window ends later than the agent can write down (the year 2262): want a shorter one`,
		`28: pools[4].window: want a duration such as 7d, 12h or 100ms, got a list`,
	}},
	{"tiers", "databases: {a: {url: 'sqlite:/a'}}\npools:\n- name: p\n  database: a\n  blobs:\n  - {}\n  - {type: s3, bucket: x}\n  - {type: table}\n  - {type: table, table: main.t, column: a.b, size: 'x\"'}\n  - {type: table, table: u, column: id, size: ID, path: x}\n  - table\n", []string{
		`6: pools[0].blobs[0].type: is missing: want table`,
		`7: pools[0].blobs[1].type: unknown type "s3": want table`,
		`8: pools[0].blobs[2].table: is missing: the table that holds one blob a row`,
		`8: pools[0].blobs[2].column: is missing: the column that holds the key`,
		`9: pools[0].blobs[3].table: "main.t": an SQLite table has no schema: want its bare name`,
		`9: pools[0].blobs[3].column: "a.b": want the name of a column alone, in double quotes where it holds a dot`,
		`9: pools[0].blobs[3].size: "x\"": want a name, in double quotes where it holds a dot or a quote: public.blobs, "odd.name"`,
		`10: pools[0].blobs[4].size: is the column of the key: name the one that holds the size, or remove the field`,
		`10: pools[0].blobs[4].path: unknown field "path": known here are type, database, table, column, size`,
		`11: pools[0].blobs[5]: want a mapping of a tier's fields, got a string`,
	}},
	{"identifiers too long", base("liveness: [{name: s, table: t, column: " + strings.Repeat("c", 64) + "}]"), []string{
		`8: pools[0].liveness[0].column: "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc": a name of 64 bytes: Postgres has at most 63`,
	}},
	{"sources", base("liveness:", "- {}", "- {name: a b, table: t, column: c}", "- {name: s, table: t}", "- {name: s, query: SELECT 1, table: t, column: c}",
		"- {name: u, query: SELECT 1, column: c, where: 'true'}", "- {name: v, column: c, where: 'x;'}", "- {name: w, query: 'SELECT 1 ; '}"), []string{
		`9: pools[0].liveness[0].name: is missing: every source has one`,
		`9: pools[0].liveness[0]: has neither table nor query: give table and column, or a query that returns one column`,
		`10: pools[0].liveness[1].name: "a b" isn't a name: want at most 63 letters, digits, dots, _ and -`,
		`11: pools[0].liveness[2].column: is missing: name the column of the table that refers to blobs`,
		`12: pools[0].liveness[3]: has both table and query: keep one`,
		`12: pools[0].liveness[3].name: is the name of pools[0].liveness[2] as well: give each source of a pool its own`,
		`13: pools[0].liveness[4].column: goes with table, not with query: put it into the query`,
		`13: pools[0].liveness[4].where: goes with table, not with query: put it into the query`,
		`14: pools[0].liveness[5].where: ends in a semicolon: remove it, the SQL becomes part of a statement`,
		`14: pools[0].liveness[5]: has neither table nor query: give table and column, or a query that returns one column`,
		`15: pools[0].liveness[6].query: ends in a semicolon: remove it, the SQL becomes part of a statement`,
	}},
	{"formats of several parts", base("liveness:", "- {name: s, table: t, column: c, format: '{hex[0:2]}/{hex}'}", "- {name: u, table: t, column: d, format: '{*}/{hex}'}"), []string{
		`9: pools[0].liveness[0].format: "{hex[0:2]}/{hex}" has several placeholders, slices or {*}: a source takes one placeholder and text around it`,
		`10: pools[0].liveness[1].format: "{*}/{hex}" has several placeholders, slices or {*}: a source takes one placeholder and text around it`,
	}},
	{"source options", base("liveness:", "- {name: s, table: t, column: c, format: '{hax}', guard: triger, allow_empty: yes, on_unparseable: skip}"), []string{
		`9: pools[0].liveness[0].format: "{hax}" isn't a format: unknown placeholder {hax} at position 1: it can be {bytes}, {text}, {int}, {uuid}, {hex}, {HEX}, {base64} or {*}`,
		`9: pools[0].liveness[0].guard: "triger" isn't known: want auto, foreign_key, trigger, table_lock, settle or serial`,
		`9: pools[0].liveness[0].allow_empty: want true or false, got a string`,
		`9: pools[0].liveness[0].on_unparseable: "skip" isn't known: want abort or ignore`,
	}},
	{"guards", base("liveness:", "- {name: a, table: t, column: c, guard: serial}", "- {name: b, database: lite, table: t, column: c, guard: settle}", "- {name: c, database: lite, table: t, column: c, guard: foreign_key}",
		"- {name: d, database: lite, table: t, column: c, guard: serial}"), []string{
		`9: pools[0].liveness[0].guard: serial is a guard of SQLite's: want auto, foreign_key, trigger, table_lock or settle`,
		`11: pools[0].liveness[2].guard: foreign_key is a guard of Postgres's: want auto, serial or, where the blobs are in another database, settle`,
		`12: pools[0].liveness[3].guard: serial holds within one file, and the blobs are in another database: want settle`,
	}},
	{"settle in the blobs' own file", "databases: {a: {url: 'sqlite:a.db'}}\npools:\n- {name: p, database: a, blobs: [{type: table, table: t, column: c}], liveness: [{name: s, table: u, column: c, guard: settle}]}\n", []string{
		`3: pools[0].liveness[0].guard: on SQLite settle is for a source in another database than the blobs: want auto or serial`,
	}},
	{"guards of Postgres's", base("liveness:", "- {name: a, database: lite, table: t, column: c, guard: trigger}", "- {name: b, database: lite, table: t, column: c, guard: table_lock}"), []string{
		`9: pools[0].liveness[0].guard: trigger is a guard of Postgres's: want auto, serial or, where the blobs are in another database, settle`,
		`10: pools[0].liveness[1].guard: table_lock is a guard of Postgres's: want auto, serial or, where the blobs are in another database, settle`,
	}},
	{"trigger and lock across", "databases: {a: {url: 'postgres://h/a'}, b: {url: 'postgres://h/b'}}\npools:\n- {name: p, database: a, blobs: [{type: table, table: t, column: c}], liveness: [{name: s, database: b, table: t, column: c, guard: trigger}, {name: u, database: b, table: t, column: c, guard: table_lock}]}\n", []string{
		`3: pools[0].liveness[0].guard: a trigger can't look for a blob in another database, and the blobs are in one: want settle`,
		`3: pools[0].liveness[1].guard: a lock in another database isn't held by the transaction that deletes, and the blobs are in one: want settle`,
	}},
	{"foreign key across", "databases: {a: {url: 'postgres://h/a'}, b: {url: 'postgres://h/b'}}\npools:\n- {name: p, database: a, blobs: [{type: table, table: t, column: c}], liveness: [{name: s, database: b, table: t, column: c, guard: foreign_key}]}\n", []string{
		`3: pools[0].liveness[0].guard: a foreign key can't lead into another database, and the blobs are in one: want settle`,
	}},
	{"brakes", base("brakes:", "  max_dead_ratio: 0", "  min_dead_keys: -1", "  max_dead_count: 1.5", "  off: [source_shrunk, empty_source]"), []string{
		`9: pools[0].brakes.max_dead_ratio: "0" isn't a number over 0 and at most 1, such as 0.5`,
		`10: pools[0].brakes.min_dead_keys: "-1" is out of range: want at least 0`,
		`11: pools[0].brakes.max_dead_count: "1.5" isn't a whole number of at most 64 bits, such as 1000`,
		`12: pools[0].brakes.off[0]: "source_shrunk" isn't known: want max_dead_ratio, max_dead_count or empty_source`,
	}},
	{"ratios", base("brakes: {max_dead_ratio: 1.01}") + pool("q", "app", "t", "schema: q", "brakes: {max_dead_ratio: .nan}") + pool("r", "app", "u", "schema: r", "brakes: {max_dead_ratio: half}"), []string{
		`8: pools[0].brakes.max_dead_ratio: "1.01" isn't a number over 0 and at most 1, such as 0.5`,
		`13: pools[1].brakes.max_dead_ratio: ".nan" isn't a number over 0 and at most 1, such as 0.5`,
		`18: pools[2].brakes.max_dead_ratio: want a number, got a string`,
	}},
	{"limits", base("limits:", "  batch: 20001", "  batch_bytes: 0", "  page: 010", "  lock_timeout: 0", "  settle_timeout: 1500us", "  statement_timeout: 2h"), []string{
		`9: pools[0].limits.batch: "20001" is out of range: want 1 to 20000`,
		`10: pools[0].limits.batch_bytes: want at least one byte`,
		`11: pools[0].limits.page: "010" isn't a whole number of at most 64 bits, such as 1000`,
		`12: pools[0].limits.lock_timeout: want whole milliseconds, from 1ms to 1h`,
		`13: pools[0].limits.settle_timeout: want whole milliseconds, from 1ms to 1h`,
		`14: pools[0].limits.statement_timeout: want whole milliseconds, from 1ms to 1h`,
	}},
	{"sizes", base("limits: {batch_bytes: 1.5GiB}") + pool("q", "app", "t", "schema: q", "limits: {batch_bytes: 9000000TiB}"), []string{
		`8: pools[0].limits.batch_bytes: "1.5GiB": want a whole number of bytes, or one with kB, MB, GB, KiB, MiB, GiB or TiB`,
		`13: pools[1].limits.batch_bytes: "9000000TiB": larger than a size can be (8 EiB)`,
	}},
	{"protect", base("protect: {}") + pool("q", "app", "t", "schema: q", "protect: {http: ftp://h}") + pool("r", "app", "u", "schema: r", "protect: {http: 'http:///x'}") + pool("s", "app", "v", "schema: s", "protect: {http: 'http://h:x'}"), []string{
		`8: pools[0].protect.http: is missing: give the URL to ask, or remove protect`,
		`13: pools[1].protect.http: want the URL of a host, http://… or https://…`,
		`18: pools[2].protect.http: want the URL of a host, http://… or https://…`,
		`23: pools[3].protect.http: isn't a well-formed URL: characters such as @ : / ? # % and spaces in a password are written as %40 %3A %2F %3F %23 %25 %20`,
	}},
	{"top level", base() + "max_concurrent_sweeps: 0\nlog: {level: trace, format: text}\n", []string{
		`8: max_concurrent_sweeps: "0" is out of range: want 1 to 256`,
		`9: log.level: "trace" isn't known: want debug, info, warn or error`,
		`9: log.format: "text" isn't known: want json or console`,
	}},

	{"two windows in one schema", base() + pool("q", "app", "t"), []string{
		`8: pools[1].schema: is in the same database and has the same schema as pools[0]: give each pool its own`,
	}},
	{"two windows in one schema, by two names", strings.Replace(base(), "lite:", "app2: {url: 'postgresql://other@DB:5432/app?sslmode=disable'}\n  lite:", 1) + pool("q", "app2", "t"), []string{
		`9: pools[1].schema: is in the same database and has the same schema as pools[0]: give each pool its own`,
	}},
	{"two pools in one file", strings.Replace(base(), "lite:", "link: {url: 'sqlite:/link.db'}\n  lite:", 1) + pool("q", "lite", "t") + pool("r", "link", "u"), []string{
		`12: pools[2]: uses the same SQLite file as pools[1], which has room for one window: make them one pool`,
	}},
	{"one table twice", base("schema: x") + pool("q", "app", "public.blobs"), []string{
		`11: pools[1].blobs[0].table: is the table of pools[0].blobs[0] as well: a table is one tier of one pool`,
	}},
	{"one table twice in one pool, on SQLite", "databases: {a: {url: 'sqlite:/a'}}\npools:\n- name: p\n  database: a\n  blobs:\n  - {type: table, table: t, column: c}\n  - {type: table, table: T, column: d}\n", []string{
		`7: pools[0].blobs[1].table: is the table of pools[0].blobs[0] as well: a table is one tier of one pool`,
	}},
	{"tiers in two databases", "databases: {a: {url: 'sqlite:/a'}, b: {url: 'sqlite:/b'}}\npools:\n- name: p\n  database: a\n  blobs:\n  - {type: table, table: t, column: c}\n  - {type: table, database: b, table: t, column: d}\n", []string{
		`7: pools[0].blobs[1].database: isn't the database of pools[0].blobs[0]: tiers of one pool in two databases aren't supported yet`,
	}},
}

func pool(name, database, table string, more ...string) string {
	return "  - name: " + name + "\n" + indent(append([]string{
		"database: " + database, "blobs: [{type: table, table: " + table + ", column: id}]",
	}, more...))
}

func problemEnv() Env {
	return testEnv(map[string]string{"WORD": "h1dden word", "LATIN1": "\xe4"}, map[string]string{
		"/empty": " \n", "/two-lines": "postgres://u:s3cret@h/a\npostgres://b", "/mysql": "mysql://u:s3cret@h", "/variable": "${URL}",
	}, map[string]string{"/link.db": "/lite.db"})
}

func TestProblems(t *testing.T) {
	t.Parallel()
	for _, tc := range problemCases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, problems(t, tc.text, problemEnv())); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

// Whatever is wrong in whatever part comes at once, by line.
func TestProblemsTogether(t *testing.T) {
	t.Parallel()
	text := `
max_concurrent_sweeps: none
pools:
  - name: p
    window: 7
    database: app
    blobs:
      - {type: table, table: a.b.c}
    limits: {batch: 0}
databases:
  app: {url: "${UNSET}"}
log: {colour: true}
`
	want := []string{
		`2: max_concurrent_sweeps: want a whole number, got a string`,
		`5: pools[0].window: "7": a duration needs a unit: write 7d, 12h, 30s, 100ms`,
		`8: pools[0].blobs[0].table: "a.b.c": too many dots: want schema.table`,
		`8: pools[0].blobs[0].column: is missing: the column that holds the key`,
		`9: pools[0].limits.batch: "0" is out of range: want 1 to 20000`,
		`11: databases.app.url: variable UNSET is not set: set it in the agent's environment, or write $${UNSET} where a dollar is meant`,
		`12: log.colour: unknown field "colour": known here are level, format`,
	}
	if diff := cmp.Diff(want, problems(t, text, problemEnv())); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

// Aliases are followed, and what one of them gets wrong is said at each use.
func TestAliases(t *testing.T) {
	t.Parallel()
	text := base("limits: &small {batch: 10}", "brakes: &b {max_dead_count: 5}") +
		pool("q", "app", "t", "schema: q", "limits: *small", "brakes: *b")
	q, _ := mustParse(t, text, problemEnv()).Pool("q")
	if q.Limits.Batch != 10 || q.Brakes.MaxDeadCount != 5 {
		t.Errorf("limits %+v, brakes %+v", q.Limits, q.Brakes)
	}
	want := []string{
		`8: pools[0].limits.batch: "0" is out of range: want 1 to 20000`,
		`8: pools[1].limits.batch: "0" is out of range: want 1 to 20000`,
	}
	if diff := cmp.Diff(want, problems(t, strings.Replace(text, "batch: 10", "batch: 0", 1), problemEnv())); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

// bombs are small files that aliases make large, or endless.
func bombs() map[string]string {
	sources := base("liveness:", "- &s {name: s, table: t, column: c}") + "    - *s\n"
	many := strings.Repeat("*s, ", 30_000)
	return map[string]string{
		"nested": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\npools: [*c, *c]\ndatabases: *c\n",
		"cycle":  "databases: &d {a: *d}\npools: &p [*p, *p]\n",
		"self":   "&a [*a]\n",
		"quadratic": "databases: {app: {url: 'sqlite:/a'}}\npools:\n- &p\n  name: p\n  database: app\n" +
			"  blobs: [{type: table, table: t, column: c}]\n  liveness: [&s {name: s, table: t, column: c}, " + many + "]\n" + strings.Repeat("- *p\n", 1000),
		"sources":   sources + "    - *s\n",
		"keys":      "databases: {" + strings.Repeat("a, ", 110_000) + "}\npools: []\n",
		"mistakes":  "pools: [" + strings.Repeat("x, ", 20_000) + "]\n",
		"deep":      "pools: " + strings.Repeat("[", 50_000),
		"wide deep": "databases:\n" + strings.Repeat("? ", 50_000),
	}
}

func TestBombs(t *testing.T) {
	t.Parallel()
	for name, text := range bombs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lines := problems(t, text, problemEnv())
			if len(lines) == 0 || len(lines) > maxProblems+1 {
				t.Errorf("%d problems", len(lines))
			}
		})
	}
}

func TestTooMuch(t *testing.T) {
	t.Parallel()
	lines := problems(t, bombs()["quadratic"], problemEnv())
	if want := "more than 200000 values, once its aliases (*name) are followed: write fewer"; !strings.HasSuffix(lines[0], want) {
		t.Errorf("first problem: %s", lines[0])
	}
	lines = problems(t, bombs()["mistakes"], problemEnv())
	if want := "has more problems than these: correct them first"; len(lines) != maxProblems+1 || lines[maxProblems] != want {
		t.Errorf("%d problems, the last: %s", len(lines), lines[len(lines)-1])
	}
}

func TestLoad(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("app.db", "")
	if err := os.Symlink("app.db", filepath.Join(dir, "link.db")); err != nil {
		t.Fatal(err)
	}
	write("url", "sqlite:app.db\n")
	good := write("good.yaml", "databases: {a: {url_file: url}}\npools: [{name: p, database: a, blobs: [{type: table, table: t, column: c}]}]\n")
	c, err := Load(good, Env{})
	if err != nil {
		t.Fatal(err)
	}
	if db, _ := c.Database("a"); db.Path != filepath.Join(dir, "app.db") {
		t.Errorf("path: %s", db.Path)
	}
	for name, want := range map[string]string{
		write("twice.yaml", `databases: {a: {url: "sqlite:app.db"}, b: {url: "sqlite:../`+filepath.Base(dir)+`/link.db"}}
pools:
- {name: p, database: a, blobs: [{type: table, table: t, column: c}]}
- {name: q, database: b, blobs: [{type: table, table: u, column: c}]}
`): ":4: pools[1]: uses the same SQLite file as pools[0], which has room for one window: make them one pool",
		write("absent.yaml", `databases: {a: {url: "sqlite:new/app.db"}, b: {url: "sqlite:./new/../new/app.db"}, c: {url: "sqlite:new.db"}, d: {url: "sqlite:./new.db"}}
pools:
- {name: p, database: a, blobs: [{type: table, table: t, column: c}]}
- {name: q, database: b, blobs: [{type: table, table: u, column: c}]}
- {name: r, database: c, blobs: [{type: table, table: t, column: c}]}
`): ":4: pools[1]: uses the same SQLite file as pools[0], which has room for one window: make them one pool",
		filepath.Join(dir, "none.yaml"): ": can't be read: it doesn't exist",
		dir:                             ": can't be read: is a directory",
		write("long.yaml", strings.Repeat("#", maxFile+10)): ": is longer than 1 MiB, which no configuration should be",
	} {
		_, err := Load(name, OSEnv())
		var errs *Errors
		if !errors.As(err, &errs) || err.Error() != name+want {
			t.Errorf("Load(%s) = %v", name, err)
		}
	}
}

func TestWindowAgainstClock(t *testing.T) {
	t.Parallel()
	env := problemEnv()
	env.Now = func() time.Time { return time.Date(2262, 4, 1, 0, 0, 0, 0, time.UTC) }
	want := []string{`8: pools[0].window: the window ends later than the agent can write down (the year 2262): want a shorter one`}
	if diff := cmp.Diff(want, problems(t, base("window: 30d"), env)); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	if got := problems(t, base("window: 7d"), env); got != nil {
		t.Errorf("a window that fits: %q", got)
	}
}
