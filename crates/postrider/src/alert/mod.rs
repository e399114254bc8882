//! Alerts: what is wrong now, since when, and who was told.
//!
//! Rules are pure functions from measurements to conditions. One instance at a time, chosen by a lease, gives all
//! conditions that hold to [`Alerts::alerts_update`], which opens and resolves alerts and writes down whom to tell, in one
//! transaction. So an alert is told once across instances and restarts, and telling it can be tried again.

use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::error::{Error, Kind, Result};

#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) mod plan;

mod measure;
mod rules;
mod steady;

pub use measure::{CertificateMeasure, FreeSlot, GroupMeasure, HOUR, Measurements, OutboxMeasure, RECENT, groups};
pub use rules::{RULES, STORE_UNREACHABLE, Thresholds, evaluate, store_unreachable};
pub use steady::{LINGER, Since, Steady};

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Urgency {
    /// Look at it today.
    Warning,
    /// Look at it now.
    Critical,
}

impl Urgency {
    /// The word in the database and in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Urgency::Warning => "warning",
            Urgency::Critical => "critical",
        }
    }
}

impl FromStr for Urgency {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "warning" => Ok(Urgency::Warning),
            "critical" => Ok(Urgency::Critical),
            _ => Err(Error::new(Kind::Corrupt, format!("there is no urgency {word:?}"))),
        }
    }
}

/// Something that is wrong now. Rule and subject together say which: while they are given again, it is one alert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The rule: `breaker_open`, `latency` …
    pub rule: String,
    /// What it is about: `relay/default`, `consumer/billing`; empty for all together.
    pub subject: String,
    /// How bad.
    pub urgency: Urgency,
    /// What is wrong, with the figure and its threshold. No payload, no key.
    pub summary: String,
    /// What to do.
    pub remedy: String,
}

/// An alert.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Alert {
    /// Its number.
    pub id: i64,
    /// The rule.
    pub rule: String,
    /// What it is about.
    pub subject: String,
    /// How bad.
    pub urgency: Urgency,
    /// What is wrong; of one that is over, what was last.
    pub summary: String,
    /// What to do.
    pub remedy: String,
    /// Since when.
    pub fired_at: DateTime<Utc>,
    /// Until when; none while it holds.
    pub resolved_at: Option<DateTime<Utc>>,
    /// Whether a silence covers it now.
    pub silenced: bool,
}

/// Nobody is told of these alerts until then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Silence {
    /// Its number.
    pub id: i64,
    /// The rule; empty for all.
    pub rule: String,
    /// The subject; empty for all.
    pub subject: String,
    /// Until when.
    pub until: DateTime<Utc>,
    /// Why.
    pub reason: String,
    /// Who said so.
    pub actor: String,
}

/// A message that is to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// Its number; the same at every try, so that a receiver can tell it.
    pub id: i64,
    /// The sink, by its name.
    pub sink: String,
    /// How often telling it failed already.
    pub failures: u32,
    /// The alert; resolved if `resolved_at` is there.
    pub alert: Alert,
}

/// The store's side.
#[async_trait]
pub trait Alerts: Send + Sync {
    /// Takes over what is wrong now. Opens an alert for every condition that has none, brings the text of open ones up to
    /// date, and resolves those whose condition is not given any more. For every one that was opened or resolved, and that
    /// no silence covers, writes a delivery for each of `sinks` (a resolution only where its firing was told). An alert
    /// that is open when its silence ends is told then. All in one transaction; returns the alerts that changed.
    async fn alerts_update(&self, conditions: &[Condition], sinks: &[String]) -> Result<Vec<Alert>>;

    /// Alerts with numbers below `before` (all, if none), newest first; `open` ones alone, or all.
    async fn alerts(&self, is_open_only: bool, before: Option<i64>, limit: usize) -> Result<Vec<Alert>>;

    /// How many alerts were resolved in the last 30 days, and how long they lasted in the mean.
    async fn alerts_mended(&self) -> Result<(u64, Option<Duration>)>;

    /// Deliveries whose time has come, oldest first; a later one of the same alert and sink waits behind the earlier. What
    /// is returned is not returned to others for `hold`.
    async fn deliveries_due(&self, limit: usize, hold: Duration) -> Result<Vec<Delivery>>;

    /// It was told, or is given up: forgotten.
    async fn delivered(&self, id: i64) -> Result<()>;

    /// It could not be told; it is due again after `delay`.
    async fn delivery_failed(&self, id: i64, error: &str, delay: Duration) -> Result<()>;

    /// Silences alerts for a time; audited. Returns its number.
    async fn silence(&self, rule: &str, subject: &str, length: Duration, reason: &str, actor: &str) -> Result<i64>;

    /// Ends a silence; audited. Whether there was one.
    async fn unsilence(&self, id: i64, actor: &str) -> Result<bool>;

    /// Those that have not ended.
    async fn silences(&self) -> Result<Vec<Silence>>;
}
