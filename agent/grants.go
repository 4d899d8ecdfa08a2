package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob/postgres"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"
	"github.com/alkblobs/gc-agent/liveness"

	"github.com/jackc/pgx/v5"
)

// DatabaseGrants is what the agent's role needs in one database for some pools, and
// nothing beyond.
type DatabaseGrants struct {
	Database string // as the configuration names it
	Engine   config.Engine
	// Name is the database's own name, an SQLite file's path.
	Name string
	Role string // empty on SQLite, which knows none
	// Grants are the statements, in the order in which they can be run.
	Grants []RoleGrant
	// Notes say what no GRANT gives.
	Notes []string
	// Unseen says why Grants may not be all. It is empty where they are.
	Unseen []string
}

// RoleGrant is one right of the role's. Statement ends without a semicolon, Why
// ends a sentence that begins with "to".
type RoleGrant struct {
	Statement string
	Why       string
	// Missing says that the role hasn't got it, by whatever way, as things stand.
	Missing bool
	// Optional says that without it something takes longer, and nothing is wrong.
	Optional bool

	grant pgdb.Grant
}

// Grants returns what the pools need, one entry a database. The role is that of
// the databases' URLs, unless one is named. The catalogue is asked, and changed by
// nothing that is committed. A database that can't be asked makes no error: the
// rights are then those that the configuration shows, and Unseen says so.
func (a *Agent) Grants(ctx context.Context, role string, pools []*Pool) ([]DatabaseGrants, error) {
	var all []DatabaseGrants
	for _, p := range pools {
		// The host first: the kind of the pool's keys follows from its tiers.
		for _, name := range p.databases() {
			d, err := a.grantsIn(ctx, p, name, role)
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return nil, fmt.Errorf("look for the rights that pool %s needs: %w", p.cfg.Name, err)
			}
			all = merge(all, d)
		}
	}
	for i := range all {
		all[i].prune()
	}
	return all, nil
}

// databases returns the names of those that the pool works in, each once.
func (p *Pool) databases() []string {
	names := []string{p.cfg.Host}
	for _, s := range p.cfg.Liveness {
		if !slices.Contains(names, s.Database) {
			names = append(names, s.Database)
		}
	}
	return names
}

// merge adds what one pool needs in a database to what others do.
func merge(all []DatabaseGrants, d DatabaseGrants) []DatabaseGrants {
	at := slices.IndexFunc(all, func(other DatabaseGrants) bool { return other.Database == d.Database })
	if at < 0 {
		at = len(all)
		all = append(all, DatabaseGrants{Database: d.Database, Engine: d.Engine, Name: d.Name, Role: d.Role})
	}
	into := &all[at]
	for _, g := range d.Grants {
		into.add(g)
	}
	slices.SortStableFunc(into.Grants, func(a, b RoleGrant) int { return int(a.grant.On.Kind - b.grant.On.Kind) })
	into.Notes, into.Unseen = addNew(into.Notes, d.Notes...), addNew(into.Unseen, d.Unseen...)
	return all
}

func (d *DatabaseGrants) add(g RoleGrant) {
	at := slices.IndexFunc(d.Grants, func(other RoleGrant) bool { return other.Statement == g.Statement })
	if at < 0 {
		d.Grants = append(d.Grants, g)
		return
	}
	same := &d.Grants[at]
	same.Optional = same.Optional && g.Optional
	same.Why = strings.Join(addNew(strings.Split(same.Why, "; to "), g.Why), "; to ")
}

// prune drops what another right of the list implies.
func (d *DatabaseGrants) prune() {
	list := slices.Clone(d.Grants)
	d.Grants = slices.DeleteFunc(d.Grants, func(g RoleGrant) bool {
		return slices.ContainsFunc(list, func(other RoleGrant) bool { return g.grant.ImpliedBy(other.grant) })
	})
}

func addNew(list []string, more ...string) []string {
	for _, s := range more {
		if !slices.Contains(list, s) {
			list = append(list, s)
		}
	}
	return list
}

