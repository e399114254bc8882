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
        let fingerprint = row.map(|row| row.try_get(0)).transpose().map_err(self.failed(DOING))?;
        Ok(Admission::of_row(event, fingerprint))
    }

    async fn look(&self, consumer: &str, event: &Event) -> Result<Admission> {
        const DOING: &str = "the inbox was not read";
        let row = sqlx::query(
            "SELECT i.message_id IS NOT NULL, i.fingerprint,
                    EXISTS (SELECT 1 FROM held h WHERE h.consumer = ?1 AND h.key = ?3)
               FROM (SELECT 1) LEFT JOIN inbox i ON i.consumer = ?1 AND i.message_id = ?2",
        )
        .bind(consumer)
        .bind(event.id().hyphenated().to_string())
        .bind(event.key())
        .fetch_one(&self.inner.reader)
        .await
        .map_err(self.failed(DOING))?;
        let read = || -> std::result::Result<(bool, Option<i64>, bool), sqlx::Error> {
            Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))
        };
        let (has_row, fingerprint, is_held) = read().map_err(self.failed(DOING))?;
        Ok(match has_row {
            true => Admission::of_row(event, Some(fingerprint)),
            false if is_held => Admission::Behind,
            false => Admission::New,
        })
    }

    async fn has_applied(&self, held: &Held) -> Result<bool> {
        let row = sqlx::query(
            "SELECT EXISTS (SELECT 1 FROM inbox WHERE consumer = ? AND message_id = ? AND state <> 'dead')",
        )
        .bind(&held.consumer)
        .bind(held.event.id().hyphenated().to_string())
        .fetch_one(&self.inner.reader)
        .await;
        row.and_then(|row| row.try_get(0)).map_err(self.failed("the inbox was not read"))
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
