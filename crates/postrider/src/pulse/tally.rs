//! What one instance has counted since its last pulse.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::latency::{self, BUCKETS};
use super::{Count, Metric};

/// Labels of one metric beyond this many are counted as [`OTHER`].
const LABELS_MAX: usize = 100;
/// What a label may weigh; longer ones are cut.
const LABEL_BYTES_MAX: usize = 200;
/// The label of what has none of its own any more.
pub const OTHER: &str = "other";

/// Counts of one relay or consumer. Adding takes one short lock and, for what was seen before, no memory.
#[derive(Debug, Default)]
pub struct Tally {
    counts: Mutex<Counts>,
}

#[derive(Debug)]
struct Counts {
    labelled: HashMap<Metric, HashMap<String, u64>>,
    latencies: [u64; BUCKETS],
    latency_ms: u64,
}

impl Default for Counts {
    fn default() -> Self {
        Self { labelled: HashMap::new(), latencies: [0; BUCKETS], latency_ms: 0 }
    }
}

impl Tally {
    /// Nothing counted yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // Nothing panics while it is held, so a poisoned lock still guards a whole value.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `count` of one thing.
    pub fn add(&self, metric: Metric, label: &str, count: u64) {
        if count > 0 {
            self.lock().add(metric, label, count);
        }
    }

    /// Adds events whose effect was committed, each with the time since its creation.
    pub fn applied(&self, latencies: &[Duration]) {
        if latencies.is_empty() {
            return;
        }
        let mut counts = self.lock();
        counts.add(Metric::Applied, "", latencies.len() as u64);
        for latency in latencies {
            counts.latencies[latency::bucket(*latency)] += 1;
            let ms = u64::try_from(latency.as_millis()).unwrap_or(u64::MAX);
            counts.latency_ms = counts.latency_ms.saturating_add(ms);
        }
    }

    /// Takes everything that was counted; it begins at nothing again.
    pub fn take(&self) -> Vec<Count> {
        let Counts { labelled, latencies, latency_ms } = std::mem::take(&mut *self.lock());
        let mut counts: Vec<Count> = labelled
            .into_iter()
            .flat_map(|(metric, labels)| labels.into_iter().map(move |(label, count)| Count { metric, label, count }))
            .collect();
        for (bucket, count) in latencies.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            counts.push(Count { metric: Metric::Latency, label: bucket.to_string(), count });
        }
        if latency_ms > 0 {
            counts.push(Count { metric: Metric::LatencyMs, label: String::new(), count: latency_ms });
        }
        counts
    }

    /// Takes back what the store did not take, for the next pulse. However often that happens, there are no more labels
    /// than otherwise.
    pub fn give_back(&self, given: Vec<Count>) {
        let mut counts = self.lock();
        for Count { metric, label, count } in given {
            match metric {
                Metric::LatencyMs => counts.latency_ms = counts.latency_ms.saturating_add(count),
                Metric::Latency => {
                    let bucket = label.parse::<usize>().unwrap_or(BUCKETS - 1).min(BUCKETS - 1);
                    counts.latencies[bucket] = counts.latencies[bucket].saturating_add(count);
                }
                metric => counts.add(metric, &label, count),
            }
        }
    }
}

impl Counts {
    fn add(&mut self, metric: Metric, label: &str, count: u64) {
        let labels = self.labelled.entry(metric).or_default();
        let label = cut(label);
        if let Some(known) = labels.get_mut(label) {
            *known = known.saturating_add(count);
            return;
        }
        let label = if labels.len() < LABELS_MAX { label } else { OTHER };
        let known = labels.entry(label.to_owned()).or_default();
        *known = known.saturating_add(count);
    }
}

fn cut(label: &str) -> &str {
    &label[..label.floor_char_boundary(LABEL_BYTES_MAX)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(mut counts: Vec<Count>) -> Vec<(Metric, String, u64)> {
        counts.sort_by(|a, b| (a.metric, &a.label).cmp(&(b.metric, &b.label)));
        counts.into_iter().map(|Count { metric, label, count }| (metric, label, count)).collect()
    }

    #[test]
    fn what_was_counted_is_taken_once() {
        let tally = Tally::new();
        tally.add(Metric::Published, "", 100);
        tally.add(Metric::Published, "", 28);
        tally.add(Metric::Published, "", 0);
        tally.add(Metric::Failed, "timeout", 2);
        tally.applied(&[Duration::from_millis(1), Duration::from_secs(1), Duration::from_millis(990)]);
        tally.applied(&[]);
        let expected = vec![
            (Metric::Published, String::new(), 128),
            (Metric::Applied, String::new(), 3),
            (Metric::Failed, "timeout".to_owned(), 2),
            (Metric::Latency, "0".to_owned(), 1),
            (Metric::Latency, "20".to_owned(), 2),
            (Metric::LatencyMs, String::new(), 1991),
        ];
        let counts = tally.take();
        assert_eq!(sorted(counts.clone()), expected);
        assert_eq!(tally.take(), Vec::new());

        tally.give_back(counts);
        tally.add(Metric::Published, "", 2);
        let again = sorted(tally.take());
        assert_eq!(again[0].2, 130, "what was given back comes with the next pulse");
        assert_eq!(again[1..], expected[1..]);
    }

    #[test]
    fn labels_are_bounded_however_many_there_are_and_however_often_they_come_back() {
        let tally = Tally::new();
        for round in 0..3 {
            for number in 0..1000 {
                tally.add(Metric::Failed, &format!("type-{round}-{number}"), 1);
            }
            let counts = tally.take();
            assert!(counts.len() <= LABELS_MAX + 1, "{}", counts.len());
            tally.give_back(counts);
        }
        let counts = tally.take();
        assert_eq!(counts.iter().map(|count| count.count).sum::<u64>(), 3000, "nothing goes uncounted");
        assert!(counts.iter().any(|count| count.label == OTHER && count.count >= 2900 - 100));
        tally.add(Metric::Dead, &"ü".repeat(500), 1);
        assert_eq!(tally.take()[0].label.len(), LABEL_BYTES_MAX);
    }

    #[test]
    fn many_threads_count_together() {
        let tally = Tally::new();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        tally.applied(&[Duration::from_millis(5)]);
                    }
                });
            }
        });
        assert!(tally.take().contains(&Count { metric: Metric::Applied, label: String::new(), count: 8000 }));
    }
}
