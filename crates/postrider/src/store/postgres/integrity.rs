//! What should not be, user-written checks, and reports.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Days, Utc};
use serde_json::Value;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use super::error::db;
use super::{PostgresStore, upkeep, view};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::integrity::figures::{COUNT_MAX, Figures, GRACE, Partitions};
use crate::integrity::statement::{VALUE_CHARS_MAX, single};
use crate::integrity::{ABANDONED_AFTER, Integrity, Limits, Report, ReportView, kept};
use crate::pulse::Pulses as _;
use crate::upkeep::Upkeep as _;

/// So many rows are looked at for one check.
const ROWS_MAX: i64 = 100_000;

const PARKED_DESTINATIONS: &str = "WITH RECURSIVE names (name) AS ( \
       (SELECT destination FROM postrider.parked ORDER BY destination LIMIT 1) UNION ALL \
       SELECT (SELECT q.destination FROM postrider.parked q WHERE q.destination > p.name ORDER BY q.destination LIMIT 1) \
       FROM names p WHERE p.name IS NOT NULL \
     ) SELECT name FROM names WHERE name IS NOT NULL";

/// `$1` is how old is too old, in seconds; `$2` the limit of the count, `$3` that of rows, `$4` names.
const PARKED_OVERDUE: &str = "SELECT count(*) FROM (SELECT 1 FROM postrider.parked WHERE destination = ANY ($4) \
     AND state = 'retrying' AND next_at < clock_timestamp() - $1 * interval '1 second' AND $3 > 0 LIMIT $2) p";

const PARKED_STRANDED: &str = "SELECT count(*) FROM (SELECT 1 FROM ( \
         SELECT destination, key, id, parked_at FROM postrider.parked WHERE destination = ANY ($4) AND state = 'waiting' \
         LIMIT $3) p \
       WHERE parked_at < clock_timestamp() - $1 * interval '1 second' AND NOT EXISTS (SELECT 1 FROM postrider.parked h \
         WHERE h.destination = p.destination AND h.key = p.key AND h.id < p.id) LIMIT $2) p";

const LEASES_AHEAD: &str = "SELECT count(*) FROM postrider.lease \
     WHERE slot >= 0 AND expires_at > clock_timestamp() + interval '1 hour'";

const HELD_OVERDUE: &str = "SELECT count(*) FROM (SELECT 1 FROM postrider.held WHERE consumer = ANY ($4) \
     AND next_at < clock_timestamp() - $1 * interval '1 second' AND $3 > 0 LIMIT $2) h";

const HELD_STRANDED: &str = "SELECT count(*) FROM (SELECT 1 FROM ( \
         SELECT consumer, key, id, held_at FROM postrider.held WHERE consumer = ANY ($4) AND next_at = 'infinity' \
         LIMIT $3) h \
       WHERE held_at < clock_timestamp() - $1 * interval '1 second' AND NOT EXISTS (SELECT 1 FROM postrider.held p \
         WHERE p.consumer = h.consumer AND p.key = h.key AND p.id < h.id) LIMIT $2) h";

/// One that is replayed is held, or parked and tried again. One of the relay that is dead is parked and failed.
const DEAD_LOST: &str = "SELECT count(*) FROM (SELECT 1 FROM ( \
         (SELECT consumer, message_id, stage, state FROM postrider.dead_letter WHERE state = 'replaying' LIMIT $1) \
         UNION ALL \
         (SELECT consumer, message_id, stage, state FROM postrider.dead_letter WHERE stage = 'relay' AND state = 'dead' \
          LIMIT $1)) d \
       WHERE CASE d.stage WHEN 'relay' THEN NOT EXISTS (SELECT 1 FROM postrider.parked p \
                 WHERE p.destination = substr(d.consumer, 7) AND p.event_id = d.message_id) \
               ELSE NOT EXISTS (SELECT 1 FROM postrider.held h WHERE h.consumer = d.consumer \
                 AND h.message_id = d.message_id) END LIMIT $2) d";

/// A message that was given up has an inbox row that says so. A forged one has the id of another.
const INBOX_CONTRADICTED: &str = "SELECT count(*) FROM (SELECT 1 FROM ( \
         (SELECT consumer, message_id FROM postrider.held ORDER BY id LIMIT $1) UNION ALL \
         (SELECT consumer, message_id FROM postrider.dead_letter \
          WHERE stage = 'consumer' AND state <> 'discarded' AND error_type <> 'forged' ORDER BY id LIMIT $1)) m \
       JOIN postrider.inbox i ON i.consumer = m.consumer AND i.message_id = m.message_id AND i.state <> 'dead' \
       LIMIT $2) m";

