package config

// suggest returns the name nearest to word, or "" where none is within two
// edits of it.
func suggest(word string, names []string) string {
	const near = 2
	best, found := near+1, ""
	for _, name := range names {
		if len(word) > len(name)+near {
			continue
		}
		if d := editDistance(word, name); d < best {
			best, found = d, name
		}
	}
	return found
}

// editDistance counts the letters to insert, remove or replace to get from a to b.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
