//! Newest wins, in the caller's transaction.

use async_trait::async_trait;
use sqlx::{PgConnection, Postgres, Transaction};

use super::error::db;
use crate::error::Result;
use crate::newest::{Change, Newest, NewestWriter, Stamp};

/// The row is locked before it is compared, so of two transactions the second sees what the first has committed.
const ADMIT: &str = "INSERT INTO postrider.newest AS n (consumer, entity, id, version, at, is_deleted) \
     VALUES ($1, $2, $3, $4, $5, $6) \
     ON CONFLICT (consumer, entity, id) DO UPDATE SET version = coalesce(excluded.version, n.version), \
     at = excluded.at, is_deleted = excluded.is_deleted, admitted_at = clock_timestamp() \
     WHERE CASE WHEN excluded.version IS NOT NULL AND n.version IS NOT NULL THEN excluded.version > n.version \
     ELSE excluded.at > n.at END";

#[async_trait]
impl NewestWriter for PgConnection {
    async fn admit(&mut self, newest: &Newest, id: &str, stamp: Stamp, change: Change) -> Result<bool> {
        let result = sqlx::query(ADMIT)
            .bind(newest.consumer())
            .bind(newest.entity())
            .bind(id)
            .bind(stamp.version)
            .bind(stamp.at)
            .bind(change == Change::Delete)
            .execute(self)
            .await
            .map_err(db)?;
        Ok(result.rows_affected() == 1)
    }
}

#[async_trait]
impl NewestWriter for Transaction<'_, Postgres> {
    async fn admit(&mut self, newest: &Newest, id: &str, stamp: Stamp, change: Change) -> Result<bool> {
        NewestWriter::admit(&mut **self, newest, id, stamp, change).await
    }
}
