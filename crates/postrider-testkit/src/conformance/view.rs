//! What people see: who holds a key back and how much waits, and how each consumer stands.

use std::time::Duration;

use postrider::broker::Origin;
use postrider::inbox::{Body, DeadLetter, Failed, Inbox as _, Retries, Why};
use postrider::pulse::{Pulse, Pulses as _};
use postrider::source::{Failure, Park, ParkedState, Settlement};
use postrider::upkeep::{ConsumerView, Upkeep as _};

use super::bed::{Bed, event};
use super::relay::commit;

fn failed(text: &str) -> Failed {
    Failed { error_type: "test".to_owned(), error: text.to_owned(), causes: Vec::new() }
}

async fn hold(retries: &dyn Retries, consumer: &str, key: &str, name: &str) {
    let failure = failed("no");
    let why = Why::Failed { delay: Duration::from_secs(60), attempts: 1, failure: Some(&failure) };
    retries.hold(consumer, &event(key, name), &Origin::default(), why).await.expect("held");
}

async fn bury(retries: &dyn Retries, consumer: &str, key: &str) {
    let event = event(key, "dead");
    let (origin, failed) = (Origin::default(), failed("no"));
    let dead = DeadLetter {
        consumer,
        id: event.id(),
        message: Body::Event(&event),
        held: None,
        failed: &failed,
        origin: &origin,
    };
    retries.bury(&dead).await.expect("buried");
}

/// Only those that hold a key back are listed, page by page.
pub async fn a_holder_says_how_many_wait_behind_it(bed: &impl Bed) {
    let events = [event("a", "1"), event("a", "2"), event("a", "3"), event("b", "4"), event("c", "5"), event("b", "6")];
    commit(bed, &events).await;
    let (source, lease) = (bed.source(1), bed.lease(0).await);
    let opened = source.open(&lease).await.expect("opened");
    let page = source.read(&lease, &opened.position, 10).await.expect("read");
    let park = |index: usize, state, attempts| Park {
        id: page.rows[index].id,
        state,
        attempts,
        delay: Duration::from_secs(60),
        failure: Some(Failure { kind: "unroutable".to_owned(), message: "no queue".to_owned() }),
    };
    let parks = vec![
        park(0, ParkedState::Failed, 10),
        park(1, ParkedState::Waiting, 0),
        park(2, ParkedState::Waiting, 0),
        park(3, ParkedState::Retrying, 2),
        park(5, ParkedState::Waiting, 0),
    ];
    source.settle(&lease, &Settlement { park: parks, ..Settlement::default() }).await.expect("settled");
    let views = bed.store().parked("default", 0, 10).await.expect("read");
    let seen: Vec<_> = views
        .iter()
        .map(|v| (v.key.as_deref(), v.state.as_str(), v.attempts, v.waiting, v.next_at.is_some()))
        .collect();
    assert_eq!(seen, [(Some("a"), "failed", 10, 2, false), (Some("b"), "retrying", 2, 1, true)]);
    assert_eq!((views[0].event_id, views[0].error_type.as_deref()), (events[0].id(), Some("unroutable")));
    assert_eq!((views[0].destination.as_str(), views[0].kind.as_str()), ("default", "created"));
    let second = bed.store().parked("default", views[0].id, 10).await.expect("read");
    assert_eq!(second, views[1..]);
    assert_eq!(bed.store().parked("default", 0, 1).await.expect("read").len(), 1);
    assert!(bed.store().parked("other", 0, 10).await.expect("read").is_empty());
}

/// A held message, a dead letter or a pulse is enough; relays are no consumers.
pub async fn every_consumer_is_found_however_it_was_heard_of(bed: &impl Bed) {
    let store = bed.store();
    assert!(store.consumers().await.expect("read").is_empty());
    let retries = store.retries();
    hold(retries, "held", "k", "1").await;
    retries.hold("held", &event("k", "2"), &Origin::default(), Why::Behind).await.expect("held");
    hold(retries, "held", "l", "3").await;
    bury(retries, "dead", "k").await;
    bury(retries, "dead", "k").await;
    let pulse = Pulse {
        group: "consumer/alive".to_owned(),
        owner: "a".to_owned(),
        version: "0".to_owned(),
        breaker: None,
        counts: Vec::new(),
    };
    store.pulse(&pulse).await.expect("taken");
    store.pulse(&Pulse { group: "relay/default".to_owned(), ..pulse }).await.expect("taken");
    let views = store.consumers().await.expect("read");
    let of = |name: &str| ConsumerView { name: name.to_owned(), ..ConsumerView::default() };
    let young = |secs: Option<u64>| secs.is_some_and(|secs| secs < 10).then_some(0);
    let seen: Vec<ConsumerView> = views
        .into_iter()
        .map(|view| ConsumerView {
            oldest_secs: young(view.oldest_secs),
            oldest_dead_secs: young(view.oldest_dead_secs),
            ..view
        })
        .collect();
    assert_eq!(
        seen,
        [
            of("alive"),
            ConsumerView { dead: 2, oldest_dead_secs: Some(0), ..of("dead") },
            ConsumerView { retrying: 2, waiting: 1, oldest_secs: Some(0), ..of("held") },
        ]
    );
}
