package liveness

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/internal/pgdb"

	"github.com/jackc/pgx/v5"
)

// Target is a tier's table in the same database: the foreign keys that point at
// it are references, whether somebody registered them or not.
type Target struct {
	Relation *pgdb.Relation
	Key      pgdb.Column
}

// Postgres is the liveness sources of one Postgres database, resolved against
// its catalogue. It holds no connection and is good until the catalogue changes,
// which Changed tells.
type Postgres struct {
	kind        blob.Kind
	pool        string
	sources     []pgSource
	targets     []Target
	foreignKeys []foreignKey // to the targets
}

// pgSource is one resolved source.
type pgSource struct {
	Source
	format blob.Format
	value  valueType

	// Of a table source.
	rel        *pgdb.Relation
	col        pgdb.Column
	parts      []pgdb.Part // of rel
	wholeRows  bool        // the role may read every column
	readsCTID  bool        // it may read where a row stands
	foreignKey *foreignKey
	held       bool // a foreign key holds rows of it, whatever where says
	lowerIndex bool // the expression index over lower(column) is there
	indexed    bool

	reads   []pgRead // what its SQL reads; nothing of a plain table
	scanned bool     // values are decoded, every one, instead of probed
	guard   Guard
	open    string
	close   string    // what would close it
	trigger pgTrigger // unless a foreign key guards it
	locks   []pgLock  // what guard table_lock locks
}

// Sources describes the sources in the order of Answer.Source.
func (p *Postgres) Sources() []Info {
	infos := make([]Info, len(p.sources))
	for i := range p.sources {
		infos[i] = p.sources[i].info()
	}
	return infos
}

func (s *pgSource) info() Info {
	probe := "probed by key"
	switch {
	case s.scanned:
		probe = "scanned"
	case s.joined():
		probe = "joined through " + s.foreignKey.target.Relation.String() + " (" + strings.Join(s.foreignKey.to, ", ") + ")"
	case s.lowerIndex:
		probe = "probed by lower(" + s.col.Name + ")"
	}
	return Info{
		Path: s.Path, Name: s.Name, Guard: s.guard, LeavesOpen: s.open, WouldClose: s.close,
		Probe: probe, Indexed: s.indexed, AllowEmpty: s.AllowEmpty,
	}
}

// joined says that the source refers through other columns of the blobs' table
// than the key.
func (s *pgSource) joined() bool { return s.foreignKey != nil && !s.foreignKey.direct }

// Len returns the number of sources.
func (p *Postgres) Len() int { return len(p.sources) }

// NeedsSettle says whether any source's guard is settle.
func (p *Postgres) NeedsSettle() bool {
	for i := range p.sources {
		if p.sources[i].guard == Settle {
			return true
		}
	}
	return false
}

// Scanned says whether any source is read whole by every statement.
func (p *Postgres) Scanned() bool {
	for i := range p.sources {
		if p.sources[i].scanned || !p.sources[i].indexed {
			return true
		}
	}
	return false
}

// KeyRef is a key column in a statement that the registry's predicates are
// built into.
type KeyRef struct {
	Expr string // native SQL, qualified with an alias other than s, v and q
	// Lo and Hi bound Expr, exclusive and inclusive: SQL of the key's type, or "".
	// A source in the same order is bounded as well, so that the two merge.
	Lo, Hi string
	// Collation is Expr's, for text keys.
	Collation uint32
}

// Unreferenced returns the predicate "no source refers to the key", to be pushed
// into a tier's statement on the same database.
func (p *Postgres) Unreferenced(k KeyRef) string {
	if len(p.sources) == 0 {
		// Nothing registered means that nothing is known to be dead.
		return "false"
	}
	parts := make([]string, len(p.sources))
	for i := range p.sources {
		s := &p.sources[i]
		parts[i] = "NOT " + s.refers(p.kind, k)
		if odd := s.oddlySpelt(p.kind, k); odd != "" {
			parts[i] += " AND NOT " + odd
		}
	}
	return strings.Join(parts, "\n\tAND ")
}

