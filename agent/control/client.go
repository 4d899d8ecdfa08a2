package control

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"syscall"

	"github.com/alkblobs/gc-agent/agent"
	"github.com/alkblobs/gc-agent/blob"
)

// ErrNoDaemon means that no daemon answers on the socket.
var ErrNoDaemon = errors.New("no daemon answers")

// Error is what a daemon answered to a request that it didn't fulfil.
type Error struct {
	Status  int // of HTTP
	Message string
}

func (e *Error) Error() string { return e.Message }

// Usage says whether whoever asked, or the configuration, is at fault.
func (e *Error) Usage() bool {
	switch e.Status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusPreconditionFailed, http.StatusUnprocessableEntity:
		return true
	}
	return false
}

// Client asks a daemon. Its methods may be called at once.
type Client struct {
	socket string
	http   *http.Client
}

// Dial finds out whether a daemon answers on the socket: ErrNoDaemon if not. Where
// one may, which this process has no right to ask, the error says so.
func Dial(ctx context.Context, socket string) (*Client, error) {
	dialer := &net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "unix", socket)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%w on %s", ErrNoDaemon, socket)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("this user may not connect to the daemon's control socket %s: run the command as the daemon's user, or as one of the socket's group", socket)
	case err != nil:
		return nil, fmt.Errorf("connect to the daemon's control socket: %w", err)
	}
	if err := conn.Close(); err != nil {
		return nil, fmt.Errorf("connect to the daemon's control socket: %w", err)
	}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}
	return &Client{socket: socket, http: &http.Client{Transport: transport}}, nil
}

// Pool is a pool of the daemon's, as the configuration at hand has it.
type Pool struct {
	*Client
	Name   string
	Digest string // of config.Validated.PoolDigest
}

// Pin asks for pins.
func (p Pool) Pin(ctx context.Context, req PinRequest) (answer PinAnswer, err error) {
	return answer, p.ask(ctx, http.MethodPost, "/pins", req, &answer)
}

// Unpin takes pins back.
func (p Pool) Unpin(ctx context.Context, req UnpinRequest) (answer UnpinAnswer, err error) {
	return answer, p.ask(ctx, http.MethodDelete, "/pins", req, &answer)
}

// Renew asks for more time for an owner's pins.
func (p Pool) Renew(ctx context.Context, req RenewRequest) (answer RenewAnswer, err error) {
	return answer, p.ask(ctx, http.MethodPost, "/pins/renew", req, &answer)
}

// Pins returns a page of the live pins: those of an owner, unless that is nil,
// behind after, which is empty or Next of the page before.
func (p Pool) Pins(ctx context.Context, owner *string, after string) (answer PinsAnswer, err error) {
	query := url.Values{"limit": {strconv.Itoa(mostPins)}}
	if owner != nil {
		query.Set("owner", *owner)
	}
	if after != "" {
		query.Set("after", after)
	}
	return answer, p.ask(ctx, http.MethodGet, "/pins?"+query.Encode(), nil, &answer)
}

// Drop takes keys out of the window.
func (p Pool) Drop(ctx context.Context, req DropRequest) (answer DropAnswer, err error) {
	return answer, p.ask(ctx, http.MethodPost, "/window/drop", req, &answer)
}

// StopSweep lets the sweeps of the pool that were begun through the socket finish
// their batch and stop.
func (p Pool) StopSweep(ctx context.Context) (answer StopAnswer, err error) {
	return answer, p.ask(ctx, http.MethodPost, "/sweep/stop", struct{}{}, &answer)
}

// Sweep has the pool swept, and calls progress, which may be nil, while that goes
// on. The end of ctx stops the sweep after its batch, but without a report. See
// agent.Pool.Sweep.
func (p Pool) Sweep(ctx context.Context, req SweepRequest, progress func(agent.Progress)) (rep agent.Report, err error) {
	rep.Pool = p.Name
	resp, err := p.send(ctx, http.MethodPost, "/sweep", req)
	if err != nil {
		return rep, err
	}
	defer closeBody(resp)
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, mostBody)
	for lines.Scan() {
		var line SweepLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return rep, fmt.Errorf("read the daemon's answer: %w", err)
		}
		if line.Report != nil {
			return *line.Report, line.err()
		}
		if line.Progress != nil && progress != nil {
			progress(agent.Progress{Pool: p.Name, Phase: line.Progress.Phase, Done: line.Progress.Done})
		}
	}
	if err := lines.Err(); err != nil {
		return rep, fmt.Errorf("read the daemon's answer: %w", err)
	}
	return rep, errors.New("the daemon ended before the sweep was through; what was done stays done")
}

func closeBody(resp *http.Response) {
	// What was to be read has been.
	_ = resp.Body.Close()
}

func (p Pool) ask(ctx context.Context, method, path string, req, answer any) error {
	resp, err := p.send(ctx, method, path, req)
	if err != nil {
		return err
	}
	defer closeBody(resp)
	if err := json.NewDecoder(resp.Body).Decode(answer); err != nil {
		return fmt.Errorf("read the daemon's answer: %w", err)
	}
	return nil
}

// send sends a request, and returns the answer of a daemon that fulfils it.
func (p Pool) send(ctx context.Context, method, path string, req any) (*http.Response, error) {
	var body bytes.Buffer
	if req != nil {
		if err := json.NewEncoder(&body).Encode(req); err != nil {
			return nil, fmt.Errorf("encode a request: %w", err)
		}
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://gc-agent/v1/pools/"+url.PathEscape(p.Name)+path, &body)
	if err != nil {
		return nil, fmt.Errorf("make a request: %w", err)
	}
	r.Header.Set(DigestHeader, p.Digest)
	resp, err := p.http.Do(r)
	if err != nil {
		return nil, fmt.Errorf("ask the daemon on %s: %w", p.socket, errors.Unwrap(err))
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer closeBody(resp)
	var failed errorAnswer
	if err := json.NewDecoder(io.LimitReader(resp.Body, mostBody)).Decode(&failed); err != nil || failed.Error == "" {
		failed.Error = "the daemon on " + p.socket + " answered " + blob.Shorten(resp.Status)
	}
	return nil, &Error{Status: resp.StatusCode, Message: failed.Error}
}
