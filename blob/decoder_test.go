package blob_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/alkblobs/gc-agent/blob"
)

func mustDecoder(t testing.TB, match string, url bool, sources ...string) *blob.Decoder {
	t.Helper()
	d, err := blob.NewDecoder(blob.Decoding{Match: match, URL: url, Formats: formatList(t, sources...)})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func formatList(t testing.TB, sources ...string) []blob.Format {
	t.Helper()
	formats := make([]blob.Format, len(sources))
	for i, s := range sources {
		formats[i] = mustFormat(t, s)
	}
	return formats
}

func TestNewDecoderErrors(t *testing.T) {
	t.Parallel()
	hex := formatList(t, "{hex}")
	tests := []struct {
		decoding blob.Decoding
		want     string
	}{
		{blob.Decoding{Match: "(a)"}, "no format: values can't be read without one"},
		{blob.Decoding{Formats: append(slices.Clone(hex), blob.Format{})}, "format 2 of 2 is empty"},
		{blob.Decoding{Match: "(a", Formats: hex}, "match \"(a\": error parsing regexp: missing closing ): `(a`"},
		{blob.Decoding{Match: "(?<=a)(b)", Formats: hex}, "match \"(?<=a)(b)\": error parsing regexp: invalid named capture: `(?<=a)(b)`"},
		{blob.Decoding{Match: "a", Formats: hex}, `match "a": it has no group, not one: put the key in ( ), and write (?: ) for what is grouped otherwise`},
		{blob.Decoding{Match: "(a)|(b)", Formats: hex}, `match "(a)|(b)": it has 2 groups, not one: put the key in ( ), and write (?: ) for what is grouped otherwise`},
	}
	for _, tt := range tests {
		if d, err := blob.NewDecoder(tt.decoding); err == nil || err.Error() != tt.want || d != nil {
			t.Errorf("%+v:\n got %v\nwant %s", tt.decoding, err, tt.want)
		}
	}
}

func TestDecoder(t *testing.T) {
	t.Parallel()
	type value struct {
		value string
		keys  []blob.Key
	}
	keys := func(keys ...blob.Key) []blob.Key { return keys }
	tests := []struct {
		name     string
		decoder  *blob.Decoder
		none     blob.Reading // what a value without a key is
		values   []value
		lookedUp bool
	}{
		{
			name: "one format", decoder: mustDecoder(t, "", false, "sha256:{hex}"), none: blob.Unparseable, lookedUp: true,
			values: []value{
				{"sha256:abcd", keys("\xab\xcd")},
				{"abcd", nil},
				{"", nil},
			},
		},
		{
			name: "every format that fits", decoder: mustDecoder(t, "", false, "{base64}", "{hex}", "{HEX}", "x/{hex}"), none: blob.Unparseable, lookedUp: true,
			values: []value{
				{"abcd", keys("\x69\xb7\x1d", "\xab\xcd")},
				{"x/abcd", keys("\xab\xcd", "\xc7\xf6\x9b\x71")},
				{"ab cd", nil},
			},
		},
		{
			name: "not looked up with {*}", decoder: mustDecoder(t, "", false, "{hex}", "{*}/{hex}"), none: blob.Unparseable,
			values: []value{{"abcd", keys("\xab\xcd")}, {"a/abcd", keys("\xab\xcd")}, {"a/", nil}},
		},
		{
			name: "every match", decoder: mustDecoder(t, `\(/files/([^)]+)\)`, false, "{text}"), none: blob.Ordinary,
			values: []value{
				{"no file", nil},
				{"", nil},
				{"![b](/files/b.png) ![a](/files/a.png) ![b](/files/b.png) /files/c.png", keys("a.png", "b.png")},
				{"(/files/\xff) (/files/a.png)", keys("a.png")},
			},
		},
		{
			name: "a match that is no key is ordinary", decoder: mustDecoder(t, `([0-9a-f]+)`, false, "{hex}"), none: blob.Ordinary,
			values: []value{{"abc", nil}, {"abc abcd", keys("\xab\xcd")}},
		},
		{
			name: "a group that takes no part", decoder: mustDecoder(t, `skip|id=([^&]*)`, false, "{text}"), none: blob.Ordinary,
			values: []value{{"skip", nil}, {"skip&id=&id=7", keys("", "7")}},
		},
		{
			name: "the match comes before the format", decoder: mustDecoder(t, `blob=(\S+)`, false, "sha256:{hex}"), none: blob.Ordinary,
			values: []value{{"blob=sha256:ab x", keys("\xab")}, {"blob=ab", nil}},
		},
		{
			name: "url", decoder: mustDecoder(t, "", true, "/v1/files/{text}"), none: blob.Unparseable,
			values: []value{
				{"/v1/files/a.png", keys("a.png")},
				{"/v1/files/a+b.png", keys("a+b.png")},
				{"/v1/files/a%20b.png", keys("a b.png", "a%20b.png")},
				{"/v1/files/%C3%a4", keys("%C3%a4", "ä")},
				{"%2Fv1%2Ffiles%2Fa.png", keys("a.png")},
				{"/v1/files/a%2520b", keys("a%20b", "a%2520b")}, // once
				{"/v1/files/100%", keys("100%")},
				{"/v1/files/100%/a%20b%2", keys("100%/a b%2", "100%/a%20b%2")},
				{"/v1/files/%zz%4", keys("%zz%4")},
				{"/v1/files/%%41", keys("%%41", "%A")},
				{"/v1/files/%ff", keys("%ff")}, // no UTF-8
				{"/v1/files/%00", keys("%00")},
				{"/v2/files/a", nil},
			},
		},
		{
			name: "the match comes before the url", decoder: mustDecoder(t, `f=([^&]+)`, true, "u/{text}"), none: blob.Ordinary,
			values: []value{
				{"x?f=u%2Fa%26b&g=1", keys("a&b")},
				{"x?%66=u%2Fa", nil},
			},
		},
		{
			name: "bytes", decoder: mustDecoder(t, "", false, "{bytes}"), none: blob.Unparseable, lookedUp: true,
			values: []value{{"\xff\x00", keys("\xff\x00")}, {"", keys("")}},
		},
	}
	for _, tt := range tests {
		for _, v := range tt.values {
			want := tt.none
			if v.keys != nil {
				want = blob.Named
			}
			got, reading := tt.decoder.Keys(v.value)
			if diff := cmp.Diff(v.keys, got); diff != "" || reading != want {
				t.Errorf("%s, %q: %s, not %s; %s", tt.name, v.value, reading, want, diff)
			}
		}
		if formats, ok := tt.decoder.Reversible(); ok != tt.lookedUp || ok && len(formats) != len(tt.decoder.Formats()) || !ok && formats != nil {
			t.Errorf("%s: looked up in %v, %t", tt.name, formats, ok)
		}
	}
}

func TestDecoderAppends(t *testing.T) {
	t.Parallel()
	d := mustDecoder(t, `([a-z]+)`, false, "{text}")
	keys := []blob.Key{"z", "b"}
	keys, _ = d.Append(keys, "c b b")
	keys, reading := d.Append(keys, "1")
	if want := []blob.Key{"z", "b", "b", "c"}; !slices.Equal(keys, want) || reading != blob.Ordinary {
		t.Errorf("%q, %s; want %q", keys, reading, want)
	}
}

// One key as a path, as the URL of a CDN, bare, and inside Markdown.
func TestDecoderOfOneKeyInManyPlaces(t *testing.T) {
	t.Parallel()
	avatar := mustDecoder(t, `^(?:https://cdn\.example\.test/)?([^?]+)`, true, "/v1/files/{text}", "{text}")
	bio := mustDecoder(t, `/v1/files/([^)\s]+)`, true, "{text}")
	live := map[blob.Key]bool{}
	for value, d := range map[string]*blob.Decoder{
		"/v1/files/u/1.png":                      avatar,
		"https://cdn.example.test/u/2.png?v=2":   avatar,
		"u/3.png":                                avatar,
		"x ![p](/v1/files/u/4.png) y":            bio,
		"nothing here, not even https://u/5.png": bio,
	} {
		keys, _ := d.Keys(value)
		for _, key := range keys {
			live[key] = true
		}
	}
	for key, want := range map[blob.Key]bool{"u/1.png": true, "u/2.png": true, "u/3.png": true, "u/4.png": true, "u/5.png": false} {
		if live[key] != want {
			t.Errorf("%s: live %t, want %t", key, live[key], want)
		}
	}
}

// Where the formats fit the values less well, as a list they still do.
func TestDecoderListOfFormats(t *testing.T) {
	t.Parallel()
	d := mustDecoder(t, "", false, "/v1/files/u/{int}.png", "https://cdn.example.test/u/{int}.png?{*}", "u/{int}.png", "{*}](/v1/files/u/{int}.png) y")
	for value, want := range map[string]blob.Key{
		"/v1/files/u/1.png": "1", "https://cdn.example.test/u/2.png?v=2": "2", "u/3.png": "3", "x ![p](/v1/files/u/4.png) y": "4",
	} {
		if keys, reading := d.Keys(value); !slices.Equal(keys, []blob.Key{want}) || reading != blob.Named {
			t.Errorf("%q: %q, %s", value, keys, reading)
		}
	}
}

// Formats of the field: what the application stores, and the key that it means.
func TestFormatsOfTheField(t *testing.T) {
	t.Parallel()
	const sha1 = "a94a8fe5ccb19ba61c4c0873d391e987982fbbd3"
	const sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
	tests := []struct {
		application, format, value string
		key                        blob.Key
		reversible                 bool
	}{
		{"Active Storage, active_storage_blobs.key", "{text}", "xtapjjcjiudrlk3tmwyjgpuobabd", "xtapjjcjiudrlk3tmwyjgpuobabd", true},
		{"Active Storage, files on disk", "{text[0:2]}/{text[2:4]}/{text}", "xt/ap/xtapjjcjiudrlk3tmwyjgpuobabd", "xtapjjcjiudrlk3tmwyjgpuobabd", true},
		{"Active Storage, variants", "variants/{text}", "variants/xtap/9f86", "xtap/9f86", true},
		{"Django, a FileField", "{text}", "avatars/2024/05/größe_x1Yz.png", "avatars/2024/05/größe_x1Yz.png", true},
		{"Django, the URL of one", "/media/{text}", "/media/avatars/2024/05/a.png", "avatars/2024/05/a.png", true},
		{"Nextcloud, objects", "urn:oid:{int}", "urn:oid:41", "41", true},
		{"Odoo, ir_attachment.store_fname", "{hex[0:2]}/{hex}", "a9/" + sha1, unhex(sha1), true},
		{"Mattermost, fileinfo.path", "{text}", "20240115/teams/noteam/channels/4yx7/users/9hmm/k3f8/a b.png", "20240115/teams/noteam/channels/4yx7/users/9hmm/k3f8/a b.png", true},
		{"Gitea, attachment.uuid", "{uuid}", aUUID, aUUID, true},
		{"Gitea, attachments on disk", "{uuid[0:1]}/{uuid[1:2]}/{uuid}", "6/b/" + aUUID, aUUID, true},
		{"Gitea, LFS objects", "{hex[0:2]}/{hex[2:4]}/{hex[4:]}", "9f/86/" + sha256[4:], unhex(sha256), true},
		{"Git LFS", "{hex[0:2]}/{hex[2:4]}/{hex}", "9f/86/" + sha256, unhex(sha256), true},
		{"a container registry", "blobs/sha256/{hex[0:2]}/{hex}/data", "blobs/sha256/9f/" + sha256 + "/data", unhex(sha256), true},
		{"an OCI digest", "sha256:{hex}", "sha256:" + sha256, unhex(sha256), true},
		{"Subresource Integrity", "sha256-{base64}", "sha256-n4bQgYhMfWWaL+qgxVrQFaO/TxsrC4Is0V1sFbDwCgg=", unhex(sha256), true},
		{"any URL of a digest", "{*}/{hex}", "https://cdn.example.test/blobs/" + sha256, unhex(sha256), false},
		{"a digest with any extension", "{hex}.{*}", sha256 + ".tar.gz", unhex(sha256), false},
		{"thumbnails", "thumbs/{uuid}{*}", "thumbs/" + aUUID + "-200x200.webp", aUUID, false},
	}
	for _, tt := range tests {
		f := mustFormat(t, tt.format)
		key, canonical, ok := f.Decode(tt.value)
		if key != tt.key || !ok || canonical != tt.reversible || f.Reversible() != tt.reversible {
			t.Errorf("%s: %q, canonical %t, ok %t, reversible %t", tt.application, key, canonical, ok, f.Reversible())
		}
		if value, ok := f.Encode(key); ok != tt.reversible || ok && value != tt.value {
			t.Errorf("%s: spelled %q, ok %t", tt.application, value, ok)
		}
	}
}

func unhex(s string) blob.Key {
	key, err := blob.KindBytes.ParseKey(s)
	if err != nil {
		panic(err)
	}
	return key
}

// decoderFormats are of all kinds, so that many fit one value.
var decoderFormats = []string{
	"{bytes}", "{text}", "{int}", "{uuid}", "{hex}", "{HEX}", "{base64}", "a/{text}", "{hex[0:2]}/{hex}", "{*}/{hex}", "{int}.{*}",
	"{text[0:1]}/{text}", "{hex[0:2]}{hex[2:]}",
}

func drawDecoding(t *rapid.T) blob.Decoding {
	d := blob.Decoding{
		Match: rapid.SampledFrom([]string{"", `([0-9a-f]+)`, `a(.)?`, `/([^/]*)`, `(?s)(.*)`}).Draw(t, "match"),
		URL:   rapid.Bool().Draw(t, "url"),
	}
	for _, source := range rapid.SliceOfN(rapid.SampledFrom(decoderFormats), 1, 4).Draw(t, "formats") {
		d.Formats = append(d.Formats, mustRapidFormat(t, source))
	}
	return d
}

// Another format, match or reading of escapes only ever adds keys.
func TestDecoderFormatsOnlyAdd(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		few := drawDecoding(t)
		more := few
		at := rapid.IntRange(0, len(few.Formats)).Draw(t, "at")
		more.Formats = slices.Insert(slices.Clone(few.Formats), at, mustRapidFormat(t, rapid.SampledFrom(decoderFormats).Draw(t, "further")))
		more.URL = few.URL || rapid.Bool().Draw(t, "more url")
		value := rapid.OneOf(rapid.StringMatching(`[0-9a-fA%/.=xZ-]{0,12}`), rapid.String()).Draw(t, "value")
		checkDecoder(t, few, value)
		checkDecoder(t, more, value)
		if lost := missing(t, few, more, value); len(lost) > 0 {
			t.Fatalf("%q: with %v the keys %q are lost", value, more.Formats, lost)
		}
	})
}

