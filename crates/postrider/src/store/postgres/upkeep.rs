//! Partitions ahead of time, retention, and the backlog.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{Days, NaiveDate, Utc};
use sqlx::{AssertSqlSafe, PgPool, Row as _};

use super::error::db;
use super::source::LaneFilter;
use super::{PostgresStore, view};
use crate::broker::topic::Route;
use crate::error::Result;
use crate::pulse::{HOURS_KEPT, LOST_KEPT, MINUTES_KEPT, QUARTERS_KEPT};
use crate::upkeep::{
    AUDIT_KEPT, BACKLOG_COUNT_MAX, Backlog, ConsumerView, ParkedView, Retention, Upkeep, UpkeepReport,
};

/// Daily partitions are made for today and this many days ahead.
const DAYS_AHEAD: u64 = 3;
/// One instance at a time does upkeep.
const UPKEEP_LOCK: i64 = 7_062_611_490_211_870_003;
/// Rows per DELETE, and DELETEs per run: upkeep never holds a lock for long.
const CHUNK: i64 = 5_000;
const CHUNKS_MAX: u32 = 20;

#[async_trait]
impl Upkeep for PostgresStore {
    async fn maintain(&self, retention: &Retention) -> Result<UpkeepReport> {
        let mut report = UpkeepReport::default();
        let mut guard = self.own.begin().await.map_err(db)?;
        let is_ours: bool = sqlx::query("SELECT pg_try_advisory_xact_lock($1)")
            .bind(UPKEEP_LOCK)
            .fetch_one(&mut *guard)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        if is_ours {
            report.partitions_created = create_partitions(&self.own).await?;
            report.partitions_dropped = drop_partitions(&self.own, retention.outbox).await?;
            report.outbox_deleted = self.delete(DELETE_DEFAULT, retention.outbox).await?;
            report.inbox_deleted = self.delete(DELETE_INBOX, retention.inbox).await?;
            report.queue_deleted = self.delete(DELETE_QUEUE, retention.queue).await?;
            report.dead_deleted = self.delete(DELETE_DEAD, retention.dead).await?;
            report.tombstones_deleted = self.delete(DELETE_TOMBSTONES, retention.tombstones()).await?;
            self.delete(DELETE_MEMBERS, Duration::from_secs(3600)).await?;
            for (statement, age) in OPERATE {
                self.delete(statement, age).await?;
            }
        }
        guard.commit().await.map_err(db)?;
        Ok(report)
    }

    async fn parked(&self, destination: &str, after: i64, limit: usize) -> Result<Vec<ParkedView>> {
        view::parked(self, destination, after, limit).await
    }

    async fn consumers(&self) -> Result<Vec<ConsumerView>> {
        view::consumers(self).await
    }

    async fn backlog(&self, route: &Route) -> Result<Backlog> {
        let destination = &route.destination;
        let lanes = sqlx::query(
            "SELECT lane, lanes, done::text, target::text, last_id FROM postrider.lane WHERE destination = $1",
        )
        .bind(destination)
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        let mut backlog = Backlog::default();
        if lanes.is_empty() {
            // No relay has ever run for it: everything waits.
            let start = super::source::start();
            let filter = LaneFilter { topics: route.topics.regex(), ..LaneFilter::ALL };
            self.count_pending(&mut backlog, PENDING_NEW, &filter, &start.done, 0, &start.done).await?;
        }
        for row in &lanes {
            let (lane, lanes) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
            let filter = LaneFilter { lanes, lane, topics: route.topics.regex() };
            let done: String = row.try_get(2).map_err(db)?;
            let target: Option<String> = row.try_get(3).map_err(db)?;
            if let Some(target) = &target {
                let last_id = row.try_get(4).map_err(db)?;
                self.count_pending(&mut backlog, PENDING_WINDOW, &filter, &done, last_id, target).await?;
            }
            self.count_pending(&mut backlog, PENDING_NEW, &filter, target.as_ref().unwrap_or(&done), 0, &done).await?;
        }
        let parked = sqlx::query(
            "SELECT state, count(*), max(extract(epoch FROM clock_timestamp() - created_at))::bigint \
             FROM postrider.parked WHERE destination = $1 GROUP BY state",
        )
        .bind(destination)
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        for row in &parked {
            let count = row.try_get::<i64, _>(1).map_err(db)? as u64;
            match row.try_get::<&str, _>(0).map_err(db)? {
                "retrying" => backlog.retrying = count,
                "waiting" => backlog.waiting = count,
                _ => backlog.failed = count,
            }
            older(&mut backlog, row.try_get(2).map_err(db)?);
        }
        Ok(backlog)
    }
}

