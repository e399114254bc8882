//! The broker over a store's log.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::Queue;
use super::subscription::EmbeddedSubscription;
use crate::broker::{Batching, Broker, Subscription};
use crate::doctor::Finding;
use crate::error::Result;
use crate::event::{self, Event};
use crate::handler::ConsumerSpec;
use crate::lease::Lease;
use crate::task;

/// The embedded broker. Its log lives where the outbox lives.
pub struct Embedded<Q: Queue + ?Sized> {
    queue: Arc<Q>,
    poll: Duration,
    payload_bytes_max: usize,
}

impl<Q: Queue + ?Sized + 'static> Embedded<Q> {
    /// A broker over a store's log.
    pub fn new(queue: Arc<Q>) -> Self {
        Self { queue, poll: Duration::from_millis(100), payload_bytes_max: event::PAYLOAD_BYTES_MAX }
    }

    /// Chooses the longest wait between two looks at the log.
    #[must_use]
    pub fn poll(mut self, poll: Duration) -> Self {
        self.poll = poll;
        self
    }

    /// Chooses what a payload may weigh.
    #[must_use]
    pub fn payload_bytes_max(mut self, bytes: usize) -> Self {
        self.payload_bytes_max = bytes;
        self
    }
}

#[async_trait]
impl<Q: Queue + ?Sized + 'static> Broker for Embedded<Q> {
    fn batching(&self) -> Batching {
        Batching::Atomic
    }

    fn check(&self, event: &Event) -> Result<()> {
        event.validate()?;
        event.check_size(self.payload_bytes_max)
    }

    async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<()>> {
        let (queue, events) = (self.queue.clone(), batch.to_vec());
        match task::start(async move { queue.append(&events).await }).await {
            Ok(()) => batch.iter().map(|_| Ok(())).collect(),
            Err(error) => batch.iter().map(|_| Err(error.duplicate())).collect(),
        }
    }

    fn blocked(&self) -> Option<String> {
        None
    }

    async fn subscribe(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<Box<dyn Subscription>> {
        let opened = self.queue.open(consumer, lease).await?;
        let subscription =
            EmbeddedSubscription::new(self.queue.clone(), consumer.clone(), lease.clone(), opened, self.poll);
        Ok(Box::new(subscription))
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        Ok(vec![Finding::ok("broker", "embedded: the log is in the store's database")])
    }
}
