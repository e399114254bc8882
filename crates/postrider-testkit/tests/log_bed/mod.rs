//! What the tests of brokers that are logs share: a bed, a relay through an outage, and a ladder of attempts.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::dead::{DeadFilter, DeadLetters};
use postrider::event::Event;
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::lease::{Lease, Leases};
use postrider::outbox::OutboxStore;
use postrider::relay::{BreakerSettings, Relay, RelaySettings};
use postrider::store::Store;
use postrider::{Result, Route};
use postrider_testkit::conformance::bed::{Bed, PostgresBed, Tx, event, name};
use postrider_testkit::conformance::broker::BrokerBed;
use tokio_util::sync::CancellationToken;

/// Waits for what other tasks do.
const SOON: Duration = Duration::from_secs(60);

pub struct LogBed {
    pub broker: Arc<dyn Broker>,
    epoch: AtomicI64,
}

impl LogBed {
    pub fn new(broker: impl Broker + 'static) -> Self {
        Self { broker: Arc::new(broker), epoch: AtomicI64::new(0) }
    }
}

#[async_trait]
impl BrokerBed for LogBed {
    fn broker(&self) -> Arc<dyn Broker> {
        self.broker.clone()
    }

    async fn lease(&self, consumer: &ConsumerSpec, slot: u32) -> Lease {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        Lease { group: consumer.group(), slot, owner: "test".to_owned(), epoch }
    }
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !is_so().await {
        assert!(Instant::now() < deadline, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Receives until all are there, subscribing again after every outage; returns first arrivals in order.
async fn receive(broker: &dyn Broker, count: usize) -> Vec<Event> {
    let spec = ConsumerSpec::new("all", &["#"]);
    let lease = Lease { group: spec.group(), slot: 0, owner: "test".to_owned(), epoch: 1 };
    let (mut seen, mut events) = (HashSet::new(), Vec::new());
    let work = async {
        while events.len() < count {
            let Ok(mut subscription) = broker.subscribe(&spec, &lease).await else {
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            };
            while let Ok(delivery) = subscription.next().await {
                let event = delivery.event.expect("an event");
                if seen.insert(event.id()) {
                    events.push(event);
                }
                if subscription.ack(delivery.tag).await.is_err() || events.len() == count {
                    break;
                }
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(120), work).await.expect("all events arrive");
    events
}

/// A relay and a reader at work while the server is killed and started again.
pub async fn nothing_is_lost_or_reordered(broker: Arc<dyn Broker>, break_it: impl AsyncFnOnce()) {
    const EVENTS: usize = 3_000;
    let bed = PostgresBed::new().await;
    let breaker = BreakerSettings { open: Duration::from_secs(2), ..BreakerSettings::default() };
    let leases: Arc<dyn Leases> = Arc::new(bed.store().clone());
    let settings = RelaySettings { breaker, ..RelaySettings::default() };
    let source = bed.store().source(&Route::all("default"), 1);
    let (relay, stop) = (Relay::new("default", source, leases, broker.clone(), settings), CancellationToken::new());
    let relay = tokio::spawn(relay.run(stop.clone()));
    let store = bed.store().clone();
    let producer = tokio::spawn(async move {
        for n in 0..EVENTS {
            store.enqueue(&[event(&format!("{}", n % 50), &format!("{n:04}"))]).await.expect("enqueued");
        }
    });
    let reader = tokio::spawn(async move { receive(broker.as_ref(), EVENTS).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    break_it().await;
    let events = reader.await.expect("the reader ends");
    producer.await.expect("the producer ends");
    stop.cancel();
    relay.await.expect("no panic").expect("stops well");
    for key in 0..50 {
        let names: Vec<String> =
            events.iter().filter(|event| event.key() == Some(&key.to_string())).map(name).collect();
        assert_eq!(names.len(), EVENTS / 50);
        assert!(names.is_sorted(), "key {key} lost its order");
    }
}

struct Ladder {
    attempts: Arc<Mutex<Vec<Instant>>>,
    is_fixed: Arc<AtomicBool>,
}

#[async_trait]
impl Handler<Tx<PostgresBed>> for Ladder {
    async fn handle(&self, tx: &mut Tx<PostgresBed>, event: &Event) -> Result<(), HandlerError> {
        let name = name(event);
        PostgresBed::write_effect(tx, "all", &name).await?;
        if name != "broken" {
            return Ok(());
        }
        self.attempts.lock().expect("not poisoned").push(Instant::now());
        match self.is_fixed.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(HandlerError::retry("the book is closed")),
        }
    }
}

/// A message fails four times, delays only its own key, becomes a dead letter, and is applied once by a replay.
pub async fn a_message_climbs_the_ladder(broker: Arc<dyn Broker>) {
    let bed = PostgresBed::new().await;
    let (attempts, is_fixed, stop) = (Arc::default(), Arc::default(), CancellationToken::new());
    let handler = Ladder { attempts: Arc::clone(&attempts), is_fixed: Arc::clone(&is_fixed) };
    let store = Arc::new(bed.store().clone());
    let spec = ConsumerSpec { slots: 2, ..ConsumerSpec::new("all", &["test.#"]) };
    let consumer = Consumer::new(spec, broker.clone(), store.clone(), store.clone(), handler).expect("valid");
    let running = tokio::spawn(consumer.run(stop.clone()));
    for (key, name) in [("k", "broken"), ("k", "after 1"), ("other", "x"), ("k", "after 2")] {
        broker.publish(&[Arc::new(event(key, name))]).await.remove(0).expect("the broker confirms");
    }
    until("the effects of the others", async || bed.effects("all").await.contains(&"after 2".to_owned())).await;
    assert_eq!(bed.effects("all").await, ["x", "after 1", "after 2"], "the key's later messages came after it");
    let waits: Vec<f64> = {
        let attempts = attempts.lock().expect("not poisoned");
        attempts.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()
    };
    println!("waits between the four attempts: {waits:.2?} s");
    assert_eq!(waits.len(), 3);
    for (wait, planned) in waits.iter().zip([1.0, 2.0, 4.0]) {
        assert!((planned..planned + 1.0).contains(wait), "{waits:?}");
    }
    let listed = store.dead_list(&DeadFilter::default(), 0, 10).await.expect("listed");
    assert_eq!((listed.len(), listed[0].attempts), (1, 4));
    is_fixed.store(true, Ordering::SeqCst);
    let taken = store.dead_replay(&DeadFilter::default(), 10, "test").await.expect("replayed");
    let ids: Vec<i64> = taken.iter().map(|taken| taken.id).collect();
    until("the replay", async || store.dead_progress(&ids).await.expect("answers").applied == 1).await;
    assert_eq!(bed.effects("all").await, ["x", "after 1", "after 2", "broken"]);
    stop.cancel();
    running.await.expect("no panic").expect("stops well");
}
