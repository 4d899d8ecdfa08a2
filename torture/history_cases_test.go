package torture_test

import (
	"strconv"
	"strings"
	"testing"
)

// The judge convicts what it should, and nothing else.
func TestHistory(t *testing.T) {
	t.Parallel()
	const key, other = `\x61`, `\x62`
	blob := func(key string, incarnation int64) change {
		return change{pool: "pin", table: "blobs", row: map[string]string{
			"key": key, "incarnation": strconv.FormatInt(incarnation, 10), "content": content(key, incarnation),
		}}
	}
	deleted := func(key string) change {
		return change{pool: "pin", table: "blobs", gone: true, row: map[string]string{"key": key}}
	}
	refers := func(table, id, key string) change {
		return change{pool: "pin", table: table, row: map[string]string{"id": id, "blob": "sha256:" + strings.TrimPrefix(key, `\x`)}}
	}
	softly := func(id, key string) change {
		c := refers("notes", id, key)
		c.row["deleted_at"] = "2026-01-01"
		return c
	}
	dropped := func(table, id string) change {
		return change{pool: "pin", table: table, gone: true, row: map[string]string{"id": id}}
	}
	pinned := func(expiry string) change {
		return change{pool: "pin", table: "gc_pins", row: map[string]string{"key": key, "owner": "w", "expiry": expiry}}
	}
	unpinned := change{pool: "pin", table: "gc_pins", gone: true, row: map[string]string{"key": key, "owner": "w"}}
	writer := func(at int64, changes ...change) transaction {
		return transaction{at: at, writer: &said{Pool: "pin", Number: at, Pinned: []string{key}}, changes: changes}
	}
	renews := func(at, by int64, changes ...change) transaction {
		return transaction{at: at, writer: &said{Pool: "pin", Number: at, Renews: by}, changes: changes}
	}
	claims := func(at int64, key string, incarnation int64) transaction {
		tx := writer(at)
		tx.writer.Claims = []claim{{key, incarnation}}
		return tx
	}
	agent := func(at int64, changes ...change) transaction { return transaction{at: at, changes: changes} }

	for name, c := range map[string]struct {
		history []transaction
		want    string // a part of the one violation; "" for none
	}{
		"nothing refers to it":    {[]transaction{writer(1, blob(key, 1)), agent(2, deleted(key))}, ""},
		"the reference was gone":  {[]transaction{writer(1, blob(key, 1), refers("notes", "1", key)), writer(2, dropped("notes", "1")), agent(3, deleted(key))}, ""},
		"it was soft-deleted":     {[]transaction{writer(1, blob(key, 1), refers("notes", "1", key)), writer(2, softly("1", key)), agent(3, deleted(key))}, ""},
		"the reference was moved": {[]transaction{writer(1, blob(key, 1), refers("notes", "1", key)), writer(2, dropped("notes", "1"), refers("pages", "1", key))}, ""},
		"another key's reference": {[]transaction{writer(1, blob(key, 1), blob(other, 2), refers("notes", "1", other)), agent(2, deleted(key))}, ""},
		"the pin had run out":     {[]transaction{writer(1, blob(key, 1), pinned("5")), agent(5, deleted(key)), agent(6, unpinned)}, ""},
		"the pin was taken back":  {[]transaction{writer(1, blob(key, 1), pinned("9")), writer(2, unpinned), agent(3, deleted(key))}, ""},
		"uploaded again":          {[]transaction{writer(1, blob(key, 1)), agent(2, deleted(key)), writer(3, blob(key, 2), refers("notes", "1", key)), claims(4, key, 2)}, ""},

		"pinned again":         {[]transaction{writer(1, pinned("5")), writer(6, pinned("9"))}, ""},
		"pinned anew":          {[]transaction{writer(1, pinned("9")), writer(2, unpinned), writer(3, pinned("7"))}, ""},
		"renewed just in time": {[]transaction{writer(1, pinned("5")), renews(6, 4, pinned("8"))}, ""},
		"renewed for less":     {[]transaction{writer(1, pinned("5")), renews(2, 1, pinned("5"))}, ""},

		"shortened":              {[]transaction{writer(1, pinned("9")), renews(2, 3, pinned("5"))}, "was shortened by 4 ns"},
		"shortened by a pin":     {[]transaction{writer(1, pinned("9")), writer(2, pinned("8"))}, "was shortened by 1 ns"},
		"brought back":           {[]transaction{writer(1, pinned("5")), renews(6, 4, pinned("9"))}, "had expired for 0 ns"},
		"renewed out of nothing": {[]transaction{renews(2, 3, pinned("5"))}, "was renewed that had expired"},
		"an agent's pin":         {[]transaction{writer(1, pinned("5")), agent(2, pinned("9"))}, "an agent, which has no owner's pins"},
		"lost":                   {[]transaction{writer(1, blob(key, 1), refers("notes", "1", key)), agent(2, deleted(key), blob(key, 2))}, "deleted while 1 references"},
		"lost after a move":      {[]transaction{writer(1, blob(key, 1), refers("notes", "1", key)), writer(2, refers("pages", "2", key), dropped("notes", "1")), agent(3, deleted(key), blob(key, 2))}, "deleted while 1 references"},
		"lost while pinned":      {[]transaction{writer(1, blob(key, 1), pinned("5")), agent(4, deleted(key))}, "with 1 ns of a pin left"},
		"lost once renewed":      {[]transaction{writer(1, blob(key, 1), pinned("5")), writer(2, pinned("9")), agent(6, deleted(key))}, "with 3 ns of a pin left"},
		"dangling":               {[]transaction{writer(1, blob(key, 1)), agent(2, deleted(key)), writer(3, refers("notes", "1", key))}, "referred to and isn't there"},
		"undeleted, dangling":    {[]transaction{writer(1, softly("1", key)), writer(2, refers("notes", "1", key))}, "referred to and isn't there"},
		"told yes":               {[]transaction{writer(1, blob(key, 1)), agent(2, deleted(key)), claims(3, key, 1)}, "told yes for blob 1"},
		"told yes of an earlier": {[]transaction{writer(1, blob(key, 1)), agent(2, deleted(key)), writer(3, blob(key, 2)), claims(4, key, 1)}, "and there is 2"},
		"told yes of nothing":    {[]transaction{claims(1, key, 0)}, "told yes for blob 0"},
		"a live pin removed":     {[]transaction{writer(1, pinned("9")), agent(2, unpinned)}, "removed a pin"},
		"a reference removed":    {[]transaction{writer(1, blob(key, 1), refers("notes", "1", key)), agent(2, dropped("notes", "1"))}, "an agent changed a row of notes"},
		"another content":        {[]transaction{writer(1, change{pool: "pin", table: "blobs", row: map[string]string{"key": key, "incarnation": "1"}})}, "holds"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHistory(pools())
			for _, tx := range c.history {
				h.apply(tx)
			}
			switch {
			case c.want == "" && h.lost() != 0:
				t.Errorf("convicted of %q", h.violations)
			case c.want != "" && (h.lost() != 1 || !strings.Contains(h.violations[0], c.want)):
				t.Errorf("%q, want one with %q", h.violations, c.want)
			}
		})
	}
	t.Run("leaked", func(t *testing.T) {
		t.Parallel()
		h := newHistory(pools())
		h.apply(writer(1, blob(key, 1), pinned("5"), blob(other, 2)))
		if dead := h.pools["pin"].dead(4); len(dead) != 1 || dead[0] != other {
			t.Errorf("dead at 4: %q", dead)
		}
		if dead := h.pools["pin"].dead(5); len(dead) != 2 {
			t.Errorf("dead at 5: %q", dead)
		}
	})
	t.Run("told otherwise", func(t *testing.T) {
		t.Parallel()
		h := newHistory(pools())
		h.apply(writer(1))
		h.apply(writer(2))
		for number, committed := range map[int64]bool{1: true, 2: false, 3: true, 4: false} {
			h.tell(number, committed)
		}
		if h.reconcile(); h.lost() != 2 {
			t.Errorf("%q, want one of transaction 2 and one of 3", h.violations)
		}
	})
}
