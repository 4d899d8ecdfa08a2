package control

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/alkblobs/gc-agent/agent/config"
	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/fleet"
)

const (
	// mostBody is how long a request may be, in bytes, and mostKeys how many keys one
	// may name.
	mostBody = 4 << 20
	mostKeys = 10_000
	// mostOwner is as long as an owner may be, in bytes.
	mostOwner = 1000
)

// Keys name blobs in a request: as window list prints them, or by their bytes in
// hex, in one of the two.
type Keys struct {
	Keys    []string `json:"keys,omitempty"`
	KeysHex []string `json:"keys_hex,omitempty"`
}

// Owner names an owner of pins in a request: as text, or by its bytes in hex.
type Owner struct {
	Owner    *string `json:"owner,omitempty"`
	OwnerHex *string `json:"owner_hex,omitempty"`
}

// PinRequest asks for pins. Without a TTL they live as long as pins.ttl says.
type PinRequest struct {
	Keys
	Owner
	TTL string `json:"ttl,omitempty"`
}

// PinAnswer says of each key, in the order of the request, whether its blob is
// there.
type PinAnswer struct {
	Exists []bool `json:"exists"`
}

// UnpinRequest takes pins back.
type UnpinRequest struct {
	Keys
	Owner
}

// UnpinAnswer says of each key, in the order of the request, whether there was a
// pin.
type UnpinAnswer struct {
	Removed []bool `json:"removed"`
}

// RenewRequest asks for more time for all of an owner's live pins.
type RenewRequest struct {
	Owner
	TTL string `json:"ttl,omitempty"`
}

// RenewAnswer says how many were renewed, and how many had run out before.
type RenewAnswer struct {
	Renewed int `json:"renewed"`
	Lost    int `json:"lost"`
}

// Pin is a live pin in a list. Owner is empty where it isn't text.
type Pin struct {
	Key         string `json:"key"`
	KeyHex      string `json:"key_hex"`
	Owner       string `json:"owner"`
	OwnerHex    string `json:"owner_hex"`
	ExpiresInMS int64  `json:"expires_in_ms"`
}

// PinsAnswer is a page of a list. Next, given as after, begins the following one;
// it is empty on the last.
type PinsAnswer struct {
	Pins []Pin  `json:"pins"`
	Next string `json:"next,omitempty"`
}

// DropRequest takes keys out of the window, or all of them.
type DropRequest struct {
	Keys
	All bool `json:"all,omitempty"`
}

// DropAnswer says how many keys were in the window, and how many of those named
// weren't.
type DropAnswer struct {
	Dropped int64 `json:"dropped"`
	Missing int64 `json:"missing"`
}

// SweepRequest asks for a sweep.
type SweepRequest struct {
	DryRun   bool     `json:"dry_run,omitempty"`
	Override []string `json:"override,omitempty"`
}

// badRequest is an error of whoever asked.
type badRequest struct{ error }

func bad(format string, args ...any) error { return badRequest{fmt.Errorf(format, args...)} }

