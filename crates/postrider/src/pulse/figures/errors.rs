//! Error statistics (O3): by type, by group, as a rate, and against the time before.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use super::{Sum, Window, begin, part};
use crate::pulse::{Bucket, HOURS_KEPT, Metric, Width};

/// What failed in a window. What is *before* happened in the window before it, and is none where that is not kept.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Errors {
    /// The end of the window.
    pub now: DateTime<Utc>,
    /// Its length.
    pub window_secs: u64,
    /// Failed attempts, to publish and to apply.
    pub total: u64,
    /// The same before.
    pub total_before: Option<u64>,
    /// Failed attempts of all attempts; none if there were none.
    pub rate: Option<f64>,
    /// The same before.
    pub rate_before: Option<f64>,
    /// The most frequent type first.
    pub by_type: Vec<TypeErrors>,
    /// The worst group first: the one with the highest rate.
    pub by_group: Vec<GroupErrors>,
    /// Each count by itself, the highest first.
    pub items: Vec<ErrorCount>,
    /// When each step of the series begins.
    pub at: Vec<DateTime<Utc>>,
    /// Failed attempts of each step.
    pub series: Vec<u64>,
    /// Failed attempts of all attempts of each step.
    pub rates: Vec<Option<f64>>,
}

/// One type of error.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TypeErrors {
    /// The type: a kind of error, or what a handler's failure was (`timeout`, `http_503` …).
    pub error_type: String,
    /// Failed attempts.
    pub count: u64,
    /// The same before.
    pub before: Option<u64>,
    /// Of all failed attempts.
    pub share: f64,
}

/// The errors of one group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupErrors {
    /// Its name.
    pub group: String,
    /// Failed attempts.
    pub count: u64,
    /// The same before.
    pub before: Option<u64>,
    /// Failed attempts of all attempts; none if there were none.
    pub rate: Option<f64>,
    /// The same before.
    pub rate_before: Option<f64>,
    /// Messages given up.
    pub dead: u64,
}

/// One type of error of one group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ErrorCount {
    /// The group.
    pub group: String,
    /// The type.
    pub error_type: String,
    /// `failed`, `publish_failed` or `dead`.
    pub metric: Metric,
    /// How many.
    pub count: u64,
    /// The same before.
    pub before: Option<u64>,
}

const METRICS: [Metric; 5] = [Metric::Published, Metric::PublishFailed, Metric::Applied, Metric::Failed, Metric::Dead];

impl Errors {
    /// The buckets to ask the store for: those of the window and of the one before it, as far as they are kept.
    pub fn wanted(window: Window) -> (Width, Duration, &'static [Metric]) {
        let width = match window {
            Window::Hour => Width::Minute,
            // Minutes are not kept for two days.
            Window::Day | Window::Month => Width::Hour,
        };
        (width, (2 * window.length()).min(HOURS_KEPT), &METRICS)
    }

    /// What failed in a window that ends at `now`, the store's time.
    pub fn of(now: DateTime<Utc>, window: Window, buckets: &[Bucket]) -> Self {
        let step = match window {
            Window::Day => Duration::from_secs(60 * 60),
            Window::Hour | Window::Month => window.step(),
        };
        let from = begin(now, window.length(), step);
        let steps = (window.length().as_secs() / step.as_secs()) as usize;
        let before = from - window.length();
        let is_before_kept = 2 * window.length() <= HOURS_KEPT;

        let mut all = Both::default();
        let mut by_step = vec![Sum::default(); steps];
        let mut groups: BTreeMap<&str, Both> = BTreeMap::new();
        let mut items: BTreeMap<(&str, &str, Metric), (u64, u64)> = BTreeMap::new();
        for bucket in buckets.iter().filter(|bucket| bucket.at >= before) {
            let is_now = bucket.at >= from;
            all.add(bucket, is_now);
            groups.entry(&bucket.group).or_default().add(bucket, is_now);
            if is_now {
                let number = ((bucket.at - from).num_seconds() as u64 / step.as_secs()) as usize;
                by_step[number.min(steps - 1)].add(bucket);
            }
            if matches!(bucket.metric, Metric::Failed | Metric::PublishFailed | Metric::Dead) {
                let (now, before) = items.entry((&bucket.group, &bucket.label, bucket.metric)).or_default();
                *(if is_now { now } else { before }) += bucket.count;
            }
        }
        let kept = |count: u64| is_before_kept.then_some(count);
        let total = failures(&all.now);
        Self {
            now,
            window_secs: window.length().as_secs(),
            total,
            total_before: kept(failures(&all.before)),
            rate: rate(&all.now),
            rate_before: rate(&all.before).filter(|_| is_before_kept),
            by_type: by_type(&items, total, kept),
            by_group: by_group(groups, is_before_kept),
            items: by_count(&items, kept),
            at: (0..steps).map(|number| from + TimeDelta::seconds((number as u64 * step.as_secs()) as i64)).collect(),
            series: by_step.iter().map(failures).collect(),
            rates: by_step.iter().map(rate).collect(),
        }
    }
}

