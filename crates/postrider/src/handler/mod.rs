//! Handlers and the consumer that runs them.
//!
//! A [`Consumer`] receives messages, begins a transaction, admits the event in the inbox, gives event and transaction
//! to the [`Handler`], commits, and only then acks. Messages of one key are handled one after the other; different keys
//! in parallel. What fails is held in the store, acked, and tried again; see [`crate::inbox`].

use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::relay::Backoff;

mod consumer;
mod desk;
mod router;
mod slot;
mod verdict;

pub use consumer::Consumer;
pub use router::{HandlerOf, Router};
pub use verdict::HandlerError;

/// Applies an event. `Tx` is the inbox's transaction, a `sqlx::Transaction` for the stores of this crate.
#[async_trait]
pub trait Handler<Tx: Send>: Send + Sync {
    /// Applies one event inside the open transaction `tx`, and may append further events to the outbox in it. An error
    /// rolls everything back, and says what happens next: see [`HandlerError`]. Until an event is applied or given up, the
    /// later events of its key wait.
    ///
    /// Must not commit or roll back by itself. Effects outside of `tx` may happen more than once.
    async fn handle(&self, tx: &mut Tx, event: &Event) -> Result<(), HandlerError>;
}

/// Which messages a consumer wants, and how many at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerSpec {
    /// The consumer's name: its queue or group, and its inbox.
    pub name: String,
    /// Topic patterns (`orders.*`, `#`).
    pub topics: Vec<String>,
    /// How many messages one slot holds unacked.
    pub prefetch: u16,
    /// How many handlers run at once in one slot; never more than one for a key.
    pub concurrency: u16,
    /// Into how many parts the messages are cut by the hash of their key. Instances share slots, so at most this many
    /// instances work at once; the others stand by.
    pub slots: u32,
    /// How often a failed event is tried again before it becomes a dead letter.
    pub retries: u32,
    /// The waits between attempts.
    pub backoff: Backoff,
    /// How long the handler may take for one attempt.
    pub handler_timeout: Duration,
}

/// The slots of a sharded consumer must divide the hash space that publishers put into messages.
pub const SLOTS_MAX: u32 = 32;

impl ConsumerSpec {
    /// A consumer with the default limits.
    pub fn new(name: impl Into<String>, topics: &[&str]) -> Self {
        Self {
            name: name.into(),
            topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
            prefetch: 256,
            concurrency: 16,
            slots: 1,
            retries: 3,
            // 1 s, 2 s, 4 s.
            backoff: Backoff { jitter: Duration::ZERO, ..Backoff::default() },
            handler_timeout: Duration::from_secs(30),
        }
    }

    /// Checks the limits.
    pub fn validate(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::new(Kind::Config, format!("consumer {:?}: {what}", self.name)));
        let is_name = !self.name.is_empty()
            && self.name.len() <= 100
            && self.name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if !is_name {
            return wrong("a name has 1 to 100 letters, digits, '-', '_' or '.'".to_owned());
        }
        if self.topics.is_empty() {
            return wrong("topics is empty; use [\"#\"] for everything".to_owned());
        }
        if let Some(topic) = self.topics.iter().find(|topic| topic.is_empty() || topic.len() > 255) {
            return wrong(format!("the topic pattern {topic:?} must have 1 to 255 bytes"));
        }
        if self.prefetch == 0 || self.concurrency == 0 {
            return wrong("prefetch and concurrency must be at least 1".to_owned());
        }
        if self.slots == 0 || self.slots > SLOTS_MAX {
            return wrong(format!("slots must be 1 to {SLOTS_MAX}"));
        }
        if self.handler_timeout.is_zero() {
            return wrong("handler_timeout must be longer than zero".to_owned());
        }
        Ok(())
    }

    /// Whether the consumer wants messages of this topic.
    pub fn wants(&self, topic: &str) -> bool {
        self.topics.iter().any(|pattern| crate::broker::topic::matches(pattern, topic))
    }

    /// The lease group whose slots instances share.
    pub fn group(&self) -> String {
        format!("consumer/{}", self.name)
    }
}
