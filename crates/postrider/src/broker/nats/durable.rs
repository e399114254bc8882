//! Where a reader begins. Without any I/O.
//!
//! Every subscription makes a durable consumer of its own on the server, `<consumer>-<slots>-<slot>-<epoch>-<random>`, and
//! then removes those that it follows. What one of them says stays true for ever: everything up to its floor is done. So a
//! successor may trust the highest floor that it finds, whoever died in between, and nothing has to be compared and swapped.
//! When the number of slots has changed, a slot begins at the lowest floor of all the old ones.

use std::collections::BTreeMap;

use async_nats::jetstream::consumer::{DeliverPolicy, Info};

use crate::error::{Error, Kind, Result};
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

/// A durable consumer that is on the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Durable {
    pub name: String,
    slots: u32,
    slot: u32,
    epoch: i64,
    /// Everything up to this sequence is done.
    floor: u64,
    /// Nothing behind this sequence was ever given to anybody.
    reach: u64,
    /// Whether somebody waits for messages on it at this moment.
    is_read: bool,
}

/// Where to begin, and what is to be removed when the successor exists.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Start {
    /// Everything up to this sequence is done.
    pub floor: u64,
    /// What comes up to this sequence may have been in somebody's hands.
    pub reach: u64,
    pub followed: Vec<String>,
}

/// A name that no other subscription has.
pub(super) fn name(consumer: &ConsumerSpec, lease: &Lease) -> String {
    let Lease { slot, epoch, .. } = lease;
    format!("{}-{}-{slot}-{epoch}-{:08x}", word(&consumer.name), consumer.slots, fastrand::u32(..))
}

/// A consumer's name without dots, which the names of durable consumers cannot have. No two names become the same.
fn word(name: &str) -> String {
    name.replace('.', "=")
}

/// What the server says about one of this consumer's; none if it belongs to another.
pub(super) fn known(consumer: &ConsumerSpec, info: &Info) -> Option<Durable> {
    let mut parts = info.name.rsplitn(5, '-');
    let (_random, epoch, slot, slots) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    if parts.next()? != word(&consumer.name) {
        return None;
    }
    // One that has not acked anything yet says where it began.
    let before = match info.config.deliver_policy {
        DeliverPolicy::ByStartSequence { start_sequence } => start_sequence.saturating_sub(1),
        _ => 0,
    };
    Some(Durable {
        name: info.name.clone(),
        slots: slots.parse().ok()?,
        slot: slot.parse().ok()?,
        epoch: epoch.parse().ok()?,
        floor: info.ack_floor.stream_sequence.max(before),
        reach: info.delivered.stream_sequence.max(before),
        is_read: info.num_waiting > 0,
    })
}

