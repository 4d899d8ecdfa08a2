package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/alkblobs/gc-agent/agent/config"

	"github.com/rs/zerolog"
)

// daemonLog logs as the configuration says.
func daemonLog(a *app) zerolog.Logger {
	var w io.Writer = a.stderr
	if a.cfg.Log().Format == "console" {
		w = zerolog.ConsoleWriter{Out: a.stderr, NoColor: !a.stderr.isTTY, TimeFormat: time.RFC3339}
	}
	return zerolog.New(w).Level(level(a.cfg.Log())).With().Timestamp().Logger()
}

func level(log config.Log) zerolog.Level {
	l, err := zerolog.ParseLevel(log.Level)
	if err != nil {
		return zerolog.InfoLevel
	}
	return l
}

// noteLog is the log of a command that somebody waits for: what the agent would
// log becomes a line to read.
func noteLog(a *app) zerolog.Logger {
	return zerolog.New(notes{a}).Level(level(a.cfg.Log()))
}

// notes makes a line of each event.
type notes struct{ a *app }

func (n notes) Write(event []byte) (int, error) {
	var fields map[string]any
	if err := json.Unmarshal(event, &fields); err != nil {
		return 0, fmt.Errorf("read a log event: %w", err)
	}
	n.a.stderr.line("%s", n.text(fields))
	return len(event), nil
}

func (n notes) text(fields map[string]any) string {
	take := func(key string) string {
		s, _ := fields[key].(string)
		delete(fields, key)
		return s
	}
	kind, message := take(zerolog.LevelFieldName), take(zerolog.MessageFieldName)
	pool, path := take("pool"), take("path")
	if kind == zerolog.LevelWarnValue {
		kind = "warning"
	}
	text := fmt.Sprintf("pool %s: %s: %s", pool, kind, message)
	if path != "" {
		text = n.a.cfg.Problem(n.a.pathIn(pool, path), kind+": "+message).String()
	}
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		text += fmt.Sprintf(", %s: %v", key, fields[key])
	}
	return text
}
