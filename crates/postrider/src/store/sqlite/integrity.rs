//! What should not be, user-written checks, and reports.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row as _, SqliteConnection, TypeInfo as _, ValueRef as _};

use super::lease::millis;
use super::pulse::of_millis;
use super::{SqliteStore, now_ms, view};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::integrity::figures::{COUNT_MAX, Figures, GRACE};
use crate::integrity::statement::{VALUE_CHARS_MAX, single};
use crate::integrity::{ABANDONED_AFTER, Integrity, Limits, Report, ReportView, kept};
use crate::pulse::Pulses as _;
use crate::upkeep::Upkeep as _;

/// So many rows are looked at for one check.
const ROWS_MAX: i64 = 100_000;
/// SQLite asks whether to go on after this many steps: a fraction of a millisecond.
const PROGRESS_STEPS: i32 = 10_000;

const PARKED_DESTINATIONS: &str = "WITH RECURSIVE names (name) AS (
        SELECT min(destination) FROM parked UNION ALL
        SELECT (SELECT min(q.destination) FROM parked q WHERE q.destination > p.name) FROM names p WHERE p.name IS NOT NULL
     ) SELECT name FROM names WHERE name IS NOT NULL";

/// `?1` is how old is too old, in milliseconds; `?2` the limit of the count, `?3` that of rows, `?4` names.
const PARKED_OVERDUE: &str = concat!(
    "SELECT count(*) FROM (SELECT 1 FROM parked WHERE destination IN (SELECT value FROM json_each(?4))
        AND state = 'retrying' AND next_at < ",
    now_ms!(),
    " - ?1 AND ?3 > 0 LIMIT ?2)"
);

const PARKED_STRANDED: &str = concat!(
    "SELECT count(*) FROM (SELECT 1 FROM (SELECT destination, key, id, first_parked_at FROM parked
            WHERE destination IN (SELECT value FROM json_each(?4)) AND state = 'waiting' LIMIT ?3) p
      WHERE unixepoch(first_parked_at) * 1000 < ",
    now_ms!(),
    " - ?1 AND NOT EXISTS (SELECT 1 FROM parked h
        WHERE h.destination = p.destination AND h.key = p.key AND h.id < p.id) LIMIT ?2)"
);

const LEASES_AHEAD: &str = concat!("SELECT count(*) FROM lease WHERE expires_at > ", now_ms!(), " + 3600000");

const HELD_OVERDUE: &str = concat!(
    "SELECT count(*) FROM (SELECT 1 FROM held WHERE consumer IN (SELECT value FROM json_each(?4)) AND next_at < ",
    now_ms!(),
    " - ?1 AND ?3 > 0 LIMIT ?2)"
);

const HELD_STRANDED: &str = concat!(
    "SELECT count(*) FROM (SELECT 1 FROM (SELECT consumer, key, id, held_at FROM held
            WHERE consumer IN (SELECT value FROM json_each(?4)) AND next_at IS NULL LIMIT ?3) h
      WHERE unixepoch(held_at) * 1000 < ",
    now_ms!(),
    " - ?1 AND NOT EXISTS (SELECT 1 FROM held p WHERE p.consumer = h.consumer AND p.key = h.key AND p.id < h.id)
      LIMIT ?2)"
);

/// One that is replayed is held, or parked and tried again. One of the relay that is dead is parked and failed.
const DEAD_LOST: &str = "SELECT count(*) FROM (SELECT 1 FROM (
            SELECT * FROM (SELECT consumer, message_id, stage FROM dead_letter WHERE state = 'replaying' LIMIT ?1)
            UNION ALL
            SELECT * FROM (SELECT consumer, message_id, stage FROM dead_letter WHERE stage = 'relay' AND state = 'dead'
                            LIMIT ?1)) d
      WHERE CASE d.stage WHEN 'relay' THEN NOT EXISTS (SELECT 1 FROM parked p
                 WHERE p.destination = substr(d.consumer, 7) AND p.event_id = d.message_id)
               ELSE NOT EXISTS (SELECT 1 FROM held h WHERE h.consumer = d.consumer AND h.message_id = d.message_id) END
      LIMIT ?2)";

/// A message that was given up has an inbox row that says so. A forged one has the id of another.
const INBOX_CONTRADICTED: &str = "SELECT count(*) FROM (SELECT 1 FROM (
            SELECT * FROM (SELECT consumer, message_id FROM held ORDER BY id LIMIT ?1)
            UNION ALL
            SELECT * FROM (SELECT consumer, message_id FROM dead_letter WHERE stage = 'consumer' AND state <> 'discarded'
                              AND error_type <> 'forged' ORDER BY id LIMIT ?1)) m
      JOIN inbox i ON i.consumer = m.consumer AND i.message_id = m.message_id AND i.state <> 'dead' LIMIT ?2)";

