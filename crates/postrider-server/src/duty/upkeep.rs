//! Partitions and retention, every minute.

use std::sync::Arc;
use std::time::Duration;

use postrider::store::Store;
use postrider::upkeep::{Retention, UpkeepReport};

use super::Duty;

/// Creates partitions ahead and removes what is past its retention.
pub struct UpkeepDuty {
    store: Arc<dyn Store>,
    retention: Retention,
}

impl UpkeepDuty {
    /// Upkeep of one store.
    pub fn new(store: Arc<dyn Store>, retention: Retention) -> Self {
        Self { store, retention }
    }
}

impl Duty for UpkeepDuty {
    const EVERY: Duration = Duration::from_secs(60);

    async fn run_once(&mut self) {
        match self.store.maintain(&self.retention).await {
            Ok(report) if report == UpkeepReport::default() => {}
            Ok(report) => tracing::info!(
                partitions_created = report.partitions_created,
                partitions_dropped = report.partitions_dropped,
                outbox_deleted = report.outbox_deleted,
                inbox_deleted = report.inbox_deleted,
                queue_deleted = report.queue_deleted,
                dead_deleted = report.dead_deleted,
                tombstones_deleted = report.tombstones_deleted,
                "upkeep done"
            ),
            Err(error) => tracing::warn!(error_type = error.kind().as_str(), %error, causes = ?error.causes(),
                remedy = error.remedy(), "upkeep failed; it is tried again in a minute"),
        }
    }
}
