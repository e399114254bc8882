//! The one place that knows AMQP's reply codes.

use std::time::Duration;

use lapin::ErrorKind;

use super::settings::RabbitMqSettings;
use crate::error::{Error, Kind};

/// AMQP's reply code and text, if the broker itself closed the channel or connection.
pub(super) fn reply(error: &lapin::Error) -> Option<(u16, String)> {
    match error.kind() {
        ErrorKind::ProtocolError(reply) => Some((reply.get_id(), reply.get_message().to_string())),
        _ => None,
    }
}

/// Whether the broker said that a thing does not exist.
pub(super) fn is_missing(error: &lapin::Error) -> bool {
    matches!(reply(error), Some((404, _)))
}

/// Our error for one of lapin's. `doing` says what failed and names the thing, `declare the queue "x"`; `shown` is the
/// broker's address without the password.
pub(super) fn classify(error: lapin::Error, doing: impl std::fmt::Display, shown: &str) -> Error {
    let Some((code, text)) = reply(&error) else {
        // As text: lapin's error repeats its own source, and the operator would read everything twice.
        let cause = match error.kind() {
            ErrorKind::IOError(error) => error.to_string(),
            _ => error.to_string(),
        };
        return Error::new(Kind::Unavailable, format!("cannot {doing}: RabbitMQ at {shown} cannot be reached"))
            .with_source(cause);
    };
    // The broker's text names the object and what differs; it never holds a payload or a password.
    let text = text.trim_end_matches('\n');
    let (kind, remedy) = match code {
        311 => (Kind::TooLarge, None),
        403 => (
            Kind::Denied,
            Some(
                "correct the user or the password in the URL, or grant the missing right (rabbitmqctl set_permissions)",
            ),
        ),
        404 => (Kind::Missing, Some("create what is named, or let Postrider declare it (declare = true)")),
        405 => (Kind::Mismatch, Some("another connection uses it exclusively: stop that, or choose another name")),
        406 => (
            Kind::Mismatch,
            Some("make the setting agree with what exists; or drain what is named, delete it, and it is declared anew"),
        ),
        530 => {
            (Kind::Denied, Some("create the vhost and grant the user access to it, or correct the vhost in the URL"))
        }
        // 320 is a shutdown; 5xx are the broker's own troubles or a broken stream: a new connection is the cure.
        _ => (Kind::Unavailable, None),
    };
    let ours = Error::new(kind, format!("cannot {doing}: RabbitMQ at {shown} says {code} {text}"));
    match remedy {
        Some(remedy) => ours.with_remedy(remedy),
        None => ours,
    }
}

/// [`classify`], for what is declared: a right that is missing then can also be made unnecessary.
pub(super) fn explain(error: lapin::Error, doing: String, shown: &str, settings: &RabbitMqSettings) -> Error {
    let error = classify(error, doing, shown);
    if error.kind() == Kind::Denied && settings.declare {
        return error
            .with_remedy("grant the user the right to configure what is named, or create it and set declare = false");
    }
    error
}

/// The error of a broker that does not answer while a connection is set up.
pub(super) fn unanswered(shown: &str, timeout: Duration) -> Error {
    Error::new(Kind::Unavailable, format!("RabbitMQ at {shown} does not answer within {timeout:?}"))
}

/// The broker's own limit, out of its complaint about a message that is larger.
pub(super) fn size_limit(error: &lapin::Error) -> Option<usize> {
    let (code, text) = reply(error)?;
    let limit = text.split("larger than configured max size ").nth(1)?;
    let digits: String = limit.chars().take_while(char::is_ascii_digit).collect();
    (code == 406).then(|| digits.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use lapin::protocol::AMQPError;

    use super::*;

    fn said(code: u16, text: &str) -> lapin::Error {
        ErrorKind::ProtocolError(AMQPError::from_id(code, text.into()).unwrap()).into()
    }

    #[test]
    fn reply_codes_become_kinds() {
        let kinds = [
            (311, Kind::TooLarge),
            (320, Kind::Unavailable),
            (403, Kind::Denied),
            (404, Kind::Missing),
            (405, Kind::Mismatch),
            (406, Kind::Mismatch),
            (530, Kind::Denied),
            (541, Kind::Unavailable),
        ];
        for (code, kind) in kinds {
            let error = classify(said(code, "why"), "do it", "amqp://h");
            assert_eq!(error.kind(), kind, "{code}");
            assert!(error.to_string().contains("why"));
        }
    }

    #[test]
    fn a_lost_connection_is_unavailable() {
        let error: lapin::Error = std::io::Error::from(std::io::ErrorKind::ConnectionReset).into();
        assert_eq!(classify(error, "publish", "amqp://h").kind(), Kind::Unavailable);
    }

    #[test]
    fn the_limit_is_read_from_the_complaint() {
        let text = "PRECONDITION_FAILED - message size 200 is larger than configured max size 100";
        assert_eq!(size_limit(&said(406, text)), Some(100));
        assert_eq!(size_limit(&said(406, "inequivalent arg")), None);
    }
}
