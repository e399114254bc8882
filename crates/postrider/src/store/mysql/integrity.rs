//! What should not be, user-written checks, and reports.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Column as _, Executor as _, Row as _, SqlSafeStr as _, ValueRef as _};

use super::error::{db, is_duplicate, number_of};
use super::{MysqlStore, marks, micros, now, view};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::integrity::figures::{COUNT_MAX, Figures, GRACE};
use crate::integrity::statement::{VALUE_CHARS_MAX, single};
use crate::integrity::{ABANDONED_AFTER, Integrity, Limits, Report, ReportView, kept};
use crate::pulse::Pulses as _;
use crate::upkeep::Upkeep as _;

/// So many rows are looked at for one check.
const ROWS_MAX: i64 = 100_000;

const NEXT_PARKED: &str = "SELECT MIN(destination) FROM postrider_parked WHERE destination > ?";

/// Before this, counted from now, as a literal for `concat!`.
macro_rules! cutoff {
    () => {
        "UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND"
    };
}

/// Each with the names for its `IN` in the place of `{}`, then how old is too old, then the limit of the count.
const PARKED_OVERDUE: (&str, &str) = (
    "SELECT COUNT(*) FROM (SELECT 1 FROM postrider_parked WHERE destination IN ({}) AND state = 'retrying'",
    concat!(" AND next_at < ", cutoff!(), " LIMIT ?) p"),
);

const PARKED_STRANDED: (&str, &str) = (
    "SELECT COUNT(*) FROM (SELECT 1 FROM (SELECT destination, `key`, id, parked_at FROM postrider_parked \
         WHERE destination IN ({}) AND state = 'waiting' LIMIT 100000) p",
    concat!(
        " WHERE p.parked_at < ",
        cutoff!(),
        " AND NOT EXISTS (SELECT 1 FROM postrider_parked h WHERE h.destination = p.destination AND h.`key` = p.`key` \
           AND h.id < p.id) LIMIT ?) p"
    ),
);

const HELD_OVERDUE: (&str, &str) = (
    "SELECT COUNT(*) FROM (SELECT 1 FROM postrider_held WHERE consumer IN ({})",
    concat!(" AND next_at < ", cutoff!(), " LIMIT ?) h"),
);

const HELD_STRANDED: (&str, &str) = (
    "SELECT COUNT(*) FROM (SELECT 1 FROM (SELECT consumer, `key`, id, held_at FROM postrider_held \
         WHERE consumer IN ({}) AND next_at IS NULL LIMIT 100000) h",
    concat!(
        " WHERE h.held_at < ",
        cutoff!(),
        " AND NOT EXISTS (SELECT 1 FROM postrider_held p WHERE p.consumer = h.consumer AND p.`key` = h.`key` \
           AND p.id < h.id) LIMIT ?) h"
    ),
);

const LEASES_AHEAD: &str =
    concat!("SELECT COUNT(*) FROM postrider_lease WHERE expires_at > ", now!(), " + INTERVAL 1 HOUR");

/// One that is replayed is held, or parked and tried again. One of the relay that is dead is parked and failed.
const DEAD_LOST: &str = "SELECT COUNT(*) FROM (SELECT 1 FROM ( \
         (SELECT consumer, message_id, stage FROM postrider_dead_letter WHERE state = 'replaying' LIMIT ?) UNION ALL \
         (SELECT consumer, message_id, stage FROM postrider_dead_letter WHERE state = 'dead' AND stage = 'relay' LIMIT ?)) d \
       WHERE CASE d.stage WHEN 'relay' THEN NOT EXISTS (SELECT 1 FROM postrider_parked p \
                 WHERE p.destination = SUBSTR(d.consumer, 7) AND p.event_id = d.message_id) \
               ELSE NOT EXISTS (SELECT 1 FROM postrider_held h WHERE h.consumer = d.consumer \
                 AND h.message_id = d.message_id) END LIMIT ?) d";

/// A message that was given up has an inbox row that says so. A forged one has the id of another.
const INBOX_CONTRADICTED: &str = "SELECT COUNT(*) FROM (SELECT 1 FROM ( \
         (SELECT consumer, message_id FROM postrider_held ORDER BY id LIMIT ?) UNION ALL \
         (SELECT consumer, message_id FROM postrider_dead_letter WHERE stage = 'consumer' AND state <> 'discarded' \
            AND error_type <> 'forged' ORDER BY id LIMIT ?)) m \
       STRAIGHT_JOIN postrider_inbox i ON i.consumer = m.consumer AND i.message_id = m.message_id AND i.state <> 'dead' \
       LIMIT ?) m";

