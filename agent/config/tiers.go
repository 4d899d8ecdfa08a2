package config

import (
	"cmp"
	"errors"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
)

// tier reads one place that holds blobs. Of a type that isn't known yet nothing
// else is read: its fields aren't known either.
func (c *Validated) tier(v value, own poolDatabase) (Tier, bool) {
	t := Tier{Path: v.path}
	f := v.open("a mapping of a tier's fields")
	kind := f.need("type", "want "+TierTable)
	s, ok := kind.scalar("a string", "!!str")
	if !ok {
		return t, false
	}
	if s.text != TierTable {
		kind.fail("unknown type %s: want %s", s.quote(), TierTable)
		return t, false
	}
	defer f.close()
	t.Type = TierTable
	db := c.databaseOf(f, own)
	t.Database = db.Name
	f.need("table", "the table that holds one blob a row").table(&t.Table, db.Engine)
	f.need("column", "the column that holds the key").column(&t.Column, db.Engine)
	size := f.get("size")
	size.column(&t.Size, db.Engine)
	if t.Size != "" && sameName(db.Engine, t.Size, t.Column) {
		size.fail("is the column of the key: name the one that holds the size, or remove the field")
	}
	return t, true
}

// source reads one liveness source of p, whose tiers have been read.
func (c *Validated) source(v value, p Pool, own poolDatabase) Source {
	s := Source{Path: v.path, Guard: GuardAuto, OnUnparseable: UnparseableAbort}
	f := v.open("a mapping of a source's fields")
	defer f.close()
	f.need("name", "every source has one").matching(&s.Name, sourceNameRE, sourceNameWant)
	db := c.databaseOf(f, own)
	s.Database = db.Name
	s.readRows(f, db.Engine)
	f.get("format").format(&s.Format)
	guard := f.get("guard")
	choose(guard, &s.Guard, GuardAuto, GuardForeignKey, GuardTrigger, GuardTableLock, GuardSettle, GuardSerial)
	c.checkGuard(guard, s.Guard, db, p)
	f.get("allow_empty").boolean(&s.AllowEmpty)
	choose(f.get("on_unparseable"), &s.OnUnparseable, UnparseableAbort, UnparseableIgnore)
	return s
}

// readRows reads which values refer to blobs: a table's column, or a query.
func (s *Source) readRows(f *fields, engine Engine) {
	table, column, where, query := f.get("table"), f.get("column"), f.get("where"), f.get("query")
	table.table(&s.Table, engine)
	column.column(&s.Column, engine)
	where.sql(&s.Where)
	query.sql(&s.Query)
	switch {
	case !f.readable:
	case table.given() && query.given():
		f.fail("has both table and query: keep one")
	case query.given():
		for _, v := range []value{column, where} {
			if v.given() {
				v.fail("goes with table, not with query: put it into the query")
			}
		}
	case !table.given():
		f.fail("has neither table nor query: give table and column, or a query that returns one column")
	case !column.given():
		column.fail("is missing: name the column of the table that refers to blobs")
	}
}

// checkGuard refuses a guard that the source's database can't have.
func (c *Validated) checkGuard(v value, guard Guard, db Database, p Pool) {
	host, _ := c.Database(p.Host) // none, or one without an engine: nothing to compare with
	ofPostgres := guard == GuardForeignKey || guard == GuardTrigger || guard == GuardTableLock
	apart := host.Engine != 0 && db.Engine != 0 && host.identity != db.identity
	switch {
	case guard == GuardSerial && db.Engine == Postgres:
		v.fail("serial is a guard of SQLite's: want auto, foreign_key, trigger, table_lock or settle")
	case ofPostgres && db.Engine == SQLite:
		v.fail("%s is a guard of Postgres's: want auto, serial or, where the blobs are in another database, settle", guard)
	case guard == GuardSettle && db.Engine == SQLite && !apart:
		v.fail("on SQLite settle is for a source in another database than the blobs: want auto or serial")
	case guard == GuardTrigger && apart:
		v.fail("a trigger can't look for a blob in another database, and the blobs are in one: want settle")
	case guard == GuardTableLock && apart:
		v.fail("a lock in another database isn't held by the transaction that deletes, and the blobs are in one: want settle")
	case guard == GuardForeignKey && apart:
		v.fail("a foreign key can't lead into another database, and the blobs are in one: want settle")
	case guard == GuardSerial && apart:
		v.fail("serial holds within one file, and the blobs are in another database: want settle")
	}
}

func (v value) table(into *Table, engine Engine) {
	s, ok := v.scalar("the name of a table", "!!str")
	if !ok {
		return
	}
	t, err := parseTable(s.text, engine)
	if err != nil {
		v.fail("%s: %v", s.quote(), err)
		return
	}
	*into = t
}

func (v value) column(into *string, engine Engine) {
	s, ok := v.scalar("the name of a column", "!!str")
	if !ok {
		return
	}
	name, err := parseColumn(s.text, engine)
	if err != nil {
		v.fail("%s: %v", s.quote(), err)
		return
	}
	*into = name
}

// sql reads a piece of SQL that becomes part of a statement.
func (v value) sql(into *string) {
	s, ok := v.scalar("SQL", "!!str")
	if !ok {
		return
	}
	text := strings.TrimSpace(s.text)
	if strings.HasSuffix(text, ";") {
		v.fail("ends in a semicolon: remove it, the SQL becomes part of a statement")
		return
	}
	*into = text
}

func (v value) format(into **blob.Format) {
	s, ok := v.scalar("a format such as sha256:{hex}", "!!str")
	if !ok {
		return
	}
	format, err := blob.ParseFormat(s.text)
	if err != nil {
		// What is wrong comes without the format, which is quoted already.
		v.fail("%s isn't a format%s", s.quote(), s.because(cmp.Or(errors.Unwrap(err), err)))
		return
	}
	if !format.Simple() {
		// Sources build their SQL from a prefix, a placeholder and a suffix.
		v.fail("%s has several placeholders, slices or {*}: a source takes one placeholder and text around it", s.quote())
		return
	}
	*into = &format
}
