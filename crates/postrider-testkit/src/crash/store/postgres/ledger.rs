//! The tables of the run.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgConnection, PgPool, Row};
use uuid::Uuid;

use super::super::{Applied, Ledger, Slot, Teller};
use super::teller::PostgresTeller;
use crate::checker::{Committed, DeadLetter, Effect, History};
use crate::testbed::Result;

const TABLES: &str = "
CREATE SCHEMA crash;
CREATE TABLE crash.account (key text PRIMARY KEY, version bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50);
CREATE TABLE crash.ledger (event_id uuid PRIMARY KEY, key text NOT NULL, version bigint NOT NULL,
    is_poison boolean NOT NULL);
CREATE TABLE crash.head (consumer text, key text, version bigint NOT NULL DEFAULT 0, previous bigint,
    PRIMARY KEY (consumer, key)) WITH (fillfactor = 50);
CREATE TABLE crash.effect (seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, consumer text NOT NULL,
    event_id uuid NOT NULL, key text NOT NULL, version bigint NOT NULL, previous bigint NOT NULL);
";

/// Every event that this consumer should have applied and has not, with what Postrider knows of it.
const MISSING: &str = "SELECT l.event_id, l.key, l.version, s.status, s.attempts, s.last_error, \
       EXISTS (SELECT 1 FROM postrider.inbox i WHERE i.consumer = $1 AND i.message_id = l.event_id) \
     FROM crash.ledger l LEFT JOIN postrider.outbox_status s ON s.event_id = l.event_id \
     WHERE NOT EXISTS (SELECT 1 FROM crash.effect e WHERE e.consumer = $1 AND e.event_id = l.event_id) \
     ORDER BY l.key, l.version LIMIT 10";

/// The run's own view of the database.
pub(in super::super) struct PostgresLedger {
    url: String,
    pool: PgPool,
}

impl PostgresLedger {
    pub(in super::super) async fn create(url: &str, keys: usize, consumers: &[&str]) -> Result<PostgresLedger> {
        // While the database is away, whoever asks is told so at once and asks again.
        let pool = PgPoolOptions::new().max_connections(8).acquire_timeout(Duration::from_secs(2)).connect(url).await?;
        sqlx::raw_sql(TABLES).execute(&pool).await?;
        sqlx::query("INSERT INTO crash.account (key) SELECT 'account-' || n FROM generate_series(0, $1 - 1) n")
            .bind(keys as i64)
            .execute(&pool)
            .await?;
        sqlx::query("INSERT INTO crash.head (consumer, key) SELECT c, key FROM unnest($1::text[]) c, crash.account")
            .bind(consumers)
            .execute(&pool)
            .await?;
        Ok(PostgresLedger { url: url.to_owned(), pool })
    }
}

#[async_trait]
impl Ledger for PostgresLedger {
    async fn effects_about(&self) -> Result<u64> {
        let last: Option<i64> = sqlx::query_scalar("SELECT max(seq) FROM crash.effect").fetch_one(&self.pool).await?;
        Ok(last.unwrap_or(0) as u64)
    }

    async fn committed(&self) -> Result<u64> {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM crash.ledger").fetch_one(&self.pool).await?;
        Ok(count as u64)
    }

    async fn applied_after(&self, seq: i64, limit: i64) -> Result<Vec<Applied>> {
        let query =
            sqlx::query_as("SELECT seq, event_id, key, version FROM crash.effect WHERE seq > $1 ORDER BY seq LIMIT $2");
        Ok(query.bind(seq).bind(limit).fetch_all(&self.pool).await?)
    }

    async fn misjudged(&self, consumers: &[&str]) -> Result<Vec<String>> {
        let lines = sqlx::query_scalar(
            "SELECT format('%s: event %s is poison and no dead letter', c, l.event_id) \
             FROM unnest($1::text[]) c, crash.ledger l WHERE l.is_poison AND NOT EXISTS \
               (SELECT 1 FROM postrider.dead_letter d WHERE d.consumer = c AND d.message_id = l.event_id) \
             UNION ALL SELECT format('%s: event %s is a dead letter and no poison: %s', d.consumer, d.message_id, d.history) \
             FROM postrider.dead_letter d LEFT JOIN crash.ledger l ON l.event_id = d.message_id \
             WHERE l.is_poison IS NOT TRUE",
        )
        .bind(consumers)
        .fetch_all(&self.pool)
        .await?;
        Ok(lines)
    }

    async fn applied(&self, consumer: &str) -> Result<u64> {
        let count: i64 = sqlx::query_scalar(
            "SELECT (SELECT count(DISTINCT event_id) FROM crash.effect WHERE consumer = $1) \
             + (SELECT count(*) FROM postrider.dead_letter WHERE consumer = $1)",
        )
        .bind(consumer)
        .fetch_one(&self.pool)
        .await?;
        Ok(count as u64)
    }

