package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/pgdb"
)

// ErrNotKeeper means that this daemon doesn't have the mark of who keeps the pool's
// pins in memory, or has just lost it: nothing is known to be pinned. It tries again
// by itself.
var ErrNotKeeper = errors.New("this daemon can't answer for pins in memory right now")

const (
	// keepEvery is how often the daemon makes sure of its mark, beside every time that
	// it relies on it.
	keepEvery = 2 * time.Second
	// keepTimeout bounds one attempt, the connection included.
	keepTimeout = 5 * time.Second
)

// pinMark shows everybody else that this process keeps the pins of a pool in
// memory.
type pinMark interface {
	// held says whether this process certainly still has it.
	held(ctx context.Context) bool
	// release gives it back, within a short time.
	release()
}

// keepPins makes sure that this process has the mark, or, with retake, takes it,
// which belongs between two transactions. Epoch changes whenever it was taken anew:
// somebody else may have had it, so that all pins that were given before are broken.
// An error wraps ErrNotKeeper.
func (p *Pool) keepPins(ctx context.Context, retake bool) (epoch int, err error) {
	l := p.local
	select {
	case l.keeping <- struct{}{}:
		defer func() { <-l.keeping }()
	case <-ctx.Done():
		return 0, fmt.Errorf("%w: %w", ErrNotKeeper, ctx.Err())
	}
	// Who goes away amid a statement closes its connection, and the mark with it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), keepTimeout)
	defer cancel()
	if l.mark != nil {
		if l.mark.held(ctx) {
			return l.epoch, nil
		}
		l.mark.release()
		l.mark = nil
		p.log.Error().Msg("the mark of who keeps pins in memory is lost: no pin is given, and nothing is deleted, until it is back")
	}
	if !retake {
		return 0, fmt.Errorf("%w: its mark is lost", ErrNotKeeper)
	}
	mark, who, err := p.host.markPins(ctx)
	if err == nil && who != "" {
		err = errors.New(who)
	}
	if err != nil {
		p.logUnkept(err)
		return 0, fmt.Errorf("%w: %w", ErrNotKeeper, err)
	}
	p.beginKeeping(mark)
	return l.epoch, nil
}

