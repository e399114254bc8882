//! The breaker: stops publishing to a destination that fails, and probes it after a while.
//!
//! Only failures that belong to the place count; an event that is refused for its own sake proves that the broker is
//! there. While the breaker is open events stay in the outbox and no attempt is counted.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Whoever waits sends a probe within this after its time has come.
const PROBE_WAIT: Duration = Duration::from_secs(1);
/// Whoever has work says again and again that it is blocked. One that has not said so for this long has no work any more.
const BLOCKED_WAIT: Duration = Duration::from_secs(60);

/// When the breaker opens and for how long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BreakerSettings {
    /// Opens after this many failures in a row.
    pub failures: u32,
    /// Looks at this many calls.
    pub window: usize,
    /// Opens when this part of them failed …
    pub ratio: f64,
    /// … and there were at least this many.
    pub calls_min: usize,
    /// How long it stays open before one probe is let through.
    pub open: Duration,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self { failures: 5, window: 10, ratio: 0.5, calls_min: 5, open: Duration::from_secs(60) }
    }
}

/// The breaker's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BreakerState {
    /// Everything is let through.
    Closed,
    /// Nothing is let through until the instant.
    Open {
        /// When one probe may pass.
        until: Instant,
        /// Why it opened.
        reason: String,
    },
    /// One probe is under way.
    Probing {
        /// When it was let through; a probe that never reports must not stop everything for ever.
        since: Instant,
        /// Why the breaker opened.
        reason: String,
    },
}

/// What may pass now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permit {
    /// Anything.
    All,
    /// One call, to find out.
    Probe,
    /// Nothing before the instant, if one is known.
    None(Option<Instant>),
}

/// A breaker for one destination. Time is passed in.
#[derive(Debug)]
pub struct Breaker {
    settings: BreakerSettings,
    state: BreakerState,
    in_a_row: u32,
    recent: VecDeque<bool>,
    last_failed: Option<Instant>,
    /// The broker itself asked us to stop; ends when it says so. With when that was last said.
    blocked: Option<(String, Instant)>,
}

impl Breaker {
    /// A closed breaker.
    pub fn new(settings: BreakerSettings) -> Self {
        Self {
            settings,
            state: BreakerState::Closed,
            in_a_row: 0,
            recent: VecDeque::new(),
            last_failed: None,
            blocked: None,
        }
    }

    /// The state, for people.
    pub fn state(&self) -> BreakerState {
        self.state.clone()
    }

    /// Why nothing is published at the moment, if so.
    pub fn reason(&self) -> Option<String> {
        match (&self.blocked, &self.state) {
            (Some((reason, _)), _) | (None, BreakerState::Open { reason, .. }) => Some(reason.clone()),
            (None, BreakerState::Probing { .. } | BreakerState::Closed) => None,
        }
    }

    /// Why calls are held up, if so, for people. Also while a probe is under way, whose end may be long in coming; but not
    /// when one could pass and there is nothing to send, nor when whoever was blocked has no work any more.
    pub fn trouble(&self, now: Instant) -> Option<String> {
        match (&self.blocked, &self.state) {
            (Some((reason, said)), _) => (now < *said + BLOCKED_WAIT).then(|| reason.clone()),
            (None, BreakerState::Probing { reason, .. }) => Some(reason.clone()),
            (None, BreakerState::Open { until, reason }) => (now < *until + PROBE_WAIT).then(|| reason.clone()),
            (None, BreakerState::Closed) => None,
        }
    }

    /// Failures in a row so far.
    pub fn failures_in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// Takes over what the broker says about being blocked. When it ends, one probe may pass at once.
    pub fn set_blocked(&mut self, reason: Option<String>, now: Instant) {
        if self.blocked.is_some() && reason.is_none() {
            self.state = BreakerState::Open { until: now, reason: "the broker was blocked".to_owned() };
        }
        self.blocked = reason.map(|reason| (reason, now));
    }

    /// Asks to pass. [`Permit::Probe`] is given once; its outcome must be reported.
    pub fn permit(&mut self, now: Instant) -> Permit {
        if self.blocked.is_some() {
            return Permit::None(None);
        }
        match &self.state {
            BreakerState::Closed => Permit::All,
            BreakerState::Probing { since, .. } if now < *since + self.settings.open => Permit::None(None),
            BreakerState::Open { until, .. } if now < *until => Permit::None(Some(*until)),
            BreakerState::Probing { reason, .. } | BreakerState::Open { reason, .. } => {
                self.state = BreakerState::Probing { since: now, reason: reason.clone() };
                Permit::Probe
            }
        }
    }

    /// A call succeeded.
    pub fn succeeded(&mut self) {
        self.in_a_row = 0;
        if self.state != BreakerState::Closed {
            self.recent.clear();
            self.state = BreakerState::Closed;
        }
        self.remember(true);
    }

