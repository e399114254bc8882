//! Sends dead letters to the broker's own place, after they are in the store.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Place;
use super::slot::SlotRun;
use crate::broker::{Aside, AsideKind};
use crate::error::Result;
use crate::inbox::Inbox;

/// Dead letters sent at once.
const LIMIT: usize = 100;

/// Sends what the broker does not have yet. A crash before that is written down sends it twice, which a place for people
/// bears.
pub(super) async fn send_dead_letters<I: Inbox>(run: Arc<SlotRun<I>>) -> Result<()> {
    if !run.broker.has_places() || run.spec.dead_letters_to == Place::Nowhere {
        return Ok(());
    }
    let retries = run.inbox.retries();
    let unsent = retries.unsent(run.part(), LIMIT).await?;
    if unsent.len() == LIMIT {
        run.has_unsent.store(true, Ordering::Relaxed);
    }
    for letter in unsent {
        let aside = Aside {
            consumer: &run.spec.name,
            kind: AsideKind::Dead,
            place: &run.spec.dead_letters_to,
            message: letter.message.as_body(),
            failed: &letter.failed,
            attempts: letter.attempts,
            origin: Some(&letter.origin),
        };
        match run.broker.set_aside(&aside).await {
            Ok(()) => {}
            // It would hold up the others for ever. The store has it.
            Err(error) if error.kind().belongs_to_event() => {
                tracing::warn!(consumer = %run.spec.name, dead_letter = letter.id, error_type = error.kind().as_str(),
                    %error, "the broker does not take a copy of a dead letter");
            }
            Err(error) => return Err(error),
        }
        retries.sent(letter.id).await?;
    }
    Ok(())
}
