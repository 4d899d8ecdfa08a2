package pgdb

import "context"

// Use runs fn on a connection that is given back afterwards, for work that is
// short and needs no session of its own. At most four run at once; others wait as
// long as ctx lasts.
func (db *DB) Use(ctx context.Context, fn func(context.Context, *Conn) error) error {
	pool, err := db.connect(ctx)
	if err != nil {
		return err
	}
	pooled, err := pool.Acquire(ctx)
	if err != nil {
		return connectError{err}
	}
	defer pooled.Release()
	return fn(ctx, &Conn{Conn: pooled.Conn(), timeouts: db.timeouts})
}