func (a *Agent) grantsIn(ctx context.Context, p *Pool, name, role string) (DatabaseGrants, error) {
	db, err := a.databases.open(p.cfg, name)
	if err != nil {
		return DatabaseGrants{}, err
	}
	if db.sqlite != nil {
		defer func() { _ = db.sqlite.Close() }() // nothing was opened
		return p.filePermissions(name, db.sqlite.Path()), nil
	}
	defer db.postgres.Close()
	n := needs{pool: p, database: name}
	d := DatabaseGrants{Database: name, Engine: config.Postgres}
	err = rolledBack(ctx, db.postgres, func(ctx context.Context, tx pgx.Tx) error {
		grantee, err := pgdb.LookupGrantee(ctx, tx, role)
		if err != nil {
			return err
		}
		if err := n.ask(ctx, tx, grantee.Database); err != nil {
			return err
		}
		return n.stand(ctx, tx, grantee, &d)
	})
	if err != nil {
		n = needs{pool: p, database: name}
		n.guess(db.postgres, role, &d)
		d.Unseen = []string{fmt.Sprintf("database %s can't be asked, so this is what the configuration alone shows: %v", name, err)}
	}
	d.Unseen = append(d.Unseen, n.unseen...)
	return d, nil
}

var errRollBack = errors.New("roll back")

// rolledBack runs fn in a transaction that may write and that nothing stays of.
func rolledBack(ctx context.Context, db *pgdb.DB, fn func(context.Context, pgx.Tx) error) error {
	conn, err := db.Dedicated(ctx)
	if err != nil {
		return err
	}
	// Nothing is left to be lost.
	defer func() { _ = conn.Close(ctx) }()
	err = conn.InTx(ctx, pgdb.ReadWrite, func(ctx context.Context, tx pgx.Tx) error {
		if err := fn(ctx, tx); err != nil {
			return err
		}
		return errRollBack
	})
	if errors.Is(err, errRollBack) {
		return nil
	}
	return err
}

// needs gathers what a pool needs in one database.
type needs struct {
	pool     *Pool
	database string
	grants   []pgdb.Grant
	notes    []string
	unseen   []string
}

func (n *needs) connect(database string) {
	on := pgdb.Object{Kind: pgdb.DatabaseObject, Name: database}
	n.grants = append(n.grants, pgdb.Grant{Right: "CONNECT", On: on, Why: "connect"})
}

// ask reads the catalogue.
func (n *needs) ask(ctx context.Context, tx pgx.Tx, database string) error {
	n.connect(database)
	opts := liveness.Options{Kind: n.pool.Kind(), Enforce: n.enforces(), Elsewhere: true}
	var targets []liveness.Target
	if n.database == n.pool.cfg.Host {
		tiers, err := n.askTiers(ctx, tx)
		if err != nil {
			return err
		}
		if err := n.askOwn(ctx, tx, database, tiers); err != nil {
			return err
		}
		opts.Kind, opts.Elsewhere, targets = n.pool.Kind(), false, postgresTargets(tiers)
	}
	sources, err := liveness.PostgresGrants(ctx, tx, opts, n.pool.sourcesIn(n.database), targets)
	if err != nil {
		return err
	}
	for _, s := range sources {
		n.source(s)
	}
	return nil
}

func (n *needs) source(s liveness.SourceGrants) {
	n.grants, n.notes = append(n.grants, s.Grants...), append(n.notes, s.Notes...)
	if s.Unseen != "" {
		n.unseen = append(n.unseen, fmt.Sprintf("not all that source %s of pool %s takes can be seen: %s", s.Source.Name, n.pool.cfg.Name, s.Unseen))
	}
}

func (n *needs) enforces() bool { return n.pool.cfg.Mode == config.ModeEnforce }

func (n *needs) askTiers(ctx context.Context, tx pgx.Tx) ([]*postgres.Table, error) {
	tiers, found, err := resolveTiers(n.pool, func(t config.Tier) (*postgres.Table, finding.List, error) {
		n.grants = append(n.grants, postgresConfig(t).Grants(n.enforces())...)
		return postgres.Resolve(ctx, tx, postgresConfig(t), n.enforces())
	})
	if err != nil {
		return nil, err
	}
	for _, f := range found {
		if f.Severity == finding.Misconfigured {
			n.unseen = append(n.unseen, f.String())
		}
	}
	for _, t := range tiers {
		if !n.enforces() {
			break
		}
		triggers, err := t.CallersTriggers(ctx, tx)
		if err != nil {
			return nil, err
		}
		for _, trigger := range triggers {
			n.notes = append(n.notes, "trigger "+trigger+" runs with the rights of whoever deletes: what it does isn't listed and has to be granted too")
		}
	}
	return tiers, nil
}

