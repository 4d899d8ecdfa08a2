package demo

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// Stock is what the application holds at one moment.
type Stock struct {
	Blobs    map[Digest]bool
	Attached map[Digest]bool // named by an attachment that isn't in the trash
	Avatars  map[Digest]bool
	Trashed  map[Digest]bool // named by an attachment in the trash
}

// Take takes stock, in one transaction. It reads every row and compares in Go,
// so that it shares no mistake with the agent.
func (a *App) Take(ctx context.Context) (s Stock, err error) {
	s = Stock{Blobs: map[Digest]bool{}, Attached: map[Digest]bool{}, Avatars: map[Digest]bool{}, Trashed: map[Digest]bool{}}
	err = a.inTx(ctx, func(tx *sql.Tx) error {
		return errors.Join(
			collect(ctx, tx, s.Blobs, `SELECT digest FROM blobs`, raw),
			collect(ctx, tx, s.Attached, `SELECT blob FROM attachments WHERE deleted_at IS NULL`, spelled),
			collect(ctx, tx, s.Avatars, `SELECT avatar FROM users WHERE avatar IS NOT NULL`, raw),
			collect(ctx, tx, s.Trashed, `SELECT blob FROM attachments WHERE deleted_at IS NOT NULL`, spelled),
		)
	})
	if err != nil {
		return s, fmt.Errorf("take stock of the demo: %w", err)
	}
	return s, nil
}

// Dead returns the blobs that nothing refers to.
func (s Stock) Dead() map[Digest]bool {
	dead := map[Digest]bool{}
	for d := range s.Blobs {
		if !s.Attached[d] && !s.Avatars[d] {
			dead[d] = true
		}
	}
	return dead
}

// Dangling returns what is referred to and isn't there.
func (s Stock) Dangling() []Digest {
	var dangling []Digest
	for _, refs := range []map[Digest]bool{s.Attached, s.Avatars} {
		for d := range refs {
			if !s.Blobs[d] {
				dangling = append(dangling, d)
			}
		}
	}
	return dangling
}

func collect(ctx context.Context, tx *sql.Tx, into map[Digest]bool, query string, read func([]byte) (Digest, error)) (err error) {
	rows, err := tx.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		var b []byte
		if err := rows.Scan(&b); err != nil {
			return err
		}
		d, err := read(b)
		if err != nil {
			return err
		}
		into[d] = true
	}
	return rows.Err()
}

func raw(b []byte) (Digest, error) {
	if len(b) != len(Digest{}) {
		return Digest{}, fmt.Errorf("%x isn't a digest", b)
	}
	return Digest(b), nil
}

func spelled(b []byte) (Digest, error) {
	digits, ok := strings.CutPrefix(string(b), "sha256:")
	d, err := hex.DecodeString(digits)
	if !ok || err != nil {
		return Digest{}, fmt.Errorf("%q isn't a digest", b)
	}
	return raw(d)
}
