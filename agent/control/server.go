package control

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
	"github.com/alkblobs/gc-agent/internal/words"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"
)

// DigestHeader carries what config.Validated.PoolDigest says of the pool to whoever
// asks. A daemon whose own configuration says something else refuses.
const DigestHeader = "Gc-Agent-Pool-Digest"

const (
	headerTimeout = 5 * time.Second
	bodyTimeout   = 10 * time.Second
	idleTimeout   = time.Minute
	// answerTimeout is how long a request may take, writing the answer included; a
	// sweep has as long as it needs, and a line of its stream that long.
	answerTimeout = 45 * time.Second
	// workTimeout is how long a request may work, a pin that waits for a batch included;
	// a sweep has no such limit.
	workTimeout = 30 * time.Second
	lineTimeout = 10 * time.Second
	// finishWithin is how long requests at hand may still take once the daemon stops.
	finishWithin = 9 * time.Second

	mostHeader = 16 << 10
	mostPins   = 1000 // on one page of a list
)

// Options are what a server is made of.
type Options struct {
	Agent  *agent.Agent
	Config *config.Validated // the agent's
	Log    zerolog.Logger
	// Explain makes an error of a database's one that people understand. It may be nil.
	Explain func(error) error
}

// Server answers on a control socket.
type Server struct {
	opts     Options
	stopping chan struct{} // closed when it is to end
	cut      chan struct{} // closed when it is to end at once

	mu     sync.Mutex
	sweeps map[string]map[*sweeping]struct{} // by pool
}

// NewServer makes a server. It serves once.
func NewServer(opts Options) *Server {
	if opts.Explain == nil {
		opts.Explain = func(err error) error { return err }
	}
	return &Server{opts: opts, stopping: make(chan struct{}), cut: make(chan struct{}), sweeps: map[string]map[*sweeping]struct{}{}}
}

// Serve answers until stop is closed or ctx ends, and returns nil either way. When
// stop is closed requests at hand finish, for a few seconds at most, a sweep after
// its batch; the end of ctx cuts them off. It takes the listener over, closes and
// unlocks it.
func (s *Server) Serve(ctx context.Context, l *Listener, stop <-chan struct{}) error {
	s.opts.Agent.StartPins(ctx)
	srv := &http.Server{
		Handler: s.handler(), BaseContext: func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: headerTimeout, ReadTimeout: bodyTimeout, WriteTimeout: answerTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: mostHeader,
		// What a client does wrong before it has asked anything.
		ErrorLog: stdlog.New(debugLog{s.opts.Log}, "", 0),
	}
	var group errgroup.Group
	ended := make(chan struct{})
	group.Go(func() error {
		defer close(ended)
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("control socket: %w", err)
		}
		return nil
	})
	group.Go(func() error { return s.shutDown(ctx, srv, stop, ended) })
	err := group.Wait()
	return errors.Join(err, l.Unlock())
}

func (s *Server) shutDown(ctx context.Context, srv *http.Server, stop, ended <-chan struct{}) error {
	select {
	case <-stop:
	case <-ctx.Done():
	case <-ended:
	}
	close(s.stopping)
	finish, cancel := context.WithTimeout(ctx, finishWithin)
	defer cancel()
	err := srv.Shutdown(finish)
	close(s.cut)
	if err != nil {
		// What is at hand is cut off: its pins are in force or aren't, and nobody was told.
		return srv.Close()
	}
	return nil
}

// debugLog takes lines of the standard logger.
type debugLog struct{ log zerolog.Logger }

func (d debugLog) Write(line []byte) (int, error) {
	d.log.Debug().Msg("control socket: " + words.OneLine(string(line)))
	return len(line), nil
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("POST /v1/pools/{pool}/pins", s.pool(s.pin))
	mux.Handle("DELETE /v1/pools/{pool}/pins", s.pool(s.unpin))
	mux.Handle("GET /v1/pools/{pool}/pins", s.pool(s.list))
	mux.Handle("POST /v1/pools/{pool}/pins/renew", s.pool(s.renew))
	mux.Handle("POST /v1/pools/{pool}/window/drop", s.pool(s.drop))
	mux.Handle("POST /v1/pools/{pool}/sweep/stop", s.pool(s.stopSweep))
	mux.HandleFunc("POST /v1/pools/{pool}/sweep", s.sweep)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.fail(w, refusal{http.StatusNotFound, fmt.Errorf("there is no %s %s", r.Method, blob.Shorten(r.URL.Path))})
	})
	return mux
}

// request is what was asked of a pool.
type request struct {
	body  []byte
	query url.Values
}

// pool makes a handler of fn, which answers for a pool.
func (s *Server) pool(fn func(ctx context.Context, p *agent.Pool, req request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, body, err := s.begin(w, r)
		if err != nil {
			s.fail(w, err)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), workTimeout)
		defer cancel()
		answer, err := fn(ctx, p, request{body, r.URL.Query()})
		if err != nil {
			s.fail(w, err)
			return
		}
		s.answer(w, http.StatusOK, answer)
	})
}

// begin finds the pool that a request is about and reads its body. Afterwards only
// the end of the connection ends the request's context, and no limit to reading.
func (s *Server) begin(w http.ResponseWriter, r *http.Request) (*agent.Pool, []byte, error) {
	name := r.PathValue("pool")
	p, ok := s.opts.Agent.Pool(name)
	digest := r.Header.Get(DigestHeader)
	switch {
	case digest != "" && digest != s.opts.Config.PoolDigest(name):
		return nil, nil, refusal{http.StatusPreconditionFailed, errOtherConfiguration}
	case !ok:
		return nil, nil, refusal{http.StatusNotFound, fmt.Errorf("the daemon has no pool %q", blob.Shorten(name))}
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, mostBody))
	var tooLong *http.MaxBytesError
	switch {
	case errors.As(err, &tooLong):
		return nil, nil, refusal{http.StatusRequestEntityTooLarge, fmt.Errorf("the request is longer than %d bytes: ask for fewer keys at a time", mostBody)}
	case err != nil:
		return nil, nil, bad("read the request: %w", err)
	}
	return p, body, http.NewResponseController(w).SetReadDeadline(time.Time{})
}

