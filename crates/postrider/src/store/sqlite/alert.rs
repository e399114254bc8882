//! Alerts, whom to tell of them, and silences.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection};

use super::lease::millis;
use super::pulse::of_millis;
use super::{SqliteStore, audit, now_ms};
use crate::alert::plan::{Open, Silenced, is_silenced, plan};
use crate::alert::{Alert, Alerts, Condition, Delivery, Silence};
use crate::error::{Error, Result};
use crate::pulse::HOURS_KEPT;

/// The columns of an [`Alert`], as a literal for `concat!`.
macro_rules! view {
    () => {
        "alert.id, alert.rule, alert.subject, alert.urgency, alert.summary, alert.remedy, alert.fired_at, \
         alert.resolved_at"
    };
}

const OPEN: &str = "SELECT id, rule, subject, urgency, summary, remedy, is_told FROM alert
     WHERE resolved_at IS NULL ORDER BY rule, subject";

const SILENCES: &str = concat!("SELECT rule, subject FROM silence WHERE until_at > ", now_ms!());

const RAISE: &str = concat!(
    "INSERT INTO alert (rule, subject, urgency, summary, remedy, is_told, fired_at) VALUES (?, ?, ?, ?, ?, ?, ",
    now_ms!(),
    ") RETURNING id, rule, subject, urgency, summary, remedy, fired_at, resolved_at"
);

const RESOLVE: &str = concat!(
    "UPDATE alert SET resolved_at = ",
    now_ms!(),
    " WHERE id = ? RETURNING id, rule, subject, urgency, summary, remedy, fired_at, resolved_at"
);

const TELL: &str = concat!(
    "INSERT INTO delivery (alert_id, sink, is_resolution, next_at) SELECT ?1, value, ?3, ",
    now_ms!(),
    " FROM json_each(?2)"
);

const LIST: &str = concat!("SELECT ", view!(), " FROM alert WHERE id < ? ORDER BY id DESC LIMIT ?");

const LIST_OPEN: &str =
    concat!("SELECT ", view!(), " FROM alert WHERE resolved_at IS NULL AND id < ? ORDER BY id DESC LIMIT ?");

/// What is taken is due again after the hold, should its taker die.
const TAKE: &str = concat!(
    "UPDATE delivery SET next_at = ",
    now_ms!(),
    " + ?2 WHERE id IN (SELECT id FROM delivery d WHERE next_at <= ",
    now_ms!(),
    " AND NOT EXISTS (SELECT 1 FROM delivery e WHERE e.alert_id = d.alert_id AND e.sink = d.sink AND e.id < d.id)
      ORDER BY id LIMIT ?1) RETURNING id"
);

const TAKEN: &str = concat!(
    "SELECT ",
    view!(),
    ", d.id, d.sink, d.failures, d.is_resolution FROM delivery d JOIN alert ON alert.id = d.alert_id
      WHERE d.id IN (SELECT value FROM json_each(?)) ORDER BY d.id"
);

fn alert(row: &SqliteRow, silences: &[Silenced]) -> Result<Alert, sqlx::Error> {
    let (rule, subject): (String, String) = (row.try_get(1)?, row.try_get(2)?);
    Ok(Alert {
        id: row.try_get(0)?,
        urgency: row.try_get::<&str, _>(3)?.parse().map_err(|error: Error| sqlx::Error::Decode(error.into()))?,
        summary: row.try_get(4)?,
        remedy: row.try_get(5)?,
        fired_at: of_millis(row.try_get(6)?),
        resolved_at: row.try_get::<Option<i64>, _>(7)?.map(of_millis),
        silenced: is_silenced(silences, &rule, &subject),
        rule,
        subject,
    })
}

