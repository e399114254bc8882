//! A fresh virtual host on the shared RabbitMQ.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
use postrider::handler::ConsumerSpec;
use postrider::lease::Lease;
use postrider_testkit::conformance::broker::BrokerBed;
use postrider_testkit::testbed;

pub struct RabbitBed {
    broker: Arc<RabbitMq>,
    epoch: AtomicI64,
}

impl RabbitBed {
    pub async fn new() -> Self {
        let url = testbed::rabbitmq().await.vhost(&testbed::unique("suite")).await.expect("a fresh virtual host");
        let broker = Arc::new(RabbitMq::new(RabbitMqSettings::new(url)).expect("valid settings"));
        Self { broker, epoch: AtomicI64::new(0) }
    }
}

#[async_trait]
impl BrokerBed for RabbitBed {
    fn broker(&self) -> Arc<dyn Broker> {
        self.broker.clone()
    }

    async fn lease(&self, consumer: &ConsumerSpec, slot: u32) -> Lease {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        Lease { group: consumer.group(), slot, owner: "test".to_owned(), epoch }
    }
}
