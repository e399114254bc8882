//! Instances, and what they counted, by the database's clock.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::PostgresStore;
use super::error::db;
use crate::error::{Error, Result};
use crate::pulse::{Bucket, Instance, LOST_KEPT, Metric, Pulse, Pulses, Width, sums};

const LIVES: &str = "INSERT INTO postrider.instance AS i (group_name, owner, version, breaker, breaker_since) \
     VALUES ($1, $2, $3, $4, CASE WHEN $4::text IS NOT NULL THEN clock_timestamp() END) \
     ON CONFLICT (group_name, owner) DO UPDATE SET version = excluded.version, seen_at = clock_timestamp(), \
       breaker = excluded.breaker, \
       breaker_since = CASE WHEN excluded.breaker IS NOT NULL THEN coalesce(i.breaker_since, clock_timestamp()) END";

/// All widths at once. Rows are locked in the order of their key, whoever adds to them.
const ADD: &str = "INSERT INTO postrider.bucket AS b (width, at, group_name, metric, label, count) \
     SELECT w.width, to_timestamp(floor(extract(epoch FROM n.now) / w.width) * w.width), $1, c.metric, c.label, c.count \
     FROM (SELECT clock_timestamp() AS now) n, (VALUES (60), (900), (3600)) AS w (width), \
          unnest($2::text[], $3::text[], $4::bigint[]) AS c (metric, label, count) \
     ORDER BY w.width, c.metric COLLATE \"C\", c.label COLLATE \"C\" \
     ON CONFLICT (width, at, group_name, metric, label) DO UPDATE \
     SET count = b.count + excluded.count";

const INSTANCES: &str = "SELECT i.group_name, i.owner, i.version, i.started_at, \
       extract(epoch FROM n.now - i.seen_at)::bigint, i.breaker, extract(epoch FROM n.now - i.breaker_since)::bigint, \
       ARRAY(SELECT l.slot FROM postrider.lease l WHERE l.group_name = i.group_name AND l.owner = i.owner \
             AND l.slot >= 0 AND l.expires_at > n.now ORDER BY l.slot) \
     FROM postrider.instance i, (SELECT clock_timestamp() AS now) n \
     WHERE i.seen_at > n.now - $1 * interval '1 second' ORDER BY i.group_name COLLATE \"C\", i.owner COLLATE \"C\"";

const BUCKETS: &str = "SELECT at, group_name, metric, label, count FROM postrider.bucket \
     WHERE width = $1 AND at > $2 AND (cardinality($3::text[]) = 0 OR metric = ANY ($3)) \
     ORDER BY width, at, group_name, metric, label";

#[async_trait]
impl Pulses for PostgresStore {
    async fn pulse(&self, pulse: &Pulse) -> Result<()> {
        let sums = sums(&pulse.counts);
        let mut tx = self.own.begin().await.map_err(db)?;
        // Counts may be lost with the server; nobody waits for the disk on their account.
        sqlx::query("SET LOCAL synchronous_commit = off").execute(&mut *tx).await.map_err(db)?;
        if !pulse.owner.is_empty() {
            sqlx::query(LIVES)
                .bind(&pulse.group)
                .bind(&pulse.owner)
                .bind(&pulse.version)
                .bind(&pulse.breaker)
                .execute(&mut *tx)
                .await
                .map_err(db)?;
        }
        if !sums.is_empty() {
            sqlx::query(ADD)
                .bind(&pulse.group)
                .bind(sums.iter().map(|(metric, _, _)| *metric).collect::<Vec<_>>())
                .bind(sums.iter().map(|(_, label, _)| label.as_str()).collect::<Vec<_>>())
                .bind(sums.iter().map(|(_, _, count)| *count).collect::<Vec<_>>())
                .execute(&mut *tx)
                .await
                .map_err(db)?;
        }
        tx.commit().await.map_err(db)
    }

    async fn withdraw(&self, group: &str, owner: &str) -> Result<()> {
        sqlx::query("DELETE FROM postrider.instance WHERE group_name = $1 AND owner = $2")
            .bind(group)
            .bind(owner)
            .execute(&self.own)
            .await
            .map_err(db)?;
        Ok(())
    }

    async fn instances(&self) -> Result<Vec<Instance>> {
        let query = sqlx::query(INSTANCES).bind(LOST_KEPT.as_secs_f64());
        let rows = query.fetch_all(&self.own).await.map_err(db)?;
        rows.iter().map(|row| instance(row).map_err(db)).collect()
    }

    async fn buckets(
        &self,
        width: Width,
        window: Duration,
        metrics: &[Metric],
    ) -> Result<(DateTime<Utc>, Vec<Bucket>)> {
        let row = sqlx::query("SELECT now, now - $1 * interval '1 second' FROM (SELECT clock_timestamp() AS now) n")
            .bind(window.as_secs_f64())
            .fetch_one(&self.own)
            .await
            .map_err(db)?;
        let (now, since): (DateTime<Utc>, DateTime<Utc>) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
        let rows = sqlx::query(BUCKETS)
            .bind(width.secs() as i32)
            .bind(since)
            .bind(metrics.iter().map(|metric| metric.as_str()).collect::<Vec<_>>())
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        let buckets = rows.iter().map(|row| bucket(row).map_err(db)).collect::<Result<Vec<_>>>()?;
        Ok((now, buckets))
    }
}

fn instance(row: &PgRow) -> Result<Instance, sqlx::Error> {
    let secs = |secs: i64| u64::try_from(secs).unwrap_or(0);
    Ok(Instance {
        group: row.try_get(0)?,
        owner: row.try_get(1)?,
        version: row.try_get(2)?,
        started_at: row.try_get(3)?,
        silent_secs: secs(row.try_get(4)?),
        breaker: row.try_get(5)?,
        breaker_secs: row.try_get::<Option<i64>, _>(6)?.map(secs),
        slots: row.try_get::<Vec<i32>, _>(7)?.into_iter().map(|slot| slot as u32).collect(),
    })
}

fn bucket(row: &PgRow) -> Result<Bucket, sqlx::Error> {
    Ok(Bucket {
        at: row.try_get(0)?,
        group: row.try_get(1)?,
        metric: row.try_get::<&str, _>(2)?.parse().map_err(|error: Error| sqlx::Error::Decode(error.into()))?,
        label: row.try_get(3)?,
        count: row.try_get::<i64, _>(4)? as u64,
    })
}
