//! Kafka: a topic per topic, partitions by key, an idempotent producer, offsets committed after the effect.
//!
//! ```no_run
//! use postrider::broker::kafka::{Kafka, KafkaSettings};
//!
//! let broker = Kafka::new(KafkaSettings::new("kafka://a.example:9092,b.example:9092"))?;
//! # Ok::<(), postrider::Error>(())
//! ```
//!
//! The way of an event: `message` makes it a record; `publisher` asks the `cluster` how many partitions the topic has,
//! chooses one by the key and waits for the confirm; `opening` says which partitions a slot reads and from where,
//! `subscription` receives, `progress` keeps account of what is finished, and what a consumer could not apply goes to
//! `places`. `client` has what all clients share, `error` translates codes.
//!
//! What must hold:
//! - Delivered means that all copies in sync have it (`acks=all`), once per publish (idempotent producer).
//! - A key has one partition of a topic, always the same one; when the number of partitions changes, nothing more is
//!   published to the topic.
//! - The committed offset of a partition is never above an unfinished message.
//! - Nobody's call blocks a worker of the runtime: what librdkafka does only by blocking has a thread of its own.
//!
//! Kafka keeps the order of a key within one topic. Events of a key in two topics may be seen in any order.

use std::sync::Arc;

use async_trait::async_trait;

use super::{Aside, Batching, Broker, Subscription};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

mod client;
mod cluster;
mod error;
mod inspect;
mod message;
mod opening;
mod places;
mod progress;
mod publisher;
mod settings;
mod subscription;

pub use settings::KafkaSettings;

use cluster::Cluster;
use opening::Wish;
use places::Places;
use publisher::Publisher;
use settings::Address;
use subscription::KafkaSubscription;

/// A Kafka cluster. Connects when it is first needed, and again whenever a connection was lost.
pub struct Kafka {
    settings: KafkaSettings,
    address: Address,
    cluster: Arc<Cluster>,
    publisher: Publisher,
    places: Places,
}

impl Kafka {
    /// Checks the settings; the broker need not be up. [`Kind::Config`] names what is wrong.
    pub fn new(settings: KafkaSettings) -> Result<Self> {
        let address = settings.validate()?;
        let cluster = Arc::new(Cluster::new(&settings, &address)?);
        Ok(Self {
            publisher: Publisher::new(&settings, &address, cluster.clone())?,
            places: Places::new(&settings, cluster.clone()),
            cluster,
            settings,
            address,
        })
    }

    /// The broker's address as it may be shown: without user and password.
    pub fn address(&self) -> &str {
        &self.address.shown
    }

    fn unanswered(&self) -> Error {
        Error::new(Kind::Unavailable, format!("Kafka at {} does not answer in time", self.address()))
    }
}

#[async_trait]
impl Broker for Kafka {
    fn batching(&self) -> Batching {
        Batching::Independent
    }

    fn check(&self, event: &Event) -> Result<()> {
        message::check(event, &self.settings.kafka_topic(event.topic()), self.settings.payload_bytes_max)
    }

    async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<(), Error>> {
        self.publisher.publish(batch).await
    }

    fn blocked(&self) -> Option<String> {
        None
    }

    async fn subscribe(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<Box<dyn Subscription>> {
        consumer.validate()?;
        if lease.slot >= consumer.slots {
            return Err(Error::new(
                Kind::Config,
                format!("consumer {:?} has {} slots, there is no slot {}", consumer.name, consumer.slots, lease.slot),
            ));
        }
        let wish = Wish {
            consumer: consumer.clone(),
            slot: lease.slot,
            settings: self.settings.clone(),
            shown: self.address.shown.clone(),
        };
        let opening = KafkaSubscription::open(self.cluster.clone(), &self.address, wish);
        let opened = tokio::time::timeout(self.settings.publish_timeout, opening).await;
        Ok(Box::new(opened.map_err(|_| self.unanswered())??))
    }

    fn has_places(&self) -> bool {
        true
    }

    async fn set_aside(&self, aside: &Aside<'_>) -> Result<()> {
        let setting = self.places.set_aside(&self.publisher, aside);
        tokio::time::timeout(self.settings.publish_timeout, setting).await.map_err(|_| self.unanswered())?
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        tokio::time::timeout(self.settings.publish_timeout, inspect::inspect(self))
            .await
            .map_err(|_| self.unanswered())?
    }
}
