package config

// Load reads the configuration at path. Its error is an *Errors.
func Load(path string, env Env) (*Validated, error) {
	data, err := env.orOS().ReadFile(path)
	if err != nil {
		return nil, newErrors([]Problem{{File: path, Message: "can't be read: " + reason(err)}})
	}
	return Parse(path, data, env)
}

// Parse reads data as the configuration file name, beside which relative paths
// lie. Its error is an *Errors with every problem of the file. It reads no file
// but those that data names: a url_file, and certificates of a Postgres URL.
func Parse(name string, data []byte, env Env) (*Validated, error) {
	refuse := func(line int, err error) error {
		return newErrors([]Problem{{File: name, Line: line, Message: err.Error()}})
	}
	if err := checkBytes(data); err != nil {
		return nil, refuse(0, err)
	}
	root, line, err := parseYAML(data)
	if err != nil {
		return nil, refuse(line, err)
	}
	d := &decoder{env: env.orOS(), file: name, lines: map[string]int{}}
	c := d.root(d.at("", root, root.Line))
	d.checkAcross(c)
	if len(d.problems) == 0 {
		return c, nil
	}
	errs := newErrors(d.problems)
	if len(errs.Problems) == maxProblems {
		errs.Problems = append(errs.Problems, Problem{File: name, Message: "has more problems than these: correct them first"})
	}
	return nil, errs
}