/// Rows after `done`, oldest transactions first.
const PENDING_NEW: &str = "SELECT count(*), max(extract(epoch FROM clock_timestamp() - created_at))::bigint FROM ( \
       (SELECT created_at FROM postrider.outbox WHERE tx >= (SELECT pg_snapshot_xmax($1::text::pg_snapshot)) \
          AND ($2 = 1 OR postrider.lane_of(key, id, $2) = $3) AND ($7::text IS NULL OR topic ~ $7) \
          AND $5 = 0 AND $6 <> '' ORDER BY tx LIMIT $4) \
       UNION ALL \
       (SELECT created_at FROM postrider.outbox \
        WHERE tx = ANY (ARRAY(SELECT pg_snapshot_xip($1::text::pg_snapshot))) \
          AND ($2 = 1 OR postrider.lane_of(key, id, $2) = $3) AND ($7::text IS NULL OR topic ~ $7) LIMIT $4)) w";

/// Rows of the window that is being read, after the last settled page.
const PENDING_WINDOW: &str = "SELECT count(*), max(extract(epoch FROM clock_timestamp() - created_at))::bigint FROM ( \
       SELECT created_at FROM postrider.outbox WHERE id > $5 \
          AND pg_visible_in_snapshot(tx, (SELECT $6::text::pg_snapshot)) \
          AND NOT pg_visible_in_snapshot(tx, (SELECT $1::text::pg_snapshot)) \
          AND ($2 = 1 OR postrider.lane_of(key, id, $2) = $3) AND ($7::text IS NULL OR topic ~ $7) ORDER BY id LIMIT $4) w";

const DELETE_DEFAULT: &str = "DELETE FROM postrider.outbox_default WHERE ctid = ANY (ARRAY( \
       SELECT o.ctid FROM postrider.outbox_default o WHERE o.created_at < clock_timestamp() - $1 * interval '1 second' \
         AND EXISTS (SELECT 1 FROM postrider.lane) AND NOT EXISTS (SELECT 1 FROM postrider.lane l \
           WHERE l.lane = postrider.lane_of(o.key, o.id, l.lanes) AND (l.topics IS NULL OR o.topic ~ l.topics) \
             AND NOT pg_visible_in_snapshot(o.tx, l.done)) \
       LIMIT $2))";

const DELETE_INBOX: &str = "DELETE FROM postrider.inbox WHERE ctid = ANY (ARRAY( \
       SELECT ctid FROM postrider.inbox WHERE processed_at < clock_timestamp() - $1 * interval '1 second' LIMIT $2))";

/// Only what every consumer that was ever seen has passed; with none, nothing.
const DELETE_QUEUE: &str = "DELETE FROM postrider.message WHERE \"offset\" = ANY (ARRAY( \
       SELECT \"offset\" FROM postrider.message WHERE \"offset\" <= (SELECT min(\"offset\") FROM postrider.cursor) \
         AND appended_at < clock_timestamp() - $1 * interval '1 second' ORDER BY \"offset\" LIMIT $2))";

/// An event that is still parked keeps its dead letter: a person has not decided yet.
const DELETE_DEAD: &str = "DELETE FROM postrider.dead_letter WHERE id = ANY (ARRAY( \
       SELECT id FROM postrider.dead_letter d WHERE died_at < clock_timestamp() - $1 * interval '1 second' \
         AND state <> 'replaying' AND (stage <> 'relay' OR NOT EXISTS (SELECT 1 FROM postrider.parked p \
           WHERE p.destination = substr(d.consumer, 7) AND p.state = 'failed' AND p.event_id = d.message_id)) \
       ORDER BY died_at LIMIT $2))";

/// The conditions stand outside too, because an entity may be made anew, or deleted anew, while we look.
const DELETE_TOMBSTONES: &str = "DELETE FROM postrider.newest WHERE ctid = ANY (ARRAY( \
       SELECT ctid FROM postrider.newest WHERE is_deleted \
         AND admitted_at < clock_timestamp() - $1 * interval '1 second' LIMIT $2)) \
     AND is_deleted AND admitted_at < clock_timestamp() - $1 * interval '1 second'";

