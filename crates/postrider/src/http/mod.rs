//! A client for HTTP that does not make an outage worse.
//!
//! Every call belongs to a destination, the `host:port` of its URL. For each destination the client keeps
//!
//! - a **breaker** ([`crate::relay::Breaker`]): after five failures in a row, or half of the last ten calls, nothing is
//!   sent for a minute; then one call probes. Network errors, time-outs and 5xx are failures. A 4xx is not: it proves
//!   that the destination is there.
//! - a **retry budget**: retries are at most a fifth of the calls plus ten in reserve, so that they cannot multiply the
//!   load on a destination that is failing under it.
//!
//! Each try has a total time, which also covers a body that drips; bodies are bounded; redirects are never followed,
//! because they would carry credentials to a place that nobody configured.
//!
//! | call | retries | a 5xx is | for |
//! |---|---|---|---|
//! | [`HttpClient::send`] | yes | an error, after the last try | who needs an answer |
//! | [`HttpClient::send_or`] | yes | replaced by the last good answer or a default | who needs *something* |
//! | [`HttpClient::send_once`] | no | an answer | who keeps retries itself, on disk for example |
//!
//! [`Webhook`] gives a consumer's events to a service over it.
//!
//! No error, log line, metric or `Debug` holds a path, a query, a header value or a body.
//!
//! [`HttpClient`] has an example.

mod settings;
mod request;
mod client;
mod destination;
mod budget;
mod wire;
mod retry_after;
mod answer;
mod verdict;
mod fallback;
mod cache;
mod error;
mod public;
mod sign;
mod webhook;

pub use answer::Answer;
pub use budget::BudgetSettings;
pub use cache::CacheSettings;
pub use client::HttpClient;
pub use fallback::Supplied;
pub use public::{check_public, is_public, public_only};
pub use request::Request;
pub use settings::HttpSettings;
pub use sign::Signer;
pub use verdict::Verdict;
pub use webhook::Webhook;

/// Its types (methods, statuses, headers, the builder) are part of this interface.
pub use reqwest;

#[cfg(test)]
mod tests;
