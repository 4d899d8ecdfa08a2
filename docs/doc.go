// Package docs holds the project's pages, and the tests that keep them and the
// README true: their commands are run, their configurations read, their links
// and the tests they name looked for.
package docs
