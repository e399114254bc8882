//! Which column of a table means what.

use std::time::Duration;

use super::{TableName, Template};

/// How an event is put on the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// CloudEvents 1.0, binary mode.
    #[default]
    CloudEvents,
    /// Payload, headers and message id, as the service has always sent them.
    Raw,
}

/// Whose time stands in columns without a time zone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Clock {
    /// UTC.
    #[default]
    Utc,
    /// This time zone, in a name that the database knows.
    Zone(String),
}

/// How the table says that a row is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// By a word.
    Status {
        /// The column.
        column: String,
        /// To be published.
        pending: String,
        /// Taken by a worker of the service. Taken over when it has not changed for the mapping's `processing_timeout`.
        processing: Option<String>,
        /// Published.
        published: String,
        /// Given up.
        failed: Option<String>,
    },
    /// By a column of true and false.
    Flag {
        /// The column; true means published.
        column: String,
    },
    /// By the time of publishing: null means not yet. The column is the mapping's `published_at`.
    PublishedAt,
}

/// An adopted table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Names its breaker and its metrics.
    pub name: String,
    /// The table.
    pub table: TableName,
    /// The primary key.
    pub id: String,
    /// What rows are ordered by; the id when it is a number.
    pub order: Option<String>,
    /// The aggregate whose events stay in order.
    pub key: Option<String>,
    /// What is sent.
    pub payload: String,
    /// A JSON object of headers.
    pub headers: Option<String>,
    /// The tenant.
    pub tenant: Option<String>,
    /// When the event happened.
    pub time: Option<String>,
    /// The state.
    pub state: State,
    /// When it was published.
    pub published_at: Option<String>,
    /// When the row was last changed.
    pub updated_at: Option<String>,
    /// How often it was tried.
    pub attempts: Option<String>,
    /// How often it may be tried.
    pub attempts_max: Option<String>,
    /// Not to be published before.
    pub available_at: Option<String>,
    /// Why it failed.
    pub last_error: Option<String>,
    /// The topic of a row.
    pub topic: Template,
    /// The type of a row.
    pub kind: Template,
    /// The message id of a row.
    pub message_id: Template,
    /// The CloudEvents source; `database.schema.table` when it is not given.
    pub source: Option<String>,
    /// The payload's media type.
    pub content_type: String,
    /// How it is sent.
    pub format: Format,
    /// After this long a row that a worker has taken is free again; needs `updated_at`.
    pub processing_timeout: Duration,
    /// Whose time stands in columns without a zone.
    pub clock: Clock,
}

impl Mapping {
    /// Whether the table can say when a row is tried again, how often it was, and that it was given up.
    pub(crate) fn needs_side_table(&self) -> bool {
        self.attempts.is_none() || self.available_at.is_none() || !self.can_fail()
    }

    /// Whether the table itself can say that a row was given up.
    pub(crate) fn can_fail(&self) -> bool {
        let has_word = matches!(&self.state, State::Status { failed: Some(_), .. });
        has_word || (self.attempts.is_some() && self.attempts_max.is_some())
    }

    /// The columns that make an event, without the payload; each once.
    pub(crate) fn columns_read(&self) -> Vec<&str> {
        let optional = [&self.key, &self.headers, &self.tenant, &self.time, &self.attempts, &self.attempts_max];
        let mut columns: Vec<&str> = vec![&self.id];
        columns.extend(optional.into_iter().flatten().map(String::as_str));
        for template in [&self.topic, &self.kind, &self.message_id] {
            columns.extend(template.columns());
        }
        let mut unique = Vec::new();
        for column in columns {
            if !unique.contains(&column) {
                unique.push(column);
            }
        }
        unique
    }
}
