//! Versioned migrations: forward only, one transaction each, recorded in the database.

use async_trait::async_trait;

use crate::error::{Error, Kind, Result};

/// One step of the schema.
#[derive(Debug, Clone, Copy)]
pub struct Migration {
    /// Counts from 1 without gaps.
    pub version: i32,
    /// What it brings.
    pub name: &'static str,
    /// Statements, as a DBA may run them by hand.
    pub sql: &'static str,
}

/// The schema of one kind of store.
#[derive(Debug, Clone, Copy)]
pub struct Schema {
    /// The kind of store, for people.
    pub store: &'static str,
    /// Creates the record of what was applied, if it is not there.
    pub record: &'static str,
    /// The record's table.
    pub record_table: &'static str,
    /// All migrations, oldest first.
    pub migrations: &'static [Migration],
}

impl Schema {
    /// The version that this program needs.
    pub fn needed(&self) -> i32 {
        self.migrations.last().map_or(0, |migration| migration.version)
    }

    /// Everything as one script for a DBA. It leaves the same record as [`Migrate::migrate`].
    pub fn script(&self) -> String {
        let mut script = format!("-- Postrider {}, for {}\n{};\n", env!("CARGO_PKG_VERSION"), self.store, self.record);
        for Migration { version, name, sql } in self.migrations {
            let (sql, table) = (sql.trim_end(), self.record_table);
            script.push_str(&format!(
                "\n-- migration {version}: {name}\nBEGIN;\n{sql}\n\
                 INSERT INTO {table} (version, name) VALUES ({version}, '{name}');\nCOMMIT;\n"
            ));
        }
        script
    }
}

/// How the database's schema stands to this program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaState {
    /// The version found; 0 when there are no tables.
    pub found: i32,
    /// The version this program needs.
    pub needed: i32,
}

impl SchemaState {
    /// An error unless the schema is exactly the one that this program needs.
    pub fn require(&self) -> Result<()> {
        if self.found > self.needed {
            return Err(self.newer());
        }
        if self.found < self.needed {
            let what = if self.found == 0 {
                "the database has no Postrider tables".to_owned()
            } else {
                format!("the database has schema version {}, this program needs {}", self.found, self.needed)
            };
            return Err(Error::new(Kind::NotMigrated, what));
        }
        Ok(())
    }

    /// The error for a database that a newer program has migrated.
    pub fn newer(&self) -> Error {
        Error::new(
            Kind::SchemaNewer,
            format!("the database has schema version {}, this program knows only {}", self.found, self.needed),
        )
    }
}

/// The store's side of migrations.
#[async_trait]
pub trait Migrate: Send + Sync {
    /// Reads the recorded version; changes nothing.
    async fn schema(&self) -> Result<SchemaState>;

    /// Applies what is missing and returns what was applied. Two instances may call it at once. Refuses a database
    /// that is newer than this program.
    async fn migrate(&self) -> Result<Vec<Migration>>;
}
