//! The way of a failing message from RabbitMQ: its attempts with real times, the queue for people, the desk, the replay;
//! and what is no event, or too large, or handled by nobody.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lapin::options::{BasicGetOptions, BasicPublishOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use postrider::broker::Broker;
use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
use postrider::dead::{DeadFilter, DeadLetters};
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError, Place};
use postrider::{Event, Result};
use postrider_testkit::conformance::bed::{Bed, PostgresBed, Tx, event, name};
use postrider_testkit::testbed;
use tokio_util::sync::CancellationToken;

/// Waits for what other tasks do.
const SOON: Duration = Duration::from_secs(30);

/// When each attempt at an event was made.
type Attempts = Arc<Mutex<Vec<(String, Instant)>>>;

struct Ladder {
    attempts: Attempts,
    is_fixed: Arc<AtomicBool>,
}

#[async_trait]
impl Handler<Tx<PostgresBed>> for Ladder {
    async fn handle(&self, tx: &mut Tx<PostgresBed>, event: &Event) -> Result<(), HandlerError> {
        let name = match event.is_json() {
            true => name(event),
            false => format!("{} bytes", event.payload().len()),
        };
        self.attempts.lock().expect("not poisoned").push((name.clone(), Instant::now()));
        PostgresBed::write_effect(tx, "billing", &name).await?;
        match name.as_str() {
            "broken" if !self.is_fixed.load(Ordering::SeqCst) => Err(HandlerError::retry("the book is closed")),
            "skip" => Err(HandlerError::skip()),
            _ => Ok(()),
        }
    }
}

struct Bench {
    bed: PostgresBed,
    broker: Arc<RabbitMq>,
    connection: Connection,
    attempts: Attempts,
    is_fixed: Arc<AtomicBool>,
    stop: CancellationToken,
}

impl Bench {
    /// A consumer of a fresh queue on PostgreSQL and RabbitMQ.
    async fn new(spec: ConsumerSpec) -> Self {
        let bed = PostgresBed::new().await;
        let url = testbed::rabbitmq().await.vhost(&testbed::unique("ladder")).await.expect("a fresh virtual host");
        let broker = Arc::new(RabbitMq::new(RabbitMqSettings::new(url.as_str())).expect("valid settings"));
        let connection = Connection::connect(&url, ConnectionProperties::default()).await.expect("connects");
        let (attempts, is_fixed, stop) = (Attempts::default(), Arc::default(), CancellationToken::new());
        let handler = Ladder { attempts: Arc::clone(&attempts), is_fixed: Arc::clone(&is_fixed) };
        let store = Arc::new(bed.store().clone());
        let consumer = Consumer::new(spec, broker.clone(), store.clone(), store, handler).expect("valid");
        tokio::spawn(consumer.run(stop.clone()));
        let bench = Self { bed, broker, connection, attempts, is_fixed, stop };
        // Until the queue is there, nothing can be published.
        bench.until(async || bench.publish("probe", "probe").await).await;
        bench.until(async || bench.effects().await == ["probe"]).await;
        bench
    }

    async fn publish(&self, key: &str, name: &str) -> bool {
        self.broker.publish(&[Arc::new(event(key, name))]).await[0].is_ok()
    }

    async fn effects(&self) -> Vec<String> {
        self.bed.effects("billing").await
    }

