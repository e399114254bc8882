//! The embedded broker: a log in the same database, nothing to install.
//!
//! The relay appends messages to the log; one writer at a time, so that offsets are in commit order and a consumer's
//! position is a plain offset. A consumer reads with a cursor per slot and commits the offset below its lowest
//! unfinished message, fenced by the slot's lease.

use std::sync::Arc;

use async_trait::async_trait;

use crate::error::Result;
use crate::event::Event;
use crate::handler::ConsumerSpec;
use crate::lease::Lease;

mod subscription;

mod broker;
pub use broker::Embedded;

/// A message of the log.
#[derive(Debug)]
pub struct Message {
    /// Its place in the log; rises in commit order.
    pub offset: i64,
    /// The event, or why the row is none.
    pub event: Result<Event>,
}

/// A slot that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenedSlot {
    /// Everything up to here is done.
    pub offset: i64,
    /// Whether its last holder ended without closing it.
    pub was_open: bool,
}

/// The log of the embedded broker, kept by a store. Called concurrently.
#[async_trait]
pub trait Queue: Send + Sync {
    /// Appends a batch in order, all or nothing, with [`crate::broker::topic::event_hash`] beside each. Offsets become
    /// visible in their order. Success means that it is on disk.
    async fn append(&self, batch: &[Arc<Event>]) -> Result<()>;

    /// Begins work on a consumer's slot: from now on only this lease's epoch may commit. Returns the offset up to
    /// which everything is done. A consumer that was never seen begins at the oldest message that is kept. When the
    /// consumer's number of slots has changed, all slots begin at the lowest offset of the old ones.
    async fn open(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<OpenedSlot>;

    /// Messages of the slot (`hash % slots = slot`) after `offset`, oldest first, at most `limit`, and the offset up to
    /// which the log was looked at. Topics are filtered by the caller.
    async fn read(&self, consumer: &ConsumerSpec, slot: u32, offset: i64, limit: usize) -> Result<(Vec<Message>, i64)>;

    /// Writes that everything up to `offset` is done. [`crate::Kind::LeaseLost`] when the slot was opened under a later
    /// epoch.
    async fn commit(&self, consumer: &ConsumerSpec, lease: &Lease, offset: i64) -> Result<()>;

    /// The same, and that the holder ends in good order.
    async fn leave(&self, consumer: &ConsumerSpec, lease: &Lease, offset: i64) -> Result<()>;

    /// Returns when a message was appended by this process or the database says so. May never return; cancel-safe.
    async fn appended(&self);
}
