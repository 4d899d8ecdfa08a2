package config

import (
	"fmt"
	"io"
)

// redacted stands for every secret, so that not even its length shows.
const redacted = "[redacted]"

// Secret is a string that fmt, encoders and loggers don't show.
type Secret struct{ text string }

// NewSecret returns a Secret that holds text.
func NewSecret(text string) Secret { return Secret{text: text} }

// Reveal returns what the secret holds. It is for the call that needs it, never
// for a message.
func (s Secret) Reveal() string { return s.text }

// Equal says whether two secrets hold the same.
func (s Secret) Equal(other Secret) bool { return s == other }

// String returns a placeholder.
func (s Secret) String() string { return redacted }

// GoString returns a placeholder.
func (s Secret) GoString() string { return redacted }

// MarshalText returns a placeholder; it never fails.
func (s Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Format writes a placeholder for every verb: %d would show the fields of a
// type that has nothing but String.
func (s Secret) Format(state fmt.State, _ rune) {
	_, _ = io.WriteString(state, redacted) // fmt's own buffer can't fail
}
