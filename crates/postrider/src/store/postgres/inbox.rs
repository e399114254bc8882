//! Admission in the transaction of the effect.

use async_trait::async_trait;
use sqlx::{Postgres, Row as _, Transaction};

use super::PostgresStore;
use super::error::db;
use crate::error::Result;
use crate::event::Event;
use crate::inbox::{Admission, Held, Inbox, Retries};

#[async_trait]
impl Inbox for PostgresStore {
    type Tx = Transaction<'static, Postgres>;

    async fn begin(&self) -> Result<Self::Tx> {
        self.pool.begin().await.map_err(db)
    }

    async fn admit(&self, tx: &mut Self::Tx, consumer: &str, event: &Event) -> Result<Admission> {
        let result = sqlx::query(
            "INSERT INTO postrider.inbox (consumer, message_id, topic, key, fingerprint) SELECT $1, $2, $3, $4, $5 \
             WHERE NOT EXISTS (SELECT 1 FROM postrider.held WHERE consumer = $1 AND key = $4) \
             ON CONFLICT (consumer, message_id) DO NOTHING",
        )
        .bind(consumer)
        .bind(event.id)
        .bind(&event.topic)
        .bind(&event.key)
        .bind(event.fingerprint())
        .execute(&mut **tx)
        .await
        .map_err(db)?;
        if result.rows_affected() == 1 {
            return Ok(Admission::New);
        }
        let row = sqlx::query("SELECT fingerprint FROM postrider.inbox WHERE consumer = $1 AND message_id = $2")
            .bind(consumer)
            .bind(event.id)
            .fetch_optional(&mut **tx)
            .await
            .map_err(db)?;
        let Some(row) = row else { return Ok(Admission::Behind) };
        // Rows from before fingerprints were kept have none.
        let fingerprint: Option<i64> = row.try_get(0).map_err(db)?;
        let is_same = fingerprint.is_none_or(|fingerprint| fingerprint == event.fingerprint());
        Ok(if is_same { Admission::Done } else { Admission::Forged })
    }

    async fn admit_held(&self, tx: &mut Self::Tx, held: &Held) -> Result<Admission> {
        self.release(tx, held).await
    }

    async fn skip(&self, tx: &mut Self::Tx, consumer: &str, event: &Event) -> Result<()> {
        sqlx::query("UPDATE postrider.inbox SET state = 'skipped' WHERE consumer = $1 AND message_id = $2")
            .bind(consumer)
            .bind(event.id)
            .execute(&mut **tx)
            .await
            .map_err(db)?;
        Ok(())
    }

    async fn commit(&self, mut tx: Self::Tx) -> Result<()> {
        // After an error that the handler swallowed PostgreSQL answers COMMIT with a rollback, and the driver takes that
        // for success. Any statement tells.
        sqlx::query("SELECT 1").execute(&mut *tx).await.map_err(|error| {
            db(error).context("the handler went on after a failed statement, so nothing can be committed")
        })?;
        tx.commit().await.map_err(db)
    }

    async fn rollback(&self, tx: Self::Tx) -> Result<()> {
        tx.rollback().await.map_err(db)
    }

    fn retries(&self) -> &dyn Retries {
        self
    }
}
