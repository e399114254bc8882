//! Migrations, recorded in `postrider.migration`.

use async_trait::async_trait;
use sqlx::Row as _;

use super::PostgresStore;
use super::error::db;
use crate::error::{Kind, Result};
use crate::migrate::{Migrate, Migration, Schema, SchemaState};

/// The schema of PostgreSQL.
pub const SCHEMA: Schema = Schema {
    store: "PostgreSQL",
    record: RECORD,
    record_table: "postrider.migration",
    migrations: &[
        Migration { version: 1, name: "spine", sql: include_str!("migrations/0001_spine.sql") },
        Migration { version: 2, name: "retries", sql: include_str!("migrations/0002_retries.sql") },
        Migration { version: 3, name: "consumers", sql: include_str!("migrations/0003_consumers.sql") },
        Migration { version: 4, name: "routes", sql: include_str!("migrations/0004_routes.sql") },
        Migration { version: 5, name: "adopted", sql: include_str!("migrations/0005_adopted.sql") },
        Migration { version: 6, name: "operate", sql: include_str!("migrations/0006_operate.sql") },
    ],
};

const RECORD: &str = "CREATE SCHEMA IF NOT EXISTS postrider;
CREATE TABLE IF NOT EXISTS postrider.migration (
    version    int PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)";

/// Two instances that migrate at once take turns. Any number does; it must only never change.
const MIGRATE_LOCK: i64 = 7_062_611_490_211_870_001;

#[async_trait]
impl Migrate for PostgresStore {
    async fn schema(&self) -> Result<SchemaState> {
        let newest = sqlx::query("SELECT coalesce(max(version), 0) FROM postrider.migration")
            .fetch_one(&self.own)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db);
        let found = match newest {
            Ok(version) => version,
            Err(error) if error.kind() == Kind::NotMigrated => 0,
            Err(error) => return Err(error),
        };
        Ok(SchemaState { found, needed: SCHEMA.needed() })
    }

    async fn migrate(&self) -> Result<Vec<Migration>> {
        let state = self.schema().await?;
        if state.found > state.needed {
            return Err(state.newer());
        }
        let mut applied = Vec::new();
        if state.found < state.needed {
            let mut tx = self.own.begin().await.map_err(db)?;
            sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(MIGRATE_LOCK).execute(&mut *tx).await.map_err(db)?;
            sqlx::raw_sql(RECORD).execute(&mut *tx).await.map_err(db)?;
            // Another instance may have been faster while we waited for the lock.
            let found: i32 = sqlx::query("SELECT coalesce(max(version), 0) FROM postrider.migration")
                .fetch_one(&mut *tx)
                .await
                .and_then(|row| row.try_get(0))
                .map_err(db)?;
            for migration in SCHEMA.migrations.iter().filter(|migration| migration.version > found) {
                sqlx::raw_sql(migration.sql).execute(&mut *tx).await.map_err(|error| {
                    db(error).context(format!("migration {} {}", migration.version, migration.name))
                })?;
                sqlx::query("INSERT INTO postrider.migration (version, name) VALUES ($1, $2)")
                    .bind(migration.version)
                    .bind(migration.name)
                    .execute(&mut *tx)
                    .await
                    .map_err(db)?;
                applied.push(*migration);
            }
            tx.commit().await.map_err(db)?;
        }
        super::upkeep::create_partitions(&self.own).await?;
        Ok(applied)
    }
}
