//! What every source keeps: every committed event once, in commit order within a key, under a fenced lease.

use std::sync::Arc;
use std::time::Duration;

use postrider::Kind;
use postrider::Route;
use postrider::lease::Leases;
use postrider::source::{Failure, Page, Park, ParkedKeys, ParkedState, Position, Settlement, Source};
use postrider::upkeep::Upkeep;

use super::bed::{Bed, event, name};

fn names(page: &Page) -> Vec<String> {
    page.rows.iter().map(|row| name(row.event.as_ref().expect("the row is an event"))).collect()
}

async fn committed(bed: &impl Bed, key: &str, names: &[&str]) {
    for name in names {
        let mut tx = bed.begin().await;
        tx.append(&event(key, name)).await;
        tx.commit().await;
    }
}

struct Reader {
    source: Arc<dyn Source>,
    lease: postrider::lease::Lease,
    position: Position,
}

impl Reader {
    async fn new(bed: &impl Bed) -> Self {
        let (source, lease) = (bed.source(1), bed.lease(0).await);
        let position = source.open(&lease).await.expect("the lane opens").position;
        Self { source, lease, position }
    }

    async fn read(&mut self, limit: usize) -> Vec<String> {
        let page = self.source.read(&self.lease, &self.position, limit).await.expect("the log is read");
        self.position = page.next.clone();
        names(&page)
    }

    async fn settle(&self) {
        let settlement = Settlement { position: Some(self.position.clone()), ..Settlement::default() };
        self.source.settle(&self.lease, &settlement).await.expect("the position is settled");
    }
}

/// What was committed before the first relay ran is not passed over.
pub async fn the_log_is_read_from_its_beginning(bed: &impl Bed) {
    committed(bed, "k", &["a", "b"]).await;
    let mut reader = Reader::new(bed).await;
    assert_eq!(reader.read(10).await, ["a", "b"]);
    assert!(reader.read(10).await.is_empty());
    committed(bed, "k", &["c"]).await;
    assert_eq!(reader.read(10).await, ["c"]);
}

/// A transaction that draws its id early and commits late is found when it commits.
pub async fn late_commit_is_not_skipped(bed: &impl Bed) {
    let mut reader = Reader::new(bed).await;
    let mut late = bed.begin().await;
    late.append(&event("late", "drawn first")).await;
    committed(bed, "early", &["drawn second"]).await;
    assert_eq!(reader.read(10).await, ["drawn second"]);
    reader.settle().await;
    assert!(reader.read(10).await.is_empty(), "what is not committed is not read");
    late.commit().await;
    assert_eq!(reader.read(10).await, ["drawn first"]);
    assert!(reader.read(10).await.is_empty());
}

/// A transaction that stays open for many windows delays nobody, and its own events come when it commits.
pub async fn a_long_transaction_delays_only_its_own_events(bed: &impl Bed) {
    let mut reader = Reader::new(bed).await;
    let mut long = bed.begin().await;
    long.append(&event("long", "long")).await;
    for round in 0..20 {
        let text = format!("quick {round}");
        committed(bed, "quick", &[&text]).await;
        assert_eq!(reader.read(10).await, [text]);
        reader.settle().await;
    }
    long.commit().await;
    assert_eq!(reader.read(10).await, ["long"]);
}

/// Of two transactions on one key the one that commits first comes first, whichever began first.
pub async fn order_within_a_key_is_commit_order(bed: &impl Bed) {
    let mut reader = Reader::new(bed).await;
    // Gets its transaction id first, by writing something else.
    let mut began_first = bed.begin().await;
    began_first.append(&event("other", "other")).await;
    committed(bed, "k", &["first"]).await;
    began_first.append(&event("k", "second")).await;
    began_first.commit().await;
    let order: Vec<String> = reader.read(10).await.into_iter().filter(|name| name != "other").collect();
    assert_eq!(order, ["first", "second"]);
}

