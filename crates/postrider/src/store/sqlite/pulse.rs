//! Instances, and what they counted, by the machine's clock.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::lease::millis;
use super::{SqliteStore, now_ms};
use crate::error::{Error, Result};
use crate::pulse::{Bucket, Instance, LOST_KEPT, Metric, Pulse, Pulses, Width, sums};

const LIVES: &str = concat!(
    "INSERT INTO instance (group_name, owner, version, started_at, seen_at, breaker, breaker_since)
     VALUES (?1, ?2, ?3, ",
    now_ms!(),
    ", ",
    now_ms!(),
    ", ?4, CASE WHEN ?4 IS NOT NULL THEN ",
    now_ms!(),
    " END) ON CONFLICT DO UPDATE SET version = excluded.version, seen_at = excluded.seen_at, breaker = excluded.breaker,
       breaker_since = CASE WHEN excluded.breaker IS NOT NULL
                            THEN coalesce(instance.breaker_since, excluded.breaker_since) END"
);

/// All widths at once.
const ADD: &str = concat!(
    "INSERT INTO bucket (width, at, group_name, metric, label, count)
     SELECT w.value, n.now - n.now % (w.value * 1000), ?1, c.value ->> 0, c.value ->> 1, c.value ->> 2
       FROM (SELECT ",
    now_ms!(),
    " AS now) n, json_each('[60, 900, 3600]') w, json_each(?2) c WHERE true
     ON CONFLICT DO UPDATE SET count = bucket.count + excluded.count"
);

const INSTANCES: &str = concat!(
    "SELECT i.group_name, i.owner, i.version, i.started_at, (n.now - i.seen_at) / 1000, i.breaker,
            (n.now - i.breaker_since) / 1000,
            (SELECT json_group_array(slot) FROM (SELECT l.slot FROM lease l WHERE l.group_name = i.group_name
                AND l.owner = i.owner AND l.expires_at > n.now ORDER BY l.slot))
       FROM instance i, (SELECT ",
    now_ms!(),
    " AS now) n WHERE i.seen_at > n.now - ? ORDER BY i.group_name, i.owner"
);

const BUCKETS: &str = "SELECT at, group_name, metric, label, count FROM bucket WHERE width = ?1 AND at > ?2
        AND (?3 = '[]' OR metric IN (SELECT value FROM json_each(?3)))
      ORDER BY width, at, group_name, metric, label";

#[async_trait]
impl Pulses for SqliteStore {
    async fn pulse(&self, pulse: &Pulse) -> Result<()> {
        const DOING: &str = "the pulse was not taken";
        let sums = sums(&pulse.counts);
        let mut tx = self.write(DOING).await?;
        if !pulse.owner.is_empty() {
            sqlx::query(LIVES)
                .bind(&pulse.group)
                .bind(&pulse.owner)
                .bind(&pulse.version)
                .bind(&pulse.breaker)
                .execute(&mut *tx)
                .await
                .map_err(self.failed(DOING))?;
        }
        if !sums.is_empty() {
            let query = sqlx::query(ADD).bind(&pulse.group).bind(crate::store::json(&sums));
            query.execute(&mut *tx).await.map_err(self.failed(DOING))?;
        }
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn withdraw(&self, group: &str, owner: &str) -> Result<()> {
        const DOING: &str = "the instance was not withdrawn";
        let mut tx = self.write(DOING).await?;
        sqlx::query("DELETE FROM instance WHERE group_name = ? AND owner = ?")
            .bind(group)
            .bind(owner)
            .execute(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn instances(&self) -> Result<Vec<Instance>> {
        const DOING: &str = "the instances were not read";
        let query = sqlx::query(INSTANCES).bind(millis(LOST_KEPT));
        let rows = query.fetch_all(&self.inner.reader).await.map_err(self.failed(DOING))?;
        rows.iter().map(|row| instance(row).map_err(self.failed(DOING))).collect()
    }

    async fn buckets(
        &self,
        width: Width,
        window: Duration,
        metrics: &[Metric],
    ) -> Result<(DateTime<Utc>, Vec<Bucket>)> {
        const DOING: &str = "the counts were not read";
        let mut tx = self.read(DOING).await?;
        let row = sqlx::query(concat!("SELECT ", now_ms!())).fetch_one(&mut *tx).await.map_err(self.failed(DOING))?;
        let now: i64 = row.try_get(0).map_err(self.failed(DOING))?;
        let names: Vec<&str> = metrics.iter().map(|metric| metric.as_str()).collect();
        let rows = sqlx::query(BUCKETS)
            .bind(width.secs())
            .bind(now - millis(window))
            .bind(crate::store::json(&names))
            .fetch_all(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        tx.rollback().await.map_err(self.failed(DOING))?;
        let buckets: Result<Vec<_>, sqlx::Error> = rows.iter().map(bucket).collect();
        Ok((of_millis(now), buckets.map_err(self.failed(DOING))?))
    }
}

/// A time of these tables.
pub(super) fn of_millis(millis: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(millis).unwrap_or_default()
}

fn instance(row: &SqliteRow) -> Result<Instance, sqlx::Error> {
    let secs = |secs: i64| u64::try_from(secs).unwrap_or(0);
    Ok(Instance {
        group: row.try_get(0)?,
        owner: row.try_get(1)?,
        version: row.try_get(2)?,
        started_at: of_millis(row.try_get(3)?),
        silent_secs: secs(row.try_get(4)?),
        breaker: row.try_get(5)?,
        breaker_secs: row.try_get::<Option<i64>, _>(6)?.map(secs),
        slots: serde_json::from_str(row.try_get(7)?).map_err(|error| sqlx::Error::Decode(error.into()))?,
    })
}

fn bucket(row: &SqliteRow) -> Result<Bucket, sqlx::Error> {
    Ok(Bucket {
        at: of_millis(row.try_get(0)?),
        group: row.try_get(1)?,
        metric: row.try_get::<&str, _>(2)?.parse().map_err(|error: Error| sqlx::Error::Decode(error.into()))?,
        label: row.try_get(3)?,
        count: row.try_get::<i64, _>(4)? as u64,
    })
}
