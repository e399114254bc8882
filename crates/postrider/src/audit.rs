//! Who did what: every action of a person, and every look at a payload, is a line that is kept.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;

use crate::error::Result;

/// A line of the audit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AuditLine {
    /// Its number.
    pub id: i64,
    /// When, by the database's clock.
    pub at: DateTime<Utc>,
    /// Who.
    pub actor: String,
    /// What: `replay`, `discard`, `payload`, `silence`, `login` …
    pub action: String,
    /// With what.
    pub detail: Value,
}

/// The store's side.
#[async_trait]
pub trait Audit: Send + Sync {
    /// Writes a line.
    async fn audit(&self, actor: &str, action: &str, detail: &Value) -> Result<()>;

    /// Lines with numbers below `before` (all, if none), newest first.
    async fn audit_list(&self, before: Option<i64>, limit: usize) -> Result<Vec<AuditLine>>;
}
