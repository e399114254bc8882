//! What a lane holds in memory, as a pure state machine: no I/O, no clock.
//!
//! Rows come in pages; each becomes an item that is *ready*, *behind* an item of its key that is ready or in flight,
//! or parked at once. A page is finished when all its items are confirmed or parked; the position may then move past
//! it, in page order.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::broker::Batching;
use crate::error::{Error, Result, Retry};
use crate::event::{Event, Text};
use crate::source::{Failure, Opened, Page, Park, ParkedKeys, ParkedRow, ParkedState, Position, Row, Settlement};

/// A batch must be sent within the broker's publish time-out on a slow network too.
const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;

/// An event on its way.
#[derive(Debug)]
pub(super) struct Item {
    /// The page it came with; `None` when it came from the side table.
    page: Option<u64>,
    pub id: i64,
    key: Option<Text>,
    attempts: u32,
    pub event: Arc<Event>,
}

/// What an operator should hear of an event that was set aside.
#[derive(Debug)]
pub(super) struct Notice {
    pub id: i64,
    pub state: ParkedState,
    pub attempts: u32,
    pub failure: Failure,
}

struct PageState {
    next: Position,
    open: usize,
}

/// Decides what to do with an event that failed for its own sake.
pub(super) struct RetryPolicy {
    pub attempts_max: u32,
    pub delay: Box<dyn Fn(u32) -> Duration + Send + Sync>,
}

pub(super) struct Pipeline {
    batching: Batching,
    policy: RetryPolicy,
    first_page: u64,
    pages: VecDeque<PageState>,
    ready: VecDeque<Item>,
    /// Keys that are ready or in flight, with what waits behind them. Not used when batches are atomic.
    behind: HashMap<Text, VecDeque<Item>>,
    /// Keys with rows in the side table, and how many rows.
    parked: HashMap<Text, u64>,
    parked_keyless: u64,
    /// Counts changes of the two above.
    parked_version: u64,
    /// Rows that are not to be published, if they are read again.
    discarded: HashSet<i64>,
    /// Items that came from the side table and are not settled yet.
    due_open: usize,
    settlement: Settlement,
    notices: Vec<Notice>,
}

impl Pipeline {
    /// `opened` is what the side table holds.
    pub fn new(batching: Batching, policy: RetryPolicy, opened: &Opened) -> Self {
        Self {
            batching,
            policy,
            first_page: 0,
            pages: VecDeque::new(),
            ready: VecDeque::new(),
            behind: HashMap::new(),
            parked: by_key(&opened.parked),
            parked_keyless: opened.parked.keyless,
            parked_version: 0,
            discarded: opened.discarded.iter().copied().collect(),
            due_open: 0,
            settlement: Settlement::default(),
            notices: Vec::new(),
        }
    }

    /// Changes whenever something is parked or published from the side table.
    pub fn parked_version(&self) -> u64 {
        self.parked_version
    }

    /// Takes over what the side table holds, unless it has changed since `version` (then it says no).
    pub fn set_parked(&mut self, parked: &ParkedKeys, version: u64) -> bool {
        if version != self.parked_version {
            return false;
        }
        self.parked = by_key(parked);
        self.parked_keyless = parked.keyless;
        true
    }

    /// Whether the side table may hold something to try again.
    pub fn has_parked(&self) -> bool {
        !self.parked.is_empty() || self.parked_keyless > 0
    }

    /// Whether nothing from the side table is on its way, and nothing about it waits to be settled.
    pub fn is_due_settled(&self) -> bool {
        self.due_open == 0 && self.settlement.park.is_empty() && self.settlement.published.is_empty()
    }

