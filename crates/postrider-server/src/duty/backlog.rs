//! The backlog as metrics. Who waits too long is told by the watch (the alert `stale`).

use std::sync::Arc;
use std::time::Duration;

use postrider::adopt::AdoptedTable;
use postrider::store::Store;
use postrider::upkeep::Backlog;
use postrider::{Result, Route};

use super::Duty;

/// What is looked at.
pub enum Outbox {
    /// The store's outbox, for one destination.
    Own(Arc<dyn Store>, Route),
    /// An adopted table, and its name.
    Adopted(String, Arc<dyn AdoptedTable>),
}

impl Outbox {
    fn name(&self) -> &str {
        match self {
            Outbox::Own(_, route) => &route.destination,
            Outbox::Adopted(name, _) => name,
        }
    }

    async fn backlog(&self) -> Result<Backlog> {
        match self {
            Outbox::Own(store, route) => store.backlog(route).await,
            Outbox::Adopted(_, table) => table.backlog().await,
        }
    }
}

/// Reads the backlog.
pub struct BacklogDuty {
    outbox: Outbox,
    stale_after: Duration,
}

impl BacklogDuty {
    /// The backlog of one outbox; an event that waits longer than `stale_after` is stale.
    pub fn new(outbox: Outbox, stale_after: Duration) -> Self {
        Self { outbox, stale_after }
    }
}

impl Duty for BacklogDuty {
    const EVERY: Duration = Duration::from_secs(10);

    async fn run_once(&mut self) {
        let backlog = match self.outbox.backlog().await {
            Ok(backlog) => backlog,
            // The probe tells that the store is away; a second line would say nothing new.
            Err(error) => {
                return tracing::debug!(error_type = error.kind().as_str(), %error, "the backlog cannot be read");
            }
        };
        let is_stale = backlog.oldest_secs.is_some_and(|secs| secs >= self.stale_after.as_secs());
        postrider::metrics::backlog(self.outbox.name(), &backlog, is_stale);
    }
}
