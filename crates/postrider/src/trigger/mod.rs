//! Change triggers: inserts, updates and deletes of a table write a row into the outbox, in the same transaction.
//!
//! The event says what changed, not what it is: entity, id, action, and the tenant and version if columns for them are
//! named. No column of the table is copied unless it is named.

use async_trait::async_trait;
use serde::Serialize;

use crate::adopt::{ColumnKind, TableInfo, TableName};
use crate::error::{Error, Kind, Result};

pub(crate) mod sql;

/// A trigger on a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trigger {
    /// The table.
    pub table: TableName,
    /// What its rows are, `USER`.
    pub entity: String,
    /// The column with the entity's id; the primary key when it is not given.
    pub id: Option<String>,
    /// The column with the tenant.
    pub tenant: Option<String>,
    /// The column with a number that rises with every change.
    pub version: Option<String>,
    /// Columns that are copied into the event.
    pub columns: Vec<String>,
    /// The topic of its events.
    pub topic: String,
}

/// A trigger as `list` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TriggerView {
    /// The table, with its schema.
    pub table: String,
    /// The entity.
    pub entity: String,
    /// Whether it fires.
    pub is_enabled: bool,
}

/// The store's side of triggers.
#[async_trait]
pub trait Triggers: Send + Sync {
    /// The statements that make the trigger, checked against the catalogue.
    async fn statements(&self, trigger: &Trigger) -> Result<Vec<String>>;

    /// Makes the trigger, or replaces the one of this table and entity.
    async fn add(&self, trigger: &Trigger) -> Result<()>;

    /// Removes the triggers of a table, or the one of an entity; says how many there were.
    async fn remove(&self, table: &TableName, entity: Option<&str>) -> Result<u64>;

    /// All of ours.
    async fn list(&self) -> Result<Vec<TriggerView>>;
}

impl Trigger {
    /// The topic when none is chosen.
    pub fn topic_of(entity: &str) -> String {
        format!("changes.{}", entity.to_lowercase())
    }

    /// The column with the id, when everything that is named is there and fits.
    pub(crate) fn check(&self, info: &TableInfo) -> Result<String> {
        let wrong = |what: String, remedy: &str| Err(Error::new(Kind::Config, what).with_remedy(remedy));
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if self.entity.is_empty() || self.entity.len() > 40 || !self.entity.chars().all(is_word) {
            return wrong(
                format!("the entity {:?} cannot be used", self.entity),
                "name it with 1 to 40 letters, digits, '-' or '_', such as USER",
            );
        }
        let id = match (&self.id, info.primary_key.as_slice()) {
            (Some(id), _) => id.clone(),
            (None, [id]) => id.clone(),
            (None, []) => {
                return wrong(
                    format!("{} has no primary key", self.table),
                    "name the column with the id: --id <column>",
                );
            }
            (None, _) => {
                return wrong(
                    format!("the primary key of {} has several columns", self.table),
                    "name the column with the id: --id <column>",
                );
            }
        };
        let named = [("--id", Some(&id)), ("--tenant", self.tenant.as_ref()), ("--version", self.version.as_ref())];
        let copied = self.columns.iter().map(|column| ("--column", Some(column)));
        for (option, name) in named.into_iter().chain(copied) {
            let Some(name) = name else { continue };
            let Some(column) = info.column(name) else {
                let names: Vec<&str> = info.columns.iter().map(|column| column.name.as_str()).collect();
                let what = format!("{option} {name:?}: {} has no such column", self.table);
                return wrong(what, &format!("its columns are {}", names.join(", ")));
            };
            if option == "--version" && column.kind != ColumnKind::Integer {
                let what = format!("--version {name:?} is of type {}, not a whole number", column.type_name);
                return wrong(what, "name a column that is raised with every change");
            }
            if column.kind == ColumnKind::Bytes {
                let what = format!("{option} {name:?} is of type {}, which has no text", column.type_name);
                return wrong(what, "name another column");
            }
            if name.contains("$postrider$") {
                return wrong(format!("the column {name:?} has a name that cannot be used"), "rename it");
            }
        }
        if self.topic.is_empty() || self.topic.len() > crate::event::TOPIC_BYTES_MAX || self.topic.contains(['$', '\0'])
        {
            return wrong(format!("the topic {:?} cannot be used", self.topic), "name a topic such as changes.user");
        }
        Ok(id)
    }
}
