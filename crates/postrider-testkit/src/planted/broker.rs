//! Brokers with a bug.

use std::sync::Arc;

use async_trait::async_trait;
use postrider::broker::{Batching, Broker, Delivery, Subscription};
use postrider::doctor::Finding;
use postrider::error::{Kind, Result};
use postrider::event::Event;
use postrider::handler::ConsumerSpec;
use postrider::lease::Lease;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokerBug {
    /// Acks every message when it is delivered, before its effect is committed.
    AckOnDelivery,
    /// Trusts the confirm alone: what is dropped for want of a queue counts as published.
    NotMandatory,
}

/// A broker with one bug; everything else is the real one.
pub struct PlantedBroker {
    /// The real broker.
    pub inner: Arc<dyn Broker>,
    /// What is wrong.
    pub bug: BrokerBug,
}

#[async_trait]
impl Broker for PlantedBroker {
    fn batching(&self) -> Batching {
        self.inner.batching()
    }

    fn check(&self, event: &Event) -> Result<()> {
        self.inner.check(event)
    }

    async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<()>> {
        let mut results = self.inner.publish(batch).await;
        for result in &mut results {
            // Without the mandatory flag RabbitMQ answers just this: confirmed.
            let is_dropped = result.as_ref().is_err_and(|error| error.kind() == Kind::Unroutable);
            if self.bug == BrokerBug::NotMandatory && is_dropped {
                *result = Ok(());
            }
        }
        results
    }

    fn blocked(&self) -> Option<String> {
        self.inner.blocked()
    }

    async fn subscribe(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<Box<dyn Subscription>> {
        let inner = self.inner.subscribe(consumer, lease).await?;
        Ok(match self.bug {
            BrokerBug::AckOnDelivery => Box::new(AckingSubscription(inner)),
            BrokerBug::NotMandatory => inner,
        })
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        self.inner.inspect().await
    }
}

struct AckingSubscription(Box<dyn Subscription>);

#[async_trait]
impl Subscription for AckingSubscription {
    async fn next(&mut self) -> Result<Delivery> {
        let delivery = self.0.next().await?;
        self.0.ack(delivery.tag).await?;
        Ok(delivery)
    }

    async fn ack(&mut self, _tag: u64) -> Result<()> {
        Ok(())
    }

    async fn close(&mut self) -> Result<()> {
        self.0.close().await
    }
}
