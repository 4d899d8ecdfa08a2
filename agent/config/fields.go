package config

import (
	"cmp"
	"errors"
	"math"
	"regexp"
	"strings"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/alkblobs/gc-agent/blob"
)

var (
	poolNameRE   = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,62}$`)
	sourceNameRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)
	schemaRE     = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)
)

const (
	poolNameWant   = "a name: want a lower-case letter, then at most 62 lower-case letters, digits, _ and -"
	sourceNameWant = "a name: want at most 63 letters, digits, dots, _ and -"
	schemaWant     = "the name of a schema: want at most 63 lower-case letters, digits and _, not beginning with a digit"
)

const (
	defaultWindow   = 7 * day
	defaultSchedule = "*/15 * * * *"
	defaultSchema   = "gc_agent"
)

// root reads the whole file. Databases come first, wherever they stand: the rest
// depends on their engines.
func (d *decoder) root(v value) *Validated {
	c := &Validated{file: d.file, lines: d.lines, index: map[string]int{}, maxConcurrentSweeps: 4}
	f := v.open("databases and pools")
	defer f.close()
	for _, e := range f.need("databases", "name at least one: app: {url: …}").entries("names of databases, each with its url") {
		c.index[e.key] = len(c.databases)
		c.databases = append(c.databases, d.database(e))
	}
	pools := f.need("pools", "name at least one store to collect")
	for _, item := range pools.items("a list of pools (- name: …)") {
		if !d.spend(0) {
			break
		}
		c.pools = append(c.pools, c.pool(item))
	}
	if pools.empty() {
		pools.fail("is an empty list: name at least one store to collect")
	}
	whole(f.get("max_concurrent_sweeps"), &c.maxConcurrentSweeps, 1, 256)
	c.admin = d.admin(f.get("admin"))
	c.log = readLog(f.get("log"))
	return c
}

func readLog(v value) Log {
	log := Log{Level: "info", Format: "json"}
	f := v.open("a mapping with level and format")
	defer f.close()
	choose(f.get("level"), &log.Level, "debug", "info", "warn", "error")
	choose(f.get("format"), &log.Format, "json", "console")
	return log
}

// database reads one entry. One whose URL is wrong keeps its name, so that those
// who refer to it aren't wrong too; it has no engine.
func (d *decoder) database(e entry) Database {
	db := Database{Name: e.key}
	if !poolNameRE.MatchString(e.key) {
		e.fail("what stands before the colon isn't %s", poolNameWant)
	}
	f := e.open("a mapping with url or url_file")
	defer f.close()
	url, file := f.get("url"), f.get("url_file")
	switch {
	case !f.readable:
	case url.given() && file.given():
		e.fail("has both url and url_file: keep one")
	case !url.given() && !file.given():
		e.fail("has neither url nor url_file: give one of them")
	}
	var text string
	if url.str(&text) {
		if err := d.locate(&db, text); err != nil {
			url.fail("%v", err)
		}
	}
	if file.str(&text) {
		text, err := d.readURLFile(text)
		if err == nil {
			err = d.locate(&db, text)
		}
		if err != nil {
			file.fail("%v", err)
		}
	}
	return db
}

// pool reads a pool against the databases of c.
func (c *Validated) pool(v value) Pool {
	p := Pool{Path: v.path, Mode: ModeObserve, Window: defaultWindow}
	f := v.open("a mapping of a pool's fields")
	defer f.close()
	f.need("name", "every pool has one").matching(&p.Name, poolNameRE, poolNameWant)
	database := f.get("database")
	c.reference(database, &p.Database)
	own := poolDatabase{name: p.Database, given: database.given()}
	blobs := f.need("blobs", "say where the blobs are: a list of tiers, such as {type: table, …}")
	items := blobs.items("a list of tiers (- type: …)")
	for _, item := range items {
		if tier, ok := c.tier(item, own); ok {
			p.Blobs = append(p.Blobs, tier)
		}
	}
	if blobs.empty() {
		blobs.fail("is an empty list: a pool has at least one tier")
	}
	p.Host = hostOf(p)
	for _, item := range f.get("liveness").items("a list of liveness sources (- name: …)") {
		p.Liveness = append(p.Liveness, c.source(item, p, own))
	}
	c.schema(f.get("schema"), &p)
	c.fleet(f.get("fleet"), &p)
	choose(f.get("mode"), &p.Mode, ModeObserve, ModeEnforce)
	p.Schedule = readSchedule(f.get("schedule"))
	inline := p.Host == "" && !own.given && len(items) > 0 && len(p.Blobs) == 0
	window(f.get("window"), &p.Window, inline)
	p.Pins = v.d.pins(f.get("pins"))
	p.Brakes = readBrakes(f.get("brakes"))
	p.Limits = readLimits(f.get("limits"))
	p.Protect = readProtect(f.get("protect"))
	return p
}

// hostOf says where the pool's window lives: in exactly one database, or nowhere.
func hostOf(p Pool) string {
	for _, t := range p.Blobs {
		if t.Type == TierTable {
			return t.Database
		}
	}
	return p.Database
}

// reference reads the name of a database that the file has.
func (c *Validated) reference(v value, into *string) {
	s, ok := v.scalar("the name of a database", "!!str")
	if !ok {
		return
	}
	if _, ok := c.Database(s.text); !ok {
		v.fail("%s isn't one of the databases of this file: %s", s.quote(), c.databaseNames())
		return
	}
	*into = s.text
}

// databaseNames lists the names that may be shown, up to what fits a message.
func (c *Validated) databaseNames() string {
	var names []string
	for _, db := range c.databases {
		if poolNameRE.MatchString(db.Name) && len(names) < 20 {
			names = append(names, db.Name)
		}
	}
	return cmp.Or(strings.Join(names, ", "), "it has none")
}

// poolDatabase is what a pool gives its tiers and sources for a database. One that
// is given and has no name is unknown, and reported.
type poolDatabase struct {
	name  string
	given bool
}

// databaseOf reads the database field of a tier or a source, and returns what it
// comes to with the pool's.
func (c *Validated) databaseOf(f *fields, own poolDatabase) Database {
	v, name := f.get("database"), own.name
	if v.given() {
		name = ""
	}
	c.reference(v, &name)
	if !v.given() && !own.given && f.readable {
		v.fail("is missing: name a database here, or one for the pool")
	}
	db, _ := c.Database(name) // an unknown one is reported where it is written
	return db
}

// schema reads where the agent's tables live, which only Postgres has.
func (c *Validated) schema(v value, p *Pool) {
	host, _ := c.Database(p.Host) // none: inline, or reported
	if host.Engine == SQLite {
		if v.given() {
			v.fail("SQLite has no schemas, the window is the table gc_window of the file: remove the field")
		}
		return
	}
	var name string
	switch ok := v.matching(&name, schemaRE, schemaWant); {
	case !v.given():
		p.Schema = defaultSchema
	case !ok:
	case strings.HasPrefix(name, "pg_") || name == "information_schema":
		v.fail("the schema belongs to Postgres itself: choose one that the agent has to itself, such as %s", defaultSchema)
	default:
		p.Schema = name
	}
}

// fleet reads whether applications pin blobs, which takes a Postgres host.
func (c *Validated) fleet(v value, p *Pool) {
	host, _ := c.Database(p.Host) // none: inline, or reported
	if v.boolean(&p.Fleet); p.Fleet && host.Engine == SQLite {
		v.fail("a fleet on SQLite isn't possible, where pins would be rows that every writer waits for: remove the field")
	}
}

// window reads how long a dead blob stays. An inline pool has nothing but memory
// to keep its window in.
func window(v value, into *time.Duration, inline bool) {
	if v.given() && !v.duration(into) {
		return
	}
	now, err := blob.InstantOf(v.d.env.Now())
	if err == nil {
		_, err = now.Add(*into)
	}
	switch {
	case err != nil:
		v.fail("the window ends later than the agent can write down (the year 2262): want a shorter one")
	case inline && *into > time.Hour:
		v.fail("a window of over an hour needs a database to live in: name one for the pool, or want at most 1h")
	}
}

func readSchedule(v value) Schedule {
	spec := defaultSchedule
	s, ok := v.scalar("a schedule in quotes", "!!str")
	if ok {
		spec = strings.TrimSpace(s.text)
	}
	schedule, err := parseSchedule(spec, v.d.env.Now())
	if err != nil && ok {
		v.fail("%s isn't a schedule (want five fields, such as \"*/15 * * * *\", or @every 10m, "+
			"or CRON_TZ=Europe/Berlin and five fields)%s", s.quote(), s.because(err))
	}
	return Schedule{Spec: spec, Schedule: schedule}
}

// parseSchedule reads a cron specification and makes sure that it does what it
// says: the library panics where nothing follows a zone, rounds what is under a
// second up to one, and takes days that no month has.
func parseSchedule(spec string, now time.Time) (cron.Schedule, error) {
	if (strings.HasPrefix(spec, "TZ=") || strings.HasPrefix(spec, "CRON_TZ=")) && !strings.Contains(spec, " ") {
		return nil, errors.New("a space and five fields belong after the zone")
	}
	if _, every, ok := strings.Cut(spec, "@every "); ok {
		if d, err := time.ParseDuration(every); err == nil && d < time.Second {
			return nil, errors.New("it can't be more often than every second")
		}
	}
	schedule, err := cron.ParseStandard(spec)
	if err != nil {
		return nil, err
	}
	if schedule.Next(now).IsZero() {
		return nil, errors.New("no such day comes within five years")
	}
	return schedule, nil
}

func readBrakes(v value) Brakes {
	b := Brakes{MaxDeadRatio: 0.5, MinDeadKeys: 100}
	f := v.open("a mapping of brakes")
	defer f.close()
	f.get("max_dead_ratio").ratio(&b.MaxDeadRatio)
	whole(f.get("min_dead_keys"), &b.MinDeadKeys, 0, math.MaxInt64)
	whole(f.get("max_dead_count"), &b.MaxDeadCount, 0, math.MaxInt64)
	for _, item := range f.get("off").items("a list of names of brakes") {
		var name Brake
		choose(item, &name, BrakeMaxDeadRatio, BrakeMaxDeadCount, BrakeEmptySource)
		b.Off = append(b.Off, name)
	}
	return b
}

func readLimits(v value) Limits {
	l := Limits{
		Batch: 1000, BatchBytes: 256 << 20, Page: 10_000,
		LockTimeout: 100 * time.Millisecond, SettleTimeout: 2 * time.Second, StatementTimeout: 30 * time.Second,
	}
	f := v.open("a mapping of limits")
	defer f.close()
	whole(f.get("batch"), &l.Batch, 1, 20_000)
	f.get("batch_bytes").size(&l.BatchBytes)
	whole(f.get("page"), &l.Page, 1, 1_000_000)
	f.get("lock_timeout").timeout(&l.LockTimeout)
	f.get("settle_timeout").timeout(&l.SettleTimeout)
	f.get("statement_timeout").timeout(&l.StatementTimeout)
	return l
}

func readProtect(v value) Protect {
	var p Protect
	f := v.open("a mapping with http")
	defer f.close()
	var text string
	url := f.need("http", "give the URL to ask, or remove protect")
	if !url.str(&text) {
		return p
	}
	if err := checkHTTP(text); err != nil {
		url.fail("%v", err)
	}
	p.HTTP = NewSecret(text)
	return p
}
