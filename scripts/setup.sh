#!/usr/bin/env bash
# Installs what the tests need and this machine lacks: PostgreSQL, MariaDB, RabbitMQ, Redis, NATS, Chromium, OpenSSL, Python, promtool, cargo-nextest; with the argument
# `deny` cargo-deny instead, which is compiled from source in three to four minutes. Says nothing when nothing is missing.
set -euo pipefail

say() { printf 'setup: %s\n' "$*" >&2; }

has_postgres() {
    [ -n "${POSTRIDER_TEST_POSTGRES:-}" ] || [ -n "${POSTRIDER_TEST_PG_BIN:-}" ] ||
        compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null ||
        { command -v postgres && command -v initdb; } >/dev/null
}

has_rabbitmq() {
    [ -n "${POSTRIDER_TEST_RABBITMQ:-}" ] || [ -n "${POSTRIDER_TEST_RABBITMQ_BIN:-}" ] ||
        [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || command -v rabbitmq-server >/dev/null
}

has_redis() {
    [ -n "${POSTRIDER_TEST_REDIS:-}" ] || [ -n "${POSTRIDER_TEST_REDIS_BIN:-}" ] || command -v redis-server >/dev/null
}

has_nats() {
    [ -n "${POSTRIDER_TEST_NATS:-}" ] || [ -n "${POSTRIDER_TEST_NATS_BIN:-}" ] || command -v nats-server >/dev/null ||
        [ -x /usr/sbin/nats-server ]
}

# Both the server and the client, which a test pipes the printed migrations through.
has_mariadb() {
    [ -n "${POSTRIDER_TEST_MYSQL_BIN:-}" ] ||
        { command -v mariadbd && command -v mariadb-install-db && command -v mariadb; } >/dev/null
}

# The console is looked at with it.
has_chromium() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }

# A test of certificates makes some, and serves them.
has_openssl() { command -v openssl >/dev/null; }

# The example service is written in it.
has_python() { command -v python3 >/dev/null; }

# Checks the alert rules and runs their tests; the server itself is not started.
has_promtool() { command -v promtool >/dev/null; }

# A C compiler for SQLite and the cryptography of TLS, and the linker; librdkafka is built by make, with C++ for a part of it.
has_compiler() { command -v cc >/dev/null && command -v c++ >/dev/null && command -v make >/dev/null; }

explain() {
    say "missing: $*"
    cat >&2 <<'TEXT'
Install them by hand:
  PostgreSQL 14 or newer   initdb and postgres on the path, or POSTRIDER_TEST_PG_BIN=<folder of both>
  RabbitMQ 3.10 or newer   rabbitmq-server, rabbitmqctl and epmd on the path, or POSTRIDER_TEST_RABBITMQ_BIN=<folder>
  Redis 6 or newer         redis-server on the path, or POSTRIDER_TEST_REDIS_BIN=<folder>
  NATS 2.9 or newer        nats-server on the path, or POSTRIDER_TEST_NATS_BIN=<folder>
  MariaDB 10.6 or newer    mariadbd, mariadb-install-db and mariadb on the path, or POSTRIDER_TEST_MYSQL_BIN=<folder>
  Chromium                 chromium and chromedriver on the path
  OpenSSL                  openssl on the path
  a C compiler, make       cc, c++, make
  Python 3                 python3
  Prometheus 2             promtool on the path
(Debian or Ubuntu: sudo apt-get install postgresql mariadb-server rabbitmq-server redis-server nats-server chromium chromium-driver openssl build-essential python3 prometheus)
or use servers that run already:
  POSTRIDER_TEST_POSTGRES=postgres://user:password@host:5432/postgres      a user who may create databases
  POSTRIDER_TEST_RABBITMQ=amqp://user:password@host:5672/%2f               with the management plugin
  POSTRIDER_TEST_RABBITMQ_API=http://user:password@host:15672              where that is, if elsewhere
  POSTRIDER_TEST_REDIS=redis://user:password@host:6379/0                   with appendonly and noeviction
  POSTRIDER_TEST_NATS=nats://user:password@host:4222                       with JetStream
  POSTRIDER_TEST_KAFKA=host:9092                                           topics with a random prefix stay there
  POSTRIDER_TEST_MYSQL=mysql://user:password@host:3306/mysql               a user who may create databases
Tests that kill servers start their own, so they need the programs in any case.
TEXT
    exit 1
}

# The packages' install scripts ask policy-rc.d whether they may start the service; 101 is no.
policy=/usr/sbin/policy-rc.d
forbid_services() {
    [ ! -e "$policy" ] || return 0
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
}

install_packages() {
    command -v apt-get >/dev/null || explain "$@"
    [ "$(id -u)" = 0 ] || explain "$@"
    say "installing $*"
    forbid_services
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

install_nextest() {
    say 'installing cargo-nextest'
    # The wheel holds the finished program; compiling it takes minutes.
    local folder bin="${CARGO_HOME:-$HOME/.cargo}/bin"
    folder=$(mktemp -d)
    if python3 -m pip install --quiet --no-deps --target "$folder" cargo-nextest >/dev/null 2>&1 &&
        [ -x "$folder/bin/cargo-nextest" ]; then
        mkdir -p "$bin"
        cp "$folder/bin/cargo-nextest" "$bin/"
        rm -rf "$folder"
    else
        rm -rf "$folder"
        cargo install --quiet --locked cargo-nextest
    fi
}

command -v cargo >/dev/null || {
    say 'Rust is not installed: see https://rustup.rs'
    exit 1
}

if [ "${1:-}" = deny ]; then
    cargo deny --version >/dev/null 2>&1 || {
        say 'installing cargo-deny (some minutes)'
        cargo install --quiet --locked --version '^0.20' cargo-deny
    }
    exit 0
fi

# Node alone, which a benchmark compares with.
if [ "${1:-}" = bench ]; then
    # Without it the benchmark compares with the same worker in Rust, and says so.
    { command -v node && command -v npm; } >/dev/null && exit 0
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        install_packages nodejs npm
    else
        say 'node and npm are missing: one benchmark will compare with a worker in Rust'
    fi
    exit 0
fi

packages=()
has_postgres || packages+=(postgresql)
has_rabbitmq || packages+=(rabbitmq-server)
has_redis || packages+=(redis-server)
has_nats || packages+=(nats-server)
has_mariadb || packages+=(mariadb-server)
has_chromium || packages+=(chromium chromium-driver)
has_openssl || packages+=(openssl)
has_compiler || packages+=(build-essential)
has_python || packages+=(python3)
has_promtool || packages+=(prometheus)
[ ${#packages[@]} = 0 ] || install_packages "${packages[@]}"
cargo nextest --version >/dev/null 2>&1 || install_nextest
