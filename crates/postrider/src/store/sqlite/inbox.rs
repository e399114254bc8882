//! Admission: one row per consumer and event, in the transaction of the effect.

use async_trait::async_trait;

use super::{SqliteStore, Tx};
use crate::error::Result;
use crate::event::Event;
use crate::inbox::Inbox;

/// The transaction is a `BEGIN IMMEDIATE` on the writer that the whole process shares: effects run one after the other,
/// and a handler must not call the store itself while it holds `tx` (append events with `tx` instead).
#[async_trait]
impl Inbox for SqliteStore {
    type Tx = Tx;

    async fn begin(&self) -> Result<Tx> {
        self.write("the effect was not begun").await
    }

    async fn admit(&self, tx: &mut Tx, consumer: &str, event: &Event) -> Result<bool> {
        // Whoever had inserted the row has ended: there is one writer.
        let admitted = sqlx::query(
            "INSERT INTO inbox (consumer, message_id, topic, key) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
        )
        .bind(consumer)
        .bind(event.id().hyphenated().to_string())
        .bind(event.topic())
        .bind(event.key())
        .execute(&mut **tx)
        .await
        .map_err(self.failed("the event was not admitted"))?;
        Ok(admitted.rows_affected() == 1)
    }

    async fn commit(&self, tx: Tx) -> Result<()> {
        tx.commit().await.map_err(self.failed("the effect was not committed"))?;
        // The effect may have appended events.
        self.inner.enqueued.notify_waiters();
        Ok(())
    }

    async fn rollback(&self, tx: Tx) -> Result<()> {
        tx.rollback().await.map_err(self.failed("the effect was not rolled back"))
    }
}
