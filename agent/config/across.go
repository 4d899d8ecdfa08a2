package config

import "strings"

// checkAcross looks at what is right by itself and wrong beside something else.
func (d *decoder) checkAcross(c *Validated) {
	d.checkPoolNames(c)
	d.checkWindows(c)
	d.checkTiers(c)
	for _, p := range c.pools {
		d.checkSourceNames(p)
	}
}

func (d *decoder) checkPoolNames(c *Validated) {
	first := map[string]string{}
	for _, p := range c.pools {
		if p.Name == "" {
			continue
		}
		if other, taken := first[p.Name]; taken {
			d.fail(p.Path+".name", "is the name of %s as well: give each pool its own", other)
			continue
		}
		first[p.Name] = p.Path
	}
}

func (d *decoder) checkSourceNames(p Pool) {
	first := map[string]string{}
	for _, s := range p.Liveness {
		if s.Name == "" {
			continue
		}
		if other, taken := first[s.Name]; taken {
			d.fail(s.Path+".name", "is the name of %s as well: give each source of a pool its own", other)
			continue
		}
		first[s.Name] = s.Path
	}
}

// checkWindows makes sure that no two pools keep their windows in one place.
func (d *decoder) checkWindows(c *Validated) {
	type place struct{ database, schema string }
	first := map[place]string{}
	for _, p := range c.pools {
		host, _ := c.Database(p.Host) // none: inline, or reported
		if host.Engine == 0 || host.Engine == Postgres && p.Schema == "" {
			continue
		}
		at := place{host.identity, p.Schema}
		other, taken := first[at]
		switch {
		case !taken:
			first[at] = p.Path
		case host.Engine == SQLite:
			d.fail(p.Path, "uses the same SQLite file as %s, which has room for one window: make them one pool", other)
		default:
			d.fail(p.Path+".schema", "is in the same database and has the same schema as %s: give each pool its own", other)
		}
	}
}

// checkTiers makes sure that a blob has one pool and one tier, and that a pool's
// tiers are in one database.
func (d *decoder) checkTiers(c *Validated) {
	type place struct {
		database string
		table    Table
	}
	first := map[place]string{}
	for _, p := range c.pools {
		for _, t := range p.Blobs {
			db, _ := c.Database(t.Database) // none: reported
			if db.Engine == 0 {
				continue
			}
			if p.Host != "" && t.Database != p.Host {
				d.fail(t.Path+".database", "isn't the database of %s: tiers of one pool in two databases aren't supported yet", p.Blobs[0].Path)
			}
			at := place{db.identity, foldTable(db.Engine, t.Table)}
			if other, taken := first[at]; taken && t.Table.Name != "" {
				d.fail(t.Path+".table", "is the table of %s as well: a table is one tier of one pool", other)
				continue
			}
			first[at] = t.Path
		}
	}
}

// foldTable returns what two spellings of one table have in common: SQLite takes
// no notice of the case of ASCII letters.
func foldTable(engine Engine, t Table) Table {
	return Table{Schema: t.Schema, Name: fold(engine, t.Name)}
}

func sameName(engine Engine, a, b string) bool { return fold(engine, a) == fold(engine, b) }

func fold(engine Engine, name string) string {
	if engine != SQLite {
		return name
	}
	return strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, name)
}
