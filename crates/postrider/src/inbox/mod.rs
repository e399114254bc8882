//! The inbox: admits each event once per consumer, in the transaction of its effect.
//!
//! Nothing is written before the effect, and nothing is acked before the commit. That, and nothing else, makes effects
//! happen once while delivery happens at least once.

use async_trait::async_trait;

use crate::error::Result;
use crate::event::Event;

/// A store that can run a consumer's effect. Called concurrently for different keys.
#[async_trait]
pub trait Inbox: Send + Sync + 'static {
    /// The transaction that admission and effect share.
    type Tx: Send;

    /// Begins the transaction.
    async fn begin(&self) -> Result<Self::Tx>;

    /// Inserts `(consumer, event id)`. `false` when it is there already: the effect has been committed before. When
    /// another transaction has inserted it and is still open, waits for its end.
    async fn admit(&self, tx: &mut Self::Tx, consumer: &str, event: &Event) -> Result<bool>;

    /// Commits admission and effect. Success means that both are on disk.
    async fn commit(&self, tx: Self::Tx) -> Result<()>;

    /// Forgets admission and effect.
    async fn rollback(&self, tx: Self::Tx) -> Result<()>;
}