type fataler interface {
	Helper()
	Fatalf(string, ...any)
}

func missing(t fataler, few, more blob.Decoding, value string) []blob.Key {
	t.Helper()
	fewer, err := blob.NewDecoder(few)
	if err != nil {
		t.Fatalf("%v", err)
	}
	further, err := blob.NewDecoder(more)
	if err != nil {
		t.Fatalf("%v", err)
	}
	keys, _ := fewer.Keys(value)
	of, _ := further.Keys(value)
	return slices.DeleteFunc(keys, func(key blob.Key) bool { return slices.Contains(of, key) })
}

// checkDecoder holds for any decoder and any value.
func checkDecoder(t fataler, decoding blob.Decoding, value string) {
	t.Helper()
	d, err := blob.NewDecoder(decoding)
	if err != nil {
		t.Fatalf("%v", err)
	}
	keys, reading := d.Keys(value)
	if !slices.IsSorted(keys) || len(slices.Compact(slices.Clone(keys))) != len(keys) {
		t.Fatalf("%q: keys %q", value, keys)
	}
	if want := wantReading(decoding, keys); reading != want {
		t.Fatalf("%q: %s, not %s, with keys %q", value, reading, want, keys)
	}
	// What is read as it stands is there, whatever else is.
	texts := []string{value}
	if decoding.Match != "" {
		texts = nil
		for _, at := range regexp.MustCompile(decoding.Match).FindAllStringSubmatchIndex(value, -1) {
			if at[2] >= 0 {
				texts = append(texts, value[at[2]:at[3]])
			}
		}
	}
	for _, f := range decoding.Formats {
		for _, text := range texts {
			if key, _, ok := f.Decode(text); ok && !slices.Contains(keys, key) {
				t.Fatalf("%q: %s reads %q, which isn't among %q", text, f, key, keys)
			}
		}
	}
	if formats, ok := d.Reversible(); ok {
		checkLookUp(t, formats, keys, value)
	}
}

