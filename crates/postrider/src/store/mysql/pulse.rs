//! Instances, and what they counted, by the database's clock.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Row as _};

use super::error::{db, is_deadlock};
use super::lease::is_alive;
use super::{DEADLOCKS_MAX, MysqlStore, marks, micros, now};
use crate::error::{Error, Result};
use crate::pulse::{Bucket, Instance, LOST_KEPT, Metric, Pulse, Pulses, Width, sums};

const LIVES: &str = concat!(
    "INSERT INTO postrider_instance (group_name, owner, version, breaker, started_at, seen_at, breaker_since) \
     SELECT ?, ?, ?, ?, n.now, n.now, IF(? IS NULL, NULL, n.now) FROM (SELECT ",
    now!(),
    " AS now) n ON DUPLICATE KEY UPDATE version = VALUES(version), seen_at = VALUES(seen_at), \
       breaker = VALUES(breaker), \
       breaker_since = IF(VALUES(breaker) IS NULL, NULL, COALESCE(breaker_since, VALUES(breaker_since)))"
);

/// When a bucket of that many seconds has begun.
const WIDTHS: [(u32, &str); 3] = [
    (60, concat!("DATE_FORMAT(", now!(), ", '%Y-%m-%d %H:%i:00')")),
    (
        900,
        concat!(
            "CAST(DATE_FORMAT(",
            now!(),
            ", '%Y-%m-%d %H:00:00') AS DATETIME) + INTERVAL 15 * (MINUTE(",
            now!(),
            ") DIV 15) MINUTE"
        ),
    ),
    (3600, concat!("DATE_FORMAT(", now!(), ", '%Y-%m-%d %H:00:00')")),
];

/// Rows of one statement.
const ROWS_MAX: usize = 500;

type Sums = Vec<(&'static str, String, i64)>;

#[async_trait]
impl Pulses for MysqlStore {
    async fn pulse(&self, pulse: &Pulse) -> Result<()> {
        let sums = sums(&pulse.counts);
        let mut tries = 0;
        loop {
            match self.add(pulse, &sums).await {
                Err(error) if is_deadlock(&error) && tries < DEADLOCKS_MAX => tries += 1,
                result => return result,
            }
        }
    }

    async fn withdraw(&self, group: &str, owner: &str) -> Result<()> {
        sqlx::query("DELETE FROM postrider_instance WHERE group_name = ? AND owner = ?")
            .bind(group)
            .bind(owner)
            .execute(&self.own)
            .await
            .map_err(db)?;
        Ok(())
    }

    async fn instances(&self) -> Result<Vec<Instance>> {
        let rows = sqlx::query(concat!(
            "SELECT group_name, owner, version, started_at, TIMESTAMPDIFF(SECOND, seen_at, n.now), breaker, \
               TIMESTAMPDIFF(SECOND, breaker_since, n.now) FROM postrider_instance, (SELECT ",
            now!(),
            " AS now) n WHERE seen_at > n.now - INTERVAL ? MICROSECOND ORDER BY group_name, owner"
        ))
        .bind(micros(LOST_KEPT))
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        let leases = sqlx::query(concat!(
            "SELECT group_name, owner, slot FROM postrider_lease WHERE ",
            is_alive!(),
            " ORDER BY group_name, slot"
        ))
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        let mut instances = rows.iter().map(|row| instance(row).map_err(db)).collect::<Result<Vec<_>>>()?;
        for row in &leases {
            let (group, owner): (&str, &str) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
            let holder = instances.iter_mut().find(|instance| instance.group == group && instance.owner == owner);
            if let Some(instance) = holder {
                instance.slots.push(row.try_get::<i32, _>(2).map_err(db)? as u32);
            }
        }
        Ok(instances)
    }

    async fn buckets(
        &self,
        width: Width,
        window: Duration,
        metrics: &[Metric],
    ) -> Result<(DateTime<Utc>, Vec<Bucket>)> {
        let row = sqlx::query(concat!("SELECT ", now!())).fetch_one(&self.own).await.map_err(db)?;
        let now: DateTime<Utc> = row.try_get(0).map_err(db)?;
        let wanted = match metrics.is_empty() {
            true => String::new(),
            false => format!(" AND metric IN ({})", marks(metrics.len())),
        };
        let sql = format!(
            "SELECT at, group_name, metric, label, count FROM postrider_bucket \
             WHERE width = ? AND at > ? - INTERVAL ? MICROSECOND{wanted} ORDER BY width, at, group_name, metric, label"
        );
        let mut query = sqlx::query(AssertSqlSafe(sql)).bind(width.secs()).bind(now.naive_utc()).bind(micros(window));
        for metric in metrics {
            query = query.bind(metric.as_str());
        }
        let rows = query.fetch_all(&self.own).await.map_err(db)?;
        let buckets = rows.iter().map(|row| bucket(row).map_err(db)).collect::<Result<Vec<_>>>()?;
        Ok((now, buckets))
    }
}

impl MysqlStore {
    async fn add(&self, pulse: &Pulse, sums: &Sums) -> Result<()> {
        let mut tx = self.write().await?;
        if !pulse.owner.is_empty() {
            sqlx::query(LIVES)
                .bind(&pulse.group)
                .bind(&pulse.owner)
                .bind(&pulse.version)
                .bind(&pulse.breaker)
                .bind(&pulse.breaker)
                .execute(&mut *tx)
                .await
                .map_err(db)?;
        }
        // Rows are locked in the order of their key, whoever adds to them.
        for (width, begin) in WIDTHS {
            for chunk in sums.chunks(ROWS_MAX) {
                let row = format!("({width}, {begin}, ?, ?, ?, ?)");
                let sql = format!(
                    "INSERT INTO postrider_bucket (width, at, group_name, metric, label, count) VALUES {} \
                     ON DUPLICATE KEY UPDATE count = count + VALUES(count)",
                    vec![row.as_str(); chunk.len()].join(", ")
                );
                let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(false);
                for (metric, label, count) in chunk {
                    query = query.bind(&pulse.group).bind(*metric).bind(label).bind(*count);
                }
                query.execute(&mut *tx).await.map_err(db)?;
            }
        }
        tx.commit().await.map_err(db)
    }
}

fn instance(row: &MySqlRow) -> Result<Instance, sqlx::Error> {
    let secs = |secs: i64| u64::try_from(secs).unwrap_or(0);
    Ok(Instance {
        group: row.try_get(0)?,
        owner: row.try_get(1)?,
        version: row.try_get(2)?,
        started_at: row.try_get(3)?,
        silent_secs: secs(row.try_get(4)?),
        breaker: row.try_get(5)?,
        breaker_secs: row.try_get::<Option<i64>, _>(6)?.map(secs),
        slots: Vec::new(),
    })
}

fn bucket(row: &MySqlRow) -> Result<Bucket, sqlx::Error> {
    Ok(Bucket {
        at: row.try_get(0)?,
        group: row.try_get(1)?,
        metric: row.try_get::<&str, _>(2)?.parse().map_err(|error: Error| sqlx::Error::Decode(error.into()))?,
        label: row.try_get(3)?,
        count: row.try_get::<i64, _>(4)? as u64,
    })
}
