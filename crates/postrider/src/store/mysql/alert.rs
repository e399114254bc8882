//! Alerts, whom to tell of them, and silences.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::error::db;
use super::{MysqlStore, audit, list, lock, micros, now};
use crate::alert::plan::{Open, Silenced, is_silenced, plan};
use crate::alert::{Alert, Alerts, Condition, Delivery, Silence};
use crate::error::{Error, Result};
use crate::pulse::HOURS_KEPT;

/// The columns of an [`Alert`], as a literal for `concat!`.
macro_rules! view {
    () => {
        "a.id, a.rule, a.subject, a.urgency, a.summary, a.remedy, a.fired_at, a.resolved_at"
    };
}

const OPEN: &str = "SELECT id, rule, subject, urgency, summary, remedy, is_told = 1 FROM postrider_alert \
     WHERE is_open = 1 ORDER BY rule, subject";

const SILENCES: &str = concat!("SELECT rule, subject FROM postrider_silence WHERE until_at > ", now!());

const LIST: &str = concat!("SELECT ", view!(), " FROM postrider_alert a WHERE a.id < ? ORDER BY a.id DESC LIMIT ?");

const LIST_OPEN: &str =
    concat!("SELECT ", view!(), " FROM postrider_alert a WHERE a.is_open = 1 AND a.id < ? ORDER BY a.id DESC LIMIT ?");

const DUE: &str = concat!(
    "SELECT d.id FROM postrider_delivery d WHERE d.next_at <= ",
    now!(),
    " AND NOT EXISTS (SELECT 1 FROM postrider_delivery e WHERE e.alert_id = d.alert_id AND e.sink = d.sink \
       AND e.id < d.id) ORDER BY d.id LIMIT ?"
);

fn alert(row: &MySqlRow, silences: &[Silenced]) -> Result<Alert, sqlx::Error> {
    let (rule, subject): (String, String) = (row.try_get(1)?, row.try_get(2)?);
    Ok(Alert {
        id: row.try_get(0)?,
        urgency: row.try_get::<&str, _>(3)?.parse().map_err(|error: Error| sqlx::Error::Decode(error.into()))?,
        summary: row.try_get(4)?,
        remedy: row.try_get(5)?,
        fired_at: row.try_get(6)?,
        resolved_at: row.try_get(7)?,
        silenced: is_silenced(silences, &rule, &subject),
        rule,
        subject,
    })
}

fn open(row: &MySqlRow) -> Result<Open, sqlx::Error> {
    Ok(Open {
        id: row.try_get(0)?,
        rule: row.try_get(1)?,
        subject: row.try_get(2)?,
        urgency: row.try_get(3)?,
        summary: row.try_get(4)?,
        remedy: row.try_get(5)?,
        is_told: row.try_get(6)?,
    })
}

fn delivery(row: &MySqlRow) -> Result<Delivery, sqlx::Error> {
    let mut alert = alert(row, &[])?;
    // It may be over meanwhile; what is told first is that it fired.
    if !row.try_get::<bool, _>(11)? {
        alert.resolved_at = None;
    }
    let failures: i32 = row.try_get(10)?;
    Ok(Delivery { id: row.try_get(8)?, sink: row.try_get(9)?, failures: failures as u32, alert })
}

async fn silenced(connection: &mut MySqlConnection) -> Result<Vec<Silenced>> {
    let rows = sqlx::query(SILENCES).fetch_all(connection).await.map_err(db)?;
    rows.iter().map(|row| Ok((row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?))).collect()
}

async fn show(connection: &mut MySqlConnection, id: i64, silences: &[Silenced]) -> Result<Alert> {
    let row = sqlx::query(concat!("SELECT ", view!(), " FROM postrider_alert a WHERE a.id = ?"))
        .bind(id)
        .fetch_one(connection)
        .await
        .map_err(db)?;
    alert(&row, silences).map_err(db)
}

async fn tell(tx: &mut MySqlConnection, id: i64, sinks: &[String], is_resolution: bool) -> Result<()> {
    for sink in sinks {
        sqlx::query("INSERT INTO postrider_delivery (alert_id, sink, is_resolution) VALUES (?, ?, ?)")
            .bind(id)
            .bind(sink)
            .bind(is_resolution)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
    }
    Ok(())
}

