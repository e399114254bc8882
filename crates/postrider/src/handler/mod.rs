//! Handlers and the consumer that runs them.
//!
//! A [`Consumer`] receives messages, begins a transaction, admits the event in the inbox, gives event and transaction
//! to the [`Handler`], commits, and only then acks. Messages of one key are handled one after the other; different keys
//! in parallel. What fails is held in the store, acked, and tried again; see [`crate::inbox`].

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::relay::Backoff;

mod attempt;
mod claimed;
mod consumer;
mod desk;
mod router;
mod sending;
mod slot;
mod verdict;
mod worker;

pub use consumer::Consumer;
pub use router::{HandlerOf, Router};
pub use verdict::HandlerError;
#[cfg(feature = "http")]
pub(crate) use verdict::Verdict;

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

/// Applies many events in one transaction, for effects that are cheaper together.
#[async_trait]
pub trait BatchHandler<Tx: Send>: Send + Sync {
    /// Applies the events inside the open transaction `tx`: all of them, or none. Each was admitted; those of one key
    /// stand in their order. After an error each is given again alone, so that only what fails by itself is retried,
    /// rejected or skipped.
    ///
    /// Must not commit or roll back by itself.
    async fn handle_all(&self, tx: &mut Tx, events: &[Arc<Event>]) -> Result<(), HandlerError>;
}

/// Applies an event somewhere that has no part in the inbox's transaction: another service, for example.
#[async_trait]
pub trait RemoteHandler: Send + Sync {
    /// Applies one event there. When the process dies before the inbox knows of it, it happens again, so the other side
    /// must know events by their id.
    async fn deliver(&self, event: &Event) -> Result<(), HandlerError>;

    /// Why nothing is delivered at the moment, a breaker that is open for example, if so. Asked every few seconds, for
    /// people.
    fn trouble(&self) -> Option<String> {
        None
    }
}

#[async_trait]
impl<H: RemoteHandler + ?Sized> RemoteHandler for Arc<H> {
    async fn deliver(&self, event: &Event) -> Result<(), HandlerError> {
        self.as_ref().deliver(event).await
    }

    fn trouble(&self) -> Option<String> {
        self.as_ref().trouble()
    }
}

/// Where a broker keeps what a consumer could not apply, for whoever watches the broker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Place {
    /// Where people look for it on this broker: the queues `<consumer>_error` and `<consumer>_skipped` on RabbitMQ, the
    /// topics `<topic>.dlq` and `<topic>.skipped` on Kafka.
    #[default]
    Usual,
    /// Under this name.
    Named(String),
    /// Nowhere; it is in the store all the same.
    Nowhere,
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
    /// The most events that a [`BatchHandler`] gets at once.
    pub batch: u16,
    /// Where dead letters go beside the store.
    pub dead_letters_to: Place,
    /// Where events go that nobody handles.
    pub skipped_to: Place,
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
            batch: 100,
            dead_letters_to: Place::Usual,
            skipped_to: Place::Usual,
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
        if self.prefetch == 0 || self.concurrency == 0 || self.batch == 0 {
            return wrong("prefetch, concurrency and batch must be at least 1".to_owned());
        }
        for place in [&self.dead_letters_to, &self.skipped_to] {
            if let Place::Named(name) = place
                && (name.is_empty() || name.len() > 255 || *name == self.name)
            {
                return wrong(format!(
                    "the place {name:?} must have 1 to 255 bytes, and not be the consumer's own queue"
                ));
            }
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
