# `make` lists what can be done.

# The programs are run from here, not by `cargo run --package`, which would choose other features of the dependencies than
# `--workspace` does and build them twice.
TARGET := $(or $(CARGO_TARGET_DIR),target)

.DEFAULT_GOAL := help
.PHONY: help setup build test lint deny advisories check bench crash demo clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup: ## Install what tests need and this machine lacks (Debian, Ubuntu: as root)
	@scripts/setup.sh

build: ## Build the release binary, target/release/postrider
	cargo build --release

test: setup ## Run all tests, on a PostgreSQL, a RabbitMQ and a Redis started for them
	cargo build --workspace --all-targets --all-features
	$(TARGET)/debug/testbed run -- cargo nextest run --workspace --all-features
	cargo test --quiet --workspace --all-features --doc

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

check: setup lint deny test ## The whole gate, as in CI

bench: setup ## Measure throughput and latency against the alternatives
	cargo build --release --workspace
	$(TARGET)/release/bench

crash: setup ## The long crash run: servers and processes killed at random, history checked
	cargo build --release --workspace
	$(TARGET)/release/crash

demo: ## Show the way of an event, with nothing but the binary
	cargo run --release -- demo

clean: ## Remove what was built
	cargo clean
