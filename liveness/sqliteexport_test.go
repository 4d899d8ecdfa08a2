package liveness

// SetStretch makes BadValue read so many rows in one transaction.
func SetStretch(l *SQLite, rows int) { l.stretch = rows }
