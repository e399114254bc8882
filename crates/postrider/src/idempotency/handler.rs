//! A handler that asks Redis first.

use std::time::Duration;

use async_trait::async_trait;

use super::{Begun, Claim, RedisIdempotency};
use crate::error::Error;
use crate::event::Event;
use crate::handler::{Handler, HandlerError};

/// How long an event pauses that is in progress elsewhere, or while Redis is away.
const PAUSE: Duration = Duration::from_secs(5);

/// Applies each event once, as far as Redis remembers: see [`crate::idempotency`].
///
/// | what happens | the event |
/// |---|---|
/// | done before | is done with |
/// | in progress elsewhere | pauses, and is not counted as failed |
/// | Redis is away before the effect | pauses, and is not counted as failed |
/// | the handler fails | its claim is given back, and the consumer decides as usual |
/// | the handler is stopped, panics, or its process dies | waits until the claim runs out |
/// | Redis is away after the effect | is done with; another delivery after the claim has run out is applied again |
///
/// The claim must hold for longer than [`crate::ConsumerSpec::handler_timeout`].
pub struct Idempotent<H> {
    idempotency: RedisIdempotency,
    handler: H,
    pause: Duration,
}

impl<H> Idempotent<H> {
    /// `handler`, for events that Redis does not know as done.
    pub fn new(idempotency: RedisIdempotency, handler: H) -> Self {
        Self { idempotency, handler, pause: PAUSE }
    }

    /// How long an event pauses that is in progress elsewhere, or while Redis is away; 5 s if nobody says otherwise.
    #[must_use]
    pub fn pause(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }

    fn not_begun(&self, event: &Event, error: Error) -> HandlerError {
        if error.kind().belongs_to_event() {
            return error.into();
        }
        tracing::warn!(event = %event.id(), error_type = error.kind().as_str(), %error, causes = ?error.causes(),
            remedy = error.remedy(), "the event pauses until Redis can be used");
        HandlerError::snooze(self.pause)
    }
}

#[async_trait]
impl<Tx: Send, H: Handler<Tx>> Handler<Tx> for Idempotent<H> {
    async fn handle(&self, tx: &mut Tx, event: &Event) -> Result<(), HandlerError> {
        let claim = match self.idempotency.begin(event.id()).await {
            Ok(Begun::New(claim)) => claim,
            Ok(Begun::InProgress) => return Err(HandlerError::snooze(self.pause)),
            Ok(Begun::Done { .. }) => return Ok(()),
            Err(error) => return Err(self.not_begun(event, error)),
        };
        match self.handler.handle(tx, event).await {
            Ok(()) => {
                finish(event, claim).await;
                Ok(())
            }
            Err(failed) => {
                if let Err(error) = claim.release().await {
                    tracing::warn!(event = %event.id(), error_type = error.kind().as_str(), %error,
                        causes = ?error.causes(), remedy = error.remedy(), "the event waits until its claim runs out");
                }
                Err(failed)
            }
        }
    }
}

/// The effect has happened, so nothing here is a reason to apply the event again.
async fn finish(event: &Event, claim: Claim) {
    match claim.done().await {
        Ok(true) => {}
        Ok(false) => tracing::warn!(event = %event.id(), remedy = "set claim to more than the handler may take",
            "the handler took longer than its claim, so the effect may happen twice"),
        Err(error) => tracing::warn!(event = %event.id(), error_type = error.kind().as_str(), %error,
            causes = ?error.causes(), remedy = error.remedy(), "the effect is not remembered and may happen twice"),
    }
}
