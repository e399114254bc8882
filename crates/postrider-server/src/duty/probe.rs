//! Asks the store every few seconds whether it is there and has the right schema, for `/readyz`.

use std::sync::Arc;
use std::time::Duration;

use postrider::store::Store;

use super::Duty;
use crate::api::Health;

/// Keeps the store's part of [`Health`] up to date.
pub struct ProbeDuty {
    store: Arc<dyn Store>,
    health: Arc<Health>,
}

impl ProbeDuty {
    /// A probe of one store.
    pub fn new(store: Arc<dyn Store>, health: Arc<Health>) -> Self {
        Self { store, health }
    }
}

impl Duty for ProbeDuty {
    const EVERY: Duration = Duration::from_secs(5);

    async fn run_once(&mut self) {
        let answer = self.store.schema().await.and_then(|schema| schema.require());
        match answer {
            Ok(()) => {
                if self.health.clear("store") {
                    tracing::info!("the store is reachable");
                }
            }
            Err(error) => {
                if self.health.failed("store", &error) {
                    tracing::error!(error_type = error.kind().as_str(), %error, causes = ?error.causes(),
                        remedy = error.remedy(), "the store is not ready");
                }
            }
        }
    }
}
