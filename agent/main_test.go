package agent_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/alkblobs/gc-agent/bench"

	"go.uber.org/goleak"
)

// TestMain is also where the processes begin that tests start from their own
// binary.
func TestMain(m *testing.M) {
	bench.WriterMain()
	if spec := os.Getenv(crashVariable); spec != "" {
		if err := crashChild(spec); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}
