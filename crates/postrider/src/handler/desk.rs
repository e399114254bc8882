//! What a slot has in hand: which message may be worked on now. Without any I/O.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use crate::broker::{Origin, Undecodable};
use crate::event::Event;
use crate::inbox::Held;

/// A message from the broker.
#[derive(Debug, Clone)]
pub(super) struct Message {
    pub tag: u64,
    pub event: Arc<Event>,
    pub origin: Origin,
    pub is_redelivered: bool,
}

/// Something to do. Work on one key is done one after the other.
#[derive(Debug)]
pub(super) enum Work {
    /// Apply a message.
    Apply(Message),
    /// Apply messages together; those of one key stand in their order.
    ApplyAll(Vec<Message>),
    /// Hold a message behind the held ones of its key.
    HoldBehind(Message),
    /// Hold a message that may have ended a process.
    HoldSuspect(Message),
    /// Try a held message.
    Try(Box<Held>),
    /// Bury what is no event.
    Bury { tag: u64, undecodable: Undecodable, origin: Origin },
}

impl Work {
    pub fn is_batch(&self) -> bool {
        matches!(self, Work::ApplyAll(_))
    }
}

/// What became of the key when work on it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyState {
    /// Nothing of it is held, as far as is known.
    Free,
    /// Messages of it are held.
    Held,
}

#[derive(Default)]
pub(super) struct Desk {
    ready: VecDeque<Work>,
    /// Messages that may be applied, each of another key or of none.
    fresh: VecDeque<Message>,
    /// Keys that are worked on, with the messages that came meanwhile.
    busy: HashMap<String, VecDeque<Message>>,
    /// Keys with held messages.
    held: HashSet<String>,
    /// Held messages that are worked on.
    trying: HashSet<i64>,
    is_suspect_running: bool,
}

impl Desk {
    /// `held` are the keys that have held messages.
    pub fn new(held: Vec<String>) -> Self {
        Self { held: held.into_iter().collect(), ..Self::default() }
    }

    pub fn receive(&mut self, message: Message) {
        let Some(key) = message.event.key() else {
            return self.make_ready(message);
        };
        if let Some(behind) = self.busy.get_mut(key) {
            return behind.push_back(message);
        }
        self.busy.insert(key.to_owned(), VecDeque::new());
        self.make_ready(message);
    }

    pub fn undecodable(&mut self, tag: u64, undecodable: Undecodable, origin: Origin) {
        self.ready.push_back(Work::Bury { tag, undecodable, origin });
    }

    /// A held message is due. One that cannot be tried now is found again later.
    pub fn found(&mut self, held: Held) {
        if self.trying.contains(&held.id) || (held.is_suspect && self.is_suspect_running) {
            return;
        }
        if let Some(key) = held.event.key() {
            if self.busy.contains_key(key) {
                return;
            }
            self.busy.insert(key.to_owned(), VecDeque::new());
            self.held.insert(key.to_owned());
        }
        self.is_suspect_running |= held.is_suspect;
        self.trying.insert(held.id);
        self.ready.push_back(Work::Try(Box::new(held)));
    }

    /// The next thing to do.
    pub fn next(&mut self) -> Option<Work> {
        self.ready.pop_front().or_else(|| self.fresh.pop_front().map(Work::Apply))
    }

    /// The next thing to do, where up to `max` messages are applied together, and those of a key at once.
    pub fn next_of_batches(&mut self, max: usize) -> Option<Work> {
        if let Some(work) = self.ready.pop_front() {
            return Some(work);
        }
        let mut batch = Vec::new();
        while batch.len() < max
            && let Some(message) = self.fresh.pop_front()
        {
            let behind = message.event.key().and_then(|key| self.busy.get_mut(key));
            batch.push(message);
            let Some(behind) = behind else { continue };
            while batch.len() < max
                && let Some(next) = behind.pop_front_if(|next| !next.is_redelivered)
            {
                batch.push(next);
            }
        }
        (!batch.is_empty()).then_some(Work::ApplyAll(batch))
    }

    /// Whether held messages are known of.
    pub fn has_held(&self) -> bool {
        !self.held.is_empty() || !self.trying.is_empty()
    }

    /// A held message was tried.
    pub fn tried(&mut self, id: i64, was_suspect: bool) {
        self.trying.remove(&id);
        self.is_suspect_running &= !was_suspect;
    }

    /// Work on a key has ended.
    pub fn finished(&mut self, key: &str, state: KeyState) {
        match state {
            KeyState::Free => self.held.remove(key),
            KeyState::Held => self.held.insert(key.to_owned()),
        };
        let next = self.busy.get_mut(key).and_then(VecDeque::pop_front);
        match next {
            Some(message) => self.make_ready(message),
            None => {
                self.busy.remove(key);
            }
        }
    }

