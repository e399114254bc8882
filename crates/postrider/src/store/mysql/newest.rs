//! Newest wins, in the caller's transaction.

use async_trait::async_trait;
use sqlx::{MySql, MySqlConnection, Transaction};

use super::error::db;
use super::now;
use crate::error::Result;
use crate::newest::{Change, Newest, NewestWriter, Stamp};

/// First a row that knows nothing, unless there is one: it is locked from now on, so of two transactions the second sees what
/// the first has committed, whatever its isolation.
const LOCK: &str = "INSERT INTO postrider_newest (consumer, entity, id) VALUES (?, ?, ?) \
     ON DUPLICATE KEY UPDATE id = VALUES(id)";

const ADMIT: &str = concat!(
    "UPDATE postrider_newest SET version = COALESCE(?, version), at = ?, is_deleted = ?, admitted_at = ",
    now!(),
    " WHERE consumer = ? AND entity = ? AND id = ? AND (at IS NULL \
       OR CASE WHEN ? IS NOT NULL AND version IS NOT NULL THEN ? > version ELSE ? > at END)"
);

#[async_trait]
impl NewestWriter for MySqlConnection {
    async fn admit(&mut self, newest: &Newest, id: &str, stamp: Stamp, change: Change) -> Result<bool> {
        sqlx::query(LOCK)
            .bind(newest.consumer())
            .bind(newest.entity())
            .bind(id)
            .execute(&mut *self)
            .await
            .map_err(db)?;
        let result = sqlx::query(ADMIT)
            .bind(stamp.version)
            .bind(stamp.at.naive_utc())
            .bind(change == Change::Delete)
            .bind(newest.consumer())
            .bind(newest.entity())
            .bind(id)
            .bind(stamp.version)
            .bind(stamp.version)
            .bind(stamp.at.naive_utc())
            .execute(self)
            .await
            .map_err(db)?;
        Ok(result.rows_affected() == 1)
    }
}

#[async_trait]
impl NewestWriter for Transaction<'_, MySql> {
    async fn admit(&mut self, newest: &Newest, id: &str, stamp: Stamp, change: Change) -> Result<bool> {
        NewestWriter::admit(&mut **self, newest, id, stamp, change).await
    }
}
