#!/usr/bin/env bash
# Prints how many tests each backend has, of those that `make test` has built.
set -euo pipefail

cargo nextest list --workspace --all-features 2>/dev/null | awk '
    # Each line has a program and one of its tests.
    { program = $1; sub(/^.*::/, "", program); all++ }
    program == "embedded" { count["embedded broker"]++ }
    program == "sqlite" { count["SQLite store"]++ }
    program ~ /^(postgres|adopt|tables|patterns|newest_guide)$/ && $2 !~ /^mysql::/ { count["PostgreSQL store"]++ }
    program ~ /^mysql/ || (program == "adopt" && $2 ~ /^mysql::/) { count["MariaDB store"]++ }
    program ~ /^(rabbitmq|bad_input|outages|ladder|planted|examples)$/ { count["RabbitMQ"]++ }
    program == "kafka" { count["Kafka"]++ }
    program == "nats" { count["NATS"]++ }
    program == "redis_streams" { count["Redis Streams"]++ }
    END {
        split("SQLite store,PostgreSQL store,MariaDB store,embedded broker,RabbitMQ,Kafka,NATS,Redis Streams", names, ",")
        for (n = 1; n in names; n++) {
            printf "%-18s %4d tests\n", names[n], count[names[n]]
            if (!count[names[n]]) missing = 1
        }
        printf "%-18s %4d tests\n", "all", all
        exit missing
    }'
if [ -n "${POSTRIDER_TEST_KAFKA:-}" ]; then
    echo "Kafka was $POSTRIDER_TEST_KAFKA"
else
    echo "Kafka was librdkafka's mock cluster and krafka's fake broker; POSTRIDER_TEST_KAFKA=host:port runs the suite on a real one"
fi
