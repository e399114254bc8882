//! The desk: dead letters are listed, shown, replayed and discarded here.
//!
//! A dead letter of a *consumer* is a message that it could not apply. A replay gives it back to the one consumer that
//! failed: it becomes a held message again, and the consumer's slot tries it as it tries any other, in the order of its key.
//!
//! A dead letter of the *relay* is an outbox event that the broker refused too often. The event stays parked and holds its
//! key back; a replay lets the relay try it again, a discard removes it so that its key flows on.
//!
//! Applied or published, the dead letter is gone; failed, it is a dead letter again, with its attempts added. [`Replay`]
//! does it for many, in stages.

use std::fmt;
use std::str::FromStr;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use crate::error::{Error, Kind, Result};

mod replay;

pub use replay::{REPLAY_RATE, Replay, Replayed, Stopped};

/// Who gave a message up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The relay: the broker refused it too often. The consumer is `relay/<destination>`.
    Relay,
    /// A consumer.
    Consumer,
}

impl Stage {
    /// The word in the database, in lists and in filters.
    pub fn as_str(self) -> &'static str {
        match self {
            Stage::Relay => "relay",
            Stage::Consumer => "consumer",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Stage {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "relay" => Ok(Stage::Relay),
            "consumer" => Ok(Stage::Consumer),
            _ => {
                Err(Error::new(Kind::Config, format!("there is no stage {word:?}"))
                    .with_remedy("write relay or consumer"))
            }
        }
    }
}

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
    /// Given up there.
    pub stage: Option<Stage>,
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
    /// Who gave it up.
    pub stage: Stage,
    /// The consumer that could not apply it; `relay/<destination>` of an event that could not be published.
    pub consumer: String,
    /// The event's id; all zeros for an outbox row whose id is no UUID.
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
    /// The length of its payload, which may be large: see [`DeadLetters::dead_payload`].
    pub payload_bytes: i64,
}

/// Dead letters of one consumer with one type of error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeadCount {
    /// Who gave them up.
    pub stage: Stage,
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

/// A dead letter that was given back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// Its number.
    pub id: i64,
    /// The consumer that tries it again.
    pub consumer: String,
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

    /// The payload of one of them, or none. That somebody looked is written down.
    async fn dead_payload(&self, id: i64, actor: &str) -> Result<Option<Vec<u8>>>;

    /// Counts by stage, consumer, error type and state.
    async fn dead_stats(&self) -> Result<Vec<DeadCount>>;

    /// How many match, counted up to `max`; for a progress bar.
    async fn dead_count(&self, filter: &DeadFilter, max: u64) -> Result<u64> {
        if let Some(ids) = &filter.ids {
            return Ok(max.min(ids.len() as u64));
        }
        let (mut count, mut after) = (0, 0);
        while count < max {
            let page = self.dead_list(filter, after, COUNT_PAGE).await?;
            count += page.len() as u64;
            match page.last() {
                Some(last) if page.len() == COUNT_PAGE => after = last.id,
                _ => break,
            }
        }
        Ok(count.min(max))
    }

    /// The database's clock, by which dead letters die.
    async fn dead_now(&self) -> Result<DateTime<Utc>>;

    /// Gives up to `limit` of them back to whoever failed, oldest first, and says which. Skips what another operator
    /// replays at the same time, what is no event, what has the id of another event, and what is not parked any more.
    async fn dead_replay(&self, filter: &DeadFilter, limit: usize, actor: &str) -> Result<Vec<Taken>>;

    /// How these fare.
    async fn dead_progress(&self, ids: &[i64]) -> Result<ReplayProgress>;

    /// Takes back those that nobody has begun with; returns how many. They are dead letters as before. An event that the
    /// relay has in hand at this moment may still be published; then its dead letter is gone.
    async fn dead_recall(&self, ids: &[i64], actor: &str) -> Result<u64>;

    /// Gives them up for good; returns how many. They are kept until their retention ends. A parked event is removed from
    /// the side table, and the next of its key follows.
    async fn dead_discard(&self, filter: &DeadFilter, reason: &str, actor: &str) -> Result<u64>;
}

/// Dead letters that are read at a time to be counted.
const COUNT_PAGE: usize = 1000;

/// How many numbers of a discard stand in the audit table; the rest is counted.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
const AUDITED_MAX: usize = 1000;

/// What the audit table says of a discard.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) fn discarded(ids: &[i64], reason: &str) -> Value {
    serde_json::json!({ "count": ids.len(), "reason": reason, "ids": &ids[..ids.len().min(AUDITED_MAX)] })
}
