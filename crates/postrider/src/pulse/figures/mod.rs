//! From buckets to what people read: throughput, latency, error rate, targets, errors by type. Pure functions; the
//! console, the alerts and the command line show the same figures because they ask here.
//!
//! An *attempt* is one try to publish or to apply. What is *done* was published or applied. Rates are parts of one:
//! - error rate: failed attempts of all attempts;
//! - success share: the rest of them;
//! - dead share: what was given up, of all that was decided (done or given up).

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use super::latency::{self, BUCKETS};
use super::{Bucket, Metric, Width};
use crate::error::{Error, Kind, Result};

mod errors;
mod series;
mod targets;

pub use errors::{ErrorCount, Errors, GroupErrors, TypeErrors};
pub use series::{GroupSeries, Points, Series};
pub use targets::{Target, Unit, targets};

/// How far back people look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Window {
    /// Sixty steps of a minute.
    Hour,
    /// Ninety-six steps of 15 minutes.
    Day,
    /// Thirty steps of a day, which begins at midnight UTC.
    Month,
}

impl Window {
    /// The word in a query.
    pub fn as_str(self) -> &'static str {
        match self {
            Window::Hour => "hour",
            Window::Day => "day",
            Window::Month => "month",
        }
    }

    /// The buckets to ask the store for.
    pub fn width(self) -> Width {
        match self {
            Window::Hour => Width::Minute,
            Window::Day => Width::Quarter,
            Window::Month => Width::Hour,
        }
    }

    /// Its length.
    pub fn length(self) -> Duration {
        match self {
            Window::Hour => Duration::from_secs(60 * 60),
            Window::Day => Duration::from_secs(24 * 60 * 60),
            Window::Month => Duration::from_secs(30 * 24 * 60 * 60),
        }
    }

    /// The time between two points of a chart.
    pub fn step(self) -> Duration {
        match self {
            Window::Hour => Duration::from_secs(60),
            Window::Day => Duration::from_secs(15 * 60),
            Window::Month => Duration::from_secs(24 * 60 * 60),
        }
    }

    /// When its first step begins; its last one is under way.
    pub fn begins(self, now: DateTime<Utc>) -> DateTime<Utc> {
        begin(now, self.length(), self.step())
    }

    fn steps(self) -> usize {
        (self.length().as_secs() / self.step().as_secs()) as usize
    }
}

impl FromStr for Window {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        let found = [Window::Hour, Window::Day, Window::Month].into_iter().find(|window| window.as_str() == word);
        found.ok_or_else(|| {
            Error::new(Kind::Invalid, format!("there is no window {word:?}")).with_remedy("say hour, day or month")
        })
    }
}

/// When the first of the steps begins that make up the last `length`, the one that is under way included.
pub fn begin(now: DateTime<Utc>, length: Duration, step: Duration) -> DateTime<Utc> {
    let step_secs = step.as_secs().max(1) as i64;
    let steps = (length.as_secs() as i64 / step_secs).max(1);
    floor(now, step_secs) - TimeDelta::seconds((steps - 1) * step_secs)
}

fn floor(at: DateTime<Utc>, step_secs: i64) -> DateTime<Utc> {
    let secs = at.timestamp();
    DateTime::from_timestamp(secs - secs.rem_euclid(step_secs), 0).unwrap_or(at)
}

/// The figures of a time, of each group and of all together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// From when.
    pub from: DateTime<Utc>,
    /// Until when.
    pub to: DateTime<Utc>,
    /// The seconds in between.
    pub window_secs: u64,
    /// All groups together.
    pub all: Figures,
    /// Each of them, by name.
    pub groups: Vec<GroupFigures>,
}

/// The figures of one group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupFigures {
    /// Its name: `consumer/billing`, `relay/default`.
    pub group: String,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Figures,
}

impl Summary {
    /// What was counted from `from` on. `to` is the store's time; see [`begin`] and [`Window::begins`] for `from`.
    pub fn of(from: DateTime<Utc>, to: DateTime<Utc>, buckets: &[Bucket]) -> Self {
        let secs = (to - from).as_seconds_f64().max(1.0);
        let mut groups: BTreeMap<&str, Sum> = BTreeMap::new();
        let mut all = Sum::default();
        for bucket in buckets.iter().filter(|bucket| bucket.at >= from) {
            all.add(bucket);
            groups.entry(&bucket.group).or_default().add(bucket);
        }
        let figures = |(group, sum): (&str, Sum)| GroupFigures { group: group.to_owned(), figures: sum.figures(secs) };
        let groups = groups.into_iter().map(figures).collect();
        Self { from, to, window_secs: secs as u64, all: all.figures(secs), groups }
    }

