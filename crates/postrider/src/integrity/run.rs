//! One integrity check: the store's own findings, and what the user's queries return.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::{Integrity, Limits, Report};
use crate::doctor::{Finding, Severity};
use crate::error::{Error, Result};

/// More rows of one query than this are not listed; that there are more is a finding of its own.
pub const ROWS_MAX: usize = 50;

/// A query of the user's. Every row that it returns is a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlCheck {
    /// Names it in reports: `sql.<name>`.
    pub name: String,
    /// The query.
    pub sql: String,
    /// How bad a row is.
    pub severity: Severity,
    /// What to do about a row.
    pub remedy: String,
    /// How long it may take.
    pub timeout: Duration,
}

/// What is checked.
#[derive(Debug, Clone)]
pub struct Checks {
    /// What is too old, and what is known.
    pub limits: Limits,
    /// The user's own.
    pub queries: Vec<SqlCheck>,
}

/// Begins a report and returns its number; `None` if it was scheduled and has been begun before, by whomever.
pub async fn begin(store: &dyn Integrity, actor: &str, scheduled_for: Option<DateTime<Utc>>) -> Result<Option<i64>> {
    store.report_begin(actor, scheduled_for).await
}

/// Checks everything, writes the findings and `more` into the report, and returns it. What cannot be checked is a finding
/// too; only a report that cannot be written is an error.
pub async fn finish(store: &dyn Integrity, id: i64, checks: &Checks, more: Vec<Finding>) -> Result<Report> {
    let mut findings = match store.integrity_findings(&checks.limits).await {
        Ok(findings) => findings,
        Err(error) => vec![Finding::of("store", &error)],
    };
    findings.extend(more);
    let mut looked_at = findings.len();
    for check in &checks.queries {
        looked_at += 1;
        findings.extend(query(store, check).await);
    }
    let looked_at = u32::try_from(looked_at).unwrap_or(u32::MAX);
    store.report_end(id, looked_at, &findings).await?;
    let report = store.report(id).await?;
    report.ok_or_else(|| Error::new(crate::Kind::Missing, format!("report {id} was deleted while it was written")))
}

/// What one query finds.
async fn query(store: &dyn Integrity, check: &SqlCheck) -> Vec<Finding> {
    let name = format!("sql.{}", check.name);
    // One row more than is listed, to know whether there are more.
    let rows = match store.integrity_query(&check.sql, check.timeout, ROWS_MAX + 1).await {
        Ok(rows) => rows,
        Err(error) => {
            let message = format!("the query cannot be run: {}", error.message());
            return vec![Finding::error(
                name,
                message,
                "correct the query in [[check_sql]], or the rights of the user",
            )];
        }
    };
    if rows.is_empty() {
        return vec![Finding::ok(name, "no row")];
    }
    let finding =
        |message| Finding { check: name.clone(), severity: check.severity, message, remedy: check.remedy.clone() };
    let is_cut = rows.len() > ROWS_MAX;
    let mut findings: Vec<Finding> = rows.into_iter().take(ROWS_MAX).map(finding).collect();
    if is_cut {
        findings.push(finding(format!("there are more than {ROWS_MAX} rows; the others are not listed")));
    }
    findings
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;

    use super::super::ReportView;
    use super::*;
    use crate::error::Kind;
    use crate::upkeep::Retention;

    /// Queries return as many rows as their text says.
    #[derive(Default)]
    struct Fake {
        kept: Mutex<Option<(u32, Vec<Finding>)>>,
    }

    #[async_trait]
    impl Integrity for Fake {
        async fn integrity_findings(&self, _: &Limits) -> Result<Vec<Finding>> {
            Ok(vec![Finding::ok("outbox.stale", "none"), Finding::warning("leases.stuck", "one", "look")])
        }

        async fn integrity_query(&self, sql: &str, _: Duration, limit: usize) -> Result<Vec<String>> {
            let rows: usize = sql.parse().map_err(|_| Error::new(Kind::Invalid, "syntax error"))?;
            Ok((0..rows.min(limit)).map(|n| format!("id={n}")).collect())
        }

        async fn report_begin(&self, _: &str, _: Option<DateTime<Utc>>) -> Result<Option<i64>> {
            Ok(Some(1))
        }

        async fn report_end(&self, _: i64, checks: u32, findings: &[Finding]) -> Result<()> {
            *self.kept.lock().unwrap() = Some((checks, findings.to_vec()));
            Ok(())
        }

        async fn reports(&self, _: Option<i64>, _: usize) -> Result<Vec<ReportView>> {
            Ok(Vec::new())
        }

        async fn report(&self, id: i64) -> Result<Option<Report>> {
            let (checks, findings) = self.kept.lock().unwrap().clone().unwrap();
            let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count() as u32;
            let view = ReportView {
                id,
                began_at: Utc::now(),
                ended_at: Some(Utc::now()),
                actor: "test".to_owned(),
                checks,
                warnings: count(Severity::Warning),
                errors: count(Severity::Error),
            };
            Ok(Some(Report { view, findings }))
        }
    }

    fn check(name: &str, sql: &str) -> SqlCheck {
        SqlCheck {
            name: name.to_owned(),
            sql: sql.to_owned(),
            severity: Severity::Error,
            remedy: "mend it".to_owned(),
            timeout: Duration::from_secs(1),
        }
    }

    #[tokio::test]
    async fn every_row_is_a_finding_and_so_is_a_query_that_fails() {
        let limits = Limits {
            stale_after: Duration::from_secs(3600),
            routes: Vec::new(),
            retention: Retention::default(),
            consumers: Vec::new(),
        };
        let queries = vec![check("clean", "0"), check("two", "2"), check("many", "60"), check("wrong", "SELEC")];
        let more = vec![Finding::ok("outbox.campus", "fine")];
        let report = finish(&Fake::default(), 1, &Checks { limits, queries }, more).await.unwrap();
        assert_eq!((report.view.checks, report.view.warnings), (7, 1));
        let of = |name: &str| report.findings.iter().filter(|finding| finding.check == name).collect::<Vec<_>>();
        assert_eq!(of("sql.clean")[0].severity, Severity::Ok);
        let two: Vec<&str> = of("sql.two").iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(two, ["id=0", "id=1"]);
        assert_eq!(of("sql.two")[0].remedy, "mend it");
        assert_eq!(of("sql.many").len(), ROWS_MAX + 1);
        assert!(of("sql.many")[ROWS_MAX].message.contains("more than 50 rows"));
        assert_eq!(of("sql.wrong")[0].severity, Severity::Error);
        assert!(of("sql.wrong")[0].message.contains("syntax error"));
    }
}
