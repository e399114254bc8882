//! The pulse: what every instance tells the store every few seconds. That it lives, whether its breaker lets anything
//! through, and what it has counted since it told last.
//!
//! Counts are added up in the store in buckets of a minute, a quarter of an hour and an hour, by the database's clock. They are what the
//! console, the error statistics and the alerts read: nobody counts events to learn how many there were. An instance that
//! dies takes the counts of its last seconds with it; events are never lost by that, only their being counted.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::error::{Error, Kind, Result};

pub mod figures;
mod heart;
pub mod latency;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod sums;
mod tally;

pub use heart::{Beating, Heart};
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) use sums::sums;
pub use tally::{OTHER, Tally};

/// How long buckets of a minute are kept.
pub const MINUTES_KEPT: Duration = Duration::from_secs(3 * 60 * 60);
/// How long buckets of a quarter of an hour are kept.
pub const QUARTERS_KEPT: Duration = Duration::from_secs(26 * 60 * 60);
/// How long buckets of an hour are kept, and alerts that are over, reports and audit lines with them.
pub const HOURS_KEPT: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// How long an instance that went without a word is remembered.
pub const LOST_KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// How often an instance tells.
pub const EVERY: Duration = Duration::from_secs(5);

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Events confirmed by the broker.
    Published,
    /// Attempts to publish that failed; the label is the kind of the error.
    PublishFailed,
    /// Events whose effect was committed.
    Applied,
    /// Deliveries of events that were applied before.
    Duplicate,
    /// Events of a type that nobody handles.
    Skipped,
    /// Attempts to apply that failed; the label is the type of the error.
    Failed,
    /// Messages given up; the label is the type of the error.
    Dead,
    /// Dead letters that were replayed; the label is `applied` or `failed`.
    Replayed,
    /// How long an event took from its creation to its effect; the label is a bucket (see the module `latency`), the
    /// count how many events fell into it.
    Latency,
    /// The sum of those times, in milliseconds.
    LatencyMs,
}

impl Metric {
    /// All of them.
    pub const ALL: [Metric; 10] = [
        Metric::Published,
        Metric::PublishFailed,
        Metric::Applied,
        Metric::Duplicate,
        Metric::Skipped,
        Metric::Failed,
        Metric::Dead,
        Metric::Replayed,
        Metric::Latency,
        Metric::LatencyMs,
    ];

    /// The word in the database and in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Metric::Published => "published",
            Metric::PublishFailed => "publish_failed",
            Metric::Applied => "applied",
            Metric::Duplicate => "duplicate",
            Metric::Skipped => "skipped",
            Metric::Failed => "failed",
            Metric::Dead => "dead",
            Metric::Replayed => "replayed",
            Metric::Latency => "latency",
            Metric::LatencyMs => "latency_ms",
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Metric {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        let found = Metric::ALL.into_iter().find(|metric| metric.as_str() == word);
        found.ok_or_else(|| Error::new(Kind::Corrupt, format!("there is no metric {word:?}")))
    }
}

/// So many of one thing since the last pulse.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Count {
    /// Of what.
    pub metric: Metric,
    /// Which of them: an error's type, a bucket; empty where there is only one.
    pub label: String,
    /// How many.
    pub count: u64,
}

/// What an instance tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulse {
    /// What it takes part in: `relay/default`, `consumer/billing`.
    pub group: String,
    /// Its name, as in its leases. Empty for counts that belong to no instance, of a replay from the command line for
    /// example: they are added, and no instance is heard of.
    pub owner: String,
    /// Its version of Postrider.
    pub version: String,
    /// Why its breaker lets nothing through; none while it does.
    pub breaker: Option<String>,
    /// What it has counted since its last pulse.
    pub counts: Vec<Count>,
}

/// An instance as the console shows it. All ages are by the database's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Instance {
    /// What it takes part in.
    pub group: String,
    /// Its name.
    pub owner: String,
    /// Its version of Postrider.
    pub version: String,
    /// When it was first heard of.
    pub started_at: DateTime<Utc>,
    /// How long ago it was last heard of.
    pub silent_secs: u64,
    /// Why its breaker lets nothing through; none while it does.
    pub breaker: Option<String>,
    /// For how long it has been so.
    pub breaker_secs: Option<u64>,
    /// The slots (of a relay: lanes) that it holds.
    pub slots: Vec<u32>,
}

impl Instance {
    /// Whether it went without a word: a pulse comes every five seconds, and an orderly end withdraws the instance.
    pub fn is_lost(&self) -> bool {
        self.silent_secs >= 30
    }
}

/// The width of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// Kept for three hours.
    Minute,
    /// A quarter of an hour, kept for a day.
    Quarter,
    /// Kept for 30 days.
    Hour,
}

impl Width {
    /// Its length.
    pub fn secs(self) -> u32 {
        match self {
            Width::Minute => 60,
            Width::Quarter => 900,
            Width::Hour => 3600,
        }
    }
}

/// A count as it stands in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// When it begins.
    pub at: DateTime<Utc>,
    /// Whose count: `relay/default`, `consumer/billing`.
    pub group: String,
    /// Of what.
    pub metric: Metric,
    /// Which of them.
    pub label: String,
    /// How many.
    pub count: u64,
}

/// The store's side.
#[async_trait]
pub trait Pulses: Send + Sync {
    /// Takes a pulse: the instance lives, and its counts are added to the buckets of this minute, quarter and hour, all or
    /// nothing. A reply that is lost may count twice; that is the price of never waiting.
    async fn pulse(&self, pulse: &Pulse) -> Result<()>;

    /// An orderly end: the instance is forgotten. Its counts stay.
    async fn withdraw(&self, group: &str, owner: &str) -> Result<()>;

    /// All that are known, those that went without a word too (for a day). By group, then owner.
    async fn instances(&self) -> Result<Vec<Instance>>;

    /// The buckets of `width` that begin within the last `window` by the database's clock, oldest first. `metrics` empty
    /// means all. Also says the database's time, so that charts have a right end.
    async fn buckets(&self, width: Width, window: Duration, metrics: &[Metric])
    -> Result<(DateTime<Utc>, Vec<Bucket>)>;
}
