//! Names and labels of all metrics, in one place. The `metrics` facade lets users of the library keep their exporter.
//!
//! Labels are bounded: destinations and consumers come from the configuration, error kinds from [`crate::Kind`]; of what
//! may come from data (topics, types of errors, the HTTP client's destinations) the first hundred are told apart. No
//! label ever holds a key or a tenant.
//!
//! What a relay or a consumer counts goes two ways through its meter: here, and into the [`crate::pulse`].

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge};

use crate::upkeep::Backlog;

mod alert;
mod consumer;
#[cfg(feature = "http")]
pub(crate) mod http;
pub(crate) mod labels;
mod relay;
mod standing;
#[cfg(test)]
#[cfg(feature = "http")]
mod tests;

pub use alert::{alert_told, watching};
pub(crate) use consumer::ConsumerMeter;
pub(crate) use relay::RelayMeter;
pub use standing::Standing;

/// Registers help texts with the installed recorder.
pub fn describe() {
    describe_counter!("postrider_published_total", "Events confirmed by the broker");
    describe_counter!("postrider_publish_failed_total", "Publish attempts that failed, by error kind");
    describe_counter!("postrider_parked_total", "Failed attempts that set an event aside, by the state it got");
    describe_counter!("postrider_claims_stored_total", "Large payloads stored before their events were published");
    describe_counter!("postrider_claims_fetched_total", "Large payloads fetched for a handler, by consumer");
    describe_gauge!("postrider_breaker_open", "1 while publishing to the destination is stopped");
    describe_gauge!("postrider_lanes_held", "Lanes that this instance works on");
    describe_gauge!("postrider_outbox_pending", "Committed events that are not published yet (counted up to 10,000)");
    describe_gauge!("postrider_outbox_oldest_seconds", "Age of the oldest unpublished event");
    describe_gauge!("postrider_outbox_parked", "Events in the side table, by state");
    describe_gauge!("postrider_alert_stale", "1 while an event has waited longer than relay.stale_after_s");
    describe_counter!("postrider_applied_total", "Events whose effect was committed, by consumer");
    describe_counter!("postrider_duplicates_total", "Deliveries of events that were applied before, by consumer");
    describe_counter!(
        "postrider_handler_failed_total",
        "Failed attempts to apply an event, by consumer and error type"
    );
    describe_counter!("postrider_held_total", "Messages set aside in the store to be applied later, by consumer");
    describe_counter!("postrider_dead_letters_total", "Messages given up, by consumer and error type");
    describe_counter!("postrider_replayed_total", "Replayed dead letters that were decided, by consumer and outcome");
    describe_counter!("postrider_skipped_total", "Events of a type that nobody handles, by consumer");
    describe_counter!("postrider_undecodable_total", "Messages that are no events, by consumer");
    describe_counter!("postrider_subscriptions_lost_total", "Subscriptions that ended with an error, by consumer");
    describe_histogram!("postrider_latency_seconds", "From an event's creation to its effect, by consumer and topic");
    describe_gauge!("postrider_dead_letters", "Dead letters to decide on (counted up to 10,000), by consumer");
    describe_gauge!(
        "postrider_held",
        "Messages held to be applied later (counted up to 10,000), by consumer and state"
    );
    describe_gauge!("postrider_held_oldest_seconds", "Age of the oldest held message, by consumer");
    describe_gauge!("postrider_instances", "Instances that live, by group");
    describe_gauge!("postrider_instances_lost", "Instances that went without a word, by group");
    describe_gauge!("postrider_alerts", "Alerts that hold, by rule and urgency");
    alert::describe();
    describe_counter!("postrider_spans_total", "Spans of traces, by whether they were sent or dropped");
    #[cfg(feature = "http")]
    http::describe();
}

pub(crate) fn claim_stored() {
    counter!("postrider_claims_stored_total").increment(1);
}

pub(crate) fn breaker(destination: &str, is_open: bool) {
    gauge!("postrider_breaker_open", "destination" => destination.to_owned()).set(if is_open { 1.0 } else { 0.0 });
}

/// Publishes the figures of a backlog, and whether its oldest event is stale.
pub fn backlog(destination: &str, backlog: &Backlog, is_stale: bool) {
    let destination = destination.to_owned();
    gauge!("postrider_outbox_pending", "destination" => destination.clone()).set(backlog.pending as f64);
    gauge!("postrider_outbox_oldest_seconds", "destination" => destination.clone())
        .set(backlog.oldest_secs.unwrap_or(0) as f64);
    let states = [("retrying", backlog.retrying), ("waiting", backlog.waiting), ("failed", backlog.failed)];
    for (state, count) in states {
        gauge!("postrider_outbox_parked", "destination" => destination.clone(), "state" => state).set(count as f64);
    }
    gauge!("postrider_alert_stale", "destination" => destination).set(if is_stale { 1.0 } else { 0.0 });
}

/// Counts spans that were given to a collector, or dropped because it did not keep up.
pub fn spans(is_sent: bool, count: u64) {
    let outcome = if is_sent { "sent" } else { "dropped" };
    counter!("postrider_spans_total", "outcome" => outcome).increment(count);
}

pub(crate) fn replayed(consumer: &str, applied: u64, failed: u64) {
    for (outcome, count) in [("applied", applied), ("failed", failed)] {
        counter!("postrider_replayed_total", "consumer" => consumer.to_owned(), "outcome" => outcome).increment(count);
    }
}