func wantReading(d blob.Decoding, keys []blob.Key) blob.Reading {
	switch {
	case len(keys) > 0:
		return blob.Named
	case d.Match != "":
		return blob.Ordinary
	default:
		return blob.Unparseable
	}
}

// checkLookUp: a canonical value is found through each key that it names.
func checkLookUp(t fataler, formats []blob.Format, keys []blob.Key, value string) {
	t.Helper()
	for _, f := range formats {
		key, canonical, ok := f.Decode(value)
		if ok && !slices.Contains(keys, key) {
			t.Fatalf("%q: %s reads %q, which isn't among %q", value, f, key, keys)
		}
		if spelled, _ := f.Encode(key); canonical && spelled != value {
			t.Fatalf("%q: %s spells %q as %q", value, f, key, spelled)
		}
	}
}

func FuzzDecoder(f *testing.F) {
	f.Fuzz(func(t *testing.T, first, second string, url bool, value string) {
		few := blob.Decoding{URL: url}
		for _, source := range []string{first, second} {
			format, err := blob.ParseFormat(source)
			if err != nil {
				return
			}
			more := few
			more.Formats = append(slices.Clone(few.Formats), format)
			checkDecoder(t, more, value)
			if len(few.Formats) > 0 {
				if lost := missing(t, few, more, value); len(lost) > 0 {
					t.Fatalf("%q: with %s the keys %q are lost", value, format, lost)
				}
			}
			few = more
		}
	})
}