/// Where the holder of a lease begins. [`Kind::LeaseLost`] when the holder of a later one is at work. An epoch alone proves
/// nothing: a store that was made anew counts from the beginning. Nor does a floor above `last`, the stream's last sequence:
/// what gets these sequences is still to come.
pub(super) fn start(found: &[Durable], consumer: &ConsumerSpec, lease: &Lease, last: u64) -> Result<Start> {
    let (own, others): (Vec<_>, Vec<_>) = found.iter().partition(|durable| durable.slots == consumer.slots);
    let (own, siblings): (Vec<_>, Vec<_>) = own.into_iter().partition(|durable| durable.slot == lease.slot);
    if let Some(later) = own.iter().find(|durable| durable.epoch > lease.epoch && durable.is_read) {
        return Err(Error::new(Kind::LeaseLost, format!("the durable consumer {:?} has a later holder", later.name)));
    }
    let mut layouts: BTreeMap<u32, BTreeMap<u32, u64>> = BTreeMap::new();
    for durable in &others {
        let floor = layouts.entry(durable.slots).or_default().entry(durable.slot).or_default();
        *floor = durable.floor.max(*floor);
    }
    let complete = layouts.iter().filter(|(slots, floors)| (0..**slots).all(|slot| floors.contains_key(&slot)));
    let other_floors = complete.filter_map(|(_, floors)| floors.values().copied().min());
    let floor = own.iter().map(|durable| durable.floor).chain(other_floors).max().unwrap_or(0).min(last);
    let reach = own.iter().chain(&others).map(|durable| durable.reach).max().unwrap_or(0);
    // The old slots are needed until each new one has taken its place from them.
    let is_complete =
        (0..consumer.slots).all(|slot| slot == lease.slot || siblings.iter().any(|sibling| sibling.slot == slot));
    let followed = own.iter().chain(others.iter().filter(|_| is_complete)).map(|durable| durable.name.clone());
    Ok(Start { floor, reach, followed: followed.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(slots: u32) -> ConsumerSpec {
        ConsumerSpec { slots, ..ConsumerSpec::new("bil-ling.eu", &["#"]) }
    }

    fn lease(slot: u32, epoch: i64) -> Lease {
        Lease { group: "consumer/billing".into(), slot, owner: "o".into(), epoch }
    }

    fn durable(slots: u32, slot: u32, epoch: i64, floor: u64, reach: u64) -> Durable {
        let name = format!("{slots}-{slot}-{epoch}-{floor}");
        Durable { name, slots, slot, epoch, floor, reach, is_read: false }
    }

    fn info(name: &str, start: u64, floor: u64, delivered: u64) -> Info {
        serde_json::from_value(serde_json::json!({
            "stream_name": "s", "name": name, "created": "2026-11-16T03:00:00Z",
            "config": {"deliver_policy": "by_start_sequence", "opt_start_seq": start, "ack_policy": "all",
                "replay_policy": "instant"},
            "delivered": {"consumer_seq": 1, "stream_seq": delivered}, "ack_floor": {"consumer_seq": 1, "stream_seq": floor},
            "num_ack_pending": 0, "num_redelivered": 0, "num_waiting": 1, "num_pending": 0,
        }))
        .unwrap()
    }

    #[test]
    fn a_name_says_whose_it_is() {
        let name = name(&spec(3), &lease(2, 17));
        let found = known(&spec(3), &info(&name, 8, 12, 20)).unwrap();
        assert_eq!((found.slots, found.slot, found.epoch), (3, 2, 17));
        assert_eq!((found.floor, found.reach, found.is_read), (12, 20, true));
        let fresh = known(&spec(3), &info(&name, 8, 0, 0)).unwrap();
        assert_eq!((fresh.floor, fresh.reach), (7, 7), "it begins where its predecessor ended");
        assert_eq!(known(&ConsumerSpec::new("ling.eu", &["#"]), &info(&name, 8, 0, 0)), None);
        assert_eq!(known(&spec(3), &info("somebody-else", 8, 0, 0)), None);
        assert!(!name.contains('.'));
    }

    #[test]
    fn the_highest_floor_is_true_whoever_died() {
        let found = [durable(1, 0, 4, 12, 20), durable(1, 0, 5, 10, 30), durable(1, 0, 3, 9, 9)];
        let start = start(&found, &spec(1), &lease(0, 6), 99).unwrap();
        assert_eq!((start.floor, start.reach, start.followed.len()), (12, 30, 3));
        assert_eq!(super::start(&found, &spec(1), &lease(0, 6), 11).unwrap().floor, 11, "its end was lost");
        assert_eq!(super::start(&[], &spec(1), &lease(0, 6), 99).unwrap().floor, 0);
    }

    #[test]
    fn a_stale_holder_stays_away_from_one_who_works() {
        let mut later = durable(1, 0, 7, 12, 20);
        assert!(start(&[later.clone()], &spec(1), &lease(0, 6), 99).is_ok(), "a store that was made anew counts anew");
        later.is_read = true;
        assert_eq!(start(&[later.clone()], &spec(1), &lease(0, 6), 99).unwrap_err().kind(), Kind::LeaseLost);
        assert!(start(&[later.clone()], &spec(1), &lease(0, 7), 99).is_ok(), "a new connection of the same holder");
        assert!(start(&[later], &spec(1), &lease(0, 8), 99).is_ok());
    }

    #[test]
    fn new_slots_begin_below_all_old_ones() {
        let mut found = vec![durable(2, 0, 4, 12, 20), durable(2, 1, 4, 8, 9)];
        let first = start(&found, &spec(3), &lease(0, 1), 99).unwrap();
        assert_eq!((first.floor, first.reach, first.followed.len()), (8, 20, 0), "the others still need them");
        found.push(durable(3, 0, 1, 15, 15));
        assert_eq!(start(&found, &spec(3), &lease(1, 1), 99).unwrap().floor, 8);
        found.push(durable(3, 1, 1, 9, 15));
        let last = start(&found, &spec(3), &lease(2, 1), 99).unwrap();
        assert_eq!((last.floor, last.followed.len()), (8, 2));
        // Old slots of which one is missing prove nothing.
        found.remove(1);
        assert_eq!(start(&found, &spec(3), &lease(2, 1), 99).unwrap().floor, 0);
        assert_eq!(start(&found, &spec(3), &lease(0, 2), 99).unwrap().floor, 15, "its own floor does");
    }
}
