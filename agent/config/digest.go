package config

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// PoolDigest returns a fingerprint of all that is configured for a pool, its
// databases included: equal for two configurations that mean the same, wherever
// the pool stands in the file. It is empty where there is no such pool. It
// follows from secrets too, so it is for whoever may know them.
func (c *Validated) PoolDigest(name string) string {
	p, ok := c.Pool(name)
	if !ok {
		return ""
	}
	sum := sha256.New()
	enc := json.NewEncoder(sum)
	for _, part := range c.digestParts(p) {
		// What is encoded holds neither channels nor functions, and a hash takes
		// everything.
		if err := enc.Encode(part); err != nil {
			panic(fmt.Sprintf("config: digest of a pool: %v", err))
		}
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// digestParts returns what the pool consists of, in a form that encodes whole:
// secrets, formats and schedules by themselves, and no place in the file.
func (c *Validated) digestParts(p Pool) []any {
	parts := []any{p.Schedule.Spec, p.Protect.HTTP.Reveal()}
	used := map[string]bool{p.Host: true}
	p.Path, p.Schedule, p.Protect = "", Schedule{}, Protect{}
	for i := range p.Blobs {
		p.Blobs[i].Path = ""
		used[p.Blobs[i].Database] = true
	}
	for i := range p.Liveness {
		s := &p.Liveness[i]
		used[s.Database] = true
		format := ""
		if s.Format != nil {
			format = s.Format.String()
		}
		parts = append(parts, format)
		s.Path, s.Format = "", nil
	}
	for i := range p.Pins.Owners {
		o := &p.Pins.Owners[i]
		parts = append(parts, o.Alive.HTTP.Reveal())
		o.Path, o.Alive.HTTP = "", Secret{}
	}
	databases := c.Databases()
	slices.SortFunc(databases, func(a, b Database) int { return strings.Compare(a.Name, b.Name) })
	for _, db := range databases {
		if used[db.Name] {
			parts = append(parts, db.Name, db.Engine, db.URL.Reveal(), db.Path)
		}
	}
	return append(parts, p)
}

// ParseDuration reads a duration as the configuration has it: 90s, 10m, 1d12h.
func ParseDuration(s string) (time.Duration, error) { return parseDuration(s) }
