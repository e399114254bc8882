//! What every store keeps when events go to several destinations: each event to one of them, also while routes change.

use std::sync::Arc;

use postrider::broker::topic::TopicFilter;
use postrider::event::Event;
use postrider::lease::{Lease, Leases};
use postrider::source::{Settlement, Source};
use postrider::store::Store;
use postrider::upkeep::Upkeep;
use postrider::{Kind, Route};

use super::bed::{Bed, TTL, name};

fn topics(wanted: &[&str], unwanted: &[&str]) -> TopicFilter {
    let texts = |patterns: &[&str]| patterns.iter().map(|pattern| (*pattern).to_owned()).collect::<Vec<_>>();
    TopicFilter::new(texts(wanted), texts(unwanted))
}

fn route(destination: &str, wanted: &[&str], unwanted: &[&str]) -> Route {
    Route { destination: destination.to_owned(), topics: topics(wanted, unwanted) }
}

/// Audit gets its topics, the default the rest.
fn split() -> [Route; 2] {
    [route("audit", &["audit.#", "*.deleted"], &[]), route("default", &["#"], &["audit.#", "*.deleted"])]
}

async fn commit(bed: &impl Bed, topics: &[&str]) {
    for topic in topics {
        let event = Event::builder(*topic, "t").key("k").json(topic).expect("JSON").build().expect("valid");
        let mut tx = bed.begin().await;
        tx.append(&event).await;
        tx.commit().await;
    }
}

async fn lease(bed: &impl Bed, route: &Route) -> Lease {
    let group = postrider::relay::group(&route.destination);
    let lease = bed.store().take(&group, 0, "test", TTL).await.expect("answers");
    lease.expect("the lane is free")
}

/// Reads and settles everything that waits for a destination.
async fn drain(bed: &impl Bed, route: &Route) -> Vec<String> {
    let source: Arc<dyn Source> = bed.store().source(route, 1);
    let lease = lease(bed, route).await;
    let mut position = source.open(&lease).await.expect("opens").position;
    let mut seen = Vec::new();
    loop {
        let page = source.read(&lease, &position, 3).await.expect("reads");
        seen.extend(page.rows.iter().map(|row| name(row.event.as_ref().expect("an event"))));
        position = page.next.clone();
        let settlement = Settlement { position: Some(page.next), ..Settlement::default() };
        source.settle(&lease, &settlement).await.expect("settles");
        if page.rows.is_empty() && !page.has_more {
            break;
        }
    }
    source.close(&lease).await;
    bed.store().give_back(&lease).await.expect("given back");
    seen
}

/// Each event goes to one destination, the one whose topics it matches first.
pub async fn each_destination_gets_its_topics(bed: &impl Bed) {
    let routes = split();
    bed.store().set_routes(&routes).await.expect("taken over");
    commit(bed, &["audit.login", "orders.made", "orders.deleted", "audit", "orders.a.deleted", "orders.paid"]).await;
    let backlog = bed.store().backlog(&routes[0]).await.expect("answers");
    assert_eq!(backlog.pending, 3, "of its own topics alone");
    assert_eq!(drain(bed, &routes[0]).await, ["audit.login", "orders.deleted", "audit"]);
    assert_eq!(drain(bed, &routes[1]).await, ["orders.made", "orders.a.deleted", "orders.paid"]);
    for route in &routes {
        assert_eq!(bed.store().backlog(route).await.expect("answers").pending, 0);
    }
}

/// One that is not read delays nobody else.
pub async fn a_destination_that_stands_still_delays_only_its_own(bed: &impl Bed) {
    let routes = split();
    bed.store().set_routes(&routes).await.expect("taken over");
    commit(bed, &["audit.a", "orders.a", "audit.b", "orders.b"]).await;
    assert_eq!(drain(bed, &routes[1]).await, ["orders.a", "orders.b"]);
    commit(bed, &["orders.c", "audit.c"]).await;
    assert_eq!(drain(bed, &routes[1]).await, ["orders.c"]);
    assert_eq!(bed.store().backlog(&routes[0]).await.expect("answers").pending, 3);
    assert_eq!(drain(bed, &routes[0]).await, ["audit.a", "audit.b", "audit.c"]);
}

/// A topic that moves to another destination is passed over by neither, whichever of them was ahead.
pub async fn a_topic_that_moves_is_not_passed_over(bed: &impl Bed) {
    let before = [Route::all("default")];
    bed.store().set_routes(&before).await.expect("taken over");
    commit(bed, &["audit.a", "orders.a"]).await;
    assert_eq!(drain(bed, &before[0]).await.len(), 2);
    commit(bed, &["audit.b", "orders.b"]).await;

    let routes = split();
    bed.store().set_routes(&routes).await.expect("taken over");
    assert_eq!(drain(bed, &routes[1]).await, ["orders.b"]);
    commit(bed, &["orders.c"]).await;
    assert_eq!(drain(bed, &routes[1]).await, ["orders.c"], "the default is ahead now");

    // Back again: what audit has not read is the default's.
    bed.store().set_routes(&before).await.expect("taken over");
    let again = drain(bed, &before[0]).await;
    assert!(again.contains(&"audit.b".to_owned()), "lost: only {again:?}");
}

/// Routes do not change beside a relay that works by other ones.
pub async fn routes_do_not_change_beside_a_relay(bed: &impl Bed) {
    let before = [Route::all("default")];
    bed.store().set_routes(&before).await.expect("taken over");
    let lease = lease(bed, &before[0]).await;
    bed.store().source(&before[0], 1).open(&lease).await.expect("opens");
    bed.store().set_routes(&before).await.expect("the same routes are no change");
    let error = bed.store().set_routes(&split()).await.expect_err("refused");
    assert_eq!(error.kind(), Kind::Config);
    assert!(error.to_string().contains("still relays by the old ones"), "{error}");
    bed.store().give_back(&lease).await.expect("given back");
    bed.store().set_routes(&split()).await.expect("taken over");
}

/// A relay that slept through a change of routes can neither settle nor begin again by the old ones.
pub async fn a_relay_that_slept_through_a_change_is_refused(bed: &impl Bed) {
    let before = [Route::all("default")];
    bed.store().set_routes(&before).await.expect("taken over");
    commit(bed, &["audit.a", "orders.a"]).await;
    let group = postrider::relay::group("default");
    let stale = bed.store().take(&group, 0, "stale", std::time::Duration::ZERO).await.expect("answers").expect("free");
    let source = bed.store().source(&before[0], 1);
    let position = source.open(&stale).await.expect("opens").position;
    let page = source.read(&stale, &position, 10).await.expect("reads");

    let routes = split();
    bed.store().set_routes(&routes).await.expect("its lease is over");
    let settlement = Settlement { position: Some(page.next), ..Settlement::default() };
    let refused = source.settle(&stale, &settlement).await.expect_err("refused");
    assert_eq!(refused.kind(), Kind::LeaseLost);
    let again = bed.store().take(&group, 0, "stale", TTL).await.expect("answers").expect("free");
    let refused = source.open(&again).await.expect_err("refused");
    assert_eq!(refused.kind(), Kind::Config, "{refused}");
    bed.store().give_back(&again).await.expect("given back");
    assert_eq!(drain(bed, &routes[1]).await, ["orders.a"]);
    assert_eq!(drain(bed, &routes[0]).await, ["audit.a"]);
}
