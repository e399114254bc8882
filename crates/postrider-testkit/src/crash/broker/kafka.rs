//! Kafka: librdkafka's mock cluster, in the memory of this process.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::kafka::KafkaSettings;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::{Offset, TopicPartitionList};

use super::super::groups;
use super::super::producer::TOPIC;
use super::super::store::Ledger;
use super::BrokerServer;
use crate::testbed::{Kafka, Result};

/// A multiple of the slots of all consumers.
const PARTITIONS: u16 = 12;
/// How long an answer may take.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

pub(super) struct Server {
    cluster: Kafka,
    url: String,
}

impl Server {
    pub(super) async fn start() -> Result<Server> {
        let cluster = Kafka::start_mock().await?;
        // Nobody can ask the mock to create one.
        cluster.create_topic(TOPIC, PARTITIONS).await?;
        let url = format!("kafka://{}", cluster.bootstrap());
        Ok(Server { cluster, url })
    }

    /// Partitions that a consumer has not done, in words. librdkafka answers only by blocking.
    async fn unread(&self) -> Result<Vec<String>> {
        let bootstrap = self.cluster.bootstrap().to_owned();
        tokio::task::spawn_blocking(move || {
            let mut lines = Vec::new();
            for group in groups() {
                lines.extend(unread(&bootstrap, group)?);
            }
            Ok(lines)
        })
        .await?
    }
}

#[async_trait(?Send)]
impl BrokerServer for Server {
    fn url(&self) -> &str {
        &self.url
    }

    fn settings(&self) -> &'static str {
        "declare = false\n"
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    async fn kill(&mut self) -> Result<()> {
        Err("the mock cluster cannot be killed".into())
    }

    async fn stop(&mut self) -> Result<()> {
        self.cluster.stop().await
    }

    async fn restart(&mut self) -> Result<()> {
        self.cluster.start_again().await
    }

    async fn left_over(&self, _: &dyn Ledger) -> Result<Option<String>> {
        let lines = self.unread().await?;
        Ok((!lines.is_empty()).then(|| lines.join("\n")))
    }

    async fn state(&self, _: &dyn Ledger) -> Result<String> {
        Ok(format!("partitions that are not read to their end:\n{}", self.unread().await?.join("\n")))
    }
}

fn unread(bootstrap: &str, group: &str) -> Result<Vec<String>> {
    let consumer: BaseConsumer =
        ClientConfig::new().set("bootstrap.servers", bootstrap).set("group.id", group).create()?;
    let mut partitions = TopicPartitionList::new();
    for partition in 0..i32::from(PARTITIONS) {
        partitions.add_partition(TOPIC, partition);
    }
    let mut lines = Vec::new();
    for element in consumer.committed_offsets(partitions, ANSWER_WAIT)?.elements() {
        let (_, end) = consumer.fetch_watermarks(TOPIC, element.partition(), ANSWER_WAIT)?;
        let done = if let Offset::Offset(offset) = element.offset() { offset } else { 0 };
        if done < end {
            lines.push(format!("{group} partition {} is at offset {done} of {end}", element.partition()));
        }
    }
    Ok(lines)
}

pub(super) fn client(url: &str) -> Result<Arc<dyn Broker>> {
    let settings = KafkaSettings { declare: false, ..KafkaSettings::new(url) };
    Ok(Arc::new(postrider::broker::kafka::Kafka::new(settings)?))
}
