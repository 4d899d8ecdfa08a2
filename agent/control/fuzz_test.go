package control

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/alkblobs/gc-agent/blob"
)

type textPool struct{}

func (textPool) Kind() blob.Kind                   { return blob.KindText }
func (textPool) ResolveKind(context.Context) error { return nil }

func (textPool) ParseKey(_ context.Context, s string) (blob.Key, error) {
	return blob.KindText.ParseKey(s)
}

// FuzzDecode: no request makes the decoder panic, none is read as another than it
// is, and what is wrong with it is told in one line.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		`{"keys":["a","b"],"owner":"me","ttl":"60s"}`, `{"keys_hex":["ff00"],"owner_hex":"00"}`, `{"keys":["\ud800"]}`,
		`{"owner":"me"} {}`, `{"x":1}`, `{"owner":"a","owner":"b"}`, `{"Owner":"a"}`, `[]`, `null`, "\xff", `{"keys":["\\x00"],"owner":"","ttl":"1d"}`, `{"all":true,"dry_run":true}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, into := range []any{&RenewRequest{}, &DropRequest{}, &SweepRequest{}, &UnpinRequest{}} {
			wellTold(t, decode(data, into))
		}
		var req PinRequest
		if err := decode(data, &req); err != nil {
			wellTold(t, err)
			return
		}
		owner, err := req.Owner.parse()
		wellTold(t, err)
		if err == nil && (len(owner) > mostOwner || req.Owner.Owner != nil && string(owner) != *req.Owner.Owner) {
			t.Errorf("owner %q", owner)
		}
		_, err = parseTTL(req.TTL, 0)
		wellTold(t, err)
		keys, err := req.Keys.parse(t.Context(), textPool{})
		wellTold(t, err)
		if err != nil {
			return
		}
		if len(keys) != len(req.Keys.Keys)+len(req.KeysHex) || len(keys) == 0 || len(keys) > mostKeys {
			t.Errorf("%d keys", len(keys))
		}
		if !utf8.Valid(data) || slices.ContainsFunc(req.Keys.Keys, func(s string) bool { return strings.ContainsRune(s, utf8.RuneError) }) {
			t.Errorf("read what isn't text: %q", data)
		}
	})
}

func wellTold(t *testing.T, err error) {
	t.Helper()
	if err != nil && (!errors.As(err, new(badRequest)) || statusOf(err) != 400 || strings.Contains(err.Error(), "\n")) {
		t.Errorf("error %q", err)
	}
}
