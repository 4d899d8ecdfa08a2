# Targets are documented by the comment after them; `make` alone lists them.

GO       ?= go
FUZZTIME ?= 30s
KEYS     ?= 200000
DURATION ?= 60s
VERSIONS ?= 14 15 16 17 18

LINT_VERSION   := v2.15.0
FORMAT_VERSION := v0.12.0

TOOLS  := $(CURDIR)/.cache/tools
LINT   := $(TOOLS)/golangci-lint-$(LINT_VERSION)/golangci-lint
FORMAT := $(TOOLS)/gofumpt-$(FORMAT_VERSION)/gofumpt

VERSION = $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)

# The binary is static, so everything is built, checked and measured without C, save for the race detector.
export CGO_ENABLED = 0

.NOTPARALLEL:
.PHONY: help build test test-matrix model lint fmt bench torture fuzz clean compiler faketime pooler vet

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## build the static binary bin/gc-agent
	$(GO) build -trimpath -ldflags '-X main.version=$(VERSION)' -o bin/gc-agent ./cmd/gc-agent

# exec, here and in bench and torture: make sends SIGTERM to its own child alone, and a shell in between would end without passing it on.
test: compiler faketime pooler vet lint model ## vet, lint, check the model, and run all tests with the race detector, beside a Postgres server of their own
	CGO_ENABLED=1 exec scripts/postgres run -- $(GO) test -race -timeout 18m ./...
	GO='$(GO)' exec scripts/postgres-matrix -slice

test-matrix: ## run all tests on each of VERSIONS (14 15 16 17 18) of Postgres
	GO='$(GO)' exec scripts/postgres-matrix $(VERSIONS)

model: compiler ## check the model of the protocol, with each of its protections and without
	CC="$$($(GO) env CC)" exec scripts/model

vet:
	$(GO) vet ./...

lint: $(LINT) ## run the linter
	$(LINT) run ./...

fmt: $(FORMAT) ## format the Go code
	$(FORMAT) -l -w .

bench: ## measure sweeps of KEYS (200000) blobs, beside a Postgres server of their own
	exec scripts/postgres run -- $(GO) test -run '^$$' -bench . -benchtime 1x -timeout 60m ./bench -args -keys $(KEYS)

torture: ## torture agents and writers for DURATION (60s), up to five times that long, beside a Postgres server of their own
	exec scripts/postgres run -- $(GO) test -count=1 -v -timeout 0 -run 'TestTorture|TestRogue' ./torture -args -duration $(DURATION)

fuzz: ## fuzz each target for FUZZTIME (30s)
	GO='$(GO)' scripts/fuzz $(FUZZTIME)

clean: ## remove what the other targets made
	rm -rf bin .cache

# The race detector needs a C compiler and the C library's headers.
compiler:
	@echo '#include <stdlib.h>' | $$($(GO) env CC) -E - >/dev/null 2>&1 || scripts/apt-install gcc libc6-dev

# A test moves the clock of a server of its own by this library.
faketime:
	@ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || scripts/apt-install libfaketime

# A test starts PgBouncer; its package would start one, too.
pooler:
	@PATH="$$PATH:/usr/sbin" command -v pgbouncer >/dev/null || scripts/apt-install pgbouncer

$(LINT): PACKAGE = github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
$(FORMAT): PACKAGE = mvdan.cc/gofumpt@$(FORMAT_VERSION)
$(LINT) $(FORMAT):
	@echo "building $(PACKAGE), once: this can take minutes"
	@mkdir -p $(@D)
	@GOBIN=$(@D) $(GO) install $(PACKAGE) >$(@D)/log 2>&1 || { cat $(@D)/log; exit 1; }
