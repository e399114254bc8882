//! The inbox: admits each event once per consumer, in the transaction of its effect, and keeps what failed.
//!
//! Nothing is written before the effect, and nothing is acked before the commit. That, and nothing else, makes effects
//! happen once while delivery happens at least once.
//!
//! What cannot be applied now is *held*: [`Held`] messages lie in the store, the broker has its ack, and each is tried
//! again when its time has come. A message whose key has held messages is held behind them. What is tried in vain often
//! enough, or refused, becomes a [`DeadLetter`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::broker::{Origin, RawMessage};
use crate::error::Result;
use crate::event::Event;

/// Whether an effect may go ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It may; the inbox row is part of the transaction.
    New,
    /// It was committed before, or given up before.
    Done,
    /// Another event with the same id was applied before: the same id with other content.
    Forged,
    /// Earlier messages of its key are held.
    Behind,
}

impl Admission {
    /// Of an event that was not admitted, by the fingerprint beside its inbox row. Without a row it must wait.
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    pub(crate) fn of_row(event: &Event, fingerprint: Option<Option<i64>>) -> Self {
        match fingerprint {
            None => Admission::Behind,
            Some(fingerprint) if event.may_be(fingerprint) => Admission::Done,
            Some(_) => Admission::Forged,
        }
    }
}

/// A store that can run a consumer's effect. Called concurrently for different keys.
#[async_trait]
pub trait Inbox: Send + Sync + 'static {
    /// The transaction that admission and effect share.
    type Tx: Send + 'static;

    /// Begins the transaction.
    async fn begin(&self) -> Result<Self::Tx>;

    /// Inserts `(consumer, event id)`, unless it is there or earlier messages of the key are held. When another
    /// transaction has inserted it and is still open, waits for its end.
    async fn admit(&self, tx: &mut Self::Tx, consumer: &str, event: &Event) -> Result<Admission>;

    /// The same for many, in their order; one answer for each.
    async fn admit_all(&self, tx: &mut Self::Tx, consumer: &str, events: &[Arc<Event>]) -> Result<Vec<Admission>> {
        let mut admissions = Vec::with_capacity(events.len());
        for event in events {
            admissions.push(self.admit(tx, consumer, event).await?);
        }
        Ok(admissions)
    }

    /// What [`Inbox::admit`] would say now, without a transaction and without a trace.
    async fn look(&self, consumer: &str, event: &Event) -> Result<Admission>;

    /// Whether the inbox says that a held message was applied or skipped. One without a key may come from the broker as well,
    /// while it is held.
    async fn has_applied(&self, held: &Held) -> Result<bool>;

    /// [`Inbox::admit`] for a held message, which leaves the store together with its effect; the next of its key becomes due.
    /// [`Admission::Done`] when it is not held any more.
    async fn admit_held(&self, tx: &mut Self::Tx, held: &Held) -> Result<Admission>;

    /// Writes beside the inbox row that nobody handled the event.
    async fn skip(&self, tx: &mut Self::Tx, consumer: &str, event: &Event) -> Result<()>;

    /// Commits admission and effect. Success means that both are on disk.
    async fn commit(&self, tx: Self::Tx) -> Result<()>;

    /// Forgets admission and effect.
    async fn rollback(&self, tx: Self::Tx) -> Result<()>;

    /// Where held messages and dead letters are kept.
    fn retries(&self) -> &dyn Retries;
}

/// Which held messages a slot of a consumer works on: those with `shard % slots == slot`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part<'a> {
    /// The consumer.
    pub consumer: &'a str,
    /// The slot.
    pub slot: u32,
    /// Of how many.
    pub slots: u32,
}

/// Why a message is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why<'a> {
    /// Its handler failed, or asked for a pause. Due after `delay`; `attempts` are spent.
    Failed {
        /// How long to wait.
        delay: Duration,
        /// How many attempts were spent.
        attempts: u32,
        /// What happened. None for a pause.
        failure: Option<&'a Failed>,
    },
    /// Earlier messages of its key are held.
    Behind,
    /// It was delivered before and never acked: it may have ended the process that had it.
    Suspect,
}

/// What happened at one attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The kind of trouble, `handler`, `timeout`, `panic` …
    pub error_type: String,
    /// What was said.
    pub error: String,
    /// The causes of that, outermost first.
    #[serde(default)]
    pub causes: Vec<String>,
}

impl Failed {
    /// What can be kept: no database takes a NUL character in a text.
    pub fn new(error_type: impl Into<String>, error: impl Into<String>, causes: Vec<String>) -> Self {
        let causes = causes.into_iter().map(without_nul).collect();
        Self { error_type: without_nul(error_type.into()), error: without_nul(error.into()), causes }
    }
}

/// The text with a mark in the place of what cannot be stored.
pub(crate) fn without_nul(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

/// One attempt, as a dead letter shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// When it ended, on the database's clock.
    pub at: DateTime<Utc>,
    /// Why.
    #[serde(flatten)]
    pub failed: Failed,
}