    /// Rows that were read and are neither confirmed nor parked.
    pub fn open(&self) -> usize {
        self.pages.iter().map(|page| page.open).sum::<usize>() + self.due_open
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes a page in. `check` says whether the broker can carry an event at all.
    pub fn accept(&mut self, page: Page, check: impl Fn(&Event) -> Result<()>) {
        let number = self.first_page + self.pages.len() as u64;
        self.pages.push_back(PageState { next: page.next, open: page.rows.len() });
        for row in page.rows {
            if self.discarded.contains(&row.id) {
                self.close(Some(number));
            } else if row.key.as_ref().is_some_and(|key| self.parked.contains_key(key)) {
                self.park_new(Some(number), row.id, row.key, ParkedState::Waiting, 0, None);
            } else {
                self.accept_row(Some(number), row, 0, &check);
            }
        }
    }

    /// Takes rows of the side table in, oldest first.
    pub fn accept_due(&mut self, rows: Vec<ParkedRow>, check: impl Fn(&Event) -> Result<()>) {
        self.due_open += rows.len();
        let mut failed_keys = Vec::new();
        for ParkedRow { row, attempts } in rows {
            if row.key.as_ref().is_some_and(|key| failed_keys.contains(key)) {
                self.due_open -= 1; // it stays waiting in the side table
                continue;
            }
            let key = row.key.clone();
            if !self.accept_row(None, row, attempts, &check) {
                failed_keys.extend(key);
            }
        }
    }

    /// Whether the row is on its way; if not, it failed at once.
    fn accept_row(&mut self, page: Option<u64>, row: Row, attempts: u32, check: impl Fn(&Event) -> Result<()>) -> bool {
        let Row { id, key, event } = row;
        match event.and_then(|event| check(&event).map(|()| event)) {
            Ok(event) => {
                self.enqueue(Item { page, id, key, attempts, event: Arc::new(event) });
                true
            }
            Err(error) => {
                self.fail(page, id, key, attempts, &error);
                false
            }
        }
    }

    fn enqueue(&mut self, item: Item) {
        if let (Batching::Independent, Some(key)) = (self.batching, &item.key) {
            match self.behind.entry(key.clone()) {
                Entry::Occupied(mut behind) => return behind.get_mut().push_back(item),
                Entry::Vacant(place) => place.insert(VecDeque::new()),
            };
        }
        self.ready.push_back(item);
    }

    /// Up to `limit` events to publish now, in order; fewer when they are large, but at least one.
    pub fn take(&mut self, limit: usize) -> Vec<Item> {
        let mut bytes = 0;
        let fits = |item: &&Item| {
            bytes += item.event.payload().len();
            bytes <= BATCH_BYTES_MAX
        };
        let count = self.ready.iter().take(limit).take_while(fits).count().max(1).min(self.ready.len());
        self.ready.drain(..count).collect()
    }

    /// Puts a batch back that the broker could not take; nothing is counted against its events.
    pub fn put_back(&mut self, batch: Vec<Item>) {
        for item in batch.into_iter().rev() {
            self.ready.push_front(item);
        }
    }

    /// The broker has the event durably.
    pub fn confirmed(&mut self, item: Item) {
        self.close(item.page);
        if item.page.is_none() {
            self.settlement.published.push(item.id);
            self.unpark(item.key.as_deref());
        }
        self.advance(item.key);
    }

    /// The broker refused the event for its own sake.
    pub fn refused(&mut self, item: Item, error: &Error) {
        let key = item.key.clone();
        self.fail(item.page, item.id, item.key, item.attempts, error);
        let Some(key) = key else { return };
        let mut behind = self.behind.remove(&key).unwrap_or_default();
        // With atomic batches what follows in the key is ready already.
        let (same_key, others) = self.ready.drain(..).partition(|item| item.key.as_ref() == Some(&key));
        self.ready = others;
        behind.extend::<VecDeque<Item>>(same_key);
        for waiting in behind {
            match waiting.page {
                Some(page) => self.park_new(Some(page), waiting.id, waiting.key, ParkedState::Waiting, 0, None),
                None => self.due_open -= 1, // it is still waiting in the side table
            }
        }
    }

    fn fail(&mut self, page: Option<u64>, id: i64, key: Option<Text>, attempts: u32, error: &Error) {
        let attempts = attempts + 1;
        let state = match error.kind().retry() {
            Retry::Later if attempts < self.policy.attempts_max => ParkedState::Retrying,
            Retry::Later | Retry::ByHand | Retry::Never => ParkedState::Failed,
        };
        let failure =
            Failure { kind: error.kind().as_str().to_owned(), message: format!("{error}; {}", error.remedy()) };
        self.notices.push(Notice { id, state, attempts, failure: failure.clone() });
        if page.is_some() {
            self.park_new(page, id, key, state, attempts, Some(failure));
        } else {
            let delay = (self.policy.delay)(attempts);
            self.settlement.park.push(Park { id, state, attempts, delay, failure: Some(failure) });
            self.due_open -= 1;
        }
    }

    fn park_new(
        &mut self,
        page: Option<u64>,
        id: i64,
        key: Option<Text>,
        state: ParkedState,
        attempts: u32,
        failure: Option<Failure>,
    ) {
        let delay = if state == ParkedState::Retrying { (self.policy.delay)(attempts) } else { Duration::ZERO };
        self.settlement.park.push(Park { id, state, attempts, delay, failure });
        self.parked_version += 1;
        match key {
            Some(key) => *self.parked.entry(key).or_default() += 1,
            None => self.parked_keyless += 1,
        }
        self.close(page);
    }

    fn unpark(&mut self, key: Option<&str>) {
        self.parked_version += 1;
        let Some(key) = key else {
            self.parked_keyless = self.parked_keyless.saturating_sub(1);
            return;
        };
        if let Some(count) = self.parked.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.parked.remove(key);
            }
        }
    }

    /// Lets the next event of the key follow.
    fn advance(&mut self, key: Option<Text>) {
        let Some(key) = key else { return };
        if let Entry::Occupied(mut behind) = self.behind.entry(key) {
            match behind.get_mut().pop_front() {
                Some(next) => self.ready.push_back(next),
                None => drop(behind.remove()),
            }
        }
    }

    fn close(&mut self, page: Option<u64>) {
        match page {
            Some(page) => {
                let index = (page - self.first_page) as usize;
                self.pages[index].open -= 1;
            }
            None => self.due_open -= 1,
        }
    }

    /// What to write down now: parks, published ones, and the position after the finished pages.
    pub fn settlement(&mut self) -> Settlement {
        while self.pages.front().is_some_and(|page| page.open == 0) {
            if let Some(page) = self.pages.pop_front() {
                self.first_page += 1;
                self.settlement.position = Some(page.next);
            }
        }
        std::mem::take(&mut self.settlement)
    }

    /// What was set aside since the last call.
    pub fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    /// Whether something other than the position waits to be written.
    pub fn has_urgent(&self) -> bool {
        !self.settlement.park.is_empty() || !self.settlement.published.is_empty()
    }

    /// Whether a finished page waits to be written.
    pub fn has_finished_page(&self) -> bool {
        self.settlement.position.is_some() || self.pages.front().is_some_and(|page| page.open == 0)
    }
}