/// A producer's clock that goes backwards changes nothing.
pub async fn order_does_not_come_from_the_clock(bed: &impl Bed) {
    let mut reader = Reader::new(bed).await;
    let now = chrono::Utc::now();
    for (name, ago) in [("first", 0), ("second", 3_600), ("third", 60)] {
        let event = event("k", name).rebuild().time(now - chrono::Duration::seconds(ago)).build().expect("valid");
        let mut tx = bed.begin().await;
        tx.append(&event).await;
        tx.commit().await;
    }
    assert_eq!(reader.read(10).await, ["first", "second", "third"]);
}

/// Nothing of a rolled-back transaction is ever seen.
pub async fn rolled_back_events_are_never_read(bed: &impl Bed) {
    let mut reader = Reader::new(bed).await;
    let mut tx = bed.begin().await;
    tx.append(&event("k", "never")).await;
    tx.rollback().await;
    committed(bed, "k", &["always"]).await;
    assert_eq!(reader.read(10).await, ["always"]);
}

/// A window larger than a page is read in pages, and a new holder goes on in the middle of it.
pub async fn a_big_window_is_read_in_pages_and_resumed(bed: &impl Bed) {
    let mut tx = bed.begin().await;
    let all: Vec<String> = (0..25).map(|n| format!("{n:02}")).collect();
    for name in &all {
        tx.append(&event(&format!("key {name}"), name)).await;
    }
    tx.commit().await;
    let mut reader = Reader::new(bed).await;
    let mut seen = reader.read(10).await;
    reader.settle().await;
    committed(bed, "later", &["later"]).await;

    bed.store().give_back(&reader.lease).await.expect("the lease is given back");
    let mut successor = Reader::new(bed).await;
    while seen.len() < 26 {
        let page = successor.read(10).await;
        assert!(!page.is_empty(), "only {seen:?} of 26 events were found");
        seen.extend(page);
    }
    assert_eq!(seen[..25], all);
    assert_eq!(seen[25], "later");
}

/// An instance that slept through its lease cannot move the position or park anything.
pub async fn settle_refuses_a_stale_lease(bed: &impl Bed) {
    committed(bed, "k", &["a"]).await;
    let (source, store) = (bed.source(1), bed.store());
    let stale = store.take("relay/default", 0, "stale", Duration::ZERO).await.expect("answers").expect("free");
    let position = source.open(&stale).await.expect("opens").position;
    let page = source.read(&stale, &position, 10).await.expect("reads");

    let successor = store.take("relay/default", 0, "next", super::bed::TTL).await.expect("answers").expect("expired");
    assert!(successor.epoch > stale.epoch);
    let opened = source.open(&successor).await.expect("opens");
    assert_eq!(opened.position, position);

    let park =
        Park { id: page.rows[0].id, state: ParkedState::Waiting, attempts: 0, delay: Duration::ZERO, failure: None };
    for settlement in [
        Settlement { position: Some(page.next.clone()), ..Settlement::default() },
        Settlement { position: Some(page.next), park: vec![park], ..Settlement::default() },
    ] {
        let refused = source.settle(&stale, &settlement).await;
        assert_eq!(refused.expect_err("a stale settle is refused").kind(), Kind::LeaseLost);
    }
    let reopened = source.open(&successor).await.expect("opens");
    assert_eq!(reopened.position, position, "the stale settle moved the position");
    assert!(reopened.parked.keys.is_empty(), "the stale settle parked something");
    let late = source.open(&stale).await;
    assert_eq!(late.expect_err("a stale open is refused").kind(), Kind::LeaseLost);
}

fn failed(id: i64, state: ParkedState, delay: Duration) -> Park {
    let failure = Failure { kind: "unroutable".to_owned(), message: "no queue".to_owned() };
    Park { id, state, attempts: 1, delay, failure: Some(failure) }
}

fn waiting(id: i64) -> Park {
    Park { id, state: ParkedState::Waiting, attempts: 0, delay: Duration::ZERO, failure: None }
}

