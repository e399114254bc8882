//! The database of a run: the server that is killed, the producers' transactions, and the tables that know the truth.
//!
//! A store is a variant of [`StoreKind`], a folder here with its [`StoreServer`], [`Ledger`], [`Teller`] and the handler of
//! its consumers, and a line in [`start`], [`open`] and `consumer.rs`.

mod mysql;
mod postgres;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use clap::ValueEnum;
use postrider::store::Store;
use postrider::store::mysql::MysqlStore;
use postrider::store::postgres::PostgresStore;
use uuid::Uuid;

use crate::checker::History;
use crate::testbed::Result;

/// Which database has the outbox, the inboxes and the effects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum StoreKind {
    /// A PostgreSQL server.
    #[default]
    Postgres,
    /// A MariaDB server.
    Mysql,
}

impl StoreKind {
    /// Its name in what the run says.
    pub(super) fn title(self) -> &'static str {
        match self {
            StoreKind::Postgres => "PostgreSQL",
            StoreKind::Mysql => "MariaDB",
        }
    }

    /// The word on the command line.
    pub(super) fn word(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// A database server. Its futures stay on their thread, as those of the testbed do.
#[async_trait(?Send)]
pub(super) trait StoreServer: Send {
    /// The address of the run's database.
    fn url(&self) -> &str;

    /// Its process, if it runs.
    fn pid(&self) -> Option<u32>;

    /// `kill -9` of all its processes.
    async fn kill(&mut self) -> Result<()>;

    /// Starts it again with its files.
    async fn restart(&mut self) -> Result<()>;
}

/// A slot of a lease group, as the database sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slot {
    pub group: String,
    pub slot: i32,
    pub owner: String,
    pub epoch: i64,
}

impl Slot {
    /// The process that holds it: an owner is called host, process id and a random part.
    pub(super) fn pid(&self) -> Option<u32> {
        self.owner.rsplit('-').nth(1)?.parse().ok()
    }
}

/// An effect: its number, and the event's id, key and version.
pub(super) type Applied = (i64, Uuid, String, i64);

/// The tables of the run, in the database that is being crashed: what producers committed, what consumers did.
///
/// `account` gives each event its version and makes producers wait for each other on a key; `ledger` is the truth of what
/// was committed. `head` is locked by whoever applies an event of a key and remembers the version that it found. `effect`
/// has no unique key on purpose: a double effect must be seen, not prevented.
#[async_trait]
pub(super) trait Ledger: Send + Sync {
    /// About how many effects there are: rolled back ones leave gaps in the sequence.
    async fn effects_about(&self) -> Result<u64>;

    /// How many events were committed.
    async fn committed(&self) -> Result<u64>;

    /// Events that were applied after the effect with this number.
    async fn applied_after(&self, seq: i64, limit: i64) -> Result<Vec<Applied>>;

    /// Poison that is no dead letter, and dead letters that are no poison.
    async fn misjudged(&self, consumers: &[&str]) -> Result<Vec<String>>;

    /// How many different events a consumer has applied or given up.
    async fn applied(&self, consumer: &str) -> Result<u64>;

    /// How many events the relay has not settled as published.
    async fn backlog(&self) -> Result<u64>;

    /// Slots of the embedded broker's consumers that have messages before them, in words.
    async fn unread(&self) -> Result<Vec<String>>;

    /// Who holds what.
    async fn slots(&self) -> Result<Vec<Slot>>;

    /// Some of the events that a consumer is missing, in words.
    async fn missing(&self, consumer: &str) -> Result<Vec<String>>;

    /// The lanes' positions and leases, for a person who wonders why nothing moves.
    async fn relay_state(&self) -> Result<Vec<String>>;

    /// Everything that the database knows of the run.
    async fn history(&self, consumers: &[&str], rolled_back: Vec<Uuid>) -> Result<History>;

    /// A producer's connection.
    async fn teller(&self) -> Result<Box<dyn Teller>>;
}

/// What a producer's transaction does.
#[derive(Debug)]
pub(super) struct Draft {
    pub entries: Vec<Entry>,
    /// Stay open for so long, so that later transactions commit before it.
    pub hold: Option<Duration>,
    /// Before the first change, not after the last one.
    pub is_held_first: bool,
    /// Change its mind at the end.
    pub is_regretted: bool,
}

/// A change of an account, and the event that tells it.
#[derive(Debug)]
pub(super) struct Entry {
    pub id: Uuid,
    pub key: String,
    pub is_poison: bool,
}

/// What became of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Committed,
    RolledBack,
    /// The connection was lost while committing: only the ledger knows.
    Unknown,
}

/// A producer's connection.
#[async_trait]
pub(super) trait Teller: Send {
    /// Changes accounts, appends the events and enters them in the ledger, in one transaction. An error means that its
    /// commit was not even sent; the connection is then of no more use.
    async fn transact(&mut self, draft: &Draft) -> Result<End>;
}

/// Starts a server with Postrider's tables in a database of its own.
pub(super) async fn start(kind: StoreKind) -> Result<Box<dyn StoreServer>> {
    let server: Box<dyn StoreServer> = match kind {
        StoreKind::Postgres => Box::new(postgres::Server::start().await?),
        StoreKind::Mysql => Box::new(mysql::Server::start().await?),
    };
    let store = open(kind, server.url()).await?;
    store.migrate().await?;
    store.close().await;
    Ok(server)
}

/// Makes the tables of the run.
pub(super) async fn ledger(kind: StoreKind, url: &str, keys: usize, consumers: &[&str]) -> Result<Arc<dyn Ledger>> {
    Ok(match kind {
        StoreKind::Postgres => Arc::new(postgres::PostgresLedger::create(url, keys, consumers).await?),
        StoreKind::Mysql => Arc::new(mysql::MysqlLedger::create(url, keys, consumers).await?),
    })
}

/// Connects to it.
pub(super) async fn open(kind: StoreKind, url: &str) -> Result<Arc<dyn Store>> {
    Ok(match kind {
        StoreKind::Postgres => Arc::new(PostgresStore::connect(url).await?),
        StoreKind::Mysql => Arc::new(MysqlStore::connect(url).await?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_slot_is_found_by_its_name() {
        let slot = |owner: &str| Slot { group: "relay/default".into(), slot: 0, owner: owner.into(), epoch: 1 };
        assert_eq!(slot("web-1-4711-0a1b2c").pid(), Some(4711));
        assert_eq!(slot("me").pid(), None);
    }
}
