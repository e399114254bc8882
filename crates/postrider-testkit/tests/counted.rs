//! What relay and consumer do is counted in the store, on every one.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postrider::broker::embedded::Embedded;
use postrider::dead::{DeadFilter, Replay, Replayed};
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::pulse::figures::{Errors, Figures, Summary, Window};
use postrider::pulse::{Pulses as _, Width};
use postrider::relay::Backoff;
use postrider::{Event, Relay, RelaySettings, Result};
use postrider_testkit::conformance::bed::{Bed, MysqlBed, PostgresBed, SqliteBed, Tx, event, name};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Everything that should happen soon happens within this, also on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// Does as the event's name says, until it is mended.
struct Moody<B> {
    is_mended: Arc<AtomicBool>,
    bed: PhantomData<fn() -> B>,
}

#[async_trait]
impl<B: Bed> Handler<Tx<B>> for Moody<B> {
    async fn handle(&self, tx: &mut Tx<B>, event: &Event) -> Result<(), HandlerError> {
        let name = name(event);
        match name.as_str() {
            "skip" => Err(HandlerError::skip()),
            "fail" if !self.is_mended.load(Ordering::SeqCst) => Err(HandlerError::retry("no")),
            "reject" if !self.is_mended.load(Ordering::SeqCst) => Err(HandlerError::reject("never")),
            name => B::write_effect(tx, "billing", name).await,
        }
    }
}

/// A relay and a consumer that run.
struct Crew {
    tasks: Vec<JoinHandle<Result<()>>>,
    stop: CancellationToken,
}

impl Crew {
    fn start<B: Bed>(bed: &B, is_mended: &Arc<AtomicBool>) -> Self {
        let store = Arc::new(bed.store().clone());
        let broker = Arc::new(Embedded::new(store.clone()));
        let settings = RelaySettings::default();
        let relay = Relay::new("default", bed.source(1), store.clone(), broker.clone(), settings);
        let backoff =
            Backoff { base: Duration::from_millis(10), max: Duration::from_millis(10), jitter: Duration::ZERO };
        let spec = ConsumerSpec { retries: 1, backoff, ..ConsumerSpec::new("billing", &["#"]) };
        let handler = Moody::<B> { is_mended: is_mended.clone(), bed: PhantomData };
        let consumer = Consumer::new(spec, broker, store.clone(), store, handler).expect("a valid consumer");
        let stop = CancellationToken::new();
        let tasks = vec![tokio::spawn(relay.run(stop.clone())), tokio::spawn(consumer.run(stop.clone()))];
        Self { tasks, stop }
    }

    async fn end(self) {
        self.stop.cancel();
        for task in self.tasks {
            task.await.expect("no panic").expect("an orderly end");
        }
    }
}

async fn until<F: Future<Output = bool>>(what: &str, is_so: impl Fn() -> F) {
    let deadline = Instant::now() + SOON;
    while !is_so().await {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn figures<B: Bed>(bed: &B) -> (Figures, Figures) {
    let (now, buckets) = bed.store().buckets(Width::Minute, Window::Hour.length(), &[]).await.expect("the buckets");
    let summary = Summary::of(Window::Hour.begins(now), now, &buckets);
    let of = |group| summary.group(group).cloned().unwrap_or_default();
    (of("relay/default"), of("consumer/billing"))
}

async fn everything_is_counted<B: Bed>(bed: &B) {
    let mut producer = bed.begin().await;
    for number in 0..20 {
        producer.append(&event(&format!("k{number}"), &format!("n{number}"))).await;
    }
    for name in ["fail", "reject", "skip"] {
        producer.append(&event(name, name)).await;
    }
    producer.commit().await;
    let is_mended = Arc::new(AtomicBool::new(false));
    let crew = Crew::start(bed, &is_mended);
    until("20 are applied and two are dead", || async {
        bed.effects("billing").await.len() == 20 && bed.dead_letters("billing").await.len() == 2
    })
    .await;
    until("both tell that they live, and what they hold", || async {
        let instances = bed.store().instances().await.expect("the instances");
        let held: Vec<_> = instances.iter().map(|i| (i.group.as_str(), i.slots.as_slice(), i.is_lost())).collect();
        held == [("consumer/billing", &[0_u32][..], false), ("relay/default", &[0][..], false)]
    })
    .await;
    crew.end().await;
    assert_eq!(bed.store().instances().await.expect("the instances"), [], "an orderly end withdraws");

    // With the last pulse of that end.
    let (relay, billing) = figures(bed).await;
    assert_eq!((relay.published, relay.publish_failed, relay.dead), (23, 0, 0));
    assert_eq!((billing.applied, billing.skipped, billing.duplicates), (20, 1, 0));
    assert_eq!((billing.failed, billing.dead), (3, 2), "two attempts of one, one of the other");
    assert_eq!(billing.error_rate, Some(3.0 / 23.0));
    let latency = billing.latency_p99_ms.expect("a latency");
    assert!(latency > 0.0 && latency < SOON.as_secs_f64() * 1e3, "{latency}");
    let (width, window, metrics) = Errors::wanted(Window::Hour);
    let (now, buckets) = bed.store().buckets(width, window, metrics).await.expect("the buckets");
    let errors = Errors::of(now, Window::Hour, &buckets);
    let types: Vec<_> = errors.by_type.iter().map(|found| (found.error_type.as_str(), found.count)).collect();
    assert_eq!(types, [("handler", 2), ("rejected", 1)]);

    is_mended.store(true, Ordering::SeqCst);
    let crew = Crew::start(bed, &is_mended);
    let replay = Replay { filter: DeadFilter::default(), rate: 100, actor: "test".to_owned() };
    let progress = watch::Sender::new(Replayed::default());
    let replayed = replay.run(bed.store(), &CancellationToken::new(), &progress).await.expect("replayed");
    assert_eq!((replayed.applied, replayed.failed), (2, 0));
    crew.end().await;
    let (_, billing) = figures(bed).await;
    assert_eq!((billing.replayed, billing.replayed_applied, billing.applied), (2, 2, 22));
    assert_eq!(bed.store().instances().await.expect("the instances"), [], "who replays is no instance");
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_counted_on_postgres() {
    everything_is_counted(&PostgresBed::new().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_counted_on_sqlite() {
    everything_is_counted(&SqliteBed::new().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_counted_on_mysql() {
    everything_is_counted(&MysqlBed::new().await).await;
}
