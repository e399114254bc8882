//! Publishes a batch: all messages first, then all confirms.
//!
//! A message counts as delivered when the broker acked it and did not return it. lapin hands a returned message to
//! *some* confirm of its channel: to the one whose ack happens to be read next, while RabbitMQ sends the return at once
//! and the acks later, in bunches. So a `Flight` has its channel to itself and finds out by message id whom a returned
//! message belongs to. All returns of a flight have come when its last ack has: each is sent before its own ack.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use lapin::message::BasicReturnMessage;
use lapin::options::BasicPublishOptions;
use lapin::types::ShortString;
use lapin::{Channel, Confirmation, PublisherConfirm};

use super::error::{classify, size_limit};
use super::message;
use crate::error::{Error, Kind, Result};
use crate::event::Event;

/// How much may wait unsent inside lapin, which copies payloads; more waits for the socket.
const UNSENT_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Where a flight goes, in the words of its errors.
pub(super) struct Destination<'a> {
    pub exchange: &'a ShortString,
    pub shown: &'a str,
}

/// A batch on its way.
pub(super) struct Flight<'b> {
    batch: &'b [Arc<Event>],
    destination: Destination<'b>,
    confirms: Vec<Option<PublisherConfirm>>,
    results: Vec<Option<Result<()>>>,
    returned: Vec<BasicReturnMessage>,
    /// Whether every message was handed over, so that every confirm is in `confirms`.
    is_sent: bool,
    /// Whether the connection failed any of the messages.
    is_broken: bool,
}

impl<'b> Flight<'b> {
    pub fn new(batch: &'b [Arc<Event>], destination: Destination<'b>) -> Self {
        let confirms = batch.iter().map(|_| None).collect();
        let results = batch.iter().map(|_| None).collect();
        Self { batch, destination, confirms, results, returned: Vec::new(), is_sent: false, is_broken: false }
    }

    /// Hands every message to the connection. May be dropped half-way; then the channel must not be used again.
    pub async fn send(&mut self, channel: &Channel) {
        let mut begin = 0;
        while begin < self.batch.len() {
            let mut end = begin;
            let mut bytes = 0;
            while end < self.batch.len() && (end == begin || bytes < UNSENT_BYTES_MAX) {
                bytes += self.batch[end].payload().len();
                end += 1;
            }
            self.send_part(channel, begin, end).await;
            begin = end;
        }
        self.is_sent = true;
    }

    async fn send_part(&mut self, channel: &Channel, begin: usize, end: usize) {
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let (batch, exchange) = (self.batch, self.destination.exchange);
        let mut sends: Vec<_> = batch[begin..end]
            .iter()
            .map(|event| {
                ShortString::try_new(event.topic()).map(|routing_key| {
                    let exchange = exchange.clone();
                    let properties = message::properties(event);
                    let mut send =
                        Box::pin(channel.basic_publish(exchange, routing_key, options, event.payload(), properties));
                    // lapin queues the frames at the first poll, so polling in turn keeps the batch's order. Nobody
                    // needs to be woken: the sends are awaited below.
                    let mut context = Context::from_waker(Waker::noop());
                    let done = send.poll_unpin(&mut context);
                    (send, done)
                })
            })
            .collect();
        // Frames leave in order, so once the last is sent the others are ready: one wake-up instead of hundreds.
        for (offset, send) in sends.iter_mut().enumerate().rev() {
            let index = begin + offset;
            let sent = match send {
                Ok((_, std::task::Poll::Ready(sent))) => {
                    std::mem::replace(sent, Err(lapin::ErrorKind::FutureCompleted.into()))
                }
                Ok((send, std::task::Poll::Pending)) => send.await,
                Err(_) => {
                    self.results[index] =
                        Some(Err(Error::new(Kind::Invalid, "the topic is too long for a routing key")));
                    continue;
                }
            };
            match sent {
                Ok(confirm) => self.confirms[index] = Some(confirm),
                Err(error) => self.failed(index, error),
            }
        }
    }

    /// Waits for the confirms, the last first, because it usually comes last and then the others are there.
    pub async fn settle(&mut self) {
        for index in (0..self.confirms.len()).rev() {
            // Borrowed, not taken: a confirm that is dropped with this future would be lost to `finish`.
            let Some(confirm) = self.confirms[index].as_mut() else { continue };
            let confirmation = confirm.await;
            self.record(index, confirmation);
        }
    }

