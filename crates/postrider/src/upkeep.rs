//! Upkeep: partitions, retention and the figures that people and alerts read.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;
use uuid::Uuid;

use crate::broker::topic::Route;
use crate::error::Result;

/// What is kept how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Published outbox rows.
    pub outbox: Duration,
    /// Inbox rows. Longer than any broker can hold a message back, or a late duplicate is applied twice.
    pub inbox: Duration,
    /// Messages of the embedded broker that every consumer has acked.
    pub queue: Duration,
    /// Dead letters, replayed or not.
    pub dead: Duration,
}

impl Retention {
    /// Tombstones of [`crate::newest`]. A change may come late by as much as the inbox remembers, and then lie among the
    /// dead letters; a tombstone must be there when it is replayed.
    pub fn tombstones(&self) -> Duration {
        self.inbox.saturating_add(self.dead)
    }
}

impl Default for Retention {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        Self { outbox: 7 * DAY, inbox: 14 * DAY, queue: DAY, dead: 14 * DAY }
    }
}

impl Retention {
    /// How long stored payloads ([`crate::claim`]) are kept: an event may wait in the outbox, then at a broker for as long as
    /// the inbox remembers, then as a dead letter.
    pub fn claims(&self) -> Duration {
        self.outbox + self.inbox + self.dead
    }
}

/// What one upkeep run did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct UpkeepReport {
    /// Partitions created ahead of time.
    pub partitions_created: u32,
    /// Partitions dropped whole.
    pub partitions_dropped: u32,
    /// Outbox rows deleted one by one (SQLite and MySQL; on PostgreSQL only from the default partition).
    pub outbox_deleted: u64,
    /// Inbox rows deleted.
    pub inbox_deleted: u64,
    /// Messages of the embedded broker deleted.
    pub queue_deleted: u64,
    /// Dead letters deleted.
    pub dead_deleted: u64,
    /// Tombstones of deleted entities deleted.
    pub tombstones_deleted: u64,
}

/// The state of one outbox, from indexes and positions; never found by counting all rows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Backlog {
    /// Committed events that are not published yet, exact up to [`BACKLOG_COUNT_MAX`].
    pub pending: u64,
    /// The age of the oldest of them, parked ones included.
    pub oldest_secs: Option<u64>,
    /// Parked: tried again by themselves.
    pub retrying: u64,
    /// Parked: waiting behind an earlier event of their key.
    pub waiting: u64,
    /// Parked: a person must decide.
    pub failed: u64,
}

/// Counting ends here, so that a backlog of millions does not make `status` slow when it is needed most.
pub const BACKLOG_COUNT_MAX: u64 = 10_000;

/// How long lines of the audit are kept.
pub const AUDIT_KEPT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// An event in the side table that holds its key back, and how much waits behind it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ParkedView {
    /// Its number in the log.
    pub id: i64,
    /// Where it could not go.
    pub destination: String,
    /// The event's id.
    pub event_id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Its type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its key; without one it holds nothing back.
    pub key: Option<String>,
    /// `retrying` or `failed`.
    pub state: String,
    /// How often publishing it was tried.
    pub attempts: u32,
    /// When it is tried again; none if a person must decide.
    pub next_at: Option<DateTime<Utc>>,
    /// The kind of its error.
    pub error_type: Option<String>,
    /// What it said.
    pub error: Option<String>,
    /// How many events of its key wait behind it, exact up to 1,000.
    pub waiting: u64,
    /// When it was created.
    pub created_at: DateTime<Utc>,
}

/// How a consumer stands in this store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ConsumerView {
    /// Its name.
    pub name: String,
    /// Messages that are tried again by themselves, exact up to [`BACKLOG_COUNT_MAX`].
    pub retrying: u64,
    /// Messages that wait behind one of their key, exact up to [`BACKLOG_COUNT_MAX`].
    pub waiting: u64,
    /// The age of the oldest of both.
    pub oldest_secs: Option<u64>,
    /// Dead letters that nobody has decided on, exact up to [`BACKLOG_COUNT_MAX`].
    pub dead: u64,
    /// The age of the oldest of them.
    pub oldest_dead_secs: Option<u64>,
    /// With the embedded broker: messages it has not acked yet, by offsets (an upper bound).
    pub behind: Option<u64>,
}

/// The store's side of upkeep. Safe to run on several instances; runs are idempotent.
#[async_trait]
pub trait Upkeep: Send + Sync {
    /// Creates partitions ahead and removes what is past its retention and no longer needed.
    async fn maintain(&self, retention: &Retention) -> Result<UpkeepReport>;

    /// How much waits for one destination, and how long already.
    async fn backlog(&self, route: &Route) -> Result<Backlog>;

    /// Events that hold their keys back, or failed without a key, by their numbers above `after`. Those that wait are not
    /// listed; each holder says how many.
    async fn parked(&self, destination: &str, after: i64, limit: usize) -> Result<Vec<ParkedView>>;

    /// All consumers that this store has heard of, by name: through a pulse, a cursor, a held message or a dead letter.
    /// Relays that have dead letters are not among them.
    async fn consumers(&self) -> Result<Vec<ConsumerView>>;
}
