package window_test

import (
	"testing"

	"github.com/alkblobs/gc-agent/window"
	"github.com/alkblobs/gc-agent/window/windowtest"
)

func TestMemory(t *testing.T) {
	t.Parallel()
	windowtest.Run(t, func(*testing.T) windowtest.Target {
		m := window.NewMemory()
		return windowtest.Target{
			Open:  func(*testing.T) windowtest.Engine { return m },
			Steps: 40,
		}
	})
}
