package main

import (
	"fmt"
	"strconv"
	"time"
)

// count writes a number in groups of three digits.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	first := 1
	if n < 0 {
		first = 2
	}
	for i := len(s) - 3; i >= first; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// some writes a number and what it counts, which takes an s for its plural.
func some(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return count(n) + " " + what + "s"
}

// size writes a number of bytes, exactly, and roughly where that is easier to
// read.
func size(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return some(n, "byte")
	}
	f, unit := float64(n)/1024, 0
	for f >= 1023.95 { // which would round to 1024.0
		f, unit = f/1024, unit+1
	}
	return fmt.Sprintf("%s (%.1f %ciB)", some(n, "byte"), f, units[unit])
}

const day = 24 * time.Hour

// span writes a duration in its two largest units; what is smaller is cut off.
func span(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + span(max(-d, -(d+1))) // the shortest of all has no counterpart
	case d == 0:
		return "0 s"
	case d < time.Second:
		return fmt.Sprintf("%d ms", d/time.Millisecond)
	case d < 10*time.Second && d%time.Second >= 100*time.Millisecond:
		return fmt.Sprintf("%d.%d s", d/time.Second, d%time.Second/(100*time.Millisecond))
	case d < time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < time.Hour:
		return two(d, time.Minute, "min", time.Second, "s")
	case d < day:
		return two(d, time.Hour, "h", time.Minute, "min")
	}
	return two(d, day, "d", time.Hour, "h")
}

func two(d, large time.Duration, largeName string, small time.Duration, smallName string) string {
	s := fmt.Sprintf("%d %s", d/large, largeName)
	if rest := d % large / small; rest > 0 {
		s += fmt.Sprintf(" %d %s", rest, smallName)
	}
	return s
}

// exactTime is RFC 3339 with all nanoseconds, so that every time has one width.
const exactTime = "2006-01-02T15:04:05.000000000Z07:00"