const INBOX_OLD: &str = "SELECT count(*) FROM (SELECT 1 FROM postrider.inbox \
     WHERE processed_at < clock_timestamp() - $1 * interval '1 second' LIMIT $2) i";

const REPORT: &str = "id, began_at, ended_at, actor, checks, warnings, errors";

#[async_trait]
impl Integrity for PostgresStore {
    async fn integrity_findings(&self, limits: &Limits) -> Result<Vec<Finding>> {
        Ok(self.figures(limits).await?.findings(limits))
    }

    async fn integrity_query(&self, sql: &str, timeout: Duration, limit: usize) -> Result<Vec<String>> {
        let query = single(sql)?;
        // The caller's own pool: a query of the user's is planned as the user expects. Inside of another query it can be one
        // statement only, and every type has a text.
        let mut tx = self.pool.begin().await.map_err(db)?;
        let settings = format!(
            "SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = {}",
            timeout.as_millis().clamp(1, i32::MAX as u128)
        );
        sqlx::raw_sql(AssertSqlSafe(settings)).execute(&mut *tx).await.map_err(db)?;
        let wrapped = format!(
            "SELECT (SELECT string_agg(e.key || '=' || coalesce(left(e.value, $2), 'null'), ', ') \
                     FROM json_each_text(row_to_json(q)) e) FROM (\n{query}\n) q LIMIT $1"
        );
        let rows = sqlx::query(AssertSqlSafe(wrapped))
            .persistent(false)
            .bind(limit as i64)
            .bind(VALUE_CHARS_MAX as i32)
            .fetch_all(&mut *tx)
            .await;
        tx.rollback().await.map_err(db)?;
        let rows = rows.map_err(|error| said(error, timeout))?;
        rows.iter().map(|row| Ok(row.try_get::<Option<String>, _>(0).map_err(db)?.unwrap_or_default())).collect()
    }

    async fn report_begin(&self, actor: &str, scheduled_for: Option<DateTime<Utc>>) -> Result<Option<i64>> {
        let row = sqlx::query(
            "INSERT INTO postrider.report AS r (actor, scheduled_for) SELECT $1, $2 \
             WHERE NOT EXISTS (SELECT 1 FROM postrider.report WHERE scheduled_for = $2 AND ended_at IS NOT NULL) \
             ON CONFLICT (scheduled_for) DO UPDATE SET actor = excluded.actor, began_at = clock_timestamp() \
               WHERE r.ended_at IS NULL AND r.began_at < clock_timestamp() - $3 * interval '1 second' RETURNING id",
        )
        .bind(actor)
        .bind(scheduled_for)
        .bind(ABANDONED_AFTER.as_secs_f64())
        .fetch_optional(&self.own)
        .await
        .map_err(db)?;
        row.map(|row| row.try_get(0).map_err(db)).transpose()
    }

    async fn report_end(&self, id: i64, checks: u32, findings: &[Finding]) -> Result<()> {
        let (kept, warnings, errors) = kept(findings);
        sqlx::query(
            "UPDATE postrider.report SET ended_at = clock_timestamp(), checks = $2, warnings = $3, errors = $4, \
               findings = $5::jsonb WHERE id = $1",
        )
        .bind(id)
        .bind(checks as i32)
        .bind(warnings as i32)
        .bind(errors as i32)
        .bind(kept)
        .execute(&self.own)
        .await
        .map_err(db)?;
        Ok(())
    }

    async fn reports(&self, before: Option<i64>, limit: usize) -> Result<Vec<ReportView>> {
        let sql = format!("SELECT {REPORT} FROM postrider.report WHERE id < $1 ORDER BY id DESC LIMIT $2");
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(before.unwrap_or(i64::MAX))
            .bind(limit as i64)
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(|row| report(row).map_err(db)).collect()
    }

    async fn report(&self, id: i64) -> Result<Option<Report>> {
        let sql = format!("SELECT {REPORT}, findings FROM postrider.report WHERE id = $1");
        let row = sqlx::query(AssertSqlSafe(sql)).bind(id).fetch_optional(&self.own).await.map_err(db)?;
        let Some(row) = row else { return Ok(None) };
        let findings: Value = row.try_get(7).map_err(db)?;
        Ok(Some(Report {
            view: report(&row).map_err(db)?,
            findings: serde_json::from_value(findings).unwrap_or_default(),
        }))
    }
}

fn report(row: &PgRow) -> Result<ReportView, sqlx::Error> {
    Ok(ReportView {
        id: row.try_get(0)?,
        began_at: row.try_get(1)?,
        ended_at: row.try_get(2)?,
        actor: row.try_get(3)?,
        checks: row.try_get::<i32, _>(4)? as u32,
        warnings: row.try_get::<i32, _>(5)? as u32,
        errors: row.try_get::<i32, _>(6)? as u32,
    })
}

