//! From the outbox in PostgreSQL through Kafka to effects in PostgreSQL, while Kafka goes away, and while a topic is missing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postrider::event::Event;
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::lease::{LeaseTimes, Leases};
use postrider::outbox::OutboxStore;
use postrider::relay::{Backoff, BreakerSettings, Relay, RelaySettings};
use postrider::store::Store;
use postrider::{Result, Route};
use postrider_testkit::conformance::bed::{Bed, PostgresBed, Tx, event, name};
use tokio_util::sync::CancellationToken;

use crate::bed::KafkaBed;

/// What a busy machine needs for an outage and everything after it.
const LONG: Duration = Duration::from_secs(120);

/// Writes the event's name as its effect.
struct Write;

#[async_trait]
impl Handler<Tx<PostgresBed>> for Write {
    async fn handle(&self, tx: &mut Tx<PostgresBed>, event: &Event) -> Result<(), HandlerError> {
        PostgresBed::write_effect(tx, "billing", &name(event)).await
    }
}

fn relay(bed: &PostgresBed, kafka: &KafkaBed) -> Relay {
    let breaker = BreakerSettings { open: Duration::from_secs(1), ..BreakerSettings::default() };
    let backoff = Backoff { base: Duration::from_millis(200), max: Duration::from_secs(1), jitter: Duration::ZERO };
    let settings = RelaySettings { breaker, backoff, ..RelaySettings::default() };
    let leases: Arc<dyn Leases> = Arc::new(bed.store().clone());
    Relay::new("default", bed.store().source(&Route::all("default"), 1), leases, kafka.broker.clone(), settings)
}

