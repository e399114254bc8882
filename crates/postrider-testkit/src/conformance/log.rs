//! What a broker keeps that is a log with positions: a successor begins where its predecessor was done, however that ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use postrider::Kind;
use postrider::broker::{AsideKind, Broker, Delivery, Origin, Subscription};
use postrider::event::Event;
use postrider::handler::{ConsumerSpec, Place};
use postrider::inbox::{Body, Failed};

use super::bed::{event, name};
use super::broker::BrokerBed;

/// How long a message may take.
const ARRIVES: Duration = Duration::from_secs(20);
/// How long to wait for a message that must not come.
const SILENCE: Duration = Duration::from_millis(500);

type Subscribed = Box<dyn Subscription>;

fn everything(slots: u32) -> ConsumerSpec {
    ConsumerSpec { slots, ..ConsumerSpec::new("all", &["#"]) }
}

async fn subscribe(bed: &impl BrokerBed, consumer: &ConsumerSpec, slot: u32) -> Subscribed {
    let lease = bed.lease(consumer, slot).await;
    bed.broker().subscribe(consumer, &lease).await.expect("the subscription begins")
}

async fn next(subscription: &mut Subscribed) -> Delivery {
    tokio::time::timeout(ARRIVES, subscription.next()).await.expect("a message comes").expect("the subscription lives")
}

/// The next messages: their names, and whether they were delivered before.
async fn take(subscription: &mut Subscribed, count: usize) -> Vec<(String, bool)> {
    let mut taken = Vec::new();
    for _ in 0..count {
        let delivery = next(subscription).await;
        taken.push((name(&delivery.event.expect("an event")), delivery.is_redelivered));
        subscription.ack(delivery.tag).await.expect("the ack is taken");
    }
    taken
}

async fn is_silent(subscription: &mut Subscribed) -> bool {
    tokio::time::timeout(SILENCE, subscription.next()).await.is_err()
}

/// The error that ends a subscription.
async fn end(subscription: &mut Subscribed) -> Kind {
    let ended = async {
        loop {
            if let Err(error) = subscription.next().await {
                return error.kind();
            }
        }
    };
    tokio::time::timeout(ARRIVES, ended).await.expect("the subscription ends")
}

async fn publish(bed: &impl BrokerBed, names: &[&str]) {
    for name in names {
        let results = bed.broker().publish(&[Arc::new(event("k", name))]).await;
        assert!(results.len() == 1 && results[0].is_ok(), "{results:?}");
    }
}

fn pairs(names: &[&str], is_redelivered: bool) -> Vec<(String, bool)> {
    names.iter().map(|name| ((*name).to_owned(), is_redelivered)).collect()
}

/// A holder vanishes with messages in hand, one acked out of turn. Its successor gets them first, in order, marked.
pub async fn a_successor_gets_first_what_was_in_hand(bed: &impl BrokerBed) {
    let consumer = everything(1);
    let mut first = subscribe(bed, &consumer, 0).await;
    publish(bed, &["a", "b", "c", "d"]).await;
    assert_eq!(take(&mut first, 1).await, pairs(&["a"], false));
    let mut hand = Vec::new();
    for _ in 0..3 {
        hand.push(next(&mut first).await);
    }
    // Not in order, and so not below the floor.
    first.ack(hand[1].tag).await.expect("the ack is taken");
    // What is acked is told to the broker a little later.
    assert!(is_silent(&mut first).await);
    let mut second = subscribe(bed, &consumer, 0).await;
    publish(bed, &["e"]).await;
    assert_eq!(take(&mut second, 3).await, pairs(&["b", "c", "d"], true));
    assert_eq!(take(&mut second, 1).await[0].0, "e");
    assert!(is_silent(&mut second).await);
}