type Items<'a> = BTreeMap<(&'a str, &'a str, Metric), (u64, u64)>;

fn by_type(items: &Items<'_>, total: u64, kept: impl Fn(u64) -> Option<u64>) -> Vec<TypeErrors> {
    let mut types: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for ((_, error_type, _), (now, before)) in items.iter().filter(|((_, _, metric), _)| *metric != Metric::Dead) {
        let sums = types.entry(error_type).or_default();
        *sums = (sums.0 + now, sums.1 + before);
    }
    let mut types: Vec<TypeErrors> = types
        .into_iter()
        .filter(|(_, (now, _))| *now > 0)
        .map(|(error_type, (count, before))| TypeErrors {
            error_type: error_type.to_owned(),
            count,
            before: kept(before),
            share: part(count, total).unwrap_or_default(),
        })
        .collect();
    // Stable: types with the same count stay in the order of their names.
    types.sort_by_key(|found| std::cmp::Reverse(found.count));
    types
}

fn by_group(groups: BTreeMap<&str, Both>, is_before_kept: bool) -> Vec<GroupErrors> {
    let mut groups: Vec<GroupErrors> = groups
        .into_iter()
        .map(|(group, Both { now, before })| GroupErrors {
            group: group.to_owned(),
            count: failures(&now),
            before: is_before_kept.then(|| failures(&before)),
            rate: rate(&now),
            rate_before: rate(&before).filter(|_| is_before_kept),
            dead: now.of(Metric::Dead),
        })
        .collect();
    groups.sort_by(|a, b| b.rate.unwrap_or_default().total_cmp(&a.rate.unwrap_or_default()));
    groups
}

fn by_count(items: &Items<'_>, kept: impl Fn(u64) -> Option<u64>) -> Vec<ErrorCount> {
    let mut counts: Vec<ErrorCount> = items
        .iter()
        .filter(|(_, (now, _))| *now > 0)
        .map(|((group, error_type, metric), (count, before))| ErrorCount {
            group: (*group).to_owned(),
            error_type: (*error_type).to_owned(),
            metric: *metric,
            count: *count,
            before: kept(*before),
        })
        .collect();
    counts.sort_by_key(|found| std::cmp::Reverse(found.count));
    counts
}

/// A window and the one before it.
#[derive(Default)]
struct Both {
    now: Sum,
    before: Sum,
}

impl Both {
    fn add(&mut self, bucket: &Bucket, is_now: bool) {
        if is_now { self.now.add(bucket) } else { self.before.add(bucket) }
    }
}

fn failures(sum: &Sum) -> u64 {
    sum.of(Metric::Failed) + sum.of(Metric::PublishFailed)
}

