package config

import (
	"errors"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

var (
	durationRE     = regexp.MustCompile(`^(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h|d))+$`)
	durationPartRE = regexp.MustCompile(`([\d.]+)([^\d.]+)`)
	sizeRE         = regexp.MustCompile(`^(\d+) ?([A-Za-z]*)$`)
)

var (
	errDuration      = errors.New("want a number and a unit, such as 7d, 1d12h, 90m, 100ms")
	errDurationUnit  = errors.New("a duration needs a unit: write 7d, 12h, 30s, 100ms")
	errDurationSign  = errors.New("a duration can't be negative")
	errDurationRange = errors.New("longer than a duration can be (about 292 years)")
	errSize          = errors.New("want a whole number of bytes, or one with kB, MB, GB, KiB, MiB, GiB or TiB")
	errSizeRange     = errors.New("larger than a size can be (8 EiB)")
)

const day = 24 * time.Hour

// parseDuration reads Go's syntax and d for days of 24 hours. Only zero needs no
// unit; nothing is negative.
func parseDuration(s string) (time.Duration, error) {
	switch {
	case s == "0":
		return 0, nil
	case strings.HasPrefix(s, "-"):
		return 0, errDurationSign
	case s != "" && strings.Trim(s, "0123456789.") == "":
		return 0, errDurationUnit
	case !durationRE.MatchString(s):
		return 0, errDuration
	}
	var sum time.Duration
	for _, part := range durationPartRE.FindAllStringSubmatch(s, -1) {
		number, unit, factor := part[1], part[2], time.Duration(1)
		if unit == "d" {
			unit, factor = "h", day/time.Hour
		}
		d, err := time.ParseDuration(number + unit)
		if err != nil || d > math.MaxInt64/factor || sum > math.MaxInt64-d*factor {
			return 0, errDurationRange
		}
		sum += d * factor
	}
	return sum, nil
}

// sizeUnits gives the bytes of each unit.
var sizeUnits = map[string]int64{
	"": 1, "B": 1,
	"kB": 1e3, "MB": 1e6, "GB": 1e9,
	"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}

// parseSize reads a number of bytes.
func parseSize(s string) (int64, error) {
	m := sizeRE.FindStringSubmatch(s)
	if m == nil {
		return 0, errSize
	}
	unit, ok := sizeUnits[m[2]]
	if !ok {
		return 0, errSize
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil || n > math.MaxInt64/unit {
		return 0, errSizeRange
	}
	return n * unit, nil
}
