//! Who did what.

use async_trait::async_trait;
use serde_json::Value;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection};

use super::SqliteStore;
use super::dead::{time, value};
use crate::audit::{Audit, AuditLine};
use crate::error::Result;

/// Writes a line in the transaction of what was done.
pub(super) async fn write(
    connection: &mut SqliteConnection,
    actor: &str,
    action: &str,
    detail: &Value,
) -> Result<(), sqlx::Error> {
    sqlx::query("INSERT INTO audit (actor, action, detail) VALUES (?, ?, ?)")
        .bind(actor)
        .bind(action)
        .bind(detail.to_string())
        .execute(connection)
        .await?;
    Ok(())
}

#[async_trait]
impl Audit for SqliteStore {
    async fn audit(&self, actor: &str, action: &str, detail: &Value) -> Result<()> {
        const DOING: &str = "the audit was not written";
        let mut tx = self.write(DOING).await?;
        write(&mut tx, actor, action, detail).await.map_err(self.failed(DOING))?;
        tx.commit().await.map_err(self.failed(DOING))
    }

    async fn audit_list(&self, before: Option<i64>, limit: usize) -> Result<Vec<AuditLine>> {
        const DOING: &str = "the audit was not read";
        let rows = sqlx::query("SELECT id, at, actor, action, detail FROM audit WHERE id < ? ORDER BY id DESC LIMIT ?")
            .bind(before.unwrap_or(i64::MAX))
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.inner.reader)
            .await
            .map_err(self.failed(DOING))?;
        let line = |row: &SqliteRow| -> Result<AuditLine, sqlx::Error> {
            Ok(AuditLine {
                id: row.try_get(0)?,
                at: time(row, 1)?,
                actor: row.try_get(2)?,
                action: row.try_get(3)?,
                detail: value(row, 4)?.unwrap_or_default(),
            })
        };
        rows.iter().map(|row| line(row).map_err(self.failed(DOING))).collect()
    }
}
