//! What the relay gives up is a dead letter: it is seen, replayed and discarded at the desk, beside a relay that runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postrider::Kind;
use postrider::Route;
use postrider::dead::{DeadFilter, DeadLetters, DeadView, Replay, Replayed, Stage, Stopped};
use postrider::event::Event;
use postrider::lease::Leases as _;
use postrider::source::{Failure, Park, ParkedState, Settlement};
use postrider::upkeep::{Retention, Upkeep};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::bed::{Bed, event};
use super::relay::{Running, commit, names, settings, until};
use crate::faults::{Answer, ScriptedBroker};

/// A broker that has no queue for `poison` until it is mended.
fn broker() -> (Arc<ScriptedBroker>, Arc<AtomicBool>) {
    let is_mended = Arc::new(AtomicBool::new(false));
    let flag = is_mended.clone();
    let broker = ScriptedBroker::new(move |event, _| match super::bed::name(event).as_str() {
        "poison" if !flag.load(Ordering::SeqCst) => Answer::Refuse(Kind::Unroutable),
        _ => Answer::Confirm,
    });
    (broker, is_mended)
}

fn keyless(name: &str) -> Event {
    let builder = Event::builder("test.created", "created").tenant("t").json(&name).expect("a string is JSON");
    builder.build().expect("the event is valid")
}

async fn letters(bed: &impl Bed) -> Vec<DeadView> {
    let relay = DeadFilter { stage: Some(Stage::Relay), ..DeadFilter::default() };
    bed.store().dead_list(&relay, 0, 100).await.expect("listed")
}

async fn parked(bed: &impl Bed) -> (u64, u64, u64) {
    let backlog = bed.store().backlog(&Route::all("default")).await.expect("answers");
    (backlog.retrying, backlog.waiting, backlog.failed)
}

async fn replay(bed: &impl Bed) -> Replayed {
    let replay = Replay { filter: DeadFilter::default(), rate: 100, actor: "test".to_owned() };
    let progress = watch::Sender::new(Replayed::default());
    replay.run(bed.store(), &CancellationToken::new(), &progress).await.expect("replayed")
}

/// Runs a relay until `count` events have failed.
async fn fail(bed: &impl Bed, events: &[Event], count: usize) -> (Arc<ScriptedBroker>, Arc<AtomicBool>, Running) {
    let (broker, is_mended) = broker();
    let relay = Running::start(bed, broker.clone(), settings());
    commit(bed, events).await;
    until("failing", async || letters(bed).await.len() == count).await;
    (broker, is_mended, relay)
}

