//! The outbox: one insert in the caller's own transaction.
//!
//! [`Outbox::append`] takes the caller's `sqlx` transaction (or a connection inside one). Business change and event
//! commit together or not at all; there is nothing else to get right.

use async_trait::async_trait;

use crate::error::Result;
use crate::event::Event;
use crate::source::{Page, Position};

/// Writes events into outboxes.
#[derive(Debug, Clone, Default)]
pub struct Outbox {
    source: Option<String>,
}

impl Outbox {
    /// An outbox writer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Names this system as the source of events that do not name one.
    #[must_use]
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Validates the event and inserts it in the caller's transaction. The event is published after, and only if, that
    /// transaction commits.
    pub async fn append<Tx: OutboxWriter>(&self, tx: &mut Tx, event: &Event) -> Result<()> {
        self.append_all(tx, std::slice::from_ref(event)).await
    }

    /// The same for several events, with one statement; they keep their order.
    pub async fn append_all<Tx: OutboxWriter>(&self, tx: &mut Tx, events: &[Event]) -> Result<()> {
        for event in events {
            event.validate().map_err(|error| error.context(format!("event {} was not appended", event.id())))?;
        }
        match &self.source {
            Some(source) if events.iter().any(|event| event.source.is_none()) => {
                let mut events = events.to_vec();
                for event in &mut events {
                    event.source.get_or_insert_with(|| source.as_str().into());
                }
                tx.insert(&events).await
            }
            _ => tx.insert(events).await,
        }
    }
}

/// A transaction that events can be written into. Implemented for `sqlx` transactions and connections.
#[async_trait]
pub trait OutboxWriter: Send {
    /// Inserts validated events, in order. Does not commit.
    async fn insert(&mut self, events: &[Event]) -> Result<()>;
}

/// The outbox as the binary uses it: without a business transaction.
#[async_trait]
pub trait OutboxStore: Send + Sync {
    /// Appends validated events in a transaction of their own. Success means that they are on disk.
    async fn enqueue(&self, events: &[Event]) -> Result<()>;

    /// The position at the end of the log, or at its beginning: where `tail` starts.
    async fn position(&self, from_start: bool) -> Result<Position>;

    /// Committed events after a position, of all lanes.
    async fn tail(&self, from: &Position, limit: usize) -> Result<Page>;
}
