package words

// near is how many edits make a word another one by mistake.
const near = 2

// Nearest returns the name nearest to word, the first of several, or "" where
// none is within two edits of it: letters to insert, remove or replace.
func Nearest(word string, names []string) string {
	best, found := near+1, ""
	for _, name := range names {
		if len(word) > len(name)+near {
			continue
		}
		if d := distance(word, name); d < best {
			best, found = d, name
		}
	}
	return found
}

func distance(a, b string) int {
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
