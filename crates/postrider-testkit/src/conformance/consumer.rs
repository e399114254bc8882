//! What every inbox and the consumer loop keep: one effect per event, in order within a key, whatever fails.
//!
//! Each check exists twice: on the real parts of a bed, and `…_with` parts that a planted bug or a fault has replaced.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::dead::{DeadFilter, DeadLetters, Taken};
use postrider::event::Event;
use postrider::handler::{BatchHandler, Consumer, ConsumerSpec, Handler, HandlerError, RemoteHandler};
use postrider::inbox::{Inbox, Part};
use postrider::lease::LeaseTimes;
use postrider::relay::Backoff;
use postrider::store::Store;
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
            return Err(HandlerError::retry("poison"));
        }
        if left.is_ok() {
            assert!(!self.panics, "a handler that panics");
            return Err(HandlerError::retry("not yet"));
        }
        Ok(())
    }
}

/// A handler that never returns.
struct Stuck;

#[async_trait]
impl<T: Send> Handler<T> for Stuck {
    async fn handle(&self, _tx: &mut T, _event: &Event) -> Result<(), HandlerError> {
        std::future::pending().await
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
    on(bed.store().clone())
}

fn on<S: Store + Inbox>(store: S) -> Parts<S> {
    let store = Arc::new(store);
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
    let spec = ConsumerSpec { backoff, retries: 1000, ..ConsumerSpec::new("c", &["#"]) };
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
    surviving_with(bed, |broker| broker).await;
}

/// The same with another broker.
pub async fn surviving_with<B: Bed>(bed: &B, broker: impl Fn(Arc<dyn Broker>) -> Arc<dyn Broker>) {
    let Parts { inbox, broker: embedded } = real(bed);
    let parts = Parts { inbox, broker: broker(embedded) };
    publish(&parts.broker, &[event("k", "a"), event("k", "b")]).await;
    // Handlers that do not return, until the instance ends without a word, as it does under kill -9.
    let spec = ConsumerSpec::new("c", &["#"]);
    run_and_kill(bed, spec, broker, Duration::from_secs(1), Duration::from_millis(600)).await;
    assert!(bed.effects("c").await.is_empty(), "an effect that was not committed stayed");
    // The lease of the dead one must end, and the next instance call in.
    run_until(bed, &parts, Flaky::failing(0), 2, APPLIED).await;
    assert_eq!(bed.effects("c").await, ["a", "b"], "the event was lost with the instance");
}

/// Runs an instance whose handlers never return, with connections of its own, and ends it after `lived`.
async fn run_and_kill<B: Bed>(
    bed: &B,
    spec: ConsumerSpec,
    broker: impl Fn(Arc<dyn Broker>) -> Arc<dyn Broker>,
    ttl: Duration,
    lived: Duration,
) {
    let instance =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let store = instance.spawn(bed.open_again()).await.expect("the store opens");
    let parts = on(store.clone());
    let consumer = Consumer::new(spec, broker(parts.broker), parts.inbox, Arc::new(store), Stuck).expect("valid");
    instance.spawn(consumer.lease_times(LeaseTimes { ttl }).run(CancellationToken::new()));
    tokio::time::sleep(lived).await;
    instance.shutdown_background();
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

/// A handler that answers as an event's name says, and otherwise applies it.
struct Obedient<B>(PhantomData<fn() -> B>);

#[async_trait]
impl<B: Bed> Handler<Tx<B>> for Obedient<B> {
    async fn handle(&self, tx: &mut Tx<B>, event: &Event) -> Result<(), HandlerError> {
        B::write_effect(tx, "c", &name(event)).await?;
        match name(event).as_str() {
            "fail" => Err(HandlerError::retry("no")),
            "reject" => Err(HandlerError::reject("never")),
            // What no database can hold in a text.
            "nul" => Err(HandlerError::reject("a\0b")),
            "skip" => Err(HandlerError::skip()),
            "hang" => std::future::pending().await,
            _ => Ok(()),
        }
    }
}

/// Runs an obedient consumer until `count` effects and `dead` dead letters are there.
async fn run_obedient<B: Bed>(bed: &B, spec: ConsumerSpec, count: usize, dead: usize) {
    let Parts { inbox, broker } = real(bed);
    let leases = Arc::new(bed.store().clone());
    let consumer = Consumer::new(spec, broker, inbox, leases, Obedient::<B>(PhantomData)).expect("a valid consumer");
    run_to(bed, consumer, count, dead).await;
}

/// Runs a consumer until `count` effects and `dead` dead letters are there.
async fn run_to<B: Bed, I: Inbox>(bed: &B, consumer: Consumer<I>, count: usize, dead: usize) {
    let stop = CancellationToken::new();
    let task = tokio::spawn(consumer.run(stop.clone()));
    let deadline = tokio::time::Instant::now() + APPLIED;
    while bed.effects("c").await.len() < count || bed.dead_letters("c").await.len() < dead {
        assert!(
            tokio::time::Instant::now() < deadline,
            "{:?} {:?}",
            bed.effects("c").await,
            bed.dead_letters("c").await
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(NOTHING_MORE).await;
    stop.cancel();
    task.await.expect("no panic").expect("the consumer stops well");
}

fn quick() -> ConsumerSpec {
    let backoff = Backoff { base: Duration::from_millis(5), max: Duration::from_millis(20), jitter: Duration::ZERO };
    ConsumerSpec { backoff, handler_timeout: Duration::from_millis(300), ..ConsumerSpec::new("c", &["#"]) }
}

/// An event that fails at every attempt becomes a dead letter with its attempts; its key's later events come after it,
/// in order, and other keys do not wait.
pub async fn spent_attempts_end_among_the_dead_letters(bed: &impl Bed) {
    let parts = real(bed);
    publish(&parts.broker, &[event("k", "fail"), event("k", "a"), event("other", "x"), event("k", "b")]).await;
    run_obedient(bed, quick(), 3, 1).await;
    assert_eq!(bed.effects("c").await, ["x", "a", "b"], "other keys first, the same key after it, in order");
    assert_eq!(bed.dead_letters("c").await, [("fail".to_owned(), "handler".to_owned(), 4)]);
}

/// What a handler rejects is given up at once.
pub async fn a_rejected_event_is_a_dead_letter_at_once(bed: &impl Bed) {
    let parts = real(bed);
    publish(&parts.broker, &[event("k", "reject"), event("k", "a"), event("k", "nul"), event("k", "b")]).await;
    run_obedient(bed, quick(), 2, 2).await;
    assert_eq!(bed.effects("c").await, ["a", "b"]);
    let rejected = |name: &str| (name.to_owned(), "rejected".to_owned(), 1);
    assert_eq!(bed.dead_letters("c").await, [rejected("reject"), rejected("nul")]);
}

/// A handler that does not return is stopped, rolled back, and blocks no neighbour.
pub async fn a_handler_that_never_returns_is_stopped(bed: &impl Bed) {
    let parts = real(bed);
    publish(&parts.broker, &[event("k", "hang"), event("other", "x"), event("k", "a")]).await;
    run_obedient(bed, ConsumerSpec { retries: 1, ..quick() }, 2, 1).await;
    assert_eq!(bed.effects("c").await, ["x", "a"]);
    assert_eq!(bed.dead_letters("c").await, [("hang".to_owned(), "timeout".to_owned(), 2)]);
}

/// An event that nobody handles is done with, and what the handler did for it is kept.
pub async fn a_skipped_event_is_done_with(bed: &impl Bed) {
    let parts = real(bed);
    publish(&parts.broker, &[event("k", "skip"), event("k", "a")]).await;
    run_obedient(bed, quick(), 2, 0).await;
    assert_eq!(bed.effects("c").await, ["skip", "a"]);
    assert!(bed.dead_letters("c").await.is_empty());
}

/// Another event under an id that was applied is not taken for a repetition.
pub async fn an_id_that_comes_with_other_content_is_a_dead_letter(bed: &impl Bed) {
    let parts = real(bed);
    let first = event("k", "a");
    let forged = Event::builder(first.topic(), first.kind()).id(first.id()).key("k").json(&"b").expect("json");
    let forged = forged.build().expect("an event");
    publish(&parts.broker, &[first.clone(), forged.clone(), first, forged]).await;
    run_obedient(bed, quick(), 1, 1).await;
    assert_eq!(bed.effects("c").await, ["a"]);
    let dead = bed.dead_letters("c").await;
    assert_eq!((dead.len(), dead[0].1.as_str()), (1, "forged"));
}

/// A message that ends the process at every attempt becomes a dead letter after its attempts, and takes no other with it.
pub async fn a_message_that_ends_the_process_becomes_a_dead_letter(bed: &impl Bed) {
    let parts = real(bed);
    publish(&parts.broker, &[event("k", "hang"), event("k", "a"), event("other", "b")]).await;
    let spec = ConsumerSpec { retries: 2, handler_timeout: Duration::from_secs(60), ..quick() };
    for _ in 0..3 {
        let (ttl, lived) = (Duration::from_millis(600), Duration::from_millis(1800));
        run_and_kill(bed, spec.clone(), |broker| broker, ttl, lived).await;
    }
    run_obedient(bed, ConsumerSpec { retries: 2, ..quick() }, 2, 1).await;
    let mut effects = bed.effects("c").await;
    effects.sort();
    assert_eq!(effects, ["a", "b"]);
    assert_eq!(bed.dead_letters("c").await[0].0, "hang");
}

/// A replayed dead letter is applied once, by the consumer that failed, oldest of its key first; one that fails again is
/// a dead letter again. What is recalled is not applied, and two operators do not take the same one.
pub async fn a_replayed_dead_letter_is_applied_once(bed: &impl Bed) {
    let parts = real(bed);
    let names = ["1", "2", "3", "4"];
    let events: Vec<Event> = names.iter().map(|name| event("k", name)).collect();
    publish(&parts.broker, &events).await;
    let strict = ConsumerSpec { retries: 0, ..quick() };
    run_until_dead(bed, strict, names.len()).await;
    assert!(bed.effects("c").await.is_empty());

    let (store, all) = (bed.store(), DeadFilter::default());
    let first = store.dead_replay(&all, 2, "a").await.expect("replayed");
    let second = store.dead_replay(&all, 10, "b").await.expect("replayed");
    assert_eq!((first.len(), second.len()), (2, 2), "each is taken once");
    assert!(store.dead_replay(&all, 10, "b").await.expect("answers").is_empty());
    let ids = |taken: &[Taken]| taken.iter().map(|taken| taken.id).collect::<Vec<_>>();
    let (first, second) = (ids(&first), ids(&second));
    assert_eq!(store.dead_recall(&second, "b").await.expect("recalled"), 2);
    assert_eq!(store.dead_progress(&first).await.expect("answers").open, 2);
    let due = parts.inbox.retries().due(Part { consumer: "c", slot: 0, slots: 1 }, 10).await.expect("answers");
    assert!(due[0].origin.is_replayed, "how old it is by now is nobody's latency");

    run_obedient(bed, quick(), 2, 2).await;
    assert_eq!(bed.effects("c").await, ["1", "2"]);
    let progress = store.dead_progress(&first).await.expect("answers");
    assert_eq!((progress.applied, progress.failed, progress.open), (2, 0, 0));

    // The rest; a repetition of all of them changes nothing more.
    let rest = ids(&store.dead_replay(&all, 10, "a").await.expect("replayed"));
    publish(&parts.broker, &events).await;
    run_obedient(bed, quick(), 4, 0).await;
    assert_eq!(bed.effects("c").await, names);
    assert_eq!(store.dead_progress(&rest).await.expect("answers").applied, 2);
    assert!(store.dead_list(&all, 0, 10).await.expect("listed").is_empty());
}

/// A discarded dead letter is neither listed nor replayed.
pub async fn a_discarded_dead_letter_stays_where_it_is(bed: &impl Bed) {
    let parts = real(bed);
    publish(&parts.broker, &[event("k", "reject"), event("l", "reject")]).await;
    run_obedient(bed, quick(), 0, 2).await;
    let store = bed.store();
    let of_key = DeadFilter { key: Some("k".to_owned()), ..DeadFilter::default() };
    assert_eq!(store.dead_discard(&of_key, "a test", "a").await.expect("discarded"), 1);
    let left = store.dead_list(&DeadFilter::default(), 0, 10).await.expect("listed");
    assert_eq!(left.iter().map(|letter| letter.key.as_deref()).collect::<Vec<_>>(), [Some("l")]);
    assert_eq!(store.dead_replay(&DeadFilter::default(), 10, "a").await.expect("replayed").len(), 1);
    let detail = store.dead_show(left[0].id).await.expect("answers").expect("is there");
    assert_eq!((detail.view.error_type.as_str(), detail.view.error.as_str()), ("rejected", "never"));
    assert_eq!(detail.payload_bytes, 8);
    assert_eq!(store.dead_stats().await.expect("counted").iter().map(|count| count.count).sum::<i64>(), 2);
}

/// Rejects one event; fails at the first attempt at another, and takes its time for the second.
struct Slow<B> {
    has_failed: AtomicBool,
    is_trying: Arc<tokio::sync::Notify>,
    bed: PhantomData<fn() -> B>,
}

#[async_trait]
impl<B: Bed> Handler<Tx<B>> for Slow<B> {
    async fn handle(&self, tx: &mut Tx<B>, event: &Event) -> Result<(), HandlerError> {
        match name(event).as_str() {
            "reject" => return Err(HandlerError::reject("never")),
            "slow" if !self.has_failed.swap(true, Ordering::SeqCst) => return Err(HandlerError::retry("once")),
            "slow" => {
                self.is_trying.notify_one();
                tokio::time::sleep(Duration::from_millis(800)).await;
            }
            _ => {}
        }
        B::write_effect(tx, "c", &name(event)).await
    }
}

/// A dead letter that is replayed while another message of its key is being tried again does not wait for ever for that one.
pub async fn a_replay_beside_a_running_retry_is_decided<B: Bed>(bed: &B) {
    let parts = real(bed);
    publish(&parts.broker, &[event("k", "reject"), event("k", "slow"), event("k", "after")]).await;
    let is_trying = Arc::new(tokio::sync::Notify::new());
    let handler = Slow::<B> { has_failed: AtomicBool::new(false), is_trying: is_trying.clone(), bed: PhantomData };
    let spec = ConsumerSpec { handler_timeout: APPLIED, ..quick() };
    let leases = Arc::new(bed.store().clone());
    let consumer = Consumer::new(spec, parts.broker, parts.inbox, leases, handler).expect("a valid consumer");
    let stop = CancellationToken::new();
    let task = tokio::spawn(consumer.run(stop.clone()));
    tokio::time::timeout(APPLIED, is_trying.notified()).await.expect("the second attempt comes");
    let store = bed.store();
    let taken = store.dead_replay(&DeadFilter::default(), 10, "test").await.expect("replayed");
    let ids: Vec<i64> = taken.iter().map(|taken| taken.id).collect();
    assert_eq!(ids.len(), 1);
    let deadline = tokio::time::Instant::now() + 2 * APPLIED;
    while store.dead_progress(&ids).await.expect("answers").open > 0 || bed.effects("c").await.len() < 2 {
        assert!(tokio::time::Instant::now() < deadline, "{:?}", bed.effects("c").await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(store.dead_progress(&ids).await.expect("answers").failed, 1);
    assert_eq!(bed.effects("c").await, ["slow", "after"]);
    stop.cancel();
    task.await.expect("no panic").expect("the consumer stops well");
}

/// Counts how many events each call got, and answers as their names say.
struct Together<B> {
    sizes: Arc<Mutex<Vec<usize>>>,
    bed: PhantomData<fn() -> B>,
}

#[async_trait]
impl<B: Bed> BatchHandler<Tx<B>> for Together<B> {
    async fn handle_all(&self, tx: &mut Tx<B>, events: &[Arc<Event>]) -> Result<(), HandlerError> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner).push(events.len());
        for event in events {
            Obedient::<B>(PhantomData).handle(tx, event).await?;
        }
        Ok(())
    }
}

/// Events are applied together, each once and in the order of its key; one that fails takes no other with it.
pub async fn a_batch_is_applied_together_and_fails_alone<B: Bed>(bed: &B) {
    let parts = real(bed);
    let first = event("0", "a");
    let forged = Event::builder(first.topic(), first.kind()).id(first.id()).key("0").json(&"forged").expect("json");
    let mut events = vec![Arc::new(first.clone())];
    events.extend((0..90).map(|n| Arc::new(event(&format!("{}", n % 9), &format!("{}/{n:02}", n % 9)))));
    events.push(Arc::new(first));
    events.push(Arc::new(forged.build().expect("an event")));
    events.push(Arc::new(event("3", "fail")));
    events.extend((0..90).map(|n| Arc::new(event(&format!("{}", n % 9), &format!("{}/x{n:02}", n % 9)))));
    events.push(Arc::new(event("4", "skip")));
    assert!(parts.broker.publish(&events).await.iter().all(Result::is_ok));

    let sizes = Arc::new(Mutex::new(Vec::new()));
    let handler = Together::<B> { sizes: sizes.clone(), bed: PhantomData };
    let spec = ConsumerSpec { concurrency: 2, batch: 50, retries: 1, ..quick() };
    let leases = Arc::new(bed.store().clone());
    let consumer = Consumer::batched(spec, parts.broker, parts.inbox, leases, handler).expect("a valid consumer");
    run_to(bed, consumer, 182, 2).await;

    let mut effects = bed.effects("c").await;
    let applied = effects.len();
    effects.retain(|name| !matches!(name.as_str(), "a" | "skip"));
    assert_eq!((applied, effects.len()), (182, 180), "each once");
    effects.sort_by_key(|name| name[..1].to_owned());
    assert!(effects.is_sorted(), "a key lost its order");
    let mut dead: Vec<String> = bed.dead_letters("c").await.into_iter().map(|(name, ..)| name).collect();
    dead.sort();
    assert_eq!(dead, ["fail", "forged"]);
    let sizes = sizes.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(sizes.iter().any(|size| *size > 10), "{sizes:?}");
    assert!(sizes.iter().all(|size| *size <= 50), "{sizes:?}");
}

/// Counts deliveries by name, and answers as the name says.
#[derive(Clone, Default)]
struct Elsewhere {
    delivered: Arc<Mutex<Vec<String>>>,
    /// So often the place is away before it answers.
    away: Arc<AtomicU32>,
}

#[async_trait]
impl RemoteHandler for Elsewhere {
    async fn deliver(&self, event: &Event) -> Result<(), HandlerError> {
        if self.away.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err(HandlerError::away(postrider::Error::new(postrider::Kind::Unavailable, "the place is away")));
        }
        self.delivered.lock().unwrap_or_else(PoisonError::into_inner).push(name(event));
        match name(event).as_str() {
            "fail" => Err(HandlerError::retry("no")),
            "reject" => Err(HandlerError::reject("never")),
            "skip" => Err(HandlerError::skip()),
            "hang" => std::future::pending().await,
            _ => Ok(()),
        }
    }
}

/// What is applied elsewhere is given once, in the order of its key, and again only after a failure. While the place is
/// away, no attempt is spent.
pub async fn a_remote_effect_is_given_once<B: Bed>(bed: &B) {
    let parts = real(bed);
    let (a, skip) = (event("k", "a"), event("s", "skip"));
    let forged = Event::builder(a.topic(), a.kind()).id(a.id()).key("k").json(&"forged").expect("json");
    let events = [
        a.clone(),
        event("f", "fail"),
        event("f", "after"),
        event("h", "hang"),
        event("r", "reject"),
        skip.clone(),
        event("k", "b"),
        a,
        skip,
        forged.build().expect("an event"),
    ];
    publish(&parts.broker, &events).await;
    let handler = Elsewhere { away: Arc::new(AtomicU32::new(20)), ..Elsewhere::default() };
    let spec = ConsumerSpec { retries: 2, ..quick() };
    let leases = Arc::new(bed.store().clone());
    let consumer =
        Consumer::remote(spec, parts.broker, parts.inbox, leases, handler.clone()).expect("a valid consumer");
    let backoff = Backoff { base: Duration::from_millis(5), max: Duration::from_millis(20), jitter: Duration::ZERO };
    run_to(bed, consumer.backoff(backoff), 0, 4).await;

    let dead = bed.dead_letters("c").await;
    let attempts =
        |name: &str| dead.iter().find(|(dead, ..)| dead == name).map(|(_, error, tries)| (error.as_str(), *tries));
    assert_eq!(attempts("fail"), Some(("handler", 3)));
    assert_eq!(attempts("hang"), Some(("timeout", 3)));
    assert_eq!(attempts("reject"), Some(("rejected", 1)));
    assert_eq!(attempts("forged"), Some(("forged", 1)));
    let delivered = handler.delivered.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let count = |name: &str| delivered.iter().filter(|given| *given == name).count();
    assert_eq!((count("a"), count("b"), count("skip"), count("after")), (1, 1, 1, 1), "{delivered:?}");
    assert_eq!((count("fail"), count("reject"), count("forged")), (3, 1, 0), "{delivered:?}");
    let place = |name: &str| delivered.iter().position(|given| given == name);
    assert!(place("a") < place("b") && place("fail") < place("after"), "{delivered:?}");
}

/// Runs a consumer whose handler always fails until there are that many dead letters.
async fn run_until_dead<B: Bed>(bed: &B, spec: ConsumerSpec, count: usize) {
    let Parts { inbox, broker } = real(bed);
    let leases = Arc::new(bed.store().clone());
    let handler = Flaky::<B>::failing(u32::MAX);
    let consumer = Consumer::new(spec, broker, inbox, leases, handler).expect("a valid consumer");
    let stop = CancellationToken::new();
    let task = tokio::spawn(consumer.run(stop.clone()));
    let deadline = tokio::time::Instant::now() + APPLIED;
    while bed.dead_letters("c").await.len() < count {
        assert!(tokio::time::Instant::now() < deadline, "{:?}", bed.dead_letters("c").await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.cancel();
    task.await.expect("no panic").expect("the consumer stops well");
}
