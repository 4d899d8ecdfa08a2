package config

import (
	"slices"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/alkblobs/gc-agent/blob"
)

// Engine is the kind of a database.
type Engine uint8

// The engines. The zero value is none.
const (
	Postgres Engine = iota + 1
	SQLite
)

// String returns the engine's name as it stands in messages.
func (e Engine) String() string {
	switch e {
	case Postgres:
		return "Postgres"
	case SQLite:
		return "SQLite"
	default:
		return "no engine"
	}
}

// Database is one entry under databases.
type Database struct {
	Name   string
	Engine Engine
	// URL is what was given for it, trimmed.
	URL Secret
	// Path is the file of an SQLite database, absolute: a relative one begins at the
	// directory of the configuration file. It is empty for Postgres.
	Path string

	// identity is equal for two names of one database, as far as the file tells.
	identity string
}

// Mode says what a pool's sweep may change.
type Mode string

// The modes. Anything but ModeEnforce only looks.
const (
	ModeObserve Mode = "observe"
	ModeEnforce Mode = "enforce"
)

// Pool is one application store under collection.
type Pool struct {
	// Path is where the pool stands in the file: pools[0].
	Path string
	Name string
	// Database is the default for tiers and sources, which have it filled in.
	// It is empty where the pool names none.
	Database string
	// Host names the database that holds the pool's window: that of the first
	// table tier, else Database. Empty means that the pool works inline.
	Host string
	// Schema is where the agent's tables live on Postgres. It is empty on SQLite.
	Schema string
	// Fleet says that applications pin blobs, through functions in Schema.
	Fleet    bool
	Mode     Mode
	Schedule Schedule
	Window   time.Duration
	// Blobs has at least one tier; all of them are in Host.
	Blobs []Tier
	// Liveness may be empty: the sweep then aborts.
	Liveness []Source
	Pins     Pins
	Brakes   Brakes
	Limits   Limits
	Protect  Protect
}

// Schedule is a cron specification and what it means.
type Schedule struct {
	Spec string
	cron.Schedule
}

// Table names a table: Schema is empty on SQLite and never empty on Postgres.
// Names are as the catalogue spells them, neither folded nor quoted.
type Table struct{ Schema, Name string }

// TierTable is the type of a tier that is a database table.
const TierTable = "table"

// Tier is one place that holds blobs.
type Tier struct {
	// Path is where the tier stands in the file: pools[0].blobs[1].
	Path     string
	Type     string
	Database string
	Table    Table
	// Column holds the key.
	Column string
	// Size is the column that holds a blob's size in bytes, or empty.
	Size string
}

// Guard is what stops a reference from appearing between the check and the delete.
type Guard string

// The guards that a source may ask for. GuardAuto takes the strongest one found.
const (
	GuardAuto       Guard = "auto"
	GuardForeignKey Guard = "foreign_key"
	GuardTrigger    Guard = "trigger"
	GuardTableLock  Guard = "table_lock"
	GuardSettle     Guard = "settle"
	GuardSerial     Guard = "serial"
)

// Unparseable is what a value that fits no format does to the sweep.
type Unparseable string

// Anything but UnparseableIgnore aborts the sweep.
const (
	UnparseableAbort  Unparseable = "abort"
	UnparseableIgnore Unparseable = "ignore"
)

// Source is one liveness source: either Query is set, or Table and Column are.
type Source struct {
	// Path is where the source stands in the file: pools[0].liveness[2].
	Path     string
	Name     string
	Database string
	Table    Table
	Column   string
	// Where is an SQL condition on Table's rows, or empty.
	Where string
	// Query is a SELECT of one column, without a closing semicolon. It may end
	// in a comment, and so may Where: what follows it in SQL needs a new line.
	Query string
	// Format is nil where the type of the column decides.
	Format        *blob.Format
	Guard         Guard
	AllowEmpty    bool
	OnUnparseable Unparseable
}

// Brake names a brake. It is also the cause of the abort that the brake makes.
type Brake string

// The brakes.
const (
	BrakeMaxDeadRatio Brake = "max_dead_ratio"
	BrakeMaxDeadCount Brake = "max_dead_count"
	BrakeEmptySource  Brake = "empty_source"
)

// Brakes are the limits that stop a sweep that looks wrong.
type Brakes struct {
	// MaxDeadRatio is over 0 and at most 1. It holds from MinDeadKeys dead keys on.
	MaxDeadRatio float64
	MinDeadKeys  int64
	// MaxDeadCount is 0 where nothing limits the count.
	MaxDeadCount int64
	// Off are the brakes that are switched off by name.
	Off []Brake
}

// Enabled says whether the brake isn't switched off by name.
func (b Brakes) Enabled(name Brake) bool { return !slices.Contains(b.Off, name) }

// Limits bound what one batch, page or statement of the agent's may take.
type Limits struct {
	// Batch is in keys, BatchBytes in bytes of blobs, Page in keys.
	Batch      int
	BatchBytes int64
	Page       int
	// The timeouts are whole milliseconds, at least one.
	LockTimeout      time.Duration
	SettleTimeout    time.Duration
	StatementTimeout time.Duration
}

// Protect is the hook that is asked before a sweep executes.
type Protect struct {
	// HTTP may hold credentials. Its zero value means that nothing is asked.
	HTTP Secret
}

// Log says how the agent logs.
type Log struct {
	// Level is debug, info, warn or error.
	Level string
	// Format is json or console.
	Format string
}

// Validated is a configuration without a problem. Only Load and Parse make one.
// It never changes and may be read by any number of goroutines at once; what its
// methods return is the caller's to change.
type Validated struct {
	file                string
	lines               map[string]int
	databases           []Database
	index               map[string]int // of databases, by name
	pools               []Pool
	maxConcurrentSweeps int
	admin               Admin
	log                 Log
}

// Pools returns the pools in the order of the file.
func (c *Validated) Pools() []Pool {
	pools := make([]Pool, len(c.pools))
	for i := range c.pools {
		pools[i] = c.pools[i].clone()
	}
	return pools
}

// Pool returns the pool of that name.
func (c *Validated) Pool(name string) (Pool, bool) {
	for i := range c.pools {
		if c.pools[i].Name == name {
			return c.pools[i].clone(), true
		}
	}
	return Pool{}, false
}

// Databases returns the databases in the order of the file.
func (c *Validated) Databases() []Database { return slices.Clone(c.databases) }

// Database returns the database of that name.
func (c *Validated) Database(name string) (Database, bool) {
	if i, ok := c.index[name]; ok {
		return c.databases[i], true
	}
	return Database{}, false
}

// MaxConcurrentSweeps is how many pools may be swept side by side, at least one.
func (c *Validated) MaxConcurrentSweeps() int { return c.maxConcurrentSweeps }

// Admin returns where the daemon can be reached.
func (c *Validated) Admin() Admin { return c.admin }

// Log returns how to log.
func (c *Validated) Log() Log { return c.log }

// Problem returns a problem that was found elsewhere, in the form of those of
// the file: at path, or, where the file doesn't spell it out, at its parent's line.
func (c *Validated) Problem(path, message string) Problem {
	return Problem{File: c.file, Line: lineOf(c.lines, path), Path: path, Message: message}
}

func (p Pool) clone() Pool {
	p.Blobs = slices.Clone(p.Blobs)
	p.Liveness = slices.Clone(p.Liveness)
	p.Pins.Owners = slices.Clone(p.Pins.Owners)
	p.Brakes.Off = slices.Clone(p.Brakes.Off)
	return p
}
