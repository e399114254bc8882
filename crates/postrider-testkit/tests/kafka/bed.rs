//! A cluster, or a prefix of its own on one that somebody else runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postrider::broker::kafka::{Kafka, KafkaSettings};
use postrider::broker::{Broker, Delivery, Subscription};
use postrider::event::Event;
use postrider::handler::ConsumerSpec;
use postrider::lease::Lease;
use postrider_testkit::conformance::bed::{event, name};
use postrider_testkit::conformance::broker::BrokerBed;
use postrider_testkit::testbed;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::{Offset, TopicPartitionList};

/// How long a message may take.
pub const SOON: Duration = Duration::from_secs(30);
/// The topics of the conformance suite, and how many partitions they have: a multiple of its slots.
pub const TOPICS: [&str; 6] =
    ["test.created", "orders.created", "orders.created.eu", "orders.paid", "users.created", "files.made"];
const PARTITIONS: u16 = 6;

pub struct KafkaBed {
    pub server: testbed::Kafka,
    pub broker: Arc<Kafka>,
    pub settings: KafkaSettings,
    epoch: AtomicI64,
}

impl KafkaBed {
    /// With the topics of the suite.
    pub async fn new() -> Self {
        let bed = Self::empty(testbed::Kafka::start().await.expect("a cluster"));
        for topic in TOPICS {
            bed.create(topic, PARTITIONS).await;
        }
        bed
    }

    /// The mock, for what it alone can do.
    pub async fn mock(topics: &[(&str, u16)]) -> Self {
        let bed = Self::empty(testbed::Kafka::start_mock().await.expect("a cluster"));
        for (topic, partitions) in topics {
            bed.create(topic, *partitions).await;
        }
        bed
    }

    fn empty(server: testbed::Kafka) -> Self {
        println!("on {} at {}", if server.is_mock() { "the mock" } else { "a real cluster" }, server.bootstrap());
        let prefix = if server.is_mock() { String::new() } else { format!("{}.", testbed::unique("suite")) };
        let settings = KafkaSettings {
            prefix,
            // An event without a topic is an error then.
            declare: false,
            publish_timeout: Duration::from_secs(10),
            refresh: Duration::from_millis(500),
            ..KafkaSettings::new(server.bootstrap())
        };
        let broker = Arc::new(Kafka::new(settings.clone()).expect("valid settings"));
        Self { server, broker, settings, epoch: AtomicI64::new(0) }
    }

    pub async fn create(&self, topic: &str, partitions: u16) {
        let name = format!("{}{topic}", self.settings.prefix);
        self.server.create_topic(&name, partitions).await.expect("the topic is created");
    }

    pub async fn subscribe(&self, spec: &ConsumerSpec) -> Box<dyn Subscription> {
        let lease = self.lease(spec, 0).await;
        self.broker.subscribe(spec, &lease).await.expect("the subscription begins")
    }

    pub async fn publish(&self, key: &str, name: &str) {
        self.publish_all(vec![event(key, name)]).await;
    }

    pub async fn publish_all(&self, events: Vec<Event>) {
        let events: Vec<_> = events.into_iter().map(Arc::new).collect();
        for result in self.broker.publish(&events).await {
            result.expect("the broker confirms");
        }
    }

    /// The offset that a group has committed.
    pub async fn committed(&self, group: &str, topic: &str, partition: i32) -> Option<i64> {
        let (bootstrap, prefix) = (self.server.bootstrap().to_owned(), self.settings.prefix.clone());
        let (group, topic) = (format!("{prefix}{group}"), format!("{prefix}{topic}"));
        let asking = tokio::task::spawn_blocking(move || {
            let client: BaseConsumer = ClientConfig::new()
                .set("bootstrap.servers", bootstrap)
                .set("group.id", group)
                .create()
                .expect("a client");
            let mut list = TopicPartitionList::new();
            list.add_partition(&topic, partition);
            let found = client.committed_offsets(list, SOON).expect("offsets");
            match found.elements()[0].offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            }
        });
        asking.await.expect("answers")
    }
}

pub async fn next(subscription: &mut Box<dyn Subscription>) -> Delivery {
    tokio::time::timeout(SOON, subscription.next()).await.expect("a message comes").expect("the subscription lives")
}

/// The next message's name and whether it may have been delivered before; not acked.
pub async fn take(subscription: &mut Box<dyn Subscription>) -> (u64, String, bool) {
    let delivery = next(subscription).await;
    (delivery.tag, name(&delivery.event.expect("an event")), delivery.is_redelivered)
}

#[async_trait]
impl BrokerBed for KafkaBed {
    fn broker(&self) -> Arc<dyn Broker> {
        self.broker.clone()
    }

    async fn lease(&self, consumer: &ConsumerSpec, slot: u32) -> Lease {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        Lease { group: consumer.group(), slot, owner: "test".to_owned(), epoch }
    }

    fn orders_across_topics(&self) -> bool {
        false
    }
}
