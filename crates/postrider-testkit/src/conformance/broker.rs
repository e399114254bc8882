//! What every broker keeps: durable, in order within a key, to every consumer, again until acked.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::broker::{Broker, Delivery, Subscription};
use postrider::event::Event;
use postrider::handler::ConsumerSpec;
use postrider::lease::Lease;

use super::bed::{event, name};

/// A broker under test.
#[async_trait]
pub trait BrokerBed: Send + Sync {
    /// The broker.
    fn broker(&self) -> Arc<dyn Broker>;

    /// A lease for a slot of a consumer, with a rising epoch.
    async fn lease(&self, consumer: &ConsumerSpec, slot: u32) -> Lease;

    /// Whether the order of a key holds across topics. Kafka keeps it within a topic.
    fn orders_across_topics(&self) -> bool {
        true
    }
}

/// How long a message may take.
const ARRIVES: Duration = Duration::from_secs(20);
/// How long to wait for a message that must not come.
const SILENCE: Duration = Duration::from_millis(300);

async fn subscribe(bed: &impl BrokerBed, consumer: &ConsumerSpec) -> Box<dyn Subscription> {
    let lease = bed.lease(consumer, 0).await;
    bed.broker().subscribe(consumer, &lease).await.expect("the subscription begins")
}

async fn next(subscription: &mut Box<dyn Subscription>) -> Delivery {
    tokio::time::timeout(ARRIVES, subscription.next()).await.expect("a message comes").expect("the subscription lives")
}

