package liveness

import (
	"context"
	"errors"
	"fmt"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// pgTrigger is the trigger that guards a source: what it has to be, and what of
// it the catalogue has.
type pgTrigger struct {
	// why says of the source why no trigger can guard it; the rest is empty then.
	why string

	name     string // of the trigger and of its function
	schema   string // of the function
	owner    string // of the table, and of the function; quoted
	settings []string
	bodies   map[triggerForm]string // of the function

	found triggerState
}

// triggerForm is one of the forms that the trigger of a source can have.
type triggerForm struct {
	deferrable bool
	// strict says that it refuses a spelling that a look-up by key doesn't find. It
	// has to where there is one, and does no harm where there is none any more.
	strict bool
}

// triggerState is a trigger as the catalogue has it.
type triggerState struct {
	oid uint32 // 0: there is none
	triggerForm
	gap string // why it stops no reference from appearing; empty when it does
}

// guards says that the trigger is there, and complete.
func (t *pgTrigger) guards() bool { return t.found.oid != 0 && t.found.gap == "" }

// triggerName names it for messages.
func (s *pgSource) triggerName() string { return "trigger " + s.trigger.name + " of " + s.rel.String() }

// resolveTrigger finds out whether a trigger could guard the source, what it
// would be, and what is there of it.
func (r *pgResolver) resolveTrigger(ctx context.Context, s *pgSource) error {
	t := &s.trigger
	var err error
	if t.why, err = r.untriggerable(ctx, s); err != nil || t.why != "" {
		return err
	}
	t.schema, t.name = r.opts.Schema, TriggerName(r.opts.Schema, s.Name)
	const owner = "SELECT pg_catalog.quote_ident(pg_get_userbyid(c.relowner)) FROM pg_catalog.pg_class c WHERE c.oid = $1"
	if err := r.q.QueryRow(ctx, owner, s.rel.OID).Scan(&t.owner); err != nil {
		return fmt.Errorf("look for the owner of %s: %w", s.rel, err)
	}
	t.settings = s.triggerSettings()
	t.bodies = map[triggerForm]string{}
	for _, deferrable := range []bool{false, true} {
		for _, strict := range []bool{false, true} {
			form := triggerForm{deferrable, strict}
			t.bodies[form] = s.triggerBody(r.opts.Kind, r.targets, form)
		}
	}
	t.found, err = s.findTrigger(ctx, r.q)
	return err
}

// untriggerable says why no trigger can guard the source, or nothing.
func (r *pgResolver) untriggerable(ctx context.Context, s *pgSource) (string, error) {
	switch placeholder := s.format.Placeholder(); {
	case r.opts.Elsewhere:
		return "the blobs are in another database", nil
	case len(r.targets) == 0:
		return "there is no table of blobs", nil
	case s.Query != "":
		return "it is a query; register the tables that it reads", nil
	case !s.rel.IsTable():
		return s.rel.String() + " is a view; register the tables that it reads", nil
	case s.joined():
		return "its values aren't keys", nil
	case placeholder == 0:
		return "its format isn't right", nil
	case s.rel.Kind == "r" && len(s.parts) > 1:
		return "tables inherit from " + s.rel.String() + ", and rows of theirs fire no trigger of it", nil
	case r.opts.Kind == blob.KindText && (placeholder == blob.UUID || placeholder == blob.Int):
		return "a key of the blobs' table is text, which spells a uuid or an integer in several ways; make it a uuid or an integer", nil
	}
	virtual, err := r.hasVirtualColumns(ctx, s)
	switch {
	case err != nil:
		return "", err
	case virtual:
		return "a trigger can't see virtual generated columns", nil
	}
	return r.mutable(ctx, s)
}

const mutableWhere = "its where can turn true without a write to the row: it isn't made of the row's own columns and immutable functions alone"

// mutable says of the source's where why it can turn true by itself, or nothing.
func (r *pgResolver) mutable(ctx context.Context, s *pgSource) (why string, err error) {
	if word := clockWord(s.and()); word != "" {
		return "its where can turn true without a write to the row: " + word + " in a literal may be the time at which it is read", nil
	}
	immutable, err := r.immutableWhere(ctx, s)
	if err == nil && !immutable {
		why = mutableWhere
	}
	return why, err
}

// attgenerated is v since Postgres 18 only.
const selectVirtual = `
SELECT EXISTS (
	SELECT FROM pg_catalog.pg_attribute a
	WHERE a.attrelid = $1 AND a.attgenerated = 'v' AND NOT a.attisdropped AND (a.attnum = $2 OR $3))`

func (r *pgResolver) hasVirtualColumns(ctx context.Context, s *pgSource) (virtual bool, err error) {
	if err := r.q.QueryRow(ctx, selectVirtual, s.rel.OID, s.col.Num, s.and() != "").Scan(&virtual); err != nil {
		return false, fmt.Errorf("look for virtual columns of %s: %w", s.rel, err)
	}
	return virtual, nil
}

// immutableWhere says whether the server takes the source's where to depend on
// nothing but the row. The planner leaves a scan out whose conditions contradict
// each other, but dares to only if they call nothing that isn't immutable: a plan
// without the scan is its word for it. A condition that it can't see through is
// taken not to be. A column of the system's, such as tableoid, is none of the
// row's.
func (r *pgResolver) immutableWhere(ctx context.Context, s *pgSource) (bool, error) {
	if s.and() == "" {
		return true, nil
	}
	where := "(" + s.Where + "\n)"
	_, err := r.describe(ctx, "SELECT 1 FROM (SELECT s.* FROM "+s.rel.SQL()+" s) s WHERE "+where)
	if err != nil {
		if pgdb.Code(err) == "" && !errors.Is(err, errParameters) {
			return false, err
		}
		return false, nil
	}
	var plan []struct {
		Plan struct {
			Filter string `json:"One-Time Filter"`
		}
	}
	err = r.aside(ctx, func(sub pgx.Tx) error {
		if _, err := sub.Exec(ctx, "SET LOCAL constraint_exclusion = on"); err != nil {
			return err
		}
		return sub.QueryRow(ctx, "EXPLAIN (FORMAT JSON) SELECT 1 FROM "+s.rel.SQL()+" s WHERE "+where+" AND "+where+" IS NOT TRUE").Scan(&plan)
	})
	if pgdb.Code(err) == pgdb.InsufficientPrivilege {
		return false, nil // which is found out, and reported, with the look-up
	}
	if err != nil {
		return false, fmt.Errorf("plan the where of source %s: %w", s.Name, err)
	}
	return len(plan) == 1 && plan[0].Plan.Filter == "false", nil
}

// triggerSettings returns what the function sets for itself. A literal in where is
// read by the settings of whoever writes, and would mean another instant, say, in
// another time zone than the agent's.
func (s *pgSource) triggerSettings() []string {
	settings := []string{"search_path=pg_catalog, pg_temp", "row_security=off"}
	if s.and() != "" {
		settings = append(settings, pgdb.ReadSettings()...)
	}
	return settings
}

// A tgtype of 21 is AFTER INSERT OR UPDATE, FOR EACH ROW. A partition has a clone of
// its parent's trigger. A function that isn't the owner's could become another one between
// two looks, or run what the owner wants with the rights of somebody else.
const selectTrigger = `
WITH RECURSIVE root AS (
	SELECT g.* FROM pg_catalog.pg_trigger g WHERE g.tgrelid = $1 AND g.tgname = $2
), clones AS (
	SELECT g.oid, g.tgrelid, g.tgenabled FROM root JOIN pg_catalog.pg_trigger g ON g.tgparentid = root.oid
	UNION ALL
	SELECT g.oid, g.tgrelid, g.tgenabled FROM clones c JOIN pg_catalog.pg_trigger g ON g.tgparentid = c.oid
), parts AS (
	SELECT i.inhrelid AS oid FROM pg_catalog.pg_inherits i WHERE i.inhparent = $1
	UNION
	SELECT i.inhrelid FROM parts p JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
)
SELECT g.oid, g.tgdeferrable,
	g.tgenabled = 'A',
	g.tgtype = 21 AND g.tgattr::text = '' AND g.tgqual IS NULL AND g.tgnargs = 0 AND g.tgoldtable IS NULL AND g.tgnewtable IS NULL,
	n.nspname = $3 AND p.proname = $2 AND l.lanname = 'plpgsql' AND p.prosecdef
		AND coalesce(p.proconfig, '{}') = $4::text[],
	p.prosrc,
	p.proowner = c.relowner,
	coalesce((
		SELECT min(parts.oid::regclass::text) FROM parts
		WHERE NOT EXISTS (SELECT FROM clones WHERE clones.tgrelid = parts.oid AND clones.tgenabled = 'A')), '')
FROM root g
JOIN pg_catalog.pg_class c ON c.oid = g.tgrelid
JOIN pg_catalog.pg_proc p ON p.oid = g.tgfoid
JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
JOIN pg_catalog.pg_language l ON l.oid = p.prolang`

// findTrigger looks the source's trigger up, and judges it.
func (s *pgSource) findTrigger(ctx context.Context, q pgdb.Querier) (found triggerState, err error) {
	t := &s.trigger
	var always, fires, same, ours bool
	var body, bypass string
	err = q.QueryRow(ctx, selectTrigger, s.rel.OID, t.name, t.schema, t.settings).
		Scan(&found.oid, &found.deferrable, &always, &fires, &same, &body, &ours, &bypass)
	if errors.Is(err, pgx.ErrNoRows) {
		return triggerState{}, nil
	}
	if err != nil {
		return triggerState{}, fmt.Errorf("look for the guard trigger of %s: %w", s.rel, err)
	}
	found.strict = body == t.bodies[triggerForm{found.deferrable, true}]
	same = same && (found.strict || !s.missesSpellings() && body == t.bodies[triggerForm{found.deferrable, false}])
	switch {
	case !always:
		found.gap = "it isn't ENABLE ALWAYS"
	case !fires:
		found.gap = "it doesn't fire for every row that is inserted or updated"
	case !same:
		found.gap = "its function isn't the one that this configuration asks for"
	case !ours:
		found.gap = "its function belongs to somebody else than the table"
	case bypass != "":
		found.gap = "rows of " + bypass + " don't fire it"
	}
	return found, nil
}

// changedTriggers returns the names of guard triggers that aren't what they were.
func (p *Postgres) changedTriggers(ctx context.Context, q pgdb.Querier) ([]string, error) {
	var changed []string
	for i := range p.sources {
		s := &p.sources[i]
		if s.guard != Trigger {
			continue
		}
		now, err := s.findTrigger(ctx, q)
		if err != nil {
			return nil, err
		}
		if now != s.trigger.found {
			changed = append(changed, s.triggerName())
		}
	}
	return changed, nil
}

// selectSubscriptions reads what anybody may of the subscriptions to a table.
const selectSubscriptions = `
SELECT coalesce(string_agg(DISTINCT s.subname::text, ', '), '')
FROM pg_catalog.pg_subscription_rel r JOIN pg_catalog.pg_subscription s ON s.oid = r.srsubid
WHERE r.srrelid = ANY ($1::oid[])`

// subscriptions names the subscriptions that apply rows to the source's tables.
func (r *pgResolver) subscriptions(ctx context.Context, s *pgSource) (names string, err error) {
	oids := make([]uint32, len(s.parts))
	for i, part := range s.parts {
		oids[i] = part.OID
	}
	if err := r.q.QueryRow(ctx, selectSubscriptions, oids).Scan(&names); err != nil {
		return "", fmt.Errorf("look for subscriptions to %s: %w", s.rel, err)
	}
	return names, nil
}
