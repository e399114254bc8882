//! What `postrider doctor` reports: findings with a remedy.

use serde::{Deserialize, Serialize};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Checked and fine.
    Ok,
    /// Works, but something could be lost or slow in a bad moment.
    Warning,
    /// Does not work, or would lose events.
    Error,
}

/// One thing that was checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What was checked, `postgres.fsync`.
    pub check: String,
    /// How it stands.
    pub severity: Severity,
    /// What was found.
    pub message: String,
    /// What to do; empty when all is well.
    pub remedy: String,
}

impl Finding {
    /// All is well.
    pub fn ok(check: impl Into<String>, message: impl Into<String>) -> Self {
        Self { check: check.into(), severity: Severity::Ok, message: message.into(), remedy: String::new() }
    }

    /// Works, with a risk.
    pub fn warning(check: impl Into<String>, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check: check.into(), severity: Severity::Warning, message: message.into(), remedy: remedy.into() }
    }

    /// Does not work.
    pub fn error(check: impl Into<String>, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { check: check.into(), severity: Severity::Error, message: message.into(), remedy: remedy.into() }
    }

    /// The finding of an error.
    pub fn of(check: impl Into<String>, error: &crate::Error) -> Self {
        Self::error(check, error.to_string(), error.remedy())
    }
}
