package config

import (
	"fmt"
	"regexp"
	"strings"
)

// variableRE is a dollar that means something: $$, or the braces of a variable,
// closed or not. Any other dollar stands for itself.
var variableRE = regexp.MustCompile(`\$\$|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?`)

// expand replaces ${NAME} by the variable and $$ by a dollar, once: what a
// variable holds isn't looked at. used says whether a variable was replaced.
// The problems are in words that hold nothing of text but names of variables.
func expand(text string, variable func(string) (string, bool)) (expanded string, used bool, problems []string) {
	expanded = variableRE.ReplaceAllStringFunc(text, func(match string) string {
		if match == "$$" {
			return "$"
		}
		name := strings.TrimSuffix(strings.TrimPrefix(match, "${"), "}")
		if name == "" {
			problems = append(problems, "${ isn't followed by the name of a variable (letters, digits, _) and }: "+
				"correct it, or write $${ where a dollar is meant")
			return ""
		}
		value, ok := variable(name)
		if !ok {
			problems = append(problems, fmt.Sprintf("variable %s is not set: "+
				"set it in the agent's environment, or write $${%s} where a dollar is meant", name, name))
		}
		used = true
		return value
	})
	return expanded, used, problems
}
