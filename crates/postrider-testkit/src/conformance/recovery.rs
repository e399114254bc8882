//! Past events reach one consumer once more, in order; a relay notices a restore, stands still, and goes on when told to.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use postrider::Relay;
use postrider::Route;
use postrider::audit::Audit as _;
use postrider::broker::topic::TopicFilter;
use postrider::event::Event;
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError, RemoteHandler};
use postrider::inbox::{Admission, Inbox as _};
use postrider::lease::Leases;
use postrider::outbox::OutboxStore as _;
use postrider::recovery::{Before, Evidence, Mark, Recovery as _, Republish, Republished, Witness};
use postrider::store::Store as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::bed::{Bed, Tx, event, name};
use super::consumer::real;
use super::relay::{names, settings, until};
use crate::faults::{Answer, ScriptedBroker};

/// Applies everything.
struct Apply<B>(PhantomData<fn() -> B>);

#[async_trait]
impl<B: Bed> Handler<Tx<B>> for Apply<B> {
    async fn handle(&self, tx: &mut Tx<B>, event: &Event) -> Result<(), HandlerError> {
        B::write_effect(tx, "c", &name(event)).await
    }
}

fn republish(is_again: bool) -> Republish {
    Republish {
        consumer: "c".to_owned(),
        from: DateTime::UNIX_EPOCH,
        to: Utc::now() + chrono::Duration::hours(1),
        after: 0,
        topics: TopicFilter::all(),
        key: None,
        is_again,
        rate: 1000,
        is_dry_run: false,
        actor: "ops".to_owned(),
    }
}

async fn run(bed: &impl Bed, republish: Republish) -> Republished {
    let progress = watch::Sender::new(Republished::default());
    let stop = CancellationToken::new();
    let run = republish.run(bed.store(), bed.store(), &stop, &progress);
    tokio::time::timeout(Duration::from_secs(20), run).await.expect("in time").expect("runs")
}

/// A consumer that runs gets past events in their order, each once; only with `again` those that it has applied.
pub async fn past_events_are_applied_in_order_and_once<B: Bed>(bed: &B) {
    let events: Vec<Event> = (0..30).map(|n| event(&format!("k{}", n % 3), &format!("{n:02}"))).collect();
    bed.store().enqueue(&events).await.expect("enqueued");
    let (parts, stop) = (real(bed), CancellationToken::new());
    let spec = ConsumerSpec::new("c", &["#"]);
    let leases = Arc::new(bed.store().clone());
    let consumer = Consumer::new(spec, parts.broker, parts.inbox, leases, Apply::<B>(PhantomData)).expect("valid");
    let task = tokio::spawn(consumer.run(stop.clone()));

    let dry = run(bed, Republish { is_dry_run: true, ..republish(false) }).await;
    assert_eq!((dry.found, dry.given, dry.skipped, dry.applied), (30, 30, 0, 0));
    assert!(bed.effects("c").await.is_empty());
    let one = run(bed, Republish { key: Some("k1".to_owned()), rate: 4, after: 0, ..republish(false) }).await;
    assert_eq!((one.found, one.applied, one.skipped, one.open), (10, 10, 0, 0));
    let rest = run(bed, republish(false)).await;
    assert_eq!((rest.found, rest.applied, rest.skipped, rest.failed), (30, 20, 10, 0));
    let of_key = async |key: usize, from: usize| -> Vec<String> {
        let effects = bed.effects("c").await;
        let is_of = |name: &&String| name.parse::<usize>().expect("a number") % 3 == key;
        effects[from..].iter().filter(is_of).cloned().collect()
    };
    for key in 0..3 {
        let expected: Vec<String> = (0..30).filter(|n| n % 3 == key).map(|n| format!("{n:02}")).collect();
        assert_eq!(of_key(key, 0).await, expected);
    }
    let again = run(bed, republish(true)).await;
    assert_eq!((again.found, again.applied, again.skipped), (30, 30, 0));
    assert_eq!(bed.effects("c").await.len(), 60);
    for key in 0..3 {
        let expected: Vec<String> = (0..30).filter(|n| n % 3 == key).map(|n| format!("{n:02}")).collect();
        assert_eq!(of_key(key, 30).await, expected);
    }
    let nothing = Republish { topics: TopicFilter::new(["other.#".to_owned()], []), ..republish(true) };
    assert_eq!(run(bed, nothing).await.found, 0);
    let later = Republish { from: Utc::now() + chrono::Duration::minutes(30), ..republish(true) };
    assert_eq!(run(bed, later).await.found, 0);
    stop.cancel();
    task.await.expect("no panic").expect("stops well");
    assert!(bed.store().knows_consumer("c").await.expect("read"));
    assert!(!bed.store().knows_consumer("nobody").await.expect("read"));
    let lines = bed.store().audit_list(None, 100).await.expect("read");
    assert!(
        lines.iter().all(|line| (line.actor.as_str(), line.action.as_str()) == ("ops", "republish"))
            && !lines.is_empty()
    );
}

