//! The way of a failing message from Kafka: its attempts, the topics for people, the replay; and a record of somebody else.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postrider::Result;
use postrider::dead::{DeadFilter, DeadLetters};
use postrider::event::Event;
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::relay::Backoff;
use postrider_testkit::conformance::bed::{Bed, PostgresBed, Tx, name};
use rdkafka::Message as _;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::message::{Header, Headers as _, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use tokio_util::sync::CancellationToken;

use crate::bed::{KafkaBed, SOON};

struct Ladder {
    is_fixed: Arc<AtomicBool>,
}

#[async_trait]
impl Handler<Tx<PostgresBed>> for Ladder {
    async fn handle(&self, tx: &mut Tx<PostgresBed>, event: &Event) -> Result<(), HandlerError> {
        let name = match event.is_json() {
            true => name(event),
            false => format!("{} bytes of {}", event.payload().len(), event.key().unwrap_or_default()),
        };
        PostgresBed::write_effect(tx, "billing", &name).await?;
        match name.as_str() {
            "broken" if !self.is_fixed.load(Ordering::SeqCst) => Err(HandlerError::retry("the book is closed")),
            "skip" => Err(HandlerError::skip()),
            _ => Ok(()),
        }
    }
}

/// The next record of a topic: its headers and its payload.
async fn read(kafka: &KafkaBed, topic: &str) -> (BTreeMap<String, String>, Vec<u8>) {
    let reader: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", kafka.server.bootstrap())
        .set("group.id", format!("people.{topic}"))
        .set("auto.offset.reset", "earliest")
        .create()
        .expect("a client");
    reader.subscribe(&[&format!("{}{topic}", kafka.settings.prefix)]).expect("subscribed");
    let record = tokio::time::timeout(SOON, reader.recv()).await.expect("a record comes").expect("it is read");
    let text = |value: &[u8]| String::from_utf8(value.to_vec()).expect("text");
    let headers = record.headers().expect("headers");
    let headers = headers.iter().map(|header| (header.key.to_owned(), text(header.value.unwrap_or_default())));
    (headers.collect(), record.payload().unwrap_or_default().to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_climbs_the_ladder_and_comes_back_by_replay() {
    let (bed, kafka) = (PostgresBed::new().await, KafkaBed::new().await);
    for topic in ["test.created.dlq", "test.created.skipped"] {
        kafka.create(topic, 1).await;
    }
    let is_fixed: Arc<AtomicBool> = Arc::default();
    let store = Arc::new(bed.store().clone());
    let backoff = Backoff { base: Duration::from_millis(100), max: Duration::from_secs(1), jitter: Duration::ZERO };
    let spec = ConsumerSpec { backoff, ..ConsumerSpec::new("billing", &["#"]) };
    let handler = Ladder { is_fixed: is_fixed.clone() };
    let consumer = Consumer::new(spec, kafka.broker.clone(), store.clone(), store, handler).expect("valid");
    let stop = CancellationToken::new();
    tokio::spawn(consumer.run(stop.clone()));
    let until = async |is_so: &dyn Fn(&[String]) -> bool| {
        let deadline = Instant::now() + SOON;
        while !is_so(&bed.effects("billing").await) {
            assert!(Instant::now() < deadline, "{:?}", bed.effects("billing").await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };

    for (key, name) in [("k", "broken"), ("k", "after 1"), ("other", "x"), ("k", "after 2"), ("s", "skip")] {
        kafka.publish(key, name).await;
    }
    until(&|effects| effects.contains(&"after 2".to_owned())).await;
    let of_key: Vec<_> = bed.effects("billing").await.into_iter().filter(|name| name.starts_with("after")).collect();
    assert_eq!(of_key, ["after 1", "after 2"]);
    assert_eq!(bed.dead_letters("billing").await, [("broken".to_owned(), "handler".to_owned(), 4)]);

    // The topic for people has it, with the reason; the consumer of everything does not read it.
    let (headers, payload) = read(&kafka, "test.created.dlq").await;
    assert_eq!(payload, br#""broken""#);
    assert_eq!(headers["postrider-error"], "the book is closed");
    assert_eq!((headers["postrider-attempts"].as_str(), headers["postrider-topic"].as_str()), ("4", "test.created"));
    assert_eq!(headers["ce_type"], "created");
    let (headers, payload) = read(&kafka, "test.created.skipped").await;
    assert_eq!((headers["postrider-reason"].as_str(), payload.as_slice()), ("skipped", br#""skip""#.as_slice()));

    is_fixed.store(true, Ordering::SeqCst);
    bed.store().dead_replay(&DeadFilter::default(), 10, "test").await.expect("replayed");
    until(&|effects| effects.last().is_some_and(|name| name == "broken")).await;

    // A record that no Postrider has made is an event all the same, by its place in the log.
    let producer: FutureProducer =
        ClientConfig::new().set("bootstrap.servers", kafka.server.bootstrap()).create().expect("a client");
    let topic = format!("{}orders.paid", kafka.settings.prefix);
    for _ in 0..2 {
        let headers = OwnedHeaders::new().insert(Header { key: "x-shop", value: Some("s-1") });
        let record =
            FutureRecord::to(&topic).partition(0).key("foreign").payload(&[0u8, 159, 146][..]).headers(headers);
        producer.send(record, SOON).await.expect("sent");
    }
    let foreign = "3 bytes of foreign".to_owned();
    until(&|effects| effects.iter().filter(|name| **name == foreign).count() == 2).await;
    stop.cancel();
}
