package memory_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/alkblobs/gc-agent/blob"
	"github.com/alkblobs/gc-agent/blob/blobtest"
	"github.com/alkblobs/gc-agent/blob/memory"
)

func TestStore(t *testing.T) {
	t.Parallel()
	keys := map[blob.Kind]func(i int) blob.Key{
		blob.KindText: func(i int) blob.Key { return blob.Key(fmt.Sprintf("images/%03d.png", i)) },
		blob.KindInt:  func(i int) blob.Key { return blob.Key(fmt.Sprint(1000 + i)) },
		blob.KindUUID: func(i int) blob.Key {
			return blob.Key(fmt.Sprintf("%08x-0000-4000-8000-000000000000", i))
		},
		// The first key is the empty one, the others aren't UTF-8.
		blob.KindBytes: func(i int) blob.Key {
			return blob.Key(strings.Repeat("\xff", i))
		},
	}
	for kind, key := range keys {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			blobtest.RunStore(t, func(*testing.T) blobtest.Fixture {
				tier := memory.New("test", kind)
				return blobtest.Fixture{
					Store: tier,
					Key:   key,
					Put:   tier.Put,
					PutForeign: func() int {
						// Long keys before, among and after the others.
						foreign := []string{"\x00", "1000", "\xff", "\xff\xff\xff\xff\xff\xff\xff"}
						for _, begin := range foreign {
							tier.Put(blob.Key(begin+strings.Repeat("\x00", blob.MaxKeyLen)), 1)
						}
						return len(foreign)
					},
				}
			})
		})
	}
}

func TestEveryPutIsAnotherVersion(t *testing.T) {
	t.Parallel()
	tier := memory.New("test", blob.KindText)
	versions := map[string]bool{}
	for range 3 {
		tier.Put("a", 1)
		seen, err := tier.Stat(t.Context(), []blob.Key{"a"})
		if err != nil || len(seen) != 1 {
			t.Fatalf("stat: %v, %v", seen, err)
		}
		if versions[seen[0].Version] {
			t.Errorf("version %q is given twice", seen[0].Version)
		}
		versions[seen[0].Version] = true
		if _, err := tier.Delete(t.Context(), seen); err != nil {
			t.Fatalf("delete: %v", err)
		}
	}
}

func TestKeysOfAnotherKindAreForeign(t *testing.T) {
	t.Parallel()
	tier := memory.New("test", blob.KindInt)
	for _, key := range []blob.Key{"7", "notes/readme", "007", ""} {
		tier.Put(key, 1)
	}
	page, err := tier.List(t.Context(), "", 10)
	if err != nil || len(page.Objects) != 1 || page.Objects[0].Key != "7" || page.Foreign != 3 {
		t.Errorf("list: %+v, %v", page, err)
	}
	found, err := tier.Stat(t.Context(), []blob.Key{"notes/readme", "007", ""})
	if err != nil || len(found) != 0 {
		t.Errorf("stat: %+v, %v", found, err)
	}
}

func TestListRefusesAnotherStoresCursor(t *testing.T) {
	t.Parallel()
	tier := memory.New("media", blob.KindText)
	_, err := tier.List(t.Context(), "page 2", 10)
	if err == nil || !strings.Contains(err.Error(), `list tier media: cursor "page 2"`) {
		t.Errorf("error: %v", err)
	}
}

// Writers and two sweepers at once: each blob is deleted exactly once.
func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	const count = 200
	tier := memory.New("test", blob.KindInt)
	var writers, sweepers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			for i := range count {
				tier.Put(blob.Key(fmt.Sprint(count*w+i)), 1)
			}
		})
	}
	freed := make([]int64, 2)
	written := make(chan struct{})
	for s := range freed {
		sweepers.Go(func() {
			for last := false; !last; {
				select {
				case <-written:
					last = true
				default:
				}
				freed[s] += sweepAll(t, tier)
			}
		})
	}
	writers.Wait()
	close(written)
	sweepers.Wait()
	if got := freed[0] + freed[1]; got != 4*count {
		t.Errorf("%d bytes were freed, want %d", got, 4*count)
	}
	if page, err := tier.List(t.Context(), "", 1); err != nil || len(page.Objects) != 0 {
		t.Errorf("left: %+v, %v", page, err)
	}
}

// sweepAll deletes what a listing from beginning to end meets.
func sweepAll(t *testing.T, tier *memory.Tier) (freed int64) {
	for page := (blob.Page{More: true}); page.More; {
		var err error
		if page, err = tier.List(t.Context(), page.Next, 50); err != nil {
			t.Errorf("list: %v", err)
			return freed
		}
		deletions, err := tier.Delete(t.Context(), page.Objects)
		if err != nil {
			t.Errorf("delete: %v", err)
			return freed
		}
		for _, d := range deletions {
			freed += d.Size
		}
	}
	return freed
}
