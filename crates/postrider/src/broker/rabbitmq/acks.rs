//! Which messages may be acked together: AMQP acks everything up to a tag with one frame. Without any I/O.

use std::collections::BTreeSet;

/// The messages of one channel.
#[derive(Debug)]
pub(super) struct Acks {
    /// Delivered, and not settled.
    open: BTreeSet<u64>,
    /// Settled behind an open one; the broker does not know yet.
    untold: BTreeSet<u64>,
    /// No more than this are kept from the broker, which sends nothing new for them.
    untold_max: usize,
}

/// What to tell the broker.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// Everything up to this one.
    pub up_to: Option<u64>,
    /// These alone.
    pub alone: Vec<u64>,
}

impl Acks {
    /// For a channel that holds at most `prefetch` messages.
    pub fn new(prefetch: u16) -> Self {
        Self { open: BTreeSet::new(), untold: BTreeSet::new(), untold_max: usize::from(prefetch / 2) }
    }

    pub fn delivered(&mut self, tag: u64) {
        self.open.insert(tag);
    }

    /// One message; it is told of at once, and with it what it has held up.
    pub fn settled(&mut self, tag: u64) -> Told {
        if !self.untold.is_empty() {
            let mut told = self.settled_all(&[tag]);
            if self.untold.remove(&tag) {
                told.alone.push(tag);
            }
            return told;
        }
        self.open.remove(&tag);
        Told { up_to: None, alone: vec![tag] }
    }

    /// Messages that may be told of together.
    pub fn settled_all(&mut self, tags: &[u64]) -> Told {
        for tag in tags {
            self.open.remove(tag);
        }
        self.untold.extend(tags);
        let behind = match self.open.first() {
            Some(first) => self.untold.split_off(first),
            None => BTreeSet::new(),
        };
        let up_to = std::mem::replace(&mut self.untold, behind).pop_last();
        let alone = if self.untold.len() > self.untold_max { self.rest() } else { Vec::new() };
        Told { up_to, alone }
    }

    /// What was kept back.
    pub fn rest(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.untold).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_acked_at_once_and_what_is_behind_an_open_one_later() {
        let mut acks = Acks::new(8);
        (1..=8).for_each(|tag| acks.delivered(tag));
        assert_eq!(acks.settled_all(&[2, 1, 4]), Told { up_to: Some(2), alone: vec![] });
        assert_eq!(acks.settled_all(&[5, 6]), Told::default());
        assert_eq!(acks.settled(8), Told { up_to: None, alone: vec![8] }, "at once, although 3 is open");
        assert_eq!(acks.settled_all(&[3]), Told { up_to: Some(6), alone: vec![] });
        assert_eq!(acks.settled_all(&[7]), Told { up_to: Some(7), alone: vec![] });
        assert_eq!(acks.rest(), Vec::<u64>::new());

        (9..=11).for_each(|tag| acks.delivered(tag));
        assert_eq!(acks.settled_all(&[10, 11]), Told::default());
        assert_eq!(acks.settled(9), Told { up_to: Some(11), alone: vec![] }, "nothing is left behind");
        acks.delivered(12);
        assert_eq!(acks.settled(12), Told { up_to: None, alone: vec![12] });
    }

    #[test]
    fn the_broker_is_not_kept_waiting_for_a_slow_one() {
        let mut acks = Acks::new(4);
        (1..=4).for_each(|tag| acks.delivered(tag));
        assert_eq!(acks.settled_all(&[2, 3]), Told::default());
        assert_eq!(acks.settled_all(&[4]), Told { up_to: None, alone: vec![2, 3, 4] });
        (5..=6).for_each(|tag| acks.delivered(tag));
        assert_eq!(acks.settled_all(&[6]), Told::default());
        assert_eq!(acks.rest(), [6]);
    }
}
