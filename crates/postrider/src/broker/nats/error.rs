//! The one place that knows the error codes of NATS and JetStream.

use async_nats::jetstream::ErrorCode;
use async_nats::{ConnectError, ConnectErrorKind};

use crate::error::{Error, Kind};

type Cause = dyn std::error::Error + Send + Sync + 'static;

/// Our error for one of the driver's. `doing` says what failed and names the thing, `create the stream "x"`; `shown` is the
/// server's address without the password.
pub(super) fn classify(error: impl Into<Box<Cause>>, doing: impl std::fmt::Display, shown: &str) -> Error {
    let error = error.into();
    match said(error.as_ref()) {
        Some(said) => of_code(said.0, &said.1, doing, shown),
        None => Error::new(Kind::Unavailable, format!("cannot {doing}: NATS at {shown} cannot be reached"))
            .with_source(error),
    }
}

/// What JetStream itself said, if it did: its code, and its text, which names settings and never holds a payload.
pub(super) fn said(error: &(dyn std::error::Error + 'static)) -> Option<(ErrorCode, String)> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(said) = error.downcast_ref::<async_nats::jetstream::Error>() {
            return Some((said.error_code(), said.to_string()));
        }
        next = error.source();
    }
    None
}

/// Our error for what JetStream said.
pub(super) fn of_code(code: ErrorCode, text: &str, doing: impl std::fmt::Display, shown: &str) -> Error {
    let (kind, remedy) = match code {
        ErrorCode::STREAM_NOT_FOUND | ErrorCode::CONSUMER_NOT_FOUND => {
            (Kind::Missing, Some("create what is named, or let Postrider declare it (declare = true)"))
        }
        ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM => (Kind::TooLarge, Some("raise the stream's max_msg_size")),
        ErrorCode::STREAM_NAME_EXIST | ErrorCode::STREAM_SUBJECT_OVERLAP => (
            Kind::Mismatch,
            Some("another stream has this name or these subjects: change it, or choose another stream and prefix"),
        ),
        ErrorCode::ACCOUNT_RESOURCES_EXCEEDED
        | ErrorCode::STORAGE_RESOURCES_EXCEEDED
        | ErrorCode::MEMORY_RESOURCES_EXCEEDED
        | ErrorCode::INSUFFICIENT_RESOURCES => (
            Kind::DiskFull,
            Some("give JetStream more room (max_file_store, the account's limits), or remove what is not needed"),
        ),
        ErrorCode::JETSTREAM_NOT_ENABLED | ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT => {
            (Kind::Missing, Some("enable JetStream in the server's configuration, and for this account"))
        }
        // A stream that is full and refuses new messages says it too. It is the place that is full, whichever event comes.
        ErrorCode::STREAM_STORE_FAILED => (
            Kind::Unavailable,
            Some(
                "make room: raise the stream's max_msgs or max_bytes, or look at the server's disk; nothing is lost meanwhile",
            ),
        ),
        // A cluster without a leader, a server that shuts down, and what later versions may add.
        _ => (Kind::Unavailable, None),
    };
    let ours = Error::new(kind, format!("cannot {doing}: NATS at {shown} says {text}"));
    match remedy {
        Some(remedy) => ours.with_remedy(remedy),
        None => ours,
    }
}

/// Our error for a connection that could not be made.
pub(super) fn of_connect(error: ConnectError, shown: &str) -> Error {
    match error.kind() {
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
            Error::new(Kind::Denied, format!("NATS at {shown} does not let this user in"))
                .with_remedy("correct the user, the password, the token or the credentials")
        }
        ConnectErrorKind::ServerParse => Error::new(Kind::Config, "the NATS URL cannot be read"),
        _ => Error::new(Kind::Unavailable, format!("NATS at {shown} cannot be reached")).with_source(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_kinds() {
        let kinds = [
            (ErrorCode::STREAM_NOT_FOUND, Kind::Missing),
            (ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM, Kind::TooLarge),
            (ErrorCode::STREAM_SUBJECT_OVERLAP, Kind::Mismatch),
            (ErrorCode::STORAGE_RESOURCES_EXCEEDED, Kind::DiskFull),
            (ErrorCode::STREAM_STORE_FAILED, Kind::Unavailable),
            (ErrorCode::CLUSTER_NOT_AVAILABLE, Kind::Unavailable),
        ];
        for (code, kind) in kinds {
            let error = of_code(code, "why", "do it", "nats://h");
            assert_eq!(error.kind(), kind, "{code:?}");
            assert!(error.to_string().contains("why"));
        }
    }

    #[test]
    fn what_is_no_answer_is_unavailable() {
        let error = classify(std::io::Error::from(std::io::ErrorKind::ConnectionReset), "publish", "nats://h");
        assert_eq!(error.kind(), Kind::Unavailable);
    }
}