// oddlySpelt returns the condition that a key of text is a uuid or an integer in
// another spelling than the canonical one, which is what the source's values
// are compared in: upper case, leading zeros. The application takes such a key
// and the value for the same, so it is kept. "" where no key can be one.
func (s *pgSource) oddlySpelt(kind blob.Kind, k KeyRef) string {
	placeholder := s.format.Placeholder()
	if kind != blob.KindText || s.joined() || placeholder != blob.UUID && placeholder != blob.Int {
		return ""
	}
	bare := blob.DefaultFormat(placeholder.Kind())
	return "(" + fitsFormat(bare, k.Expr) + " AND NOT " + isCanonical(bare, k.Expr) + ")"
}

// refers returns an EXISTS over the source's rows that refer to the key.
func (s *pgSource) refers(kind blob.Kind, k KeyRef) string {
	return "EXISTS (SELECT 1 FROM " + s.matching(kind, k) + ")"
}

// matching returns FROM and WHERE for the rows that refer to the key.
func (s *pgSource) matching(kind blob.Kind, k KeyRef) string {
	canon := pgdb.Canon(kind, k.Expr)
	switch {
	case s.Query != "":
		if s.col.Base == "bpchar" && kind == blob.KindText && s.format.Placeholder() == blob.Text {
			// As in a table, the padding counts on neither side.
			value, _ := encode(s.format, s.value, kind, k.Expr)
			return s.rows() + " WHERE q.v = " + s.padded(value) + ` COLLATE pg_catalog."C"`
		}
		return s.rows() + " WHERE " + s.decoded() + " = " + canon
	case s.joined():
		t := s.foreignKey.target
		return s.rel.SQL() + " s JOIN " + t.Relation.SQL() + " v ON " + s.foreignKey.join() + " WHERE v." + pgdb.Ident(t.Key.Name) + " = " + k.Expr
	case s.scanned:
		return s.rows() + " WHERE " + s.decoded() + " = " + canon
	}
	value, _ := encode(s.format, s.value, kind, k.Expr) // resolve made sure that it can
	if s.lowerIndex {
		return s.rows() + " WHERE " + s.lower() + " = lower(" + s.collated(value, kind, k) + ")"
	}
	probe := s.column() + " = " + s.collated(s.padded(value), kind, k)
	if s.ordered(kind, k) {
		if k.Lo != "" {
			probe += " AND " + s.column() + " > " + k.Lo
		}
		if k.Hi != "" {
			probe += " AND " + s.column() + " <= " + k.Hi
		}
	}
	return s.rows() + " WHERE " + probe
}

// rows returns the FROM item s of the rows that count, q of a query's. where
// stands inside it: a volatile one beside the look-up would make the server run
// that once a key.
func (s *pgSource) rows() string {
	if s.Query != "" {
		return "(" + s.Query + "\n) q (v)"
	}
	if s.and() == "" {
		return s.rel.SQL() + " s"
	}
	return "(SELECT " + s.column() + " FROM " + s.rel.SQL() + " s WHERE true" + s.and() + ") s"
}

// collated gives value the collation of the source's column. Two collations of
// two columns can't be compared, and an index serves its own alone.
func (s *pgSource) collated(value string, kind blob.Kind, k KeyRef) string {
	has := uint32(pgdb.DefaultCollation) // that of what encode makes of other keys
	if kind == blob.KindText {
		has = k.Collation
	}
	if s.value != valueText || has == s.col.Collation {
		return value
	}
	return "(" + value + ") COLLATE " + s.col.CollationSQL
}

// padded compares char(n) as char(n), whose index is of no use for text.
// Trailing spaces don't count then, so that a few keys more are found.
func (s *pgSource) padded(value string) string {
	if s.col.Base != "bpchar" {
		return value
	}
	return value + "::pg_catalog.bpchar"
}

// ordered says whether the source's values sort as the keys do, so that a
// range of keys is a range of values.
func (s *pgSource) ordered(kind blob.Kind, k KeyRef) bool {
	if s.format.Prefix() != "" || s.format.Suffix() != "" {
		return false
	}
	switch kind {
	case blob.KindText:
		return s.format.Placeholder() == blob.Text && (s.col.Base == "text" || s.col.Base == "varchar") && s.col.Collation == k.Collation
	case blob.KindInt:
		return s.value == valueInt
	case blob.KindUUID:
		return s.value == valueUUID
	default:
		return s.value == valueBytes
	}
}

func (s *pgSource) column() string {
	if s.Query != "" {
		return "q.v"
	}
	return "s." + pgdb.Ident(s.col.Name)
}