    /// The figures of one group; none if nothing was counted for it.
    pub fn group(&self, group: &str) -> Option<&Figures> {
        self.groups.iter().find(|figures| figures.group == group).map(|found| &found.figures)
    }
}

/// The figures of a time.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Events confirmed by the broker.
    pub published: u64,
    /// Failed attempts to publish.
    pub publish_failed: u64,
    /// Events whose effect was committed.
    pub applied: u64,
    /// Deliveries of events that were applied before.
    pub duplicates: u64,
    /// Events that nobody handles.
    pub skipped: u64,
    /// Failed attempts to apply.
    pub failed: u64,
    /// Messages given up.
    pub dead: u64,
    /// Replayed dead letters that were decided.
    pub replayed: u64,
    /// Those of them that were applied or published then.
    pub replayed_applied: u64,
    /// Published in a second, in the mean.
    pub published_per_sec: f64,
    /// Applied in a second, in the mean.
    pub applied_per_sec: f64,
    /// From an event's creation to its effect, in milliseconds: the mean. None if nothing was applied.
    pub latency_mean_ms: Option<f64>,
    /// Half were faster.
    pub latency_p50_ms: Option<f64>,
    /// 95 of 100 were faster.
    pub latency_p95_ms: Option<f64>,
    /// 99 of 100 were faster.
    pub latency_p99_ms: Option<f64>,
    /// Failed attempts of all attempts; none if there were none.
    pub error_rate: Option<f64>,
    /// Attempts that succeeded, of all attempts.
    pub success_share: Option<f64>,
    /// Given up, of all that was decided.
    pub dead_share: Option<f64>,
    /// Applied, of all replayed dead letters that were decided.
    pub replay_success_share: Option<f64>,
}

impl Figures {
    /// Published or applied.
    pub fn done(&self) -> u64 {
        self.published + self.applied
    }

    /// Attempts that failed.
    pub fn failures(&self) -> u64 {
        self.publish_failed + self.failed
    }

    /// All attempts.
    pub fn attempts(&self) -> u64 {
        self.done() + self.failures()
    }
}

/// Buckets of a time, added up.
#[derive(Clone)]
struct Sum {
    metrics: [u64; Metric::ALL.len()],
    replayed_applied: u64,
    latencies: [u64; BUCKETS],
}

impl Default for Sum {
    fn default() -> Self {
        Self { metrics: [0; Metric::ALL.len()], replayed_applied: 0, latencies: [0; BUCKETS] }
    }
}

impl Sum {
    fn add(&mut self, bucket: &Bucket) {
        self.metrics[bucket.metric as usize] += bucket.count;
        match bucket.metric {
            Metric::Latency => {
                let place = bucket.label.parse::<usize>().unwrap_or(BUCKETS - 1).min(BUCKETS - 1);
                self.latencies[place] += bucket.count;
            }
            Metric::Replayed if bucket.label == "applied" => self.replayed_applied += bucket.count,
            _ => {}
        }
    }

    fn of(&self, metric: Metric) -> u64 {
        self.metrics[metric as usize]
    }

    fn mean_ms(&self) -> Option<f64> {
        part(self.of(Metric::LatencyMs), self.of(Metric::Latency))
    }

    fn percentile_ms(&self, share: f64) -> Option<f64> {
        latency::percentile(&self.latencies, share).map(|latency| latency.as_secs_f64() * 1e3)
    }

    fn figures(&self, secs: f64) -> Figures {
        let replayed = self.of(Metric::Replayed);
        let mut figures = Figures {
            published: self.of(Metric::Published),
            publish_failed: self.of(Metric::PublishFailed),
            applied: self.of(Metric::Applied),
            duplicates: self.of(Metric::Duplicate),
            skipped: self.of(Metric::Skipped),
            failed: self.of(Metric::Failed),
            dead: self.of(Metric::Dead),
            replayed,
            replayed_applied: self.replayed_applied,
            published_per_sec: self.of(Metric::Published) as f64 / secs,
            applied_per_sec: self.of(Metric::Applied) as f64 / secs,
            latency_mean_ms: self.mean_ms(),
            latency_p50_ms: self.percentile_ms(0.5),
            latency_p95_ms: self.percentile_ms(0.95),
            latency_p99_ms: self.percentile_ms(0.99),
            replay_success_share: part(self.replayed_applied, replayed),
            ..Figures::default()
        };
        figures.error_rate = part(figures.failures(), figures.attempts());
        figures.success_share = part(figures.done(), figures.attempts());
        figures.dead_share = part(figures.dead, figures.done() + figures.dead);
        figures
    }
}

