# Reads what `go test -json` prints, one event a line. Prints the output of what
# failed, and writes to the file `table` a line about the version and the server,
# with what was skipped and why below it. Exits 1 if anything failed, or nothing ran.

# field returns a string of the event, or "".
function field(name,    at) {
	if (!match($0, "\"" name "\":\"([^\"\\\\]|\\\\.)*\"")) return ""
	at = length(name) + 4
	return substr($0, RSTART + at, RLENGTH - at - 1)
}

function plain(text) {
	gsub(/\\u003c/, "<", text); gsub(/\\u003e/, ">", text); gsub(/\\u0026/, "\\&", text)
	gsub(/\\t/, "    ", text); gsub(/\\n/, "\n", text); gsub(/\\"/, "\"", text); gsub(/\\\\/, "\\", text)
	return text
}

{
	action = field("Action"); package = field("Package"); test = field("Test")
	sub(/^.*\/gc-agent\//, "", package)
	id = package " " test
}

action == "build-output" { printf "%s", plain(field("Output")) }

action == "output" {
	text = plain(field("Output"))
	if (text !~ /^=== /) output[id] = output[id] text
	# The test that this comes after may have passed.
	if (text ~ /^(panic|fatal error): /) printf "%s: %s", id, text
}

action == "fail" {
	printf "%s", output[id]
	if (test == "") bad++; else failed++
}

action == "pass" { if (test == "") good++; else passed++ }

action == "skip" && test != "" {
	reason = output[id]
	sub(/^ *[a-z_]+\.go:[0-9]+: /, "", reason); sub(/\n.*/, "", reason)
	if (!skips[reason]++) { order[++reasons] = reason; first[reason] = id }
	skipped++
}

action == "pass" || action == "fail" || action == "skip" { delete output[id] }

END {
	packages = sprintf("%d passed, %d failed", good, bad)
	tests = sprintf("%d passed, %d failed, %d skipped", passed, failed, skipped)
	printf "%-8s %-8s %-22s %-38s %d\n", version, server, packages, tests, seconds > table
	for (i = 1; i <= reasons; i++) {
		reason = order[i]
		more = skips[reason] > 1 ? sprintf(" and %d more", skips[reason] - 1) : ""
		printf "         skipped %s%s: %s\n", first[reason], more, reason > table
	}
	exit bad > 0 || failed > 0 || passed == 0
}
