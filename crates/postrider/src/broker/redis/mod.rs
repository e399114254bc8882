//! Redis Streams: 32 streams for all events, one for each shard, and a position of every consumer in each.
//!
//! ```no_run
//! use postrider::broker::redis::{RedisStreamSettings, RedisStreams};
//!
//! let broker = RedisStreams::new(RedisStreamSettings::new("redis://shop:secret@redis.example:6379/0"))?;
//! # Ok::<(), postrider::Error>(())
//! ```
//!
//! The way of an event: `message` makes it the fields of an entry, `publisher` adds a batch to the streams of their shards.
//! `subscription` reads the shards of a slot and writes down how far all is done, by the scripts of `script`, which let
//! only the present holder in. What a consumer could not apply goes to `places`.
//!
//! What must hold:
//! - A consumer's position in a shard is the last delivered id of a group with its name. It passes nothing that is not done.
//! - Reading takes nothing away from anybody. Reading and moving a position are refused to a holder that has a successor.
//! - Only what every group of a stream has done is ever trimmed.

use std::sync::Arc;

use async_trait::async_trait;

use super::{Aside, Batching, Broker, Subscription};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::handler::{ConsumerSpec, SLOTS_MAX};
use crate::lease::Lease;
use crate::redis_server::Link;

mod error;
mod inspect;
mod message;
mod places;
mod publisher;
mod script;
mod settings;
mod subscription;
mod trim;

pub use settings::RedisStreamSettings;

use publisher::Publisher;
use script::Scripts;
use subscription::ShardSubscription;

/// A Redis that carries events in streams. Connects when it is first needed, and again whenever the connection was lost.
pub struct RedisStreams {
    settings: Arc<RedisStreamSettings>,
    publisher: Publisher,
    consuming: Arc<Link>,
    scripts: Arc<Scripts>,
}

impl RedisStreams {
    /// Checks the settings; the server need not be up. [`Kind::Config`] names what is wrong.
    pub fn new(settings: RedisStreamSettings) -> Result<Self> {
        let client = settings.validate()?;
        let settings = Arc::new(settings);
        // Consuming must not wait behind large batches that are published.
        let link = || Arc::new(Link::new(client.clone(), settings.publish_timeout));
        Ok(Self {
            publisher: Publisher::new(link(), settings.clone()),
            consuming: link(),
            scripts: Arc::new(Scripts::new()),
            settings,
        })
    }

    /// The server's address as it may be shown: without the password.
    pub fn address(&self) -> &str {
        &self.consuming.shown
    }

    /// Removes entries that are older than [`RedisStreamSettings::retention`] and that every group has done; returns how
    /// many. Consumers do it once a minute by themselves.
    pub async fn trim(&self) -> Result<u64> {
        let shards: Vec<u32> = (0..SLOTS_MAX).collect();
        trim::trim(&self.consuming, &self.scripts, &self.settings, &shards).await
    }
}

#[async_trait]
impl Broker for RedisStreams {
    fn batching(&self) -> Batching {
        Batching::Independent
    }

    fn check(&self, event: &Event) -> Result<()> {
        event.check_size(self.settings.payload_bytes_max)
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
        let open = ShardSubscription::open(
            self.consuming.clone(),
            self.scripts.clone(),
            self.settings.clone(),
            consumer,
            lease,
        );
        let unanswered =
            |_| Error::new(Kind::Unavailable, format!("Redis at {} does not answer in time", self.address()));
        let subscription = tokio::time::timeout(self.settings.publish_timeout, open).await.map_err(unanswered)??;
        Ok(Box::new(subscription))
    }

    fn has_places(&self) -> bool {
        true
    }

    async fn set_aside(&self, aside: &Aside<'_>) -> Result<()> {
        places::set_aside(&self.consuming, &self.settings, aside).await
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        inspect::inspect(&self.consuming).await
    }
}
