package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/alkblobs/gc-agent/internal/demo"

	"github.com/rs/zerolog"
)

// demoLive runs the daemon beside the application until a signal.
func (a *app) demoLive(ctx context.Context, shop *demo.App) error {
	ag, pools, err := a.agent(demoLog)
	if err != nil {
		return err
	}
	defer a.closeAgent(ag)
	start, err := shop.Take(ctx)
	if err != nil {
		return err
	}
	a.tell(demoLiveStart(shop, start, a.window(pools[0])))
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	lived := make(chan error, 1)
	go func() {
		err := shop.Live(ctx)
		cancel(err)
		lived <- err
	}()
	// It ends without an error, whatever ends it.
	runErr := ag.Run(ctx, a.stop)
	cancel(nil)
	if err := <-lived; err != nil {
		return err
	}
	if runErr != nil {
		return runErr
	}
	end, err := shop.Take(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	if dangling := end.Dangling(); len(dangling) > 0 {
		return fmt.Errorf("blob %s is referred to and was deleted", dangling[0])
	}
	a.tell(demoLiveEnd(shop, end))
	return nil
}

// demoLog makes a line on standard output of each sweep's report; what else is
// worth a warning goes to standard error.
func demoLog(a *app) zerolog.Logger {
	return zerolog.New(sweepLines{notes{a}}).With().Timestamp().Logger()
}

type sweepLines struct{ notes notes }

// swept is what a line shows of a report in the log.
type swept struct {
	Message          string `json:"message"`
	Time             string `json:"time"`
	Scanned          int64  `json:"scanned"`
	CandidatesStaged int64  `json:"candidates_staged"`
	Unstaged         int64  `json:"unstaged"`
	Deleted          int64  `json:"deleted"`
	Cancelled        int64  `json:"cancelled"`
	BytesReclaimed   int64  `json:"bytes_reclaimed"`
}

// WriteLevel shows reports, and warnings and worse.
func (l sweepLines) WriteLevel(level zerolog.Level, event []byte) (int, error) {
	if level >= zerolog.WarnLevel {
		return l.notes.Write(event)
	}
	return l.Write(event)
}

func (l sweepLines) Write(event []byte) (int, error) {
	var s swept
	if err := json.Unmarshal(event, &s); err != nil {
		return 0, fmt.Errorf("read a log event: %w", err)
	}
	switch {
	case s.Message != "swept":
	case l.notes.a.json:
		_ = l.notes.a.print(string(event)) // nobody may be reading: that ends no daemon
	default:
		_ = l.notes.a.print(demoLine(s))
	}
	return len(event), nil
}