const INBOX_OLD: &str =
    concat!("SELECT COUNT(*) FROM (SELECT 1 FROM postrider_inbox WHERE processed_at < ", cutoff!(), " LIMIT ?) i");

const REPORTS: &str = "SELECT id, began_at, ended_at, actor, checks, warnings, errors FROM postrider_report \
     WHERE id < ? ORDER BY id DESC LIMIT ?";

const REPORT: &str =
    "SELECT id, began_at, ended_at, actor, checks, warnings, errors, findings FROM postrider_report WHERE id = ?";

#[async_trait]
impl Integrity for MysqlStore {
    async fn integrity_findings(&self, limits: &Limits) -> Result<Vec<Finding>> {
        Ok(self.figures(limits).await?.findings(limits))
    }

    async fn integrity_query(&self, sql: &str, timeout: Duration, limit: usize) -> Result<Vec<String>> {
        let wrapped = format!("* FROM (\n{}\n) q LIMIT {limit}", single(sql)?);
        let mut tx = self.pool.begin_with("START TRANSACTION READ ONLY").await.map_err(db)?;
        // Only one statement can be prepared. It is run as text, because then every type comes as text. Each server takes the
        // other one's limit for a comment.
        let prepared = (&mut *tx).prepare(AssertSqlSafe(format!("SELECT {wrapped}")).into_sql_str()).await;
        prepared.map_err(|error| said(error, timeout))?;
        let limited = format!(
            "/*M! SET STATEMENT max_statement_time = {} FOR */ SELECT /*+ MAX_EXECUTION_TIME({}) */ {wrapped}",
            timeout.as_secs_f64(),
            timeout.as_millis().clamp(1, u128::from(u32::MAX))
        );
        let rows = sqlx::raw_sql(AssertSqlSafe(limited)).fetch_all(&mut *tx).await;
        tx.rollback().await.map_err(db)?;
        let rows = rows.map_err(|error| said(error, timeout))?;
        rows.iter().map(|row| line(row).map_err(db)).collect()
    }

    async fn report_begin(&self, actor: &str, scheduled_for: Option<DateTime<Utc>>) -> Result<Option<i64>> {
        let begun = sqlx::query("INSERT INTO postrider_report (actor, scheduled_for, findings) VALUES (?, ?, '[]')")
            .bind(actor)
            .bind(scheduled_for.map(|time| time.naive_utc()))
            .execute(&self.own)
            .await;
        match begun {
            Ok(begun) => return Ok(Some(begun.last_insert_id().cast_signed())),
            Err(error) if is_duplicate(&error) => {}
            Err(error) => return Err(db(error)),
        }
        let again = sqlx::query(concat!(
            "UPDATE postrider_report SET actor = ?, began_at = ",
            now!(),
            ", id = LAST_INSERT_ID(id) WHERE scheduled_for = ? AND ended_at IS NULL AND began_at < ",
            now!(),
            " - INTERVAL ? SECOND"
        ))
        .bind(actor)
        .bind(scheduled_for.map(|time| time.naive_utc()))
        .bind(ABANDONED_AFTER.as_secs())
        .execute(&self.own)
        .await
        .map_err(db)?;
        Ok((again.rows_affected() == 1).then(|| again.last_insert_id().cast_signed()))
    }

    async fn report_end(&self, id: i64, checks: u32, findings: &[Finding]) -> Result<()> {
        let (kept, warnings, errors) = kept(findings);
        sqlx::query(concat!(
            "UPDATE postrider_report SET checks = ?, warnings = ?, errors = ?, findings = ?, ended_at = ",
            now!(),
            " WHERE id = ?"
        ))
        .bind(checks)
        .bind(warnings as i64)
        .bind(errors as i64)
        .bind(kept)
        .bind(id)
        .execute(&self.own)
        .await
        .map_err(db)?;
        Ok(())
    }

    async fn reports(&self, before: Option<i64>, limit: usize) -> Result<Vec<ReportView>> {
        let rows = sqlx::query(REPORTS)
            .bind(before.unwrap_or(i64::MAX))
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.own)
            .await
            .map_err(db)?;
        rows.iter().map(|row| report(row).map_err(db)).collect()
    }

    async fn report(&self, id: i64) -> Result<Option<Report>> {
        let row = sqlx::query(REPORT).bind(id).fetch_optional(&self.own).await.map_err(db)?;
        let Some(row) = row else { return Ok(None) };
        let findings: &str = row.try_get(7).map_err(db)?;
        Ok(Some(Report {
            findings: serde_json::from_str(findings).unwrap_or_default(),
            view: report(&row).map_err(db)?,
        }))
    }
}

