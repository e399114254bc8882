//! Admission: one row per consumer and event, in the transaction of the effect.

use async_trait::async_trait;
use sqlx::Row as _;

use super::{SqliteStore, Tx};
use crate::error::Result;
use crate::event::Event;
use crate::inbox::{Admission, Held, Inbox, Retries};

/// The transaction is a `BEGIN IMMEDIATE` on the writer that the whole process shares: effects run one after the other,
/// and a handler must not call the store itself while it holds `tx` (append events with `tx` instead).
#[async_trait]
impl Inbox for SqliteStore {
    type Tx = Tx;

    async fn begin(&self) -> Result<Tx> {
        self.write("the effect was not begun").await
    }

    async fn admit(&self, tx: &mut Tx, consumer: &str, event: &Event) -> Result<Admission> {
        const DOING: &str = "the event was not admitted";
        let id = event.id().hyphenated().to_string();
        // Whoever had inserted the row has ended: there is one writer.
        let admitted = sqlx::query(
            "INSERT INTO inbox (consumer, message_id, topic, key, fingerprint) SELECT ?1, ?2, ?3, ?4, ?5
              WHERE NOT EXISTS (SELECT 1 FROM held WHERE consumer = ?1 AND key = ?4) ON CONFLICT DO NOTHING",
        )
        .bind(consumer)
        .bind(&id)
        .bind(event.topic())
        .bind(event.key())
        .bind(event.fingerprint())
        .execute(&mut **tx)
        .await
        .map_err(self.failed(DOING))?;
        if admitted.rows_affected() == 1 {
            return Ok(Admission::New);
        }
        let row = sqlx::query("SELECT fingerprint FROM inbox WHERE consumer = ? AND message_id = ?")
            .bind(consumer)
            .bind(&id)
            .fetch_optional(&mut **tx)
            .await
            .map_err(self.failed(DOING))?;
        let Some(row) = row else { return Ok(Admission::Behind) };
        // Rows from before fingerprints were kept have none.
        let fingerprint: Option<i64> = row.try_get(0).map_err(self.failed(DOING))?;
        let is_same = fingerprint.is_none_or(|fingerprint| fingerprint == event.fingerprint());
        Ok(if is_same { Admission::Done } else { Admission::Forged })
    }

    async fn admit_held(&self, tx: &mut Tx, held: &Held) -> Result<Admission> {
        self.release(tx, held).await.map_err(self.failed("the held message was not admitted"))
    }

    async fn skip(&self, tx: &mut Tx, consumer: &str, event: &Event) -> Result<()> {
        sqlx::query("UPDATE inbox SET state = 'skipped' WHERE consumer = ? AND message_id = ?")
            .bind(consumer)
            .bind(event.id().hyphenated().to_string())
            .execute(&mut **tx)
            .await
            .map_err(self.failed("the event was not skipped"))?;
        Ok(())
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

    fn retries(&self) -> &dyn Retries {
        self
    }
}
