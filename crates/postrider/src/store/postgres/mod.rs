//! The PostgreSQL store (13 or newer).

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool};
use tokio_util::sync::CancellationToken;

use crate::adopt::AdoptedTables;
use crate::broker::Broker;
use crate::broker::topic::Route;
use crate::claim::Claims;
use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::handler::{Consumer, ConsumerSpec, RemoteHandler};
use crate::source::Source;
use crate::store::Store;
use crate::trigger::Triggers;

mod adopted;
mod alert;
mod audit;
mod copy;
mod dead;
mod doctor;
mod error;
mod failed;
mod inbox;
mod integrity;
mod lease;
mod migrate;
mod newest;
mod outbox;
mod parked;
mod pulse;
mod queue;
mod recovery;
mod retries;
mod routes;
mod row;
mod source;
mod trigger;
mod upkeep;
mod view;
mod wake;

pub use migrate::SCHEMA;
pub use source::LogSource;

/// Connections for handlers' transactions.
const CONNECTIONS_MAX: u32 = 20;
/// Connections for our own work, opened as they are needed: two per lane, and a few for leases, upkeep and the wake-up.
const OWN_CONNECTIONS_MAX: u32 = 2 * crate::relay::LANES_MAX + 16;
/// How long to wait for a free or new connection.
const CONNECT_WAIT: Duration = Duration::from_secs(5);

/// The PostgreSQL store. Cheap to clone.
#[derive(Clone)]
pub struct PostgresStore {
    /// For handlers' transactions and for what the application appends.
    pool: PgPool,
    /// For everything of our own.
    own: PgPool,
    wake: Arc<wake::Wake>,
}

/// Our statements are few, always the same, and must find their rows through an index however old the statistics are:
/// a plan with a sequential scan or parallel workers takes a thousand times as long on a large outbox.
const PLANNER: [(&str, &str); 5] = [
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("max_parallel_workers_per_gather", "0"),
    ("jit", "off"),
];

impl PostgresStore {
    /// Connects, and fails with a clear error when that is not possible.
    pub async fn connect(url: &str) -> Result<Self> {
        let options = PgConnectOptions::from_str(url)
            .map_err(|error| Error::new(Kind::Config, "the PostgreSQL URL is not valid").with_source(error))?
            .application_name("postrider");
        // A pool tries again until its time-out and then says only that; one connection says why.
        let place = format!("{}:{}/{}", options.get_host(), options.get_port(), options.get_database().unwrap_or(""));
        let said = |error| error::db(error).context(format!("PostgreSQL at {place}"));
        PgConnection::connect_with(&options).await.map_err(said)?.close().await.map_err(said)?;
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS_MAX)
            .acquire_timeout(CONNECT_WAIT)
            .connect_lazy_with(options);
        Ok(Self::new(pool))
    }

    /// A store on a pool that the caller already has. The relay's own statements go over a second, small pool to the same
    /// database, because they need other planner settings.
    pub fn new(pool: PgPool) -> Self {
        let options = pool.connect_options().as_ref().clone().options(PLANNER);
        let own = PgPoolOptions::new()
            .max_connections(OWN_CONNECTIONS_MAX)
            .acquire_timeout(CONNECT_WAIT)
            // A ping before each statement would double the round trips; a broken connection is an error like any other.
            .test_before_acquire(false)
            .connect_lazy_with(options);
        Self { wake: Arc::new(wake::Wake::new(own.clone())), pool, own }
    }

    /// The pool, for the caller's own queries.
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn set_routes(&self, routes: &[Route]) -> Result<()> {
        routes::set(self, routes).await
    }

    fn source(&self, route: &Route, lanes: u32) -> Arc<dyn Source> {
        Arc::new(LogSource::new(self, route, lanes))
    }

    async fn consume(
        self: Arc<Self>,
        spec: ConsumerSpec,
        broker: Arc<dyn Broker>,
        handler: Arc<dyn RemoteHandler>,
        claims: Option<Arc<Claims>>,
        stop: CancellationToken,
    ) -> Result<()> {
        let consumer = Consumer::remote(spec, broker, self.clone(), self, handler)?;
        match claims {
            Some(claims) => consumer.claims(claims).run(stop).await,
            None => consumer.run(stop).await,
        }
    }

    fn adopted(&self) -> Option<&dyn AdoptedTables> {
        Some(self)
    }

    fn triggers(&self) -> Option<&dyn Triggers> {
        Some(self)
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        doctor::inspect(self).await
    }

    async fn close(&self) {
        self.wake.close().await;
        self.own.close().await;
        self.pool.close().await;
    }
}
