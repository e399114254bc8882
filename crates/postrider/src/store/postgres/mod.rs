//! The PostgreSQL store (13 or newer).

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::{Connection as _, PgConnection, PgPool};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::doctor::Finding;
use crate::error::{Error, Kind, Result};
use crate::source::Source;
use crate::store::Store;

mod doctor;
mod error;
mod inbox;
mod lease;
mod migrate;
mod outbox;
mod queue;
mod row;
mod source;
mod upkeep;
mod wake;

pub use migrate::SCHEMA;
pub use source::LogSource;

/// Connections that one instance opens at most. The relay needs about four; the rest is for handlers.
const CONNECTIONS_MAX: u32 = 20;
/// How long to wait for a free or new connection.
const CONNECT_WAIT: Duration = Duration::from_secs(5);

/// The PostgreSQL store. Cheap to clone.
#[derive(Clone)]
pub struct PostgresStore {
    pool: PgPool,
    wake: Arc<wake::Wake>,
}

impl PostgresStore {
    /// Connects, and fails with a clear error when that is not possible.
    pub async fn connect(url: &str) -> Result<Self> {
        let options = PgConnectOptions::from_str(url)
            .map_err(|error| Error::new(Kind::Config, "the PostgreSQL URL is not valid").with_source(error))?
            .application_name("postrider")
            // The relay's statements are few and always the same; planning each anew would cost more than running it.
            .options([("plan_cache_mode", "force_generic_plan")]);
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

    /// A store on a pool that the caller already has.
    pub fn new(pool: PgPool) -> Self {
        Self { wake: Arc::new(wake::Wake::new(pool.clone())), pool }
    }

    /// The pool, for the caller's own queries.
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }
}

#[async_trait]
impl Store for PostgresStore {
    fn source(&self, destination: &str, lanes: u32) -> Arc<dyn Source> {
        Arc::new(LogSource::new(self, destination, lanes))
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        doctor::inspect(self).await
    }

    async fn close(&self) {
        self.wake.close().await;
        self.pool.close().await;
    }
}
