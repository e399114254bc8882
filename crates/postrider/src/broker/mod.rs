//! Brokers: carry events from the relay to every consumer.
//!
//! The contract that every broker keeps is tested by `postrider_testkit::conformance::broker`.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::doctor::Finding;
use crate::error::{Error, Result};
use crate::event::{Event, id_of_hash};
use crate::handler::{ConsumerSpec, Place};
use crate::inbox::{Body, Failed};
use crate::lease::Lease;

mod aside;
pub mod cloudevents;
pub mod embedded;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
#[cfg(feature = "redis")]
pub mod redis;
pub mod topic;
#[cfg(any(feature = "nats", feature = "redis"))]
mod window;

/// How a broker treats the events of one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batching {
    /// Each event succeeds or fails on its own. Two events of one key must not be in flight together, or the second
    /// could arrive although the first failed.
    Independent,
    /// The whole batch, in order, or nothing of it.
    Atomic,
}

/// A broker. Shared by all lanes and consumers of an instance; every method may be called concurrently.
#[async_trait]
pub trait Broker: Send + Sync {
    /// How batches behave.
    fn batching(&self) -> Batching;

    /// Whether the broker can carry this event at all (size, headers). Called before the first publish; an error
    /// parks the event without troubling the broker.
    fn check(&self, event: &Event) -> Result<()>;

    /// Publishes a batch and returns one result per event, in the same order, when all are known.
    ///
    /// `Ok` means: durably stored by the broker for at least one queue (or consumer group). An error whose
    /// [`crate::Kind::belongs_to_event`] holds is the event's own fault; any other error means that the broker was not
    /// able to say, and the event must be published again, with the same id. Never blocks longer than the broker's
    /// publish time-out.
    async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<(), Error>>;

    /// Why the broker asks publishers to stop at the moment, if it does.
    fn blocked(&self) -> Option<String>;

    /// Starts to receive the messages of one slot of a consumer. The place where the consumer's messages gather
    /// (queue, group) is declared durable, with its bindings, and read back; an unsafe or different one is an error
    /// that names it.
    async fn subscribe(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<Box<dyn Subscription>>;

    /// Whether it has places of its own for what a consumer could not apply. Without, the store alone keeps it.
    fn has_places(&self) -> bool {
        false
    }

    /// Puts a message into such a place, with the reason in its headers. Success means that it is durably there.
    async fn set_aside(&self, aside: &Aside<'_>) -> Result<()> {
        let _ = aside;
        Ok(())
    }

    /// Reads the broker's settings back and reports what is unsafe. For `doctor` and for start-up.
    async fn inspect(&self) -> Result<Vec<Finding>>;
}

/// Why a message is set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsideKind {
    /// It is a dead letter.
    Dead,
    /// Nobody handles it.
    Skipped,
}

/// A message that a consumer could not apply, for the broker's own place.
#[derive(Debug, Clone, Copy)]
pub struct Aside<'a> {
    /// The consumer.
    pub consumer: &'a str,
    /// Why.
    pub kind: AsideKind,
    /// Where to.
    pub place: &'a Place,
    /// The message.
    pub message: Body<'a>,
    /// The reason.
    pub failed: &'a Failed,
    /// How often it was tried.
    pub attempts: u32,
    /// Where it came from, where that is known.
    pub origin: Option<&'a Origin>,
}

/// Where a message came from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The exchange or stream.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub exchange: String,
    /// The topic, or routing key.
    pub topic: String,
    /// The queue or group that it was read from.
    pub queue: String,
    /// Its place there, where the broker numbers messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<i64>,
    /// Whether a person sent it again, long after its time: how long it took then says nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_replayed: bool,
}

/// A message that is no event, as it came.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawMessage {
    /// Its headers and properties.
    pub headers: BTreeMap<String, String>,
    /// Its body.
    pub payload: Bytes,
}

impl RawMessage {
    /// An id that is always the same for the same content.
    pub fn id(&self) -> Uuid {
        self.hashed([])
    }

    /// An id that is always the same for the same message. Where the broker numbers messages, others of the same content
    /// have other ids; elsewhere those of other topics.
    pub fn id_at(&self, origin: &Origin) -> Uuid {
        let Origin { exchange, topic, offset, .. } = origin;
        let names = exchange.bytes().chain([0]).chain(topic.bytes()).chain([0]);
        self.hashed(names.chain(offset.unwrap_or(-1).to_be_bytes()))
    }

    fn hashed(&self, place: impl IntoIterator<Item = u8>) -> Uuid {
        let headers =
            self.headers.iter().flat_map(|(name, value)| name.bytes().chain([0]).chain(value.bytes()).chain([0]));
        let headers = topic::fnv64(headers.chain(place));
        let payload = topic::fnv64(self.payload.iter().copied());
        id_of_hash(u128::from(headers) << 64 | u128::from(payload))
    }
}

/// A message that is no event, and why.
#[derive(Debug)]
pub struct Undecodable {
    /// Why.
    pub error: Error,
    /// The message.
    pub raw: RawMessage,
}

/// A message as it arrived. One that cannot be understood is still a message.
#[derive(Debug)]
pub struct Delivery {
    /// What to give to [`Subscription::ack`].
    pub tag: u64,
    /// The event, or why it is none.
    pub event: Result<Event, Undecodable>,
    /// Whether the broker says that it was delivered before.
    pub is_redelivered: bool,
    /// Where it came from.
    pub origin: Origin,
}

/// The stream of one consumer's messages. Messages of one key come in order; one that was not acked comes again
/// after the subscription ends, before later ones of its key.
#[async_trait]
pub trait Subscription: Send {
    /// The next message; waits for it. Holds at most `prefetch` messages unacked. Cancel-safe. An error ends the
    /// subscription.
    async fn next(&mut self) -> Result<Delivery>;

    /// Says that the message's effect is committed. Acks may come in any order.
    async fn ack(&mut self, tag: u64) -> Result<()>;

    /// The same for many at once. The broker may hear of them a little later.
    async fn ack_all(&mut self, tags: &[u64]) -> Result<()> {
        for tag in tags {
            self.ack(*tag).await?;
        }
        Ok(())
    }

    /// Ends the subscription in good order. Not calling it is safe: what was acked may then be delivered again.
    async fn close(&mut self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_messages_at_other_places_have_other_ids() {
        let raw = RawMessage { headers: BTreeMap::new(), payload: Bytes::from_static(b"{}") };
        let at = |topic: &str, offset: Option<i64>| Origin { topic: topic.to_owned(), offset, ..Origin::default() };
        let id = raw.id_at(&at("orders.paid", Some(7)));
        assert_eq!(raw.id_at(&at("orders.paid", Some(7))), id, "delivered again");
        assert_ne!(raw.id_at(&at("orders.paid", Some(8))), id);
        assert_ne!(raw.id_at(&at("orders.cancelled", Some(7))), id);
        assert_ne!(raw.id_at(&at("orders.paid", None)), raw.id_at(&at("orders.cancelled", None)));
    }
}