    fn make_ready(&mut self, message: Message) {
        let is_behind = message.event.key().is_some_and(|key| self.held.contains(key));
        match message {
            message if is_behind => self.ready.push_back(Work::HoldBehind(message)),
            message if message.is_redelivered => self.ready.push_back(Work::HoldSuspect(message)),
            message => self.fresh.push_back(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(tag: u64, key: &str, is_redelivered: bool) -> Message {
        let event = Event::builder("t", "k").key(key).payload("text/plain", "x").build().unwrap();
        Message { tag, event: Arc::new(event), origin: Origin::default(), is_redelivered }
    }

    fn held(id: i64, key: &str, is_suspect: bool) -> Held {
        let event = Event::clone(&message(0, key, false).event);
        Held { id, consumer: "c".to_owned(), event, attempts: 1, is_suspect, origin: Origin::default() }
    }

    fn tag(work: Option<Work>) -> (u64, &'static str) {
        match work {
            Some(Work::Apply(message)) => (message.tag, "apply"),
            Some(Work::ApplyAll(messages)) => (messages.len() as u64, "apply all"),
            Some(Work::HoldBehind(message)) => (message.tag, "behind"),
            Some(Work::HoldSuspect(message)) => (message.tag, "suspect"),
            Some(Work::Try(held)) => (held.id as u64, "try"),
            Some(Work::Bury { tag, .. }) => (tag, "bury"),
            None => (0, "nothing"),
        }
    }

    #[test]
    fn a_key_is_worked_on_one_after_the_other() {
        let mut desk = Desk::default();
        for (n, key) in [(1, "a"), (2, "a"), (3, "b")] {
            desk.receive(message(n, key, false));
        }
        assert_eq!(tag(desk.next()), (1, "apply"));
        assert_eq!(tag(desk.next()), (3, "apply"));
        assert_eq!(tag(desk.next()), (0, "nothing"));
        desk.finished("a", KeyState::Free);
        assert_eq!(tag(desk.next()), (2, "apply"));
    }

    #[test]
    fn a_batch_has_each_key_in_its_order() {
        let mut desk = Desk::default();
        for (n, key) in [(1, "a"), (2, "b"), (3, "a"), (4, "a"), (5, "c")] {
            desk.receive(message(n, key, n == 4));
        }
        assert_eq!(tag(desk.next_of_batches(0)), (0, "nothing"));
        let Some(Work::ApplyAll(batch)) = desk.next_of_batches(3) else { panic!("a batch") };
        assert_eq!(batch.iter().map(|message| message.tag).collect::<Vec<_>>(), [1, 3, 2]);
        assert_eq!(tag(desk.next_of_batches(3)), (1, "apply all"), "of c");
        assert_eq!(tag(desk.next_of_batches(3)), (0, "nothing"), "a suspect is in no batch, and its key is busy");
        desk.finished("a", KeyState::Free);
        assert_eq!(tag(desk.next_of_batches(3)), (4, "suspect"));
    }

    #[test]
    fn what_follows_a_held_message_is_held_too() {
        let mut desk = Desk::default();
        desk.receive(message(1, "a", false));
        desk.receive(message(2, "a", false));
        desk.next();
        desk.finished("a", KeyState::Held);
        assert_eq!(tag(desk.next()), (2, "behind"));
        desk.finished("a", KeyState::Held);
        desk.receive(message(3, "a", false));
        assert_eq!(tag(desk.next()), (3, "behind"));
        desk.finished("a", KeyState::Held);

        desk.found(held(7, "a", false));
        desk.receive(message(4, "a", false));
        assert_eq!(tag(desk.next()), (7, "try"));
        assert_eq!(tag(desk.next()), (0, "nothing"), "the key is busy");
        desk.tried(7, false);
        desk.finished("a", KeyState::Free);
        assert_eq!(tag(desk.next()), (4, "apply"));
    }

    #[test]
    fn a_held_message_is_tried_once_at_a_time() {
        let mut desk = Desk::default();
        desk.found(held(1, "a", false));
        desk.found(held(1, "a", false));
        assert_eq!(tag(desk.next()), (1, "try"));
        assert_eq!(tag(desk.next()), (0, "nothing"));
    }

    #[test]
    fn suspects_run_one_at_a_time() {
        let mut desk = Desk::default();
        desk.receive(message(1, "a", true));
        assert_eq!(tag(desk.next()), (1, "suspect"));
        desk.finished("a", KeyState::Held);
        desk.found(held(1, "a", true));
        desk.found(held(2, "b", true));
        assert_eq!(tag(desk.next()), (1, "try"));
        assert_eq!(tag(desk.next()), (0, "nothing"));
        desk.tried(1, true);
        desk.finished("a", KeyState::Free);
        desk.found(held(2, "b", true));
        assert_eq!(tag(desk.next()), (2, "try"));
    }
}
