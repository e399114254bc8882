//! Adopted tables: an outbox that a service already has, relayed as it is.
//!
//! A [`Mapping`] says which column means what. [`Adopted`] locks rows with `FOR UPDATE SKIP LOCKED`, publishes them, and
//! marks them in the table's own columns, in one transaction: when the process dies the locks end with its connection and
//! the rows are there for the next one. What the table has no column for (attempts, the time of the next one, failure) is
//! kept in a side table of ours.
//!
//! Order within a key: a row is published only when no earlier row of its key is unpublished outside of the rows that
//! were locked together with it. So any number of instances may work at once, beside the service's own worker too if that
//! locks its rows.
//!
//! `mapping`, `template`, `row`, `sql`, `check` and `propose` are pure; the stores run the statements; `pump` is the loop.

use std::time::Duration;

use async_trait::async_trait;

use crate::doctor::Finding;
use crate::error::Result;
use crate::source::Failure;
use crate::upkeep::Backlog;

mod check;
mod mapping;
mod propose;
mod pump;
mod row;
pub(crate) mod sql;
mod table;
mod template;

pub use check::check;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) use check::{not_marked, orderless, table_changed, unknown_word};
pub use mapping::{Clock, Format, Mapping, State};
pub use propose::propose;
pub use pump::Adopted;
pub use row::AdoptedRow;
pub use table::{ColumnInfo, ColumnKind, IndexInfo, TableInfo, TableName};
pub use template::Template;

/// What became of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The broker has it.
    Published,
    /// It failed and is tried again.
    Retry {
        /// How often it was tried.
        attempts: u32,
        /// When to try again, counted from the database's now.
        delay: Duration,
        /// Why.
        failure: Failure,
    },
    /// A person must decide.
    Failed {
        /// How often it was tried.
        attempts: u32,
        /// Why.
        failure: Failure,
    },
    /// Nothing is known of it; it stays as it is.
    Untouched,
}

/// The store's side of adopted tables.
#[async_trait]
pub trait AdoptedTables: Send + Sync {
    /// Whether it is MySQL or MariaDB.
    fn is_mysql(&self) -> bool {
        false
    }

    /// What the catalogue says about a table. `None` when there is none of that name.
    async fn table(&self, name: &TableName) -> Result<Option<TableInfo>>;

    /// Words that stand in a column: of the first few thousand rows.
    async fn words(&self, name: &TableName, column: &str) -> Result<Vec<String>>;

    /// The table, ready to be relayed, or an error that names what the mapping has wrong.
    async fn adopt(&self, mapping: &Mapping) -> Result<Box<dyn AdoptedTable>>;
}

/// A part of a table's keys, by their hash. Two that look at different parts do not find rows behind each other's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Which one, from 0 on.
    pub number: usize,
    /// How many there are.
    pub of: usize,
}

impl Part {
    /// The whole table.
    pub const ALL: Part = Part { number: 0, of: 1 };
}

/// A table that is relayed.
#[async_trait]
pub trait AdoptedTable: Send + Sync {
    /// Locks up to `limit` rows of the part that may be published now, oldest first, without any whose key has an earlier one
    /// that is neither published nor among them.
    async fn lock(&self, part: Part, limit: usize) -> Result<Box<dyn LockedRows>>;

    /// What its events say they come from.
    fn source(&self) -> String;

    /// Gives rows back that a worker of the service took and left, and says how many.
    async fn free_abandoned(&self) -> Result<u64>;

    /// How much waits, and how long already.
    async fn backlog(&self) -> Result<Backlog>;

    /// What is wrong, or slow: for `doctor`, and for the start.
    async fn inspect(&self) -> Result<Vec<Finding>>;
}

/// Rows that nobody else can lock until they are settled or dropped.
#[async_trait]
pub trait LockedRows: Send {
    /// The rows, oldest first.
    fn rows(&self) -> &[AdoptedRow];

    /// Writes down what became of each row, in their order, and lets them go.
    async fn settle(self: Box<Self>, outcomes: &[Outcome]) -> Result<()>;
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;

    /// A table as a service on Prisma has it.
    pub fn campus_table() -> TableInfo {
        let column = |name: &str, kind, type_name: &str| ColumnInfo {
            name: name.to_owned(),
            kind,
            type_name: type_name.to_owned(),
            chars_max: None,
            second_digits: matches!(kind, ColumnKind::Instant | ColumnKind::DateTime).then_some(6),
            words: Vec::new(),
            is_nullable: false,
            default: None,
        };
        TableInfo {
            schema: "public".to_owned(),
            name: "outbox_events".to_owned(),
            database: "campus".to_owned(),
            columns: vec![
                column("id", ColumnKind::Integer, "bigint"),
                column("routing_key", ColumnKind::Text, "text"),
                column("aggregate_type", ColumnKind::Text, "text"),
                column("aggregate_id", ColumnKind::Text, "text"),
                column("payload", ColumnKind::Json, "jsonb"),
                column("status", ColumnKind::Text, "text"),
                column("attempts", ColumnKind::Integer, "integer"),
                column("available_at", ColumnKind::Instant, "timestamp with time zone"),
                column("published_at", ColumnKind::Instant, "timestamp with time zone"),
                column("last_error", ColumnKind::Text, "text"),
                column("created_at", ColumnKind::Instant, "timestamp with time zone"),
                column("updated_at", ColumnKind::Instant, "timestamp with time zone"),
            ],
            primary_key: vec!["id".to_owned()],
            indexes: vec![IndexInfo {
                name: "outbox_events_status_available_at".to_owned(),
                columns: vec!["status".to_owned(), "available_at".to_owned()],
                condition: None,
                is_unique: false,
            }],
            missing_rights: Vec::new(),
        }
    }

    /// Its mapping.
    pub fn campus() -> Mapping {
        let name = TableName { schema: None, name: "outbox_events".to_owned() };
        propose(&name, &campus_table(), &["pending".to_owned()]).expect("it can be guessed")
    }

    #[test]
    fn a_mapping_is_proposed() {
        let mapping = campus();
        assert_eq!((mapping.id.as_str(), mapping.key.as_deref()), ("id", Some("aggregate_id")));
        assert_eq!(mapping.topic.to_string(), "{routing_key}");
        assert_eq!(mapping.message_id.to_string(), "outbox-{id}");
        let State::Status { pending, processing, published, failed, .. } = &mapping.state else {
            panic!("{:?}", mapping.state)
        };
        assert_eq!(
            (pending.as_str(), processing.as_deref(), published.as_str(), failed.as_deref()),
            ("pending", Some("processing"), "published", Some("failed"))
        );
        assert!(!mapping.needs_side_table());
        assert_eq!(mapping.processing_timeout, Duration::from_secs(300));
    }
}
