//! Waits between attempts: `min(max, base * 2^(n-1))` plus jitter.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// How long to wait before the next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The wait after the first failure.
    pub base: Duration,
    /// The longest wait.
    pub max: Duration,
    /// A random part of up to this long is added, so that what failed together is not tried together.
    pub jitter: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { base: Duration::from_secs(1), max: Duration::from_secs(300), jitter: Duration::from_secs(1) }
    }
}

impl Backoff {
    /// The wait after `failures` failures in a row, without jitter.
    pub fn delay(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.base.saturating_mul(1 << doublings).min(self.max)
    }

    /// The wait with jitter from `rng`.
    pub fn delay_with(&self, failures: u32, rng: &mut fastrand::Rng) -> Duration {
        self.delay(failures) + self.jitter.mul_f64(rng.f64())
    }

    /// Waits, and says whether the wait was not cut short by `stop`.
    pub(crate) async fn wait(&self, failures: u32, stop: &CancellationToken) -> bool {
        let delay = self.delay_with(failures, &mut fastrand::Rng::new());
        tokio::select! {
            () = stop.cancelled() => false,
            () = tokio::time::sleep(delay) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_maximum() {
        let secs: Vec<u64> = (1..=10).map(|n| Backoff::default().delay(n).as_secs()).collect();
        assert_eq!(secs, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        assert_eq!(Backoff::default().delay(u32::MAX), Duration::from_secs(300));
    }

    #[test]
    fn jitter_adds_at_most_its_bound() {
        let mut rng = fastrand::Rng::with_seed(7);
        let backoff = Backoff::default();
        for _ in 0..1000 {
            let delay = backoff.delay_with(1, &mut rng);
            assert!((backoff.base..=backoff.base + backoff.jitter).contains(&delay));
        }
    }
}
