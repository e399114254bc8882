//! RabbitMQ: a durable topic exchange, a durable queue per consumer, confirms and manual acks.
//!
//! ```no_run
//! use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
//!
//! let broker = RabbitMq::new(RabbitMqSettings::new("amqp://shop:secret@mq.example:5672/prod"))?;
//! # Ok::<(), postrider::Error>(())
//! ```
//!
//! The way of an event: `message` makes it a CloudEvents message, `publisher` sends a batch and waits for the
//! confirms, `topology` declares where it gathers, `subscription` receives it. `link` keeps the two connections,
//! one for publishing and one for consuming: RabbitMQ blocks a whole connection when it is short of memory or disk, and
//! consuming must go on then, or it would never recover. `error` translates reply codes.
//!
//! What must hold:
//! - Delivered means acked and not returned. Messages are `mandatory`, because RabbitMQ confirms what it cannot route.
//! - A channel is published on by one batch at a time; see `publisher` for why.
//! - A connection with unanswered messages is never published on again.
//! - Order per key within a queue; a queue has a single active consumer.
//!
//! lapin logs returned messages **with their body** at WARN under the target `lapin::returned_messages`. The server's
//! log filter switches that target off; a program that uses this library must do the same
//! (`lapin::returned_messages=off`).

use std::sync::Arc;

use async_trait::async_trait;
use lapin::types::ShortString;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{Batching, Broker, Subscription};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

mod error;
mod inspect;
mod link;
mod message;
mod publisher;
mod settings;
mod subscription;
mod topology;

pub use settings::{QueueType, RabbitMqSettings};

use link::Link;
use publisher::{Destination, Flight, blocked_error, silent};
use settings::Address;
use subscription::QueueSubscription;
use topology::Topology;

/// How many batches are on their way at once, each on a channel of its own; more wait for their turn.
const FLIGHTS_MAX: usize = 16;

/// A RabbitMQ broker. Connects when it is first needed, and again whenever the connection was lost.
pub struct RabbitMq {
    settings: RabbitMqSettings,
    address: Address,
    exchange: ShortString,
    publishing: Link,
    consuming: Link,
    flights: Semaphore,
}

impl RabbitMq {
    /// Checks the settings; the broker need not be up. [`Kind::Config`] names what is wrong.
    pub fn new(settings: RabbitMqSettings) -> Result<Self> {
        let address = settings.validate()?;
        let exchange = ShortString::try_new(settings.exchange.as_str())
            .map_err(|error| Error::new(Kind::Config, "the exchange name is too long").with_source(error))?;
        Ok(Self {
            publishing: Link::new("postrider publish", address.clone(), settings.connect_timeout),
            consuming: Link::new("postrider consume", address.clone(), settings.connect_timeout),
            flights: Semaphore::new(FLIGHTS_MAX),
            settings,
            address,
            exchange,
        })
    }

    /// The broker's address as it may be shown: without the password.
    pub fn address(&self) -> &str {
        &self.address.shown
    }

    fn unanswered(&self) -> Error {
        Error::new(Kind::Unavailable, format!("RabbitMQ at {} does not answer in time", self.address()))
    }

    /// A confirm channel on a connection that may be published on.
    async fn lend(&self) -> Result<link::Lent> {
        let live = self.publishing.live().await?;
        if let Some(reason) = live.blocked() {
            return Err(blocked_error(&reason, self.address()));
        }
        let topology = Topology { live: &live, settings: &self.settings, shown: self.address() };
        live.exchange.get_or_try_init(|| topology.exchange()).await?;
        live.lend().await.map_err(|error| error::classify(error, "open a channel", self.address()))
    }

    async fn fly(&self, batch: &[Arc<Event>]) -> Result<Vec<Result<()>>> {
        let timeout = self.settings.publish_timeout;
        let until = Instant::now() + timeout;
        let late = || silent(timeout, None, self.address());
        let _turn = tokio::time::timeout_at(until, self.flights.acquire()).await.map_err(|_| late())?;
        let lent = tokio::time::timeout_at(until, self.lend()).await.map_err(|_| late())??;

        let mut flight = Flight::new(batch, Destination { exchange: &self.exchange, shown: self.address() });
        let crossing = async {
            flight.send(lent.channel()).await;
            flight.settle().await;
        };
        // Running out of time is seen in what the flight has not heard of.
        let _ = tokio::time::timeout_at(until, crossing).await;
        let blocked = lent.blocked();
        let (results, is_clean) = flight.finish(|| silent(timeout, blocked.as_deref(), self.address()));
        if is_clean {
            lent.give_back();
        }
        Ok(results)
    }
}

#[async_trait]
impl Broker for RabbitMq {
    fn batching(&self) -> Batching {
        Batching::Independent
    }

    fn check(&self, event: &Event) -> Result<()> {
        message::check(event, self.settings.payload_bytes_max)
    }

    async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<(), Error>> {
        if batch.is_empty() {
            return Vec::new();
        }
        match self.fly(batch).await {
            Ok(results) => results,
            Err(error) => batch.iter().map(|_| Err(error.duplicate())).collect(),
        }
    }

    fn blocked(&self) -> Option<String> {
        self.publishing.peek()?.blocked()
    }

    async fn subscribe(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<Box<dyn Subscription>> {
        consumer.validate()?;
        if lease.slot >= consumer.slots {
            return Err(Error::new(
                Kind::Config,
                format!("consumer {:?} has {} slots, there is no slot {}", consumer.name, consumer.slots, lease.slot),
            ));
        }
        let live = self.consuming.live().await?;
        let open = async {
            let topology = Topology { live: &live, settings: &self.settings, shown: self.address() };
            topology.consumer(consumer).await?;
            QueueSubscription::open(&live, consumer, lease, self.address()).await
        };
        let subscription =
            tokio::time::timeout(self.settings.publish_timeout, open).await.map_err(|_| self.unanswered())??;
        Ok(Box::new(subscription))
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        tokio::time::timeout(self.settings.publish_timeout, inspect::inspect(self))
            .await
            .map_err(|_| self.unanswered())?
    }
}