func FuzzMatch(f *testing.F) {
	f.Fuzz(func(t *testing.T, match string, url bool, value string) {
		decoding := blob.Decoding{Match: match, URL: url, Formats: formatList(t, "{text}", "{hex}", "{*}/{int}")}
		if _, err := blob.NewDecoder(decoding); err == nil {
			checkDecoder(t, decoding, value)
		}
	})
}

func BenchmarkDecoder(b *testing.B) {
	const sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
	for _, bb := range []struct {
		name, value, match string
		url                bool
		formats            []string
	}{
		{"hex", sha256, "", false, []string{"{hex}"}},
		{"prefixed hex", "sha256:" + sha256, "", false, []string{"sha256:{hex}"}},
		{"hex in upper case", strings.ToUpper(sha256), "", false, []string{"{hex}"}},
		{"slices", "9f/86/" + sha256, "", false, []string{"{hex[0:2]}/{hex[2:4]}/{hex}"}},
		{"slices only", "9f/86/" + sha256[4:], "", false, []string{"{hex[0:2]}/{hex[2:4]}/{hex[4:]}"}},
		{"ignored", "https://cdn.example.test/" + sha256, "", false, []string{"{*}/{hex}"}},
		{"text", "u/1/avatar.png", "", false, []string{"{text}"}},
		{"uuid", aUUID, "", false, []string{"{uuid}"}},
		{"int", "urn:oid:123456789", "", false, []string{"urn:oid:{int}"}},
		{"base64", "n4bQgYhMfWWaL+qgxVrQFaO/TxsrC4Is0V1sFbDwCgg=", "", false, []string{"{base64}"}},
		{"the last of three", "sha256:" + sha256, "", false, []string{"{hex}", "{uuid}", "sha256:{hex}"}},
		{"url", "/v1/files/u%201/avatar.png", "", true, []string{"/v1/files/{text}"}},
		{"match", "x ![p](/v1/files/u/4.png) y", `/v1/files/([^)\s]+)`, false, []string{"{text}"}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			d := mustDecoder(b, bb.match, bb.url, bb.formats...)
			var keys []blob.Key
			b.ReportAllocs()
			for b.Loop() {
				keys, _ = d.Append(keys[:0], bb.value)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "values/s")
		})
	}
}
