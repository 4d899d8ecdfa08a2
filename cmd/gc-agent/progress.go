package main

import (
	"fmt"
	"time"

	"github.com/alkblobs/gc-agent/agent"
)

// progress returns what shows on a terminal how far a sweep has come.
func (a *app) progress() func(agent.Progress) {
	var p pacer
	return func(now agent.Progress) {
		at := time.Now()
		a.stderr.passing(at, func() string { return p.text(now, at) })
	}
}

// pacer measures the rate of a phase.
type pacer struct {
	pool, phase string
	began       time.Time
	from        int64
}

var doing = map[string]string{"mark": "marking", "execute": "deleting", "stage": "staging"}

// text says how far the phase is. There is no rate before there were two looks
// at it.
func (p *pacer) text(now agent.Progress, at time.Time) string {
	text := fmt.Sprintf("%s: %s, %s", now.Pool, doing[now.Phase], some(now.Done, "key"))
	if p.pool != now.Pool || p.phase != now.Phase {
		*p = pacer{pool: now.Pool, phase: now.Phase, began: at, from: now.Done}
		return text
	}
	if took := at.Sub(p.began); took > 0 {
		text += fmt.Sprintf(", %s/s", count(int64(float64(now.Done-p.from)/took.Seconds())))
	}
	return text
}