// beginKeeping begins anew, as after a start: pins that others gave may be live, and
// others may have deleted what the own ones protected.
func (p *Pool) beginKeeping(mark pinMark) {
	l := p.local
	l.mark, l.unkept = mark, false
	l.epoch++
	if l.epoch > 1 {
		p.log.Warn().Int("broken", l.store.Expire()).Int64("held_up_ms", l.ttl.Milliseconds()).
			Msg("pins are given again; those that were given before the mark was lost have ended")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since, l.again = l.clock.Now(), l.epoch > 1
}

// logUnkept says it once.
func (p *Pool) logUnkept(err error) {
	if !p.local.unkept {
		p.log.Error().Err(err).Msg("no pin is given, and nothing is deleted in this pool; it is tried again and again")
	}
	p.local.unkept = true
}

// releasePins gives the mark back.
func (p *Pool) releasePins() {
	if p.local == nil {
		return
	}
	p.local.keeping <- struct{}{}
	defer func() { <-p.local.keeping }()
	if p.local.mark != nil {
		p.local.mark.release()
		p.local.mark = nil
	}
}

// underMark runs fn, whose answer holds only if this process was the keeper all
// along.
func (p *Pool) underMark(ctx context.Context, fn func(*fleet.InProcess) error) error {
	before, err := p.keepPins(ctx, true)
	if err != nil {
		return err
	}
	if err := fn(p.local.store); err != nil {
		return err
	}
	after, err := p.keepPins(ctx, true)
	if err == nil && after != before {
		err = fmt.Errorf("%w: it lost its mark meanwhile; try again", ErrNotKeeper)
	}
	return err
}

// keepMark keeps the mark until the daemon stops.
func (d *daemon) keepMark(ctx context.Context) error {
	ctx, end := d.running(ctx)
	defer end()
	for {
		// What is wrong was logged. Who gives pins, or deletes, asks for the mark itself.
		_, _ = d.pool.keepPins(ctx, true)
		// A timer of its own: it is about other processes, not about the test's clock.
		if (SystemClock{}).Sleep(ctx, keepEvery) != nil {
			return context.Cause(ctx)
		}
	}
}

// kept says why nothing may be deleted for pins in memory: those that another
// process keeps, and those that nobody knows any more. In a batch it comes before
// the locks and after the arbitration.
func (s *sweep) kept(ctx context.Context, inBatch bool) (why string, err error) {
	local := s.pool.local
	switch {
	case s.pool.without.Keeper:
	case local.gives():
		if _, err := s.pool.keepPins(ctx, !inBatch); err != nil {
			return err.Error(), nil //nolint:nilerr // it holds up what is overdue, and is no failure of the sweep's
		}
	default:
		if why, err := s.session.KeepPinKeepersAway(ctx); err != nil || why != "" {
			return why, err
		}
	}
	return local.holdup(), nil
}

// checkKept is errHeldUp where kept says why.
func (s *sweep) checkKept(ctx context.Context, inBatch bool) error {
	why, err := s.kept(ctx, inBatch)
	if err == nil && why != "" {
		err = heldUp(why)
	}
	return err
}

const (
	keptElsewhere = "a daemon keeps pins of this pool in its memory%s: sweep through its control socket, or stop it first"
	keptAway      = "another agent%s has the mark of pins in memory: it keeps pins of this pool, or sweeps it without knowing of any; let one daemon, with one configuration, do both"
)

// told puts who it is into a sentence.
func told(sentence, who string) string {
	if who = strings.TrimSpace(who); who != "" {
		who = ", " + who
	}
	return fmt.Sprintf(sentence, who)
}

// postgresPinMark is a lock of its own session.
type postgresPinMark struct {
	conn   *pgdb.Conn
	schema string
}

func (h *postgresHost) markPins(ctx context.Context) (pinMark, string, error) {
	conn, err := h.db.Dedicated(ctx)
	if err != nil {
		return nil, "", err
	}
	got, err := fleet.MarkPinKeeper(ctx, conn, h.pool.cfg.Schema)
	if got && err == nil {
		return &postgresPinMark{conn, h.pool.cfg.Schema}, "", nil
	}
	var who string
	if err == nil {
		who, err = fleet.PinMarkHolders(ctx, conn, h.pool.cfg.Schema)
	}
	return nil, told(keptAway, who), errors.Join(h.refusal(err), conn.Close(ctx))
}

func (m *postgresPinMark) held(ctx context.Context) bool {
	has, err := fleet.HasPinMark(ctx, m.conn, m.schema)
	return has && err == nil
}

func (m *postgresPinMark) release() {
	// A session that can't be told to end ends with its connection.
	_ = m.conn.Close(context.Background())
}

// KeepPinKeepersAway has the mark on the lease's session, which deletes.
func (s *postgresSession) KeepPinKeepersAway(ctx context.Context) (string, error) {
	if s.keepersAway {
		has, err := fleet.HasPinMark(ctx, s.conn, s.cfg.Schema)
		if err == nil && !has {
			err = errors.New("the session has lost the mark of pins in memory")
		}
		return "", err
	}
	got, err := fleet.KeepPinKeepersAway(ctx, s.conn, s.cfg.Schema)
	if err != nil || got {
		s.keepersAway = err == nil
		return "", err
	}
	who, err := fleet.PinMarkHolders(ctx, s.conn, s.cfg.Schema)
	return told(keptElsewhere, who), err
}

// filePinMark is a lock on a file beside the database.
type filePinMark struct{ *fleet.FileLease }

func (h *sqliteHost) markPins(context.Context) (pinMark, string, error) {
	lease, ok, err := fleet.FileMarkPinKeeper(h.db.Path())
	if err != nil || !ok {
		return nil, told(keptAway, pidOf(h.db.Path())), err
	}
	return filePinMark{lease}, "", nil
}

func pidOf(path string) string {
	pid, ok := fleet.FilePinKeeperPID(path)
	if !ok {
		return ""
	}
	return fmt.Sprintf("pid %d", pid)
}

func (m filePinMark) held(context.Context) bool { return m.Stands() }

func (m filePinMark) release() {
	// Closed or not, its file is of no more use.
	_ = m.Release(context.Background())
}

// KeepPinKeepersAway has the mark until the session is closed.
func (s *sqliteSession) KeepPinKeepersAway(ctx context.Context) (string, error) {
	path := s.pool.host.(*sqliteHost).db.Path()
	if s.keepersAway != nil {
		if s.keepersAway.Stands() {
			return "", nil
		}
		if err := s.keepersAway.Release(ctx); err != nil {
			return "", err
		}
		s.keepersAway = nil
	}
	look := fleet.FileKeepPinKeepersAway
	if s.dry {
		look = fleet.FileSeePinKeepersAway
	}
	lease, ok, err := look(path)
	if err != nil {
		return "", err
	}
	if !ok {
		return told(keptElsewhere, pidOf(path)), nil
	}
	s.keepersAway = lease
	return "", nil
}

// inlinePinMark is none: what is inline has nothing beside it that others look at.
type inlinePinMark struct{}

func (inlinePinMark) held(context.Context) bool { return true }
func (inlinePinMark) release()                  {}

func (h *inlineHost) markPins(context.Context) (pinMark, string, error) {
	return inlinePinMark{}, "", nil
}

// KeepPinKeepersAway keeps nobody away: two processes share no inline pool.
func (s *inlineSession) KeepPinKeepersAway(context.Context) (string, error) { return "", nil }
