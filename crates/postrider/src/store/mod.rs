//! Stores: outbox, inbox, leases and the embedded broker's log, in a database.
//!
//! All folders have the same files: `migrations/`, `migrate.rs`, `lease.rs`, `outbox.rs`, `source.rs`, `queue.rs`,
//! `inbox.rs`, `newest.rs`, `retries.rs`, `failed.rs`, `dead.rs`, `upkeep.rs`, `view.rs`, `pulse.rs`, `alert.rs`,
//! `audit.rs`, `integrity.rs`, `recovery.rs`, `doctor.rs`, `error.rs`. All SQL is here.

use std::sync::Arc;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use crate::adopt::AdoptedTables;
use crate::alert::Alerts;
use crate::audit::Audit;
use crate::broker::Broker;
use crate::broker::embedded::Queue;
use crate::broker::topic::Route;
use crate::claim::Claims;
use crate::dead::DeadLetters;
use crate::doctor::Finding;
use crate::error::Result;
use crate::handler::{ConsumerSpec, RemoteHandler};
use crate::integrity::Integrity;
use crate::lease::Leases;
use crate::migrate::Migrate;
use crate::outbox::OutboxStore;
use crate::recovery::Recovery;
use crate::source::Source;
use crate::trigger::Triggers;
use crate::upkeep::Upkeep;

#[cfg(feature = "mysql")]
pub mod mysql;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

/// Everything that the binary asks of a database.
#[async_trait]
pub trait Store:
    Alerts + Audit + DeadLetters + Integrity + Leases + Migrate + OutboxStore + Queue + Recovery + Upkeep
{
    /// Takes over where events go, before any relay runs. When that has changed, every destination that changed begins
    /// where the slowest of all was: events may be published again, none is passed over. An error while another instance
    /// relays by other routes, and when a destination that is gone still has parked events.
    async fn set_routes(&self, routes: &[Route]) -> Result<()>;

    /// The events of the outbox that go to one destination, cut into `lanes`, as a source.
    fn source(&self, route: &Route, lanes: u32) -> Arc<dyn Source>;

    /// Runs a consumer whose effects happen elsewhere, with this store as its inbox, until `stop` is cancelled.
    async fn consume(
        self: Arc<Self>,
        spec: ConsumerSpec,
        broker: Arc<dyn Broker>,
        handler: Arc<dyn RemoteHandler>,
        claims: Option<Arc<Claims>>,
        stop: CancellationToken,
    ) -> Result<()>;

    /// Tables that services already have, where the database can lock rows for us.
    fn adopted(&self) -> Option<&dyn AdoptedTables> {
        None
    }

    /// Triggers that write events, where the database has them.
    fn triggers(&self) -> Option<&dyn Triggers> {
        None
    }

    /// Checks reachability, version, rights, unsafe settings and clock skew.
    async fn inspect(&self) -> Result<Vec<Finding>>;

    /// Closes connections after what is under way has ended.
    async fn close(&self);
}

/// A value for a column of JSON. Structures of texts always become JSON.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
