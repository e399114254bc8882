//! The built-in rules: pure functions from measurements to what is wrong.
//!
//! Every condition says its figure and its threshold, and what to do. None holds a payload or a key.

use std::time::Duration;

use super::measure::Measurements;
use super::{Condition, Urgency};

mod flow;
mod place;
#[cfg(test)]
mod tests;

/// Every rule that there is, and what it means.
pub const RULES: [(&str, &str); 13] = [
    ("breaker_open", "nothing is published or delivered, because the other side does not answer"),
    ("stalled", "events wait, nothing flows, and no breaker says why"),
    ("stale", "an event has waited for very long"),
    ("latency", "events take too long from their creation to their effect"),
    ("error_rate", "too many attempts fail"),
    ("dead_letters", "many events were given up within an hour"),
    ("failed", "events that were given up wait for a person for too long"),
    ("denied", "a password or a right is missing"),
    ("instance_lost", "an instance went without a word"),
    ("lease", "a lane or slot has no holder"),
    ("certificate", "a certificate ends soon"),
    ("integrity", "the last integrity check found something"),
    (STORE_UNREACHABLE, "the store does not answer; each instance tells by itself"),
];

/// The one rule that needs no store: its alert is kept in the memory of each instance.
pub const STORE_UNREACHABLE: &str = "store_unreachable";

/// From where on something is wrong.
#[derive(Debug, Clone, PartialEq)]
pub struct Thresholds {
    /// `stale`: an event that waits for this long.
    pub stale_after: Duration,
    /// `dead_letters`: so many within an hour, of one consumer or relay, that still wait for a decision.
    pub dead_letters: u64,
    /// `failed`: what was given up and waits for a person for this long.
    pub failed_after: Duration,
    /// `latency`: this long from creation to effect, or waiting.
    pub latency: Duration,
    /// `error_rate`: this share of the attempts of the last five minutes.
    pub error_rate: f64,
    /// Fewer attempts than this say nothing about a rate.
    pub attempts_min: u64,
    /// `stalled`: this long without anything that flows.
    pub stalled_after: Duration,
    /// `lease`: a slot without a holder for this long.
    pub lease_after: Duration,
    /// `certificate`: this long before its end.
    pub certificate_before: Duration,
}

impl Default for Thresholds {
    fn default() -> Self {
        const HOUR: Duration = Duration::from_secs(60 * 60);
        Self {
            stale_after: HOUR,
            dead_letters: 10,
            failed_after: HOUR,
            latency: Duration::from_secs(30),
            error_rate: 0.01,
            attempts_min: 20,
            stalled_after: Duration::from_secs(120),
            lease_after: Duration::from_secs(30),
            certificate_before: 14 * 24 * HOUR,
        }
    }
}

/// A figure that has raised an alert must fall to this part of its threshold before the alert is over.
const CLEAR: f64 = 0.8;

/// Everything that is wrong now. At most one condition for each rule and subject.
pub fn evaluate(seen: &Measurements, thresholds: &Thresholds) -> Vec<Condition> {
    let mut found = Vec::new();
    flow::breaker_open(seen, &mut found);
    flow::stalled(seen, thresholds, &mut found);
    flow::stale(seen, thresholds, &mut found);
    flow::latency(seen, thresholds, &mut found);
    flow::error_rate(seen, thresholds, &mut found);
    flow::dead_letters(seen, thresholds, &mut found);
    flow::failed(seen, thresholds, &mut found);
    place::denied(seen, &mut found);
    place::instance_lost(seen, &mut found);
    place::lease(seen, thresholds, &mut found);
    place::certificate(seen, thresholds, &mut found);
    place::integrity(seen, &mut found);
    found
}

/// The condition that the store does not answer.
pub fn store_unreachable(instance: &str, error: &crate::Error) -> Condition {
    Condition {
        rule: STORE_UNREACHABLE.to_owned(),
        subject: instance.to_owned(),
        urgency: Urgency::Critical,
        summary: cut(&format!("the store does not answer {instance}: {}", error.message())),
        remedy: format!("{}; events wait with their producers, nothing is lost", error.remedy()),
    }
}

fn condition(rule: &str, subject: &str, urgency: Urgency, summary: String, remedy: String) -> Condition {
    Condition { rule: rule.to_owned(), subject: subject.to_owned(), urgency, summary: cut(&summary), remedy }
}

/// Longer texts are no summaries.
const SUMMARY_CHARS_MAX: usize = 400;

/// Reasons come from servers, and may be long or have many lines.
fn cut(text: &str) -> String {
    let one_line = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let cut: String = one_line.take(SUMMARY_CHARS_MAX).collect();
    if cut.chars().count() == SUMMARY_CHARS_MAX { format!("{cut}…") } else { cut }
}

/// A time for people.
fn span(time: Duration) -> String {
    match time.as_secs() {
        secs @ 0..120 => format!("{secs} s"),
        secs @ 120..7_200 => format!("{} min", secs / 60),
        secs @ 7_200..172_800 => format!("{} h", secs / 3_600),
        secs => format!("{} days", secs / 86_400),
    }
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}