fn report(row: &MySqlRow) -> Result<ReportView, sqlx::Error> {
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

/// What the server says of a user's query is the configuration's fault, unless it belongs to the server.
fn said(error: sqlx::Error, timeout: Duration) -> Error {
    let number = number_of(&error);
    let refused = |text: String, remedy: &str| Error::new(Kind::Config, text).with_remedy(remedy);
    match (number, db(error)) {
        (Some(1969 | 3024), _) => refused(
            format!("the check ran longer than {} s", timeout.as_secs_f64()),
            "let it look at fewer rows, or give it an index",
        ),
        (Some(1792), error) => refused(error.to_string(), "write a check that only reads"),
        (Some(_), error) if matches!(error.kind(), Kind::Other | Kind::NotMigrated) => {
            refused(error.to_string(), "correct the check's SQL")
        }
        (_, error) => error,
    }
}

/// A row of texts as `column=value, …`.
fn line(row: &MySqlRow) -> Result<String, sqlx::Error> {
    let mut parts = Vec::with_capacity(row.columns().len());
    for column in row.columns() {
        let text = match row.try_get_raw(column.ordinal())?.is_null() {
            true => "null".to_owned(),
            false => String::from_utf8_lossy(&row.try_get_unchecked::<Vec<u8>, _>(column.ordinal())?).into_owned(),
        };
        parts.push(format!("{}={}", column.name(), text.chars().take(VALUE_CHARS_MAX).collect::<String>()));
    }
    Ok(parts.join(", "))
}

impl MysqlStore {
    async fn figures(&self, limits: &Limits) -> Result<Figures> {
        let mut figures = Figures {
            consumers: view::consumers(self).await?,
            instances: self.instances().await?,
            ..Figures::default()
        };
        for route in &limits.routes {
            figures.backlogs.push((route.destination.clone(), self.backlog(route).await?));
        }
        let mut last = String::new();
        while let Some(next) = self.next_parked(&last).await? {
            figures.parked_destinations.push(next.clone());
            last = next;
        }
        let consumers: Vec<String> = figures.consumers.iter().map(|view| view.name.clone()).collect();
        let age = limits.stale_after;
        figures.parked_overdue = self.old(PARKED_OVERDUE, &figures.parked_destinations, age).await?;
        figures.parked_stranded = self.old(PARKED_STRANDED, &figures.parked_destinations, age).await?;
        figures.held_overdue = self.old(HELD_OVERDUE, &consumers, age).await?;
        figures.held_stranded = self.old(HELD_STRANDED, &consumers, age).await?;
        figures.leases_ahead = one(sqlx::query(LEASES_AHEAD).fetch_one(&self.own).await)?;
        for (sql, count) in [(DEAD_LOST, &mut figures.dead_lost), (INBOX_CONTRADICTED, &mut figures.inbox_contradicted)]
        {
            let query = sqlx::query(sql).bind(ROWS_MAX).bind(ROWS_MAX).bind(COUNT_MAX);
            *count = one(query.fetch_one(&self.own).await)?;
        }
        let age = micros(limits.retention.inbox.saturating_add(GRACE));
        figures.inbox_old = one(sqlx::query(INBOX_OLD).bind(age).bind(COUNT_MAX).fetch_one(&self.own).await)?;
        Ok(figures)
    }

    async fn next_parked(&self, last: &str) -> Result<Option<String>> {
        let row = sqlx::query(NEXT_PARKED).bind(last).fetch_one(&self.own).await;
        row.and_then(|row| row.try_get(0)).map_err(db)
    }

    async fn old(&self, (before, after): (&str, &str), names: &[String], age: Duration) -> Result<i64> {
        if names.is_empty() {
            return Ok(0);
        }
        let sql = format!("{}{after}", before.replace("{}", &marks(names.len())));
        let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(false);
        for name in names {
            query = query.bind(name);
        }
        one(query.bind(micros(age)).bind(COUNT_MAX).fetch_one(&self.own).await)
    }
}

fn one(row: sqlx::Result<MySqlRow>) -> Result<i64> {
    row.and_then(|row| row.try_get(0)).map_err(db)
}
