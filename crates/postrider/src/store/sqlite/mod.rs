//! The store in an SQLite file: everything in one place, nothing to install.
//!
//! SQLite has one writer. Inside this process writers queue for one connection, in the order in which they ask, instead
//! of polling for SQLite's lock; several processes may share the file and wait for each other through SQLite's busy
//! handler. Every writing transaction begins with `BEGIN IMMEDIATE`: one that began by reading could be refused when it
//! turns to writing, without a chance to wait. The order of ids is the order of commits, so a position is an id.
//!
//! The clock is the machine's, since there is no server; all processes that share the file see the same one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Transaction};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Store;
use crate::broker::Broker;
use crate::broker::topic::Route;
use crate::claim::Claims;
use crate::doctor::Finding;
use crate::error::{Error, Result};
use crate::handler::{Consumer, ConsumerSpec, RemoteHandler};
use crate::source::Source;

mod alert;
mod audit;
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
mod upkeep;
mod view;

pub use migrate::SCHEMA;

/// How long SQLite waits for another process to end its transaction.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a caller waits for a connection of ours. A handler's transaction holds the only writer, so this bounds how
/// long all others wait for it.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(30);
/// Reads are short; more connections than this only share the same two or four cores.
const READERS_MAX: u32 = 4;
/// Rows that SQLite's thread may be ahead of ours: a page, so that the two do not wake each other for every few rows.
const ROW_BUFFER: usize = 512;
/// The switch to WAL cannot wait in the busy handler, so opening a new file from several processes at once is tried
/// again this often.
const OPEN_RETRY: Duration = Duration::from_millis(50);
/// After a burst the WAL file is cut back to this.
const WAL_BYTES_MAX: &str = "67108864";

/// `BEGIN` for writers.
const BEGIN: &str = "BEGIN IMMEDIATE";

/// Now, in milliseconds since the epoch, as a literal for `concat!`.
macro_rules! now_ms {
    () => {
        "CAST(unixepoch('subsec') * 1000 AS INTEGER)"
    };
}
use now_ms;

/// A transaction on an SQLite file.
pub(crate) type Tx = Transaction<'static, Sqlite>;

/// A store in an SQLite file. Cheap to clone; all clones share the same connections.
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    writer: SqlitePool,
    reader: SqlitePool,
    /// Rings when this process has committed to the outbox.
    enqueued: Notify,
    /// Rings when this process has appended to the embedded broker's log.
    appended: Notify,
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.inner.path).finish_non_exhaustive()
    }
}

impl SqliteStore {
    /// Opens the file, and creates it when it does not exist; its directory must. Does not migrate.
    pub async fn open(path: &Path) -> Result<Self> {
        let deadline = Instant::now() + BUSY_TIMEOUT;
        let writer = loop {
            match writer_pool().connect_with(Self::options(path)).await {
                Ok(pool) => break pool,
                Err(error) if error::is_busy(&error) && Instant::now() < deadline => {
                    tokio::time::sleep(OPEN_RETRY).await;
                }
                Err(error) => return Err(error::classify(Some(path), "the store was not opened", error)),
            }
        };
        // WAL is a property of the file, so readers do not ask for it: that would take a lock.
        let reading = base_options(path).pragma("query_only", "ON");
        let reader = SqlitePoolOptions::new()
            .max_connections(READERS_MAX)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .test_before_acquire(false)
            .connect_lazy_with(reading);
        let inner = Inner { path: path.to_owned(), writer, reader, enqueued: Notify::new(), appended: Notify::new() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The options that a service's own connections to the file should use too: WAL, `synchronous=FULL`, foreign keys,
    /// ten seconds of patience.
    pub fn options(path: &Path) -> SqliteConnectOptions {
        base_options(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .pragma("journal_size_limit", WAL_BYTES_MAX)
    }

    /// The connection that all writers of this process share, for services that live in the same file. Begin with
    /// `begin_with("BEGIN IMMEDIATE")`, and do not call the store while the transaction is open: it would wait for
    /// this very connection.
    pub fn writer(&self) -> &SqlitePool {
        &self.inner.writer
    }

    /// Connections that only read.
    pub fn reader(&self) -> &SqlitePool {
        &self.inner.reader
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Begins a writing transaction.
    async fn write(&self, doing: &str) -> Result<Tx> {
        self.inner.writer.begin_with(BEGIN).await.map_err(|error| self.error(doing, error))
    }

    /// Begins a reading transaction: one snapshot for several queries.
    async fn read(&self, doing: &str) -> Result<Tx> {
        self.inner.reader.begin().await.map_err(|error| self.error(doing, error))
    }

    fn error(&self, doing: &str, error: sqlx::Error) -> Error {
        error::classify(Some(&self.inner.path), doing, error)
    }

    /// For `map_err`.
    fn failed<'a>(&'a self, doing: &'a str) -> impl Fn(sqlx::Error) -> Error + 'a {
        move |error| self.error(doing, error)
    }
}

fn base_options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(BUSY_TIMEOUT)
        .row_buffer_size(ROW_BUFFER)
        .disable_statement_logging()
}

fn writer_pool() -> SqlitePoolOptions {
    SqlitePoolOptions::new()
        .max_connections(1)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        // Waiting for the writer is how writers take turns here; sqlx would warn of it after two seconds.
        .acquire_slow_threshold(ACQUIRE_TIMEOUT)
        .idle_timeout(None)
        .max_lifetime(None)
        .test_before_acquire(false)
        // SQLite rolls back by itself when the disk is full; sqlx then fails to roll back, believes the transaction
        // open and refuses every later BEGIN on the connection. Such a connection is closed, and a new one opened.
        .after_release(|connection, _| {
            Box::pin(async move {
                connection.ping().await?;
                Ok(!connection.is_in_transaction())
            })
        })
}

#[async_trait]
impl Store for SqliteStore {
    async fn set_routes(&self, routes: &[Route]) -> Result<()> {
        routes::set(self, routes).await
    }

    fn source(&self, route: &Route, lanes: u32) -> Arc<dyn Source> {
        Arc::new(source::SqliteSource::new(self.clone(), route, lanes))
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

    async fn inspect(&self) -> Result<Vec<Finding>> {
        doctor::inspect(self).await
    }

    async fn close(&self) {
        // The writer last: the last connection to go moves the WAL into the file, and readers may not write.
        self.inner.reader.close().await;
        self.inner.writer.close().await;
    }
}