async fn raise(tx: &mut MySqlConnection, condition: &Condition, is_told: bool) -> Result<i64> {
    let raised = sqlx::query(
        "INSERT INTO postrider_alert (rule, subject, urgency, summary, remedy, is_told) VALUES (?, ?, ?, ?, ?, ?)",
    )
    .bind(&condition.rule)
    .bind(&condition.subject)
    .bind(condition.urgency.as_str())
    .bind(&condition.summary)
    .bind(&condition.remedy)
    .bind(is_told)
    .execute(tx)
    .await
    .map_err(db)?;
    Ok(raised.last_insert_id().cast_signed())
}

#[async_trait]
impl Alerts for MysqlStore {
    async fn alerts_update(&self, conditions: &[Condition], sinks: &[String]) -> Result<Vec<Alert>> {
        let mut tx = self.write().await?;
        lock(&mut tx, "alert").await?;
        let silences = silenced(&mut tx).await?;
        let rows = sqlx::query(OPEN).fetch_all(&mut *tx).await.map_err(db)?;
        let rows = rows.iter().map(|row| open(row).map_err(db)).collect::<Result<Vec<_>>>()?;
        let plan = plan(&rows, conditions, &silences);
        let mut changed = Vec::with_capacity(plan.opened.len() + plan.resolved.len());
        for (condition, is_told) in plan.opened {
            let id = raise(&mut tx, condition, is_told).await?;
            if is_told {
                tell(&mut tx, id, sinks, false).await?;
            }
            changed.push(show(&mut tx, id, &silences).await?);
        }
        for (id, condition) in plan.changed {
            sqlx::query("UPDATE postrider_alert SET urgency = ?, summary = ?, remedy = ? WHERE id = ?")
                .bind(condition.urgency.as_str())
                .bind(&condition.summary)
                .bind(&condition.remedy)
                .bind(id)
                .execute(&mut *tx)
                .await
                .map_err(db)?;
        }
        for id in plan.told {
            let told = sqlx::query("UPDATE postrider_alert SET is_told = 1 WHERE id = ?").bind(id);
            told.execute(&mut *tx).await.map_err(db)?;
            tell(&mut tx, id, sinks, false).await?;
        }
        for (id, is_told) in plan.resolved {
            let resolve = concat!("UPDATE postrider_alert SET resolved_at = ", now!(), ", is_open = NULL WHERE id = ?");
            sqlx::query(resolve).bind(id).execute(&mut *tx).await.map_err(db)?;
            if is_told {
                tell(&mut tx, id, sinks, true).await?;
            }
            changed.push(show(&mut tx, id, &silences).await?);
        }
        tx.commit().await.map_err(db)?;
        Ok(changed)
    }

