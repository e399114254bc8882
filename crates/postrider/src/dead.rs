//! The desk: dead letters are listed, shown, replayed and discarded here.
//!
//! A replay gives a dead letter back to the one consumer that failed: it becomes a held message again, and the consumer's
//! slot tries it as it tries any other, in the order of its key. Applied, the dead letter is gone; failed, it is a dead
//! letter again, with its attempts added.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use crate::error::Result;

/// Which dead letters are meant. Everything that is given must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeadFilter {
    /// These numbers.
    pub ids: Option<Vec<i64>>,
    /// Of this consumer.
    pub consumer: Option<String>,
    /// Events of this type.
    pub kind: Option<String>,
    /// Errors of this type.
    pub error_type: Option<String>,
    /// Of this key.
    pub key: Option<String>,
    /// Of this tenant.
    pub tenant: Option<String>,
    /// Given up at or after this time.
    pub since: Option<DateTime<Utc>>,
    /// Given up before this time.
    pub until: Option<DateTime<Utc>>,
}

/// A dead letter in a list. It holds no payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeadView {
    /// Its number.
    pub id: i64,
    /// The consumer that could not apply it.
    pub consumer: String,
    /// The event's id.
    pub message_id: Uuid,
    /// `dead`, `replaying` or `discarded`.
    pub state: String,
    /// The event's topic.
    pub topic: Option<String>,
    /// The event's type; none for a message that is no event.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// The event's key.
    pub key: Option<String>,
    /// The event's tenant.
    pub tenant: Option<String>,
    /// The type of the last error.
    pub error_type: String,
    /// What it said.
    pub error: String,
    /// How often it was tried.
    pub attempts: i64,
    /// When it was given up.
    pub died_at: DateTime<Utc>,
}

/// Everything about a dead letter.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeadDetail {
    /// What a list shows.
    #[serde(flatten)]
    pub view: DeadView,
    /// The causes of the last error, outermost first.
    pub causes: Value,
    /// The attempts with their times and errors.
    pub history: Value,
    /// Where it came from.
    pub origin: Value,
    /// The event without its payload.
    pub envelope: Option<Value>,
    /// The headers of a message that is no event.
    pub headers: Option<Value>,
    /// The payload. Not serialised: whoever shows it must have been asked to.
    #[serde(skip)]
    pub payload: Vec<u8>,
}

/// Dead letters of one consumer with one type of error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeadCount {
    /// The consumer.
    pub consumer: String,
    /// The type of the error.
    pub error_type: String,
    /// `dead`, `replaying` or `discarded`.
    pub state: String,
    /// How many.
    pub count: i64,
    /// When the first was given up.
    pub oldest: DateTime<Utc>,
}

/// How the dead letters of a replay fare.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ReplayProgress {
    /// Applied, and gone.
    pub applied: u64,
    /// Given up again.
    pub failed: u64,
    /// Not decided yet.
    pub open: u64,
}

/// The desk of a store. Every change is written into the audit table, with who asked for it.
#[async_trait]
pub trait DeadLetters: Send + Sync {
    /// Dead letters after the number `after`, oldest first. Discarded ones are not listed.
    async fn dead_list(&self, filter: &DeadFilter, after: i64, limit: usize) -> Result<Vec<DeadView>>;

    /// One of them, or none.
    async fn dead_show(&self, id: i64) -> Result<Option<DeadDetail>>;

    /// Counts by consumer, error type and state.
    async fn dead_stats(&self) -> Result<Vec<DeadCount>>;

    /// Gives up to `limit` of them back to their consumers, oldest first, and returns their numbers. Skips what another
    /// operator replays at the same time, what is no event, and what has the id of another event.
    async fn dead_replay(&self, filter: &DeadFilter, limit: usize, actor: &str) -> Result<Vec<i64>>;

    /// How these fare.
    async fn dead_progress(&self, ids: &[i64]) -> Result<ReplayProgress>;

    /// Takes back those that no consumer has begun with; returns how many. They are dead letters as before.
    async fn dead_recall(&self, ids: &[i64], actor: &str) -> Result<u64>;

    /// Gives them up for good; returns how many. They are kept until their retention ends.
    async fn dead_discard(&self, filter: &DeadFilter, reason: &str, actor: &str) -> Result<u64>;
}
