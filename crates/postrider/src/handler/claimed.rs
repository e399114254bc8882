//! Brings the payload of an event that travelled without it.

use std::borrow::Cow;

use super::slot::SlotRun;
use super::verdict::{Verdict, failed};
use crate::claim::is_claimed;
use crate::error::{Error, Kind};
use crate::event::Event;
use crate::inbox::Inbox;

/// The type of the error of a payload that cannot be had.
const ERROR_TYPE: &str = "claim";

/// The event with its payload; or as it is, and what is to be done with it.
///
/// A payload that is missing or altered makes a dead letter, which keeps the reference, so that a replay finds the
/// payload when somebody has put it back. A storage that cannot be reached is not the event's fault: it is held, and
/// nothing counted.
pub(super) async fn fetch<'e, I: Inbox>(run: &SlotRun<I>, event: &'e Event) -> (Cow<'e, Event>, Option<Verdict>) {
    let spec = &run.spec;
    if !is_claimed(event) {
        return (Cow::Borrowed(event), None);
    }
    let fetched = match &run.claims {
        Some(claims) => claims.fetch(event).await,
        None => Err(Error::new(Kind::Corrupt, "the payload cannot be fetched: this consumer has no claim storage")),
    };
    let said = match fetched {
        Ok(whole) => {
            run.meter.claim_fetched();
            return (Cow::Owned(whole), None);
        }
        Err(error) if error.kind().belongs_to_event() => Verdict::Reject(failed(ERROR_TYPE, &error)),
        Err(error) => {
            tracing::warn!(consumer = %spec.name, event = %event.id(), error_type = error.kind().as_str(), %error,
                causes = ?error.causes(), remedy = error.remedy(),
                "a payload cannot be fetched now, trying again later");
            Verdict::Snooze(spec.backoff.delay_with(1, &mut fastrand::Rng::new()))
        }
    };
    (Cow::Borrowed(event), Some(said))
}