// decode reads the one JSON object that a request consists of. No body is an
// empty object.
func decode(body []byte, into any) error {
	if len(body) == 0 {
		return nil
	}
	if !utf8.Valid(body) {
		// What a decoder puts in its place would be another key.
		return bad("the request isn't UTF-8; keys_hex and owner_hex take any bytes")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return bad("the request isn't the JSON object that belongs here: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return bad("the request goes on behind its JSON object")
	}
	return checkNames(body)
}

// checkNames refuses what the decoder lets pass: a field that is given twice, of
// which it would take the last, and one in another case. The names of all fields are
// of small letters.
func checkNames(body []byte) error {
	d := json.NewDecoder(bytes.NewReader(body))
	if start, err := d.Token(); err != nil || start != json.Delim('{') {
		return nil //nolint:nilerr // the body was decoded before: it is null
	}
	seen := map[string]bool{}
	for d.More() {
		token, err := d.Token()
		name, isName := token.(string)
		var value json.RawMessage
		if err := errors.Join(err, d.Decode(&value)); err != nil || !isName {
			return bad("the request isn't a JSON object: %w", err)
		}
		switch {
		case strings.Trim(name, "abcdefghijklmnopqrstuvwxyz_") != "":
			return bad("the request isn't the JSON object that belongs here: unknown field %q", blob.Shorten(name))
		case seen[name]:
			return bad("the request has the field %q twice", name)
		}
		seen[name] = true
	}
	return nil
}

// keyParser reads a key as people write it.
type keyParser interface {
	ParseKey(ctx context.Context, s string) (blob.Key, error)
	Kind() blob.Kind
	ResolveKind(ctx context.Context) error
}

// parse returns the keys in their order.
func (k Keys) parse(ctx context.Context, pool keyParser) ([]blob.Key, error) {
	n := len(k.Keys) + len(k.KeysHex)
	switch {
	case len(k.Keys) > 0 && len(k.KeysHex) > 0:
		return nil, bad("give keys or keys_hex, not both")
	case n == 0:
		return nil, bad("name at least one key, in keys or keys_hex")
	case n > mostKeys:
		return nil, bad("%d keys are more than the %d that one request may name", n, mostKeys)
	}
	keys := make([]blob.Key, 0, n)
	for _, s := range k.KeysHex {
		key, err := hex.DecodeString(s)
		if err != nil {
			return nil, bad("keys_hex: %q: %w", blob.Shorten(s), err)
		}
		keys = append(keys, blob.Key(key))
	}
	for _, s := range k.Keys {
		key, err := parseKey(ctx, pool, s)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

func parseKey(ctx context.Context, pool keyParser, s string) (blob.Key, error) {
	if err := replaced("key", s); err != nil {
		return "", err
	}
	key, err := pool.ParseKey(ctx, s)
	if err != nil && pool.Kind() != 0 { // the database was asked, so it is about the key
		return "", badRequest{err}
	}
	return key, err
}

// replaced refuses what the decoder may have put in the place of half a surrogate
// pair.
func replaced(what, s string) error {
	if strings.ContainsRune(s, utf8.RuneError) {
		return bad("the %s %q holds U+FFFD, which also stands for what isn't a character: give it in hex", what, blob.Shorten(s))
	}
	return nil
}

// parse returns the owner, which has to be given.
func (o Owner) parse() (fleet.Owner, error) {
	var owner string
	switch {
	case (o.Owner == nil) == (o.OwnerHex == nil):
		return "", bad("give an owner: either owner or owner_hex")
	case o.Owner != nil:
		owner = *o.Owner
		if err := replaced("owner", owner); err != nil {
			return "", err
		}
	default:
		b, err := hex.DecodeString(*o.OwnerHex)
		if err != nil {
			return "", bad("owner_hex: %q: %w", blob.Shorten(*o.OwnerHex), err)
		}
		owner = string(b)
	}
	if len(owner) > mostOwner {
		return "", bad("the owner is longer than %d bytes", mostOwner)
	}
	return fleet.Owner(owner), nil
}

func parseTTL(s string, unless time.Duration) (time.Duration, error) {
	if s == "" {
		return unless, nil
	}
	ttl, err := config.ParseDuration(s)
	if err != nil {
		return 0, bad("ttl: %q: %w", blob.Shorten(s), err)
	}
	return ttl, nil
}

// Brakes are those that a sweep may be told to pass.
var Brakes = []config.Brake{config.BrakeMaxDeadRatio, config.BrakeMaxDeadCount, config.BrakeEmptySource}

func parseBrakes(names []string) ([]config.Brake, error) {
	var brakes []config.Brake
	for _, name := range names {
		if !slices.Contains(Brakes, config.Brake(name)) {
			return nil, bad("override: no brake is named %q", blob.Shorten(name))
		}
		brakes = append(brakes, config.Brake(name))
	}
	return brakes, nil
}

// A cursor is where a list goes on: the key and the owner of its last pin.
func cursor(row fleet.PinRow) string {
	return hex.EncodeToString([]byte(row.Key)) + "." + hex.EncodeToString([]byte(row.Owner))
}

func parseCursor(s string) (*fleet.PinRow, error) {
	if s == "" {
		return nil, nil // no cursor begins a list
	}
	key, owner, ok := strings.Cut(s, ".")
	k, keyErr := hex.DecodeString(key)
	o, ownerErr := hex.DecodeString(owner)
	if !ok || keyErr != nil || ownerErr != nil {
		return nil, bad("after: %q isn't what an earlier page gave as next", blob.Shorten(s))
	}
	return &fleet.PinRow{Key: blob.Key(k), Owner: fleet.Owner(o)}, nil
}

// parseFilter reads what to list: owner or owner_hex, key or key_hex, limit, after.
func parseFilter(ctx context.Context, pool keyParser, query url.Values) (f fleet.PinFilter, err error) {
	var key *blob.Key
	var owner *fleet.Owner
	f.Limit = mostPins
	for name, values := range query {
		value := values[0]
		switch {
		case len(values) > 1, name == "key" && query.Has("key_hex"), name == "owner" && query.Has("owner_hex"):
			return f, bad("%s is given more than once", name)
		case name == "limit":
			if f.Limit, err = strconv.Atoi(value); err != nil || f.Limit < 1 || f.Limit > mostPins {
				return f, bad("limit: want 1 to %d", mostPins)
			}
		case name == "after":
			f.After, err = parseCursor(value)
		case name == "key", name == "key_hex":
			key, err = oneKey(ctx, pool, name, value)
		case name == "owner", name == "owner_hex":
			owner, err = oneOwner(name, value)
		default:
			return f, bad("a list takes owner, owner_hex, key, key_hex, limit and after, not %q", blob.Shorten(name))
		}
		if err != nil {
			return f, err
		}
	}
	f.Key, f.Owner = key, owner
	// Keys can't be spelled before it is known what they are.
	return f, pool.ResolveKind(ctx)
}

func oneKey(ctx context.Context, pool keyParser, name, value string) (*blob.Key, error) {
	keys := Keys{Keys: []string{value}}
	if name == "key_hex" {
		keys = Keys{KeysHex: []string{value}}
	}
	parsed, err := keys.parse(ctx, pool)
	if err != nil {
		return nil, err
	}
	return &parsed[0], nil
}

func oneOwner(name, value string) (*fleet.Owner, error) {
	given := Owner{Owner: &value}
	if name == "owner_hex" {
		given = Owner{OwnerHex: &value}
	}
	owner, err := given.parse()
	return &owner, err
}
