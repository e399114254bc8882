//! Figures as they change, for charts.

use std::collections::BTreeMap;

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use super::{Sum, Window};
use crate::pulse::{Bucket, Metric};

/// The figures of each step of a window.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Series {
    /// The time between two steps.
    pub step_secs: u64,
    /// When each step begins; the last one is under way.
    pub at: Vec<DateTime<Utc>>,
    /// All groups together.
    pub all: Points,
    /// Each of them, by name.
    pub groups: Vec<GroupSeries>,
}

/// The figures of one group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupSeries {
    /// Its name.
    pub group: String,
    /// Its figures.
    #[serde(flatten)]
    pub points: Points,
}

/// Figures, one for each step.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Points {
    /// Events confirmed by the broker.
    pub published: Vec<u64>,
    /// Failed attempts to publish.
    pub publish_failed: Vec<u64>,
    /// Events whose effect was committed.
    pub applied: Vec<u64>,
    /// Failed attempts to apply.
    pub failed: Vec<u64>,
    /// Messages given up.
    pub dead: Vec<u64>,
    /// The mean latency in milliseconds; none where nothing was applied.
    pub mean_ms: Vec<Option<f64>>,
    /// Half were faster.
    pub p50_ms: Vec<Option<f64>>,
    /// 95 of 100 were faster.
    pub p95_ms: Vec<Option<f64>>,
    /// 99 of 100 were faster.
    pub p99_ms: Vec<Option<f64>>,
    /// Failed attempts of all attempts; none where there were none.
    pub error_rate: Vec<Option<f64>>,
}

impl Series {
    /// The steps of a window that ends at `now`, the store's time. `buckets` are those of [`Window::width`]; older ones are
    /// left out.
    pub fn of(now: DateTime<Utc>, window: Window, buckets: &[Bucket]) -> Self {
        let (from, steps) = (window.begins(now), window.steps());
        let step_secs = window.step().as_secs();
        let mut sums: BTreeMap<&str, Vec<Sum>> = BTreeMap::new();
        let mut all = vec![Sum::default(); steps];
        for bucket in buckets.iter().filter(|bucket| bucket.at >= from) {
            let step = ((bucket.at - from).num_seconds() as u64 / step_secs) as usize;
            // A bucket from after `now` belongs to the step that is under way.
            let step = step.min(steps - 1);
            all[step].add(bucket);
            sums.entry(&bucket.group).or_insert_with(|| vec![Sum::default(); steps])[step].add(bucket);
        }
        let at = (0..steps).map(|step| from + TimeDelta::seconds((step as u64 * step_secs) as i64)).collect();
        let group =
            |(group, sums): (&str, Vec<Sum>)| GroupSeries { group: group.to_owned(), points: Points::of(&sums) };
        Self { step_secs, at, all: Points::of(&all), groups: sums.into_iter().map(group).collect() }
    }
}

impl Points {
    fn of(sums: &[Sum]) -> Self {
        let counts = |metric: Metric| sums.iter().map(|sum| sum.of(metric)).collect();
        let ms = |share| sums.iter().map(|sum| sum.percentile_ms(share)).collect();
        Self {
            published: counts(Metric::Published),
            publish_failed: counts(Metric::PublishFailed),
            applied: counts(Metric::Applied),
            failed: counts(Metric::Failed),
            dead: counts(Metric::Dead),
            mean_ms: sums.iter().map(Sum::mean_ms).collect(),
            p50_ms: ms(0.5),
            p95_ms: ms(0.95),
            p99_ms: ms(0.99),
            error_rate: sums.iter().map(|sum| sum.figures(1.0).error_rate).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{at, bucket};
    use super::*;

    #[test]
    fn minutes_become_the_points_of_an_hour() {
        let now = at("2026-01-01T12:00:30Z");
        let buckets = [
            bucket("2026-01-01T11:00:00Z", "relay/default", Metric::Published, "", 9), // an hour and a half minute ago
            bucket("2026-01-01T11:01:00Z", "relay/default", Metric::Published, "", 1),
            bucket("2026-01-01T12:00:00Z", "relay/default", Metric::Published, "", 2),
            bucket("2026-01-01T12:00:00Z", "relay/default", Metric::PublishFailed, "unavailable", 6),
            bucket("2026-01-01T12:01:00Z", "consumer/a", Metric::Applied, "", 3), // the store's clock went on
            bucket("2026-01-01T12:00:00Z", "consumer/a", Metric::Latency, "0", 3),
            bucket("2026-01-01T12:00:00Z", "consumer/a", Metric::LatencyMs, "", 3),
        ];
        let series = Series::of(now, Window::Hour, &buckets);
        assert_eq!((series.at.len(), series.step_secs), (60, 60));
        assert_eq!((series.at[0], series.at[59]), (at("2026-01-01T11:01:00Z"), at("2026-01-01T12:00:00Z")));
        let relay = &series.groups[1].points;
        assert_eq!((relay.published[0], relay.published[59], relay.published.len()), (1, 2, 60));
        assert_eq!((relay.error_rate[0], relay.error_rate[1], relay.error_rate[59]), (Some(0.0), None, Some(0.75)));
        let consumer = &series.groups[0].points;
        assert_eq!((consumer.applied[59], consumer.mean_ms[59], consumer.mean_ms[58]), (3, Some(1.0), None));
        assert_eq!((consumer.p99_ms[59], series.all.applied[59], series.all.published[59]), (Some(1.0), 3, 2));
    }

    #[test]
    fn minutes_are_merged_for_a_day_and_hours_for_a_month() {
        let now = at("2026-01-31T12:07:00Z");
        let minutes: Vec<_> = (0..30)
            .map(|minute| bucket(&format!("2026-01-31T11:{minute:02}:00Z"), "r", Metric::Published, "", 1))
            .collect();
        let day = Series::of(now, Window::Day, &minutes);
        assert_eq!((day.at.len(), day.at[95]), (96, at("2026-01-31T12:00:00Z")));
        assert_eq!(day.all.published[91..], [15, 15, 0, 0, 0]);
        let hours: Vec<_> = (0..24)
            .map(|hour| bucket(&format!("2026-01-30T{hour:02}:00:00Z"), "r", Metric::Published, "", 2))
            .collect();
        let month = Series::of(now, Window::Month, &hours);
        assert_eq!((month.at.len(), month.at[29]), (30, at("2026-01-31T00:00:00Z")));
        assert_eq!(month.all.published[27..], [0, 48, 0]);
    }
}
