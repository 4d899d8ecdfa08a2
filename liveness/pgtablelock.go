package liveness

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/alkblobs/gc-agent/internal/finding"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// pgLock is a table that the guard table_lock locks, with all that stores rows of
// it.
type pgLock struct {
	oid  uint32
	name string // quoted and qualified
	on   pgdb.Object
}

// resolveTableLock finds out which tables have to be locked, and whether the role
// may. A table that a function reads nobody can know.
func (r *pgResolver) resolveTableLock(ctx context.Context, s *pgSource) error {
	path := s.Path + ".guard"
	s.guard, s.open = TableLock, openTableLock
	if s.Query != "" {
		s.open += openQuery
	}
	if r.opts.Elsewhere {
		r.found.Add(finding.Misconfigured, path, "a lock on a table of another database isn't held by the transaction that deletes; write guard: settle")
		return nil
	}
	if s.rel != nil {
		why, err := r.mutable(ctx, s)
		if err != nil {
			return err
		}
		if why != "" {
			r.found.Add(finding.Misconfigured, path, "no lock keeps source %s from referring to more: %s; write guard: settle", s.Name, why)
			return nil
		}
	}
	hidden, err := r.resolveLocks(ctx, s)
	switch {
	case pgdb.Code(err) == pgdb.InsufficientPrivilege:
		return nil // which is found out, and reported, with the look-up
	case err != nil:
		return err
	case hidden != "":
		r.found.Add(finding.Misconfigured, path, "source %s calls %s, and nobody can tell which tables that reads and would have to be locked; register the tables, or write guard: settle", s.Name, hidden)
		return nil
	case !r.opts.Enforce:
		return nil // nothing is ever locked
	}
	return r.checkLockRights(ctx, s)
}

// What a plan calls of somebody's own, by a name that is qualified, since the
// agent has no search_path; and what of the server's reads tables by their names.
var readsBehindRE = regexp.MustCompile(`OPERATOR\(|(?:"(?:[^"]|"")+"|\w+)\.(?:"(?:[^"]|"")+"|\w+)\(|\b\w+_to_xml\w*\(|\bts_(?:stat|rewrite)\(`)

// resolveLocks takes from the server which tables the source reads: those that it
// locks to plan the statement, which has views and functions written out as far
// as they are seen through. hidden names a function that isn't.
func (r *pgResolver) resolveLocks(ctx context.Context, s *pgSource) (hidden string, err error) {
	from := s.rows()
	if s.rel != nil {
		from = "(SELECT " + s.column() + " FROM " + from + ") q"
	}
	var plan []string
	var cast string
	var reads []pgRead
	err = r.aside(ctx, func(sub pgx.Tx) error {
		rows, err := sub.Query(ctx, "EXPLAIN (VERBOSE, COSTS OFF) SELECT * FROM "+from)
		if err != nil {
			return err
		}
		if plan, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return err
		}
		if cast, err = castBehind(ctx, sub, strings.Join(plan, "\n")); err != nil {
			return err
		}
		if rows, err = sub.Query(ctx, selectReads); err != nil {
			return err
		}
		reads, err = pgx.CollectRows(rows, pgx.RowToStructByPos[pgRead])
		return err
	})
	if err != nil {
		return "", fmt.Errorf("look for the tables to lock: %w", err)
	}
	for _, read := range reads {
		lock := pgLock{read.OID, pgdb.Ident(read.Schema, read.Name), pgdb.OnTable(read.Schema, read.Name)}
		if (read.Kind == "r" || read.Kind == "p") && !slices.Contains(s.locks, lock) {
			s.locks = append(s.locks, lock)
		}
	}
	if hidden = strings.TrimSuffix(readsBehindRE.FindString(strings.Join(plan, "\n")), "("); hidden == "" {
		hidden = cast
	}
	return hidden, nil
}

// A plan shows of a cast the type alone, and of an implicit one nothing. A type's name
// may have its modifier inside. What is written in C is an extension's, which has
// casts between its own types and reads no tables.
const selectCasts = `
SELECT coalesce(min(format('%I.%I', n.nspname, p.proname)), '')
FROM pg_catalog.pg_cast k
JOIN pg_catalog.pg_proc p ON p.oid = k.castfunc
JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
JOIN pg_catalog.pg_language l ON l.oid = p.prolang
JOIN pg_catalog.pg_type t ON t.oid = k.casttarget
WHERE n.nspname <> 'pg_catalog' AND l.lanname NOT IN ('c', 'internal') AND (k.castcontext = 'i'
	OR strpos($1, '::' || split_part(split_part(format_type(t.oid, NULL), ' ', 1), '[', 1)) > 0 OR strpos($1, '::' || t.typname) > 0)`

// constantRE is a constant of a plan, with its type, which isn't cast any more.
var constantRE = regexp.MustCompile(`'(?:[^']|'')*'::`)

