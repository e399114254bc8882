//! Who did what.

use async_trait::async_trait;
use serde_json::Value;
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row as _};

use super::MysqlStore;
use super::dead::value;
use super::error::db;
use crate::audit::{Audit, AuditLine};
use crate::error::Result;

/// Writes a line in the transaction of what was done.
pub(super) async fn write(tx: &mut MySqlConnection, actor: &str, action: &str, detail: &Value) -> Result<()> {
    sqlx::query("INSERT INTO postrider_audit (actor, action, detail) VALUES (?, ?, ?)")
        .bind(actor)
        .bind(action)
        .bind(detail.to_string())
        .execute(tx)
        .await
        .map_err(db)?;
    Ok(())
}

#[async_trait]
impl Audit for MysqlStore {
    async fn audit(&self, actor: &str, action: &str, detail: &Value) -> Result<()> {
        write(&mut *self.own.acquire().await.map_err(db)?, actor, action, detail).await
    }

    async fn audit_list(&self, before: Option<i64>, limit: usize) -> Result<Vec<AuditLine>> {
        let rows = sqlx::query(
            "SELECT id, at, actor, action, detail FROM postrider_audit WHERE id < ? ORDER BY id DESC LIMIT ?",
        )
        .bind(before.unwrap_or(i64::MAX))
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        let line = |row: &MySqlRow| -> Result<AuditLine, sqlx::Error> {
            Ok(AuditLine {
                id: row.try_get(0)?,
                at: row.try_get(1)?,
                actor: row.try_get(2)?,
                action: row.try_get(3)?,
                detail: value(row, 4)?.unwrap_or_default(),
            })
        };
        rows.iter().map(|row| line(row).map_err(db)).collect()
    }
}