    async fn alerts(&self, is_open_only: bool, before: Option<i64>, limit: usize) -> Result<Vec<Alert>> {
        let mut connection = self.own.acquire().await.map_err(db)?;
        let silences = silenced(&mut connection).await?;
        let rows = sqlx::query(if is_open_only { LIST_OPEN } else { LIST })
            .bind(before.unwrap_or(i64::MAX))
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&mut *connection)
            .await
            .map_err(db)?;
        rows.iter().map(|row| alert(row, &silences).map_err(db)).collect()
    }

    async fn alerts_mended(&self) -> Result<(u64, Option<Duration>)> {
        let row = sqlx::query(concat!(
            "SELECT COUNT(*), CAST(AVG(TIMESTAMPDIFF(MICROSECOND, fired_at, resolved_at)) AS SIGNED) FROM postrider_alert \
             WHERE resolved_at > ",
            now!(),
            " - INTERVAL ? MICROSECOND"
        ))
        .bind(micros(HOURS_KEPT))
        .fetch_one(&self.own)
        .await
        .map_err(db)?;
        let (count, mean): (i64, Option<i64>) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
        Ok((count as u64, mean.map(|mean| Duration::from_micros(u64::try_from(mean).unwrap_or(0)))))
    }

    async fn deliveries_due(&self, limit: usize, hold: Duration) -> Result<Vec<Delivery>> {
        let mut tx = self.write().await?;
        lock(&mut tx, "delivery").await?;
        let query = sqlx::query(DUE).bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let rows = query.fetch_all(&mut *tx).await.map_err(db)?;
        let ids = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<Vec<i64>>>()?;
        if ids.is_empty() {
            tx.rollback().await.map_err(db)?;
            return Ok(Vec::new());
        }
        // Due again after the hold, should its taker die.
        let take = format!(
            "UPDATE postrider_delivery SET next_at = {} + INTERVAL ? MICROSECOND WHERE id IN ({})",
            now!(),
            list(&ids)
        );
        let take = sqlx::query(AssertSqlSafe(take)).persistent(false).bind(micros(hold));
        take.execute(&mut *tx).await.map_err(db)?;
        let taken = format!(
            "SELECT {}, d.id, d.sink, d.failures, d.is_resolution = 1 FROM postrider_delivery d \
             JOIN postrider_alert a ON a.id = d.alert_id WHERE d.id IN ({}) ORDER BY d.id",
            view!(),
            list(&ids)
        );
        let rows = sqlx::query(AssertSqlSafe(taken)).persistent(false).fetch_all(&mut *tx).await.map_err(db)?;
        tx.commit().await.map_err(db)?;
        rows.iter().map(|row| delivery(row).map_err(db)).collect()
    }

    async fn delivered(&self, id: i64) -> Result<()> {
        let query = sqlx::query("DELETE FROM postrider_delivery WHERE id = ?").bind(id);
        query.execute(&self.own).await.map_err(db)?;
        Ok(())
    }

    async fn delivery_failed(&self, id: i64, error: &str, delay: Duration) -> Result<()> {
        sqlx::query(concat!(
            "UPDATE postrider_delivery SET failures = failures + 1, error = ?, next_at = ",
            now!(),
            " + INTERVAL ? MICROSECOND WHERE id = ?"
        ))
        .bind(error)
        .bind(micros(delay))
        .bind(id)
        .execute(&self.own)
        .await
        .map_err(db)?;
        Ok(())
    }

    async fn silence(&self, rule: &str, subject: &str, length: Duration, reason: &str, actor: &str) -> Result<i64> {
        let mut tx = self.write().await?;
        let written = sqlx::query(concat!(
            "INSERT INTO postrider_silence (rule, subject, until_at, reason, actor) VALUES (?, ?, ",
            now!(),
            " + INTERVAL ? MICROSECOND, ?, ?)"
        ))
        .bind(rule)
        .bind(subject)
        .bind(micros(length))
        .bind(reason)
        .bind(actor)
        .execute(&mut *tx)
        .await
        .map_err(db)?;
        let id = written.last_insert_id().cast_signed();
        let detail = json!({ "id": id, "rule": rule, "subject": subject, "secs": length.as_secs(), "reason": reason });
        audit::write(&mut tx, actor, "silence", &detail).await?;
        tx.commit().await.map_err(db)?;
        Ok(id)
    }

    async fn unsilence(&self, id: i64, actor: &str) -> Result<bool> {
        let mut tx = self.write().await?;
        let end = concat!("UPDATE postrider_silence SET until_at = ", now!(), " WHERE id = ? AND until_at > ", now!());
        let ended = sqlx::query(end).bind(id).execute(&mut *tx).await.map_err(db)?;
        let was_there = ended.rows_affected() == 1;
        if was_there {
            audit::write(&mut tx, actor, "unsilence", &json!({ "id": id })).await?;
        }
        tx.commit().await.map_err(db)?;
        Ok(was_there)
    }

    async fn silences(&self) -> Result<Vec<Silence>> {
        let rows = sqlx::query(concat!(
            "SELECT id, rule, subject, until_at, reason, actor FROM postrider_silence WHERE until_at > ",
            now!(),
            " ORDER BY id"
        ))
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        let silence = |row: &MySqlRow| -> Result<Silence, sqlx::Error> {
            Ok(Silence {
                id: row.try_get(0)?,
                rule: row.try_get(1)?,
                subject: row.try_get(2)?,
                until: row.try_get(3)?,
                reason: row.try_get(4)?,
                actor: row.try_get(5)?,
            })
        };
        rows.iter().map(|row| silence(row).map_err(db)).collect()
    }
}