fn open(row: &SqliteRow) -> Result<Open, sqlx::Error> {
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

fn delivery(row: &SqliteRow) -> Result<Delivery, sqlx::Error> {
    let mut alert = alert(row, &[])?;
    // It may be over meanwhile; what is told first is that it fired.
    if !row.try_get::<bool, _>(11)? {
        alert.resolved_at = None;
    }
    Ok(Delivery { id: row.try_get(8)?, sink: row.try_get(9)?, failures: row.try_get(10)?, alert })
}

async fn silenced(connection: &mut SqliteConnection) -> Result<Vec<Silenced>, sqlx::Error> {
    let rows = sqlx::query(SILENCES).fetch_all(connection).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

async fn tell(connection: &mut SqliteConnection, id: i64, sinks: &str, is_resolution: bool) -> Result<(), sqlx::Error> {
    sqlx::query(TELL).bind(id).bind(sinks).bind(is_resolution).execute(connection).await?;
    Ok(())
}

/// In a transaction that alone may write.
async fn update(
    connection: &mut SqliteConnection,
    conditions: &[Condition],
    sinks: &[String],
) -> Result<Vec<Alert>, sqlx::Error> {
    let sinks = json!(sinks).to_string();
    let silences = silenced(connection).await?;
    let rows = sqlx::query(OPEN).fetch_all(&mut *connection).await?;
    let rows = rows.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let plan = plan(&rows, conditions, &silences);
    let mut changed = Vec::with_capacity(plan.opened.len() + plan.resolved.len());
    for (condition, is_told) in plan.opened {
        let row = sqlx::query(RAISE)
            .bind(&condition.rule)
            .bind(&condition.subject)
            .bind(condition.urgency.as_str())
            .bind(&condition.summary)
            .bind(&condition.remedy)
            .bind(is_told)
            .fetch_one(&mut *connection)
            .await?;
        let alert = alert(&row, &silences)?;
        if is_told {
            tell(connection, alert.id, &sinks, false).await?;
        }
        changed.push(alert);
    }
    for (id, condition) in plan.changed {
        sqlx::query("UPDATE alert SET urgency = ?2, summary = ?3, remedy = ?4 WHERE id = ?1")
            .bind(id)
            .bind(condition.urgency.as_str())
            .bind(&condition.summary)
            .bind(&condition.remedy)
            .execute(&mut *connection)
            .await?;
    }
    for id in plan.told {
        sqlx::query("UPDATE alert SET is_told = 1 WHERE id = ?").bind(id).execute(&mut *connection).await?;
        tell(connection, id, &sinks, false).await?;
    }
    for (id, is_told) in plan.resolved {
        let row = sqlx::query(RESOLVE).bind(id).fetch_one(&mut *connection).await?;
        changed.push(alert(&row, &silences)?);
        if is_told {
            tell(connection, id, &sinks, true).await?;
        }
    }
    Ok(changed)
}

#[async_trait]
impl Alerts for SqliteStore {
    async fn alerts_update(&self, conditions: &[Condition], sinks: &[String]) -> Result<Vec<Alert>> {
        const DOING: &str = "the alerts were not brought up to date";
        let mut tx = self.write(DOING).await?;
        let changed = update(&mut tx, conditions, sinks).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(changed)
    }

    async fn alerts(&self, is_open_only: bool, before: Option<i64>, limit: usize) -> Result<Vec<Alert>> {
        const DOING: &str = "the alerts were not read";
        let mut tx = self.read(DOING).await?;
        let silences = silenced(&mut tx).await.map_err(self.failed(DOING))?;
        let rows = sqlx::query(if is_open_only { LIST_OPEN } else { LIST })
            .bind(before.unwrap_or(i64::MAX))
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&mut *tx)
            .await
            .map_err(self.failed(DOING))?;
        tx.rollback().await.map_err(self.failed(DOING))?;
        rows.iter().map(|row| alert(row, &silences).map_err(self.failed(DOING))).collect()
    }

    async fn alerts_mended(&self) -> Result<(u64, Option<Duration>)> {
        const DOING: &str = "the alerts were not read";
        let row = sqlx::query(concat!(
            "SELECT count(*), CAST(avg(resolved_at - fired_at) AS INTEGER) FROM alert WHERE resolved_at > ",
            now_ms!(),
            " - ?"
        ))
        .bind(millis(HOURS_KEPT))
        .fetch_one(&self.inner.reader)
        .await
        .map_err(self.failed(DOING))?;
        let count: i64 = row.try_get(0).map_err(self.failed(DOING))?;
        let mean: Option<i64> = row.try_get(1).map_err(self.failed(DOING))?;
        Ok((count as u64, mean.map(|mean| Duration::from_millis(u64::try_from(mean).unwrap_or(0)))))
    }

    async fn deliveries_due(&self, limit: usize, hold: Duration) -> Result<Vec<Delivery>> {
        const DOING: &str = "the deliveries were not read";
        let mut tx = self.write(DOING).await?;
        let query = sqlx::query(TAKE).bind(i64::try_from(limit).unwrap_or(i64::MAX)).bind(millis(hold));
        let rows = query.fetch_all(&mut *tx).await.map_err(self.failed(DOING))?;
        let ids: Result<Vec<i64>, sqlx::Error> = rows.iter().map(|row| row.try_get(0)).collect();
        let ids = ids.map_err(self.failed(DOING))?;
        let query = sqlx::query(TAKEN).bind(json!(ids).to_string());
        let rows = query.fetch_all(&mut *tx).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        rows.iter().map(|row| delivery(row).map_err(self.failed(DOING))).collect()
    }

    async fn delivered(&self, id: i64) -> Result<()> {
        const DOING: &str = "the delivery was not forgotten";
        let mut tx = self.write(DOING).await?;
        let query = sqlx::query("DELETE FROM delivery WHERE id = ?").bind(id);
        query.execute(&mut *tx).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn delivery_failed(&self, id: i64, error: &str, delay: Duration) -> Result<()> {
        const DOING: &str = "the delivery was not put off";
        let mut tx = self.write(DOING).await?;
        sqlx::query(concat!(
            "UPDATE delivery SET failures = failures + 1, error = ?2, next_at = ",
            now_ms!(),
            " + ?3 WHERE id = ?1"
        ))
        .bind(id)
        .bind(error)
        .bind(millis(delay))
        .execute(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn silence(&self, rule: &str, subject: &str, length: Duration, reason: &str, actor: &str) -> Result<i64> {
        const DOING: &str = "the silence was not written";
        let mut tx = self.write(DOING).await?;
        let row = sqlx::query(concat!(
            "INSERT INTO silence (rule, subject, until_at, reason, actor) VALUES (?, ?, ",
            now_ms!(),
            " + ?, ?, ?) RETURNING id"
        ))
        .bind(rule)
        .bind(subject)
        .bind(millis(length))
        .bind(reason)
        .bind(actor)
        .fetch_one(&mut *tx)
        .await;
        let id: i64 = row.and_then(|row| row.try_get(0)).map_err(self.failed(DOING))?;
        let detail = json!({ "id": id, "rule": rule, "subject": subject, "secs": length.as_secs(), "reason": reason });
        audit::write(&mut tx, actor, "silence", &detail).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(id)
    }

    async fn unsilence(&self, id: i64, actor: &str) -> Result<bool> {
        const DOING: &str = "the silence was not ended";
        let mut tx = self.write(DOING).await?;
        let ended = sqlx::query(concat!(
            "UPDATE silence SET until_at = ",
            now_ms!(),
            " WHERE id = ? AND until_at > ",
            now_ms!()
        ))
        .bind(id)
        .execute(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        let was_there = ended.rows_affected() == 1;
        if was_there {
            audit::write(&mut tx, actor, "unsilence", &json!({ "id": id })).await.map_err(self.failed(DOING))?;
        }
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(was_there)
    }

    async fn silences(&self) -> Result<Vec<Silence>> {
        const DOING: &str = "the silences were not read";
        let rows = sqlx::query(concat!(
            "SELECT id, rule, subject, until_at, reason, actor FROM silence WHERE until_at > ",
            now_ms!(),
            " ORDER BY id"
        ))
        .fetch_all(&self.inner.reader)
        .await
        .map_err(self.failed(DOING))?;
        let silence = |row: &SqliteRow| -> Result<Silence, sqlx::Error> {
            Ok(Silence {
                id: row.try_get(0)?,
                rule: row.try_get(1)?,
                subject: row.try_get(2)?,
                until: of_millis(row.try_get(3)?),
                reason: row.try_get(4)?,
                actor: row.try_get(5)?,
            })
        };
        rows.iter().map(|row| silence(row).map_err(self.failed(DOING))).collect()
    }
}