fn consume(bed: &PostgresBed, kafka: &KafkaBed, spec: ConsumerSpec, owner: &str) -> CancellationToken {
    let store = Arc::new(bed.store().clone());
    let times = LeaseTimes { ttl: Duration::from_secs(2) };
    let consumer = Consumer::new(spec, kafka.broker.clone(), store.clone(), store, Write).expect("valid");
    let stop = CancellationToken::new();
    tokio::spawn(consumer.owner(owner).lease_times(times).run(stop.clone()));
    stop
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so().await {
        assert!(Instant::now() < deadline, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Every event has one effect, and those of a key are in order. Names are `key number`.
fn check(effects: &[String], keys: usize, count: usize) {
    assert_eq!(effects.len(), count, "each event has one effect");
    for key in 0..keys {
        let of_key: Vec<usize> = effects
            .iter()
            .filter_map(|name| name.split_once(' '))
            .filter(|(of, _)| *of == key.to_string())
            .map(|(_, n)| n.parse().expect("a number"))
            .collect();
        let expected: Vec<usize> = (0..count).filter(|n| n % keys == key).collect();
        assert_eq!(of_key, expected, "key {key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_doubled_or_reordered_when_kafka_goes_away_and_slots_move() {
    const COUNT: usize = 3_000;
    const KEYS: usize = 50;
    let (bed, kafka) = (PostgresBed::new().await, KafkaBed::new().await);
    let stop = CancellationToken::new();
    let relaying = tokio::spawn(relay(&bed, &kafka).run(stop.clone()));
    let spec = ConsumerSpec { slots: 3, ..ConsumerSpec::new("billing", &["test.#"]) };
    let first = consume(&bed, &kafka, spec.clone(), "first");
    let store = bed.store().clone();
    let producer = tokio::spawn(async move {
        for n in 0..COUNT {
            let key = (n % KEYS).to_string();
            store.enqueue(&[event(&key, &format!("{key} {n}"))]).await.expect("enqueued");
        }
    });
    until("a beginning", async || bed.effects("billing").await.len() > 200).await;
    // Slots move to the second instance, and back when it ends.
    let second = consume(&bed, &kafka, spec, "second");
    if kafka.server.is_mock() {
        for _ in 0..2 {
            kafka.server.stop().await.expect("stopped");
            tokio::time::sleep(Duration::from_secs(2)).await;
            kafka.server.start_again().await.expect("started");
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        println!("all brokers were away twice, with {} effects so far", bed.effects("billing").await.len());
    } else {
        println!("a real cluster is not stopped by this test; only slots move");
    }
    second.cancel();
    producer.await.expect("produced");
    until("everything", async || bed.effects("billing").await.len() >= COUNT).await;
    check(&bed.effects("billing").await, KEYS, COUNT);
    assert_eq!(bed.dead_letters("billing").await, []);
    stop.cancel();
    relaying.await.expect("ends").expect("ends well");
    first.cancel();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_without_a_topic_is_parked_and_others_flow() {
    let (bed, kafka) = (PostgresBed::new().await, KafkaBed::new().await);
    let stop = CancellationToken::new();
    let relaying = tokio::spawn(relay(&bed, &kafka).run(stop.clone()));
    let consuming = consume(&bed, &kafka, ConsumerSpec::new("billing", &["#"]), "first");
    let lonely =
        Event::builder("nobody.has.it", "t").key("lonely").json("lonely").expect("JSON").build().expect("valid");
    bed.store().enqueue(std::slice::from_ref(&lonely)).await.expect("enqueued");
    for n in 0..50 {
        bed.store().enqueue(&[event(&format!("{n}"), &format!("{n}"))]).await.expect("enqueued");
    }
    until("the others", async || bed.effects("billing").await.len() == 50).await;
    assert_eq!(bed.outbox_status(&lonely).await, "retrying");
    kafka.create("nobody.has.it", 6).await;
    until("the lonely one", async || bed.effects("billing").await.contains(&"lonely".to_owned())).await;
    assert_eq!(bed.outbox_status(&lonely).await, "published");
    stop.cancel();
    relaying.await.expect("ends").expect("ends well");
    consuming.cancel();
}

/// Never returns from an event named `hang`.
struct Hang;

#[async_trait]
impl Handler<Tx<PostgresBed>> for Hang {
    async fn handle(&self, tx: &mut Tx<PostgresBed>, event: &Event) -> Result<(), HandlerError> {
        match name(event).as_str() {
            "hang" => std::future::pending().await,
            name => PostgresBed::write_effect(tx, "billing", name).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_ends_the_process_becomes_a_dead_letter() {
    let (bed, kafka) = (PostgresBed::new().await, KafkaBed::new().await);
    kafka.create("test.created.dlq", 1).await;
    for (key, name) in [("k", "hang"), ("k", "a"), ("other", "b")] {
        kafka.publish(key, name).await;
    }
    let spec = ConsumerSpec { retries: 2, handler_timeout: LONG, ..ConsumerSpec::new("billing", &["test.*"]) };
    for life in 0..6 {
        // An instance that ends without a word, with its connections.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let instance = runtime.expect("a runtime");
        let store = Arc::new(instance.spawn(bed.open_again()).await.expect("the store opens"));
        let broker = Arc::new(postrider::broker::kafka::Kafka::new(kafka.settings.clone()).expect("valid settings"));
        let consumer = Consumer::new(spec.clone(), broker, store.clone(), store, Hang).expect("valid");
        let times = LeaseTimes { ttl: Duration::from_millis(600) };
        instance.spawn(consumer.owner(format!("life {life}")).lease_times(times).run(CancellationToken::new()));
        let deadline = Instant::now() + Duration::from_secs(5);
        while bed.effects("billing").await.len() < 2 && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        instance.shutdown_background();
        if bed.effects("billing").await.len() == 2 {
            println!("caught in life {life}");
            break;
        }
    }
    let dead = bed.dead_letters("billing").await;
    assert_eq!(
        dead.iter().map(|(name, error, _)| (name.as_str(), error.as_str())).collect::<Vec<_>>(),
        [("hang", "crash")]
    );
    let mut effects = bed.effects("billing").await;
    effects.sort();
    assert_eq!(effects, ["a", "b"]);
}
