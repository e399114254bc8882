//! How far a slot has come in one partition. Without any I/O.
//!
//! Two numbers are kept in Kafka, with every commit: the offset below which everything is finished, and, as the commit's
//! metadata, a *bound*: no message at or above it was ever given out. A holder raises the bound before it gives out more. So
//! when it ends without a word, its successor knows exactly which messages may have been in its hands, and treats those as
//! delivered before; one that kills the process is caught by that. A holder that ends in good order takes the bound away.

use std::collections::BTreeMap;

/// How far apart the lowest unfinished message and the highest delivered one may be. Bounds what is remembered of acks, and
/// what a successor has to doubt.
pub(super) const SPAN_MAX: i64 = 10_000;

/// The mark in front of the bound.
const MARK: &str = "postrider bound ";

/// What is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Commit {
    /// Everything below is finished.
    pub offset: i64,
    /// Nothing at or above was given out.
    pub bound: i64,
}

impl Commit {
    /// The bound as a commit's metadata; none when nothing is in anybody's hands.
    pub fn metadata(self) -> String {
        if self.bound > self.offset { format!("{MARK}{}", self.bound) } else { String::new() }
    }

    /// What was committed. Metadata that is not ours says nothing.
    pub fn read(offset: i64, metadata: &str) -> Self {
        let bound = metadata.strip_prefix(MARK).and_then(|bound| bound.parse().ok());
        Self { offset, bound: bound.unwrap_or(offset) }
    }
}

#[derive(Debug)]
pub(super) struct Progress {
    /// Delivered offsets, and whether they are finished. Starts with an unfinished one.
    delivered: BTreeMap<i64, bool>,
    /// One above the highest delivered offset.
    next: i64,
    /// Messages below may have been in the hands of a holder that ended without a word.
    doubtful: i64,
    /// How far the bound is put ahead.
    window: i64,
    committed: Commit,
}

impl Progress {
    /// Goes on from what was committed by the last holder. Until [`Progress::committed`] nothing may be delivered.
    pub fn new(last: Commit, window: i64) -> Self {
        Self {
            delivered: BTreeMap::new(),
            next: last.offset,
            doubtful: last.bound,
            window: window.max(1),
            committed: Commit { offset: last.offset, bound: last.offset },
        }
    }

    /// Whether this message may be given out now.
    pub fn may_deliver(&self, offset: i64) -> bool {
        let lowest = self.delivered.first_key_value();
        offset < self.committed.bound && lowest.is_none_or(|(lowest, _)| offset - lowest < SPAN_MAX)
    }

    /// Notes that a message is given out; returns whether it may have been before. `None` for one that cannot be: its
    /// offset was given out for another.
    pub fn deliver(&mut self, offset: i64) -> Option<bool> {
        if offset < self.next {
            return None;
        }
        self.delivered.insert(offset, false);
        self.next = offset + 1;
        Some(offset < self.doubtful)
    }

    /// A message is finished.
    pub fn finish(&mut self, offset: i64) {
        if let Some(is_finished) = self.delivered.get_mut(&offset) {
            *is_finished = true;
        }
        while let Some(first) = self.delivered.first_entry()
            && *first.get()
        {
            first.remove();
        }
    }

    /// One above the highest message that was given out.
    pub fn read_to(&self) -> i64 {
        self.next
    }

    /// The lowest unfinished offset.
    fn lowest(&self) -> i64 {
        self.delivered.first_key_value().map_or(self.next, |(offset, _)| *offset)
    }

    /// Whether the bound should be raised without delay, for a message at `offset`.
    pub fn is_near_bound(&self, offset: i64) -> bool {
        self.committed.bound - offset <= self.window / 2
    }

    /// What should be committed for messages up to `offset`, if anything is new.
    pub fn plan(&self, offset: Option<i64>) -> Option<Commit> {
        let ahead = offset.unwrap_or(0).max(self.next);
        let bound = match self.committed.bound - ahead <= self.window / 2 {
            true => (ahead + self.window).max(self.doubtful),
            false => self.committed.bound,
        };
        let commit = Commit { offset: self.lowest(), bound };
        (commit != self.committed).then_some(commit)
    }

    /// What is committed again although nothing is new, because Kafka forgets offsets.
    pub fn again(&self) -> Commit {
        Commit { offset: self.lowest(), ..self.committed }
    }

    /// Kafka has it.
    pub fn committed(&mut self, commit: Commit) {
        self.committed = commit;
    }

    /// What is committed at the end. What an earlier holder may have had and we did not get to remains doubtful.
    pub fn last(&self) -> Commit {
        let offset = self.lowest();
        Commit { offset, bound: self.doubtful.max(offset) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(last: Commit) -> Progress {
        let mut progress = Progress::new(last, 10);
        progress.committed(progress.plan(None).expect("a bound"));
        progress
    }

    #[test]
    fn only_what_is_below_the_lowest_unfinished_is_committed() {
        let mut progress = opened(Commit { offset: 5, bound: 5 });
        for offset in 5..10 {
            assert_eq!(progress.deliver(offset), Some(false));
        }
        assert_eq!(progress.deliver(7), None, "it was another message's");
        for offset in [9, 6, 7] {
            progress.finish(offset);
            assert_eq!(progress.plan(None).map_or(5, |commit| commit.offset), 5);
        }
        progress.finish(5);
        assert_eq!(progress.plan(None).expect("progress").offset, 8);
        progress.finish(8);
        assert_eq!(progress.plan(None).expect("progress").offset, 10);
    }

    #[test]
    fn nothing_is_given_out_above_the_bound() {
        let progress = Progress::new(Commit { offset: 5, bound: 5 }, 10);
        assert!(!progress.may_deliver(5), "before the first commit");
        let mut progress = opened(Commit { offset: 5, bound: 5 });
        assert!(progress.may_deliver(14) && !progress.may_deliver(15));
        assert!((5..9).all(|offset| progress.deliver(offset).is_some()));
        assert_eq!(progress.plan(None), None);
        assert!((9..15).all(|offset| progress.deliver(offset).is_some()));
        assert_eq!(progress.plan(None), Some(Commit { offset: 5, bound: 25 }));
        assert_eq!(progress.plan(Some(1_000)).expect("after a gap").bound, 1_010);
    }

    #[test]
    fn what_a_lost_holder_may_have_had_is_doubtful_until_it_was_delivered() {
        let mut progress = opened(Commit { offset: 5, bound: 8 });
        assert_eq!(progress.deliver(5), Some(true));
        progress.finish(5);
        assert_eq!(progress.last(), Commit { offset: 6, bound: 8 }, "the rest remains so");
        assert_eq!((progress.deliver(7), progress.deliver(8)), (Some(true), Some(false)));
        progress.finish(7);
        progress.finish(8);
        assert_eq!(progress.last().metadata(), "");
    }

    #[test]
    fn the_bound_survives_its_way_through_kafka() {
        let commit = Commit { offset: 5, bound: 15 };
        assert_eq!(Commit::read(5, &commit.metadata()), commit);
        assert_eq!(Commit::read(5, "somebody's own"), Commit { offset: 5, bound: 5 });
    }

    #[test]
    fn a_stuck_message_stops_its_partition_after_a_while() {
        let mut progress = opened(Commit { offset: 0, bound: 0 });
        progress.deliver(0);
        progress.committed(Commit { offset: 0, bound: i64::MAX });
        assert!(progress.may_deliver(SPAN_MAX - 1) && !progress.may_deliver(SPAN_MAX));
        progress.finish(0);
        assert!(progress.may_deliver(SPAN_MAX));
    }
}
