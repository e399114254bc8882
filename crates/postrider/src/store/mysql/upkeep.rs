//! Retention and backlog.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Row as _};

use super::error::db;
use super::{MysqlStore, list, micros, now, view};
use crate::broker::topic::Route;
use crate::error::Result;
use crate::pulse::{HOURS_KEPT, LOST_KEPT, MINUTES_KEPT, QUARTERS_KEPT};
use crate::upkeep::{
    AUDIT_KEPT, BACKLOG_COUNT_MAX, Backlog, ConsumerView, ParkedView, Retention, Upkeep, UpkeepReport,
};

/// Rows per `DELETE`, and `DELETE`s per run: upkeep never holds locks for long.
const CHUNK: u64 = 1_000;
const CHUNKS_MAX: u32 = 100;

/// Before this, counted from now, as a literal for `concat!`.
macro_rules! cutoff {
    () => {
        "UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND"
    };
}

/// The oldest handled rows, each with whether it may go. A time in the future, which only a producer's clock can write, does not
/// count as young, or it would stop retention for good.
const OUTBOX: &str = concat!(
    "SELECT id, created_at <= ",
    cutoff!(),
    " OR created_at > ",
    now!(),
    " FROM postrider_outbox FORCE INDEX (postrider_outbox_state) WHERE state = 1 ORDER BY id LIMIT ?"
);

const QUEUE: &str = concat!(
    "SELECT `offset`, appended_at <= ",
    cutoff!(),
    " FROM postrider_message WHERE `offset` <= ? ORDER BY `offset` LIMIT ?"
);

const INBOX: &str =
    concat!("DELETE FROM postrider_inbox WHERE processed_at <= ", cutoff!(), " ORDER BY processed_at LIMIT ?");

/// The conditions are looked at under the row's lock, because an entity may be made anew meanwhile.
const TOMBSTONES: &str = concat!(
    "DELETE FROM postrider_newest WHERE is_deleted = 1 AND admitted_at <= ",
    cutoff!(),
    " ORDER BY admitted_at LIMIT ?"
);

const MEMBERS: &str = concat!("DELETE FROM postrider_member WHERE expires_at <= ", cutoff!(), " LIMIT ?");

/// An event that is still parked keeps its dead letter: a person has not decided yet.
const DEAD: &str = concat!(
    "SELECT d.id FROM postrider_dead_letter d WHERE d.died_at <= ",
    cutoff!(),
    " AND d.state <> 'replaying' AND (d.stage <> 'relay' OR NOT EXISTS (SELECT 1 FROM postrider_parked p \
        WHERE p.destination = SUBSTR(d.consumer, 7) AND p.state = 'failed' AND p.event_id = d.message_id)) \
      ORDER BY d.died_at LIMIT ?"
);

/// What is kept for people, and how long.
const OPERATE: [(&str, Duration); 8] = [
    (concat!("DELETE FROM postrider_instance WHERE seen_at <= ", cutoff!(), " LIMIT ?"), LOST_KEPT),
    (concat!("DELETE FROM postrider_bucket WHERE width = 60 AND at <= ", cutoff!(), " LIMIT ?"), MINUTES_KEPT),
    (concat!("DELETE FROM postrider_bucket WHERE width = 900 AND at <= ", cutoff!(), " LIMIT ?"), QUARTERS_KEPT),
    (concat!("DELETE FROM postrider_bucket WHERE width = 3600 AND at <= ", cutoff!(), " LIMIT ?"), HOURS_KEPT),
    (concat!("DELETE FROM postrider_alert WHERE resolved_at <= ", cutoff!(), " LIMIT ?"), HOURS_KEPT),
    (concat!("DELETE FROM postrider_silence WHERE until_at <= ", cutoff!(), " LIMIT ?"), HOURS_KEPT),
    (concat!("DELETE FROM postrider_report WHERE began_at <= ", cutoff!(), " LIMIT ?"), HOURS_KEPT),
    (concat!("DELETE FROM postrider_audit WHERE at <= ", cutoff!(), " LIMIT ?"), AUDIT_KEPT),
];

#[async_trait]
impl Upkeep for MysqlStore {
    async fn maintain(&self, retention: &Retention) -> Result<UpkeepReport> {
        let report = UpkeepReport {
            outbox_deleted: self.delete_outbox(retention.outbox).await?,
            inbox_deleted: self.delete(INBOX, retention.inbox).await?,
            queue_deleted: self.delete_queue(retention.queue).await?,
            dead_deleted: self.delete_dead(retention.dead).await?,
            tombstones_deleted: self.delete(TOMBSTONES, retention.tombstones()).await?,
            ..UpkeepReport::default()
        };
        self.delete(MEMBERS, Duration::from_secs(3600)).await?;
        for (statement, age) in OPERATE {
            self.delete(statement, age).await?;
        }
        Ok(report)
    }

    async fn parked(&self, destination: &str, after: i64, limit: usize) -> Result<Vec<ParkedView>> {
        view::parked(self, destination, after, limit).await
    }

    async fn consumers(&self) -> Result<Vec<ConsumerView>> {
        view::consumers(self).await
    }

