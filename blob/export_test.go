package blob

// Readings tries every way to divide value among the format's parts and returns
// each key once. It is what Decode is held against, and slow.
func (f Format) Readings(value string) []Key {
	l := f.layout
	if l == nil {
		if key, _, ok := f.Decode(value); ok {
			return []Key{key}
		}
		return nil
	}
	var keys []Key
	seen := map[Key]bool{}
	l.readings(value, 5_000_000, func(_ string, key Key) bool {
		if !seen[key] {
			seen[key] = true
			keys = append(keys, key)
		}
		return true
	})
	return keys
}
