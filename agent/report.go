package agent

import (
	"time"

	"github.com/alkblobs/gc-agent/agent/config"
)

// Form says where a pool's window is while a sweep runs.
type Form string

// The forms. They follow from the topology, never from a flag.
const (
	// Durable keeps the window in the host's database.
	Durable Form = "durable"
	// Inline keeps it in memory, for the length of one sweep.
	Inline Form = "inline"
)

// Cause is why a sweep aborted. Brakes have their own names.
type Cause string

// The causes beside the brakes.
const (
	CauseSweeperLock       Cause = "sweeper_lock"
	CauseNoLivenessSources Cause = "no_liveness_sources"
	CauseProtectFailed     Cause = "protect_failed"
	CauseMaxDeadRatio            = Cause(config.BrakeMaxDeadRatio)
	CauseMaxDeadCount            = Cause(config.BrakeMaxDeadCount)
	CauseEmptySource             = Cause(config.BrakeEmptySource)
)

// Report is what one sweep of one pool did. In a dry run, and in a pool that
// only observes, the counts say what would have been done.
type Report struct {
	Pool    string `json:"pool"`
	Form    Form   `json:"form"`
	Mode    string `json:"mode"`
	DryRun  bool   `json:"dry_run"`
	Aborted *Cause `json:"aborted"`
	// Detail says in a sentence what aborted the sweep, or what held it up.
	Detail string `json:"detail"`

	Scanned    int64 `json:"scanned"`
	Referenced int64 `json:"referenced"`
	Foreign    int64 `json:"foreign"`

	// CandidatesStaged counts the rows that are new in the window.
	CandidatesStaged int64 `json:"candidates_staged"`
	// Unstaged counts the rows that left it before they were due, because a source
	// refers to their key again or their blob is gone.
	Unstaged int64 `json:"unstaged"`

	// Overdue counts the keys that were executed: Deleted + Cancelled.
	Overdue     int64       `json:"overdue"`
	Deleted     int64       `json:"deleted"`
	Cancelled   int64       `json:"cancelled"`
	CancelledBy CancelledBy `json:"cancelled_by"`

	BytesReclaimed int64     `json:"bytes_reclaimed"`
	StartedAt      time.Time `json:"started_at"`
	FinishedAt     time.Time `json:"finished_at"`
	LongestTxMS    int64     `json:"longest_tx_ms"`
}

// CancelledBy counts the overdue keys that were not deleted, by cause.
type CancelledBy struct {
	Live     int64 `json:"live"`
	Pinned   int64 `json:"pinned"`
	Vanished int64 `json:"vanished"`
	Locked   int64 `json:"locked"`
	Failed   int64 `json:"failed"`
}

// count adds one executed key.
func (r *Report) count(c cause, bytes int64) {
	r.Overdue++
	if c == causeDead {
		r.Deleted++
		r.BytesReclaimed += bytes
		return
	}
	r.Cancelled++
	switch c {
	case causePinned:
		r.CancelledBy.Pinned++
	case causeVanished:
		r.CancelledBy.Vanished++
	case causeLocked:
		r.CancelledBy.Locked++
	case causeFailed:
		r.CancelledBy.Failed++
	default:
		r.CancelledBy.Live++
	}
}

// abort is an outcome, not a fault: the sweep found a reason to do nothing.
type abort struct {
	cause  Cause
	detail string
}

func (a *abort) Error() string { return string(a.cause) + ": " + a.detail }
