//! What a reader of a log has in hand, and how far everything is done. Without any I/O.

use std::collections::VecDeque;

/// Messages in the order of their log, each with a mark that names its place there.
#[derive(Debug)]
pub(crate) struct Window<M> {
    entries: VecDeque<Entry<M>>,
    unsettled: usize,
}

#[derive(Debug)]
struct Entry<M> {
    tag: u64,
    mark: M,
    is_settled: bool,
}

impl<M> Default for Window<M> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), unsettled: 0 }
    }
}

impl<M> Window<M> {
    /// A message that was read. Tags rise. One that nobody here works on is settled at once.
    pub fn push(&mut self, tag: u64, mark: M, is_settled: bool) {
        debug_assert!(self.entries.back().is_none_or(|last| last.tag < tag), "tags rise");
        self.unsettled += usize::from(!is_settled);
        self.entries.push_back(Entry { tag, mark, is_settled });
    }

    /// A message is done. False when it is not in hand.
    pub fn settle(&mut self, tag: u64) -> bool {
        let Ok(at) = self.entries.binary_search_by_key(&tag, |entry| entry.tag) else { return false };
        let entry = &mut self.entries[at];
        let is_news = !entry.is_settled;
        entry.is_settled = true;
        self.unsettled -= usize::from(is_news);
        is_news
    }

    /// Lets go of everything up to the first message that is not done, and returns the last mark of that.
    pub fn advance(&mut self) -> Option<M> {
        let mut last = None;
        while self.entries.front().is_some_and(|entry| entry.is_settled) {
            last = self.entries.pop_front().map(|entry| entry.mark);
        }
        last
    }

    /// How many messages somebody works on.
    pub fn unsettled(&self) -> usize {
        self.unsettled
    }

    /// How many messages are remembered.
    pub fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_passes_nothing_that_is_not_done() {
        let mut window = Window::default();
        for (tag, mark) in [(1, "a"), (2, "b"), (5, "c"), (7, "d")] {
            window.push(tag, mark, tag == 5);
        }
        assert_eq!((window.unsettled(), window.len(), window.advance()), (3, 4, None));
        assert!(window.settle(2) && !window.settle(2) && !window.settle(6));
        assert_eq!(window.advance(), None, "the first one is not done");
        assert!(window.settle(1));
        assert_eq!(window.advance(), Some("c"), "what was settled at once is passed too");
        assert_eq!((window.unsettled(), window.len()), (1, 1));
        assert!(!window.settle(1), "it is gone");
        assert!(window.settle(7));
        assert_eq!((window.advance(), window.advance()), (Some("d"), None));
    }
}