    /// A call that began at `began` failed because of the destination. Calls that were under way together fail
    /// together; they count as one.
    pub fn failed(&mut self, began: Instant, now: Instant, reason: &str) {
        let is_probe_bad = matches!(self.state, BreakerState::Probing { .. });
        if !is_probe_bad && self.last_failed.is_some_and(|last| began < last) {
            return;
        }
        self.last_failed = Some(now);
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.remember(false);
        let failed = self.recent.iter().filter(|is_ok| !**is_ok).count();
        let is_ratio_bad = self.recent.len() >= self.settings.calls_min
            && failed as f64 >= self.settings.ratio * self.recent.len() as f64;
        if is_probe_bad || self.in_a_row >= self.settings.failures || is_ratio_bad {
            self.state = BreakerState::Open { until: now + self.settings.open, reason: reason.to_owned() };
        }
    }

    fn remember(&mut self, is_ok: bool) {
        if self.recent.len() == self.settings.window {
            self.recent.pop_front();
        }
        self.recent.push_back(is_ok);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn five_failures_in_a_row_stop_publishing_for_a_minute() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        let start = Instant::now();
        for _ in 0..10 {
            breaker.succeeded();
        }
        for _ in 0..4 {
            breaker.failed(start, start, "down");
            assert_eq!(breaker.permit(start), Permit::All);
        }
        breaker.failed(start, start, "down");
        assert_eq!(breaker.permit(start + 59 * SECOND), Permit::None(Some(start + 60 * SECOND)));
        assert_eq!(breaker.reason().as_deref(), Some("down"));
        assert_eq!(breaker.permit(start + 60 * SECOND), Permit::Probe);
        assert_eq!(breaker.permit(start + 60 * SECOND), Permit::None(None), "only one probe");
    }

    #[test]
    fn half_of_the_last_ten_calls_stop_publishing() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        let now = Instant::now();
        for _ in 0..2 {
            breaker.succeeded();
            breaker.failed(now, now, "flaky");
        }
        assert_eq!(breaker.permit(now), Permit::All, "fewer than five calls prove nothing");
        breaker.failed(now, now, "flaky");
        assert!(matches!(breaker.permit(now), Permit::None(Some(_))));
    }

    #[test]
    fn a_good_probe_resumes_and_a_bad_one_waits_again() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        let start = Instant::now();
        for _ in 0..5 {
            breaker.failed(start, start, "down");
        }
        assert_eq!(breaker.permit(start + 60 * SECOND), Permit::Probe);
        breaker.failed(start + 60 * SECOND, start + 60 * SECOND, "still down");
        assert_eq!(breaker.permit(start + 119 * SECOND), Permit::None(Some(start + 120 * SECOND)));
        assert_eq!(breaker.permit(start + 120 * SECOND), Permit::Probe);
        breaker.succeeded();
        assert_eq!(breaker.permit(start + 120 * SECOND), Permit::All);
    }

    #[test]
    fn a_probe_that_never_reports_is_repeated() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        let start = Instant::now();
        for _ in 0..5 {
            breaker.failed(start, start, "down");
        }
        assert_eq!(breaker.permit(start + 60 * SECOND), Permit::Probe);
        let trouble = breaker.trouble(start + 60 * SECOND);
        assert_eq!((breaker.reason(), trouble.as_deref()), (None, Some("down")), "it is not over yet");
        assert_eq!(breaker.permit(start + 119 * SECOND), Permit::None(None));
        assert_eq!(breaker.permit(start + 120 * SECOND), Permit::Probe);
    }

    #[test]
    fn calls_that_fail_together_count_once() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        let start = Instant::now();
        for millis in 1..=8 {
            breaker.failed(start, start + Duration::from_millis(millis), "connection lost");
        }
        assert_eq!(breaker.failures_in_a_row(), 1);
        assert_eq!(breaker.permit(start + SECOND), Permit::All);
    }

    #[test]
    fn a_blocked_broker_is_left_alone_until_it_says_so() {
        let mut breaker = Breaker::new(BreakerSettings::default());
        let now = Instant::now();
        breaker.set_blocked(Some("low on memory".to_owned()), now);
        assert_eq!(breaker.permit(now + 600 * SECOND), Permit::None(None));
        assert_eq!(breaker.trouble(now + 59 * SECOND).as_deref(), Some("low on memory"));
        assert_eq!(breaker.trouble(now + 60 * SECOND), None, "whoever was blocked has no work any more");
        breaker.set_blocked(Some("low on memory".to_owned()), now + 500 * SECOND);
        assert_eq!(breaker.trouble(now + 510 * SECOND).as_deref(), Some("low on memory"));
        breaker.set_blocked(None, now);
        assert_eq!(breaker.trouble(now + 2 * SECOND), None, "nothing waits to be sent");
        assert_eq!(breaker.permit(now), Permit::Probe);
    }
}