fn by_key(parked: &ParkedKeys) -> HashMap<Text, u64> {
    parked.keys.iter().map(|(key, count)| (Text::from(key), *count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn pipeline(batching: Batching) -> Pipeline {
        without(batching, &[])
    }

    fn without(batching: Batching, discarded: &[i64]) -> Pipeline {
        let (position, parked) = (Position::at_id(0), ParkedKeys::default());
        let opened = Opened { position, parked, discarded: discarded.to_vec() };
        Pipeline::new(batching, RetryPolicy { attempts_max: 3, delay: Box::new(|_| Duration::ZERO) }, &opened)
    }

    fn row(id: i64, key: &str) -> Row {
        let event = Event::builder("t", "t").key(key).payload("text/plain", "x").build();
        Row { id, key: Some(key.into()), event }
    }

    fn page(rows: &[(i64, &str)]) -> Page {
        let rows: Vec<Row> = rows.iter().map(|(id, key)| row(*id, key)).collect();
        let next = Position::at_id(rows.last().map_or(0, |row| row.id));
        Page { rows, next, has_more: false }
    }

    fn refusal() -> Error {
        Error::new(Kind::Unroutable, "no queue")
    }

    fn ids(items: &[Item]) -> Vec<i64> {
        items.iter().map(|item| item.id).collect()
    }

    #[test]
    fn the_second_event_of_a_key_waits_for_the_first() {
        let mut pipeline = pipeline(Batching::Independent);
        pipeline.accept(page(&[(1, "a"), (2, "a"), (3, "b")]), |_| Ok(()));
        let mut batch = pipeline.take(10);
        assert_eq!(ids(&batch), [1, 3]);
        assert!(pipeline.take(10).is_empty());
        pipeline.confirmed(batch.remove(0));
        assert_eq!(ids(&pipeline.take(10)), [2]);
    }

    #[test]
    fn what_was_discarded_is_passed_over_when_it_is_read_again() {
        let mut pipeline = without(Batching::Independent, &[1, 2]);
        pipeline.accept(page(&[(1, "a")]), |_| Ok(()));
        assert_eq!(pipeline.settlement().position, Some(Position::at_id(1)));
        pipeline.accept(page(&[(2, "a"), (3, "a")]), |_| Ok(()));
        assert_eq!(ids(&pipeline.take(10)), [3]);
    }

    #[test]
    fn the_position_never_passes_an_open_event() {
        let mut pipeline = pipeline(Batching::Independent);
        pipeline.accept(page(&[(1, "a"), (2, "b")]), |_| Ok(()));
        pipeline.accept(page(&[(3, "c")]), |_| Ok(()));
        let mut batch = pipeline.take(10);
        let last = batch.pop().expect("three items");
        pipeline.confirmed(last);
        assert_eq!(pipeline.settlement().position, None, "the second page is finished, the first is not");
        for item in batch {
            pipeline.confirmed(item);
        }
        assert_eq!(pipeline.settlement().position, Some(Position::at_id(3)));
        assert_eq!(pipeline.open(), 0);
    }

    #[test]
    fn a_refused_event_takes_its_key_along_in_every_kind_of_batch() {
        for batching in [Batching::Independent, Batching::Atomic] {
            let mut pipeline = pipeline(batching);
            pipeline.accept(page(&[(1, "a"), (2, "a"), (3, "b"), (4, "a")]), |_| Ok(()));
            let first = pipeline.take(1).remove(0);
            pipeline.refused(first, &refusal());
            let rest = pipeline.take(10);
            assert_eq!(ids(&rest), [3], "{batching:?}: an event overtook the refused one");
            for item in rest {
                pipeline.confirmed(item);
            }
            pipeline.accept(page(&[(5, "a")]), |_| Ok(()));
            assert!(pipeline.take(10).is_empty(), "later events of the key wait too");
            let settlement = pipeline.settlement();
            let parked: Vec<(i64, ParkedState)> = settlement.park.iter().map(|park| (park.id, park.state)).collect();
            let waiting = ParkedState::Waiting;
            assert_eq!(parked, [(1, ParkedState::Retrying), (2, waiting), (4, waiting), (5, waiting)]);
            assert_eq!(settlement.position, Some(Position::at_id(5)));
        }
    }

    #[test]
    fn what_was_parked_follows_in_order_and_frees_its_key() {
        for batching in [Batching::Independent, Batching::Atomic] {
            let mut pipeline = pipeline(batching);
            let parked = ParkedKeys { keys: vec![("a".to_owned(), 2)], keyless: 0 };
            assert!(pipeline.set_parked(&parked, 0));
            let due = |id| ParkedRow { row: row(id, "a"), attempts: 1 };
            pipeline.accept_due(vec![due(1), due(2)], |_| Ok(()));
            // Refused once more: the one behind it goes back to waiting, in the side table.
            let head = pipeline.take(1).remove(0);
            pipeline.refused(head, &refusal());
            assert!(pipeline.take(10).is_empty());
            assert_eq!(pipeline.settlement().park.len(), 1);
            assert_eq!(pipeline.open(), 0);

            pipeline.accept_due(vec![due(1), due(2)], |_| Ok(()));
            for expected in [1, 2] {
                let item = pipeline.take(1).remove(0);
                assert_eq!(item.id, expected);
                pipeline.confirmed(item);
            }
            assert_eq!(pipeline.settlement().published, [1, 2]);
            assert!(!pipeline.has_parked());
            pipeline.accept(page(&[(3, "a")]), |_| Ok(()));
            assert_eq!(ids(&pipeline.take(10)), [3]);
        }
    }

    #[test]
    fn attempts_spent_is_failed_and_so_is_what_can_never_be_sent() {
        let mut pipeline = pipeline(Batching::Independent);
        pipeline.accept(page(&[(1, "a"), (2, "b")]), |event| match event.key() {
            Some("a") => Err(Error::new(Kind::TooLarge, "too large")),
            _ => Ok(()),
        });
        assert_eq!(pipeline.settlement().park[0].state, ParkedState::Failed);
        let mut item = pipeline.take(1).remove(0);
        item.attempts = 2;
        pipeline.refused(item, &refusal());
        assert_eq!(pipeline.settlement().park[0].state, ParkedState::Failed);
    }

    #[test]
    fn large_events_make_small_batches() {
        let mut pipeline = pipeline(Batching::Atomic);
        let large = vec![b'x'; BATCH_BYTES_MAX / 2 + 1];
        let rows = (1..=3)
            .map(|id| {
                let event = Event::builder("t", "t").key("k").payload("text/plain", large.clone()).build();
                Row { id, key: Some("k".into()), event }
            })
            .collect();
        pipeline.accept(Page { rows, next: Position::at_id(3), has_more: false }, |_| Ok(()));
        assert_eq!(pipeline.take(10).len(), 1);
    }
}
