//! Newest wins, in the caller's transaction.

use async_trait::async_trait;
use chrono::SecondsFormat;
use sqlx::sqlite::Sqlite;
use sqlx::{SqliteConnection, Transaction};

use super::error;
use crate::error::Result;
use crate::newest::{Change, Newest, NewestWriter, Stamp};

const ADMIT: &str = "INSERT INTO newest AS n (consumer, entity, id, version, at, is_deleted) VALUES (?, ?, ?, ?, ?, ?)
     ON CONFLICT DO UPDATE SET version = coalesce(excluded.version, n.version),
            at = excluded.at, is_deleted = excluded.is_deleted, admitted_at = excluded.admitted_at
      WHERE CASE WHEN excluded.version IS NOT NULL AND n.version IS NOT NULL THEN excluded.version > n.version
            ELSE excluded.at > n.at END";

#[async_trait]
impl NewestWriter for SqliteConnection {
    async fn admit(&mut self, newest: &Newest, id: &str, stamp: Stamp, change: Change) -> Result<bool> {
        let result = sqlx::query(ADMIT)
            .bind(newest.consumer())
            .bind(newest.entity())
            .bind(id)
            .bind(stamp.version)
            .bind(stamp.at.to_rfc3339_opts(SecondsFormat::Micros, true))
            .bind(change == Change::Delete)
            .execute(self)
            .await
            .map_err(|error| error::classify(None, "the change was not admitted", error))?;
        Ok(result.rows_affected() == 1)
    }
}

#[async_trait]
impl NewestWriter for Transaction<'_, Sqlite> {
    async fn admit(&mut self, newest: &Newest, id: &str, stamp: Stamp, change: Change) -> Result<bool> {
        NewestWriter::admit(&mut **self, newest, id, stamp, change).await
    }
}
