//! Newest wins, whatever the order of arrival.

use chrono::{DateTime, TimeDelta, Utc};
use postrider::Kind;
use postrider::inbox::Inbox;
use postrider::newest::{Change, Newest, NewestWriter, Stamp};
use postrider::upkeep::{Retention, Upkeep};

use super::bed::{Bed, Tx};

/// A time of the test's own clock.
pub fn at(micros: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + TimeDelta::days(20_000) + TimeDelta::microseconds(micros)
}

/// All orders of `0..n`.
pub fn permutations(n: usize) -> Vec<Vec<usize>> {
    let Some(last) = n.checked_sub(1) else { return vec![Vec::new()] };
    let insert = |shorter: Vec<usize>| {
        (0..n).map(move |place| {
            let mut longer = shorter.clone();
            longer.insert(place, last);
            longer
        })
    };
    permutations(last).into_iter().flat_map(insert).collect()
}

/// Four changes of one entity, the oldest first, with versions against the clock.
pub fn versioned(end: Change) -> [(Stamp, Change); 4] {
    let stamp = |version, micros| Stamp { version: Some(version), at: at(micros) };
    [
        (stamp(1, 40), Change::Upsert),
        (stamp(2, 30), Change::Delete),
        (stamp(7, 20), Change::Upsert),
        (stamp(8, 10), end),
    ]
}

/// Four changes of one entity, the oldest first, with timestamps alone.
pub fn timed(end: Change) -> [(Stamp, Change); 4] {
    let stamp = |micros| Stamp { version: None, at: at(micros) };
    [(stamp(1), Change::Upsert), (stamp(2), Change::Delete), (stamp(3), Change::Upsert), (stamp(1_000_000), end)]
}

async fn admit<B: Bed>(bed: &B, newest: &Newest, id: &str, (stamp, change): (Stamp, Change)) -> bool
where
    Tx<B>: NewestWriter,
{
    let mut tx = bed.store().begin().await.expect("a transaction");
    let is_new = newest.admit(&mut tx, id, stamp, change).await.expect("the store answers");
    bed.store().commit(tx).await.expect("commits");
    is_new
}

/// A change is admitted exactly when it is newer than all before it, in every order, each change coming twice.
pub async fn every_order_of_arrival_ends_with_the_newest<B: Bed>(bed: &B)
where
    Tx<B>: NewestWriter,
{
    let newest = Newest::of("c", "customer");
    let lists = [versioned(Change::Upsert), versioned(Change::Delete), timed(Change::Upsert), timed(Change::Delete)];
    for (n, changes) in lists.iter().enumerate() {
        for order in permutations(changes.len()) {
            let id = format!("{n} {order:?}");
            let mut seen = None;
            for change in order.iter().copied() {
                let is_new = admit(bed, &newest, &id, changes[change]).await;
                assert_eq!(is_new, seen.is_none_or(|seen| change > seen), "{id}: change {change} after {seen:?}");
                seen = seen.max(Some(change));
                assert!(!admit(bed, &newest, &id, changes[change]).await, "{id}: change {change} again");
            }
        }
    }
}

/// A late update does not bring a deleted entity back, also when the deletion came first of all.
pub async fn a_late_update_after_a_delete_is_refused<B: Bed>(bed: &B)
where
    Tx<B>: NewestWriter,
{
    let newest = Newest::of("c", "customer");
    let [made, deleted, remade, ..] = versioned(Change::Upsert);
    assert!(admit(bed, &newest, "a", deleted).await);
    assert!(!admit(bed, &newest, "a", made).await);
    assert!(admit(bed, &newest, "a", remade).await, "made anew");
}

/// Consumers, kinds of entities and ids are apart.
pub async fn each_consumer_and_entity_has_its_own_newest<B: Bed>(bed: &B)
where
    Tx<B>: NewestWriter,
{
    let change = timed(Change::Upsert)[0];
    for (consumer, entity, id) in
        [("c", "customer", "1"), ("d", "customer", "1"), ("c", "order", "1"), ("c", "order", "2")]
    {
        assert!(admit(bed, &Newest::of(consumer, entity), id, change).await, "{consumer} {entity} {id}");
    }
}

