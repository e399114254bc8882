//! Real servers on private loopback ports, started from the installed programs, and the faults that tests do to them.
//!
//! Two ways to a server:
//!
//! - [`postgres()`], [`mariadb()`], [`rabbitmq()`], [`redis()`] and [`nats()`] give the shared servers of a test run. cargo-nextest runs every test in a process
//!   of its own, so the servers are started once, by `testbed run -- <command>` (that is what `make test` does), and
//!   reach the tests through environment variables. A test takes a fresh database or virtual host of its own.
//! - [`Postgres::start_private`], [`RabbitMq::start_private`] and [`Redis::start_private`] start a server that only the
//!   caller knows, to be killed, stopped and restarted.
//!
//! [`Kafka::start`] is a mock inside the process, unless the environment names a cluster.
//!
//! Nothing outlives the process that started it, whatever ends that process: see `guard.rs`.

mod api;
mod guard;
mod kafka;
mod mariadb;
mod nats;
mod port;
mod postgres;
mod process;
mod proxy;
mod rabbitmq;
mod redis;
mod url;

pub use guard::clean_up;
pub use kafka::{Kafka, response};
pub use mariadb::MariaDb;
pub use nats::Nats;
pub use port::free_port;
pub use postgres::{Postgres, PostgresOptions};
pub use process::{Process, Signal, children, cpu, is_running, machine_cpu, rss_bytes, signal, stolen_cpu, tree_cpu};
pub use proxy::TcpProxy;
pub use rabbitmq::RabbitMq;
pub use redis::Redis;

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// What goes wrong in a testbed is only ever shown to a person, so any error will do.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The result of a testbed operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A `postgres://` address of an existing server to use instead of a private one.
pub const POSTGRES_VAR: &str = "POSTRIDER_TEST_POSTGRES";

/// An `amqp://` address of an existing broker to use instead of a private one.
pub const RABBITMQ_VAR: &str = "POSTRIDER_TEST_RABBITMQ";

/// The `http://user:password@host:port` address of that broker's management API, which makes virtual hosts.
/// When it is absent, port 15672 on the broker's host is tried.
pub const RABBITMQ_API_VAR: &str = "POSTRIDER_TEST_RABBITMQ_API";

/// A `redis://` address of an existing server to use instead of a private one.
pub const REDIS_VAR: &str = "POSTRIDER_TEST_REDIS";

/// `host:port` of an existing Kafka cluster to use instead of the mock. Topics are created on it and stay there.
pub const KAFKA_VAR: &str = "POSTRIDER_TEST_KAFKA";
/// A `mysql://` address of an existing MariaDB or MySQL to use instead of a private one.
pub const MYSQL_VAR: &str = "POSTRIDER_TEST_MYSQL";
/// A `nats://` address of an existing server with JetStream to use instead of a private one.
pub const NATS_VAR: &str = "POSTRIDER_TEST_NATS";

/// How long a server may take until it serves. RabbitMQ needs 5 to 10 s on two busy cores.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// How long a server may take to end by itself before it is an error.
const STOP_DEADLINE: Duration = Duration::from_secs(30);

/// How often a state that nobody announces is looked at.
const POLL_EVERY: Duration = Duration::from_millis(20);

/// The shared PostgreSQL of this test run.
///
/// # Panics
/// When there is none: a missing server is a failed test, never a skipped one.
pub async fn postgres() -> Postgres {
    match Postgres::from_env() {
        Some(server) => server,
        None => panic!("{}", how_to_run(POSTGRES_VAR, "a PostgreSQL server")),
    }
}

/// The shared RabbitMQ of this test run.
///
/// # Panics
/// When there is none, or when its address cannot be read.
pub async fn rabbitmq() -> RabbitMq {
    match RabbitMq::from_env() {
        Some(Ok(broker)) => broker,
        Some(Err(error)) => panic!("{RABBITMQ_VAR}: {error}"),
        None => panic!("{}", how_to_run(RABBITMQ_VAR, "a RabbitMQ broker")),
    }
}

/// The shared Redis of this test run.
///
/// # Panics
/// When there is none.
pub async fn redis() -> Redis {
    match Redis::from_env() {
        Some(server) => server,
        None => panic!("{}", how_to_run(REDIS_VAR, "a Redis server")),
    }
}

/// The shared MariaDB of this test run.
///
/// # Panics
/// When there is none.
pub async fn mariadb() -> MariaDb {
    match MariaDb::from_env() {
        Some(server) => server,
        None => panic!("{}", how_to_run(MYSQL_VAR, "a MariaDB or MySQL server")),
    }
}

/// The shared NATS of this test run.
///
/// # Panics
/// When there is none.
pub async fn nats() -> Nats {
    match Nats::from_env() {
        Some(server) => server,
        None => panic!("{}", how_to_run(NATS_VAR, "a NATS server with JetStream")),
    }
}

fn how_to_run(variable: &str, server: &str) -> String {
    format!(
        "this test needs {server}. Run it with `make test`, or one test with\n  \
         cargo run -p postrider-testkit --bin testbed -- run -- cargo nextest run <name>\n\
         or set {variable} to the address of a server that you run."
    )
}

/// `name` made unique for this call, in the letters that PostgreSQL and RabbitMQ take without quotes.
pub fn unique(name: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    /// PostgreSQL cuts identifiers at 63 bytes; the suffix takes at most 30 of them.
    const NAME_BYTES_MAX: usize = 32;
    let name: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' })
        .take(NAME_BYTES_MAX)
        .collect();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{name}_{}_{count}_{:06x}", std::process::id(), fastrand::u32(..1 << 24))
}

/// Asks `is_so` again and again until it says yes.
async fn until(what: &str, deadline: Duration, mut is_so: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let started = tokio::time::Instant::now();
    while !is_so().await? {
        if started.elapsed() > deadline {
            return Err(format!("{what} did not happen within {} s", deadline.as_secs()).into());
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    Ok(())
}

/// The last lines of a log, for an error message.
fn tail(log: &Path) -> String {
    const LINES: usize = 20;
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_names_differ_and_need_no_quotes() {
        let one = unique("Late commit: is not skipped, even under a very long name");
        let two = unique("Late commit: is not skipped, even under a very long name");
        assert_ne!(one, two);
        assert!(one.starts_with("late_commit__is_not_skipped"));
        assert!(one.len() <= 63 && one.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'));
    }
}
