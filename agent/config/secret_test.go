package config

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"testing"

	"github.com/rs/zerolog"
	"gopkg.in/yaml.v3"
)

const password = "s3cr3t"

// secretCases are files in which a password ended up somewhere.
var secretCases = map[string]string{
	"unknown scheme":        "databases: {a: {url: 'mysql://u:s3cr3t@h/d'}}",
	"keywords":              "databases: {a: {url: 'host=h password=s3cr3t'}}",
	"bad port":              "databases: {a: {url: 'postgres://u:s3cr3t@h:port/d'}}",
	"mislaid port":          "databases: {a: {url: 'postgres://u:s3cr3t/x@h/d'}}",
	"hash":                  "databases: {a: {url: 'postgres://u:s3cr3t#x@h/d'}}",
	"bad escape":            "databases: {a: {url: 'postgres://u:s3cr3t%zz@h/d'}}",
	"space":                 "databases: {a: {url: 'postgres://u:s3cr3t x@h/d'}}",
	"line break":            "databases: {a: {url: \"postgres://u:s3cr3t\\nx@h/d\"}}",
	"NUL":                   "databases: {a: {url: \"postgres://u:s3cr3t\\0@h/d\"}}",
	"bad parameter":         "databases: {a: {url: 'postgres://u:s3cr3t@h/d?sslmode=s3cr3t'}}",
	"bad session":           "databases: {a: {url: 'postgres://h/d?password=s3cr3t&target_session_attrs=s3cr3t'}}",
	"bad protocol":          "databases: {a: {url: 'postgres://h/d?min_protocol_version=s3cr3t'}}",
	"missing certificate":   "databases: {a: {url: 'postgres://h/d?sslmode=verify-full&sslrootcert=/s3cr3t'}}",
	"pool size":             "databases: {a: {url: 'postgres://h/d?pool_max_conns=s3cr3t'}}",
	"sqlite":                "databases: {a: {url: 'sqlite:/db?key=s3cr3t'}}",
	"sqlite in memory":      "databases: {a: {url: 'sqlite:file:s3cr3t:memory:'}}",
	"no mapping":            "databases: {a: 'postgres://u:s3cr3t@h/d'}",
	"no names":              "databases: 'postgres://u:s3cr3t@h/d'",
	"a list":                "databases: ['postgres://u:s3cr3t@h/d']",
	"a list of one":         "databases: {a: ['postgres://u:s3cr3t@h/d']}",
	"url a list":            "databases: {a: {url: ['postgres://u:s3cr3t@h/d']}}",
	"no space":              "databases: {a: {url:postgres://u:s3cr3t@h/d}}",
	"comma":                 "databases: {a: {url: postgres://u:x,s3cr3t@h/d}}",
	"comma in a parameter":  "databases: {a: {url: postgres://h/d?password=x,s3cr3t}}",
	"brace":                 "databases: {a: {url: postgres://u:x}s3cr3t@h/d}}",
	"as a name":             "databases: {'postgres://u:s3cr3t@h/d': {url: 'sqlite:/a'}}",
	"as a key":              "databases: {a: {'postgres://u:s3cr3t@h/d': url}}",
	"as a complex key":      "databases: {a: {[s3cr3t]: url}}",
	"twice":                 "databases: {a: {'x s3cr3t': 1, 'x s3cr3t': 2}}",
	"as a tag":              "databases: {a: {url: !s3cr3t x}}",
	"as a tag on a mapping": "databases: {a: !s3cr3t {url: x}}",
	"as an alias":           "databases: {a: {url: *s3cr3t}}",
	"after an anchor":       "databases: {a: {url: &s3cr3t }}",
	"as a directive":        "%s3cr3t\n---\ndatabases: {}",
	"as a block":            "databases: {a: {url: |s3cr3t}}",
	"as an escape":          `databases: {a: {url: "\s3cr3t"}}`,
	"both":                  "databases: {a: {url: 'postgres://u:s3cr3t@h/d', url_file: /secret}}",
	"variable":              "databases: {a: {url: 'x${SECRET_URL}'}}",
	"variable in a URL":     "databases: {a: {url: 'postgres://u:${SECRET}@h:port/d'}}",
	"variable cut off":      "databases: {a: {url: 'postgres://u:${s3cr3t@h/d'}}",
	"malformed variable":    "databases: {a: {url: 'postgres://u:${s3cr3t x}@h/d'}}",
	"variable in a name":    "databases: {a: {url: 'sqlite:/a'}}\npools: [{name: '${SECRET} x'}]",
	"variable not UTF-8":    "databases: {a: {url: '${SECRET_LATIN1}'}}",
	"url as a file":         "databases: {a: {url_file: 'postgres://u:s3cr3t@h/d'}}",
	"variable as a file":    "databases: {a: {url_file: '${SECRET_URL}'}}",
	"file not readable":     "databases: {a: {url_file: /s3cr3t/denied}}",
	"file fails":            "databases: {a: {url_file: /s3cr3t/fails}}",
	"file breaks":           "databases: {a: {url_file: /s3cr3t/breaks}}",
	"file malformed":        "databases: {a: {url_file: /secret}}",
	"file of two lines":     "databases: {a: {url_file: /secrets}}",
	"as a reference":        "databases: {a: {url: 'sqlite:/a'}}\npools: [{name: p, database: 'postgres://u:s3cr3t@h/d'}]",
	"as a pool's name":      "databases: {a: {url: 'sqlite:/a'}}\npools: [{name: 'postgres://u:s3cr3t@h/d'}]",
	"in other fields": "databases: {a: {url: 'sqlite:/a'}}\npools: [{name: p, database: a, schedule: 'postgres://u:s3cr3t@h', window: 'u:s3cr3t@h', mode: 'u:s3cr3t@h'," +
		" blobs: [{type: '//s3cr3t@h', table: 'x..//u:s3cr3t@h', column: 'x.//u:s3cr3t@h'}], liveness: [{name: s, query: 'SELECT password s3cr3t;', format: 'u:s3cr3t@{h'}]}]",
	"in the hook":              "databases: {a: {url: 'sqlite:/a'}}\npools: [{name: p, protect: {http: 'http://u:s3cr3t@h:port/'}}]",
	"in the hook, no host":     "databases: {a: {url: 'sqlite:/a'}}\npools: [{name: p, protect: {http: 'http:s3cr3t'}}]",
	"in the hook, as a string": "databases: {a: {url: 'sqlite:/a'}}\npools: [{name: p, protect: 'http://u:s3cr3t@h'}]",
}