    fn record(&mut self, index: usize, confirmation: lapin::Result<Confirmation>) {
        self.confirms[index] = None;
        let (result, returned) = match confirmation {
            Ok(Confirmation::Ack(returned)) => (Ok(()), returned),
            Ok(Confirmation::Nack(returned)) => (Err(self.refused(index)), returned),
            Ok(Confirmation::NotRequested) => {
                (Err(Error::new(Kind::Other, "the channel is not in confirm mode")), None)
            }
            Err(error) => return self.failed(index, error),
        };
        self.results[index] = Some(result);
        self.returned.extend(returned);
    }

    fn failed(&mut self, index: usize, error: lapin::Error) {
        self.is_broken = true;
        let event = &self.batch[index];
        let ours = match size_limit(&error) {
            // The broker closes the channel over one large message; only that one is to blame.
            Some(limit) if event.payload().len() > limit => Error::new(
                Kind::TooLarge,
                format!("the payload has {} bytes, RabbitMQ takes {limit}", event.payload().len()),
            ),
            Some(_) => Error::new(Kind::Unavailable, "another message of the batch was too large for RabbitMQ"),
            None => {
                let doing = format!("publish to the exchange {:?}", self.destination.exchange.as_str());
                classify(error, doing, self.destination.shown)
            }
        };
        self.results[index] = Some(Err(ours));
    }

    fn refused(&self, index: usize) -> Error {
        Error::new(
            Kind::Refused,
            format!(
                "RabbitMQ refused an event for exchange {:?} with routing key {:?}",
                self.destination.exchange.as_str(),
                self.batch[index].topic()
            ),
        )
    }

    /// One result per event. Those that nothing was heard of get `silence` as theirs. The boolean says whether the
    /// channel may be used again: everything that was sent on it was answered.
    pub fn finish(mut self, silence: impl Fn() -> Error) -> (Vec<Result<()>>, bool) {
        for index in 0..self.confirms.len() {
            let confirmation = self.confirms[index].as_mut().and_then(|confirm| confirm.now_or_never());
            if let Some(confirmation) = confirmation {
                self.record(index, confirmation);
            }
        }
        // An ack that was read just now may hold the returned message of one that counts as delivered above. It is
        // looked at for that alone.
        for confirm in self.confirms.iter_mut().flatten() {
            if let Some(Ok(confirmation)) = confirm.now_or_never() {
                self.returned.extend(confirmation.take_message());
            }
        }
        for returned in std::mem::take(&mut self.returned) {
            self.attribute(&returned);
        }
        if !self.is_sent {
            // Confirms were dropped together with the sending, and with them, perhaps, returned messages.
            for result in self.results.iter_mut().filter(|result| matches!(result, Some(Ok(())))) {
                *result = None;
            }
        }
        let is_clean = !self.is_broken && self.results.iter().all(Option::is_some);
        let results = self.results.into_iter().map(|result| result.unwrap_or_else(|| Err(silence()))).collect();
        (results, is_clean)
    }

    fn attribute(&mut self, returned: &BasicReturnMessage) {
        let id = returned.properties.message_id().as_ref().map(ShortString::as_str);
        let mut is_found = false;
        for (event, result) in self.batch.iter().zip(&mut self.results) {
            if returned.routing_key.as_str() == event.topic() && id == Some(event.id().to_string().as_str()) {
                is_found = true;
                *result = Some(Err(Error::new(
                    Kind::Unroutable,
                    format!(
                        "no queue is bound to the exchange {:?} for the routing key {:?}",
                        self.destination.exchange.as_str(),
                        event.topic()
                    ),
                )));
            }
        }
        if !is_found {
            // Cannot happen on a channel of our own. If it does, nothing of this flight can be called delivered.
            for result in self.results.iter_mut().filter(|result| matches!(result, Some(Ok(())))) {
                *result = Some(Err(Error::new(Kind::Unavailable, "RabbitMQ returned a message that was not sent")));
            }
        }
    }
}

/// The error of events whose confirm did not come in time.
pub(super) fn silent(timeout: Duration, blocked: Option<&str>, shown: &str) -> Error {
    match blocked {
        Some(reason) => blocked_error(reason, shown),
        None => Error::new(Kind::Unavailable, format!("RabbitMQ at {shown} did not confirm within {timeout:?}")),
    }
}

/// The error while the broker stops all publishers.
pub(super) fn blocked_error(reason: &str, shown: &str) -> Error {
    Error::new(Kind::Unavailable, format!("RabbitMQ at {shown} blocks publishers: {reason}")).with_remedy(
        "free the broker's memory or disk (rabbitmqctl status shows the alarm); publishing goes on by itself",
    )
}
