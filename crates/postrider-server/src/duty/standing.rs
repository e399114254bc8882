//! Consumers, instances and alerts as metrics.

use std::sync::Arc;
use std::time::Duration;

use postrider::Result;
use postrider::metrics::Standing;
use postrider::store::Store;

use super::Duty;

/// More alerts than this at once say no more than these.
const ALERTS_MAX: usize = 1000;

/// Reads how consumers, instances and alerts stand.
pub struct StandingDuty {
    store: Arc<dyn Store>,
    standing: Standing,
}

impl StandingDuty {
    /// Of one store.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store, standing: Standing::new() }
    }

    async fn look(&mut self) -> Result<()> {
        let consumers = self.store.consumers().await?;
        let instances = self.store.instances().await?;
        let alerts = self.store.alerts(true, None, ALERTS_MAX).await?;
        self.standing.show(&consumers, &instances, &alerts);
        Ok(())
    }
}

impl Duty for StandingDuty {
    const EVERY: Duration = Duration::from_secs(10);

    async fn run_once(&mut self) {
        // The probe tells that the store is away; a second line would say nothing new.
        if let Err(error) = self.look().await {
            tracing::debug!(error_type = error.kind().as_str(), %error, "consumers and instances cannot be read");
        }
    }
}
