//! Deletes stored payloads when nothing can ask for them any more.

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use postrider::claim::{Claims, Expired};

use super::Duty;

/// Deletes objects that are older than everything that may refer to them.
pub struct ClaimsDuty {
    claims: Arc<Claims>,
    keep: Duration,
}

impl ClaimsDuty {
    /// Objects are kept for `keep`.
    pub fn new(claims: Arc<Claims>, keep: Duration) -> Self {
        Self { claims, keep }
    }
}

impl Duty for ClaimsDuty {
    /// A look costs a request, and a day more or less does not matter.
    const EVERY: Duration = Duration::from_secs(600);

    async fn run_once(&mut self) {
        match self.claims.expire(Utc::now() - self.keep).await {
            Ok(Expired { deleted: 0, .. }) => {}
            Ok(Expired { deleted, has_more }) => tracing::info!(deleted, has_more, "old payloads deleted"),
            Err(error) => tracing::warn!(error_type = error.kind().as_str(), %error, causes = ?error.causes(),
                remedy = error.remedy(), "old payloads cannot be deleted; it is tried again in ten minutes"),
        }
    }
}
