package config

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestExpand(t *testing.T) {
	t.Parallel()
	vars := map[string]string{"A": "one", "B_2": "${A}$$", "EMPTY": ""}
	lookup := func(name string) (string, bool) { v, ok := vars[name]; return v, ok }
	for _, tc := range []struct {
		text, want string
		used       bool
	}{
		{text: "plain", want: "plain"},
		{text: "${A}", want: "one", used: true},
		{text: "<${A}${A}>", want: "<oneone>", used: true},
		{text: "${B_2}", want: "${A}$$", used: true},
		{text: "${EMPTY}", want: "", used: true},
		{text: "$$", want: "$"},
		{text: "$${A}", want: "${A}"},
		{text: "$$$$x$$", want: "$$x$"},
		{text: "$$${A}", want: "$one", used: true},
		{text: "$A $1 $ $", want: "$A $1 $ $"},
		{text: "$tag$it's$tag$", want: "$tag$it's$tag$"},
		{text: "{A}", want: "{A}"},
	} {
		got, used, problems := expand(tc.text, lookup)
		if got != tc.want || used != tc.used || problems != nil {
			t.Errorf("expand(%q) = %q, %v, %q; want %q, %v", tc.text, got, used, problems, tc.want, tc.used)
		}
	}
}

func TestExpandProblems(t *testing.T) {
	t.Parallel()
	const malformed = "${ isn't followed by the name of a variable (letters, digits, _) and }: correct it, or write $${ where a dollar is meant"
	unset := func(name string) string {
		return "variable " + name + " is not set: set it in the agent's environment, or write $${" + name + "} where a dollar is meant"
	}
	for text, want := range map[string][]string{
		"${X} ${Y}":    {unset("X"), unset("Y")},
		"${":           {malformed},
		"${}":          {malformed},
		"${A":          {malformed},
		"${pa$s}":      {malformed},
		"${X:-other}":  {malformed},
		"${1}":         {malformed},
		"${X${Y}":      {malformed, unset("Y")},
		"a$${X}b${X }": {malformed},
	} {
		_, _, problems := expand(text, func(string) (string, bool) { return "", false })
		if diff := cmp.Diff(want, problems); diff != "" {
			t.Errorf("expand(%q) (-want +got):\n%s", text, diff)
		}
	}
}

func TestHostname(t *testing.T) {
	t.Parallel()
	unset, set := testEnv(nil, nil, nil), testEnv(map[string]string{"HOSTNAME": "other"}, nil, nil)
	if got, ok := unset.variable("HOSTNAME"); !ok || got != "host-1" {
		t.Errorf("unset: %q, %v", got, ok)
	}
	if got, ok := set.variable("HOSTNAME"); !ok || got != "other" {
		t.Errorf("set: %q, %v", got, ok)
	}
	unset.Hostname = func() (string, error) { return "", errPath }
	if _, ok := unset.variable("HOSTNAME"); ok {
		t.Error("a host without a name has one")
	}
}
