//! Who did what.

use async_trait::async_trait;
use serde_json::Value;
use sqlx::{PgConnection, Row as _};

use super::PostgresStore;
use super::error::db;
use crate::audit::{Audit, AuditLine};
use crate::error::Result;

/// Writes a line in the transaction of what was done.
pub(super) async fn write(connection: &mut PgConnection, actor: &str, action: &str, detail: &Value) -> Result<()> {
    sqlx::query("INSERT INTO postrider.audit (actor, action, detail) VALUES ($1, $2, $3)")
        .bind(actor)
        .bind(action)
        .bind(detail)
        .execute(connection)
        .await
        .map_err(db)?;
    Ok(())
}

#[async_trait]
impl Audit for PostgresStore {
    async fn audit(&self, actor: &str, action: &str, detail: &Value) -> Result<()> {
        write(&mut *self.own.acquire().await.map_err(db)?, actor, action, detail).await
    }

    async fn audit_list(&self, before: Option<i64>, limit: usize) -> Result<Vec<AuditLine>> {
        let rows = sqlx::query(
            "SELECT id, at, actor, action, detail FROM postrider.audit WHERE id < $1 ORDER BY id DESC LIMIT $2",
        )
        .bind(before.unwrap_or(i64::MAX))
        .bind(limit as i64)
        .fetch_all(&self.own)
        .await
        .map_err(db)?;
        rows.iter()
            .map(|row| {
                Ok(AuditLine {
                    id: row.try_get(0).map_err(db)?,
                    at: row.try_get(1).map_err(db)?,
                    actor: row.try_get(2).map_err(db)?,
                    action: row.try_get(3).map_err(db)?,
                    detail: row.try_get(4).map_err(db)?,
                })
            })
            .collect()
    }
}