// decoded is SQL for the canonical key that a row names, NULL where it names none.
func (s *pgSource) decoded() string { return decode(s.format, s.value, s.text(s.column())) }

// lower is the expression of the index that `check` prints for a column that
// may spell hex or uuid in either case.
func (s *pgSource) lower() string { return "lower(" + s.text(s.column()) + ")" }

// text casts a value that is read as text and isn't: char(n), name, an enum. A
// cast of text itself would be harmless, but hide the index from a reader.
func (s *pgSource) text(expr string) string {
	if s.value != valueText || s.col.Base == "text" || s.col.Base == "varchar" {
		return expr
	}
	return expr + "::text"
}

// and returns the source's where as a further condition. A row that a foreign
// key holds refers, whatever where says: it would stop the delete.
func (s *pgSource) and() string {
	if s.Where == "" || s.held {
		return ""
	}
	return " AND (" + s.Where + "\n)"
}

// any returns an EXISTS over all that the source refers to. Of what is scanned a
// value that names no key doesn't count: with a format that fits none of its
// values a source would seem full and protect nothing.
func (s *pgSource) any() string {
	if s.scanned {
		return s.anyKey()
	}
	return "EXISTS (SELECT 1 FROM " + s.referring() + ")"
}

// anyKey returns an EXISTS over all values that name a key. It may have to read
// the source to its end.
func (s *pgSource) anyKey() string {
	return "EXISTS (SELECT 1 FROM " + s.rows() + " WHERE " + s.decoded() + " IS NOT NULL)"
}

// referring returns FROM and WHERE for all rows of a table that refer to
// anything.
func (s *pgSource) referring() string {
	return s.rel.SQL() + " s WHERE " + s.column() + " IS NOT NULL" + s.and()
}

