package agent

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/alkblobs/gc-agent/blob"
)

// spool keeps keys in a file until the brakes have passed, so that memory stays
// flat in their number. The file is unlinked as soon as it is open: whatever
// happens, nothing is left behind.
type spool struct {
	file *os.File
	w    *bufio.Writer
	r    *bufio.Reader // nil before the first read
	n    int64
}

func newSpool() (*spool, error) {
	f, err := os.CreateTemp("", "gc-agent-candidates-*")
	if err != nil {
		return nil, fmt.Errorf("make a file for the candidates: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("unlink the candidates' file: %w", err), f.Close())
	}
	return &spool{file: f, w: bufio.NewWriter(f)}, nil
}

// add appends keys; it isn't called after the first next.
func (s *spool) add(keys []blob.Key) error {
	var length [binary.MaxVarintLen64]byte
	for _, key := range keys {
		n := binary.PutUvarint(length[:], uint64(len(key)))
		if _, err := s.w.Write(length[:n]); err != nil {
			return fmt.Errorf("spool candidates: %w", err)
		}
		if _, err := s.w.WriteString(string(key)); err != nil {
			return fmt.Errorf("spool candidates: %w", err)
		}
		s.n++
	}
	return nil
}

// next returns the following keys, at most n, in the order in which they were
// added; none at the end.
func (s *spool) next(n int) ([]blob.Key, error) {
	if err := s.rewind(); err != nil {
		return nil, fmt.Errorf("read spooled candidates: %w", err)
	}
	n = int(min(int64(n), s.n))
	keys := make([]blob.Key, 0, n)
	for range n {
		length, err := binary.ReadUvarint(s.r)
		if err != nil {
			return nil, fmt.Errorf("read spooled candidates: %w", err)
		}
		if length > blob.MaxKeyLen {
			return nil, fmt.Errorf("read spooled candidates: a key of %d bytes", length)
		}
		key := make([]byte, length)
		if _, err := io.ReadFull(s.r, key); err != nil {
			return nil, fmt.Errorf("read spooled candidates: %w", err)
		}
		keys = append(keys, blob.Key(key))
	}
	s.n -= int64(n)
	return keys, nil
}

// left says how many keys were not read yet.
func (s *spool) left() int64 { return s.n }

func (s *spool) rewind() error {
	if s.r != nil {
		return nil
	}
	if err := s.w.Flush(); err != nil {
		return err
	}
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	s.r = bufio.NewReader(s.file)
	return nil
}

func (s *spool) close() error { return s.file.Close() }
