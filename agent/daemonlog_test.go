package agent

import (
	"errors"
	"strings"
	"testing"

	"github.com/rs/zerolog"
)

func TestDaemonLogsHowASweepEnded(t *testing.T) {
	t.Parallel()
	lock, ratio := CauseSweeperLock, CauseMaxDeadRatio
	for name, c := range map[string]struct {
		rep                      Report
		err                      error
		level, message           string
		skipped, heldUp, stopped bool
	}{
		"whole":   {level: "info", message: "swept"},
		"failed":  {err: errors.New("no"), level: "error", message: "sweep failed; the next tick tries again"},
		"skipped": {rep: Report{Aborted: &lock, Detail: "another agent"}, level: "info", message: "sweep skipped: another agent is sweeping this pool", skipped: true},
		"aborted": {rep: Report{Aborted: &ratio, Detail: "too many"}, level: "warn", message: "sweep aborted: nothing was deleted"},
		"held up": {rep: Report{Detail: "pid 7"}, level: "warn", message: "sweep held up: what is overdue is left for the next one", heldUp: true},
		"stopped": {rep: Report{Detail: errStopped.Error()}, level: "info", message: "sweep stopped", stopped: true},
	} {
		var out strings.Builder
		log := zerolog.New(&out)
		logSweep(&log, c.rep, c.err)
		for _, want := range []string{`"level":"` + c.level + `"`, `"message":"` + c.message + `"`, `"took_ms":0`, `"longest_tx_ms":0`} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: the log lacks %s: %s", name, want, &out)
			}
		}
		if c.rep.Skipped() != c.skipped || c.rep.HeldUp() != c.heldUp || c.rep.Stopped() != c.stopped {
			t.Errorf("%s: skipped %t, held up %t, stopped %t", name, c.rep.Skipped(), c.rep.HeldUp(), c.rep.Stopped())
		}
	}
}
