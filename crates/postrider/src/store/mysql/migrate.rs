//! Migrations, recorded in `postrider_migration`.
//!
//! DDL commits by itself here. Every statement of a migration may be run again, and its version is written last: one that died
//! half-way is done again from its beginning.

use async_trait::async_trait;
use sqlx::{MySqlConnection, Row as _};

use super::MysqlStore;
use super::error::db;
use crate::error::{Error, Kind, Result};
use crate::migrate::{Migrate, Migration, Schema, SchemaState};

/// The schema of MySQL and MariaDB.
pub const SCHEMA: Schema = Schema {
    store: "MySQL or MariaDB",
    record: RECORD,
    record_table: "postrider_migration",
    migrations: &[
        Migration { version: 1, name: "spine", sql: include_str!("migrations/0001_spine.sql") },
        Migration { version: 2, name: "consumers", sql: include_str!("migrations/0002_consumers.sql") },
        Migration { version: 3, name: "status", sql: include_str!("migrations/0003_status.sql") },
        Migration { version: 4, name: "adopted", sql: include_str!("migrations/0004_adopted.sql") },
        Migration { version: 5, name: "operate", sql: include_str!("migrations/0005_operate.sql") },
    ],
};

const RECORD: &str = "CREATE TABLE IF NOT EXISTS postrider_migration (
    version    INT          NOT NULL PRIMARY KEY,
    name       VARCHAR(255) NOT NULL,
    applied_at DATETIME(6)  NOT NULL DEFAULT (UTC_TIMESTAMP(6))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4";

/// Two instances that migrate at once take turns. The lock belongs to the session and is the server's, hence the database in
/// its name.
const LOCK: &str = "SELECT GET_LOCK(CONCAT('postrider/', MD5(DATABASE())), ?)";
const UNLOCK: &str = "DO RELEASE_LOCK(CONCAT('postrider/', MD5(DATABASE())))";
/// How long an instance waits for another one's migration.
const LOCK_WAIT_SECS: i64 = 20;

#[async_trait]
impl Migrate for MysqlStore {
    async fn schema(&self) -> Result<SchemaState> {
        let mut connection = self.own.acquire().await.map_err(db)?;
        state(&mut connection).await
    }

    async fn migrate(&self) -> Result<Vec<Migration>> {
        // Of its own, so that the lock goes with it whatever happens.
        let mut connection = self.own.acquire().await.map_err(db)?.detach();
        let is_ours: Option<i64> = sqlx::query(LOCK)
            .bind(LOCK_WAIT_SECS)
            .fetch_one(&mut connection)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(db)?;
        if is_ours != Some(1) {
            return Err(Error::new(Kind::Unavailable, "another instance migrates the database"));
        }
        let applied = apply(&mut connection).await;
        sqlx::raw_sql(UNLOCK).execute(&mut connection).await.map_err(db)?;
        sqlx::Connection::close(connection).await.map_err(db)?;
        applied
    }
}

async fn state(connection: &mut MySqlConnection) -> Result<SchemaState> {
    let newest = sqlx::query("SELECT COALESCE(MAX(version), 0) FROM postrider_migration")
        .fetch_one(connection)
        .await
        .and_then(|row| row.try_get::<i64, _>(0))
        .map_err(db);
    let found = match newest {
        Ok(version) => version as i32,
        Err(error) if error.kind() == Kind::NotMigrated => 0,
        Err(error) => return Err(error),
    };
    Ok(SchemaState { found, needed: SCHEMA.needed() })
}

async fn apply(connection: &mut MySqlConnection) -> Result<Vec<Migration>> {
    let state = state(connection).await?;
    if state.found > state.needed {
        return Err(state.newer());
    }
    let mut applied = Vec::new();
    if state.found == 0 {
        sqlx::raw_sql(RECORD).execute(&mut *connection).await.map_err(db)?;
    }
    for migration in SCHEMA.migrations.iter().filter(|migration| migration.version > state.found) {
        sqlx::raw_sql(migration.sql)
            .execute(&mut *connection)
            .await
            .map_err(|error| db(error).context(format!("migration {} {}", migration.version, migration.name)))?;
        sqlx::query("INSERT INTO postrider_migration (version, name) VALUES (?, ?)")
            .bind(migration.version)
            .bind(migration.name)
            .execute(&mut *connection)
            .await
            .map_err(db)?;
        applied.push(*migration);
    }
    Ok(applied)
}
