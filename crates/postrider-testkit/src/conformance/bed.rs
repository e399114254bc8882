//! What a suite needs of a backend: a fresh, migrated store and open producer transactions.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::Route;
use postrider::event::Event;
use postrider::handler::HandlerError;
use postrider::inbox::Inbox;
use postrider::lease::{Lease, Leases};
use postrider::migrate::Migrate;
use postrider::outbox::{Outbox, OutboxWriter};
use postrider::source::Source;
use postrider::store::Store;
use postrider::store::mysql::MysqlStore;
use postrider::store::postgres::PostgresStore;
use postrider::store::sqlite::SqliteStore;
use sqlx::{MySql, Postgres, Sqlite, Transaction};

use crate::testbed;

/// Leases in tests last this long unless a test is about their end.
pub const TTL: Duration = Duration::from_secs(30);

/// The transaction of a bed's store.
pub type Tx<B> = <<B as Bed>::Store as Inbox>::Tx;

/// A store under test.
#[async_trait]
pub trait Bed: Send + Sync + 'static {
    /// The store's own type, with its inbox.
    type Store: Store + Inbox + Clone + 'static;

    /// The store.
    fn store(&self) -> &Self::Store;

    /// Opens the same database once more, for an instance that ends without a word: its connections end with it.
    fn open_again(&self) -> Pin<Box<dyn Future<Output = Self::Store> + Send>>;

    /// The source under test; a planted bug replaces it.
    fn source(&self, lanes: u32) -> Arc<dyn Source> {
        self.store().source(&Route::all("default"), lanes)
    }

    /// Opens a producer's transaction. Several may be open at once only where writers are concurrent.
    async fn begin(&self) -> Box<dyn Producer>;

    /// Inserts one row of effect in an open transaction.
    async fn write_effect(tx: &mut Tx<Self>, consumer: &str, name: &str) -> Result<(), HandlerError>;

    /// The names of a consumer's effects, in the order in which they were applied.
    async fn effects(&self, consumer: &str) -> Vec<String>;

    /// A consumer's dead letters, oldest first: the event's name, the type of the error, the number of attempts.
    async fn dead_letters(&self, consumer: &str) -> Vec<(String, String, i64)>;

    /// The event's status in the view for people.
    async fn outbox_status(&self, event: &Event) -> String;

    /// Runs the statement of the bed's own dialect: PostgreSQL's, SQLite's or MySQL's.
    async fn sql(&self, statements: [&'static str; 3]);

    /// Whether the bed's dialect has no statement here.
    fn is_without(&self, statements: [&'static str; 3]) -> bool;

    /// A query that runs for ever where the usual one is ended by the server.
    fn endless(&self) -> Option<&'static str> {
        None
    }

    /// Takes the lease of a lane.
    async fn lease(&self, lane: u32) -> Lease {
        let lease = self.store().take("relay/default", lane, "test", TTL).await.expect("the store answers");
        lease.expect("the lane is free")
    }
}

/// An open transaction of a producer.
#[async_trait]
pub trait Producer: Send {
    /// Appends an event in it.
    async fn append(&mut self, event: &Event);
    /// Ends it well.
    async fn commit(self: Box<Self>);
    /// Ends it badly.
    async fn rollback(self: Box<Self>);
}

/// An event whose payload is its name.
pub fn event(key: &str, name: &str) -> Event {
    let builder = Event::builder("test.created", "created").key(key).json(&name).expect("a string is JSON");
    builder.build().expect("the event is valid")
}

/// The name that [`event`] was given.
pub fn name(event: &Event) -> String {
    event.decode().expect("the payload is a name")
}

/// A transaction of any `sqlx` database.
struct Open<Tx>(Tx);

macro_rules! producer {
    ($database:ty) => {
        #[async_trait]
        impl Producer for Open<Transaction<'static, $database>>
        where
            Transaction<'static, $database>: OutboxWriter,
        {
            async fn append(&mut self, event: &Event) {
                Outbox::new().append(&mut self.0, event).await.expect("the event is appended");
            }
            async fn commit(self: Box<Self>) {
                self.0.commit().await.expect("the transaction commits");
            }
            async fn rollback(self: Box<Self>) {
                self.0.rollback().await.expect("the transaction rolls back");
            }
        }
    };
}
producer!(Postgres);
producer!(Sqlite);
producer!(MySql);

/// A fresh database on the shared PostgreSQL.
pub struct PostgresBed {
    store: PostgresStore,
    /// Where the database is, for tests that connect by themselves.
    pub url: String,
}

impl PostgresBed {
    /// A fresh, migrated database.
    pub async fn new() -> Self {
        let bed = Self::bare().await;
        bed.store.migrate().await.expect("the migrations apply");
        sqlx::raw_sql("CREATE TABLE effect (seq bigserial, consumer text, name text)")
            .execute(bed.store.pool())
            .await
            .expect("the effect table is made");
        bed
    }

    /// A fresh, empty database.
    pub async fn bare() -> Self {
        let name = testbed::unique("suite");
        let url = testbed::postgres().await.database(&name).await.expect("a fresh database");
        let store = PostgresStore::connect(&url).await.expect("PostgreSQL answers");
        Self { store, url }
    }
}

#[async_trait]
impl Bed for PostgresBed {
    type Store = PostgresStore;

    fn store(&self) -> &PostgresStore {
        &self.store
    }

    fn open_again(&self) -> Pin<Box<dyn Future<Output = PostgresStore> + Send>> {
        let url = self.url.clone();
        Box::pin(async move { PostgresStore::connect(&url).await.expect("PostgreSQL answers") })
    }

    async fn write_effect(tx: &mut Tx<Self>, consumer: &str, name: &str) -> Result<(), HandlerError> {
        sqlx::query("INSERT INTO effect (consumer, name) VALUES ($1, $2)")
            .bind(consumer)
            .bind(name)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    async fn begin(&self) -> Box<dyn Producer> {
        Box::new(Open(self.store.pool().begin().await.expect("a transaction")))
    }

    async fn effects(&self, consumer: &str) -> Vec<String> {
        sqlx::query_scalar("SELECT name FROM effect WHERE consumer = $1 ORDER BY seq")
            .bind(consumer)
            .fetch_all(self.store.pool())
            .await
            .expect("effects are read")
    }

    async fn dead_letters(&self, consumer: &str) -> Vec<(String, String, i64)> {
        sqlx::query_as(
            "SELECT convert_from(payload, 'UTF8')::json #>> '{}', error_type, jsonb_array_length(history)::bigint \
             FROM postrider.dead_letter WHERE consumer = $1 AND state = 'dead' ORDER BY id",
        )
        .bind(consumer)
        .fetch_all(self.store.pool())
        .await
        .expect("dead letters are read")
    }

    async fn sql(&self, statements: [&'static str; 3]) {
        sqlx::raw_sql(statements[0]).execute(self.store.pool()).await.expect("the statement runs");
    }

    fn is_without(&self, statements: [&'static str; 3]) -> bool {
        statements[0].is_empty()
    }

    async fn outbox_status(&self, event: &Event) -> String {
        sqlx::query_scalar("SELECT status FROM postrider.outbox_status WHERE event_id = $1")
            .bind(event.id())
            .fetch_one(self.store.pool())
            .await
            .expect("the status is read")
    }
}

/// A fresh SQLite file.
pub struct SqliteBed {
    store: SqliteStore,
    folder: tempfile::TempDir,
}

impl SqliteBed {
    /// A fresh, migrated file.
    pub async fn new() -> Self {
        let bed = Self::bare().await;
        bed.store.migrate().await.expect("the migrations apply");
        let mut tx = bed.store.begin().await.expect("a transaction");
        sqlx::raw_sql("CREATE TABLE effect (seq INTEGER PRIMARY KEY AUTOINCREMENT, consumer TEXT, name TEXT)")
            .execute(&mut *tx)
            .await
            .expect("the effect table is made");
        tx.commit().await.expect("commit");
        bed
    }

    /// A fresh, empty file.
    pub async fn bare() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let store = SqliteStore::open(&folder.path().join("test.db")).await.expect("the file opens");
        Self { store, folder }
    }

    /// Where the file is.
    pub fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("test.db")
    }
}

#[async_trait]
impl Bed for SqliteBed {
    type Store = SqliteStore;

    fn store(&self) -> &SqliteStore {
        &self.store
    }

    fn open_again(&self) -> Pin<Box<dyn Future<Output = SqliteStore> + Send>> {
        let path = self.path();
        Box::pin(async move { SqliteStore::open(&path).await.expect("the file opens") })
    }

    async fn write_effect(tx: &mut Tx<Self>, consumer: &str, name: &str) -> Result<(), HandlerError> {
        sqlx::query("INSERT INTO effect (consumer, name) VALUES (?1, ?2)")
            .bind(consumer)
            .bind(name)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    async fn begin(&self) -> Box<dyn Producer> {
        Box::new(Open(self.store.begin().await.expect("a transaction")))
    }

    async fn effects(&self, consumer: &str) -> Vec<String> {
        let mut tx = self.store.begin().await.expect("a transaction");
        let names = sqlx::query_scalar("SELECT name FROM effect WHERE consumer = ?1 ORDER BY seq")
            .bind(consumer)
            .fetch_all(&mut *tx)
            .await
            .expect("effects are read");
        tx.rollback().await.expect("rollback");
        names
    }

    async fn dead_letters(&self, consumer: &str) -> Vec<(String, String, i64)> {
        sqlx::query_as(
            "SELECT json_extract(CAST(payload AS TEXT), '$'), error_type, json_array_length(history)
               FROM dead_letter WHERE consumer = ?1 AND state = 'dead' ORDER BY id",
        )
        .bind(consumer)
        .fetch_all(self.store.reader())
        .await
        .expect("dead letters are read")
    }

    async fn sql(&self, statements: [&'static str; 3]) {
        sqlx::raw_sql(statements[1]).execute(self.store.writer()).await.expect("the statement runs");
    }

    fn is_without(&self, statements: [&'static str; 3]) -> bool {
        statements[1].is_empty()
    }

    async fn outbox_status(&self, event: &Event) -> String {
        sqlx::query_scalar("SELECT status FROM outbox_status WHERE event_id = ?1")
            .bind(event.id().to_string())
            .fetch_one(self.store.reader())
            .await
            .expect("the status is read")
    }
}

/// A fresh database on the shared MariaDB.
pub struct MysqlBed {
    store: MysqlStore,
    /// Where the database is, for tests that connect by themselves.
    pub url: String,
}

impl MysqlBed {
    /// A fresh, migrated database.
    pub async fn new() -> Self {
        let bed = Self::bare().await;
        bed.migrate().await;
        bed
    }

    /// A fresh, empty database.
    pub async fn bare() -> Self {
        Self::on(&testbed::mariadb().await).await
    }

    /// A fresh, empty database on this server.
    pub async fn on(server: &testbed::MariaDb) -> Self {
        let url = server.database("suite").await.expect("a fresh database");
        let store = MysqlStore::connect(&url).await.expect("MariaDB answers");
        Self { store, url }
    }

    /// Makes the tables.
    pub async fn migrate(&self) {
        self.store.migrate().await.expect("the migrations apply");
        sqlx::raw_sql("CREATE TABLE effect (seq BIGINT AUTO_INCREMENT PRIMARY KEY, consumer TEXT, name TEXT)")
            .execute(self.store.pool())
            .await
            .expect("the effect table is made");
    }
}

#[async_trait]
impl Bed for MysqlBed {
    type Store = MysqlStore;

    fn store(&self) -> &MysqlStore {
        &self.store
    }

    fn open_again(&self) -> Pin<Box<dyn Future<Output = MysqlStore> + Send>> {
        let url = self.url.clone();
        Box::pin(async move { MysqlStore::connect(&url).await.expect("MariaDB answers") })
    }

    async fn write_effect(tx: &mut Tx<Self>, consumer: &str, name: &str) -> Result<(), HandlerError> {
        sqlx::query("INSERT INTO effect (consumer, name) VALUES (?, ?)")
            .bind(consumer)
            .bind(name)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    async fn begin(&self) -> Box<dyn Producer> {
        Box::new(Open(self.store.pool().begin().await.expect("a transaction")))
    }

    async fn effects(&self, consumer: &str) -> Vec<String> {
        sqlx::query_scalar("SELECT name FROM effect WHERE consumer = ? ORDER BY seq")
            .bind(consumer)
            .fetch_all(self.store.pool())
            .await
            .expect("effects are read")
    }

    async fn dead_letters(&self, consumer: &str) -> Vec<(String, String, i64)> {
        sqlx::query_as(
            "SELECT JSON_UNQUOTE(CONVERT(payload USING utf8mb4)), error_type, CAST(JSON_LENGTH(history) AS SIGNED) \
             FROM postrider_dead_letter WHERE consumer = ? AND state = 'dead' ORDER BY id",
        )
        .bind(consumer)
        .fetch_all(self.store.pool())
        .await
        .expect("dead letters are read")
    }

    async fn sql(&self, statements: [&'static str; 3]) {
        sqlx::raw_sql(statements[2]).execute(self.store.pool()).await.expect("the statement runs");
    }

    fn is_without(&self, statements: [&'static str; 3]) -> bool {
        statements[2].is_empty()
    }

    fn endless(&self) -> Option<&'static str> {
        Some(
            "SELECT COUNT(*) AS n FROM information_schema.columns a, information_schema.columns b, \
             information_schema.columns c",
        )
    }

    async fn outbox_status(&self, event: &Event) -> String {
        sqlx::query_scalar("SELECT status FROM postrider_outbox_status WHERE event_id = ?")
            .bind(event.id().to_string())
            .fetch_one(self.store.pool())
            .await
            .expect("the status is read")
    }
}
