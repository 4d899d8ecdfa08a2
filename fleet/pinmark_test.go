package fleet_test

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/alkblobs/gc-agent/fleet"
)

// Who keeps pins and who deletes without them keep each other out, those who delete
// don't, and a schema's mark is its own.
func TestPinMark(t *testing.T) {
	t.Parallel()
	url, _ := newPool(t)
	keeper, second, sweeper, other := connect(t, url, patient), connect(t, url, patient), connect(t, url, patient), connect(t, url, patient)
	wantsMark := func(what string, got bool, err error, want bool) {
		t.Helper()
		check(t, err)
		if got != want {
			t.Errorf("%s: got the mark: %t, want %t", what, got, want)
		}
	}
	got, err := fleet.MarkPinKeeper(t.Context(), keeper, schema)
	wantsMark("keeper", got, err, true)
	got, err = fleet.HasPinMark(t.Context(), keeper, schema)
	wantsMark("keeper, asked", got, err, true)
	got, err = fleet.MarkPinKeeper(t.Context(), second, schema)
	wantsMark("second keeper", got, err, false)
	got, err = fleet.KeepPinKeepersAway(t.Context(), sweeper, schema)
	wantsMark("sweeper", got, err, false)
	got, err = fleet.KeepPinKeepersAway(t.Context(), sweeper, "another")
	wantsMark("sweeper of another schema", got, err, true)
	got, err = fleet.HasPinMark(t.Context(), sweeper, schema)
	wantsMark("sweeper, asked", got, err, false)
	who, err := fleet.PinMarkHolders(t.Context(), sweeper, schema)
	check(t, err)
	if want := "pid " + strconv.Itoa(int(keeper.PgConn().PID())) + " ("; !strings.HasPrefix(who, want) || !strings.Contains(who, "gc-agent") {
		t.Errorf("held by %q, want %s…", who, want)
	}

	check(t, keeper.Close(t.Context()))
	for got = false; !got; { // until the server has noticed
		got, err = fleet.KeepPinKeepersAway(t.Context(), sweeper, schema)
		check(t, err)
	}
	got, err = fleet.KeepPinKeepersAway(t.Context(), other, schema)
	wantsMark("another sweeper", got, err, true)
	got, err = fleet.MarkPinKeeper(t.Context(), second, schema)
	wantsMark("keeper during sweeps", got, err, false)
}

// The same beside an SQLite file, which a look makes nothing of.
func TestFilePinMark(t *testing.T) {
	t.Parallel()
	path := databaseFile(t)
	seen, ok, err := fleet.FileSeePinKeepersAway(path)
	if err != nil || !ok {
		t.Fatalf("ok: %t, err = %v", ok, err)
	}
	check(t, seen.Release(t.Context()))
	if _, err := os.Stat(path + ".gc-agent.pins"); !os.IsNotExist(err) {
		t.Errorf("a look made a file: err = %v", err)
	}
	keeper, ok, err := fleet.FileMarkPinKeeper(path)
	if err != nil || !ok || !keeper.Stands() {
		t.Fatalf("ok: %t, err = %v", ok, err)
	}
	for name, take := range map[string]func(string) (*fleet.FileLease, bool, error){
		"keeper": fleet.FileMarkPinKeeper, "sweeper": fleet.FileKeepPinKeepersAway, "look": fleet.FileSeePinKeepersAway,
	} {
		if _, ok, err := take(path); err != nil || ok {
			t.Errorf("%s: ok: %t, err = %v", name, ok, err)
		}
	}
	if got, ok := fleet.FilePinKeeperPID(path); !ok || got != os.Getpid() {
		t.Errorf("kept by %d, %t, want %d", got, ok, os.Getpid())
	}
	check(t, os.Remove(path+".gc-agent.pins"))
	if keeper.Stands() {
		t.Error("a lock on a file that was removed stands")
	}
	check(t, keeper.Release(t.Context()))
	one, ok, err := fleet.FileKeepPinKeepersAway(path)
	if err != nil || !ok {
		t.Fatalf("ok: %t, err = %v", ok, err)
	}
	two, ok, err := fleet.FileKeepPinKeepersAway(path)
	if err != nil || !ok {
		t.Fatalf("ok: %t, err = %v", ok, err)
	}
	if _, ok, err := fleet.FileMarkPinKeeper(path); err != nil || ok {
		t.Errorf("keeper during sweeps: ok: %t, err = %v", ok, err)
	}
	check(t, one.Release(t.Context()))
	check(t, two.Release(t.Context()))
}
