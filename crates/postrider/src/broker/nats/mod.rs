//! NATS JetStream: one stream on disk for all events, read by durable consumers that give their place to a successor.
//!
//! ```no_run
//! use postrider::broker::nats::{Nats, NatsSettings};
//!
//! let broker = Nats::new(NatsSettings::new("nats://shop:secret@nats.example:4222"))?;
//! # Ok::<(), postrider::Error>(())
//! ```
//!
//! The way of an event: `message` makes it a CloudEvents message under the subject `<prefix>.<shard>.<topic>`, `publisher`
//! sends a batch and waits for all answers, `stream` declares where it is kept. `durable` says where a reader begins,
//! `subscription` reads, and what a consumer could not apply goes to `places`. Publishing and consuming have a connection
//! each (`link`), so that neither waits for the other's bytes. `error` translates JetStream's codes.
//!
//! What must hold:
//! - Delivered means that the stream of our name has answered with a sequence.
//! - A subscription reads with a durable consumer of its own, from the first message that nobody has finished, and never
//!   lets JetStream redeliver: what comes again would come behind later messages of its key.
//! - A durable consumer is removed only after its successor exists.

use std::sync::Arc;

use async_trait::async_trait;

use super::{Aside, Batching, Broker, Subscription};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

mod durable;
mod error;
mod inspect;
mod link;
mod message;
mod places;
mod publisher;
mod settings;
mod stream;
mod subscription;
mod trim;

pub use settings::NatsSettings;

use link::Link;
use places::Places;
use publisher::Publisher;
use settings::Address;
use subscription::StreamSubscription;

/// A NATS JetStream broker. Connects when it is first needed, and again whenever the connection was lost.
pub struct Nats {
    settings: Arc<NatsSettings>,
    address: Arc<Address>,
    publisher: Publisher,
    consuming: Arc<Link>,
    places: Places,
}

impl Nats {
    /// Checks the settings; the server need not be up. [`Kind::Config`] names what is wrong.
    pub fn new(settings: NatsSettings) -> Result<Self> {
        let address = Arc::new(settings.validate()?);
        let settings = Arc::new(settings);
        let link = |name| Arc::new(Link::new(name, address.clone(), settings.connect_timeout));
        let publishing = link("postrider publish");
        Ok(Self {
            publisher: Publisher::new(publishing.clone(), settings.clone()),
            places: Places::new(publishing, settings.clone()),
            consuming: link("postrider consume"),
            settings,
            address,
        })
    }

    /// The server's address as it may be shown: without the password.
    pub fn address(&self) -> &str {
        &self.address.shown
    }

    /// Purges events that are older than [`NatsSettings::retention`] and that every consumer of the stream has done; returns
    /// how many. Consumers do it every few minutes by themselves.
    pub async fn trim(&self) -> Result<u64> {
        let trimming = async {
            let live = self.consuming.live().await?;
            match stream::find(&live, &self.settings.stream, self.address()).await? {
                Some(stream) => trim::trim(&stream, self.settings.retention, self.address()).await,
                None => Ok(0),
            }
        };
        self.in_time(trimming).await
    }

    async fn in_time<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        let unanswered =
            |_| Error::new(Kind::Unavailable, format!("NATS at {} does not answer in time", self.address()));
        let called = tokio::time::timeout(self.settings.publish_timeout, call).await.map_err(unanswered);
        called.flatten().map_err(|error| self.consuming.explain(error))
    }
}

#[async_trait]
impl Broker for Nats {
    fn batching(&self) -> Batching {
        Batching::Independent
    }

    fn check(&self, event: &Event) -> Result<()> {
        message::check(event, &self.settings, self.publisher.message_bytes_max())
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

    /// JetStream answers each message by itself; it never asks publishers to stop.
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
        let open = StreamSubscription::open(self.consuming.clone(), self.settings.clone(), consumer, lease);
        Ok(Box::new(self.in_time(open).await?))
    }

    fn has_places(&self) -> bool {
        true
    }

    async fn set_aside(&self, aside: &Aside<'_>) -> Result<()> {
        self.in_time(self.places.set_aside(aside)).await
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        self.in_time(inspect::inspect(&self.consuming, &self.settings)).await
    }
}