    async fn backlog(&self, route: &Route) -> Result<Backlog> {
        let topics = route.topics.regex();
        let filter = if topics.is_some() { " AND topic REGEXP ?" } else { "" };
        let pending = format!(
            "SELECT COUNT(*), TIMESTAMPDIFF(SECOND, MIN(created_at), {}) FROM (SELECT created_at \
               FROM postrider_outbox FORCE INDEX (postrider_outbox_state) WHERE state = 0{filter} ORDER BY id LIMIT ?) w",
            now!()
        );
        let mut query = sqlx::query(AssertSqlSafe(pending));
        if let Some(topics) = &topics {
            query = query.bind(topics);
        }
        let row = query.bind(BACKLOG_COUNT_MAX as i64).fetch_one(&self.own).await.map_err(db)?;
        let mut backlog = Backlog { pending: row.try_get::<i64, _>(0).map_err(db)? as u64, ..Backlog::default() };
        older(&mut backlog, row.try_get(1).map_err(db)?);
        let parked = sqlx::query(concat!(
            "SELECT state, COUNT(*), TIMESTAMPDIFF(SECOND, MIN(created_at), ",
            now!(),
            ") FROM postrider_parked WHERE destination = ? GROUP BY state"
        ))
        .bind(&route.destination)
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        for row in &parked {
            let count = row.try_get::<i64, _>(1).map_err(db)? as u64;
            match row.try_get(0).map_err(db)? {
                "retrying" => backlog.retrying = count,
                "waiting" => backlog.waiting = count,
                _ => backlog.failed = count,
            }
            older(&mut backlog, row.try_get(2).map_err(db)?);
        }
        Ok(backlog)
    }
}

fn older(backlog: &mut Backlog, secs: Option<i64>) {
    let secs = secs.map(|secs| u64::try_from(secs).unwrap_or(0));
    backlog.oldest_secs = backlog.oldest_secs.max(secs);
}

/// The numbers up to the first row that may not go.
fn old(rows: &[MySqlRow]) -> Result<Vec<i64>> {
    let mut old = Vec::with_capacity(rows.len());
    for row in rows {
        if !row.try_get::<bool, _>(1).map_err(db)? {
            break;
        }
        old.push(row.try_get(0).map_err(db)?);
    }
    Ok(old)
}

impl MysqlStore {
    /// Runs a `DELETE` with a cutoff and a limit until nothing is left, each a transaction of its own.
    async fn delete(&self, statement: &'static str, age: Duration) -> Result<u64> {
        let mut deleted = 0;
        for _ in 0..CHUNKS_MAX {
            let query = sqlx::query(statement).bind(micros(age)).bind(CHUNK as i64);
            let chunk = query.execute(&self.own).await.map_err(db)?.rows_affected();
            deleted += chunk;
            if chunk < CHUNK {
                break;
            }
        }
        Ok(deleted)
    }

    /// From the oldest on, up to the first that is young.
    async fn delete_outbox(&self, age: Duration) -> Result<u64> {
        let mut deleted = 0;
        for _ in 0..CHUNKS_MAX {
            let query = sqlx::query(OUTBOX).bind(micros(age)).bind(CHUNK as i64);
            let old = old(&query.fetch_all(&self.own).await.map_err(db)?)?;
            deleted += self.delete_ids("postrider_outbox WHERE state = 1 AND id", &old).await?;
            if (old.len() as u64) < CHUNK {
                break;
            }
        }
        Ok(deleted)
    }

    /// Only what every consumer that was ever seen has passed; with none, nothing.
    async fn delete_queue(&self, age: Duration) -> Result<u64> {
        let passed: Option<i64> = sqlx::query("SELECT MIN(`offset`) FROM postrider_cursor")
            .fetch_one(&self.own)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        let Some(passed) = passed else { return Ok(0) };
        let mut deleted = 0;
        for _ in 0..CHUNKS_MAX {
            let query = sqlx::query(QUEUE).bind(micros(age)).bind(passed).bind(CHUNK as i64);
            let old = old(&query.fetch_all(&self.own).await.map_err(db)?)?;
            deleted += self.delete_ids("postrider_message WHERE `offset`", &old).await?;
            if (old.len() as u64) < CHUNK {
                break;
            }
        }
        Ok(deleted)
    }

    async fn delete_dead(&self, age: Duration) -> Result<u64> {
        let mut deleted = 0;
        for _ in 0..CHUNKS_MAX {
            let query = sqlx::query(DEAD).bind(micros(age)).bind(CHUNK as i64);
            let rows = query.fetch_all(&self.own).await.map_err(db)?;
            let ids = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<Vec<i64>>>()?;
            // Replayed meanwhile, it stays.
            deleted += self.delete_ids("postrider_dead_letter WHERE state <> 'replaying' AND id", &ids).await?;
            if (ids.len() as u64) < CHUNK {
                break;
            }
        }
        Ok(deleted)
    }

    async fn delete_ids(&self, from: &str, ids: &[i64]) -> Result<u64> {
        if ids.is_empty() {
            return Ok(0);
        }
        let delete = format!("DELETE FROM {from} IN ({})", list(ids));
        Ok(sqlx::raw_sql(AssertSqlSafe(delete)).execute(&self.own).await.map_err(db)?.rows_affected())
    }
}
