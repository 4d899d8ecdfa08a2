package demo

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"time"
)

// between is how long the application rests after each change.
const between = 150 * time.Millisecond

// Live goes on as an application does, one change after the other, until ctx
// ends: it uploads photos, breaks uploads off, moves attachments to the trash and
// back, removes them. An error means that a change failed.
func (a *App) Live(ctx context.Context) error {
	changes := []func(context.Context, *sql.Tx, int) error{add, add, breakOff, remove, trash, trash, restore}
	for n := attachedBlobs + avatarBlobs + trashedBlobs + unnamedBlobs; ; n++ {
		change := changes[rand.IntN(len(changes))]
		err := a.inTx(ctx, func(tx *sql.Tx) error { return change(ctx, tx, n) })
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("change the demo's data: %w", err)
		}
		select {
		case <-time.After(between):
		case <-ctx.Done():
			return nil
		}
	}
}

// add stores blob and reference in one transaction, so that there is no moment
// at which the blob is there and nothing refers to it.
func add(ctx context.Context, tx *sql.Tx, n int) error {
	digest, err := upload(ctx, tx, n)
	if err != nil {
		return err
	}
	return attach(ctx, tx, title(n), digest)
}

func breakOff(ctx context.Context, tx *sql.Tx, n int) error {
	_, err := upload(ctx, tx, n)
	return err
}

func remove(ctx context.Context, tx *sql.Tx, _ int) error {
	_, err := tx.ExecContext(ctx, `DELETE FROM attachments WHERE id = (SELECT id FROM attachments ORDER BY random() LIMIT 1)`)
	return err
}

func trash(ctx context.Context, tx *sql.Tx, _ int) error {
	_, err := tx.ExecContext(ctx, `UPDATE attachments SET deleted_at = datetime('now')
		WHERE id = (SELECT id FROM attachments WHERE deleted_at IS NULL ORDER BY random() LIMIT 1)`)
	return err
}

// restore takes an attachment out of the trash whose blob is still there. It
// looks in the transaction that it writes in: nothing deletes in between.
func restore(ctx context.Context, tx *sql.Tx, _ int) error {
	_, err := tx.ExecContext(ctx, `UPDATE attachments SET deleted_at = NULL
		WHERE id = (SELECT a.id FROM attachments a JOIN blobs b ON a.blob = 'sha256:' || lower(hex(b.digest))
			WHERE a.deleted_at IS NOT NULL ORDER BY random() LIMIT 1)`)
	return err
}

// AttachDead attaches one of the blobs that nothing named, as a user does who
// uploads the same photo again, and returns the new attachment's title.
func (a *App) AttachDead(ctx context.Context) (string, error) {
	const n = attachedBlobs + avatarBlobs + trashedBlobs // the first that nothing names
	err := a.inTx(ctx, func(tx *sql.Tx) error { return add(ctx, tx, n) })
	if err != nil {
		return "", fmt.Errorf("attach a blob of the demo: %w", err)
	}
	return title(n), nil
}