async fn take(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<String> {
    let mut names = Vec::new();
    for _ in 0..count {
        let delivery = next(subscription).await;
        names.push(name(&delivery.event.expect("an event")));
        subscription.ack(delivery.tag).await.expect("the ack is taken");
    }
    names
}

async fn is_silent(subscription: &mut Box<dyn Subscription>) -> bool {
    tokio::time::timeout(SILENCE, subscription.next()).await.is_err()
}

async fn publish(bed: &impl BrokerBed, events: Vec<Event>) {
    let events: Vec<Arc<Event>> = events.into_iter().map(Arc::new).collect();
    let results = bed.broker().publish(&events).await;
    assert_eq!(results.len(), events.len(), "one result per event");
    for result in results {
        result.expect("the broker confirms");
    }
}

fn everything(consumer: &str) -> ConsumerSpec {
    ConsumerSpec::new(consumer, &["#"])
}

/// Every field of the envelope arrives as it was sent.
pub async fn the_whole_envelope_arrives(bed: &impl BrokerBed) {
    let mut subscription = subscribe(bed, &everything("all")).await;
    let full = Event::builder("orders.created.eu", "order.created")
        .key("o-1 ü")
        .source("shop")
        .subject("order/1")
        .tenant("acme")
        .correlation("c-1")
        .causation("c-0")
        .traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .tracestate("vendor=1")
        .header("x-priority", "high")
        .json(&serde_json::json!({"total": 12.50, "text": "grüße"}))
        .expect("JSON")
        .build()
        .expect("valid");
    let bytes =
        Event::builder("files.made", "file").source("shop").payload("application/octet-stream", vec![0u8, 255, 7]);
    let bytes = bytes.build().expect("valid");
    publish(bed, vec![full.clone(), bytes.clone()]).await;
    let mut arrived = BTreeMap::new();
    for _ in 0..2 {
        let delivery = next(&mut subscription).await;
        let event = delivery.event.expect("an event");
        arrived.insert(event.id(), event);
    }
    for sent in [full, bytes] {
        let got = &arrived[&sent.id()];
        assert_eq!(got.payload(), sent.payload());
        assert_eq!(format!("{got:?}"), format!("{sent:?}"));
        assert_eq!(*got, sent);
    }
}

/// Each consumer gets every message it wants, once.
pub async fn every_consumer_gets_what_it_wants(bed: &impl BrokerBed) {
    let mut all = subscribe(bed, &everything("all")).await;
    let mut orders = subscribe(bed, &ConsumerSpec::new("orders", &["orders.*"])).await;
    let make = |topic: &str, text: &str| {
        Event::builder(topic, "t").key("k").json(&text).expect("JSON").build().expect("valid")
    };
    publish(bed, vec![make("orders.created", "a")]).await;
    publish(bed, vec![make("users.created", "b")]).await;
    publish(bed, vec![make("orders.paid", "c")]).await;
    let (mut of_all, mut of_orders) = (take(&mut all, 3).await, take(&mut orders, 2).await);
    if !bed.orders_across_topics() {
        of_all.sort();
        of_orders.sort();
    }
    assert_eq!(of_all, ["a", "b", "c"]);
    assert_eq!(of_orders, ["a", "c"]);
    assert!(is_silent(&mut orders).await);
}

/// Messages of one key arrive in the order in which they were confirmed.
pub async fn messages_of_a_key_keep_their_order(bed: &impl BrokerBed) {
    let mut subscription = subscribe(bed, &everything("all")).await;
    let names: Vec<String> = (0..50).map(|n| format!("{n:02}")).collect();
    for text in &names {
        publish(bed, vec![event("k", text)]).await;
    }
    assert_eq!(take(&mut subscription, 50).await, names);
}

/// What was not acked comes again, before what follows it.
pub async fn what_was_not_acked_comes_again(bed: &impl BrokerBed) {
    let consumer = everything("all");
    let mut first = subscribe(bed, &consumer).await;
    for text in ["a", "b", "c"] {
        publish(bed, vec![event("k", text)]).await;
    }
    assert_eq!(take(&mut first, 1).await, ["a"]);
    let unacked = next(&mut first).await;
    assert_eq!(name(unacked.event.as_ref().expect("an event")), "b");
    first.close().await.expect("closes");
    drop(first);
    let mut second = subscribe(bed, &consumer).await;
    assert_eq!(take(&mut second, 2).await, ["b", "c"]);
}

/// A slot holds at most `prefetch` unacked messages.
pub async fn prefetch_bounds_what_is_held(bed: &impl BrokerBed) {
    let consumer = ConsumerSpec { prefetch: 2, ..everything("all") };
    let mut subscription = subscribe(bed, &consumer).await;
    for text in ["a", "b", "c"] {
        publish(bed, vec![event("k", text)]).await;
    }
    let first = next(&mut subscription).await;
    next(&mut subscription).await;
    assert!(is_silent(&mut subscription).await, "a third message came before an ack");
    subscription.ack(first.tag).await.expect("acked");
    assert_eq!(name(&next(&mut subscription).await.event.expect("an event")), "c");
}

/// Messages wait for a consumer that is away, and for one that acks late.
pub async fn messages_wait_for_an_absent_consumer(bed: &impl BrokerBed) {
    let consumer = everything("all");
    let mut subscription = subscribe(bed, &consumer).await;
    subscription.close().await.expect("closes");
    drop(subscription);
    for text in ["a", "b"] {
        publish(bed, vec![event("k", text)]).await;
    }
    let mut subscription = subscribe(bed, &consumer).await;
    assert_eq!(take(&mut subscription, 2).await, ["a", "b"]);
}

/// Slots split a consumer's messages by key; together they see everything.
pub async fn slots_split_messages_by_key(bed: &impl BrokerBed) {
    let consumer = ConsumerSpec { slots: 3, ..everything("sharded") };
    let mut subscriptions = Vec::new();
    for slot in 0..3 {
        let lease = bed.lease(&consumer, slot).await;
        subscriptions.push(bed.broker().subscribe(&consumer, &lease).await.expect("subscribes"));
    }
    for n in 0..30 {
        publish(bed, vec![event(&format!("key {}", n % 10), &format!("{n:02}"))]).await;
    }
    let mut seen: BTreeMap<String, (usize, Vec<String>)> = BTreeMap::new();
    let mut total = 0;
    for (slot, subscription) in subscriptions.iter_mut().enumerate() {
        while let Ok(delivery) = tokio::time::timeout(Duration::from_secs(1), subscription.next()).await {
            let delivery = delivery.expect("the subscription lives");
            let event = delivery.event.expect("an event");
            subscription.ack(delivery.tag).await.expect("acked");
            let entry = seen.entry(event.key().unwrap_or_default().to_owned()).or_insert((slot, Vec::new()));
            assert_eq!(entry.0, slot, "a key came in two slots");
            entry.1.push(name(&event));
            total += 1;
        }
    }
    assert_eq!(total, 30);
    assert!(seen.values().all(|(_, names)| names.is_sorted()), "a key lost its order");
}

/// An event without any queue is an error that names the topic, never a silent drop.
pub async fn an_unroutable_event_is_an_error(bed: &impl BrokerBed) {
    let mut subscription = subscribe(bed, &ConsumerSpec::new("orders", &["orders.*"])).await;
    let lonely = Event::builder("nobody.listens", "t").key("k").json("x").expect("JSON").build().expect("valid");
    let orders = Event::builder("orders.created", "t").key("k2").json("y").expect("JSON").build().expect("valid");
    let results = bed.broker().publish(&[Arc::new(lonely), Arc::new(orders)]).await;
    let error = results[0].as_ref().expect_err("the broker confirmed what it dropped");
    assert_eq!(error.kind(), postrider::Kind::Unroutable);
    assert!(error.to_string().contains("nobody.listens"), "the error names the topic: {error}");
    assert!(results[1].is_ok(), "its neighbour is not troubled");
    assert_eq!(take(&mut subscription, 1).await, ["y"]);
}
