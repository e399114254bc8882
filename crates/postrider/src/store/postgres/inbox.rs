//! Admission in the transaction of the effect.

use async_trait::async_trait;
use sqlx::{Postgres, Transaction};

use super::PostgresStore;
use super::error::db;
use crate::error::Result;
use crate::event::Event;
use crate::inbox::Inbox;

#[async_trait]
impl Inbox for PostgresStore {
    type Tx = Transaction<'static, Postgres>;

    async fn begin(&self) -> Result<Self::Tx> {
        self.pool.begin().await.map_err(db)
    }

    async fn admit(&self, tx: &mut Self::Tx, consumer: &str, event: &Event) -> Result<bool> {
        let result = sqlx::query(
            "INSERT INTO postrider.inbox (consumer, message_id, topic, key) VALUES ($1, $2, $3, $4) \
             ON CONFLICT (consumer, message_id) DO NOTHING",
        )
        .bind(consumer)
        .bind(event.id)
        .bind(&event.topic)
        .bind(&event.key)
        .execute(&mut **tx)
        .await
        .map_err(db)?;
        Ok(result.rows_affected() == 1)
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
}
