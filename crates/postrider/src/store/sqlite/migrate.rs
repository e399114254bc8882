//! Applies `migrations/` and records them in `postrider_migration`.

use async_trait::async_trait;
use sqlx::{Row as _, SqliteConnection};

use super::SqliteStore;
use crate::error::Result;
use crate::migrate::{Migrate, Migration, Schema, SchemaState};

/// The schema of SQLite.
pub const SCHEMA: Schema = Schema {
    store: "SQLite",
    record: RECORD,
    record_table: "postrider_migration",
    migrations: &[
        Migration { version: 1, name: "spine", sql: include_str!("migrations/0001_spine.sql") },
        Migration { version: 2, name: "retries", sql: include_str!("migrations/0002_retries.sql") },
        Migration { version: 3, name: "consumers", sql: include_str!("migrations/0003_consumers.sql") },
        Migration { version: 4, name: "routes", sql: include_str!("migrations/0004_routes.sql") },
        Migration { version: 5, name: "operate", sql: include_str!("migrations/0005_operate.sql") },
    ],
};

const RECORD: &str = "CREATE TABLE IF NOT EXISTS postrider_migration (
    version    INTEGER PRIMARY KEY,
    name       TEXT NOT NULL,
    applied_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f', 'now') || '000Z')
) STRICT";

#[async_trait]
impl Migrate for SqliteStore {
    async fn schema(&self) -> Result<SchemaState> {
        const DOING: &str = "the schema's version was not read";
        let mut tx = self.read(DOING).await?;
        let state = state(&mut tx).await.map_err(self.failed(DOING))?;
        tx.rollback().await.map_err(self.failed(DOING))?;
        Ok(state)
    }

    async fn migrate(&self) -> Result<Vec<Migration>> {
        const DOING: &str = "the migration was not applied";
        // One lock around looking and applying: of two instances the second finds nothing left to do.
        let mut tx = self.write(DOING).await?;
        let state = state(&mut tx).await.map_err(self.failed(DOING))?;
        if state.found > state.needed {
            tx.rollback().await.map_err(self.failed(DOING))?;
            return Err(state.newer().context(self.path().display()));
        }
        let missing: Vec<Migration> =
            SCHEMA.migrations.iter().filter(|migration| migration.version > state.found).copied().collect();
        if missing.is_empty() {
            tx.rollback().await.map_err(self.failed(DOING))?;
            return Ok(missing);
        }
        sqlx::query(RECORD).execute(&mut *tx).await.map_err(self.failed(DOING))?;
        for migration in &missing {
            sqlx::raw_sql(migration.sql).execute(&mut *tx).await.map_err(self.failed(DOING))?;
            sqlx::query("INSERT INTO postrider_migration (version, name) VALUES (?, ?)")
                .bind(migration.version)
                .bind(migration.name)
                .execute(&mut *tx)
                .await
                .map_err(self.failed(DOING))?;
        }
        tx.commit().await.map_err(self.failed(DOING))?;
        Ok(missing)
    }
}

async fn state(connection: &mut SqliteConnection) -> Result<SchemaState, sqlx::Error> {
    let exists = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'postrider_migration'";
    let exists: i64 = sqlx::query(exists).fetch_one(&mut *connection).await?.try_get(0)?;
    let found: i32 = if exists == 0 {
        0
    } else {
        sqlx::query("SELECT coalesce(max(version), 0) FROM postrider_migration")
            .fetch_one(connection)
            .await?
            .try_get(0)?
    };
    Ok(SchemaState { found, needed: SCHEMA.needed() })
}
