# `make` lists what can be done.

# The programs are run from here, not by `cargo run --package`, which would choose other features of the dependencies than
# `--workspace` does and build them twice.
TARGET := $(or $(CARGO_TARGET_DIR),target)

# What `make crashes` runs on: every broker with PostgreSQL, every other database with RabbitMQ.
BROKERS := rabbitmq embedded kafka nats redis
STORES := mysql
SHORT := --events 30000 --kills 10 --broker-restarts 2 --store-restarts 1

.DEFAULT_GOAL := help
.PHONY: help setup build test lint deny advisories check bench crash crashes poison demo screenshots clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup: ## Install what tests need and this machine lacks (Debian, Ubuntu: as root)
	@scripts/setup.sh

build: ## Build the release binary, target/release/postrider
	cargo build --release

test: setup ## Run all tests, on PostgreSQL, MariaDB, RabbitMQ, Redis and NATS servers started for them
	cargo build --workspace --all-targets --all-features
	$(TARGET)/debug/testbed run -- cargo nextest run --workspace --all-features
	cargo test --quiet --workspace --all-features --doc
	@scripts/count-tests.sh

lint: ## Formatting, clippy and documentation, warnings denied
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	cargo clippy --package postrider-server -- -D warnings
	RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --all-features --no-deps --quiet

deny: ## Licences, banned crates and sources of the dependencies
	@scripts/setup.sh deny
	cargo deny --log-level error check bans licenses sources

advisories: ## Known vulnerabilities of the dependencies (needs the network)
	@scripts/setup.sh deny
	cargo deny check advisories

check: ## The whole gate, as in CI
	@$(MAKE) --no-print-directory -j2 setup lint
	@$(MAKE) --no-print-directory test
	@if cargo deny --version >/dev/null 2>&1; then $(MAKE) --no-print-directory deny; \
	else echo 'cargo-deny is not installed, so licences and sources were not checked: make deny'; fi

bench: setup ## Measure throughput and latency against the alternatives
	@scripts/setup.sh bench
	cargo build --release --workspace --all-features
	$(TARGET)/release/bench

crash: setup ## The long crash run: servers and processes killed at random, history checked
	cargo build --release --workspace
	$(TARGET)/release/crash

crashes: setup ## A shorter crash run on every broker, and on MariaDB
	cargo build --release --workspace --all-features
	for broker in $(BROKERS); do $(TARGET)/release/crash $(SHORT) --broker $$broker || exit 1; done
	for store in $(STORES); do $(TARGET)/release/crash $(SHORT) --store $$store || exit 1; done

poison: setup ## The crash run of consumers: killed 50 times, with failing, poisonous and doubled messages
	cargo build --release --workspace
	$(TARGET)/release/crash --events 30000 --kills 0 --consumer-kills 50 --broker-restarts 1 --store-restarts 1 \
	    --freezes 0 --failing-in 50 --poison-in 1000 --duplicate-in 10

demo: ## Show the way of an event, with nothing but the binary
	cargo run --release -- demo

screenshots: setup ## Take the pictures of the console in docs/images/console anew
	cargo build --workspace --all-targets --all-features
	cargo nextest run --workspace --all-features --run-ignored only -E 'test(pictures_of_every_page)'

clean: ## Remove what was built
	cargo clean
