//! Retention and backlog.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::{Row as _, SqliteConnection};

use super::lease::millis;
use super::row::text_lossy;
use super::source::hash;
use super::{SqliteStore, now_ms, view};
use crate::broker::topic::Route;
use crate::error::Result;
use crate::pulse::{HOURS_KEPT, LOST_KEPT, MINUTES_KEPT, QUARTERS_KEPT};
use crate::upkeep::{
    AUDIT_KEPT, BACKLOG_COUNT_MAX, Backlog, ConsumerView, ParkedView, Retention, Upkeep, UpkeepReport,
};

/// Rows deleted in one transaction: short enough that a producer behind it does not notice.
const CHUNK: u64 = 1_000;
/// With several lanes rows that one lane has passed stand among those that another has not; looking for the latter ends
/// after this many rows, so that a lane that is far behind does not make `status` slow.
const BACKLOG_SCAN_MAX: u64 = 10 * BACKLOG_COUNT_MAX;

const DOING: &str = "upkeep did not finish";

#[async_trait]
impl Upkeep for SqliteStore {
    async fn maintain(&self, retention: &Retention) -> Result<UpkeepReport> {
        let mut report = UpkeepReport::default();
        if let Some(id) = self.outbox_end(retention.outbox).await.map_err(self.failed(DOING))? {
            report.outbox_deleted = self
                .delete("DELETE FROM outbox WHERE id IN (SELECT id FROM outbox WHERE id <= ? ORDER BY id LIMIT ?)", id)
                .await?;
        }
        if let Some(offset) = self.queue_end(retention.queue).await.map_err(self.failed(DOING))? {
            report.queue_deleted = self
                .delete(
                    "DELETE FROM message WHERE \"offset\" IN
                            (SELECT \"offset\" FROM message WHERE \"offset\" <= ? ORDER BY \"offset\" LIMIT ?)",
                    offset,
                )
                .await?;
        }
        let (cutoff, _) = self.cutoff(retention.inbox).await.map_err(self.failed(DOING))?;
        report.inbox_deleted = self
            .delete(
                "DELETE FROM inbox WHERE (consumer, message_id) IN
                        (SELECT consumer, message_id FROM inbox WHERE processed_at <= ? ORDER BY processed_at LIMIT ?)",
                cutoff,
            )
            .await?;
        let (cutoff, _) = self.cutoff(retention.dead).await.map_err(self.failed(DOING))?;
        report.dead_deleted = self
            .delete(
                // An event that is still parked keeps its dead letter: a person has not decided yet.
                "DELETE FROM dead_letter WHERE id IN
                        (SELECT id FROM dead_letter d WHERE died_at <= ? AND state <> 'replaying'
                            AND (stage <> 'relay' OR NOT EXISTS (SELECT 1 FROM parked p
                                  WHERE p.destination = substr(d.consumer, 7) AND p.state = 'failed'
                                    AND p.event_id = d.message_id))
                          ORDER BY died_at LIMIT ?)",
                cutoff,
            )
            .await?;
        let (cutoff, _) = self.cutoff(retention.tombstones()).await.map_err(self.failed(DOING))?;
        report.tombstones_deleted = self
            .delete(
                "DELETE FROM newest WHERE (consumer, entity, id) IN
                        (SELECT consumer, entity, id FROM newest WHERE is_deleted AND admitted_at <= ?
                         ORDER BY admitted_at LIMIT ?)",
                cutoff,
            )
            .await?;
        for (statement, age) in OPERATE {
            self.delete(statement, self.millis_ago(age).await.map_err(self.failed(DOING))?).await?;
        }
        let (cutoff, _) = self.cutoff(AUDIT_KEPT).await.map_err(self.failed(DOING))?;
        self.delete("DELETE FROM audit WHERE id IN (SELECT id FROM audit WHERE at <= ? ORDER BY at LIMIT ?)", cutoff)
            .await?;
        Ok(report)
    }

    async fn parked(&self, destination: &str, after: i64, limit: usize) -> Result<Vec<ParkedView>> {
        view::parked(self, destination, after, limit).await
    }

    async fn consumers(&self) -> Result<Vec<ConsumerView>> {
        view::consumers(self).await
    }

    async fn backlog(&self, route: &Route) -> Result<Backlog> {
        const DOING: &str = "the backlog was not read";
        let mut tx = self.read(DOING).await?;
        let backlog = backlog(&mut tx, route).await.map_err(self.failed(DOING))?;
        tx.rollback().await.map_err(self.failed(DOING))?;
        Ok(backlog)
    }
}

/// What is kept for people, and how long.
const OPERATE: [(&str, Duration); 7] = [
    (
        "DELETE FROM instance WHERE (group_name, owner) IN
                (SELECT group_name, owner FROM instance WHERE seen_at <= ? LIMIT ?)",
        LOST_KEPT,
    ),
    (
        "DELETE FROM bucket WHERE (width, at, group_name, metric, label) IN
                (SELECT width, at, group_name, metric, label FROM bucket WHERE width = 60 AND at <= ? LIMIT ?)",
        MINUTES_KEPT,
    ),
    (
        "DELETE FROM bucket WHERE (width, at, group_name, metric, label) IN
                (SELECT width, at, group_name, metric, label FROM bucket WHERE width = 900 AND at <= ? LIMIT ?)",
        QUARTERS_KEPT,
    ),
    (
        "DELETE FROM bucket WHERE (width, at, group_name, metric, label) IN
                (SELECT width, at, group_name, metric, label FROM bucket WHERE width = 3600 AND at <= ? LIMIT ?)",
        HOURS_KEPT,
    ),
    (
        "DELETE FROM alert WHERE id IN (SELECT id FROM alert WHERE resolved_at <= ? ORDER BY resolved_at LIMIT ?)",
        HOURS_KEPT,
    ),
    ("DELETE FROM silence WHERE id IN (SELECT id FROM silence WHERE until_at <= ? LIMIT ?)", HOURS_KEPT),
    (
        "DELETE FROM report WHERE id IN (SELECT id FROM report WHERE began_at <= ? ORDER BY began_at LIMIT ?)",
        HOURS_KEPT,
    ),
];

impl SqliteStore {
    /// The same for times that are milliseconds.
    async fn millis_ago(&self, age: Duration) -> Result<i64, sqlx::Error> {
        let row = sqlx::query(concat!("SELECT ", now_ms!(), " - ?")).bind(millis(age)).fetch_one(&self.inner.reader);
        row.await?.try_get(0)
    }

