//! The retry budget: keeps retries from multiplying an outage.
//!
//! A destination that fails under load gets up to four times the calls when every caller retries three times. The
//! budget is a bucket of tokens. Every call puts a part of a token in, every retry takes a whole one out. So retries
//! are at most `percent` of the calls, plus what is in reserve. The reserve also fills slowly by itself, so that a
//! destination that is called once an hour keeps its retries.

use std::time::{Duration, Instant};

/// Tokens are counted in hundredths, so that a percentage is a whole number of them.
const TOKEN: u64 = 100;

/// How many retries a destination gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetSettings {
    /// Retries for each hundred calls.
    pub percent: u32,
    /// Retries that can be saved up; a new destination starts with this many.
    pub reserve: u32,
    /// In this time one retry is added to the reserve, without any call. Zero adds none.
    pub refill: Duration,
}

impl Default for BudgetSettings {
    fn default() -> Self {
        Self { percent: 20, reserve: 10, refill: Duration::from_secs(10) }
    }
}

/// The budget of one destination. Time is passed in.
#[derive(Debug)]
pub(super) struct Budget {
    settings: BudgetSettings,
    hundredths: u64,
    /// Up to when the refill by time has been added.
    filled_at: Instant,
}

impl Budget {
    pub fn new(settings: BudgetSettings, now: Instant) -> Self {
        Self { settings, hundredths: u64::from(settings.reserve) * TOKEN, filled_at: now }
    }

    /// A call, not a retry, was sent.
    pub fn called(&mut self, now: Instant) {
        self.refill(now);
        self.add(u64::from(self.settings.percent));
    }

    /// Takes what one retry costs, and says whether there was enough.
    pub fn take(&mut self, now: Instant) -> bool {
        self.refill(now);
        let Some(left) = self.hundredths.checked_sub(TOKEN) else {
            return false;
        };
        self.hundredths = left;
        true
    }

    fn refill(&mut self, now: Instant) {
        let hundredth = self.settings.refill / TOKEN as u32;
        if hundredth.is_zero() {
            return;
        }
        let elapsed = now.saturating_duration_since(self.filled_at);
        let count = elapsed.as_nanos() / hundredth.as_nanos();
        self.add(u64::try_from(count).unwrap_or(u64::MAX));
        // What is left over of the elapsed time counts towards the next hundredth.
        let rest = Duration::from_nanos(u64::try_from(elapsed.as_nanos() % hundredth.as_nanos()).unwrap_or(0));
        self.filled_at = now.checked_sub(rest).unwrap_or(now).max(self.filled_at);
    }

    fn add(&mut self, hundredths: u64) {
        self.hundredths = self.hundredths.saturating_add(hundredths).min(u64::from(self.settings.reserve) * TOKEN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WITHOUT_REFILL: BudgetSettings = BudgetSettings { percent: 20, reserve: 10, refill: Duration::ZERO };

    fn taken(budget: &mut Budget, now: Instant) -> usize {
        (0..1000).take_while(|_| budget.take(now)).count()
    }

    #[test]
    fn a_new_destination_has_its_reserve_and_no_more() {
        let now = Instant::now();
        assert_eq!(taken(&mut Budget::new(WITHOUT_REFILL, now), now), 10);
    }

    #[test]
    fn five_calls_earn_one_retry() {
        let now = Instant::now();
        let mut budget = Budget::new(WITHOUT_REFILL, now);
        taken(&mut budget, now);
        for _ in 0..4 {
            budget.called(now);
        }
        assert!(!budget.take(now));
        budget.called(now);
        assert!(budget.take(now));
        assert!(!budget.take(now));
    }

    #[test]
    fn in_an_outage_retries_are_a_fifth_of_the_calls_and_the_reserve() {
        let now = Instant::now();
        let mut budget = Budget::new(WITHOUT_REFILL, now);
        let mut retries = 0;
        for _ in 0..1000 {
            budget.called(now);
            retries += (0..3).filter(|_| budget.take(now)).count();
        }
        // The very first call meets a full reserve and earns nothing.
        assert!((209..=210).contains(&retries), "{retries}");
    }

    #[test]
    fn quiet_times_are_not_saved_beyond_the_reserve() {
        let now = Instant::now();
        let mut budget = Budget::new(WITHOUT_REFILL, now);
        for _ in 0..1000 {
            budget.called(now);
        }
        assert_eq!(taken(&mut budget, now), 10);
    }

    #[test]
    fn the_reserve_fills_by_itself_in_time() {
        let start = Instant::now();
        let mut budget = Budget::new(BudgetSettings::default(), start);
        taken(&mut budget, start);
        // Looking often must not lose the time between two looks.
        for millis in (0..10_000).step_by(7) {
            assert!(!budget.take(start + Duration::from_millis(millis)));
        }
        assert!(budget.take(start + Duration::from_secs(10)));
        assert_eq!(taken(&mut budget, start + Duration::from_secs(3600)), 10);
    }

    #[test]
    fn without_a_budget_there_are_no_retries() {
        let now = Instant::now();
        let mut budget = Budget::new(BudgetSettings { percent: 20, reserve: 0, refill: Duration::ZERO }, now);
        budget.called(now);
        assert!(!budget.take(now));
    }

    #[test]
    fn a_clock_that_stands_or_steps_back_adds_nothing() {
        let now = Instant::now() + Duration::from_secs(60);
        let mut budget = Budget::new(BudgetSettings::default(), now);
        taken(&mut budget, now);
        assert!(!budget.take(now - Duration::from_secs(60)));
        assert!(!budget.take(now + Duration::from_secs(9)));
    }
}
