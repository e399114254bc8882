//! What the rules look at: figures, read every few seconds by the one instance that watches.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::integrity::ReportView;
use crate::pulse::{Bucket, Instance, Metric, latency};
use crate::upkeep::{Backlog, ConsumerView};

/// Over how long error rate, latency and refusals are looked at.
pub const RECENT: Duration = Duration::from_secs(5 * 60);
/// Over how long dead letters are counted.
pub const HOUR: Duration = Duration::from_secs(60 * 60);

/// Everything that is known at one moment.
#[derive(Debug, Clone, Default)]
pub struct Measurements {
    /// By the database's clock.
    pub now: DateTime<Utc>,
    /// The outbox of every destination, and adopted tables.
    pub outboxes: Vec<OutboxMeasure>,
    /// All consumers that the store has heard of.
    pub consumers: Vec<ConsumerView>,
    /// All instances, those that went without a word too.
    pub instances: Vec<Instance>,
    /// What every group has counted lately.
    pub groups: Vec<GroupMeasure>,
    /// Slots that nobody holds.
    pub free_slots: Vec<FreeSlot>,
    /// Certificates of servers that this instance can see.
    pub certificates: Vec<CertificateMeasure>,
    /// The last report of the integrity check that has ended.
    pub report: Option<ReportView>,
    /// Rule and subject of the alerts that are open: some stay open until their figure is clearly below the threshold.
    pub open: HashSet<(String, String)>,
}

/// How much waits in one outbox.
#[derive(Debug, Clone, Default)]
pub struct OutboxMeasure {
    /// `relay/default`.
    pub group: String,
    /// What waits.
    pub backlog: Backlog,
    /// For how long something was waiting at every look.
    pub waiting: Duration,
}

/// What one relay or consumer has counted, all its instances together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupMeasure {
    /// `relay/default`, `consumer/billing`.
    pub group: String,
    /// Attempts within [`RECENT`], good and bad.
    pub attempts: u64,
    /// How many of them failed.
    pub failures: u64,
    /// How many of them failed because of a missing right or a wrong password.
    pub denied: u64,
    /// Events given up within [`HOUR`].
    pub dead: u64,
    /// Events published or applied within the time that `stalled` waits.
    pub flowed: u64,
    /// The time from creation to effect that 99 of 100 events of [`RECENT`] stayed below.
    pub latency_p99: Option<Duration>,
}

/// A slot that has no holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreeSlot {
    /// Of which group.
    pub group: String,
    /// Which.
    pub slot: u32,
    /// For how long it was seen so.
    pub free: Duration,
}

/// The certificate of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateMeasure {
    /// `host:port`.
    pub server: String,
    /// When it ends.
    pub ends_at: DateTime<Utc>,
}

/// Adds up buckets of a minute of the last hour, by group.
pub fn groups(now: DateTime<Utc>, buckets: &[Bucket], stalled_after: Duration) -> Vec<GroupMeasure> {
    let mut groups: BTreeMap<&str, GroupMeasure> = BTreeMap::new();
    let mut latencies: BTreeMap<&str, [u64; latency::BUCKETS]> = BTreeMap::new();
    for Bucket { at, group, metric, label, count } in buckets {
        let age = (now - *at).to_std().unwrap_or_default();
        let measure = groups.entry(group).or_default();
        if age < stalled_after && matches!(metric, Metric::Published | Metric::Applied) {
            measure.flowed += count;
        }
        if age < HOUR && *metric == Metric::Dead {
            measure.dead += count;
        }
        if age >= RECENT {
            continue;
        }
        match metric {
            Metric::Published | Metric::Applied => measure.attempts += count,
            Metric::PublishFailed | Metric::Failed => {
                measure.attempts += count;
                measure.failures += count;
                if is_denied(label) {
                    measure.denied += count;
                }
            }
            Metric::Dead if is_denied(label) => measure.denied += count,
            Metric::Latency => {
                let counts = latencies.entry(group).or_insert([0; latency::BUCKETS]);
                // A label that is no bucket was written by another version.
                if let Some(held) = label.parse().ok().and_then(|bucket: usize| counts.get_mut(bucket)) {
                    *held += count;
                }
            }
            _ => {}
        }
    }
    let measured = groups.into_iter().map(|(group, measure)| {
        let latency_p99 = latencies.get(group).and_then(|counts| latency::percentile(counts, 0.99));
        GroupMeasure { group: group.to_owned(), latency_p99, ..measure }
    });
    measured.collect()
}

/// A kind of ours, or a status over HTTP.
fn is_denied(error_type: &str) -> bool {
    matches!(error_type, "denied" | "http_401" | "http_403" | "http_407")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_added_up_by_group_and_age() {
        let now: DateTime<Utc> = "2026-11-16T10:00:30Z".parse().unwrap();
        let bucket = |minutes_ago: i64, group: &str, metric, label: &str, count| Bucket {
            at: now - chrono::TimeDelta::seconds(30) - chrono::TimeDelta::minutes(minutes_ago),
            group: group.to_owned(),
            metric,
            label: label.to_owned(),
            count,
        };
        let buckets = [
            bucket(59, "consumer/a", Metric::Dead, "handler", 3),
            bucket(4, "consumer/a", Metric::Dead, "http_403", 1),
            bucket(61, "consumer/a", Metric::Dead, "handler", 100),
            bucket(4, "consumer/a", Metric::Applied, "", 90),
            bucket(6, "consumer/a", Metric::Applied, "", 1000),
            bucket(0, "consumer/a", Metric::Failed, "handler", 8),
            bucket(0, "consumer/a", Metric::Failed, "http_401", 2),
            bucket(1, "relay/default", Metric::Published, "", 7),
            bucket(2, "relay/default", Metric::Published, "", 5),
            bucket(2, "relay/default", Metric::PublishFailed, "denied", 1),
        ];
        let found = groups(now, &buckets, Duration::from_secs(120));
        let expected = [
            GroupMeasure {
                group: "consumer/a".to_owned(),
                attempts: 100,
                failures: 10,
                denied: 3,
                dead: 4,
                ..GroupMeasure::default()
            },
            GroupMeasure {
                group: "relay/default".to_owned(),
                attempts: 13,
                failures: 1,
                denied: 1,
                flowed: 7,
                ..GroupMeasure::default()
            },
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn latency_is_that_of_the_last_minutes() {
        let now = Utc::now();
        let bucket = |minutes_ago: i64, latency: Duration, count| Bucket {
            at: now - chrono::TimeDelta::minutes(minutes_ago),
            group: "consumer/a".to_owned(),
            metric: Metric::Latency,
            label: latency::bucket(latency).to_string(),
            count,
        };
        let (quick, slow) = (Duration::from_millis(20), Duration::from_secs(40));
        let found = groups(now, &[bucket(1, quick, 100), bucket(10, slow, 100)], Duration::ZERO);
        assert!(found[0].latency_p99.unwrap() < Duration::from_secs(1), "{found:?}");
        let found = groups(now, &[bucket(1, quick, 95), bucket(2, slow, 5)], Duration::ZERO);
        assert!(found[0].latency_p99.unwrap() >= Duration::from_secs(30), "{found:?}");
    }
}