const DELETE_MEMBERS: &str = "DELETE FROM postrider.lease WHERE ctid = ANY (ARRAY( \
       SELECT ctid FROM postrider.lease WHERE slot = -1 \
         AND expires_at < clock_timestamp() - $1 * interval '1 second' LIMIT $2))";

/// What is kept for people, and how long.
const OPERATE: [(&str, Duration); 8] = [
    (
        "DELETE FROM postrider.instance WHERE ctid = ANY (ARRAY(SELECT ctid FROM postrider.instance \
         WHERE seen_at < clock_timestamp() - $1 * interval '1 second' LIMIT $2))",
        LOST_KEPT,
    ),
    (
        "DELETE FROM postrider.bucket WHERE ctid = ANY (ARRAY(SELECT ctid FROM postrider.bucket \
         WHERE width = 60 AND at < clock_timestamp() - $1 * interval '1 second' LIMIT $2))",
        MINUTES_KEPT,
    ),
    (
        "DELETE FROM postrider.bucket WHERE ctid = ANY (ARRAY(SELECT ctid FROM postrider.bucket \
         WHERE width = 900 AND at < clock_timestamp() - $1 * interval '1 second' LIMIT $2))",
        QUARTERS_KEPT,
    ),
    (
        "DELETE FROM postrider.bucket WHERE ctid = ANY (ARRAY(SELECT ctid FROM postrider.bucket \
         WHERE width = 3600 AND at < clock_timestamp() - $1 * interval '1 second' LIMIT $2))",
        HOURS_KEPT,
    ),
    (
        "DELETE FROM postrider.alert WHERE id = ANY (ARRAY(SELECT id FROM postrider.alert \
         WHERE resolved_at < clock_timestamp() - $1 * interval '1 second' ORDER BY resolved_at LIMIT $2))",
        HOURS_KEPT,
    ),
    (
        "DELETE FROM postrider.silence WHERE id = ANY (ARRAY(SELECT id FROM postrider.silence \
         WHERE until_at < clock_timestamp() - $1 * interval '1 second' LIMIT $2))",
        HOURS_KEPT,
    ),
    (
        "DELETE FROM postrider.report WHERE id = ANY (ARRAY(SELECT id FROM postrider.report \
         WHERE began_at < clock_timestamp() - $1 * interval '1 second' ORDER BY began_at LIMIT $2))",
        HOURS_KEPT,
    ),
    (
        "DELETE FROM postrider.audit WHERE id = ANY (ARRAY(SELECT id FROM postrider.audit \
         WHERE at < clock_timestamp() - $1 * interval '1 second' ORDER BY at LIMIT $2))",
        AUDIT_KEPT,
    ),
];

impl PostgresStore {
    async fn delete(&self, statement: &'static str, age: Duration) -> Result<u64> {
        let mut deleted = 0;
        for _ in 0..CHUNKS_MAX {
            let result =
                sqlx::query(statement).bind(age.as_secs_f64()).bind(CHUNK).execute(&self.own).await.map_err(db)?;
            deleted += result.rows_affected();
            if result.rows_affected() < CHUNK as u64 {
                break;
            }
        }
        Ok(deleted)
    }

    async fn count_pending(
        &self,
        backlog: &mut Backlog,
        query: &'static str,
        filter: &LaneFilter,
        done: &str,
        last_id: i64,
        target: &str,
    ) -> Result<()> {
        let row = sqlx::query(query)
            .bind(done)
            .bind(filter.lanes)
            .bind(filter.lane)
            .bind(BACKLOG_COUNT_MAX as i64)
            .bind(last_id)
            .bind(target)
            .bind(&filter.topics)
            .fetch_one(&self.own)
            .await
            .map_err(db)?;
        let count = row.try_get::<i64, _>(0).map_err(db)? as u64;
        backlog.pending = (backlog.pending + count).min(BACKLOG_COUNT_MAX);
        older(backlog, row.try_get(1).map_err(db)?);
        Ok(())
    }
}

fn older(backlog: &mut Backlog, secs: Option<i64>) {
    if let Some(secs) = secs {
        backlog.oldest_secs = backlog.oldest_secs.max(Some(secs.max(0) as u64));
    }
}