/// A part of a whole; none of nothing.
fn part(some: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| some as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn at(text: &str) -> DateTime<Utc> {
        text.parse().unwrap()
    }

    pub(super) fn bucket(time: &str, group: &str, metric: Metric, label: &str, count: u64) -> Bucket {
        Bucket { at: at(time), group: group.to_owned(), metric, label: label.to_owned(), count }
    }

    #[test]
    fn a_window_ends_with_the_step_that_is_under_way() {
        let now = at("2026-03-29T10:07:30Z");
        assert_eq!(Window::Hour.begins(now), at("2026-03-29T09:08:00Z"));
        assert_eq!(Window::Day.begins(now), at("2026-03-28T10:15:00Z"));
        assert_eq!(Window::Month.begins(now), at("2026-02-28T00:00:00Z"));
        assert_eq!("day".parse::<Window>().unwrap(), Window::Day);
        assert_eq!("week".parse::<Window>().unwrap_err().remedy(), "say hour, day or month");
        assert_eq!(begin(now, Duration::from_secs(300), Duration::from_secs(60)), at("2026-03-29T10:03:00Z"));
    }

    #[test]
    fn every_metric_has_its_own_place() {
        for (place, metric) in Metric::ALL.into_iter().enumerate() {
            assert_eq!(metric as usize, place);
        }
    }

    #[test]
    fn a_summary_has_the_figures_of_each_group_and_of_all() {
        let (relay, billing) = ("relay/default", "consumer/billing");
        let buckets = [
            bucket("2026-01-01T00:00:00Z", relay, Metric::Published, "", 7_777), // before
            bucket("2026-01-01T00:01:00Z", relay, Metric::Published, "", 1_000),
            bucket("2026-01-01T00:02:00Z", relay, Metric::Published, "", 200),
            bucket("2026-01-01T00:01:00Z", billing, Metric::Applied, "", 90),
            bucket("2026-01-01T00:01:00Z", billing, Metric::Failed, "handler", 8),
            bucket("2026-01-01T00:02:00Z", billing, Metric::Failed, "timeout", 2),
            bucket("2026-01-01T00:02:00Z", billing, Metric::Dead, "handler", 10),
            bucket("2026-01-01T00:01:00Z", billing, Metric::Latency, "2", 90),
            bucket("2026-01-01T00:01:00Z", billing, Metric::LatencyMs, "", 180),
            bucket("2026-01-01T00:02:00Z", billing, Metric::Replayed, "applied", 3),
            bucket("2026-01-01T00:02:00Z", billing, Metric::Replayed, "failed", 1),
        ];
        let summary = Summary::of(at("2026-01-01T00:01:00Z"), at("2026-01-01T00:03:00Z"), &buckets);
        assert_eq!(summary.groups.len(), 2);
        let relay = summary.group(relay).unwrap();
        assert_eq!((relay.published, relay.published_per_sec), (1200, 10.0));
        assert_eq!((relay.error_rate, relay.dead_share, relay.latency_p99_ms), (Some(0.0), Some(0.0), None));
        let billing = summary.group(billing).unwrap();
        assert_eq!((billing.applied, billing.failed, billing.dead), (90, 10, 10));
        assert_eq!((billing.error_rate, billing.success_share), (Some(0.1), Some(0.9)));
        assert_eq!((billing.dead_share, billing.applied_per_sec), (Some(0.1), 0.75));
        assert_eq!((billing.replayed, billing.replayed_applied), (4, 3));
        assert_eq!(billing.replay_success_share, Some(0.75));
        assert_eq!((billing.latency_mean_ms, billing.latency_p50_ms), (Some(2.0), Some(1.707)));
        assert_eq!(summary.window_secs, 120);
        assert_eq!(summary.all.attempts(), 1300);
        assert_eq!(summary.all.error_rate, Some(10.0 / 1300.0));
        let none = Summary::of(at("2026-01-01T00:05:00Z"), at("2026-01-01T00:05:00Z"), &buckets);
        assert_eq!((none.all, none.groups.len()), (Figures::default(), 0));
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["groups"][0]["group"], "consumer/billing");
        assert_eq!(json["groups"][0]["applied"], 90);
        assert_eq!(json["groups"][1]["latency_p99_ms"], serde_json::Value::Null);
    }
}
