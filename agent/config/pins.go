package config

import (
	"path/filepath"
	"time"
)

// Pins says how the pins of a pool live.
type Pins struct {
	// TTL is how long a pin lives unless whoever takes it says otherwise, and what
	// the agent renews one to: whole seconds, from one to a day. A pin in process
	// lives no longer than that.
	TTL time.Duration
	// Owners are those whose pins the agent renews.
	Owners []PinOwner
}

// PinOwner is an owner of pins that the agent renews while the owner is alive.
type PinOwner struct {
	// Path is where the owner stands in the file: pools[0].pins.owners[1].
	Path string
	// Name is the owner of the pins, as applications write it.
	Name  string
	Alive Alive
}

// Alive says how to find out whether an owner of pins is alive. One of its fields
// is set.
type Alive struct {
	// HTTP answers 2xx while the owner is alive. It may hold credentials.
	HTTP Secret
	// Unix is the absolute path of a socket that takes connections while it is.
	Unix string
	// PIDFile is the absolute path of a file that holds the id of its process.
	PIDFile string
	// Always takes it for alive for as long as the agent is.
	Always bool
}

// maxOwner is as long as a pin's owner may be.
const maxOwner = 1000

const (
	defaultPinTTL = time.Minute
	longestPinTTL = day
)

func (d *decoder) pins(v value) Pins {
	p := Pins{TTL: defaultPinTTL}
	f := v.open("a mapping with ttl and owners")
	defer f.close()
	ttl := f.get("ttl")
	switch ok := ttl.duration(&p.TTL); {
	case ok && (p.TTL < time.Second || p.TTL > longestPinTTL || p.TTL%time.Second != 0):
		ttl.fail("want whole seconds, from 1s to 24h")
	}
	first := map[string]string{}
	for _, item := range f.get("owners").items("a list of owners (- name: …)") {
		o := d.pinOwner(item)
		if other, taken := first[o.Name]; taken && o.Name != "" {
			item.fail("has the name of %s as well: list each owner once", other)
		}
		first[o.Name] = o.Path
		p.Owners = append(p.Owners, o)
	}
	return p
}

func (d *decoder) pinOwner(v value) PinOwner {
	o := PinOwner{Path: v.path}
	f := v.open("a mapping with name and alive")
	defer f.close()
	name := f.need("name", "every owner has one, as applications give it to pin")
	if name.str(&o.Name) && len(o.Name) > maxOwner {
		name.fail("is longer than %d bytes", maxOwner)
	}
	o.Alive = d.alive(f.need("alive", "say how to find out whether the owner is alive: {http: URL}, {unix: SOCKET}, {pid_file: FILE} or {always: true}"))
	return o
}

func (d *decoder) alive(v value) Alive {
	var a Alive
	f := v.open("a mapping with one of http, unix, pid_file and always")
	defer f.close()
	url, unix, pidFile, always := f.get("http"), f.get("unix"), f.get("pid_file"), f.get("always")
	given := 0
	for _, way := range []value{url, unix, pidFile, always} {
		if way.given() {
			given++
		}
	}
	if f.readable && given != 1 {
		v.fail("has %d of http, unix, pid_file and always: want one", given)
	}
	var text string
	if url.str(&text) {
		if err := checkHTTP(text); err != nil {
			url.fail("%v", err)
		}
		a.HTTP = NewSecret(text)
	}
	if unix.str(&a.Unix) {
		a.Unix = d.socket(unix, a.Unix)
	}
	if pidFile.str(&a.PIDFile) {
		a.PIDFile = d.beside(a.PIDFile)
	}
	if always.boolean(&a.Always); always.given() && !a.Always {
		always.fail("want true, or another way to find out")
	}
	return a
}

// Admin says where the daemon can be reached.
type Admin struct {
	// Socket is the absolute path of its control socket, or empty.
	Socket string
}

// longestSocket is what the address of a unix socket has room for, on Linux.
const longestSocket = 107

// hiddenSocket is how much longer than its directory's the path is where a socket is
// made, before it is put into its place.
const hiddenSocket = len("/.zzzz/s")

func (d *decoder) admin(v value) Admin {
	var a Admin
	f := v.open("a mapping with socket")
	defer f.close()
	socket := f.need("socket", "give the path of the control socket, or remove admin")
	if socket.str(&a.Socket) {
		a.Socket = d.socket(socket, a.Socket)
		if most := longestSocket - hiddenSocket; len(a.Socket) <= longestSocket && len(filepath.Dir(a.Socket)) > most {
			socket.fail("the path of its directory is longer than %d bytes, which leaves no room to make a socket there: choose a shorter one", most)
		}
	}
	return a
}

// socket returns the path of a socket as seen from the configuration.
func (d *decoder) socket(v value, path string) string {
	path = d.beside(path)
	if len(path) > longestSocket {
		v.fail("is longer than the %d bytes that the path of a socket may have", longestSocket)
	}
	return path
}
