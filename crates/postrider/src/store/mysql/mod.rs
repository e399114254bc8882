//! The store in MySQL (8.0.17 or newer) or MariaDB (10.6 or newer).
//!
//! These servers have no snapshots that a client could compare, and ids are drawn before the commit, so the outbox is not a
//! log with a position: each row says whether it is pending, and the relay looks for those that are. Everything of ours runs
//! at READ COMMITTED, where no statement locks rows that it does not change.
//!
//! A deadlock rolls the whole transaction back and leaves the session outside of one. A handler that swallows that error must
//! not go on in autocommit, nor be acked for it: its connection has autocommit off, and the commit begins by releasing a
//! savepoint that only the transaction of the admission has.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::mysql::{MySql, MySqlConnectOptions, MySqlPool, MySqlPoolOptions};
use sqlx::{Connection as _, Executor as _, MySqlConnection, Transaction};
use tokio::sync::Notify;
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
mod bury;
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

use error::db;
pub use migrate::SCHEMA;

/// Connections for the caller's own queries, and as many for handlers' transactions.
const CONNECTIONS_MAX: u32 = 20;
/// Connections for our own work, opened as they are needed: two per lane, and a few for leases and upkeep.
const OWN_CONNECTIONS_MAX: u32 = 2 * crate::relay::LANES_MAX + 16;
/// How long to wait for a free or new connection.
const CONNECT_WAIT: Duration = Duration::from_secs(5);
/// How often a transaction of ours is tried again after a deadlock, which is nobody's fault.
const DEADLOCKS_MAX: u32 = 5;

/// What all our sessions set: every value that does not fit is an error, times are UTC, and no lock is waited for longer than
/// a lane waits for an answer. Other modes stay: a handler's statements may rely on them, ours do not.
const SESSION: &str = "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'), \
     time_zone = '+00:00', innodb_lock_wait_timeout = 20; \
     SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";

/// Now, with microseconds, as a literal for `concat!`.
macro_rules! now {
    () => {
        "UTC_TIMESTAMP(6)"
    };
}
use now;

/// Now as JSON writes it, as a literal for `concat!`.
macro_rules! now_text {
    () => {
        "DATE_FORMAT(UTC_TIMESTAMP(6), '%Y-%m-%dT%H:%i:%s.%fZ')"
    };
}
use now_text;

/// A transaction.
pub(crate) type Tx = Transaction<'static, MySql>;

/// The store in MySQL or MariaDB. Cheap to clone.
#[derive(Clone)]
pub struct MysqlStore {
    /// The caller's.
    pool: MySqlPool,
    /// For handlers' transactions: autocommit is off.
    effects: MySqlPool,
    /// For everything of our own.
    own: MySqlPool,
    rings: Arc<Rings>,
}

/// What rings in this process. Other processes are found by looking.
#[derive(Default)]
struct Rings {
    /// We have committed to the outbox.
    enqueued: Notify,
    /// We have appended to the embedded broker's log.
    appended: Notify,
}

impl MysqlStore {
    /// Connects, and fails with a clear error when that is not possible. The URL is `mysql://user:password@host:port/database`.
    pub async fn connect(url: &str) -> Result<Self> {
        let options = MySqlConnectOptions::from_str(url)
            .map_err(|error| Error::new(Kind::Config, "the MySQL URL is not valid").with_source(error))?;
        if options.get_database().is_none_or(str::is_empty) {
            return Err(Error::new(Kind::Config, "the MySQL URL names no database")
                .with_remedy("write mysql://user:password@host:port/database"));
        }
        // A pool tries again until its time-out and then says only that; one connection says why.
        let place = format!("{}:{}/{}", options.get_host(), options.get_port(), options.get_database().unwrap_or(""));
        let said = |error| db(error).context(format!("MySQL at {place}"));
        MySqlConnection::connect_with(&options).await.map_err(said)?.close().await.map_err(said)?;
        let pool = MySqlPoolOptions::new()
            .max_connections(CONNECTIONS_MAX)
            .acquire_timeout(CONNECT_WAIT)
            .after_connect(|connection, _| Box::pin(async move { set_up(connection, SESSION).await }))
            .connect_lazy_with(options);
        Ok(Self::new(pool))
    }

    /// A store on a pool that the caller already has. Our own statements and handlers' transactions go over two further pools
    /// with the same connect options, because they need sessions of their own kind.
    pub fn new(pool: MySqlPool) -> Self {
        let options = pool.connect_options().as_ref().clone();
        let own = MySqlPoolOptions::new()
            .max_connections(OWN_CONNECTIONS_MAX)
            .acquire_timeout(CONNECT_WAIT)
            // A ping before each statement would double the round trips; a broken connection is an error like any other.
            .test_before_acquire(false)
            .after_connect(|connection, _| Box::pin(async move { set_up(connection, SESSION).await }))
            .connect_lazy_with(options.clone());
        let effects = MySqlPoolOptions::new()
            .max_connections(CONNECTIONS_MAX)
            .acquire_timeout(CONNECT_WAIT)
            .after_connect(|connection, _| {
                Box::pin(async move {
                    set_up(connection, SESSION).await?;
                    set_up(connection, "SET SESSION autocommit = 0").await
                })
            })
            .connect_lazy_with(options);
        Self { pool, effects, own, rings: Arc::default() }
    }

    /// The pool, for the caller's own queries.
    pub fn pool(&self) -> &MySqlPool {
        &self.pool
    }

    /// Begins a transaction of our own.
    async fn write(&self) -> Result<Tx> {
        self.own.begin().await.map_err(db)
    }
}

async fn set_up(connection: &mut MySqlConnection, settings: &'static str) -> sqlx::Result<()> {
    connection.execute(settings).await?;
    Ok(())
}

/// Takes the lock of this name until the transaction ends.
async fn lock(tx: &mut MySqlConnection, name: &str) -> Result<()> {
    sqlx::query("INSERT INTO postrider_mutex (name) VALUES (?) ON DUPLICATE KEY UPDATE name = VALUES(name)")
        .bind(name)
        .execute(tx)
        .await
        .map_err(db)?;
    Ok(())
}

/// Numbers for an `IN`. They are ours, so they need no quoting; a parameter each would make a statement of every length.
fn list(ids: &[i64]) -> String {
    ids.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")
}

/// Question marks for an `IN` of texts.
fn marks(count: usize) -> String {
    vec!["?"; count].join(", ")
}

/// A delay for `INTERVAL ? MICROSECOND`.
fn micros(delay: Duration) -> i64 {
    // A century: beyond it no date is left.
    const MAX: i64 = 100 * 366 * 24 * 60 * 60 * 1_000_000;
    i64::try_from(delay.as_micros()).unwrap_or(MAX).min(MAX)
}

#[async_trait]
impl Store for MysqlStore {
    async fn set_routes(&self, routes: &[Route]) -> Result<()> {
        routes::set(self, routes).await
    }

    fn source(&self, route: &Route, lanes: u32) -> Arc<dyn Source> {
        Arc::new(source::MysqlSource::new(self.clone(), route, lanes))
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
        self.own.close().await;
        self.effects.close().await;
        self.pool.close().await;
    }
}
