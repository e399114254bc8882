//! What every inbox and the consumer loop keep: one effect per event, in order within a key, whatever fails.
//!
//! Each check exists twice: on the real parts of a bed, and `…_with` parts that a planted bug or a fault has replaced.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::event::Event;
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::inbox::Inbox;
use postrider::relay::Backoff;
use tokio_util::sync::CancellationToken;

use super::bed::{Bed, Tx, event, name};

/// A handler that writes its effect and then fails a given number of times.
struct Flaky<B> {
    failures_left: AtomicU32,
    panics: bool,
    /// Whether an event of this name always fails.
    poison: bool,
    bed: PhantomData<fn() -> B>,
}

impl<B> Flaky<B> {
    fn failing(times: u32) -> Self {
        Self { failures_left: AtomicU32::new(times), panics: false, poison: false, bed: PhantomData }
    }
}

#[async_trait]
impl<B: Bed> Handler<Tx<B>> for Flaky<B> {
    async fn handle(&self, tx: &mut Tx<B>, event: &Event) -> Result<(), HandlerError> {
        // Before the failure: the effect must be rolled back with it.
        B::write_effect(tx, "c", &name(event)).await?;
        let left = self.failures_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if self.poison && name(event) == "poison" {
            return Err("poison".into());
        }
        if left.is_ok() {
            assert!(!self.panics, "a handler that panics");
            return Err("not yet".into());
        }
        Ok(())
    }
}

/// The parts that a planted bug or a fault may replace.
pub struct Parts<I> {
    /// The inbox under test.
    pub inbox: Arc<I>,
    /// The broker under test.
    pub broker: Arc<dyn Broker>,
}

impl<I> Clone for Parts<I> {
    fn clone(&self) -> Self {
        Self { inbox: self.inbox.clone(), broker: self.broker.clone() }
    }
}

/// The real parts of a bed, on the embedded broker.
pub fn real<B: Bed>(bed: &B) -> Parts<B::Store> {
    let store = Arc::new(bed.store().clone());
    Parts { inbox: store.clone(), broker: Arc::new(Embedded::new(store)) }
}

/// How long effects may take.
const APPLIED: Duration = Duration::from_secs(10);
/// How long to look for what must not happen.
const NOTHING_MORE: Duration = Duration::from_millis(150);

/// Runs a consumer until `count` effects are there (or for `wait` at most), then stops it well.
async fn run_until<B, I>(bed: &B, parts: &Parts<I>, handler: Flaky<B>, count: usize, wait: Duration)
where
    B: Bed,
    I: Inbox<Tx = Tx<B>>,
{
    let stop = CancellationToken::new();
    let backoff = Backoff { base: Duration::from_millis(5), max: Duration::from_millis(20), jitter: Duration::ZERO };
    let spec = ConsumerSpec::new("c", &["#"]);
    let leases = Arc::new(bed.store().clone());
    let consumer =
        Consumer::new(spec, parts.broker.clone(), parts.inbox.clone(), leases, handler).expect("a valid consumer");
    let task = tokio::spawn(consumer.backoff(backoff).run(stop.clone()));
    let deadline = tokio::time::Instant::now() + wait;
    while bed.effects("c").await.len() < count && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(NOTHING_MORE).await;
    stop.cancel();
    task.await.expect("no panic").expect("the consumer stops well");
}

async fn publish(broker: &Arc<dyn Broker>, events: &[Event]) {
    for event in events {
        let results = broker.publish(&[Arc::new(event.clone())]).await;
        assert!(results.into_iter().all(|result| result.is_ok()), "the broker confirms");
    }
}

/// A message that comes twice has one effect.
pub async fn a_duplicate_has_one_effect(bed: &impl Bed) {
    let parts = real(bed);
    let (a, b) = (event("k", "a"), event("k", "b"));
    publish(&parts.broker, &[a.clone(), b.clone(), a, b.clone(), b]).await;
    run_until(bed, &parts, Flaky::failing(0), 2, APPLIED).await;
    assert_eq!(bed.effects("c").await, ["a", "b"]);
}

