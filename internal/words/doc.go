// Package words is what the agent's messages to people have in common: one line
// each, and the name that was probably meant.
package words
