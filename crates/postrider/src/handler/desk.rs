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
    /// Hold a message behind the held ones of its key.
    HoldBehind(Message),
    /// Hold a message that may have ended a process.
    HoldSuspect(Message),
    /// Try a held message.
    Try(Box<Held>),
    /// Bury what is no event.
    Bury { tag: u64, undecodable: Undecodable, origin: Origin },
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
            let work = self.work(message);
            return self.ready.push_back(work);
        };
        if let Some(behind) = self.busy.get_mut(key) {
            return behind.push_back(message);
        }
        self.busy.insert(key.to_owned(), VecDeque::new());
        let work = self.work(message);
        self.ready.push_back(work);
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
        self.ready.pop_front()
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
    pub fn finished(&mut self, key: Option<&str>, state: KeyState) {
        let Some(key) = key else { return };
        match state {
            KeyState::Free => self.held.remove(key),
            KeyState::Held => self.held.insert(key.to_owned()),
        };
        let next = self.busy.get_mut(key).and_then(VecDeque::pop_front);
        match next {
            Some(message) => {
                let work = self.work(message);
                self.ready.push_back(work);
            }
            None => {
                self.busy.remove(key);
            }
        }
    }

    fn work(&self, message: Message) -> Work {
        let is_behind = message.event.key().is_some_and(|key| self.held.contains(key));
        match message {
            message if is_behind => Work::HoldBehind(message),
            message if message.is_redelivered => Work::HoldSuspect(message),
            message => Work::Apply(message),
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
        desk.finished(Some("a"), KeyState::Free);
        assert_eq!(tag(desk.next()), (2, "apply"));
    }

    #[test]
    fn what_follows_a_held_message_is_held_too() {
        let mut desk = Desk::default();
        desk.receive(message(1, "a", false));
        desk.receive(message(2, "a", false));
        desk.next();
        desk.finished(Some("a"), KeyState::Held);
        assert_eq!(tag(desk.next()), (2, "behind"));
        desk.finished(Some("a"), KeyState::Held);
        desk.receive(message(3, "a", false));
        assert_eq!(tag(desk.next()), (3, "behind"));
        desk.finished(Some("a"), KeyState::Held);

        desk.found(held(7, "a", false));
        desk.receive(message(4, "a", false));
        assert_eq!(tag(desk.next()), (7, "try"));
        assert_eq!(tag(desk.next()), (0, "nothing"), "the key is busy");
        desk.tried(7, false);
        desk.finished(Some("a"), KeyState::Free);
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
        desk.finished(Some("a"), KeyState::Held);
        desk.found(held(1, "a", true));
        desk.found(held(2, "b", true));
        assert_eq!(tag(desk.next()), (1, "try"));
        assert_eq!(tag(desk.next()), (0, "nothing"));
        desk.tried(1, true);
        desk.finished(Some("a"), KeyState::Free);
        desk.found(held(2, "b", true));
        assert_eq!(tag(desk.next()), (2, "try"));
    }
}