/// Counts what it is given.
#[derive(Clone, Default)]
struct Elsewhere(Arc<Mutex<Vec<String>>>);

impl Elsewhere {
    fn given(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[async_trait]
impl RemoteHandler for Elsewhere {
    async fn deliver(&self, event: &Event) -> Result<(), HandlerError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(name(event));
        Ok(())
    }
}

/// An event without a key may come from the broker while it is held as a past one: it is given to the other side once.
pub async fn a_past_event_without_a_key_is_delivered_once<B: Bed>(bed: &B) {
    let make =
        |name: &str| Event::builder("test.created", "created").json(&name).expect("JSON").build().expect("valid");
    let (both, alone) = (make("both"), make("alone"));
    let ids = [both.id(), alone.id()];
    let given = bed.store().republish("c", &[both.clone(), alone], 2, false, "ops").await.expect("held");
    assert_eq!(given, ids);
    let line = bed.store().audit_list(None, 1).await.expect("read").remove(0);
    assert_eq!(line.detail["up_to"], 2, "where to go on");
    let parts = real(bed);
    let mut tx = parts.inbox.begin().await.expect("begun");
    assert_eq!(parts.inbox.admit(&mut tx, "c", &both).await.expect("admitted"), Admission::New);
    parts.inbox.commit(tx).await.expect("applied");
    let (handler, stop, leases) = (Elsewhere::default(), CancellationToken::new(), Arc::new(bed.store().clone()));
    let spec = ConsumerSpec::new("c", &["#"]);
    let consumer = Consumer::remote(spec, parts.broker, parts.inbox, leases, handler.clone()).expect("valid");
    let task = tokio::spawn(consumer.run(stop.clone()));
    until("leaving the store", async || bed.store().republish_progress("c", &ids).await.expect("read").open == 0).await;
    stop.cancel();
    task.await.expect("no panic").expect("stops well");
    assert_eq!(handler.given(), ["alone"]);
}

fn relay(bed: &impl Bed, broker: Arc<ScriptedBroker>, witness: &Witness) -> Relay {
    let leases: Arc<dyn Leases> = Arc::new(bed.store().clone());
    Relay::new("default", bed.source(1), leases, broker, settings()).witness(witness.clone())
}

/// What was published and is not there any more stops the relay; a person lets it go on, and nothing is passed over.
pub async fn a_relay_stands_still_when_what_it_published_is_gone(bed: &impl Bed) {
    let broker = ScriptedBroker::new(|_, _| Answer::Confirm);
    let (witness, stop) = (Witness::default(), CancellationToken::new());
    bed.store().enqueue(&[event("k", "a"), event("k", "b"), event("k", "c")]).await.expect("enqueued");
    let running = tokio::spawn(relay(bed, broker.clone(), &witness).run(stop.clone()));
    until("publishing", async || broker.arrived().len() == 3).await;
    stop.cancel();
    running.await.expect("no panic").expect("stops well");
    let mark = witness.mark().expect("it remembers");
    assert_eq!(mark.life, 0);

    // As if an older backup had been put back: the last event is gone, and another has taken its number.
    bed.sql([
        "UPDATE postrider.outbox SET event_id = gen_random_uuid(), payload = '\"new\"' WHERE id = (SELECT max(id) FROM postrider.outbox); \
         UPDATE postrider.lane SET done = '1:1:', target = NULL, last_id = 0",
        "UPDATE outbox SET event_id = '0190a000-0000-7000-8000-00000000ffff', payload = '\"new\"' \
           WHERE id = (SELECT max(id) FROM outbox); UPDATE lane SET last_id = 0",
        "UPDATE postrider_outbox SET state = 0; UPDATE postrider_outbox SET event_id = UUID(), payload = '\"new\"' \
           ORDER BY id DESC LIMIT 1",
    ])
    .await;
    let look = bed.source(1).look_back(Some(&mark)).await.expect("looks");
    let restored = look.restored.expect("noticed");
    assert_eq!((restored.evidence, restored.published.as_ref()), (Evidence::PublishedIsGone, Some(&mark)));
    assert!(restored.pending > 0 && restored.newest.is_some(), "{restored}");

    let stop = CancellationToken::new();
    let stands_still = relay(bed, broker.clone(), &witness);
    let gate = stands_still.gate();
    let running = tokio::spawn(stands_still.run(stop.clone()));
    until("standing still", async || gate.closed_because().is_some_and(|why| why.contains("was restored"))).await;
    assert_eq!(broker.arrived().len(), 3, "nothing is published");
    let begun = bed.store().begin_life(Before { id: mark.id + 1000, life: 0 }, "ops").await.expect("begun");
    assert_eq!(begun.life, 1);
    until("going on", async || names(&broker.arrived()).contains(&"new".to_owned())).await;
    bed.store().enqueue(&[event("k", "after")]).await.expect("enqueued");
    until("publishing", async || names(&broker.arrived()).contains(&"after".to_owned())).await;
    until("telling", async || gate.closed_because().is_none()).await;
    stop.cancel();
    running.await.expect("no panic").expect("stops well");
    let now = witness.mark().expect("it remembers");
    assert!(now.life == 1 && now.id > mark.id + 1000, "numbers are not drawn again: {now:?}");
    assert!(bed.source(1).look_back(Some(&now)).await.expect("looks").restored.is_none());
    assert!(bed.source(1).look_back(Some(&mark)).await.expect("looks").restored.is_none(), "an earlier life is over");
    let line = bed.store().audit_list(None, 1).await.expect("read").remove(0);
    assert_eq!((line.actor.as_str(), line.action.as_str()), ("ops", "recover"));
}

/// Retention takes events away, also from the middle; that is no restore. A number that was never drawn is one, however much
/// was written since.
pub async fn retention_is_no_restore(bed: &impl Bed) {
    let source = bed.store().source(&Route::all("default"), 1);
    let is_restored = async |mark: &Mark| {
        source.look_back(Some(mark)).await.expect("looks").restored.is_some_and(|found| {
            assert_eq!(found.evidence, Evidence::PublishedIsGone);
            true
        })
    };
    // Its time says nothing: that of an event is the producer's.
    let mark = Mark { life: 0, id: 1, event_id: uuid::Uuid::now_v7(), at: DateTime::UNIX_EPOCH };
    assert!(is_restored(&mark).await, "nothing was ever written here");
    let events: Vec<Event> = (0..1500).map(|n| event("k", &n.to_string())).collect();
    bed.store().enqueue(&events).await.expect("enqueued");
    let rows = bed.store().past(DateTime::UNIX_EPOCH, Utc::now() + chrono::Duration::hours(1), 0, 2000).await;
    let last = rows.expect("read").last().expect("some").id;
    assert!(is_restored(&Mark { id: last + 1, ..mark.clone() }).await, "a number that was not drawn");
    assert!(is_restored(&Mark { id: last + 100_000, ..mark.clone() }).await, "far ahead");
    assert!(is_restored(&Mark { id: last, ..mark.clone() }).await, "another event has the number");
    let own = Mark { id: last, event_id: events[1499].id(), ..mark.clone() };
    assert!(!is_restored(&own).await);
    bed.sql([
        "DELETE FROM postrider.outbox WHERE id BETWEEN 800 AND 1200",
        "DELETE FROM outbox WHERE id BETWEEN 800 AND 1200",
        "DELETE FROM postrider_outbox WHERE id BETWEEN 800 AND 1200",
    ])
    .await;
    assert!(!is_restored(&Mark { id: 1000, ..mark }).await, "retention took the middle");
    bed.sql(["DELETE FROM postrider.outbox", "DELETE FROM outbox", "DELETE FROM postrider_outbox"]).await;
    assert!(!is_restored(&own).await, "retention took all");
    assert!(is_restored(&Mark { life: 3, ..own }).await, "a life that is not here");
}

/// A life's number is never given twice, though a restore takes the database's own count back; the lineage stays.
pub async fn a_life_has_a_number_of_its_own(bed: &impl Bed) {
    let lineage = bed.store().lineage().await.expect("read");
    assert!(lineage.len() >= 32, "{lineage}");
    assert_eq!(bed.store().begin_life(Before::default(), "ops").await.expect("begun").life, 1);
    assert_eq!(bed.store().begin_life(Before { id: 40, life: 7 }, "ops").await.expect("begun").life, 8);
    assert_eq!(bed.store().begin_life(Before { id: 0, life: 2 }, "ops").await.expect("begun").life, 9);
    bed.store().enqueue(&[event("k", "a")]).await.expect("enqueued");
    let rows = bed.store().past(DateTime::UNIX_EPOCH, Utc::now() + chrono::Duration::hours(1), 0, 10).await;
    assert_eq!(rows.expect("read")[0].id, 41, "numbers up to the last that was published are not drawn again");
    assert_eq!(bed.store().lineage().await.expect("read"), lineage);
}