/// An event whose attempts are spent is a dead letter, with everything that helps, for as long as it is parked.
pub async fn a_failed_event_is_a_dead_letter_of_the_relay(bed: &impl Bed) {
    let poison = event("k", "poison");
    let (_, _, relay) = fail(bed, &[poison.clone(), event("k", "behind"), keyless("poison")], 2).await;
    relay.stop().await;
    let letter = letters(bed).await.into_iter().find(|letter| letter.key.is_some()).expect("the one with a key");
    assert_eq!((letter.consumer.as_str(), letter.message_id), ("relay/default", poison.id()));
    assert_eq!((letter.error_type.as_str(), letter.attempts, letter.state.as_str()), ("unroutable", 3, "dead"));
    let detail = bed.store().dead_show(letter.id).await.expect("answers").expect("is there");
    assert_eq!(detail.origin["destination"], "default");
    assert_eq!(detail.envelope.expect("an envelope")["id"], poison.id().to_string());
    assert_eq!(detail.payload_bytes, 8);
    assert_eq!(bed.store().dead_payload(letter.id, "test").await.expect("answers"), Some(br#""poison""#.to_vec()));
    assert_eq!(bed.store().dead_stats().await.expect("counted")[0].stage, Stage::Relay);

    let retention = Retention { dead: Duration::ZERO, ..Retention::default() };
    bed.store().maintain(&retention).await.expect("upkeep");
    assert_eq!(letters(bed).await.len(), 2, "nobody has decided yet");
    assert_eq!(parked(bed).await, (0, 1, 2));
    assert_eq!(bed.outbox_status(&poison).await, "failed");
}

/// A settlement is idempotent, its dead letters too.
pub async fn a_settlement_that_comes_twice_adds_no_attempts(bed: &impl Bed) {
    commit(bed, &[event("k", "a")]).await;
    let (source, lease) = (bed.source(1), bed.lease(0).await);
    let opened = source.open(&lease).await.expect("opened");
    let page = source.read(&lease, &opened.position, 10).await.expect("read");
    let failure = Some(Failure { kind: "too_large".to_owned(), message: "too large".to_owned() });
    let park = Park { id: page.rows[0].id, state: ParkedState::Failed, attempts: 1, delay: Duration::ZERO, failure };
    let settlement = Settlement { park: vec![park], ..Settlement::default() };
    for _ in 0..2 {
        source.settle(&lease, &settlement).await.expect("settled");
    }
    assert_eq!(letters(bed).await.iter().map(|letter| letter.attempts).collect::<Vec<_>>(), [1]);
}

/// The running relay publishes what is replayed, and what waited behind it follows in order.
pub async fn a_replayed_event_is_published_and_its_key_follows(bed: &impl Bed) {
    let events = [event("k", "poison"), event("k", "behind"), keyless("poison")];
    let (broker, is_mended, relay) = fail(bed, &events, 2).await;
    is_mended.store(true, Ordering::SeqCst);
    let replayed = replay(bed).await;
    assert_eq!((replayed.total, replayed.applied, replayed.failed, replayed.stopped), (2, 2, 0, None));
    until("following", async || broker.arrived().len() == 3).await;
    commit(bed, &[event("k", "later")]).await;
    until("following", async || broker.arrived().len() == 4).await;
    relay.stop().await;
    let of_key: Vec<Event> = broker.arrived().into_iter().filter(|event| event.key().is_some()).collect();
    assert_eq!(names(&of_key), ["poison", "behind", "later"]);
    assert!(letters(bed).await.is_empty());
    assert_eq!(parked(bed).await, (0, 0, 0));
}

/// One that is refused again is a dead letter again; its attempts and their history are added.
pub async fn a_replayed_event_that_fails_again_is_dead_again(bed: &impl Bed) {
    let (broker, _, relay) = fail(bed, &[event("k", "poison"), event("k", "behind")], 1).await;
    let replayed = replay(bed).await;
    assert_eq!((replayed.applied, replayed.failed, replayed.stopped), (0, 1, Some(Stopped::HalfFailed)));
    relay.stop().await;
    let letter = letters(bed).await.remove(0);
    assert_eq!((letter.attempts, letter.state.as_str()), (6, "dead"));
    let detail = bed.store().dead_show(letter.id).await.expect("answers").expect("is there");
    assert_eq!(detail.history.as_array().expect("a list").len(), 2);
    assert_eq!(parked(bed).await, (0, 1, 1));
    assert!(broker.arrived().is_empty(), "the key waits");
}

/// What is taken back before the relay tries it has failed as before.
pub async fn a_recalled_event_has_failed_as_before(bed: &impl Bed) {
    let (_, _, relay) = fail(bed, &[event("k", "poison"), event("k", "behind")], 1).await;
    relay.stop().await;
    let store = bed.store();
    let taken = store.dead_replay(&DeadFilter::default(), 10, "test").await.expect("replayed");
    assert_eq!((taken.len(), taken[0].consumer.as_str()), (1, "relay/default"));
    assert_eq!(parked(bed).await, (1, 1, 0));
    assert!(store.dead_replay(&DeadFilter::default(), 10, "test").await.expect("answers").is_empty());
    assert_eq!(store.dead_discard(&DeadFilter::default(), "a test", "test").await.expect("answers"), 0);
    assert_eq!(store.dead_recall(&[taken[0].id], "test").await.expect("recalled"), 1);
    assert_eq!(parked(bed).await, (0, 1, 1));
    assert_eq!(letters(bed).await[0].state, "dead");
}

/// A discarded event is never published; the running relay goes on with its key.
pub async fn a_discarded_event_lets_its_key_go_on(bed: &impl Bed) {
    let (poison, behind) = (event("k", "poison"), event("k", "behind"));
    let (broker, _, relay) = fail(bed, &[poison.clone(), behind.clone(), keyless("poison")], 2).await;
    let discarded = bed.store().dead_discard(&DeadFilter::default(), "a test", "test").await.expect("discarded");
    assert_eq!(discarded, 2);
    until("following", async || broker.arrived().len() == 1).await;
    commit(bed, &[event("k", "later")]).await;
    until("following", async || broker.arrived().len() == 2).await;
    relay.stop().await;
    assert_eq!(names(&broker.arrived()), ["behind", "later"]);
    assert_eq!(parked(bed).await, (0, 0, 0));
    assert!(letters(bed).await.is_empty());
    assert_eq!(bed.outbox_status(&poison).await, "discarded");
    assert_eq!(bed.outbox_status(&behind).await, "published");
    let retention = Retention { dead: Duration::ZERO, ..Retention::default() };
    assert_eq!(bed.store().maintain(&retention).await.expect("upkeep").dead_deleted, 2);
}

/// What was discarded before the position has passed it is read again, and not published behind what followed it.
pub async fn a_discarded_event_that_is_read_again_is_not_published(bed: &impl Bed) {
    commit(bed, &[event("k", "poison"), event("k", "behind")]).await;
    let (source, lease) = (bed.source(1), bed.lease(0).await);
    let position = source.open(&lease).await.expect("opened").position;
    let page = source.read(&lease, &position, 10).await.expect("read");
    let failure = Failure { kind: "unroutable".to_owned(), message: "no queue".to_owned() };
    let (state, delay) = (ParkedState::Failed, Duration::ZERO);
    let park = vec![Park { id: page.rows[0].id, state, attempts: 1, delay, failure: Some(failure) }];
    source.settle(&lease, &Settlement { park, ..Settlement::default() }).await.expect("settled, without a position");
    assert_eq!(bed.store().dead_discard(&DeadFilter::default(), "a test", "test").await.expect("discarded"), 1);
    bed.store().give_back(&lease).await.expect("given back");

    let (broker, is_mended) = broker();
    is_mended.store(true, Ordering::SeqCst);
    let relay = Running::start(bed, broker.clone(), settings());
    until("following", async || !broker.arrived().is_empty()).await;
    commit(bed, &[event("k", "later")]).await;
    until("following", async || broker.arrived().len() >= 2).await;
    relay.stop().await;
    assert_eq!(names(&broker.arrived()), ["behind", "later"]);
}

/// The relay had it in hand when it was taken back: what was published is no dead letter.
pub async fn an_event_that_is_published_after_all_is_no_dead_letter(bed: &impl Bed) {
    let (_, _, relay) = fail(bed, &[event("k", "poison"), event("k", "behind")], 1).await;
    relay.stop().await;
    let store = bed.store();
    let taken = store.dead_replay(&DeadFilter::default(), 10, "test").await.expect("replayed");
    let (source, lease) = (bed.source(1), bed.lease(0).await);
    source.open(&lease).await.expect("opened");
    let due = source.due(&lease, 10).await.expect("due");
    assert_eq!(store.dead_recall(&[taken[0].id], "test").await.expect("recalled"), 1);
    let settlement = Settlement { published: vec![due[0].row.id], ..Settlement::default() };
    source.settle(&lease, &settlement).await.expect("settled");
    assert!(letters(bed).await.is_empty());
    assert_eq!(parked(bed).await, (0, 1, 0));
}

/// An event that stands in the log twice has one dead letter; a replay is about both rows.
pub async fn an_event_that_failed_twice_has_one_dead_letter(bed: &impl Bed) {
    let twice = keyless("poison");
    let (broker, is_mended, relay) = fail(bed, &[twice.clone(), twice], 1).await;
    until("failing", async || parked(bed).await == (0, 0, 2)).await;
    assert_eq!(letters(bed).await.len(), 1);
    is_mended.store(true, Ordering::SeqCst);
    assert_eq!(replay(bed).await.applied, 1);
    until("publishing", async || broker.arrived().len() == 2).await;
    relay.stop().await;
    assert!(letters(bed).await.is_empty());
    assert_eq!(parked(bed).await, (0, 0, 0));
}
