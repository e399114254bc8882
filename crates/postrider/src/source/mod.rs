//! The source: where the relay learns of committed events, and where it writes down how far it has come.
//!
//! A source is a log cut into lanes by the hash of the key. The relay opens a lane under a [`Lease`], reads pages in
//! order, and settles: it moves the position forward and parks what could not be published. Implementations are in
//! [`crate::store`]; the contract is tested by `postrider_testkit::conformance::source`.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, Result};
use crate::event::{Event, Text};
use crate::lease::Lease;
use crate::recovery::{LookBack, Mark};

/// How far a lane has been read. Opaque to everyone but the source that made it.
///
/// On PostgreSQL a position is a pair of snapshots: everything visible in `done` was handled, and of what is visible
/// in `target` (when a large window is read in pages) everything up to `last_id`. On SQLite ids are in commit order,
/// so `last_id` says it all. On MySQL it is the number of a page that the lane has handed out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Position {
    pub(crate) done: String,
    pub(crate) target: Option<String>,
    pub(crate) last_id: i64,
}

impl Position {
    /// A position in a log whose ids are in commit order.
    pub fn at_id(last_id: i64) -> Self {
        Self { last_id, ..Self::default() }
    }

    /// The last id that was handled, in the window that is being read.
    pub fn last_id(&self) -> i64 {
        self.last_id
    }
}

/// A row of the log. A row that cannot be read as an event is still a row: it must be parked, not skipped.
#[derive(Debug)]
pub struct Row {
    /// The row's number; rises in commit order within a key.
    pub id: i64,
    /// The key, also of a row that is no event.
    pub key: Option<Text>,
    /// The event, or why it is none.
    pub event: Result<Event, Error>,
}

/// What one read found.
#[derive(Debug)]
pub struct Page {
    /// In the order in which they must be published.
    pub rows: Vec<Row>,
    /// The position after all of them.
    pub next: Position,
    /// Whether there is more to read at once.
    pub has_more: bool,
}

/// What a lane knows when it is opened.
#[derive(Debug)]
pub struct Opened {
    /// Where the previous holder stopped.
    pub position: Position,
    /// What the side table holds of the lane.
    pub parked: ParkedKeys,
    /// Rows that a person has discarded, the newest [`DISCARDED_MAX`] of them. The side table does not hold them back any
    /// more, and those after the position are read again.
    pub discarded: Vec<i64>,
}

/// How many events of a lane stand in the side table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParkedKeys {
    /// Keys with parked events, and how many; later events of these keys must wait behind them.
    pub keys: Vec<(String, u64)>,
    /// How many parked events have no key.
    pub keyless: u64,
}

/// How many discarded rows a lane knows of. Those that matter lie between the position and the end of what was read.
pub const DISCARDED_MAX: i64 = 100_000;

/// Why an event stands in the side table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParkedState {
    /// It failed and is tried again at its time.
    Retrying,
    /// It waits behind an earlier event of its key.
    Waiting,
    /// Its attempts are spent; a person decides.
    Failed,
}

impl ParkedState {
    /// The word in the database, in `status` and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            ParkedState::Retrying => "retrying",
            ParkedState::Waiting => "waiting",
            ParkedState::Failed => "failed",
        }
    }
}

/// How an event failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// [`crate::Kind::as_str`] of the error.
    pub kind: String,
    /// The error and its remedy; no payload.
    pub message: String,
}

/// An entry for the side table: the first of its kind, or an update after one more attempt.
#[derive(Debug, Clone)]
pub struct Park {
    /// The row's number in the log.
    pub id: i64,
    /// Its new state.
    pub state: ParkedState,
    /// How often publishing it was tried.
    pub attempts: u32,
    /// When to try again, counted from the database's now.
    pub delay: Duration,
    /// Why; `None` for one that only waits.
    pub failure: Option<Failure>,
}

/// A parked row that may be tried now.
#[derive(Debug)]
pub struct ParkedRow {
    /// The row.
    pub row: Row,
    /// How often it was tried.
    pub attempts: u32,
}

/// What the relay writes down, in one transaction.
#[derive(Debug, Default)]
pub struct Settlement {
    /// The new position; everything before it was confirmed or is parked.
    pub position: Option<Position>,
    /// Log rows to copy into the side table, and parked rows to update.
    pub park: Vec<Park>,
    /// Parked rows that were published.
    pub published: Vec<i64>,
}

impl Settlement {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.position.is_none() && self.park.is_empty() && self.published.is_empty()
    }
}

/// A log of committed events with fenced positions. One relay task calls it per lane; different lanes concurrently.
#[async_trait]
pub trait Source: Send + Sync {
    /// Begins work on the lane: from now on only this lease's epoch may settle it. Idempotent.
    /// A lane that was never opened begins before the first event.
    async fn open(&self, lease: &Lease) -> Result<Opened>;

    /// Whether the database is the one that the relay knows, or was restored: asked before a lane is opened, with the newest
    /// event that is known to have been published.
    async fn look_back(&self, published: Option<&Mark>) -> Result<LookBack> {
        let _ = published;
        Ok(LookBack::default())
    }

    /// Reads up to `limit` rows after `from`: every event committed since, each once, in commit order within a key.
    /// Changes nothing.
    async fn read(&self, lease: &Lease, from: &Position, limit: usize) -> Result<Page>;

    /// Writes the settlement, all of it or nothing; durably, but for a position alone, of which a crash of the server may
    /// take the last moments back. A park that only waits leaves a row that is parked already
    /// as it is. Fails with [`crate::Kind::LeaseLost`], and writes nothing,
    /// when the lane was opened under a later epoch. Idempotent.
    async fn settle(&self, lease: &Lease, settlement: &Settlement) -> Result<()>;

    /// What the side table holds of the lane. Asked from time to time, to notice that a person has discarded something.
    async fn parked(&self, lease: &Lease) -> Result<ParkedKeys>;

    /// Parked rows that may be tried now, oldest first. A row is due when it is the oldest of its key and is waiting,
    /// or retrying and its time has come; the rows waiting behind it follow it, up to `limit` in all.
    async fn due(&self, lease: &Lease, limit: usize) -> Result<Vec<ParkedRow>>;

    /// Ends this process's work on the lane and frees what it holds for it. The position stays. Idempotent.
    async fn close(&self, lease: &Lease);

    /// Says that the lane is about to sleep (or is awake again), so that a commit from now on must (or need not)
    /// wake it. After saying that it sleeps the caller reads once more before it does.
    async fn set_asleep(&self, lease: &Lease, is_asleep: bool) -> Result<()>;

    /// Returns when a commit asks for attention. May never return; cancel-safe.
    async fn woken(&self);

    /// Whether every event that is committed after the last read, which gave `next`, will wake the lane. A guess that is wrong
    /// delays an event until the next look.
    async fn will_wake(&self, lease: &Lease, next: &Position) -> bool {
        let _ = (lease, next);
        false
    }
}