// refusal is an error with the status that belongs to it.
type refusal struct {
	status int
	error
}

func (r refusal) Unwrap() error { return r.error }

var errOtherConfiguration = errors.New("the daemon runs with another configuration of this pool: restart it, or give the command the daemon's configuration")

func (s *Server) pin(ctx context.Context, p *agent.Pool, r request) (any, error) {
	var req PinRequest
	if err := decode(r.body, &req); err != nil {
		return nil, err
	}
	owner, err := req.Owner.parse()
	if err != nil {
		return nil, err
	}
	ttl, err := parseTTL(req.TTL, p.PinTTL())
	if err != nil {
		return nil, err
	}
	keys, err := req.Keys.parse(ctx, p)
	if err != nil {
		return nil, err
	}
	exists, err := p.Pin(ctx, keys, owner, ttl)
	return PinAnswer{exists}, err
}

func (s *Server) unpin(ctx context.Context, p *agent.Pool, r request) (any, error) {
	var req UnpinRequest
	if err := decode(r.body, &req); err != nil {
		return nil, err
	}
	owner, err := req.Owner.parse()
	if err != nil {
		return nil, err
	}
	keys, err := req.Keys.parse(ctx, p)
	if err != nil {
		return nil, err
	}
	removed, err := p.Unpin(ctx, keys, owner)
	return UnpinAnswer{removed}, err
}

func (s *Server) renew(ctx context.Context, p *agent.Pool, r request) (any, error) {
	var req RenewRequest
	if err := decode(r.body, &req); err != nil {
		return nil, err
	}
	owner, err := req.parse()
	if err != nil {
		return nil, err
	}
	ttl, err := parseTTL(req.TTL, p.PinTTL())
	if err != nil {
		return nil, err
	}
	renewed, lost, err := p.RenewPins(ctx, owner, ttl)
	return RenewAnswer{renewed, lost}, err
}

func (s *Server) list(ctx context.Context, p *agent.Pool, r request) (any, error) {
	filter, err := parseFilter(ctx, p, r.query)
	if err != nil {
		return nil, err
	}
	rows, err := p.Pins(ctx, filter)
	if err != nil {
		return nil, err
	}
	answer := PinsAnswer{Pins: make([]Pin, 0, len(rows))}
	for _, row := range rows {
		answer.Pins = append(answer.Pins, NewPin(p, row))
	}
	if len(rows) == filter.Limit {
		answer.Next = cursor(rows[len(rows)-1])
	}
	return answer, nil
}

// NewPin writes a pin of the pool for a list.
func NewPin(p *agent.Pool, row fleet.PinRow) Pin {
	pin := Pin{
		Key: p.Spell(row.Key), KeyHex: hex.EncodeToString([]byte(row.Key)),
		OwnerHex: hex.EncodeToString([]byte(row.Owner)), ExpiresInMS: row.Left.Milliseconds(),
	}
	if owner := string(row.Owner); utf8.ValidString(owner) {
		pin.Owner = owner
	}
	return pin
}

func (s *Server) drop(ctx context.Context, p *agent.Pool, r request) (any, error) {
	var req DropRequest
	if err := decode(r.body, &req); err != nil {
		return nil, err
	}
	if req.All {
		if len(req.Keys.Keys)+len(req.KeysHex) > 0 {
			return nil, bad("give keys, or all, not both")
		}
		dropped, err := p.DropAll(ctx)
		return DropAnswer{Dropped: dropped}, err
	}
	keys, err := req.parse(ctx, p)
	if err != nil {
		return nil, err
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	dropped, err := p.DropKeys(ctx, keys)
	return DropAnswer{Dropped: int64(dropped), Missing: int64(len(keys) - dropped)}, err
}

// fail answers with an error, one line, and the status that fits.
func (s *Server) fail(w http.ResponseWriter, err error) {
	status := statusOf(err)
	if status == http.StatusInternalServerError {
		s.opts.Log.Error().Err(err).Msg("a request on the control socket failed")
	}
	s.answer(w, status, errorAnswer{words.OneLine(s.opts.Explain(err).Error())})
}

// errorAnswer is the answer to what wasn't done.
type errorAnswer struct {
	Error string `json:"error"`
}

func statusOf(err error) int {
	var refused refusal
	switch {
	case errors.As(err, &refused):
		return refused.status
	case errors.As(err, new(badRequest)), errors.Is(err, agent.ErrBadPin):
		return http.StatusBadRequest
	case errors.Is(err, agent.ErrSweeping), errors.Is(err, agent.ErrNoPins):
		return http.StatusConflict
	case errors.As(err, new(*agent.MisconfiguredError)):
		return http.StatusUnprocessableEntity
	case errors.Is(err, agent.ErrPinBusy), errors.Is(err, fleet.ErrPinsFull), errors.Is(err, fleet.ErrPinExpired),
		errors.Is(err, agent.ErrNotKeeper),
		errors.Is(err, context.DeadlineExceeded):
		return http.StatusServiceUnavailable
	default:
		return http.StatusInternalServerError
	}
}

func (s *Server) answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(v); err != nil {
		s.opts.Log.Debug().Err(err).Msg("an answer on the control socket couldn't be written")
	}
}