/// A held message that is due.
#[derive(Debug, Clone)]
pub struct Held {
    /// Its place: held messages of a key are handled in the order of their numbers.
    pub id: i64,
    /// The consumer that holds it.
    pub consumer: String,
    /// The message.
    pub event: Event,
    /// How many attempts were begun.
    pub attempts: u32,
    /// Whether it may have ended the process that had it. Only one such message runs at a time.
    pub is_suspect: bool,
    /// Where it came from.
    pub origin: Origin,
}

/// A message that is given up.
#[derive(Debug, Clone)]
pub struct DeadLetter<'a> {
    /// The consumer that could not apply it.
    pub consumer: &'a str,
    /// The message.
    pub message: Body<'a>,
    /// Its id, or for one that is no event or has another's id, one that is always the same for the same content.
    pub id: Uuid,
    /// The last failure.
    pub failed: &'a Failed,
    /// Where it came from.
    pub origin: &'a Origin,
    /// The held message that it was, if it was one; it leaves the store in the same transaction.
    pub held: Option<i64>,
}

/// What a dead letter holds.
#[derive(Debug, Clone, Copy)]
pub enum Body<'a> {
    /// An event.
    Event(&'a Event),
    /// A message that is no event.
    Raw(&'a RawMessage),
}

impl<'a> Body<'a> {
    /// The event, if it is one.
    pub fn event(self) -> Option<&'a Event> {
        match self {
            Body::Event(event) => Some(event),
            Body::Raw(_) => None,
        }
    }

    /// The headers of a message that is no event.
    pub fn headers(self) -> Option<&'a BTreeMap<String, String>> {
        match self {
            Body::Event(_) => None,
            Body::Raw(raw) => Some(&raw.headers),
        }
    }

    /// The payload.
    pub fn payload(self) -> &'a [u8] {
        match self {
            Body::Event(event) => event.payload(),
            Body::Raw(raw) => &raw.payload,
        }
    }
}

/// A dead letter for the broker's own place.
#[derive(Debug, Clone)]
pub struct Unsent {
    /// Its number.
    pub id: i64,
    /// The message.
    pub message: Message,
    /// The last failure.
    pub failed: Failed,
    /// How often it was tried.
    pub attempts: u32,
    /// Where it came from.
    pub origin: Origin,
}

/// A [`Body`] of its own.
#[derive(Debug, Clone)]
pub enum Message {
    /// An event.
    Event(Box<Event>),
    /// A message that is no event.
    Raw(RawMessage),
}

impl Message {
    /// From the columns of a dead letter.
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    pub(crate) fn of_columns(envelope: Option<&str>, headers: Option<&str>, payload: Vec<u8>) -> Result<Self> {
        match envelope {
            Some(envelope) => Ok(Message::Event(Box::new(Event::of_envelope(envelope, payload)?))),
            None => {
                let headers = headers.and_then(|headers| serde_json::from_str(headers).ok()).unwrap_or_default();
                Ok(Message::Raw(RawMessage { headers, payload: payload.into() }))
            }
        }
    }

    /// What it holds.
    pub fn as_body(&self) -> Body<'_> {
        match self {
            Message::Event(event) => Body::Event(event),
            Message::Raw(raw) => Body::Raw(raw),
        }
    }
}

/// Held messages and dead letters, kept by a store. Called concurrently.
#[async_trait]
pub trait Retries: Send + Sync {
    /// Begins work on a slot's held messages. Those that were running when their instance died become suspects, and
    /// those that wait for nothing become due. Returns the keys that have held messages.
    async fn open(&self, part: Part<'_>) -> Result<Vec<String>>;

    /// Keeps a message, unless it is kept or was applied already. Then it may be acked.
    async fn hold(&self, consumer: &str, event: &Event, origin: &Origin, why: Why<'_>) -> Result<()>;

    /// Held messages of the slot whose time has come and that are the first of their key; the earliest first.
    async fn due(&self, part: Part<'_>, limit: usize) -> Result<Vec<Held>>;

    /// Makes those due that wait for one that is gone: it left while they came. Only where writers do not exclude each
    /// other.
    async fn free_stranded(&self, part: Part<'_>) -> Result<()> {
        let _ = part;
        Ok(())
    }

    /// Counts an attempt before it runs. False when the message is not held any more.
    async fn begin_attempt(&self, held: &Held) -> Result<bool>;

    /// The attempt failed: due again after `delay`. Without a failure it was a pause, and the attempt is not counted.
    async fn failed(&self, held: &Held, failed: Option<&Failed>, delay: Duration) -> Result<()>;

    /// Writes a dead letter and the inbox row that says so, once per message; the next of its key becomes due.
    async fn bury(&self, dead: &DeadLetter<'_>) -> Result<()>;

    /// Dead letters of the slot that were not sent to the broker's own place yet, oldest first.
    async fn unsent(&self, part: Part<'_>, limit: usize) -> Result<Vec<Unsent>>;

    /// This one was sent.
    async fn sent(&self, id: i64) -> Result<()>;

    /// Whether messages of the key are held.
    async fn has_key(&self, consumer: &str, key: &str) -> Result<bool>;
}