// castBehind names the function of somebody's own that a cast in the plan may call.
func castBehind(ctx context.Context, q pgdb.Querier, plan string) (function string, err error) {
	err = q.QueryRow(ctx, selectCasts, constantRE.ReplaceAllString(plan, "")).Scan(&function)
	return function, err
}

// lockGrants are what it takes to lock the tables. SHARE asks for one of several
// rights; MAINTAIN, since Postgres 17, is the least of them.
func (r *pgResolver) lockGrants(ctx context.Context, s *pgSource) ([]pgdb.Grant, error) {
	const query = "SELECT CASE WHEN current_setting('server_version_num')::int >= 170000 THEN 'MAINTAIN' ELSE 'UPDATE' END"
	var right string
	if err := r.q.QueryRow(ctx, query).Scan(&right); err != nil {
		return nil, fmt.Errorf("look for the right to lock tables: %w", err)
	}
	grants := make([]pgdb.Grant, len(s.locks))
	for i, lock := range s.locks {
		grants[i] = pgdb.Grant{Right: right, On: lock.on, Why: "lock what source " + s.Name + " reads against writers, for the time of a batch", Verb: "lock"}
	}
	return grants, nil
}

const selectLockable = `
SELECT l.oid FROM unnest($1::oid[]) AS l (oid)
WHERE has_table_privilege(l.oid, CASE WHEN current_setting('server_version_num')::int >= 170000
	THEN 'UPDATE, DELETE, TRUNCATE, MAINTAIN' ELSE 'UPDATE, DELETE, TRUNCATE' END)`

func (r *pgResolver) checkLockRights(ctx context.Context, s *pgSource) error {
	grants, err := r.lockGrants(ctx, s)
	if err != nil {
		return err
	}
	oids := make([]uint32, len(s.locks))
	for i, lock := range s.locks {
		oids[i] = lock.oid
	}
	rows, err := r.q.Query(ctx, selectLockable, oids)
	if err != nil {
		return fmt.Errorf("look for the right to lock tables: %w", err)
	}
	lockable, err := pgx.CollectRows(rows, pgx.RowTo[uint32])
	if err != nil {
		return fmt.Errorf("look for the right to lock tables: %w", err)
	}
	var missing []pgdb.Grant
	for i, lock := range s.locks {
		if !slices.Contains(lockable, lock.oid) {
			missing = append(missing, grants[i])
		}
	}
	for _, line := range r.role.Lacks(missing) {
		r.found.Add(finding.Unreadable, s.Path, "%s", line)
	}
	return nil
}

// LockTables locks the tables of the sources whose guard is table_lock against
// writers, for the rest of the transaction, each with its partitions and what
// inherits from it. They are locked in the order of their names, so that two who do
// so don't wait for each other; it belongs before every other lock of the
// transaction. A writer that has begun to write is waited for, for lock_timeout at
// most. A non-empty holdup says which table couldn't be had, and who has it; the
// transaction goes on then, with the locks that were had.
func (p *Postgres) LockTables(ctx context.Context, tx pgx.Tx) (holdup string, err error) {
	var locks []pgLock
	for i := range p.sources {
		if s := &p.sources[i]; s.guard == TableLock {
			locks = append(locks, s.locks...)
		}
	}
	slices.SortFunc(locks, func(a, b pgLock) int { return strings.Compare(a.name, b.name) })
	for _, lock := range slices.Compact(locks) {
		// In a savepoint, because not to get a lock is an error to Postgres.
		err := pgx.BeginFunc(ctx, tx, func(sub pgx.Tx) error {
			_, err := sub.Exec(ctx, "LOCK TABLE "+lock.name+" IN SHARE MODE")
			return err
		})
		if pgdb.Code(err) == pgdb.LockNotAvailable {
			return heldUpBy(ctx, tx, lock)
		}
		if err != nil {
			return "", fmt.Errorf("lock table %s: %w", lock.name, err)
		}
	}
	return "", nil
}

// selectHolders reads who has a lock that SHARE doesn't go with, or waits for one
// before it.
const selectHolders = `
WITH RECURSIVE tree AS (
	SELECT $1::oid AS oid
	UNION
	SELECT i.inhrelid FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid
)
SELECT coalesce(string_agg(DISTINCT coalesce('pid ' || l.pid || coalesce(' (' || a.usename || ', ' || nullif(a.application_name, '') || ')', ''), 'a prepared transaction'), ', '), '')
FROM pg_catalog.pg_locks l
JOIN tree ON tree.oid = l.relation
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()
	AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
	AND l.mode IN ('RowExclusiveLock', 'ShareUpdateExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')`

func heldUpBy(ctx context.Context, tx pgx.Tx, lock pgLock) (string, error) {
	var who string
	if err := tx.QueryRow(ctx, selectHolders, lock.oid).Scan(&who); err != nil {
		return "", fmt.Errorf("look who holds %s: %w", lock.name, err)
	}
	if who == "" {
		who = "somebody who has ended by now"
	}
	return fmt.Sprintf("table_lock: %s can't be locked within lock_timeout, %s writes to it", lock.name, who), nil
}