/// Creates today's partition and those ahead. Built aside and then attached, which does not stop producers.
pub(super) async fn create_partitions(pool: &PgPool) -> Result<u32> {
    let today = Utc::now().date_naive();
    let mut created = 0;
    for ahead in 0..=DAYS_AHEAD {
        let Some(day) = today.checked_add_days(Days::new(ahead)) else { continue };
        let name = partition_name(day);
        // With rows of that day in the default partition (nothing ran for a while) it cannot be attached; they stay there.
        let exists: bool = sqlx::query(
            "SELECT to_regclass($1) IS NOT NULL OR EXISTS (SELECT 1 FROM postrider.outbox_default \
             WHERE created_at >= $2::date AT TIME ZONE 'UTC' AND created_at < ($2::date + 1) AT TIME ZONE 'UTC')",
        )
        .bind(format!("postrider.{name}"))
        .bind(day)
        .fetch_one(pool)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(db)?;
        if exists {
            continue;
        }
        // The name is made of digits that we chose.
        let sql = format!(
            "SET LOCAL lock_timeout = '1s'; \
             CREATE TABLE postrider.{name} (LIKE postrider.outbox INCLUDING DEFAULTS INCLUDING CONSTRAINTS); \
             ALTER TABLE postrider.outbox ATTACH PARTITION postrider.{name} \
             FOR VALUES FROM ('{day} 00:00:00+00') TO ('{next} 00:00:00+00')",
            next = day + Days::new(1)
        );
        let mut tx = pool.begin().await.map_err(db)?;
        match sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await {
            Ok(_) => {
                tx.commit().await.map_err(db)?;
                created += 1;
            }
            Err(error) => {
                tx.rollback().await.map_err(db)?;
                // Another instance was faster, or a lock was busy. Events go into the default partition meanwhile.
                tracing::debug!(partition = name, error = %super::error::classify(&error), "partition not created");
            }
        }
    }
    Ok(created)
}

/// Drops partitions that are past their retention and whose every row was handled for every destination.
async fn drop_partitions(pool: &PgPool, age: Duration) -> Result<u32> {
    let rows = sqlx::query(
        "SELECT c.relname::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
         WHERE i.inhparent = 'postrider.outbox'::regclass AND c.relname ~ '^outbox_[0-9]{8}$' ORDER BY 1",
    )
    .fetch_all(pool)
    .await
    .map_err(db)?;
    let keep_from = (Utc::now() - age).date_naive();
    let mut dropped = 0;
    for row in rows {
        let name: String = row.try_get(0).map_err(db)?;
        let Some(day) = partition_day(&name) else { continue };
        if day >= keep_from {
            continue;
        }
        match drop_partition(pool, &name).await {
            Ok(true) => dropped += 1,
            Ok(false) => {
                tracing::warn!(partition = name, "kept beyond its retention: it holds events that are not published");
            }
            // A transaction that still writes into it holds a lock; it stays for the next run.
            Err(error) => tracing::info!(partition = name, %error, "partition not dropped yet"),
        }
    }
    Ok(dropped)
}

/// Drops one partition, unless it holds a row that was not handled for some destination. The lock comes before the check:
/// nothing can be written in between. It is waited for only briefly, because producers queue behind us.
async fn drop_partition(pool: &PgPool, name: &str) -> Result<bool> {
    let mut tx = pool.begin().await.map_err(db)?;
    let lock = format!("SET LOCAL lock_timeout = '200ms'; LOCK TABLE postrider.{name} IN ACCESS EXCLUSIVE MODE");
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut *tx).await.map_err(db)?;
    let check = format!(
        "SELECT EXISTS (SELECT 1 FROM postrider.lane) AND NOT EXISTS ( \
           SELECT 1 FROM postrider.{name} o JOIN postrider.lane l ON l.lane = postrider.lane_of(o.key, o.id, l.lanes) \
           WHERE (l.topics IS NULL OR o.topic ~ l.topics) AND NOT pg_visible_in_snapshot(o.tx, l.done))"
    );
    let is_done: bool =
        sqlx::query(AssertSqlSafe(check)).fetch_one(&mut *tx).await.and_then(|row| row.try_get(0)).map_err(db)?;
    if !is_done {
        tx.rollback().await.map_err(db)?;
        return Ok(false);
    }
    let sql = format!("ALTER TABLE postrider.outbox DETACH PARTITION postrider.{name}; DROP TABLE postrider.{name}");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await.map_err(db)?;
    tx.commit().await.map_err(db)?;
    Ok(true)
}

pub(super) fn partition_name(day: NaiveDate) -> String {
    day.format("outbox_%Y%m%d").to_string()
}

fn partition_day(name: &str) -> Option<NaiveDate> {
    NaiveDate::parse_from_str(name.strip_prefix("outbox_")?, "%Y%m%d").ok()
}
