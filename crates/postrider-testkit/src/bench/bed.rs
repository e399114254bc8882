//! The servers, and the events that everybody inserts.

use std::path::PathBuf;

use postrider::migrate::Migrate;
use postrider::store::postgres::PostgresStore;
use sqlx::{Connection, PgConnection};

use super::Scale;
use crate::testbed::{Postgres, PostgresOptions, RabbitMq, Result};

/// Different keys.
pub(super) const KEYS: u64 = 1000;
/// The size of a payload.
pub(super) const PAYLOAD_BYTES: usize = 300;
/// Topic and type of the events.
pub(super) const TOPIC: &str = "orders.created";
pub(super) const TYPE: &str = "order.created";

pub(super) struct Bed {
    pub postgres: Postgres,
    pub rabbit: RabbitMq,
    pub postrider: PathBuf,
    pub scale: Scale,
}

impl Bed {
    /// Starts both servers.
    pub async fn start(postrider: PathBuf, scale: Scale) -> Result<Bed> {
        if !postrider.exists() {
            return Err(format!(
                "{} does not exist: build it with `cargo build --release --workspace`",
                postrider.display()
            )
            .into());
        }
        let (postgres, rabbit) =
            tokio::try_join!(Postgres::start_with(PostgresOptions::durable()), RabbitMq::start_private())?;
        Ok(Bed { postgres, rabbit, postrider, scale })
    }

    /// A fresh database with Postrider's tables and the partitions of today and the next days.
    pub async fn database(&self, name: &str) -> Result<String> {
        let url = self.postgres.database(name).await?;
        let store = PostgresStore::connect(&url).await?;
        store.migrate().await?;
        store.pool().close().await;
        Ok(url)
    }

    /// A connection to another database than the one that is measured.
    pub async fn maintenance(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect(self.postgres.url()).await?)
    }
}

/// A payload of [`PAYLOAD_BYTES`] that holds a number.
pub(super) fn payload(number: u64) -> String {
    let head = format!(r#"{{"number":{number},"customer":"c-4711","currency":"EUR","note":""#);
    let rest = PAYLOAD_BYTES.saturating_sub(head.len() + 2);
    format!(r#"{head}{}"}}"#, "x".repeat(rest))
}

/// The key of the n-th event. Neighbours have unrelated keys, as the events of many customers have.
pub(super) fn key(number: u64) -> String {
    // A prime multiplier and the high bits: spread, and the same in every run.
    format!("order-{}", (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) % KEYS)
}

/// One statement, and so one commit, that makes `$1` events visible.
const FILL: &str = "INSERT INTO postrider.outbox (topic, key, type, payload) \
     SELECT $2, 'order-' || abs(hashint8(n)) % $3, $4, $5::text::json FROM generate_series(1, $1) n";

/// Inserts that many events in one statement. They are visible when this returns.
pub(super) async fn fill(connection: &mut PgConnection, events: u64) -> Result<()> {
    let done = sqlx::query(FILL)
        .bind(i64::try_from(events)?)
        .bind(TOPIC)
        .bind(i64::try_from(KEYS)?)
        .bind(TYPE)
        .bind(payload(0))
        .execute(connection)
        .await?;
    if done.rows_affected() == events { Ok(()) } else { Err("not all events were inserted".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_json_of_one_size() {
        for number in [0, 7, 123_456] {
            let text = payload(number);
            assert_eq!(text.len(), PAYLOAD_BYTES);
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(value["number"], number);
        }
    }
}
