package liveness

import (
	"context"
	"strings"

	"github.com/alkblobs/gc-agent/internal/finding"
)

// What each guard leaves open.
const (
	openForeignKey = "references written while the foreign key's triggers are off (session_replication_role, ALTER TABLE ... DISABLE TRIGGER)"
	openTrigger    = "references written while the trigger is disabled, or by an ALTER TABLE that rewrites the table, and blobs that somebody other than the agent deletes"
	openAttached   = "; rows of a table that is attached as a partition"
	openTableLock  = "a writer that waits for the lock goes on after the delete, and leaves its reference dangling without an error"
	openQuery      = "; what the query finds without a write, because time has passed, say"
	openSettle     = "a reference whose transaction starts writing after the wait and commits after the check"
)

// resolveGuard gives the source the guard that it asks for, or the strongest that
// is found: a foreign key, else a trigger. Where only settle is left, somebody has
// to have said that it is enough.
func (r *pgResolver) resolveGuard(ctx context.Context, s *pgSource) error {
	defer s.leaveSpellingsOpen()
	gap, remedy := r.gap(s)
	if gap == "" && (s.Guard == Auto || s.Guard == ForeignKey) {
		s.guard, s.open = ForeignKey, openForeignKey
		s.close = "never switching them off"
		return r.openToSubscriptions(ctx, s, ", which fire no foreign key")
	}
	if err := r.resolveTrigger(ctx, s); err != nil {
		return err
	}
	if s.close = s.closes(gap, r.opts.Pool); r.opts.Elsewhere {
		s.close = "moving the rows into the blobs' database; or a pin that the writer takes first"
	}
	switch {
	case s.trigger.guards() && (s.Guard == Auto || s.Guard == Trigger):
		s.guard, s.open = Trigger, openTrigger
		s.close = "a foreign key, where the values are keys as they are"
		if s.rel.Kind == "p" {
			s.open += openAttached
		}
		return r.openToSubscriptions(ctx, s, ": they fire the trigger too, and one that it refuses stops the subscription")
	case s.Guard == TableLock && !r.opts.AnyGuard:
		return r.resolveTableLock(ctx, s)
	}
	s.guard, s.open = Settle, openSettle
	if r.opts.AnyGuard || s.Guard == Settle || s.Guard == Auto && !r.opts.Enforce {
		return nil
	}
	if s.Guard == Trigger {
		gap, remedy = "", ""
	}
	if !r.opts.Elsewhere {
		gap, remedy = s.addTrigger(gap, remedy, r.opts.Pool)
	}
	r.found.Add(finding.Misconfigured, s.Path+".guard", "source %s (%s) %s, so only guard settle is left, which misses %s; %swrite guard: settle", s.Name, s.what(), gap, s.open, remedy)
	return nil
}

// addTrigger adds to what there is instead of a foreign key, and what would change
// that, the same of a trigger.
func (s *pgSource) addTrigger(gap, remedy, pool string) (string, string) {
	t := &s.trigger
	var there string
	switch {
	case t.guards():
		return gap, remedy + "write guard: trigger, whose trigger is there, or "
	case t.why != "" && s.Query != "":
		there = "can have no guard trigger, as a query"
	case t.why != "":
		there = "can have no guard trigger (" + t.why + ")"
	case t.found.oid == 0:
		there = "has no guard trigger"
	default:
		there = "isn't guarded by trigger " + t.name + " (" + t.found.gap + ")"
	}
	if t.why == "" {
		remedy += "run " + installCommand(pool, s.Name) + " (guard sql prints what it does), or "
	}
	if gap != "" {
		gap += " and "
	}
	return gap + there, remedy
}

// closes says what would close what the guard leaves open.
func (s *pgSource) closes(gap, pool string) string {
	var ways []string
	switch {
	case s.trigger.why == "" && s.trigger.guards():
		ways = append(ways, "guard: trigger, whose trigger is there")
	case s.trigger.why == "":
		ways = append(ways, installCommand(pool, s.Name))
	case s.Query != "":
		ways = append(ways, "registering the tables that the query reads, each with a guard of its own")
	}
	switch {
	case gap == "":
		ways = append(ways, "guard: foreign_key, whose foreign key is there")
	case s.rel != nil && s.foreignKey == nil && s.trigger.why == "":
		ways = append(ways, "a foreign key to the blobs' table, where the values are keys as they are")
	case s.foreignKey != nil && s.foreignKey.gap != "":
		ways = append(ways, "foreign key "+s.foreignKey.constraint+", once that is changed: "+s.foreignKey.gap)
	}
	if len(ways) == 0 {
		return "a pin that the writer takes first"
	}
	return strings.Join(ways, "; or ")
}

func installCommand(pool, source string) string {
	return strings.Join(strings.Fields("gc-agent guard install "+pool+" --source "+source), " ")
}

// openToSubscriptions adds what a subscription of logical replication applies.
func (r *pgResolver) openToSubscriptions(ctx context.Context, s *pgSource, how string) error {
	names, err := r.subscriptions(ctx, s)
	if names != "" {
		s.open += "; rows that subscription " + names + " applies" + how
	}
	return err
}

// leaveSpellingsOpen adds what a look-up by key doesn't find.
func (s *pgSource) leaveSpellingsOpen() {
	if s.guard != Trigger && s.missesSpellings() { // which the trigger refuses
		s.open += "; a value in another spelling that is written while a sweep runs"
	}
}

// what names what the source reads.
func (s *pgSource) what() string {
	if s.rel == nil {
		return "a query"
	}
	return s.rel.String() + "." + s.col.Name
}

// gap says of the source why no foreign key guards it, and what would change
// that; it is empty when one does.
func (r *pgResolver) gap(s *pgSource) (gap, remedy string) {
	switch {
	case r.opts.Elsewhere:
		return "refers to blobs in another database, where no foreign key leads", ""
	case s.Query != "":
		return "has no foreign key", "register the table that has one, or "
	case s.foreignKey == nil:
		return "has no foreign key to a tier's table", "add a foreign key from the column to the blobs' table, or "
	case s.foreignKey.gap != "":
		return "isn't guarded by foreign key " + s.foreignKey.constraint + " (" + s.foreignKey.gap + ")", "change that, or "
	case s.rel.Kind == "r" && len(s.parts) > 1:
		return "isn't guarded by foreign key " + s.foreignKey.constraint + ", which doesn't hold for the tables that inherit from " + s.rel.String(), "change that, or "
	default:
		return "", ""
	}
}
