//! The tables of the run.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::mysql::{MySqlPoolOptions, MySqlRow};
use sqlx::{Connection as _, MySqlConnection, MySqlPool, Row};
use uuid::Uuid;

use super::super::{Applied, Ledger, Slot, Teller};
use super::teller::MysqlTeller;
use crate::checker::{Committed, DeadLetter, Effect, History};
use crate::testbed::Result;

/// The database's own character set and collation are not to be trusted with keys.
const TABLES: &str = "
CREATE TABLE crash_account (`key` VARCHAR(64) PRIMARY KEY, version BIGINT NOT NULL DEFAULT 0) CHARACTER SET ascii COLLATE ascii_bin;
CREATE TABLE crash_ledger (event_id CHAR(36) PRIMARY KEY, `key` VARCHAR(64) NOT NULL, version BIGINT NOT NULL,
    is_poison BOOLEAN NOT NULL) CHARACTER SET ascii COLLATE ascii_bin;
CREATE TABLE crash_head (consumer VARCHAR(64), `key` VARCHAR(64), version BIGINT NOT NULL DEFAULT 0, previous BIGINT,
    PRIMARY KEY (consumer, `key`)) CHARACTER SET ascii COLLATE ascii_bin;
CREATE TABLE crash_effect (seq BIGINT AUTO_INCREMENT PRIMARY KEY, consumer VARCHAR(64) NOT NULL,
    event_id CHAR(36) NOT NULL, `key` VARCHAR(64) NOT NULL, version BIGINT NOT NULL, previous BIGINT NOT NULL,
    KEY (consumer, event_id)) CHARACTER SET ascii COLLATE ascii_bin;
";

/// Every event that this consumer should have applied and has not, with what Postrider knows of it.
const MISSING: &str = "SELECT l.event_id, l.`key`, l.version, s.status, \
       EXISTS (SELECT 1 FROM postrider_inbox i WHERE i.consumer = ? AND i.message_id = l.event_id) \
     FROM crash_ledger l LEFT JOIN postrider_outbox_status s ON s.event_id = l.event_id \
     WHERE NOT EXISTS (SELECT 1 FROM crash_effect e WHERE e.consumer = ? AND e.event_id = l.event_id) \
     ORDER BY l.`key`, l.version LIMIT 10";

/// The run's own view of the database.
pub(in super::super) struct MysqlLedger {
    url: String,
    pool: MySqlPool,
}

impl MysqlLedger {
    pub(in super::super) async fn create(url: &str, keys: usize, consumers: &[&str]) -> Result<MysqlLedger> {
        // While the database is away, whoever asks is told so at once and asks again.
        let options = MySqlPoolOptions::new().max_connections(8).acquire_timeout(Duration::from_secs(2));
        let pool = options.connect(url).await?;
        sqlx::raw_sql(TABLES).execute(&pool).await?;
        let mut tx = pool.begin().await?;
        for key in 0..keys {
            sqlx::query("INSERT INTO crash_account (`key`) VALUES (?)")
                .bind(format!("account-{key}"))
                .execute(&mut *tx)
                .await?;
        }
        for consumer in consumers {
            sqlx::query("INSERT INTO crash_head (consumer, `key`) SELECT ?, `key` FROM crash_account")
                .bind(*consumer)
                .execute(&mut *tx)
                .await?;
        }
        tx.commit().await?;
        Ok(MysqlLedger { url: url.to_owned(), pool })
    }

    async fn lines(&self, query: &'static str) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar(query).fetch_all(&self.pool).await?)
    }
}

/// An id that is kept as text.
fn id(row: &MySqlRow, column: usize) -> Result<Uuid> {
    Ok(Uuid::parse_str(row.try_get(column)?)?)
}

#[async_trait]
impl Ledger for MysqlLedger {
    async fn effects_about(&self) -> Result<u64> {
        let last: Option<i64> = sqlx::query_scalar("SELECT max(seq) FROM crash_effect").fetch_one(&self.pool).await?;
        Ok(last.unwrap_or(0) as u64)
    }

    async fn committed(&self) -> Result<u64> {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM crash_ledger").fetch_one(&self.pool).await?;
        Ok(count as u64)
    }

    async fn applied_after(&self, seq: i64, limit: i64) -> Result<Vec<Applied>> {
        let query = "SELECT seq, event_id, `key`, version FROM crash_effect WHERE seq > ? ORDER BY seq LIMIT ?";
        let rows = sqlx::query(query).bind(seq).bind(limit).fetch_all(&self.pool).await?;
        rows.iter().map(|row| Ok((row.try_get(0)?, id(row, 1)?, row.try_get(2)?, row.try_get(3)?))).collect()
    }

