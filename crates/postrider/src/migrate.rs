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
    /// All migrations, oldest first.
    fn migrations(&self) -> &'static [Migration];

    /// Reads the recorded version; changes nothing.
    async fn schema(&self) -> Result<SchemaState>;

    /// Applies what is missing and returns what was applied. Two instances may call it at once. Refuses a database
    /// that is newer than this program.
    async fn migrate(&self) -> Result<Vec<Migration>>;
}