/// What the database says of a user's query is the configuration's fault.
fn said(error: sqlx::Error, timeout: Duration) -> Error {
    let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned();
    let refused = |text: String, remedy: &str| Error::new(Kind::Config, text).with_remedy(remedy);
    match (code.as_str(), db(error)) {
        ("57014", _) => refused(
            format!("the check ran longer than {} s", timeout.as_secs_f64()),
            "let it look at fewer rows, or give it an index",
        ),
        ("25006", error) => refused(error.to_string(), "write a check that only reads"),
        (code, error) if ["42", "22", "0A"].iter().any(|class| code.starts_with(class)) => {
            refused(error.to_string(), "correct the check's SQL")
        }
        (_, error) => error,
    }
}

impl PostgresStore {
    async fn figures(&self, limits: &Limits) -> Result<Figures> {
        let mut figures = Figures {
            consumers: view::consumers(self).await?,
            instances: self.instances().await?,
            ..Figures::default()
        };
        for route in &limits.routes {
            figures.backlogs.push((route.destination.clone(), self.backlog(route).await?));
        }
        let mut tx = self.own.begin().await.map_err(db)?;
        // Old inbox rows are found through a BRIN index, which only a bitmap scan can use.
        sqlx::raw_sql("SET LOCAL enable_bitmapscan = on").execute(&mut *tx).await.map_err(db)?;
        let rows = sqlx::query(PARKED_DESTINATIONS).fetch_all(&mut *tx).await.map_err(db)?;
        figures.parked_destinations = rows.iter().map(|row| row.try_get(0).map_err(db)).collect::<Result<_>>()?;
        let consumers: Vec<String> = figures.consumers.iter().map(|view| view.name.clone()).collect();
        let age = limits.stale_after;
        figures.parked_overdue = old(&mut tx, PARKED_OVERDUE, age, &figures.parked_destinations).await?;
        figures.parked_stranded = old(&mut tx, PARKED_STRANDED, age, &figures.parked_destinations).await?;
        figures.held_overdue = old(&mut tx, HELD_OVERDUE, age, &consumers).await?;
        figures.held_stranded = old(&mut tx, HELD_STRANDED, age, &consumers).await?;
        figures.leases_ahead = one(sqlx::query(LEASES_AHEAD).fetch_one(&mut *tx).await)?;
        for (sql, count) in [(DEAD_LOST, &mut figures.dead_lost), (INBOX_CONTRADICTED, &mut figures.inbox_contradicted)]
        {
            *count = one(sqlx::query(sql).bind(ROWS_MAX).bind(COUNT_MAX).fetch_one(&mut *tx).await)?;
        }
        let age = limits.retention.inbox.saturating_add(GRACE).as_secs_f64();
        figures.inbox_old = one(sqlx::query(INBOX_OLD).bind(age).bind(COUNT_MAX).fetch_one(&mut *tx).await)?;
        figures.partitions = Some(partitions(&mut tx).await?);
        tx.commit().await.map_err(db)?;
        Ok(figures)
    }
}

fn one(row: sqlx::Result<PgRow>) -> Result<i64> {
    row.and_then(|row| row.try_get(0)).map_err(db)
}

async fn old(connection: &mut PgConnection, sql: &'static str, age: Duration, names: &[String]) -> Result<i64> {
    let query = sqlx::query(sql).bind(age.as_secs_f64()).bind(COUNT_MAX).bind(ROWS_MAX).bind(names);
    one(query.fetch_one(connection).await)
}

/// Those of today and tomorrow must be there; upkeep makes them days ahead.
async fn partitions(connection: &mut PgConnection) -> Result<Partitions> {
    let count = "SELECT count(*) FROM (SELECT 1 FROM postrider.outbox_default LIMIT $1) o";
    let mut partitions = Partitions {
        in_default: one(sqlx::query(count).bind(COUNT_MAX).fetch_one(&mut *connection).await)?,
        ..Partitions::default()
    };
    let row = sqlx::query("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date").fetch_one(&mut *connection).await;
    let today: chrono::NaiveDate = row.and_then(|row| row.try_get(0)).map_err(db)?;
    for day in [Some(today), today.checked_add_days(Days::new(1))].into_iter().flatten() {
        let is_missing = sqlx::query("SELECT to_regclass($1) IS NULL")
            .bind(format!("postrider.{}", upkeep::partition_name(day)))
            .fetch_one(&mut *connection)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        if is_missing {
            partitions.missing.push(day.to_string());
        }
    }
    Ok(partitions)
}