const INBOX_OLD: &str = "SELECT count(*) FROM (SELECT 1 FROM inbox
      WHERE processed_at < strftime('%Y-%m-%dT%H:%M:%f', 'now', ?1) LIMIT ?2)";

const REPORTS: &str = "SELECT id, began_at, ended_at, actor, checks, warnings, errors FROM report
      WHERE id < ? ORDER BY id DESC LIMIT ?";

const REPORT: &str =
    "SELECT id, began_at, ended_at, actor, checks, warnings, errors, findings FROM report WHERE id = ?";

#[async_trait]
impl Integrity for SqliteStore {
    async fn integrity_findings(&self, limits: &Limits) -> Result<Vec<Finding>> {
        let mut figures = Figures {
            consumers: view::consumers(self).await?,
            instances: self.instances().await?,
            ..Figures::default()
        };
        for route in &limits.routes {
            figures.backlogs.push((route.destination.clone(), self.backlog(route).await?));
        }
        const DOING: &str = "the check did not finish";
        let mut tx = self.read(DOING).await?;
        look(&mut tx, limits, &mut figures).await.map_err(self.failed(DOING))?;
        tx.rollback().await.map_err(self.failed(DOING))?;
        Ok(figures.findings(limits))
    }

    async fn integrity_query(&self, sql: &str, timeout: Duration, limit: usize) -> Result<Vec<String>> {
        const DOING: &str = "the check did not run";
        let wrapped = format!("SELECT * FROM (\n{}\n) LIMIT ?", single(sql)?);
        // Readers cannot write.
        let mut connection = self.inner.reader.acquire().await.map_err(self.failed(DOING))?;
        let deadline = Instant::now() + timeout;
        let mut handle = connection.lock_handle().await.map_err(self.failed(DOING))?;
        handle.set_progress_handler(PROGRESS_STEPS, move || Instant::now() < deadline);
        drop(handle);
        let rows = sqlx::query(AssertSqlSafe(wrapped))
            .persistent(false)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&mut *connection)
            .await;
        connection.lock_handle().await.map_err(self.failed(DOING))?.remove_progress_handler();
        let is_over = Instant::now() >= deadline;
        let rows = rows.map_err(|error| self.said(error, is_over.then_some(timeout)))?;
        rows.iter().map(|row| line(row).map_err(self.failed(DOING))).collect()
    }

    async fn report_begin(&self, actor: &str, scheduled_for: Option<DateTime<Utc>>) -> Result<Option<i64>> {
        const DOING: &str = "the report was not begun";
        let mut tx = self.write(DOING).await?;
        let row = sqlx::query(concat!(
            "INSERT INTO report (actor, scheduled_for, began_at) VALUES (?1, ?2, ",
            now_ms!(),
            ") ON CONFLICT (scheduled_for) DO UPDATE SET actor = excluded.actor, began_at = excluded.began_at
                WHERE report.ended_at IS NULL AND report.began_at < excluded.began_at - ?3 RETURNING id"
        ))
        .bind(actor)
        .bind(scheduled_for.map(|time| time.timestamp_millis()))
        .bind(ABANDONED_AFTER.as_millis() as i64)
        .fetch_optional(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        let id = row.map(|row| row.try_get(0)).transpose().map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(id)
    }

    async fn report_end(&self, id: i64, checks: u32, findings: &[Finding]) -> Result<()> {
        const DOING: &str = "the report was not ended";
        let (kept, warnings, errors) = kept(findings);
        let mut tx = self.write(DOING).await?;
        sqlx::query(concat!(
            "UPDATE report SET checks = ?2, warnings = ?3, errors = ?4, findings = ?5, ended_at = ",
            now_ms!(),
            " WHERE id = ?1"
        ))
        .bind(id)
        .bind(checks)
        .bind(warnings as i64)
        .bind(errors as i64)
        .bind(kept)
        .execute(&mut *tx)
        .await
        .map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn reports(&self, before: Option<i64>, limit: usize) -> Result<Vec<ReportView>> {
        const DOING: &str = "the reports were not read";
        let rows = sqlx::query(REPORTS)
            .bind(before.unwrap_or(i64::MAX))
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.inner.reader)
            .await
            .map_err(self.failed(DOING))?;
        rows.iter().map(|row| report(row).map_err(self.failed(DOING))).collect()
    }

    async fn report(&self, id: i64) -> Result<Option<Report>> {
        const DOING: &str = "the report was not read";
        let row = sqlx::query(REPORT).bind(id).fetch_optional(&self.inner.reader).await.map_err(self.failed(DOING))?;
        let Some(row) = row else { return Ok(None) };
        let findings: &str = row.try_get(7).map_err(self.failed(DOING))?;
        Ok(Some(Report {
            findings: serde_json::from_str(findings).unwrap_or_default(),
            view: report(&row).map_err(self.failed(DOING))?,
        }))
    }
}