func (n *needs) askOwn(ctx context.Context, tx pgx.Tx, database string, tiers []*postgres.Table) error {
	cfg := n.pool.cfg
	own, err := lookUpOwn(ctx, tx, cfg.Schema)
	if err != nil {
		return err
	}
	n.grants = append(n.grants, own.grants(cfg, database)...)
	if !cfg.Fleet || !n.enforces() || !own.pins {
		return nil
	}
	there, err := fleet.CheckFunctions(ctx, tx, cfg.Schema, pinTiers(tiers))
	if errors.Is(err, fleet.ErrForeignFunction) {
		n.notes = append(n.notes, err.Error())
		return nil
	}
	if err == nil && !there {
		n.notes = append(n.notes, "the functions to pin by are missing from schema "+cfg.Schema+
			", or differ: where its tables aren't the role's, their owner runs what `gc-agent schema sql "+cfg.Name+"` prints")
	}
	return err
}

// stand adds to each right whether the role has it.
func (n *needs) stand(ctx context.Context, tx pgx.Tx, role pgdb.Grantee, d *DatabaseGrants) error {
	standings, err := role.Standings(ctx, tx, n.grants)
	if err != nil {
		return err
	}
	d.Name, d.Role, d.Notes = role.Database, role.Name, n.notes
	for i, g := range n.grants {
		if s := standings[i]; s.Owned && s.Held {
			d.Notes = addNew(d.Notes, role.SQL+" owns "+g.On.String()+" and needs no grant there")
			continue
		}
		d.Grants = append(d.Grants, roleGrant(g, role.SQL, !standings[i].Held))
	}
	if role.OID == 0 {
		d.Notes = append(d.Notes, "there is no role "+role.SQL+" yet: CREATE ROLE "+role.SQL+" LOGIN")
	}
	hidden, err := role.Hidden(ctx, tx, n.grants)
	for _, table := range hidden {
		d.Notes = append(d.Notes, "row-level security may hide rows of "+table+" from "+role.SQL+
			", and then stops every sweep; run: ALTER ROLE "+role.SQL+" BYPASSRLS")
	}
	return err
}

func roleGrant(g pgdb.Grant, role string, missing bool) RoleGrant {
	return RoleGrant{Statement: g.To(role), Why: g.Why, Missing: missing, Optional: g.Optional, grant: g}
}

// guess takes from the configuration what it shows. The agent's own tables are
// taken for not made yet.
func (n *needs) guess(db *pgdb.DB, role string, d *DatabaseGrants) {
	user, database := db.Login()
	if role == "" {
		role = user
	}
	n.connect(database)
	if n.database == n.pool.cfg.Host {
		for _, t := range n.pool.cfg.Blobs {
			n.grants = append(n.grants, postgresConfig(t).Grants(n.enforces())...)
		}
		n.grants = append(n.grants, ownState{}.grants(n.pool.cfg, database)...)
	}
	for _, s := range n.pool.sourcesIn(n.database) {
		n.source(liveness.ConfiguredGrants(s))
	}
	d.Name, d.Role = database, role
	for _, g := range n.grants {
		d.Grants = append(d.Grants, roleGrant(g, pgdb.Ident(role), true))
	}
}

// denied returns what says which rights reading a source takes that the role
// lacks. It has a connection of its own: the transaction that met the refusal can
// only read.
func (p *Pool) denied(db *pgdb.DB, targets []liveness.Target) func(context.Context, liveness.Source) string {
	return func(ctx context.Context, src liveness.Source) (statements string) {
		err := rolledBack(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
			role, err := pgdb.LookupGrantee(ctx, tx, "")
			if err != nil {
				return err
			}
			grants, err := liveness.PostgresGrants(ctx, tx, liveness.Options{Kind: p.Kind()}, []liveness.Source{src}, targets)
			if err != nil {
				return err
			}
			missing, err := role.Missing(ctx, tx, grants[0].Grants)
			statements = role.Statements(missing)
			return err
		})
		if err != nil {
			return "" // the refusal is reported with or without the way out
		}
		return statements
	}
}

// filePermissions says what an SQLite file takes, whose rights are the file
// system's.
func (p *Pool) filePermissions(name, path string) DatabaseGrants {
	d := DatabaseGrants{Database: name, Engine: config.SQLite, Name: path}
	dir := filepath.Dir(path)
	d.Notes = []string{
		"the agent's user has to read and write " + path + ": to read a database in WAL mode is to write too, to the file -shm beside it",
	}
	if p.cfg.Mode != config.ModeEnforce {
		d.Notes[0] = "the agent's user has to read " + path + "; in WAL mode it has to read and write the files -wal and -shm beside it too, and to make them in " + dir + " where they aren't"
		return d
	}
	d.Notes = append(d.Notes, "it has to make and remove files in "+dir+": the journal (-journal, -wal, -shm)")
	if name == p.cfg.Host {
		d.Notes[1] += " and its lock, " + filepath.Base(path) + ".gc-agent.lock"
	}
	return d
}
