//! Newest wins: a consumer that copies entities applies a change only when it is newer than what it has.
//!
//! Order per key makes this needless where it holds. It helps where changes of one entity come on different topics, from
//! different producers, or again after a replay: whatever the order of arrival, the newest change is the last applied.
//!
//! [`Newest::admit`] compares and writes in one statement of the caller's transaction, so the decision commits together
//! with the effect. A deletion leaves a tombstone, which refuses older changes that come late. Upkeep removes it after
//! [`crate::upkeep::Retention::tombstones`]; what is not deleted stays.

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use crate::error::{Error, Kind, Result};

/// Names and ids, like keys, have at most this many bytes.
const NAME_BYTES_MAX: usize = 255;

/// Tells a consumer's newest changes from older ones, for entities of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Newest {
    consumer: String,
    entity: String,
}

/// How new a change is. All changes of an entity should have a version, or none: a mixture is compared as well as can be,
/// but its end depends on the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// A number that the owner of the entity raises with each change. It decides when both changes have one.
    pub version: Option<i64>,
    /// When the change was made, counted in microseconds. It decides otherwise, and is as good as the producers' clocks.
    pub at: DateTime<Utc>,
}

/// What happened to the entity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It was made or changed.
    Upsert,
    /// It was deleted. It may be made again by a newer change.
    Delete,
}

impl Newest {
    /// For a consumer and a kind of entity, such as `customer`.
    pub fn of(consumer: impl Into<String>, entity: impl Into<String>) -> Self {
        Self { consumer: consumer.into(), entity: entity.into() }
    }

    /// True when the change is newer than all that were admitted before, and writes that down; then apply it in the same
    /// transaction. False when it is as old or older: there is nothing to apply. Waits while another transaction decides
    /// about the same entity.
    pub async fn admit<Tx: NewestWriter>(&self, tx: &mut Tx, id: &str, stamp: Stamp, change: Change) -> Result<bool> {
        for (what, text) in [("consumer", self.consumer.as_str()), ("entity", &self.entity), ("id", id)] {
            if text.is_empty() || text.len() > NAME_BYTES_MAX {
                let message = format!("newest wins: the {what} must have 1 to {NAME_BYTES_MAX} bytes");
                return Err(Error::new(Kind::Invalid, message));
            }
        }
        tx.admit(self, id, stamp, change).await
    }

    /// The consumer.
    pub fn consumer(&self) -> &str {
        &self.consumer
    }

    /// The kind of entity.
    pub fn entity(&self) -> &str {
        &self.entity
    }
}

/// A transaction that newest changes can be written into. Implemented for `sqlx` transactions and connections.
#[async_trait]
pub trait NewestWriter: Send {
    /// Writes the change, unless one is there that is as new or newer; says whether it did. Does not commit.
    async fn admit(&mut self, newest: &Newest, id: &str, stamp: Stamp, change: Change) -> Result<bool>;
}