/// A version decides when both have one, the timestamp otherwise.
pub async fn without_a_version_on_both_sides_the_timestamp_decides<B: Bed>(bed: &B)
where
    Tx<B>: NewestWriter,
{
    let newest = Newest::of("c", "customer");
    let stamp = |version, micros| (Stamp { version, at: at(micros) }, Change::Upsert);
    assert!(admit(bed, &newest, "a", stamp(Some(5), 10)).await);
    assert!(!admit(bed, &newest, "a", stamp(None, 10)).await, "as old");
    assert!(admit(bed, &newest, "a", stamp(None, 11)).await);
    assert!(!admit(bed, &newest, "a", stamp(Some(5), 12)).await, "the version is not forgotten");
    assert!(admit(bed, &newest, "a", stamp(Some(6), 1)).await);
}

/// What was decided in a transaction that did not commit was not decided.
pub async fn a_rollback_forgets_the_decision<B: Bed>(bed: &B)
where
    Tx<B>: NewestWriter,
{
    let (newest, change) = (Newest::of("c", "customer"), timed(Change::Upsert)[0]);
    let mut tx = bed.store().begin().await.expect("a transaction");
    assert!(newest.admit(&mut tx, "a", change.0, change.1).await.expect("the store answers"));
    bed.store().rollback(tx).await.expect("rolls back");
    assert!(admit(bed, &newest, "a", change).await);
}

/// Of many transactions at once, each with the same change, one is first.
pub async fn of_many_at_once_one_is_first<B: Bed>(bed: &B)
where
    Tx<B>: NewestWriter,
{
    let (newest, change) = (Newest::of("c", "customer"), timed(Change::Upsert)[0]);
    let admitted = futures_util::future::join_all((0..10).map(|_| admit(bed, &newest, "a", change))).await;
    assert_eq!(admitted.into_iter().filter(|is_new| *is_new).count(), 1);
}

/// Names that no table could hold are refused.
pub async fn an_id_too_long_is_refused<B: Bed>(bed: &B)
where
    Tx<B>: NewestWriter,
{
    let (stamp, change) = timed(Change::Upsert)[0];
    let mut tx = bed.store().begin().await.expect("a transaction");
    for id in [String::new(), "x".repeat(256)] {
        let error = Newest::of("c", "customer").admit(&mut tx, &id, stamp, change).await.expect_err("refused");
        assert_eq!(error.kind(), Kind::Invalid);
    }
    bed.store().rollback(tx).await.expect("rolls back");
}

/// Upkeep removes tombstones when their time is over, and nothing else.
pub async fn upkeep_removes_old_tombstones_alone<B: Bed>(bed: &B)
where
    Tx<B>: NewestWriter,
{
    let newest = Newest::of("c", "customer");
    let [made, deleted, ..] = versioned(Change::Upsert);
    assert!(admit(bed, &newest, "kept", made).await);
    assert!(admit(bed, &newest, "gone", deleted).await);
    let maintain = async |retention: Retention| bed.store().maintain(&retention).await.expect("upkeep runs");
    // The stamp is of long ago; what counts is when it came.
    assert_eq!(maintain(Retention::default()).await.tombstones_deleted, 0);
    assert!(!admit(bed, &newest, "gone", made).await);
    let none = std::time::Duration::ZERO;
    assert_eq!(maintain(Retention { inbox: none, ..Retention::default() }).await.tombstones_deleted, 0);
    assert_eq!(maintain(Retention { inbox: none, dead: none, ..Retention::default() }).await.tombstones_deleted, 1);
    assert!(admit(bed, &newest, "gone", made).await);
    assert!(!admit(bed, &newest, "kept", made).await);
}
