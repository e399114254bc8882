//! Kafka's mock cluster, compared with an idempotent producer of librdkafka that waits for all copies.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{DeliveryFuture, FutureProducer, FutureRecord};

use super::super::bed::{TOPIC, key, payload};
use super::{Carrier, IN_FLIGHT, attributes};
use crate::testbed::{Kafka, Result, cpu};

/// The bare publisher's topic.
const BARE: &str = "bare";
const PARTITIONS: u16 = 12;
/// How long an answer may take.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

pub(super) struct Cluster {
    kafka: Kafka,
    /// Asks where topics end.
    consumer: Arc<BaseConsumer>,
    /// Where the topic ended when it was last emptied: nobody can remove anything.
    emptied: AtomicU64,
}

impl Cluster {
    pub(super) async fn start() -> Result<Cluster> {
        let kafka = Kafka::start_mock().await?;
        for topic in [TOPIC, BARE] {
            kafka.create_topic(topic, PARTITIONS).await?;
        }
        let consumer = ClientConfig::new().set("bootstrap.servers", kafka.bootstrap()).create()?;
        Ok(Cluster { kafka, consumer: Arc::new(consumer), emptied: AtomicU64::new(0) })
    }

    /// Events that a topic ever got.
    async fn end(&self, topic: &'static str) -> Result<u64> {
        let consumer = self.consumer.clone();
        // librdkafka answers only by blocking.
        let ends = tokio::task::spawn_blocking(move || {
            let end = |partition| Ok(consumer.fetch_watermarks(topic, partition, ANSWER_WAIT)?.1);
            (0..i32::from(PARTITIONS)).map(end).sum::<Result<i64>>()
        });
        Ok(u64::try_from(ends.await??)?)
    }
}

#[async_trait(?Send)]
impl Carrier for Cluster {
    fn name(&self) -> &'static str {
        "Kafka (librdkafka's mock)"
    }

    fn config(&self) -> String {
        format!("url = \"kafka://{}\"\ndeclare = false\n", self.kafka.bootstrap())
    }

    /// The mock is a thread of this process, which does little else meanwhile.
    fn cpu(&self) -> Option<Duration> {
        cpu(std::process::id()).ok()
    }

    async fn bare(&self, events: u64) -> Result<f64> {
        let producer: FutureProducer = ClientConfig::new()
            .set("bootstrap.servers", self.kafka.bootstrap())
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .set("linger.ms", "1")
            .create()?;
        let (before, payload) = (self.end(BARE).await?, payload(0));
        let started = Instant::now();
        let mut waiting: VecDeque<DeliveryFuture> = VecDeque::with_capacity(IN_FLIGHT);
        for number in 0..events {
            if waiting.len() == IN_FLIGHT {
                confirmed(waiting.pop_front()).await?;
            }
            let headers = attributes(number).into_iter().fold(OwnedHeaders::new(), |headers, (name, value)| {
                headers.insert(Header { key: &format!("ce_{name}"), value: Some(&value) })
            });
            let key = key(number);
            let record = FutureRecord::to(BARE).key(&key).payload(&payload).headers(headers);
            waiting.push_back(producer.send_result(record).map_err(|(error, _)| error)?);
        }
        while let Some(next) = waiting.pop_front() {
            confirmed(Some(next)).await?;
        }
        let rate = events as f64 / started.elapsed().as_secs_f64();
        match self.end(BARE).await? - before == events {
            true => Ok(rate),
            false => Err("the topic does not hold what was published".into()),
        }
    }

    async fn count(&self) -> Result<u64> {
        Ok(self.end(TOPIC).await? - self.emptied.load(Ordering::Relaxed))
    }

    async fn empty(&self) -> Result<()> {
        self.emptied.store(self.end(TOPIC).await?, Ordering::Relaxed);
        Ok(())
    }
}

async fn confirmed(waiting: Option<DeliveryFuture>) -> Result<()> {
    if let Some(waiting) = waiting {
        waiting.await?.map_err(|(error, _)| error)?;
    }
    Ok(())
}
