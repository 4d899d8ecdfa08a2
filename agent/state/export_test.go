package state

// Keep bounds the history to n sweeps of a pool.
func (s *Store) Keep(n int) { s.keep = n }