/// What is parked comes back when its time has come, with what waits behind it, oldest first, and only then.
pub async fn parked_events_come_back_in_order(bed: &impl Bed) {
    committed(bed, "k", &["k1", "k2", "k3"]).await;
    committed(bed, "other", &["o1"]).await;
    let (source, lease) = (bed.source(1), bed.lease(0).await);
    let position = source.open(&lease).await.expect("opens").position;
    let page = source.read(&lease, &position, 10).await.expect("reads");
    let ids: Vec<i64> = page.rows.iter().map(|row| row.id).collect();
    let park = vec![failed(ids[0], ParkedState::Retrying, Duration::from_secs(3600)), waiting(ids[1])];
    let settlement = Settlement { position: Some(page.next), park, ..Settlement::default() };
    source.settle(&lease, &settlement).await.expect("settles");

    let parked = source.parked(&lease).await.expect("answers");
    assert_eq!(parked, ParkedKeys { keys: vec![("k".to_owned(), 2)], keyless: 0 });
    assert_eq!(source.open(&lease).await.expect("opens").parked, parked);
    assert!(source.due(&lease, 10).await.expect("answers").is_empty(), "its time has not come");

    let park = vec![failed(ids[0], ParkedState::Retrying, Duration::ZERO), waiting(ids[2])];
    source.settle(&lease, &Settlement { park, ..Settlement::default() }).await.expect("settles");
    let due = source.due(&lease, 10).await.expect("answers");
    let order: Vec<i64> = due.iter().map(|parked| parked.row.id).collect();
    assert_eq!(order, ids[..3]);
    assert_eq!(due[0].attempts, 1);
    assert_eq!(name(due[0].row.event.as_ref().expect("an event")), "k1");

    let settlement = Settlement { published: vec![ids[0]], ..Settlement::default() };
    source.settle(&lease, &settlement).await.expect("settles");
    let order: Vec<i64> = source.due(&lease, 10).await.expect("answers").iter().map(|parked| parked.row.id).collect();
    assert_eq!(order, ids[1..3], "what waited is due when its head is gone");
    let settlement = Settlement { published: ids[1..3].to_vec(), ..Settlement::default() };
    source.settle(&lease, &settlement).await.expect("settles");
    assert_eq!(source.parked(&lease).await.expect("answers"), ParkedKeys::default());
}

/// A failed event keeps its key back until a person decides; other keys are not touched.
pub async fn a_failed_event_keeps_its_key_back(bed: &impl Bed) {
    committed(bed, "poison", &["p1", "p2"]).await;
    let (source, lease) = (bed.source(1), bed.lease(0).await);
    let position = source.open(&lease).await.expect("opens").position;
    let page = source.read(&lease, &position, 10).await.expect("reads");
    let park = vec![failed(page.rows[0].id, ParkedState::Failed, Duration::ZERO), waiting(page.rows[1].id)];
    source
        .settle(&lease, &Settlement { position: Some(page.next), park, ..Settlement::default() })
        .await
        .expect("settles");
    assert!(source.due(&lease, 10).await.expect("answers").is_empty());
    let backlog = bed.store().backlog(&Route::all("default")).await.expect("answers");
    assert_eq!((backlog.pending, backlog.waiting, backlog.failed), (0, 1, 1));
}

/// A parked row that is read again after a crash keeps its state, its attempts and its error.
pub async fn a_parked_row_that_is_read_again_stays_as_it_is(bed: &impl Bed) {
    committed(bed, "k", &["k1"]).await;
    let (source, lease) = (bed.source(1), bed.lease(0).await);
    let position = source.open(&lease).await.expect("opens").position;
    let page = source.read(&lease, &position, 10).await.expect("reads");
    let id = page.rows[0].id;
    for park in [failed(id, ParkedState::Failed, Duration::ZERO), waiting(id)] {
        source.settle(&lease, &Settlement { park: vec![park], ..Settlement::default() }).await.expect("settles");
    }
    let backlog = bed.store().backlog(&Route::all("default")).await.expect("answers");
    assert_eq!((backlog.waiting, backlog.failed), (0, 1));
}