// Answers answers for keys, in their order, in one statement over all sources.
// The emptiness of a source is asked in that statement too: a table that was
// emptied since it was looked at keeps every key. A key that can't be one of the
// pool is an error that names it.
//
// In a transaction, where a source may read tables behind a function, the
// statement is asked twice, and a key is kept that either keeps. The function
// locks its tables only once the statement has its snapshot: one that waited
// there for a TRUNCATE finds the table empty, before the rows that the same
// transaction loaded again. The first statement's locks last, so that nothing
// can be truncated any more when the second takes its snapshot.
func (p *Postgres) Answers(ctx context.Context, q pgdb.Querier, keys []blob.Key) ([]Answer, error) {
	if len(keys) == 0 || len(p.sources) == 0 {
		return make([]Answer, len(keys)), nil // nothing registered keeps everything
	}
	param, err := pgdb.Array(p.kind, keys)
	if err != nil {
		return nil, fmt.Errorf("ask the liveness sources: %w", err)
	}
	answers, err := p.ask(ctx, q, param, len(keys))
	if _, inTx := q.(pgx.Tx); err == nil && inTx && p.readsBehind() {
		var again []Answer
		if again, err = p.ask(ctx, q, param, len(keys)); err == nil {
			keepEither(answers, again)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("ask the liveness sources: %w", err)
	}
	return answers, nil
}

// readsBehind says that a source's SQL may call a function that reads tables.
func (p *Postgres) readsBehind() bool {
	for i := range p.sources {
		if s := &p.sources[i]; s.rel == nil || !s.rel.IsTable() || s.and() != "" {
			return true
		}
	}
	return false
}

// keepEither replaces those answers that again keeps, and they don't.
func keepEither(answers, again []Answer) {
	for i := range answers {
		if answers[i].Verdict == Unreferenced {
			answers[i] = again[i]
		}
	}
}

func (p *Postgres) ask(ctx context.Context, q pgdb.Querier, param any, keys int) ([]Answer, error) {
	rows, err := q.Query(ctx, p.answersSQL(), param)
	if err != nil {
		return nil, err
	}
	t := newTally(keys)
	var ord, n int
	var kind string
	_, err = pgx.ForEachRow(rows, []any{&ord, &kind, &n}, func() error { return t.add(ord-1, kind, n) })
	if err != nil {
		return nil, err
	}
	return t.finish()
}

// keysFrom is the FROM item of a batch of keys, the statement's one parameter.
func keysFrom(kind blob.Kind) string {
	return "unnest($1::" + pgdb.Type(kind) + "[]) WITH ORDINALITY AS k (key, ord)"
}

var keyOfBatch = KeyRef{Expr: "k.key", Collation: pgdb.DefaultCollation}

// answersSQL is a union, not one row a key with a column a source: a source
// that is scanned is then joined once, instead of being scanned once a key.
func (p *Postgres) answersSQL() string {
	from := keysFrom(p.kind)
	var b strings.Builder
	fmt.Fprintf(&b, "SELECT 0::bigint, '%s', count(*)::int FROM %s", rowAsked, from)
	for i := range p.sources {
		s := &p.sources[i]
		if !s.AllowEmpty {
			fmt.Fprintf(&b, "\nUNION ALL SELECT 0, '%s', %d WHERE NOT %s", rowEmpty, i, s.any())
		}
		fmt.Fprintf(&b, "\nUNION ALL SELECT k.ord, '%s', %d FROM %s WHERE %s", rowRefers, i, from, s.refers(p.kind, keyOfBatch))
		if odd := s.oddlySpelt(p.kind, keyOfBatch); odd != "" {
			fmt.Fprintf(&b, "\nUNION ALL SELECT k.ord, '%s', %d FROM %s WHERE %s", rowRefers, i, from, odd)
		}
	}
	return b.String()
}

// AllowEmpty lets sources that Empty returned refer to nothing, without
// protecting every key by it.
func (p *Postgres) AllowEmpty(empty []Info) {
	for i := range p.sources {
		p.sources[i].allowEmpty(empty)
	}
}

// Empty reads every source, to its first row that refers to anything, and
// returns those that have none and aren't allowed to. Where values that name no
// key are ordinary, all of them being so is being empty. In a read-only transaction
// SQL of a source's that changes something is an error here.
func (p *Postgres) Empty(ctx context.Context, q pgdb.Querier) ([]Info, error) {
	var empty []Info
	for i := range p.sources {
		s := &p.sources[i]
		has, cond := false, s.any()
		if s.IgnoreUnparseable && !s.joined() {
			cond = s.anyKey()
		}
		if err := q.QueryRow(ctx, "SELECT "+cond).Scan(&has); err != nil {
			return nil, fmt.Errorf("read source %s: %w", s.Name, err)
		}
		if !has && !s.AllowEmpty {
			empty = append(empty, s.info())
		}
	}
	return empty, nil
}

// Changed returns what isn't as it was resolved: columns of the sources that
// were dropped, renamed, made anew or given another type, the same of what their
// SQL reads by name or through views (not of what a function of theirs reads),
// views of another definition, and foreign keys to the targets, and triggers that
// guard, that came, went or guard otherwise.
func (p *Postgres) Changed(ctx context.Context, q pgdb.Querier) ([]string, error) {
	var prints []pgdb.Fingerprint
	for i := range p.sources {
		if s := &p.sources[i]; s.rel != nil {
			prints = append(prints, pgdb.FingerprintOf(s.rel, s.col))
		}
	}
	changed, err := pgdb.Changed(ctx, q, prints)
	if err != nil {
		return nil, err
	}
	read, err := p.changedReads(ctx, q)
	if err != nil {
		return nil, err
	}
	now, err := readForeignKeys(ctx, q, p.targets)
	if err != nil {
		return nil, err
	}
	triggers, err := p.changedTriggers(ctx, q)
	if err != nil {
		return nil, err
	}
	return slices.Concat(changed, read, differing(p.foreignKeys, now), triggers), nil
}

// BadValue is a value that stops a sweep: it names no key, or names one in a
// spelling that a probe by key doesn't find.
type BadValue struct {
	Source Info
	Row    string // how to find it
	Value  string // shortened
	// Index is the statement that would make other spellings findable; empty when
	// there is none, and for a value that names no key at all.
	Index       string
	Unparseable bool
}

// String says what is wrong and what to do.
func (b BadValue) String() string {
	where := fmt.Sprintf("%s (source %s): the value %s in row %s", b.Source.Path, b.Source.Name, strconv.Quote(b.Value), b.Row)
	if b.Unparseable {
		return where + " doesn't fit the format; correct it, or set on_unparseable: ignore if such values refer to nothing"
	}
	msg := where + " isn't in the canonical spelling, so that a probe by key would miss it; correct it"
	if b.Index != "" {
		msg += ", or run: " + b.Index
	}
	return msg
}