/// A holder that slept through its lease wakes up: it is told so, and its successor notices nothing.
pub async fn a_stale_holder_ends_and_disturbs_nobody(bed: &impl BrokerBed) {
    let consumer = everything(1);
    let stale = bed.lease(&consumer, 0).await;
    let mut first = bed.broker().subscribe(&consumer, &stale).await.expect("the subscription begins");
    publish(bed, &["a", "b"]).await;
    // It waits for messages, so whatever the broker pushes would reach it.
    let in_hand = next(&mut first).await;
    let mut second = subscribe(bed, &consumer, 0).await;
    assert_eq!(take(&mut second, 2).await.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    // The new holder waits while these come; the old one sleeps.
    let waiting = tokio::spawn(async move {
        let taken = take(&mut second, 2).await;
        (second, taken)
    });
    publish(bed, &["c", "d"]).await;
    let (mut second, taken) = waiting.await.expect("no panic");
    assert_eq!(taken.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["c", "d"]);
    // The stale one wakes up.
    let _ = first.ack(in_hand.tag).await;
    assert_eq!(end(&mut first).await, Kind::LeaseLost);
    let _ = first.close().await;
    assert!(is_silent(&mut second).await, "nothing comes twice");
    let again = bed.broker().subscribe(&consumer, &stale).await.err().expect("it is refused");
    assert_eq!(again.kind(), Kind::LeaseLost);
    publish(bed, &["e"]).await;
    assert_eq!(take(&mut second, 1).await, pairs(&["e"], false));
}

/// The same holder subscribes again after a loss of connection, with the same lease.
pub async fn a_holder_may_subscribe_again(bed: &impl BrokerBed) {
    let consumer = everything(1);
    let lease = bed.lease(&consumer, 0).await;
    let mut first = bed.broker().subscribe(&consumer, &lease).await.expect("the subscription begins");
    publish(bed, &["a", "b"]).await;
    next(&mut first).await;
    drop(first);
    let mut second = bed.broker().subscribe(&consumer, &lease).await.expect("the subscription begins");
    assert_eq!(take(&mut second, 2).await.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

/// A holder that ends in good order puts back what it has not begun: nobody need suspect it.
pub async fn what_was_put_back_is_not_suspect(bed: &impl BrokerBed) {
    let consumer = everything(1);
    let mut first = subscribe(bed, &consumer, 0).await;
    publish(bed, &["a", "b", "c"]).await;
    assert_eq!(take(&mut first, 1).await, pairs(&["a"], false));
    next(&mut first).await;
    first.close().await.expect("closes");
    let mut second = subscribe(bed, &consumer, 0).await;
    assert_eq!(take(&mut second, 2).await, pairs(&["b", "c"], false));
}

/// Slots see everything once, and lose nothing when their number changes.
pub async fn slots_may_change_their_number(bed: &impl BrokerBed) {
    let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (round, slots) in [1, 3, 2, 5].into_iter().enumerate() {
        let consumer = everything(slots);
        let mut subscriptions = Vec::new();
        for slot in 0..slots {
            subscriptions.push(subscribe(bed, &consumer, slot).await);
        }
        let events: Vec<_> = (0..40).map(|n| Arc::new(event(&format!("key {n}"), &format!("{round}")))).collect();
        for result in bed.broker().publish(&events).await {
            result.expect("the broker confirms");
        }
        let expected: usize = events.len();
        let mut count = 0;
        for subscription in &mut subscriptions {
            while let Ok(delivery) = tokio::time::timeout(Duration::from_millis(800), subscription.next()).await {
                let delivery = delivery.expect("the subscription lives");
                let event = delivery.event.expect("an event");
                seen.entry(event.key().unwrap_or_default().to_owned()).or_default().push(name(&event));
                subscription.ack(delivery.tag).await.expect("acked");
                count += 1;
            }
        }
        assert_eq!(count, expected, "with {slots} slots each message comes once");
        for subscription in &mut subscriptions {
            subscription.close().await.expect("closes");
        }
    }
    assert_eq!(seen.len(), 40);
    assert!(seen.values().all(|names| *names == ["0", "1", "2", "3"]), "{seen:?}");
}

/// Payload, headers and message id travel without the envelope; a message id need not be a UUID.
pub async fn a_raw_event_travels_without_its_envelope(bed: &impl BrokerBed) {
    let mut subscription = subscribe(bed, &everything(1), 0).await;
    let builder = Event::builder("legacy.made", "t").message_id("outbox-17").header("x-shop", "s-1").raw();
    let raw = builder.payload("text/plain", "x").build().expect("valid");
    let named = Event::builder("legacy.made", "t").source("shop").message_id("outbox-18").payload("text/plain", "y");
    let named = named.build().expect("valid");
    for event in [&raw, &named] {
        bed.broker().publish(&[Arc::new(event.clone())]).await.remove(0).expect("the broker confirms");
    }
    let mut arrived = BTreeMap::new();
    for _ in 0..2 {
        let event = next(&mut subscription).await.event.expect("an event");
        arrived.insert(event.id(), event);
    }
    let got = &arrived[&raw.id()];
    assert_eq!((got.payload(), got.headers(), got.source()), (raw.payload(), raw.headers(), None));
    assert_eq!(arrived[&named.id()].source(), Some("shop"));
}

/// Sets a dead letter aside and returns the event; its place is `all_error`.
pub async fn set_aside(broker: &dyn Broker) -> Event {
    assert!(broker.has_places());
    let letter = event("k", "dead");
    let failed = Failed::new("handler", "line 1\nline 2", vec!["the disk".to_owned()]);
    let origin = Origin {
        exchange: "x".to_owned(),
        topic: "test.created".to_owned(),
        queue: "all".to_owned(),
        ..Origin::default()
    };
    let aside = |place| postrider::broker::Aside {
        consumer: "all",
        kind: AsideKind::Dead,
        place,
        message: Body::Event(&letter),
        failed: &failed,
        attempts: 4,
        origin: Some(&origin),
    };
    broker.set_aside(&aside(&Place::Usual)).await.expect("it is set aside");
    broker.set_aside(&aside(&Place::Nowhere)).await.expect("nothing is done");
    letter
}