/// Lanes split the log by key: each event is in one lane, all events of a key in the same.
pub async fn lanes_split_the_log_by_key(bed: &impl Bed) {
    for n in 0..40 {
        let key = format!("key {}", n % 10);
        committed(bed, &key, &[&format!("{n:02}")]).await;
    }
    let source = bed.source(4);
    let mut seen = Vec::new();
    for lane in 0..4 {
        let lease = bed.lease(lane).await;
        let position = source.open(&lease).await.expect("opens").position;
        let page = source.read(&lease, &position, 100).await.expect("reads");
        for row in &page.rows {
            seen.push((row.key.clone().expect("a key"), lane, name(row.event.as_ref().expect("an event"))));
        }
    }
    assert_eq!(seen.len(), 40, "each event is in exactly one lane");
    for (key, lane, _) in &seen {
        assert!(seen.iter().all(|(other, at, _)| other != key || at == lane), "{key} is in two lanes");
    }
}

/// Another number of lanes may publish again, but passes nothing over.
pub async fn changing_the_number_of_lanes_loses_nothing(bed: &impl Bed) {
    committed(bed, "a", &["a1"]).await;
    let mut reader = Reader::new(bed).await;
    assert_eq!(reader.read(10).await, ["a1"]);
    reader.settle().await;
    committed(bed, "b", &["b1"]).await;
    committed(bed, "c", &["c1"]).await;
    bed.store().give_back(&reader.lease).await.expect("given back");

    let source = bed.source(3);
    let mut seen = Vec::new();
    for lane in 0..3 {
        let lease = bed.lease(lane).await;
        let position = source.open(&lease).await.expect("opens").position;
        seen.extend(names(&source.read(&lease, &position, 10).await.expect("reads")));
    }
    seen.sort();
    seen.dedup();
    assert!(seen.contains(&"b1".to_owned()) && seen.contains(&"c1".to_owned()), "lost: only {seen:?} were found");
}

/// The backlog is what is committed and not settled, with its age.
pub async fn the_backlog_is_what_waits(bed: &impl Bed) {
    let old =
        event("k", "old").rebuild().time(chrono::Utc::now() - chrono::Duration::seconds(7200)).build().expect("valid");
    let mut tx = bed.begin().await;
    tx.append(&old).await;
    tx.commit().await;
    committed(bed, "k", &["new"]).await;
    let backlog = bed.store().backlog(&Route::all("default")).await.expect("answers");
    assert_eq!(backlog.pending, 2);
    assert!(backlog.oldest_secs.is_some_and(|age| (7190..7300).contains(&age)), "{backlog:?}");
    let mut reader = Reader::new(bed).await;
    reader.read(10).await;
    reader.settle().await;
    let backlog = bed.store().backlog(&Route::all("default")).await.expect("answers");
    assert_eq!((backlog.pending, backlog.oldest_secs), (0, None));
}

/// Upkeep removes what is published and old, and never what is not published.
pub async fn upkeep_never_removes_what_is_not_published(bed: &impl Bed) {
    let old = chrono::Utc::now() - chrono::Duration::days(30);
    for name in ["published", "pending"] {
        let mut tx = bed.begin().await;
        tx.append(&event("k", name).rebuild().time(old).build().expect("valid")).await;
        tx.commit().await;
    }
    let retention = postrider::upkeep::Retention::default();
    let report = bed.store().maintain(&retention).await.expect("upkeep runs");
    assert_eq!(report.outbox_deleted, 0, "nothing was published yet");
    let mut reader = Reader::new(bed).await;
    assert_eq!(reader.read(1).await, ["published"]);
    reader.settle().await;
    bed.store().maintain(&retention).await.expect("upkeep runs");
    assert_eq!(reader.read(10).await, ["pending"], "upkeep removed an event that was not published");
    reader.settle().await;
    let report = bed.store().maintain(&retention).await.expect("upkeep runs");
    assert!(report.outbox_deleted + u64::from(report.partitions_dropped) > 0, "old rows stay for ever: {report:?}");
}
