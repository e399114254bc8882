//! What every store keeps about leases: one holder, on the database's clock, fenced by a rising epoch.

use std::time::Duration;

use postrider::lease::{LeaseTimes, Leases, Share};

use super::bed::{Bed, TTL};

/// A slot has one holder.
pub async fn a_slot_has_one_holder(bed: &impl Bed) {
    let store = bed.store();
    let held = store.take("g", 0, "a", TTL).await.expect("answers").expect("free");
    assert_eq!(store.take("g", 0, "b", TTL).await.expect("answers"), None);
    assert!(store.take("g", 1, "b", TTL).await.expect("answers").is_some());
    let roll = store.call_in("g", "a", std::slice::from_ref(&held), TTL).await.expect("answers");
    assert_eq!(roll.held, [held]);
    assert!(roll.taken.contains(&0) && roll.taken.contains(&1));
}

/// An expired slot can be taken, with a higher epoch; the old holder cannot renew it.
pub async fn an_expired_slot_is_taken_over(bed: &impl Bed) {
    let store = bed.store();
    let old = store.take("g", 0, "a", Duration::ZERO).await.expect("answers").expect("free");
    let new = store.take("g", 0, "b", TTL).await.expect("answers").expect("expired");
    assert!(new.epoch > old.epoch);
    let roll = store.call_in("g", "a", &[old], TTL).await.expect("answers");
    assert!(roll.held.is_empty(), "the old holder renewed a lease that is not its own");
    assert_eq!(store.call_in("g", "b", &[new], TTL).await.expect("answers").held.len(), 1);
}

/// A lease that expired but that nobody took is still its holder's.
pub async fn an_expired_lease_that_nobody_took_is_renewed(bed: &impl Bed) {
    let store = bed.store();
    let lease = store.take("g", 0, "a", Duration::ZERO).await.expect("answers").expect("free");
    assert_eq!(store.call_in("g", "a", &[lease], TTL).await.expect("answers").held.len(), 1);
    assert_eq!(store.take("g", 0, "b", TTL).await.expect("answers"), None);
}

/// A lease from a time when the clock was wrong does not keep a slot for years.
pub async fn a_lease_from_a_wrong_clock_is_taken_over(bed: &impl Bed) {
    let store = bed.store();
    store.take("g", 0, "a", Duration::from_secs(10 * 365 * 86_400)).await.expect("answers").expect("free");
    assert!(!store.call_in("g", "b", &[], TTL).await.expect("answers").taken.contains(&0));
    assert!(store.take("g", 0, "b", TTL).await.expect("answers").is_some());
}

/// What is given back is free at once; what is not ours cannot be given back.
pub async fn what_is_given_back_is_free_at_once(bed: &impl Bed) {
    let store = bed.store();
    let a = store.take("g", 0, "a", TTL).await.expect("answers").expect("free");
    store.give_back(&a).await.expect("answers");
    let b = store.take("g", 0, "b", TTL).await.expect("answers").expect("free again");
    assert!(b.epoch > a.epoch, "an epoch is never used twice");
    store.give_back(&a).await.expect("answers");
    assert_eq!(store.take("g", 0, "c", TTL).await.expect("answers"), None, "a stale give-back freed the slot");
}

/// Members are counted while they live, and no longer.
pub async fn members_are_counted_while_they_live(bed: &impl Bed) {
    let store = bed.store();
    assert_eq!(store.call_in("g", "a", &[], TTL).await.expect("answers").members, 1);
    assert_eq!(store.call_in("g", "b", &[], Duration::ZERO).await.expect("answers").members, 2);
    assert_eq!(store.call_in("g", "a", &[], TTL).await.expect("answers").members, 1, "b has expired");
    store.call_in("g", "b", &[], TTL).await.expect("answers");
    store.leave("g", "b").await.expect("answers");
    assert_eq!(store.call_in("g", "a", &[], TTL).await.expect("answers").members, 1, "b has left");
}

/// A second member gets its fair share, after the first has let go of it.
pub async fn members_share_the_slots(bed: &impl Bed) {
    let leases = std::sync::Arc::new(bed.store().clone());
    let times = LeaseTimes { ttl: TTL };
    let mut first = Share::new(leases.clone(), "g", "first", 4, times);
    let mut second = Share::new(leases.clone(), "g", "second", 4, times);
    assert_eq!(first.run_once().await.expect("answers").gained.len(), 4);
    assert_eq!(second.run_once().await.expect("answers").gained.len(), 0);
    let excess = first.run_once().await.expect("answers").excess;
    assert_eq!(excess.len(), 2);
    for lease in &excess {
        leases.give_back(lease).await.expect("answers");
    }
    assert_eq!(second.run_once().await.expect("answers").gained.len(), 2);
    assert_eq!(first.run_once().await.expect("answers"), postrider::lease::Change::default());
}

/// Twenty members that take at once never hold a slot twice.
pub async fn a_crowd_never_shares_a_slot(bed: &impl Bed) {
    let mut tasks = tokio::task::JoinSet::new();
    for member in 0..20 {
        let store = bed.store().clone();
        tasks.spawn(async move {
            let mut won = 0;
            for slot in 0..3 {
                let taken = store.take("crowd", slot, &format!("member {member}"), TTL).await.expect("answers");
                won += u32::from(taken.is_some());
            }
            won
        });
    }
    let mut won = 0;
    while let Some(result) = tasks.join_next().await {
        won += result.expect("no panic");
    }
    assert_eq!(won, 3);
}
