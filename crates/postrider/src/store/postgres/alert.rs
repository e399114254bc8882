//! Alerts, whom to tell of them, and silences.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::error::db;
use super::{PostgresStore, audit};
use crate::alert::plan::{Open, Silenced, is_silenced, plan};
use crate::alert::{Alert, Alerts, Condition, Delivery, Silence};
use crate::error::{Error, Result};
use crate::pulse::HOURS_KEPT;

/// Two instances that bring alerts up to date take turns.
const ALERT_LOCK: i64 = 7_062_611_490_211_870_004;

/// The columns of an [`Alert`], as a literal for `concat!`.
macro_rules! view {
    () => {
        "a.id, a.rule, a.subject, a.urgency, a.summary, a.remedy, a.fired_at, a.resolved_at"
    };
}

const OPEN: &str = "SELECT id, rule, subject, urgency, summary, remedy, is_told FROM postrider.alert \
     WHERE resolved_at IS NULL ORDER BY rule, subject";

const SILENCES: &str = "SELECT rule, subject FROM postrider.silence WHERE until_at > clock_timestamp()";

const RAISE: &str = concat!(
    "INSERT INTO postrider.alert AS a (rule, subject, urgency, summary, remedy, is_told) VALUES ($1, $2, $3, $4, $5, $6) \
     RETURNING ",
    view!()
);

const RESOLVE: &str =
    concat!("UPDATE postrider.alert a SET resolved_at = clock_timestamp() WHERE id = $1 RETURNING ", view!());

const TELL: &str = "INSERT INTO postrider.delivery (alert_id, sink, is_resolution) \
     SELECT $1, sink, $3 FROM unnest($2::text[]) AS sink";

const LIST: &str = concat!("SELECT ", view!(), " FROM postrider.alert a WHERE a.id < $1 ORDER BY a.id DESC LIMIT $2");

const LIST_OPEN: &str = concat!(
    "SELECT ",
    view!(),
    " FROM postrider.alert a WHERE a.resolved_at IS NULL AND a.id < $1 ORDER BY a.id DESC LIMIT $2"
);

/// What is taken is due again after the hold, should its taker die.
const DUE: &str = concat!(
    "WITH due AS ( \
       SELECT id FROM postrider.delivery d WHERE next_at <= clock_timestamp() AND NOT EXISTS \
         (SELECT 1 FROM postrider.delivery e WHERE e.alert_id = d.alert_id AND e.sink = d.sink AND e.id < d.id) \
       ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED \
     ), taken AS ( \
       UPDATE postrider.delivery d SET next_at = clock_timestamp() + $2 * interval '1 ms' FROM due \
       WHERE d.id = due.id RETURNING d.* \
     ) SELECT ",
    view!(),
    ", t.id, t.sink, t.failures, t.is_resolution FROM taken t JOIN postrider.alert a ON a.id = t.alert_id ORDER BY t.id"
);

