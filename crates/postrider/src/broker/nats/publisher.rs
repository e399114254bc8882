//! Publishes batches: all messages first, then all answers.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_nats::jetstream::context::{PublishAckFuture, PublishError, PublishErrorKind};
use async_nats::jetstream::publish::PublishAck;
use tokio::time::Instant;

use super::error::{classify, of_code, said};
use super::link::{Link, Live};
use super::settings::NatsSettings;
use super::{message, stream};
use crate::error::{Error, Kind, Result};
use crate::event::Event;

pub(super) struct Publisher {
    link: Arc<Link>,
    settings: Arc<NatsSettings>,
    /// Whether the stream was there and safe when it was last looked at.
    is_ready: AtomicBool,
    /// What the server takes; 0 until it is known.
    bytes_max: AtomicUsize,
}

impl Publisher {
    pub fn new(link: Arc<Link>, settings: Arc<NatsSettings>) -> Self {
        Self { link, settings, is_ready: AtomicBool::new(false), bytes_max: AtomicUsize::new(0) }
    }

    /// What a message may weigh with its headers, once the server has said it.
    pub fn message_bytes_max(&self) -> Option<usize> {
        Some(self.bytes_max.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }

    pub async fn publish(&self, batch: &[Arc<Event>]) -> Result<Vec<Result<()>>> {
        let explain = |error| self.link.explain(error);
        let results = self.publish_all(batch).await.map_err(explain)?;
        Ok(results.into_iter().map(|result| result.map_err(explain)).collect())
    }

    async fn publish_all(&self, batch: &[Arc<Event>]) -> Result<Vec<Result<()>>> {
        let deadline = Instant::now() + self.settings.publish_timeout;
        let live = self.link.live().await?;
        self.prepare(&live, deadline).await?;
        // One after the other, so that they leave in order; the answers come while later ones are sent.
        let mut is_late = pin!(tokio::time::sleep_until(deadline));
        let mut answers = Vec::with_capacity(batch.len());
        for event in batch {
            answers.push(tokio::select! {
                biased;
                sent = self.send(&live, event) => sent,
                () = &mut is_late => Err(self.late()),
            });
        }
        let mut results = Vec::with_capacity(batch.len());
        // From the last one on: when that is answered, the others are, and none of them needs to wake us.
        for (event, answer) in batch.iter().zip(answers).rev() {
            let answer = match answer {
                Ok(answer) => tokio::select! {
                    biased;
                    answer = answer.into_future() => answer,
                    () = &mut is_late => {
                        results.push(Err(self.late()));
                        continue;
                    }
                },
                Err(error) => {
                    results.push(Err(error));
                    continue;
                }
            };
            results.push(self.answered(&live, event, answer, deadline).await);
        }
        results.reverse();
        Ok(results)
    }

    /// The stream is looked at before the first event, and again after it was missed.
    async fn prepare(&self, live: &Live, deadline: Instant) -> Result<()> {
        self.bytes_max.store(live.client.max_payload(), Ordering::Relaxed);
        if !self.is_ready.load(Ordering::Relaxed) {
            let looking = stream::events(live, &self.settings, self.link.shown());
            tokio::time::timeout_at(deadline, looking).await.map_err(|_| self.late())??;
            self.is_ready.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    async fn send(&self, live: &Live, event: &Event) -> Result<PublishAckFuture> {
        // Whoever publishes has asked `check` before, but perhaps before the server's limit was known.
        message::check(event, &self.settings, self.message_bytes_max())?;
        let subject = message::subject(&self.settings.prefix, event);
        let sending = live.jetstream.publish_with_headers(subject, message::headers(event), event.payload().clone());
        sending.await.map_err(|error| self.failed(error))
    }

    async fn answered(
        &self,
        live: &Live,
        event: &Event,
        answer: Result<PublishAck, PublishError>,
        deadline: Instant,
    ) -> Result<()> {
        match answer {
            Ok(ack) => stored(&ack, &self.settings.stream),
            Err(error) if error.kind() == PublishErrorKind::StreamNotFound => {
                Err(self.unheard(live, event, deadline).await)
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Nobody answers for a subject: because the stream does not have it, or is not there, or nothing is.
    async fn unheard(&self, live: &Live, event: &Event, deadline: Instant) -> Error {
        self.is_ready.store(false, Ordering::Relaxed);
        let subject = message::subject(&self.settings.prefix, event);
        let looking = stream::find(live, &self.settings.stream, self.link.shown());
        match tokio::time::timeout_at(deadline, looking).await {
            Err(_) => self.late(),
            Ok(Err(error)) => error,
            Ok(Ok(None)) => Error::new(Kind::Missing, format!("the stream {:?} is gone", self.settings.stream)),
            Ok(Ok(Some(stream))) => {
                let subjects = &stream.cached_info().config.subjects;
                match subjects.iter().any(|pattern| *pattern == self.settings.subjects() || pattern == ">") {
                    // A stream whose servers are just choosing a leader.
                    true => Error::new(
                        Kind::Unavailable,
                        format!("the stream {:?} does not answer at the moment", self.settings.stream),
                    ),
                    false => Error::new(
                        Kind::Unroutable,
                        format!("no stream has the subject {subject:?}; {:?} has others", self.settings.stream),
                    )
                    .with_remedy(format!("add the subjects {} to the stream", self.settings.subjects())),
                }
            }
        }
    }

    fn failed(&self, error: PublishError) -> Error {
        const DOING: &str = "publish";
        match (error.kind(), said(&error)) {
            (PublishErrorKind::MaxPayloadExceeded, _) => {
                Error::new(Kind::TooLarge, "the message is larger than the server's max_payload")
            }
            (PublishErrorKind::TimedOut, _) => self.late(),
            (_, Some((code, text))) => of_code(code, &text, DOING, self.link.shown()),
            _ => classify(error, DOING, self.link.shown()),
        }
    }

    fn late(&self) -> Error {
        Error::new(Kind::Unavailable, format!("NATS at {} does not confirm in time", self.link.shown()))
    }
}

/// Whether an answer says that the event is on the stream.
fn stored(ack: &PublishAck, stream: &str) -> Result<()> {
    if ack.stream != stream {
        let message = format!("the stream {:?} has taken an event for {stream:?}", ack.stream);
        let remedy = "let only one stream have the subjects of this prefix";
        return Err(Error::new(Kind::Mismatch, message).with_remedy(remedy));
    }
    // An older cluster knows an id from its proposal on, calls a repetition a duplicate, and may drop the proposal.
    if ack.sequence == 0 {
        let message = format!("the stream {stream:?} has seen an event and not stored it yet");
        return Err(Error::new(Kind::Unavailable, message).with_remedy("nothing, it is sent again"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_with_a_sequence_says_that_the_event_is_stored() {
        let answer = |text: &str| stored(&serde_json::from_str(text).expect("an answer"), "postrider");
        assert!(answer(r#"{"stream":"postrider","seq":7}"#).is_ok());
        assert!(answer(r#"{"stream":"postrider","seq":7,"duplicate":true}"#).is_ok(), "stored before");
        let error = answer(r#"{"stream":"postrider","seq":0,"duplicate":true}"#).expect_err("proposed, not stored");
        assert_eq!(error.kind(), Kind::Unavailable);
        assert_eq!(answer(r#"{"stream":"other","seq":7}"#).expect_err("elsewhere").kind(), Kind::Mismatch);
    }
}
