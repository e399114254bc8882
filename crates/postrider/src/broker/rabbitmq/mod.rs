//! RabbitMQ: a durable topic exchange, a durable queue per consumer, confirms and manual acks.
//!
//! ```no_run
//! use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
//!
//! let broker = RabbitMq::new(RabbitMqSettings::new("amqp://shop:secret@mq.example:5672/prod"))?;
//! # Ok::<(), postrider::Error>(())
//! ```
//!
//! The way of an event: `frame` makes it a CloudEvents message, as `message` says; `publisher` sends a batch over a
//! `wire` and waits for the confirms, which `flights` keeps account of; `topology` declares where it gathers,
//! `subscription` receives it over a `link`, and what a consumer could not apply goes to `places`. Publishing,
//! consuming and setting aside have a connection each: RabbitMQ blocks a whole connection when it is short of memory
//! or disk, and consuming must go on then, or it would never recover. `error` translates reply codes.
//!
//! What must hold:
//! - Delivered means acked and not returned. Messages are `mandatory`, because RabbitMQ confirms what it cannot route.
//! - A connection with messages that were given up is never published on again.
//! - Order per key within a queue; a queue has a single active consumer.

use std::sync::Arc;

use async_trait::async_trait;

use super::{Aside, Batching, Broker, Subscription};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

mod acks;
mod error;
mod flights;
mod frame;
mod inspect;
mod link;
mod message;
mod places;
mod publisher;
mod settings;
mod subscription;
mod topology;
mod wire;

pub use settings::{QueueType, RabbitMqSettings};

use link::Link;
use places::Places;
use publisher::Publisher;
use settings::Address;
use subscription::QueueSubscription;
use topology::Topology;

/// A RabbitMQ broker. Connects when it is first needed, and again whenever the connection was lost.
pub struct RabbitMq {
    settings: RabbitMqSettings,
    address: Address,
    publisher: Publisher,
    consuming: Link,
    places: Places,
}

impl RabbitMq {
    /// Checks the settings; the broker need not be up. [`Kind::Config`] names what is wrong.
    pub fn new(settings: RabbitMqSettings) -> Result<Self> {
        let address = settings.validate()?;
        Ok(Self {
            publisher: Publisher::new(address.clone(), settings.clone()),
            consuming: Link::new("postrider consume", address.clone(), settings.connect_timeout),
            places: Places::new(address.clone(), settings.clone()),
            settings,
            address,
        })
    }

    /// The broker's address as it may be shown: without the password.
    pub fn address(&self) -> &str {
        &self.address.shown
    }

    fn unanswered(&self) -> Error {
        Error::new(Kind::Unavailable, format!("RabbitMQ at {} does not answer in time", self.address()))
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
        match self.publisher.publish(batch).await {
            Ok(results) => results,
            Err(error) => batch.iter().map(|_| Err(error.duplicate())).collect(),
        }
    }

    fn blocked(&self) -> Option<String> {
        self.publisher.blocked()
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

    fn has_places(&self) -> bool {
        true
    }

    async fn set_aside(&self, aside: &Aside<'_>) -> Result<()> {
        let setting = self.places.set_aside(aside);
        tokio::time::timeout(self.settings.publish_timeout, setting).await.map_err(|_| self.unanswered())?
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        tokio::time::timeout(self.settings.publish_timeout, inspect::inspect(self))
            .await
            .map_err(|_| self.unanswered())?
    }
}
