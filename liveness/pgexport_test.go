package liveness

// Omit is what Omitting leaves out.
type Omit = omit

// Omitting returns the options with protections left out.
func (o Options) Omitting(without Omit) Options {
	o.without = without
	return o
}
