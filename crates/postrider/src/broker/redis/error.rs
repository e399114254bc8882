//! What errors of Redis mean for a broker, beside what they mean to everybody.

use crate::error::{Error, Kind};

/// A key of another type is nobody's corrupt event: somebody else uses our keys.
pub(super) fn of_streams(error: Error) -> Error {
    match error.kind() {
        Kind::Corrupt => Error::new(Kind::Mismatch, error.message().to_owned())
            .with_remedy("find out who else uses keys with this prefix, or choose another one"),
        _ => error,
    }
}

/// The error of a holder whose successor is at work.
pub(super) fn replaced(consumer: &str, slot: u32) -> Error {
    Error::new(Kind::LeaseLost, format!("slot {slot} of the consumer {consumer:?} has a later holder"))
}

/// Redis has answered with something that our scripts do not say.
pub(super) fn unexpected(shown: &str) -> Error {
    Error::new(Kind::Other, format!("Redis at {shown} gave an answer that cannot be understood"))
}
