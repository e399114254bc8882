//! Why a call failed, and the one place that knows reqwest's errors and what a status is in our words.

use std::error::Error as _;
use std::time::Duration;

use reqwest::StatusCode;

use super::request::Request;
use crate::error::{Error, Kind};

/// Why a try has no answer. Nothing in it comes from the URL's path or query, a header or a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// The try took longer than this.
    Timeout(Duration),
    /// The destination cannot be reached, or the connection broke.
    Network(String),
    /// The body of the answer is larger than this many bytes.
    TooLarge(usize),
    /// The request could not even be put together.
    Unsendable(String),
    /// The breaker is open; nothing was sent.
    Open {
        /// Why it opened, if it is not just being probed.
        reason: Option<String>,
        /// When the destination will be probed, if it is not just being probed.
        probe_in: Option<Duration>,
    },
}

impl Failure {
    /// Takes over an error of reqwest, without the URL.
    pub fn of(error: reqwest::Error) -> Self {
        let error = error.without_url();
        let text = causes(&error);
        if error.is_builder() { Failure::Unsendable(text) } else { Failure::Network(text) }
    }

    /// Whether it speaks against the destination, so that its breaker counts it and another try may help.
    pub fn is_destination_failing(&self) -> bool {
        match self {
            Failure::Timeout(_) | Failure::Network(_) => true,
            Failure::TooLarge(_) | Failure::Unsendable(_) | Failure::Open { .. } => false,
        }
    }

    /// The word in the metric label `outcome`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Failure::Timeout(_) => "timeout",
            Failure::Network(_) => "network",
            Failure::TooLarge(_) => "too_large",
            Failure::Unsendable(_) => "unsendable",
            Failure::Open { .. } => "breaker_open",
        }
    }

    /// Our error for the last failure of a call.
    pub fn into_error(self, request: &Request) -> Error {
        let shown = request.shown();
        match self {
            Failure::Timeout(limit) => {
                Error::new(Kind::Unavailable, format!("{shown}: no whole answer within {limit:?}"))
            }
            Failure::Network(cause) => {
                Error::new(Kind::Unavailable, format!("{shown}: the destination cannot be reached")).with_source(cause)
            }
            Failure::TooLarge(max) => {
                Error::new(Kind::TooLarge, format!("{shown}: the body of the answer is larger than {max} bytes"))
                    .with_remedy("ask for less, or raise body_bytes_max")
            }
            Failure::Unsendable(cause) => {
                Error::new(Kind::Config, format!("{shown}: the request cannot be sent")).with_source(cause)
            }
            Failure::Open { reason, probe_in } => open(request.destination(), reason, probe_in),
        }
    }
}

/// What led to an error of reqwest, in one line. Its own text only says that sending or reading failed.
pub(super) fn causes(error: &reqwest::Error) -> String {
    let mut texts = Vec::new();
    let mut next = error.source();
    while let Some(cause) = next {
        texts.push(cause.to_string());
        next = cause.source();
    }
    // Some layers repeat what is below them.
    texts.dedup();
    if texts.is_empty() { error.to_string() } else { texts.join(": ") }
}

fn open(destination: &str, reason: Option<String>, probe_in: Option<Duration>) -> Error {
    let when = match probe_in {
        // Rounded up: who comes back after that many seconds must not come too early.
        Some(wait) => format!("it will be probed in {} s", wait.as_millis().div_ceil(1000)),
        None => "it is being probed now".to_owned(),
    };
    let error = Error::new(Kind::Unavailable, format!("the breaker of {destination} is open, {when}"));
    match reason {
        Some(reason) => error.with_source(reason),
        None => error,
    }
}

/// Our error for a status that is no success.
pub(super) fn of_status(status: StatusCode, shown: &str) -> Error {
    let (kind, remedy) = match status.as_u16() {
        300..=399 => (Kind::Mismatch, Some("correct the address: redirects are not followed")),
        401 | 403 | 407 => (Kind::Denied, Some("correct the credentials, or grant the right at the destination")),
        404 | 410 => (Kind::Missing, Some("correct the address, or create what it names")),
        413 => (Kind::TooLarge, Some("send less, or raise the destination's limit")),
        408 | 425 | 429 => (Kind::Unavailable, Some("nothing: it passes; call less often if it comes back")),
        400..=499 => (Kind::Refused, Some("correct the request: the destination understood it and said no")),
        _ => (Kind::Unavailable, None),
    };
    // The number alone: a reason phrase is the destination's own text.
    let error = Error::new(kind, format!("{shown}: the destination answered {}", status.as_u16()));
    match remedy {
        Some(remedy) => error.with_remedy(remedy),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_a_kind() {
        let kinds = [
            (101, Kind::Unavailable),
            (302, Kind::Mismatch),
            (400, Kind::Refused),
            (401, Kind::Denied),
            (403, Kind::Denied),
            (404, Kind::Missing),
            (408, Kind::Unavailable),
            (409, Kind::Refused),
            (410, Kind::Missing),
            (413, Kind::TooLarge),
            (425, Kind::Unavailable),
            (429, Kind::Unavailable),
            (500, Kind::Unavailable),
            (503, Kind::Unavailable),
            (999, Kind::Unavailable),
        ];
        for (code, kind) in kinds {
            let error = of_status(StatusCode::from_u16(code).unwrap(), "GET to h:80");
            assert_eq!(error.kind(), kind, "{code}");
            assert_eq!(error.message(), format!("GET to h:80: the destination answered {code}"));
        }
    }

    #[test]
    fn an_open_breaker_names_the_destination_and_when_it_is_probed() {
        let request = Request::get("https://api.example/s3cret?q=s3cret").unwrap();
        let reason = Some("no whole answer within 30s".to_owned());
        let failure = Failure::Open { reason, probe_in: Some(Duration::from_millis(41_001)) };
        let error = failure.into_error(&request);
        assert_eq!(error.kind(), Kind::Unavailable);
        assert_eq!(error.message(), "the breaker of api.example:443 is open, it will be probed in 42 s");
        assert_eq!(error.causes(), ["no whole answer within 30s"]);

        let error = Failure::Open { reason: None, probe_in: None }.into_error(&request);
        assert_eq!(error.message(), "the breaker of api.example:443 is open, it is being probed now");
    }

    #[test]
    fn failures_have_kinds_and_quote_nothing_of_the_request() {
        let request = Request::get("https://user:s3cret@api.example/s3cret?q=s3cret").unwrap();
        let cases = [
            (Failure::Timeout(Duration::from_secs(30)), Kind::Unavailable),
            (Failure::Network("Connection refused".to_owned()), Kind::Unavailable),
            (Failure::TooLarge(9), Kind::TooLarge),
            (Failure::Unsendable("why".to_owned()), Kind::Config),
        ];
        for (failure, kind) in cases {
            let error = failure.into_error(&request);
            assert_eq!(error.kind(), kind);
            assert!(error.message().starts_with("GET to api.example:443: "), "{error}");
            assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
        }
    }
}