    /// The end of what is past its retention, and now, both as text that compares with stored times.
    async fn cutoff(&self, retention: Duration) -> Result<(String, String), sqlx::Error> {
        let ago = format!("-{}.{:03} seconds", millis(retention) / 1000, millis(retention) % 1000);
        // SQLite's clock counts milliseconds: include all of the one that ends here.
        let row = sqlx::query(
            "SELECT strftime('%Y-%m-%dT%H:%M:%f', 'now', ?) || '999Z', strftime('%Y-%m-%dT%H:%M:%f', 'now') || '999Z'",
        )
        .bind(ago)
        .fetch_one(&self.inner.reader)
        .await?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }

    /// The last outbox row that may go: every destination has passed it, and no row before it is young. Rows are looked
    /// at from the oldest id until the first young one; a time in the future, which only a producer's clock can write,
    /// does not count as young, or it would stop retention for good.
    async fn outbox_end(&self, retention: Duration) -> Result<Option<i64>, sqlx::Error> {
        let (cutoff, now) = self.cutoff(retention).await?;
        let passed = sqlx::query("SELECT min(last_id) FROM lane").fetch_one(&self.inner.reader).await?;
        let Some(passed) = passed.try_get::<Option<i64>, _>(0)? else { return Ok(None) };
        let young = sqlx::query(
            "SELECT id FROM outbox WHERE id <= ? AND created_at > ? AND created_at <= ? ORDER BY id LIMIT 1",
        )
        .bind(passed)
        .bind(cutoff)
        .bind(now)
        .fetch_optional(&self.inner.reader)
        .await?;
        Ok(Some(match young {
            Some(young) => young.try_get::<i64, _>(0)? - 1,
            None => passed,
        }))
    }

    /// The last message that may go: every consumer has passed it, and it is past its retention.
    async fn queue_end(&self, retention: Duration) -> Result<Option<i64>, sqlx::Error> {
        let (cutoff, _) = self.cutoff(retention).await?;
        let row = sqlx::query("SELECT min(\"offset\") FROM cursor").fetch_one(&self.inner.reader).await?;
        let Some(passed) = row.try_get::<Option<i64>, _>(0)? else { return Ok(None) };
        let young = sqlx::query(
            "SELECT \"offset\" FROM message WHERE \"offset\" <= ? AND appended_at > ? ORDER BY \"offset\" LIMIT 1",
        )
        .bind(passed)
        .bind(cutoff)
        .fetch_optional(&self.inner.reader)
        .await?;
        Ok(Some(match young {
            Some(young) => young.try_get::<i64, _>(0)? - 1,
            None => passed,
        }))
    }