func secretEnv() Env {
	env := testEnv(map[string]string{
		"SECRET": password, "SECRET_URL": "postgres://u:" + password + "@h/d", "SECRET_LATIN1": password + "\xe4",
	}, map[string]string{"/secret": "x://u:" + password + "@h", "/secrets": "postgres://u:" + password + "@h\nx"}, nil)
	read := env.ReadFile
	env.ReadFile = func(path string) ([]byte, error) {
		switch {
		case strings.HasSuffix(path, "denied"):
			return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrPermission}
		case strings.HasSuffix(path, "fails"):
			return nil, &fs.PathError{Op: "read", Path: path, Err: syscall.EIO}
		case strings.HasSuffix(path, "breaks"):
			return nil, fmt.Errorf("read %s", path)
		}
		return read(path)
	}
	return env
}

func TestSecretsStayOutOfErrors(t *testing.T) {
	t.Parallel()
	for name, text := range secretCases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lines := problems(t, text, secretEnv())
			if len(lines) == 0 {
				t.Fatal("no problem")
			}
			if all := strings.Join(lines, "\n"); strings.Contains(all, password) {
				t.Errorf("the password is in a message:\n%s", all)
			}
		})
	}
}

func TestSecretsStayOutOfOutput(t *testing.T) {
	t.Parallel()
	c := mustParse(t, `
databases: {a: {url: "${SECRET_URL}"}}
pools: [{name: p, database: a, blobs: [{type: table, table: t, column: c}], protect: {http: "http://u:${SECRET}@h"}}]
`, secretEnv())
	db, _ := c.Database("a")
	pool, _ := c.Pool("p")
	if got := db.URL.Reveal(); got != "postgres://u:"+password+"@h/d" {
		t.Errorf("revealed %q", got)
	}
	if got := pool.Protect.HTTP; got.Reveal() != "http://u:"+password+"@h" {
		t.Errorf("revealed %q", got.Reveal())
	}
	var out strings.Builder
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%t"} {
		fmt.Fprintf(&out, verb+" "+verb+" "+verb+"\n", db, pool, db.URL)
	}
	for _, encode := range []func(any) ([]byte, error){json.Marshal, yaml.Marshal} {
		for _, v := range []any{db, pool.Protect, db.URL} {
			text, err := encode(v)
			if err != nil {
				t.Fatal(err)
			}
			out.Write(text)
		}
	}
	out.WriteString(db.URL.String() + db.URL.GoString())
	log := zerolog.New(&out)
	log.Info().Interface("db", db).Stringer("url", db.URL).Any("pool", pool.Protect).Send()
	hex := fmt.Sprintf("%x", password)
	if got := out.String(); strings.Contains(got, password) || strings.Contains(strings.ToLower(got), hex) || !strings.Contains(got, redacted) {
		t.Errorf("the password is in:\n%s", got)
	}
}
