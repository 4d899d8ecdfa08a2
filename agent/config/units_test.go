package config

import (
	"errors"
	"math"
	"testing"
	"time"
)

func TestParseDuration(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"0": 0, "0s": 0, "7d": 7 * day, "1d12h": 36 * time.Hour, "1.5d": 36 * time.Hour, "12h1d": 36 * time.Hour,
		"100ms": 100 * time.Millisecond, "1h30m": 90 * time.Minute, ".5s": 500 * time.Millisecond,
		"3µs": 3 * time.Microsecond, "106751d": 106751 * day, "9223372036854775807ns": math.MaxInt64,
	} {
		if got, err := parseDuration(text); err != nil || got != want {
			t.Errorf("parseDuration(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for text, want := range map[string]error{
		"":                      errDuration,
		"7":                     errDurationUnit,
		"1.5":                   errDurationUnit,
		"-7d":                   errDurationSign,
		"-1":                    errDurationSign,
		"1d-1h":                 errDuration,
		"+1d":                   errDuration,
		"1w":                    errDuration,
		"d":                     errDuration,
		"1 d":                   errDuration,
		"1D":                    errDuration,
		"1e3s":                  errDuration,
		"106752d":               errDurationRange,
		"106751d24h":            errDurationRange,
		"9223372036854775808ns": errDurationRange,
		"99999999999999999999d": errDurationRange,
	} {
		if got, err := parseDuration(text); !errors.Is(err, want) {
			t.Errorf("parseDuration(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int64{
		"0": 0, "1": 1, "12B": 12, "1kB": 1000, "2MB": 2e6, "3GB": 3e9, "256MiB": 256 << 20, "1 KiB": 1024,
		"1GiB": 1 << 30, "8388607TiB": 8388607 << 40, "9223372036854775807": math.MaxInt64,
	} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("parseSize(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for text, want := range map[string]error{
		"": errSize, "MiB": errSize, "1.5GiB": errSize, "-1": errSize, "1kb": errSize, "1K": errSize, "1e9": errSize, "1PiB": errSize,
		"8388608TiB": errSizeRange, "9223372036854775808": errSizeRange, "99999999999999999999B": errSizeRange,
	} {
		if got, err := parseSize(text); !errors.Is(err, want) {
			t.Errorf("parseSize(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
}
