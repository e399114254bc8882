//! Latencies in buckets: each is √2 times as wide as the one before, from a millisecond to about a day. A percentile that
//! is read from them is wrong by less than half, whatever the latencies are, and fifty-four numbers are all it takes.

use std::time::Duration;

/// How many buckets there are. The last one also takes everything that is longer.
pub const BUCKETS: usize = 54;

/// √2, in millionths.
const ROOT: u64 = 1_414_214;

/// The longest latency of each bucket, in microseconds.
const UPPER_US: [u64; BUCKETS] = {
    let mut upper = [0; BUCKETS];
    let mut bucket = 0;
    while bucket < BUCKETS {
        let even = 1000 << (bucket / 2);
        upper[bucket] = if bucket % 2 == 0 { even } else { even * ROOT / 1_000_000 };
        bucket += 1;
    }
    upper
};

/// The bucket of a latency.
pub fn bucket(latency: Duration) -> usize {
    let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
    UPPER_US.partition_point(|upper| *upper < us).min(BUCKETS - 1)
}

/// The longest latency that a bucket is for.
pub fn upper(bucket: usize) -> Duration {
    Duration::from_micros(UPPER_US[bucket.min(BUCKETS - 1)])
}

/// The latency below which the part `share` (0.99 for p99) of all lies, from how many each bucket holds. Within a bucket
/// they are taken to be spread evenly. None of nothing.
pub fn percentile(counts: &[u64; BUCKETS], share: f64) -> Option<Duration> {
    let total: u64 = counts.iter().sum();
    if total == 0 {
        return None;
    }
    let rank = ((total as f64 * share).ceil() as u64).clamp(1, total);
    let mut below = 0;
    for (bucket, count) in counts.iter().enumerate() {
        if below + count >= rank {
            let lower = bucket.checked_sub(1).map_or(Duration::ZERO, upper);
            return Some(lower + (upper(bucket) - lower).mul_f64((rank - below) as f64 / *count as f64));
        }
        below += count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_ends_at_its_upper_bound() {
        assert_eq!(bucket(Duration::ZERO), 0);
        assert_eq!(bucket(Duration::from_millis(1)), 0);
        assert_eq!(bucket(Duration::from_micros(1001)), 1);
        assert_eq!(bucket(Duration::from_millis(2)), 2);
        assert_eq!(bucket(Duration::from_secs(1)), 20);
        assert_eq!(upper(20), Duration::from_millis(1024));
        assert_eq!(upper(1), Duration::from_micros(1414));
        for n in 0..BUCKETS {
            assert_eq!(bucket(upper(n)), n);
        }
    }

    #[test]
    fn the_last_bucket_takes_more_than_a_day() {
        assert!(upper(BUCKETS - 1) > Duration::from_secs(24 * 60 * 60));
        assert_eq!(bucket(Duration::from_secs(365 * 24 * 60 * 60)), BUCKETS - 1);
        assert_eq!(bucket(Duration::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_exact_where_buckets_are() {
        let mut counts = [0; BUCKETS];
        assert_eq!(percentile(&counts, 0.99), None);
        counts[2] = 100; // 1.414 ms to 2 ms
        assert_eq!(percentile(&counts, 1.0), Some(Duration::from_millis(2)));
        assert_eq!(percentile(&counts, 0.5), Some(Duration::from_micros(1707)));
        assert_eq!(percentile(&counts, 0.0), Some(Duration::from_nanos(1_419_860)));
        counts[20] = 1; // one slow one
        assert_eq!(percentile(&counts, 0.99), Some(Duration::from_millis(2)));
        assert_eq!(percentile(&counts, 0.995), Some(Duration::from_millis(1024)));
    }

    #[test]
    fn a_percentile_is_wrong_by_less_than_half() {
        let latencies: Vec<Duration> = (1..=1000).map(|n| Duration::from_micros(n * n * 37)).collect();
        let mut counts = [0; BUCKETS];
        latencies.iter().for_each(|latency| counts[bucket(*latency)] += 1);
        for share in [0.5, 0.9, 0.95, 0.99] {
            let exact = latencies[(1000.0 * share) as usize - 1].as_secs_f64();
            let read = percentile(&counts, share).unwrap().as_secs_f64();
            assert!((read / exact - 1.0).abs() < 0.5, "{share}: {read} instead of {exact}");
        }
    }
}
