//! What a user of the client chooses. Every figure has a default, and every wait and size a bound.

use std::time::Duration;

use super::budget::BudgetSettings;
use super::cache::CacheSettings;
use crate::error::{Error, Kind, Result};
use crate::relay::{Backoff, BreakerSettings};

/// The settings of [`super::HttpClient`].
#[derive(Debug, Clone, PartialEq)]
pub struct HttpSettings {
    /// How long one try may take, from looking up the name to the last byte of the body.
    pub timeout: Duration,
    /// How long a connection may take to be set up; part of `timeout`.
    pub connect_timeout: Duration,
    /// What the body of an answer may weigh. It is kept in memory.
    pub body_bytes_max: usize,
    /// How often a call is tried again after its first try.
    pub retries_max: u32,
    /// Waits between the tries of one call.
    pub backoff: Backoff,
    /// The longest wait that a destination may ask for with `Retry-After`; longer ones are cut to it.
    pub retry_after_max: Duration,
    /// How many retries a destination gets in proportion to its calls.
    pub budget: BudgetSettings,
    /// When to leave a destination alone. `open` must not be shorter than `timeout`, so that one probe ends before the
    /// next begins.
    pub breaker: BreakerSettings,
    /// What is kept for [`super::HttpClient::send_or`].
    pub cache: CacheSettings,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            body_bytes_max: 1024 * 1024,
            retries_max: 3,
            backoff: Backoff::default(),
            retry_after_max: Duration::from_secs(60),
            budget: BudgetSettings::default(),
            breaker: BreakerSettings::default(),
            cache: CacheSettings::default(),
        }
    }
}

impl HttpSettings {
    pub(super) fn validate(&self) -> Result<()> {
        let wrong = |what: &str| Err(Error::new(Kind::Config, what));
        if self.timeout.is_zero() || self.connect_timeout.is_zero() {
            return wrong("timeout and connect_timeout must be longer than zero");
        }
        if self.breaker.failures == 0 || self.breaker.window == 0 {
            return wrong("breaker.failures and breaker.window must be at least 1");
        }
        // Zero, or a figure that is no number, would open the breaker with the first failure or never.
        if !(self.breaker.ratio > 0.0 && self.breaker.ratio <= 1.0) {
            return wrong("breaker.ratio must be above 0 and at most 1");
        }
        if self.breaker.open < self.timeout {
            return wrong("breaker.open must not be shorter than timeout, or a second probe starts beside the first");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_requirement() {
        let settings = HttpSettings::default();
        settings.validate().unwrap();
        assert_eq!(settings.timeout, Duration::from_secs(30));
        assert_eq!(settings.retries_max, 3);
        let waits: Vec<u64> = (1..=settings.retries_max).map(|n| settings.backoff.delay(n).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4]);
        assert_eq!((settings.breaker.failures, settings.breaker.open), (5, Duration::from_secs(60)));
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let spoilers: [fn(&mut HttpSettings); 7] = [
            |settings| settings.timeout = Duration::ZERO,
            |settings| settings.connect_timeout = Duration::ZERO,
            |settings| settings.breaker.failures = 0,
            |settings| settings.breaker.window = 0,
            |settings| settings.breaker.ratio = f64::NAN,
            |settings| settings.breaker.ratio = 1.5,
            |settings| settings.breaker.open = Duration::from_secs(29),
        ];
        for spoil in spoilers {
            let mut settings = HttpSettings::default();
            spoil(&mut settings);
            assert_eq!(settings.validate().unwrap_err().kind(), Kind::Config, "{settings:?}");
        }
    }
}
