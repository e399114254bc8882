//! Metrics of whoever watches. Sinks come from the configuration.

use metrics::{counter, describe_counter, describe_gauge, gauge};

pub(super) fn describe() {
    describe_gauge!("postrider_watching", "1 on the instance that measures for alerts");
    describe_counter!("postrider_alert_deliveries_total", "Messages to sinks, by sink and outcome");
}

/// Whether this instance is the one that watches.
pub fn watching(is_watching: bool) {
    gauge!("postrider_watching").set(if is_watching { 1.0 } else { 0.0 });
}

/// What became of a message to a sink: `told`, `failed` or `given_up`.
pub fn alert_told(sink: &str, outcome: &'static str) {
    counter!("postrider_alert_deliveries_total", "sink" => sink.to_owned(), "outcome" => outcome).increment(1);
}
