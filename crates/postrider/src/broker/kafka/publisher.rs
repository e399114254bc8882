//! Publishing: an idempotent producer that waits until all copies in sync have an event.

use std::collections::HashMap;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::OwnedHeaders;
use rdkafka::producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer as _};
use tokio::time::{Instant, Sleep};

use super::client::{self, Listener, Refusal, millis};
use super::cluster::{Cluster, denied};
use super::error::{classify, code, is_missing, unroutable};
use super::message;
use super::settings::{Address, KafkaSettings};
use crate::error::{Error, Kind, Result};
use crate::event::Event;

/// What headers and key may add to a payload: 64 headers of 8 KiB, and the envelope.
const AROUND_PAYLOAD_BYTES_MAX: usize = 1024 * 1024;
/// librdkafka looks once a second for messages whose time is over. They must be known before our own time is over.
const TIMEOUT_SLACK: Duration = Duration::from_millis(1_500);
/// What waits in the process to be sent; more is waited for. Kafka's own default is a gigabyte.
const QUEUE_KBYTES: usize = 128 * 1024;
/// How often a full queue is tried again.
const FULL_WAIT: Duration = Duration::from_millis(10);

/// A record on its way.
pub(super) struct Record<'r> {
    /// The name on Kafka.
    pub topic: &'r str,
    pub partition: i32,
    pub key: Option<&'r str>,
    pub payload: &'r [u8],
    pub headers: OwnedHeaders,
}

pub(super) struct Publisher {
    settings: KafkaSettings,
    shown: String,
    cluster: Arc<Cluster>,
    together: Line,
    /// One record a request, for those that Kafka found too large: it refuses whole requests.
    alone: Line,
}

impl Publisher {
    pub fn new(settings: &KafkaSettings, address: &Address, cluster: Arc<Cluster>) -> Result<Self> {
        let slack = TIMEOUT_SLACK.min(settings.publish_timeout / 2);
        let mut config = client::config(settings, address);
        config
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .set("message.timeout.ms", millis(settings.publish_timeout - slack))
            .set("message.max.bytes", (settings.payload_bytes_max + AROUND_PAYLOAD_BYTES_MAX).to_string())
            .set("queue.buffering.max.kbytes", QUEUE_KBYTES.to_string());
        // A batch comes at once, so there is little to wait for.
        if !settings.properties.contains_key("linger.ms") {
            config.set("linger.ms", "1");
        }
        // Whatever librdkafka does not like is known now, without a broker.
        config.create_native_config().map_err(|error| classify(&error, "use the settings", &address.shown))?;
        let mut alone = config.clone();
        alone.set("batch.num.messages", "1");
        Ok(Self {
            settings: settings.clone(),
            shown: address.shown.clone(),
            cluster,
            together: Line::new(config),
            alone: Line::new(alone),
        })
    }

    /// Publishes a batch; one result per event.
    pub async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<()>> {
        let deadline = Instant::now() + self.settings.publish_timeout;
        // Each topic is asked for once, however many events it has.
        let mut topics: HashMap<&str, (String, Result<u32>)> = HashMap::new();
        let mut sent = Vec::with_capacity(batch.len());
        for event in batch {
            if !topics.contains_key(event.topic()) {
                let topic = self.settings.kafka_topic(event.topic());
                let partitions = self.partitions(&topic, deadline).await;
                topics.insert(event.topic(), (topic, partitions));
            }
            sent.push(match &topics[event.topic()] {
                (topic, Ok(partitions)) => self.send_event(&self.together, event, topic, *partitions, deadline).await,
                (_, Err(error)) => Err(error.duplicate()),
            });
        }
        let mut is_late = pin!(tokio::time::sleep_until(deadline));
        let mut results = Vec::with_capacity(batch.len());
        // From the last one on: when that is confirmed, most others are, and none of them needs to wake us.
        for (event, sent) in batch.iter().zip(sent).rev() {
            let topic = &topics[event.topic()].0;
            let result = match sent {
                Ok(confirm) => self.confirmed(confirm, topic, is_late.as_mut()).await,
                Err(error) => Err(error),
            };
            results.push(match result {
                Err(error) if error.kind() == Kind::TooLarge => self.publish_alone(event, topic, deadline).await,
                result => result,
            });
        }
        results.reverse();
        if results.iter().any(Result::is_ok) {
            self.refusal().is_over();
        }
        results
    }

    /// Publishes one record, for what is no event of the outbox.
    pub async fn publish_record(&self, record: Record<'_>) -> Result<()> {
        let deadline = Instant::now() + self.settings.publish_timeout;
        let topic = record.topic;
        let confirm = self.send(&self.together, record, deadline).await?;
        self.confirmed(confirm, topic, pin!(tokio::time::sleep_until(deadline))).await
    }