    /// Deletes in chunks; other writers come in between.
    async fn delete<'q, T>(&self, sql: &'static str, up_to: T) -> Result<u64>
    where
        T: sqlx::Encode<'q, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite> + Clone + Send + 'q,
    {
        let mut deleted = 0;
        loop {
            let mut tx = self.write(DOING).await?;
            let chunk = sqlx::query(sql)
                .bind(up_to.clone())
                .bind(CHUNK as i64)
                .execute(&mut *tx)
                .await
                .map_err(self.failed(DOING))?
                .rows_affected();
            tx.commit().await.map_err(self.failed(DOING))?;
            deleted += chunk;
            if chunk < CHUNK {
                return Ok(deleted);
            }
        }
    }
}

async fn backlog(connection: &mut SqliteConnection, route: &Route) -> Result<Backlog, sqlx::Error> {
    let destination = &route.destination;
    let rows = sqlx::query("SELECT lane, last_id FROM lane WHERE destination = ?")
        .bind(destination)
        .fetch_all(&mut *connection)
        .await?;
    let mut lanes: HashMap<u32, i64> = HashMap::new();
    for row in rows {
        lanes.insert(row.try_get(0)?, row.try_get(1)?);
    }
    let mut backlog = Backlog::default();
    let oldest = if lanes.len() <= 1 && route.topics.is_all() {
        let last_id = lanes.values().copied().next().unwrap_or(0);
        pending_of_one(connection, last_id, &mut backlog).await?
    } else {
        pending_of_many(connection, route, &lanes, &mut backlog).await?
    };
    for (state, count) in
        [("retrying", &mut backlog.retrying), ("waiting", &mut backlog.waiting), ("failed", &mut backlog.failed)]
    {
        *count = sqlx::query("SELECT count(*) FROM (SELECT 1 FROM parked WHERE destination = ? AND state = ? LIMIT ?)")
            .bind(destination)
            .bind(state)
            .bind(BACKLOG_COUNT_MAX as i64)
            .fetch_one(&mut *connection)
            .await?
            .try_get(0)?;
    }
    backlog.oldest_secs = sqlx::query(
        "SELECT unixepoch('now') - min(unixepoch(created_at)) FROM
                (SELECT created_at FROM outbox WHERE id = ?2
                 UNION ALL
                 SELECT created_at FROM (SELECT created_at FROM parked WHERE destination = ?1 ORDER BY id LIMIT 1))",
    )
    .bind(destination)
    .bind(oldest)
    .fetch_one(connection)
    .await?
    .try_get::<Option<i64>, _>(0)?
    .map(|secs| u64::try_from(secs).unwrap_or(0));
    Ok(backlog)
}

/// Counts what one lane has before it; returns the oldest.
async fn pending_of_one(
    connection: &mut SqliteConnection,
    last_id: i64,
    backlog: &mut Backlog,
) -> Result<Option<i64>, sqlx::Error> {
    let row = sqlx::query("SELECT count(*), min(id) FROM (SELECT id FROM outbox WHERE id > ? ORDER BY id LIMIT ?)")
        .bind(last_id)
        .bind(BACKLOG_COUNT_MAX as i64)
        .fetch_one(connection)
        .await?;
    backlog.pending = row.try_get(0)?;
    row.try_get(1)
}

/// The same for several lanes, each with its own position, or for some topics.
async fn pending_of_many(
    connection: &mut SqliteConnection,
    route: &Route,
    lanes: &HashMap<u32, i64>,
    backlog: &mut Backlog,
) -> Result<Option<i64>, sqlx::Error> {
    let rows = sqlx::query("SELECT id, key, topic FROM outbox WHERE id > ? ORDER BY id LIMIT ?")
        .bind(lanes.values().copied().min().unwrap_or(0))
        .bind(BACKLOG_SCAN_MAX as i64)
        .fetch_all(connection)
        .await?;
    let mut oldest = None;
    for row in &rows {
        let id: i64 = row.try_get(0)?;
        let lane = hash(id, text_lossy(row, 1)?.as_deref()) % lanes.len().max(1) as u32;
        let is_wanted = route.topics.wants(text_lossy(row, 2)?.as_deref().unwrap_or_default());
        if is_wanted && lanes.get(&lane).is_none_or(|last_id| id > *last_id) {
            oldest.get_or_insert(id);
            backlog.pending += 1;
            if backlog.pending == BACKLOG_COUNT_MAX {
                break;
            }
        }
    }
    Ok(oldest)
}
