//! Names and labels of all metrics, in one place. The `metrics` facade lets users of the library keep their exporter.
//!
//! Labels are bounded: destinations and consumers come from the configuration, error kinds from [`crate::Kind`]; of the
//! HTTP client's destinations, which may come from data, the first hundred are told apart. No label ever holds a key, a
//! tenant or a topic.

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use crate::error::Kind;
use crate::event::Event;
use crate::upkeep::Backlog;

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
    describe_counter!("postrider_handler_failed_total", "Failed attempts to apply an event, by consumer");
    describe_counter!("postrider_held_total", "Messages set aside in the store to be applied later, by consumer");
    describe_counter!("postrider_dead_letters_total", "Messages given up, by consumer and error type");
    describe_counter!("postrider_replayed_total", "Replayed dead letters that were decided, by consumer and outcome");
    describe_counter!("postrider_skipped_total", "Events of a type that nobody handles, by consumer");
    describe_counter!("postrider_undecodable_total", "Messages that are no events, by consumer");
    describe_counter!("postrider_subscriptions_lost_total", "Subscriptions that ended with an error, by consumer");
    describe_histogram!("postrider_latency_seconds", "From an event's creation to its committed effect, by consumer");
    #[cfg(feature = "http")]
    http::describe();
}

pub(crate) fn published(destination: &str, count: u64) {
    counter!("postrider_published_total", "destination" => destination.to_owned()).increment(count);
}

pub(crate) fn publish_failed(destination: &str, kind: Kind, count: u64) {
    counter!("postrider_publish_failed_total", "destination" => destination.to_owned(), "kind" => kind.as_str())
        .increment(count);
}

pub(crate) fn parked(destination: &str, state: &'static str) {
    counter!("postrider_parked_total", "destination" => destination.to_owned(), "state" => state).increment(1);
}

pub(crate) fn claim_stored() {
    counter!("postrider_claims_stored_total").increment(1);
}

pub(crate) fn claim_fetched(consumer: &str) {
    counter!("postrider_claims_fetched_total", "consumer" => consumer.to_owned()).increment(1);
}

pub(crate) fn breaker(destination: &str, is_open: bool) {
    gauge!("postrider_breaker_open", "destination" => destination.to_owned()).set(if is_open { 1.0 } else { 0.0 });
}

pub(crate) fn lanes_held(destination: &str, change: f64) {
    gauge!("postrider_lanes_held", "destination" => destination.to_owned()).increment(change);
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

pub(crate) fn applied(consumer: &str, event: &Event) {
    counter!("postrider_applied_total", "consumer" => consumer.to_owned()).increment(1);
    // Producer's and consumer's clocks may differ; a negative latency is a clock's fault and shown as none.
    let latency = (chrono::Utc::now() - event.time()).to_std().unwrap_or_default();
    histogram!("postrider_latency_seconds", "consumer" => consumer.to_owned()).record(latency.as_secs_f64());
}

pub(crate) fn duplicate(consumer: &str) {
    counter!("postrider_duplicates_total", "consumer" => consumer.to_owned()).increment(1);
}

pub(crate) fn handler_failed(consumer: &str) {
    counter!("postrider_handler_failed_total", "consumer" => consumer.to_owned()).increment(1);
}

pub(crate) fn held(consumer: &str) {
    counter!("postrider_held_total", "consumer" => consumer.to_owned()).increment(1);
}

pub(crate) fn buried(consumer: &str, error_type: &str) {
    counter!("postrider_dead_letters_total", "consumer" => consumer.to_owned(), "error_type" => error_type.to_owned())
        .increment(1);
}

pub(crate) fn replayed(consumer: &str, applied: u64, failed: u64) {
    for (outcome, count) in [("applied", applied), ("failed", failed)] {
        counter!("postrider_replayed_total", "consumer" => consumer.to_owned(), "outcome" => outcome).increment(count);
    }
}

pub(crate) fn skipped(consumer: &str) {
    counter!("postrider_skipped_total", "consumer" => consumer.to_owned()).increment(1);
}

pub(crate) fn undecodable(consumer: &str) {
    counter!("postrider_undecodable_total", "consumer" => consumer.to_owned()).increment(1);
}

pub(crate) fn subscription_lost(consumer: &str) {
    counter!("postrider_subscriptions_lost_total", "consumer" => consumer.to_owned()).increment(1);
}

/// The HTTP client's. A destination is `host:port`, or `other`.
#[cfg(feature = "http")]
pub(crate) mod http {
    use std::time::Duration;

    use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

    pub(super) fn describe() {
        describe_counter!("postrider_http_calls_total", "Calls over HTTP, by how they ended");
        describe_counter!("postrider_http_retries_total", "Further tries of calls over HTTP");
        describe_counter!("postrider_http_fallbacks_total", "Calls over HTTP that got a cached answer or a default");
        describe_gauge!("postrider_http_breakers_open", "Breakers that stop calls to the destination");
        describe_histogram!("postrider_http_seconds", "Duration of one try, until the last byte of the answer");
    }

    pub(crate) fn called(destination: &str, outcome: &'static str) {
        counter!("postrider_http_calls_total", "destination" => destination.to_owned(), "outcome" => outcome)
            .increment(1);
    }

    pub(crate) fn retried(destination: &str) {
        counter!("postrider_http_retries_total", "destination" => destination.to_owned()).increment(1);
    }

    pub(crate) fn fell_back(destination: &str, origin: &'static str) {
        counter!("postrider_http_fallbacks_total", "destination" => destination.to_owned(), "origin" => origin)
            .increment(1);
    }

    /// A change, not a state: several clients, and all destinations beyond the bound, share a label.
    pub(crate) fn breakers_open(destination: &str, change: f64) {
        gauge!("postrider_http_breakers_open", "destination" => destination.to_owned()).increment(change);
    }

    pub(crate) fn took(destination: &str, duration: Duration) {
        histogram!("postrider_http_seconds", "destination" => destination.to_owned()).record(duration.as_secs_f64());
    }
}