fn rate(sum: &Sum) -> Option<f64> {
    part(failures(sum), failures(sum) + sum.of(Metric::Applied) + sum.of(Metric::Published))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{at, bucket};
    use super::*;

    #[test]
    fn errors_are_told_by_type_and_group_and_against_the_hour_before() {
        let (a, b) = ("consumer/a", "consumer/b");
        let buckets = [
            bucket("2026-01-01T10:00:00Z", a, Metric::Failed, "old", 100), // before both
            bucket("2026-01-01T10:01:00Z", a, Metric::Failed, "timeout", 1),
            bucket("2026-01-01T10:01:00Z", a, Metric::Applied, "", 99),
            bucket("2026-01-01T11:00:00Z", b, Metric::Failed, "gone", 4),
            bucket("2026-01-01T11:01:00Z", a, Metric::Failed, "timeout", 2),
            bucket("2026-01-01T11:30:00Z", a, Metric::Applied, "", 98),
            bucket("2026-01-01T12:00:00Z", b, Metric::Failed, "handler", 5),
            bucket("2026-01-01T12:00:00Z", b, Metric::Failed, "timeout", 1),
            bucket("2026-01-01T12:00:00Z", b, Metric::Applied, "", 4),
            bucket("2026-01-01T12:00:00Z", b, Metric::Dead, "handler", 3),
        ];
        let errors = Errors::of(at("2026-01-01T12:00:30Z"), Window::Hour, &buckets);
        assert_eq!((errors.at[0], errors.total, errors.rate), (at("2026-01-01T11:01:00Z"), 8, Some(8.0 / 110.0)));
        assert_eq!((errors.total_before, errors.rate_before), (Some(5), Some(5.0 / 104.0)));
        let types: Vec<_> = errors.by_type.iter().map(|t| (t.error_type.as_str(), t.count, t.before)).collect();
        assert_eq!(types, [("handler", 5, Some(0)), ("timeout", 3, Some(1))], "what is over is not listed");
        assert_eq!(errors.by_type[1].share, 3.0 / 8.0);
        let groups: Vec<_> = errors.by_group.iter().map(|g| (g.group.as_str(), g.count, g.rate, g.dead)).collect();
        assert_eq!(groups, [(b, 6, Some(0.6), 3), (a, 2, Some(0.02), 0)], "the worst first");
        assert_eq!((errors.by_group[0].before, errors.by_group[1].rate_before), (Some(4), Some(0.01)));
        let items: Vec<_> = errors.items.iter().map(|i| (i.group.as_str(), i.error_type.as_str(), i.count)).collect();
        assert_eq!(items, [(b, "handler", 5), (b, "handler", 3), (a, "timeout", 2), (b, "timeout", 1)]);
        assert_eq!((errors.items[1].metric, errors.items[2].before), (Metric::Dead, Some(1)));
        assert_eq!((errors.series.len(), errors.series[0], errors.series[59]), (60, 2, 6));
        assert_eq!((errors.rates[0], errors.rates[1], errors.rates[59]), (Some(1.0), None, Some(0.6)));
    }

    #[test]
    fn a_day_has_hours_and_a_month_has_nothing_before_it() {
        assert_eq!(Errors::wanted(Window::Hour).1, Duration::from_secs(2 * 60 * 60));
        assert_eq!(Errors::wanted(Window::Day).1, Duration::from_secs(2 * 24 * 60 * 60));
        assert_eq!(Errors::wanted(Window::Month).1, HOURS_KEPT);
        let buckets = [
            bucket("2026-01-30T12:00:00Z", "a", Metric::Failed, "x", 7),
            bucket("2026-01-30T13:00:00Z", "a", Metric::Failed, "x", 1),
            bucket("2026-01-31T12:00:00Z", "a", Metric::PublishFailed, "denied", 2),
        ];
        let now = at("2026-01-31T12:30:00Z");
        let day = Errors::of(now, Window::Day, &buckets);
        assert_eq!((day.total, day.total_before, day.at.len()), (3, Some(7), 24));
        assert_eq!((day.series[0], day.series[23]), (1, 2));
        let month = Errors::of(now, Window::Month, &buckets);
        assert_eq!((month.total, month.total_before, month.rate_before, month.at.len()), (10, None, None, 30));
        assert_eq!(month.series[28..], [8, 2]);
        assert_eq!(month.by_type[0].before, None);
    }
}