    async fn until(&self, is_so: impl AsyncFn() -> bool) {
        let deadline = Instant::now() + SOON;
        while !is_so().await {
            assert!(
                Instant::now() < deadline,
                "{:?} {:?}",
                self.effects().await,
                self.bed.dead_letters("billing").await
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The next message of a queue: its headers and its body.
    async fn take(&self, queue: &str) -> (BTreeMap<String, String>, Vec<u8>) {
        let deadline = Instant::now() + SOON;
        loop {
            // A queue that is not there yet costs the channel.
            let channel = self.connection.create_channel().await.expect("a channel");
            let got = channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await;
            if let Ok(Some(message)) = got {
                let headers = message.delivery.properties.headers().clone().unwrap_or_default();
                let text = |value: &AMQPValue| match value {
                    AMQPValue::LongString(text) => text.to_string(),
                    other => format!("{other:?}"),
                };
                let headers = (&headers).into_iter().map(|(name, value)| (name.to_string(), text(value))).collect();
                return (headers, message.delivery.data);
            }
            assert!(Instant::now() < deadline, "nothing comes to {queue}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Publishes what no Postrider has made.
    async fn publish_foreign(&self, properties: BasicProperties, body: &[u8]) {
        let channel = self.connection.create_channel().await.expect("a channel");
        channel
            .basic_publish("postrider".into(), "test.foreign".into(), BasicPublishOptions::default(), body, properties)
            .await
            .expect("sent")
            .await
            .expect("taken");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_climbs_the_ladder_and_comes_back_by_replay() {
    let bench = Bench::new(ConsumerSpec::new("billing", &["#"])).await;
    for (key, name) in [("k", "broken"), ("k", "after 1"), ("other", "x"), ("k", "after 2")] {
        assert!(bench.publish(key, name).await);
    }
    let began = Instant::now();
    bench.until(async || bench.effects().await.contains(&"x".to_owned())).await;
    assert!(began.elapsed() < Duration::from_secs(1), "another key was delayed: {:?}", began.elapsed());
    bench.until(async || bench.effects().await.contains(&"after 2".to_owned())).await;
    assert_eq!(bench.effects().await, ["probe", "x", "after 1", "after 2"], "the key's later messages came after it");

    let times: Vec<Instant> = {
        let attempts = bench.attempts.lock().expect("not poisoned");
        attempts.iter().filter(|(name, _)| name == "broken").map(|(_, at)| *at).collect()
    };
    let waits: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    println!("waits between the four attempts: {waits:.2?} s");
    assert_eq!(waits.len(), 3);
    for (wait, planned) in waits.iter().zip([1.0, 2.0, 4.0]) {
        assert!((planned..planned + 1.0).contains(wait), "{waits:?}");
    }

    // The queue for people has it, with the reason.
    let (headers, body) = bench.take("billing_error").await;
    assert_eq!(body, br#""broken""#);
    assert_eq!(headers["postrider-error"], "the book is closed");
    assert_eq!(headers["postrider-attempts"], "4");
    assert_eq!(headers["postrider-queue"], "billing");
    assert_eq!(headers["postrider-routing-key"], "test.created");

    // So has the desk; repaired, it is applied once.
    let store = bench.bed.store();
    let listed = store.dead_list(&DeadFilter::default(), 0, 10).await.expect("listed");
    assert_eq!((listed.len(), listed[0].attempts), (1, 4));
    bench.is_fixed.store(true, Ordering::SeqCst);
    let taken = store.dead_replay(&DeadFilter::default(), 10, "test").await.expect("replayed");
    let ids: Vec<i64> = taken.iter().map(|taken| taken.id).collect();
    bench.until(async || store.dead_progress(&ids).await.expect("answers").applied == 1).await;
    assert_eq!(bench.effects().await, ["probe", "x", "after 1", "after 2", "broken"]);
    bench.stop.cancel();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_applied_is_kept_with_its_reason() {
    let quick = ConsumerSpec {
        dead_letters_to: Place::Named("analytics.errors".to_owned()),
        ..ConsumerSpec::new("billing", &["#"])
    };
    let bench = Bench::new(quick).await;
    // No id, so it is no event; the bytes are no text either.
    let mut headers = FieldTable::default();
    headers.insert("x-shop".into(), AMQPValue::LongString("s-1".into()));
    let bare = BasicProperties::default().with_headers(headers).with_content_type("image/png".into());
    bench.publish_foreign(bare.clone(), &[0, 159, 146, 150]).await;
    let (headers, body) = bench.take("analytics.errors").await;
    assert_eq!(body, [0, 159, 146, 150]);
    assert_eq!((headers["postrider-error-type"].as_str(), headers["x-shop"].as_str()), ("corrupt", "s-1"));
    let dead = bench.bed.store().dead_list(&DeadFilter::default(), 0, 10).await.expect("listed");
    let detail = bench.bed.store().dead_show(dead[0].id).await.expect("answers").expect("is there");
    assert_eq!(detail.payload_bytes, 4);
    let payload = bench.bed.store().dead_payload(dead[0].id, "test").await.expect("answers");
    assert_eq!(payload.as_deref(), Some(&[0, 159, 146, 150][..]));
    assert_eq!(detail.headers.expect("kept")["content_type"], "image/png");

    // Neither have what no database can hold in a text.
    let mut headers = FieldTable::default();
    headers.insert("x-shop".into(), AMQPValue::LongString("a\0b".into()));
    bench.publish_foreign(BasicProperties::default().with_headers(headers), b"nul").await;
    assert_eq!(bench.take("analytics.errors").await.1, b"nul");

    // An envelope whose time is none is an event all the same; the same message twice has one effect.
    let mut headers = FieldTable::default();
    headers.insert("cloudEvents:id".into(), AMQPValue::LongString("m-1".into()));
    headers.insert("cloudEvents:time".into(), AMQPValue::LongString("yesterday".into()));
    for _ in 0..2 {
        bench.publish_foreign(BasicProperties::default().with_headers(headers.clone()), b"{").await;
    }
    // A foreign message with an id, and one of 10 MB, are events like others.
    bench.publish_foreign(bare.with_message_id("m-2".into()), &vec![b'x'; 10_000_000]).await;
    bench.until(async || bench.effects().await.contains(&"10000000 bytes".to_owned())).await;
    assert!(bench.publish("k", "skip").await);
    let (headers, body) = bench.take("billing_skipped").await;
    assert_eq!((headers["postrider-reason"].as_str(), body.as_slice()), ("skipped", br#""skip""#.as_slice()));
    assert!(bench.publish("k", "last").await);
    bench.until(async || bench.effects().await.last().is_some_and(|name| name == "last")).await;
    assert_eq!(bench.effects().await, ["probe", "1 bytes", "10000000 bytes", "skip", "last"]);
    let dead = bench.bed.store().dead_list(&DeadFilter::default(), 0, 10).await.expect("listed");
    assert_eq!(dead.len(), 2, "{dead:?}");
    bench.stop.cancel();
}
