//! What a status code means: for the piece of work, for the next try, and for the destination.

use std::time::Duration;

use reqwest::StatusCode;

/// What an answer means for the work that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// 2xx: the destination did it.
    Done,
    /// 4xx, except those below: the destination understood and says no. Sending the same again changes nothing.
    Rejected,
    /// Everything else (408, 425, 429, 5xx, but also a redirect): it may succeed later.
    Retry {
        /// The wait that the destination asked for with `Retry-After`, at most
        /// [`super::HttpSettings::retry_after_max`].
        after: Option<Duration>,
    },
}

impl Verdict {
    /// The verdict of a status, with the wait that came with it.
    pub fn of(status: StatusCode, retry_after: Option<Duration>) -> Self {
        match status.as_u16() {
            200..=299 => Verdict::Done,
            408 | 425 | 429 => Verdict::Retry { after: retry_after },
            400..=499 => Verdict::Rejected,
            _ => Verdict::Retry { after: retry_after },
        }
    }
}

/// When the client itself tries again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Again {
    /// After the wait of the backoff.
    Backoff,
    /// After the wait that the destination asked for.
    After(Duration),
}

/// Whether, and when, an answer with this status is worth another try. Narrower than [`Verdict::Retry`]: who waits for
/// an answer is not served by minutes of patience, so only what passes quickly is tried again.
pub(super) fn again(status: StatusCode, retry_after: Option<Duration>) -> Option<Again> {
    match status.as_u16() {
        429 | 503 => Some(retry_after.map_or(Again::Backoff, Again::After)),
        500..=599 => Some(Again::Backoff),
        _ => None,
    }
}

/// Whether the status is a failure of the destination, which its breaker counts. A 4xx proves that it is there.
pub(super) fn is_destination_failing(status: StatusCode) -> bool {
    status.is_server_error()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Option<Duration> = Some(Duration::from_secs(7));

    /// Every status that HTTP can carry and our client takes.
    fn statuses() -> impl Iterator<Item = StatusCode> {
        (100..=999).map(|code| StatusCode::from_u16(code).unwrap())
    }

    #[test]
    fn every_status_has_its_verdict() {
        for status in statuses() {
            let expected = match status.as_u16() {
                code if (200..300).contains(&code) => Verdict::Done,
                408 | 425 | 429 => Verdict::Retry { after: WAIT },
                code if (400..500).contains(&code) => Verdict::Rejected,
                _ => Verdict::Retry { after: WAIT },
            };
            assert_eq!(Verdict::of(status, WAIT), expected, "{status}");
        }
        assert_eq!(Verdict::of(StatusCode::SERVICE_UNAVAILABLE, None), Verdict::Retry { after: None });
    }

    #[test]
    fn only_429_and_5xx_are_tried_again() {
        for status in statuses() {
            let is_tried = status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error();
            assert_eq!(again(status, None), is_tried.then_some(Again::Backoff), "{status}");
        }
    }

    #[test]
    fn only_429_and_503_may_choose_the_wait() {
        for status in statuses() {
            let is_heard = matches!(again(status, WAIT), Some(Again::After(_)));
            assert_eq!(is_heard, matches!(status.as_u16(), 429 | 503), "{status}");
        }
    }

    #[test]
    fn only_5xx_are_failures_of_the_destination() {
        for status in statuses() {
            assert_eq!(is_destination_failing(status), (500..600).contains(&status.as_u16()), "{status}");
        }
    }
}
