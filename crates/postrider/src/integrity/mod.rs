//! The integrity check: once a day, and whenever asked, the store is searched for what should not be.
//!
//! Findings are those of [`crate::doctor`]: what was checked, how it stands, what to do. A clean system has none worse
//! than `ok`.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::broker::topic::Route;
use crate::doctor::Finding;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
use crate::doctor::Severity;
use crate::error::Result;
use crate::upkeep::Retention;

mod run;

pub use run::{Checks, ROWS_MAX, SqlCheck, begin, finish};

#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) mod figures;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) mod statement;

/// A scheduled report whose instance has not ended it for so long is begun anew by another.
pub const ABANDONED_AFTER: Duration = Duration::from_secs(30 * 60);

/// What is too old.
#[derive(Debug, Clone)]
pub struct Limits {
    /// An event that waits longer than this is stale.
    pub stale_after: Duration,
    /// Where events go.
    pub routes: Vec<Route>,
    /// What is kept how long; what is a day older still was forgotten by upkeep.
    pub retention: Retention,
    /// The consumers that this configuration knows; dead letters and held messages of others may be orphans. Not checked
    /// when empty, because services in Rust have consumers that no configuration names.
    pub consumers: Vec<String>,
}

/// A report in the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReportView {
    /// Its number.
    pub id: i64,
    /// When it began.
    pub began_at: DateTime<Utc>,
    /// When it ended; none while it runs, or if its instance died.
    pub ended_at: Option<DateTime<Utc>>,
    /// `schedule`, or who asked.
    pub actor: String,
    /// How many things were looked at.
    pub checks: u32,
    /// How many findings are warnings.
    pub warnings: u32,
    /// How many are errors.
    pub errors: u32,
}

/// A report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What the list shows.
    #[serde(flatten)]
    pub view: ReportView,
    /// What was found; what is well is left out.
    pub findings: Vec<Finding>,
}

/// Of findings only warnings and errors are kept: as JSON, and how many of each.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) fn kept(findings: &[Finding]) -> (String, usize, usize) {
    let kept: Vec<&Finding> =
        findings.iter().filter(|finding| finding.severity > Severity::Ok).take(KEPT_MAX).collect();
    let of = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    (crate::store::json(&kept), of(Severity::Warning), of(Severity::Error))
}

/// A report keeps so many findings; the rest is counted.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
const KEPT_MAX: usize = 1_000;

/// The store's side.
#[async_trait]
pub trait Integrity: Send + Sync {
    /// Looks for stale events, leases and retries that are stuck, inbox rows beyond their retention, held messages and dead
    /// letters that contradict the inbox or that nobody can ever replay, missing partitions. One finding for each thing
    /// that was checked, also where all is well. Reads through indexes and in bounded pieces.
    async fn integrity_findings(&self, limits: &Limits) -> Result<Vec<Finding>>;

    /// Runs a query of the user's in a transaction that cannot write, for at most `timeout`, and returns up to `limit` rows
    /// as texts (`column=value, …`).
    async fn integrity_query(&self, sql: &str, timeout: Duration, limit: usize) -> Result<Vec<String>>;

    /// Begins a report. A scheduled one has the time it was scheduled for and is begun once across all instances: `None`
    /// when it was begun already. One that has not ended [`ABANDONED_AFTER`] its beginning is begun anew: whoever began it
    /// has died.
    async fn report_begin(&self, actor: &str, scheduled_for: Option<DateTime<Utc>>) -> Result<Option<i64>>;

    /// Ends it. `checks` is how many things were looked at; of `findings` only warnings and errors are kept.
    async fn report_end(&self, id: i64, checks: u32, findings: &[Finding]) -> Result<()>;

    /// Reports with numbers below `before` (all, if none), newest first.
    async fn reports(&self, before: Option<i64>, limit: usize) -> Result<Vec<ReportView>>;

    /// One of them, or none.
    async fn report(&self, id: i64) -> Result<Option<Report>>;
}