/// An event whose handler fails is rolled back and given again; what follows in its key waits.
pub async fn a_failing_handler_is_given_the_event_again(bed: &impl Bed) {
    failing_handler_with(bed, real(bed)).await;
}

/// The same with other parts.
pub async fn failing_handler_with<B: Bed, I: Inbox<Tx = Tx<B>>>(bed: &B, parts: Parts<I>) {
    publish(&parts.broker, &[event("k", "a"), event("k", "b")]).await;
    run_until(bed, &parts, Flaky::failing(3), 2, APPLIED / 4).await;
    assert_eq!(bed.effects("c").await, ["a", "b"], "one effect each, in order");
}

/// A handler that panics is one that failed.
pub async fn a_panicking_handler_is_given_the_event_again(bed: &impl Bed) {
    let parts = real(bed);
    publish(&parts.broker, &[event("k", "a")]).await;
    let handler = Flaky { panics: true, ..Flaky::failing(1) };
    run_until(bed, &parts, handler, 1, APPLIED).await;
    assert_eq!(bed.effects("c").await, ["a"]);
}

/// An instance that ends before the commit leaves the event to the next one.
pub async fn an_unapplied_event_survives_the_instance(bed: &impl Bed) {
    surviving_with(bed, real(bed)).await;
}

/// The same with other parts.
pub async fn surviving_with<B: Bed, I: Inbox<Tx = Tx<B>>>(bed: &B, parts: Parts<I>) {
    publish(&parts.broker, &[event("k", "a"), event("k", "b")]).await;
    run_until(bed, &parts, Flaky::failing(u32::MAX), 1, Duration::from_millis(400)).await;
    assert!(bed.effects("c").await.is_empty(), "a failed effect stayed");
    run_until(bed, &parts, Flaky::failing(0), 2, APPLIED / 4).await;
    assert_eq!(bed.effects("c").await, ["a", "b"], "the event was lost with the instance");
}

/// A commit that fails is no commit: the event is given again.
pub async fn a_failed_commit_is_tried_again(bed: &impl Bed) {
    let Parts { inbox, broker } = real(bed);
    let inbox = Arc::new(crate::faults::FailingCommits::new(inbox, 2));
    let parts = Parts { inbox, broker };
    publish(&parts.broker, &[event("k", "a"), event("k", "b")]).await;
    run_until(bed, &parts, Flaky::failing(0), 2, APPLIED).await;
    assert_eq!(bed.effects("c").await, ["a", "b"]);
}

/// Many keys at full concurrency: each key in order, each event once.
pub async fn each_key_keeps_its_order_at_any_concurrency(bed: &impl Bed) {
    let parts = real(bed);
    let events: Vec<Event> =
        (0..120).map(|n| event(&format!("{}", n % 12), &format!("{:02}/{n:03}", n % 12))).collect();
    let batch: Vec<Arc<Event>> = events.into_iter().map(Arc::new).collect();
    assert!(parts.broker.publish(&batch).await.iter().all(Result::is_ok));
    run_until(bed, &parts, Flaky::failing(10), 120, 2 * APPLIED).await;
    let mut effects = bed.effects("c").await;
    assert_eq!(effects.len(), 120);
    effects.sort_by_key(|name| name[..2].to_owned());
    assert!(effects.is_sorted(), "a key lost its order");
}

/// An event that fails for ever does not keep the consumer from subscribing again: other keys flow on.
pub async fn a_failing_event_does_not_outlive_its_subscription(bed: &impl Bed) {
    let Parts { inbox, broker } = real(bed);
    let parts = Parts { inbox, broker: Arc::new(crate::faults::EndingSubscriptions::new(broker, 3)) };
    publish(&parts.broker, &[event("poison", "poison"), event("k", "a"), event("k", "b")]).await;
    run_until(bed, &parts, Flaky { poison: true, ..Flaky::failing(0) }, 2, APPLIED).await;
    assert_eq!(bed.effects("c").await, ["a", "b"]);
}
