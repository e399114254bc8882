//! A broker that keeps large payloads in storage.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::join_all;

use super::{Claims, is_reference_header};
use crate::broker::{Aside, Batching, Broker, Subscription};
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;
use crate::metrics;

/// Brokers carry a quarter of a megabyte without noticing, and a request to object storage costs milliseconds.
pub const ABOVE_BYTES_DEFAULT: usize = 256 * 1024;
/// Uploads of one batch at once.
const UPLOADS_MAX: usize = 8;
/// The smallest JSON, in place of a payload that is gone.
const SMALLEST_JSON: &[u8] = b"0";

/// Carries events of any size over another broker: what is above a size is stored first, and the event is published
/// without its payload. Consumers need the same storage, see [`crate::Consumer::claims`].
///
/// An event is published again and again until it is confirmed, and its object has the same path and content each
/// time. A transaction that is rolled back leaves nothing behind, because nothing is stored before the relay has read
/// the event.
pub struct ClaimCheck {
    broker: Arc<dyn Broker>,
    claims: Arc<Claims>,
    above_bytes: usize,
}

impl ClaimCheck {
    /// A broker in front of `broker`.
    pub fn new(broker: Arc<dyn Broker>, claims: Arc<Claims>) -> Self {
        Self { broker, claims, above_bytes: ABOVE_BYTES_DEFAULT }
    }

    /// Chooses the largest payload that travels with its event.
    #[must_use]
    pub fn above_bytes(mut self, bytes: usize) -> Self {
        self.above_bytes = bytes;
        self
    }

    fn is_large(&self, event: &Event) -> bool {
        event.payload().len() > self.above_bytes
    }

    /// The event as it travels.
    async fn travelling(&self, event: &Arc<Event>) -> Result<Arc<Event>> {
        if !self.is_large(event) {
            return Ok(event.clone());
        }
        let slim = self.claims.store(event).await?;
        metrics::claim_stored();
        Ok(Arc::new(slim))
    }
}

#[async_trait]
impl Broker for ClaimCheck {
    fn batching(&self) -> Batching {
        self.broker.batching()
    }

    fn check(&self, event: &Event) -> Result<()> {
        if !self.is_large(event) {
            return self.broker.check(event);
        }
        event.validate()?;
        if let Some(name) = event.headers().keys().find(|name| is_reference_header(name)) {
            let message = format!("the header name {name:?} is taken by the claim check of a large payload");
            return Err(Error::new(Kind::Invalid, message).with_remedy("choose another header name"));
        }
        // Three headers more, and no payload; but what says that it is JSON must be some.
        let mut slim = self.claims.sketch(event);
        if slim.is_json() {
            slim.payload = SMALLEST_JSON.into();
        }
        slim.validate()?;
        self.broker.check(&slim)
    }

    async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<()>> {
        if !batch.iter().any(|event| self.is_large(event)) {
            return self.broker.publish(batch).await;
        }
        let mut travelling = Vec::with_capacity(batch.len());
        for part in batch.chunks(UPLOADS_MAX) {
            travelling.extend(join_all(part.iter().map(|event| self.travelling(event))).await);
        }
        // A batch that is taken whole must not lose one of its middle.
        if self.batching() == Batching::Atomic
            && let Some(error) = travelling.iter().find_map(|result| result.as_ref().err())
        {
            return batch.iter().map(|_| Err(error.duplicate())).collect();
        }
        let stored: Vec<Arc<Event>> = travelling.iter().flatten().cloned().collect();
        let published = if stored.is_empty() { Vec::new() } else { self.broker.publish(&stored).await };
        let mut published = published.into_iter();
        let silent = || Err(Error::new(Kind::Other, "the broker gave no result"));
        travelling.into_iter().map(|result| result.and_then(|_| published.next().unwrap_or_else(silent))).collect()
    }

    fn blocked(&self) -> Option<String> {
        self.broker.blocked()
    }

    async fn subscribe(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<Box<dyn Subscription>> {
        self.broker.subscribe(consumer, lease).await
    }

    fn has_places(&self) -> bool {
        self.broker.has_places()
    }

    async fn set_aside(&self, aside: &Aside<'_>) -> Result<()> {
        self.broker.set_aside(aside).await
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        self.broker.inspect().await
    }
}