    async fn partitions(&self, topic: &str, deadline: Instant) -> Result<u32> {
        let partitions = tokio::time::timeout_at(deadline, self.cluster.partitions(topic));
        partitions.await.map_err(|_| self.unanswered(topic))?
    }

    async fn send_event(
        &self,
        line: &Line,
        event: &Event,
        topic: &str,
        partitions: u32,
        deadline: Instant,
    ) -> Result<DeliveryFuture> {
        message::check(event, topic, self.settings.payload_bytes_max)?;
        let partition = message::partition(event, partitions);
        let headers = message::headers(event);
        let record = Record { topic, partition, key: event.key(), payload: event.payload(), headers };
        self.send(line, record, deadline).await
    }

    /// Whether the event itself is too large, or only stood beside one that is.
    async fn publish_alone(&self, event: &Event, topic: &str, deadline: Instant) -> Result<()> {
        let partitions = self.partitions(topic, deadline).await?;
        let confirm = self.send_event(&self.alone, event, topic, partitions, deadline).await?;
        self.confirmed(confirm, topic, pin!(tokio::time::sleep_until(deadline))).await
    }

    /// Gives a record to librdkafka, which sends it with others. A full queue is waited for.
    async fn send(&self, line: &Line, record: Record<'_>, deadline: Instant) -> Result<DeliveryFuture> {
        let topic = record.topic;
        let mut future = FutureRecord::<str, [u8]>::to(topic)
            .partition(record.partition)
            .payload(record.payload)
            .headers(record.headers);
        if let Some(key) = record.key {
            future = future.key(key);
        }
        loop {
            let producer = line.producer(&self.shown)?;
            let sent = producer.send_result(future);
            // Not kept while waiting: one that is renewed ends when nobody has it any more.
            drop(producer);
            match sent {
                Ok(confirm) => return Ok(confirm),
                Err((error, back)) => {
                    future = back;
                    match code(&error) {
                        Some(Code::QueueFull) if Instant::now() < deadline => {}
                        Some(Code::Fatal) if Instant::now() < deadline => line.renew(),
                        _ => return Err(self.failed(&error, topic)),
                    }
                }
            }
            tokio::time::sleep(FULL_WAIT).await;
        }
    }

    async fn confirmed(&self, confirm: DeliveryFuture, topic: &str, is_late: Pin<&mut Sleep>) -> Result<()> {
        let confirm = tokio::select! {
            biased;
            confirm = confirm => confirm,
            () = is_late => return Err(self.unanswered(topic)),
        };
        match confirm {
            Ok(Ok(_)) => Ok(()),
            Ok(Err((error, _))) => {
                // A producer whose sequence is broken takes nothing any more; the next batch has a new one.
                self.together.renew();
                self.alone.renew();
                Err(self.failed(&error, topic))
            }
            // The producer was renewed; nobody knows what became of the event.
            Err(_) => Err(self.unanswered(topic)),
        }
    }

    fn failed(&self, error: &KafkaError, topic: &str) -> Error {
        match code(error) {
            Some(code) if is_missing(code) => {
                self.cluster.doubt(topic);
                unroutable(topic)
            }
            Some(Code::MessageTimedOut) => self.unanswered(topic),
            _ => classify(error, format!("publish to the topic {topic:?}"), &self.shown),
        }
    }

    fn unanswered(&self, topic: &str) -> Error {
        match self.refusal().said() {
            Some(reason) => denied(&self.shown, &reason),
            None => Error::new(
                Kind::Unavailable,
                format!("Kafka at {} did not confirm an event of the topic {topic:?} in time", self.shown),
            ),
        }
    }

    fn refusal(&self) -> &Refusal {
        &self.together.listener.refusal
    }
}

/// A producer, made when it is needed.
struct Line {
    config: ClientConfig,
    listener: Listener,
    producer: Mutex<Option<FutureProducer<Listener>>>,
}

impl Line {
    fn new(config: ClientConfig) -> Self {
        Self { config, listener: Listener::default(), producer: Mutex::default() }
    }

    fn producer(&self, shown: &str) -> Result<FutureProducer<Listener>> {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(producer) = producer.as_ref() {
            return Ok(producer.clone());
        }
        let made = self.config.create_with_context::<_, FutureProducer<Listener>>(self.listener.clone());
        let made = made.map_err(|error| classify(&error, "make a producer", shown))?;
        Ok(producer.insert(made).clone())
    }

    /// Gives a producer up that cannot be used any more.
    fn renew(&self) {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        let is_broken = |producer: &mut FutureProducer<Listener>| producer.client().fatal_error().is_some();
        if let Some(broken) = producer.take_if(is_broken) {
            tracing::warn!("a Kafka producer lost its sequence and is replaced");
            client::end(broken);
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(producer) = self.producer.lock().unwrap_or_else(PoisonError::into_inner).take() {
            client::end(producer);
        }
    }
}
