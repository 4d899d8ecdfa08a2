// Package pgtest gives each test a Postgres database of its own.
//
// It owns what tests create on the server that GC_AGENT_TEST_POSTGRES_URL names,
// databases and roles, and their removal. It must know nothing of what is tested.
package pgtest