fn report(row: &SqliteRow) -> Result<ReportView, sqlx::Error> {
    Ok(ReportView {
        id: row.try_get(0)?,
        began_at: of_millis(row.try_get(1)?),
        ended_at: row.try_get::<Option<i64>, _>(2)?.map(of_millis),
        actor: row.try_get(3)?,
        checks: row.try_get(4)?,
        warnings: row.try_get(5)?,
        errors: row.try_get(6)?,
    })
}

impl SqliteStore {
    /// What SQLite says of a user's query is the configuration's fault, unless it belongs to the file.
    fn said(&self, error: sqlx::Error, over: Option<Duration>) -> Error {
        let refused = |text: String, remedy: &str| Error::new(Kind::Config, text).with_remedy(remedy);
        if let Some(timeout) = over {
            let text = format!("the check ran longer than {} s", timeout.as_secs_f64());
            return refused(text, "let it look at fewer rows, or give it an index");
        }
        match error.as_database_error().and_then(|error| error.code()).as_deref() {
            // SQLITE_ERROR: the statement cannot be understood. SQLITE_READONLY: it would write.
            Some("1") => refused(format!("the check was refused: {error}"), "correct the check's SQL"),
            Some("8") => refused(format!("the check was refused: {error}"), "write a check that only reads"),
            _ => self.error("the check did not run", error),
        }
    }
}

/// A row as `column=value, …`.
fn line(row: &SqliteRow) -> Result<String, sqlx::Error> {
    use sqlx::Column as _;
    let mut parts = Vec::with_capacity(row.columns().len());
    for column in row.columns() {
        let index = column.ordinal();
        let value = row.try_get_raw(index)?;
        let text = match (value.is_null(), value.type_info().name()) {
            (true, _) => "null".to_owned(),
            (_, "INTEGER") => row.try_get_unchecked::<i64, _>(index)?.to_string(),
            (_, "REAL") => row.try_get_unchecked::<f64, _>(index)?.to_string(),
            _ => String::from_utf8_lossy(&row.try_get_unchecked::<Vec<u8>, _>(index)?).into_owned(),
        };
        parts.push(format!("{}={}", column.name(), text.chars().take(VALUE_CHARS_MAX).collect::<String>()));
    }
    Ok(parts.join(", "))
}

async fn look(connection: &mut SqliteConnection, limits: &Limits, figures: &mut Figures) -> Result<(), sqlx::Error> {
    let rows = sqlx::query(PARKED_DESTINATIONS).fetch_all(&mut *connection).await?;
    figures.parked_destinations = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    let destinations = crate::store::json(&figures.parked_destinations);
    let names: Vec<&str> = figures.consumers.iter().map(|view| view.name.as_str()).collect();
    let consumers = crate::store::json(&names);
    let age = limits.stale_after;
    figures.parked_overdue = old(connection, PARKED_OVERDUE, age, &destinations).await?;
    figures.parked_stranded = old(connection, PARKED_STRANDED, age, &destinations).await?;
    figures.held_overdue = old(connection, HELD_OVERDUE, age, &consumers).await?;
    figures.held_stranded = old(connection, HELD_STRANDED, age, &consumers).await?;
    figures.leases_ahead = sqlx::query(LEASES_AHEAD).fetch_one(&mut *connection).await?.try_get(0)?;
    for (sql, count) in [(DEAD_LOST, &mut figures.dead_lost), (INBOX_CONTRADICTED, &mut figures.inbox_contradicted)] {
        *count = sqlx::query(sql).bind(ROWS_MAX).bind(COUNT_MAX).fetch_one(&mut *connection).await?.try_get(0)?;
    }
    let ago = format!("-{} seconds", millis(limits.retention.inbox.saturating_add(GRACE)) / 1000);
    figures.inbox_old = sqlx::query(INBOX_OLD).bind(ago).bind(COUNT_MAX).fetch_one(connection).await?.try_get(0)?;
    Ok(())
}

async fn old(
    connection: &mut SqliteConnection,
    sql: &'static str,
    age: Duration,
    names: &str,
) -> Result<i64, sqlx::Error> {
    let query = sqlx::query(sql).bind(millis(age)).bind(COUNT_MAX).bind(ROWS_MAX).bind(names);
    query.fetch_one(connection).await?.try_get(0)
}
