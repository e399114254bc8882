//! The messages of one slot of a consumer, over a channel of its own.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::{FutureExt, StreamExt};
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Consumer};

use super::acks::{Acks, Told};
use super::error::classify;
use super::link::Live;
use super::message;
use super::topology::queue_name;
use crate::broker::{Delivery, Subscription};
use crate::error::{Error, Kind, Result};
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

/// AMQP's code for an orderly end.
const REPLY_SUCCESS: u16 = 200;
/// How long to wait for the broker's answer to a close.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
/// A consumer tag is an AMQP short string.
const TAG_BYTES_MAX: usize = 255;

pub(super) struct QueueSubscription {
    consumer: Consumer,
    channel: Channel,
    queue: String,
    shown: String,
    acks: Acks,
}

impl QueueSubscription {
    /// Begins to consume a queue that is there.
    pub async fn open(live: &Live, consumer: &ConsumerSpec, lease: &Lease, shown: &str) -> Result<Self> {
        let queue = queue_name(consumer, lease.slot);
        let doing = || format!("consume the queue {queue:?}");
        let name = ShortString::try_new(queue.as_str())
            .map_err(|error| Error::new(Kind::Config, "the queue's name is too long").with_source(error))?;
        let channel = live.channel().await.map_err(|error| classify(error, doing(), shown))?;
        channel
            .basic_qos(consumer.prefetch, BasicQosOptions::default())
            .await
            .map_err(|error| classify(error, doing(), shown))?;
        let acks = Acks::new(consumer.prefetch);
        let consumer = channel
            .basic_consume(name, tag(lease), BasicConsumeOptions::default(), FieldTable::default())
            .await
            .map_err(|error| classify(error, doing(), shown))?;
        Ok(Self { consumer, channel, queue, shown: shown.to_owned(), acks })
    }

    fn tell_all(&self, told: Told) -> Result<()> {
        if let Some(tag) = told.up_to {
            self.tell(tag, true)?;
        }
        told.alone.into_iter().try_for_each(|tag| self.tell(tag, false))
    }

    fn tell(&self, tag: u64, multiple: bool) -> Result<()> {
        // The first poll queues the frame; waiting until the socket took it would cost two context switches per
        // message and prove nothing, because the broker does not answer acks. Their number is bounded by the prefetch.
        match self.channel.basic_ack(tag, BasicAckOptions { multiple }).now_or_never() {
            None | Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(self.ended(error)),
        }
    }

    fn ended(&self, error: lapin::Error) -> Error {
        let error = classify(error, format!("go on consuming the queue {:?}", self.queue), &self.shown);
        match error.kind() {
            // A queue that could be consumed a moment ago agrees with us; the broker closed this channel for another
            // reason, such as an ack that took longer than its consumer_timeout. A new channel is the cure.
            Kind::Mismatch => Error::new(Kind::Unavailable, error.to_string())
                .with_remedy("if it comes again, raise the broker's consumer_timeout or make the handler faster"),
            _ => error,
        }
    }
}

/// Names the instance, so that `rabbitmqctl list_consumers` shows who has a queue.
fn tag(lease: &Lease) -> ShortString {
    let mut tag = format!("{}/{}@{}#{}", lease.group, lease.slot, lease.owner, lease.epoch);
    while tag.len() > TAG_BYTES_MAX {
        tag.pop();
    }
    ShortString::try_new(tag).unwrap_or_default()
}

#[async_trait]
impl Subscription for QueueSubscription {
    async fn next(&mut self) -> Result<Delivery> {
        match self.consumer.next().await {
            Some(Ok(received)) => {
                self.acks.delivered(received.delivery_tag);
                Ok(message::delivery(received, &self.queue))
            }
            Some(Err(error)) => Err(self.ended(error)),
            None if self.channel.status().connected() => Err(Error::new(
                Kind::Missing,
                format!(
                    "RabbitMQ at {} ended the consumption of the queue {:?}: it was deleted or moved",
                    self.shown, self.queue
                ),
            )),
            None => Err(Error::new(
                Kind::Unavailable,
                format!(
                    "the connection to RabbitMQ at {} was closed while consuming the queue {:?}",
                    self.shown, self.queue
                ),
            )),
        }
    }

    async fn ack(&mut self, tag: u64) -> Result<()> {
        let told = self.acks.settled(tag);
        self.tell_all(told)
    }

    async fn ack_all(&mut self, tags: &[u64]) -> Result<()> {
        let told = self.acks.settled_all(tags);
        self.tell_all(told)
    }

    /// Closes the channel, which gives back what is unacked and frees the queue in one step. Dropping the consumer alone
    /// would cancel it first: the queue would go to the next consumer while ours still holds earlier messages of the same
    /// keys, which come back behind later ones. RabbitMQ 3.10's classic queues also crash on it
    /// (rabbitmq-server issue 5460).
    async fn close(&mut self) -> Result<()> {
        if !self.channel.status().connected() {
            return Ok(());
        }
        for tag in self.acks.rest() {
            self.tell(tag, false)?;
        }
        let closing = self.channel.close(REPLY_SUCCESS, "stopped".into());
        match tokio::time::timeout(CLOSE_WAIT, closing).await {
            Ok(closed) => closed.map_err(|error| self.ended(error)),
            Err(_) => {
                Err(Error::new(Kind::Unavailable, format!("RabbitMQ at {} does not close a channel", self.shown)))
            }
        }
    }
}