fn alert(row: &PgRow, silences: &[Silenced]) -> Result<Alert, sqlx::Error> {
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

fn open(row: &PgRow) -> Result<Open, sqlx::Error> {
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

fn delivery(row: &PgRow) -> Result<Delivery, sqlx::Error> {
    let mut alert = alert(row, &[])?;
    // It may be over meanwhile; what is told first is that it fired.
    if !row.try_get::<bool, _>(11)? {
        alert.resolved_at = None;
    }
    let failures: i32 = row.try_get(10)?;
    Ok(Delivery { id: row.try_get(8)?, sink: row.try_get(9)?, failures: failures as u32, alert })
}

async fn silenced(connection: &mut PgConnection) -> Result<Vec<Silenced>> {
    let rows = sqlx::query(SILENCES).fetch_all(connection).await.map_err(db)?;
    rows.iter().map(|row| Ok((row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?))).collect()
}

async fn tell(connection: &mut PgConnection, id: i64, sinks: &[String], is_resolution: bool) -> Result<()> {
    sqlx::query(TELL).bind(id).bind(sinks).bind(is_resolution).execute(connection).await.map_err(db)?;
    Ok(())
}

#[async_trait]
impl Alerts for PostgresStore {
    async fn alerts_update(&self, conditions: &[Condition], sinks: &[String]) -> Result<Vec<Alert>> {
        let mut tx = self.own.begin().await.map_err(db)?;
        sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(ALERT_LOCK).execute(&mut *tx).await.map_err(db)?;
        let silences = silenced(&mut tx).await?;
        let rows = sqlx::query(OPEN).fetch_all(&mut *tx).await.map_err(db)?;
        let rows = rows.iter().map(|row| open(row).map_err(db)).collect::<Result<Vec<_>>>()?;
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
                .fetch_one(&mut *tx)
                .await
                .map_err(db)?;
            let alert = alert(&row, &silences).map_err(db)?;
            if is_told {
                tell(&mut tx, alert.id, sinks, false).await?;
            }
            changed.push(alert);
        }
        for (id, condition) in plan.changed {
            sqlx::query("UPDATE postrider.alert SET urgency = $2, summary = $3, remedy = $4 WHERE id = $1")
                .bind(id)
                .bind(condition.urgency.as_str())
                .bind(&condition.summary)
                .bind(&condition.remedy)
                .execute(&mut *tx)
                .await
                .map_err(db)?;
        }
        for id in plan.told {
            sqlx::query("UPDATE postrider.alert SET is_told = true WHERE id = $1")
                .bind(id)
                .execute(&mut *tx)
                .await
                .map_err(db)?;
            tell(&mut tx, id, sinks, false).await?;
        }
        for (id, is_told) in plan.resolved {
            let row = sqlx::query(RESOLVE).bind(id).fetch_one(&mut *tx).await.map_err(db)?;
            changed.push(alert(&row, &silences).map_err(db)?);
            if is_told {
                tell(&mut tx, id, sinks, true).await?;
            }
        }
        tx.commit().await.map_err(db)?;
        Ok(changed)
    }

    async fn alerts(&self, is_open_only: bool, before: Option<i64>, limit: usize) -> Result<Vec<Alert>> {
        let mut connection = self.own.acquire().await.map_err(db)?;
        let silences = silenced(&mut connection).await?;
        let rows = sqlx::query(if is_open_only { LIST_OPEN } else { LIST })
            .bind(before.unwrap_or(i64::MAX))
            .bind(limit as i64)
            .fetch_all(&mut *connection)
            .await
            .map_err(db)?;
        rows.iter().map(|row| alert(row, &silences).map_err(db)).collect()
    }

    async fn alerts_mended(&self) -> Result<(u64, Option<Duration>)> {
        let row = sqlx::query(
            "SELECT count(*), avg(extract(epoch FROM resolved_at - fired_at))::float8 FROM postrider.alert \
             WHERE resolved_at > clock_timestamp() - $1 * interval '1 second'",
        )
        .bind(HOURS_KEPT.as_secs_f64())
        .fetch_one(&self.own)
        .await
        .map_err(db)?;
        let (count, secs): (i64, Option<f64>) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
        Ok((count as u64, secs.map(|secs| Duration::try_from_secs_f64(secs).unwrap_or_default())))
    }

    async fn deliveries_due(&self, limit: usize, hold: Duration) -> Result<Vec<Delivery>> {
        let query = sqlx::query(DUE).bind(limit as i64).bind(hold.as_millis() as f64);
        let rows = query.fetch_all(&self.own).await.map_err(db)?;
        rows.iter().map(|row| delivery(row).map_err(db)).collect()
    }

    async fn delivered(&self, id: i64) -> Result<()> {
        let query = sqlx::query("DELETE FROM postrider.delivery WHERE id = $1").bind(id);
        query.execute(&self.own).await.map_err(db)?;
        Ok(())
    }

    async fn delivery_failed(&self, id: i64, error: &str, delay: Duration) -> Result<()> {
        sqlx::query(
            "UPDATE postrider.delivery SET failures = failures + 1, error = $2, \
               next_at = clock_timestamp() + $3 * interval '1 ms' WHERE id = $1",
        )
        .bind(id)
        .bind(error)
        .bind(delay.as_millis() as f64)
        .execute(&self.own)
        .await
        .map_err(db)?;
        Ok(())
    }

    async fn silence(&self, rule: &str, subject: &str, length: Duration, reason: &str, actor: &str) -> Result<i64> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let id: i64 = sqlx::query(
            "INSERT INTO postrider.silence (rule, subject, until_at, reason, actor) \
             VALUES ($1, $2, clock_timestamp() + $3 * interval '1 second', $4, $5) RETURNING id",
        )
        .bind(rule)
        .bind(subject)
        .bind(length.as_secs_f64())
        .bind(reason)
        .bind(actor)
        .fetch_one(&mut *tx)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(db)?;
        let detail = json!({ "id": id, "rule": rule, "subject": subject, "secs": length.as_secs(), "reason": reason });
        audit::write(&mut tx, actor, "silence", &detail).await?;
        tx.commit().await.map_err(db)?;
        Ok(id)
    }

    async fn unsilence(&self, id: i64, actor: &str) -> Result<bool> {
        let mut tx = self.own.begin().await.map_err(db)?;
        let ended = sqlx::query(
            "UPDATE postrider.silence SET until_at = clock_timestamp() WHERE id = $1 AND until_at > clock_timestamp()",
        )
        .bind(id)
        .execute(&mut *tx)
        .await
        .map_err(db)?;
        let was_there = ended.rows_affected() == 1;
        if was_there {
            audit::write(&mut tx, actor, "unsilence", &json!({ "id": id })).await?;
        }
        tx.commit().await.map_err(db)?;
        Ok(was_there)
    }

    async fn silences(&self) -> Result<Vec<Silence>> {
        let rows = sqlx::query(
            "SELECT id, rule, subject, until_at, reason, actor FROM postrider.silence \
             WHERE until_at > clock_timestamp() ORDER BY id",
        )
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        let silence = |row: &PgRow| -> Result<Silence, sqlx::Error> {
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