    async fn misjudged(&self, consumers: &[&str]) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        for consumer in consumers {
            let found: Vec<String> = sqlx::query_scalar(
                "SELECT concat(?, ': event ', l.event_id, ' is poison and no dead letter') FROM crash_ledger l \
                 WHERE l.is_poison AND NOT EXISTS \
                   (SELECT 1 FROM postrider_dead_letter d WHERE d.consumer = ? AND d.message_id = l.event_id)",
            )
            .bind(*consumer)
            .bind(*consumer)
            .fetch_all(&self.pool)
            .await?;
            lines.extend(found);
        }
        lines.extend(
            self.lines(
                "SELECT concat(d.consumer, ': event ', d.message_id, ' is a dead letter and no poison: ', d.history) \
                 FROM postrider_dead_letter d LEFT JOIN crash_ledger l ON l.event_id = d.message_id \
                 WHERE l.is_poison IS NOT TRUE",
            )
            .await?,
        );
        Ok(lines)
    }

    async fn applied(&self, consumer: &str) -> Result<u64> {
        let count: i64 = sqlx::query_scalar(
            "SELECT (SELECT count(DISTINCT event_id) FROM crash_effect WHERE consumer = ?) \
             + (SELECT count(*) FROM postrider_dead_letter WHERE consumer = ?)",
        )
        .bind(consumer)
        .bind(consumer)
        .fetch_one(&self.pool)
        .await?;
        Ok(count as u64)
    }

    async fn backlog(&self) -> Result<u64> {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM postrider_outbox_status WHERE status <> 'published'")
            .fetch_one(&self.pool)
            .await?;
        Ok(count as u64)
    }

    async fn unread(&self) -> Result<Vec<String>> {
        self.lines(
            "SELECT concat(c.consumer, ' slot ', c.slot, ' is at offset ', c.`offset`, ', with ', count(*), \
               ' messages after it') \
             FROM postrider_cursor c JOIN postrider_message m ON m.`offset` > c.`offset` AND m.hash % c.slots = c.slot \
             GROUP BY c.consumer, c.slot, c.`offset`",
        )
        .await
    }

    async fn slots(&self) -> Result<Vec<Slot>> {
        let query = "SELECT group_name, slot, owner, epoch FROM postrider_lease WHERE slot >= 0 AND group_name <> 'watch' ORDER BY 1, 2";
        let rows = sqlx::query(query).fetch_all(&self.pool).await?;
        let slot = |row: &MySqlRow| {
            Ok(Slot { group: row.try_get(0)?, slot: row.try_get(1)?, owner: row.try_get(2)?, epoch: row.try_get(3)? })
        };
        rows.iter().map(slot).collect()
    }

    async fn missing(&self, consumer: &str) -> Result<Vec<String>> {
        let rows = sqlx::query(MISSING).bind(consumer).bind(consumer).fetch_all(&self.pool).await?;
        let mut lines = Vec::new();
        for row in &rows {
            let (key, version): (String, i64) = (row.try_get(1)?, row.try_get(2)?);
            let (status, is_admitted): (Option<String>, bool) = (row.try_get(3)?, row.try_get(4)?);
            lines.push(format!(
                "event {} (key {key}, version {version}): outbox {}, inbox {}",
                id(row, 0)?,
                status.as_deref().unwrap_or("no row"),
                if is_admitted { "done" } else { "no row" },
            ));
        }
        Ok(lines)
    }

    async fn relay_state(&self) -> Result<Vec<String>> {
        let mut lines = self
            .lines("SELECT concat('lane ', lane, ' of ', destination, ': epoch ', epoch) FROM postrider_lane")
            .await?;
        lines.extend(
            self.lines(
                "SELECT concat('lease ', group_name, ' slot ', slot, ': ', owner, ', epoch ', epoch, ', expires at ', \
                   expires_at, ', now ', utc_timestamp(6)) FROM postrider_lease",
            )
            .await?,
        );
        lines.extend(
            self.lines("SELECT concat('parked ', state, ': ', count(*)) FROM postrider_parked GROUP BY state").await?,
        );
        Ok(lines)
    }

    async fn history(&self, consumers: &[&str], rolled_back: Vec<Uuid>) -> Result<History> {
        let rows = sqlx::query("SELECT event_id, `key`, version FROM crash_ledger").fetch_all(&self.pool).await?;
        let committed =
            |row: &MySqlRow| Result::Ok(Committed { id: id(row, 0)?, key: row.try_get(1)?, version: row.try_get(2)? });
        let committed = rows.iter().map(committed).collect::<Result<_>>()?;
        let rows = sqlx::query("SELECT consumer, event_id, `key`, version, previous FROM crash_effect ORDER BY seq")
            .fetch_all(&self.pool)
            .await?;
        let effect = |row: &MySqlRow| {
            Result::Ok(Effect {
                consumer: row.try_get(0)?,
                id: id(row, 1)?,
                key: row.try_get(2)?,
                version: row.try_get(3)?,
                previous: Some(row.try_get(4)?),
            })
        };
        let effects = rows.iter().map(effect).collect::<Result<_>>()?;
        let rows = sqlx::query("SELECT consumer, message_id FROM postrider_dead_letter").fetch_all(&self.pool).await?;
        let dead = |row: &MySqlRow| Result::Ok(DeadLetter { consumer: row.try_get(0)?, id: id(row, 1)? });
        let dead = rows.iter().map(dead).collect::<Result<_>>()?;
        let consumers = consumers.iter().map(|&consumer| consumer.to_owned()).collect();
        Ok(History { consumers, committed, rolled_back, effects, dead })
    }

    async fn teller(&self) -> Result<Box<dyn Teller>> {
        Ok(Box::new(MysqlTeller(MySqlConnection::connect(&self.url).await?)))
    }
}