    async fn backlog(&self) -> Result<u64> {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM postrider.outbox_status WHERE status <> 'published'")
            .fetch_one(&self.pool)
            .await?;
        Ok(count as u64)
    }

    async fn unread(&self) -> Result<Vec<String>> {
        let lines = sqlx::query_scalar(
            "SELECT format('%s slot %s is at offset %s, with %s messages after it', c.consumer, c.slot, c.\"offset\", count(*)) \
             FROM postrider.cursor c JOIN postrider.message m ON m.\"offset\" > c.\"offset\" AND m.hash % c.slots = c.slot \
             GROUP BY c.consumer, c.slot, c.\"offset\"",
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(lines)
    }

    async fn slots(&self) -> Result<Vec<Slot>> {
        let rows =
            sqlx::query("SELECT group_name, slot, owner, epoch FROM postrider.lease WHERE slot >= 0 AND group_name <> 'watch' ORDER BY 1, 2")
                .fetch_all(&self.pool)
                .await?;
        rows.iter()
            .map(|row| {
                Ok(Slot {
                    group: row.try_get(0)?,
                    slot: row.try_get(1)?,
                    owner: row.try_get(2)?,
                    epoch: row.try_get(3)?,
                })
            })
            .collect()
    }

    async fn missing(&self, consumer: &str) -> Result<Vec<String>> {
        let rows = sqlx::query(MISSING).bind(consumer).fetch_all(&self.pool).await?;
        let mut lines = Vec::new();
        for row in &rows {
            let (id, key, version): (Uuid, String, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            let status: Option<String> = row.try_get(3)?;
            let (attempts, error): (Option<i32>, Option<String>) = (row.try_get(4)?, row.try_get(5)?);
            let is_admitted: bool = row.try_get(6)?;
            lines.push(format!(
                "event {id} (key {key}, version {version}): outbox {}, attempts {}, inbox {}{}",
                status.as_deref().unwrap_or("no row"),
                attempts.unwrap_or(0),
                if is_admitted { "done" } else { "no row" },
                error.map(|error| format!(", {error}")).unwrap_or_default(),
            ));
        }
        Ok(lines)
    }

    async fn relay_state(&self) -> Result<Vec<String>> {
        let lines = sqlx::query_scalar(
            "SELECT format('lane %s: epoch %s, done %s, target %s, last_id %s, settled %s ago', lane, epoch, done, target, \
               last_id, clock_timestamp() - settled_at) FROM postrider.lane \
             UNION ALL SELECT format('lease %s slot %s: %s, epoch %s, expires in %s', group_name, slot, owner, epoch, \
               expires_at - clock_timestamp()) FROM postrider.lease \
             UNION ALL SELECT format('parked %s: %s', state, count(*)) FROM postrider.parked GROUP BY state \
             UNION ALL SELECT format('backend %s: %s, %s since %s, waits for %s: %s', pid, application_name, state, \
               clock_timestamp() - state_change, wait_event, left(query, 100)) FROM pg_stat_activity \
               WHERE backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid()",
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(lines)
    }

    async fn history(&self, consumers: &[&str], rolled_back: Vec<Uuid>) -> Result<History> {
        let committed = sqlx::query_as::<_, (Uuid, String, i64)>("SELECT event_id, key, version FROM crash.ledger")
            .fetch_all(&self.pool)
            .await?
            .into_iter()
            .map(|(id, key, version)| Committed { id, key, version })
            .collect();
        let effects = sqlx::query_as::<_, (String, Uuid, String, i64, i64)>(
            "SELECT consumer, event_id, key, version, previous FROM crash.effect ORDER BY seq",
        )
        .fetch_all(&self.pool)
        .await?
        .into_iter()
        .map(|(consumer, id, key, version, previous)| Effect { consumer, id, key, version, previous: Some(previous) })
        .collect();
        let dead = sqlx::query_as::<_, (String, Uuid)>("SELECT consumer, message_id FROM postrider.dead_letter")
            .fetch_all(&self.pool)
            .await?
            .into_iter()
            .map(|(consumer, id)| DeadLetter { consumer, id })
            .collect();
        let consumers = consumers.iter().map(|&consumer| consumer.to_owned()).collect();
        Ok(History { consumers, committed, rolled_back, effects, dead })
    }

    async fn teller(&self) -> Result<Box<dyn Teller>> {
        Ok(Box::new(PostgresTeller(PgConnection::connect(&self.url).await?)))
    }
}
