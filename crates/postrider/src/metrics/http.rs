//! The HTTP client's. A destination is `host:port`, or `other`.

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
    counter!("postrider_http_calls_total", "destination" => destination.to_owned(), "outcome" => outcome).increment(1);
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
