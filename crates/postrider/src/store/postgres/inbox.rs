//! Admission in the transaction of the effect.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use sqlx::{Postgres, Row as _, Transaction};
use uuid::Uuid;

use super::PostgresStore;
use super::error::db;
use crate::error::Result;
use crate::event::Event;
use crate::inbox::{Admission, Held, Inbox, Retries};

/// In the order of their ids, so that two batches with the same messages wait for each other in the same order.
const ADMIT_ALL: &str = "INSERT INTO postrider.inbox (consumer, message_id, topic, key, fingerprint) \
     SELECT $1, m.* FROM unnest($2::uuid[], $3::text[], $4::text[], $5::bigint[]) AS m (id, topic, key, fingerprint) \
     WHERE NOT EXISTS (SELECT 1 FROM postrider.held h WHERE h.consumer = $1 AND h.key = m.key) ORDER BY m.id \
     ON CONFLICT (consumer, message_id) DO NOTHING RETURNING message_id";

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
        .bind(event.topic.as_str())
        .bind(event.key.as_deref())
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
        let fingerprint = row.map(|row| row.try_get(0)).transpose().map_err(db)?;
        Ok(Admission::of_row(event, fingerprint))
    }

    async fn admit_all(&self, tx: &mut Self::Tx, consumer: &str, events: &[Arc<Event>]) -> Result<Vec<Admission>> {
        let ids: Vec<Uuid> = events.iter().map(|event| event.id).collect();
        let rows = sqlx::query(ADMIT_ALL)
            .bind(consumer)
            .bind(&ids)
            .bind(events.iter().map(|event| event.topic.as_str()).collect::<Vec<_>>())
            .bind(events.iter().map(|event| event.key.as_deref()).collect::<Vec<_>>())
            .bind(events.iter().map(|event| event.fingerprint()).collect::<Vec<_>>())
            .fetch_all(&mut **tx)
            .await
            .map_err(db)?;
        let mut admitted = HashMap::with_capacity(rows.len());
        for row in &rows {
            admitted.insert(row.try_get::<Uuid, _>(0).map_err(db)?, false);
        }
        if admitted.len() == events.len() {
            return Ok(vec![Admission::New; events.len()]);
        }
        let rows = sqlx::query(
            "SELECT message_id, fingerprint FROM postrider.inbox WHERE consumer = $1 AND message_id = ANY ($2)",
        )
        .bind(consumer)
        .bind(&ids)
        .fetch_all(&mut **tx)
        .await
        .map_err(db)?;
        let mut fingerprints: HashMap<Uuid, Option<i64>> = HashMap::with_capacity(rows.len());
        for row in &rows {
            fingerprints.insert(row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
        }
        Ok(events
            .iter()
            .map(|event| match admitted.get_mut(&event.id) {
                // The first of two with the same id.
                Some(is_taken) if !*is_taken && fingerprints.get(&event.id) == Some(&event.fingerprint()) => {
                    *is_taken = true;
                    Admission::New
                }
                _ => Admission::of_row(event, fingerprints.get(&event.id).copied()),
            })
            .collect())
    }

    async fn look(&self, consumer: &str, event: &Event) -> Result<Admission> {
        let row = sqlx::query(
            "SELECT i.message_id IS NOT NULL, i.fingerprint, EXISTS (SELECT 1 FROM postrider.held h \
               WHERE h.consumer = $1 AND h.key = $3) \
             FROM (SELECT 1) one LEFT JOIN postrider.inbox i ON i.consumer = $1 AND i.message_id = $2",
        )
        .bind(consumer)
        .bind(event.id)
        .bind(event.key.as_deref())
        .fetch_one(&self.pool)
        .await
        .map_err(db)?;
        let (has_row, fingerprint, is_held): (bool, Option<i64>, bool) =
            (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?, row.try_get(2).map_err(db)?);
        Ok(match has_row {
            true => Admission::of_row(event, Some(fingerprint)),
            false if is_held => Admission::Behind,
            false => Admission::New,
        })
    }

    async fn has_applied(&self, held: &Held) -> Result<bool> {
        let row = sqlx::query(
            "SELECT EXISTS (SELECT 1 FROM postrider.inbox WHERE consumer = $1 AND message_id = $2 AND state <> 'dead')",
        )
        .bind(&held.consumer)
        .bind(held.event.id)
        .fetch_one(&self.pool)
        .await;
        row.and_then(|row| row.try_get(0)).map_err(db)
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
