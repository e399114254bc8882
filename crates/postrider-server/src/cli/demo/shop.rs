//! The service of the demo: accounts in SQLite, and an event for every change, in one transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use postrider::store::sqlite::SqliteStore;
use postrider::{Error, Event, Kind, Outbox, Payload, Result};
use serde::{Deserialize, Serialize};
use sqlx::{Sqlite, Transaction};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::names::TOPIC;

/// Tasks that write at once.
const PRODUCERS: u64 = 4;
/// Each is the key of its events.
const ACCOUNTS: u64 = 100;
/// Accounts created in one transaction; small, since these transactions also measure the disk.
const ACCOUNTS_AT_ONCE: usize = 4;
/// Events of one transaction, at most. Several of one account are welcome: their order is at stake too.
const BATCH_MAX: u64 = 20;
/// One transaction in so many is rolled back on purpose.
const ROLLBACK_ONE_IN: u32 = 8;
/// The producers take about this long, whatever the number of events, if the disk can.
const PRODUCING: Duration = Duration::from_secs(12);
/// Each try lasts as long as the busy timeout.
const BEGIN_TRIES: u32 = 3;
const SQLITE_BUSY: &str = "5";
/// Below it there is nothing to pause for.
const PAUSE_MIN: Duration = Duration::from_millis(1);

const DOING: &str = "a producer could not write";

/// `ledger` is the truth: its rows are written in the transaction of the event. `rolled_back` names, afterwards, the
/// events that must never arrive. `effect` has no constraint that would hide a mistake.
const TABLES: &str = "
    CREATE TABLE account (
        id      TEXT PRIMARY KEY,
        version INTEGER NOT NULL DEFAULT 0,
        balance INTEGER NOT NULL DEFAULT 0
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE ledger (
        id       INTEGER PRIMARY KEY,
        event_id TEXT NOT NULL UNIQUE,
        account  TEXT NOT NULL REFERENCES account (id),
        version  INTEGER NOT NULL,
        amount   INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE rolled_back (event_id TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
    CREATE TABLE effect (
        id       INTEGER PRIMARY KEY AUTOINCREMENT,
        consumer TEXT NOT NULL,
        event_id TEXT NOT NULL,
        account  TEXT NOT NULL,
        version  INTEGER NOT NULL,
        worker   TEXT NOT NULL
    ) STRICT;
    CREATE INDEX effect_by_event ON effect (consumer, event_id);
";

/// The event: an account's balance has changed for the `version`-th time.
#[derive(Debug, Serialize, Deserialize)]
pub struct Change {
    /// The key.
    pub account: String,
    /// Counts the changes of the account, without gaps.
    pub version: i64,
    /// What was added.
    pub amount: i64,
}

impl Payload for Change {
    const TYPE: &'static str = "account.changed";
    const TOPIC: &'static str = TOPIC;

    fn key(&self) -> Option<String> {
        Some(self.account.clone())
    }
}

/// A failed query of the demo's own.
pub fn sql(doing: &'static str) -> impl Fn(sqlx::Error) -> Error {
    move |error| Error::new(Kind::Other, doing).with_source(error)
}

/// Creates the service's tables beside Postrider's, and says how many transactions this disk commits in a second.
pub async fn create(store: &SqliteStore) -> Result<f64> {
    const DOING: &str = "the demo's tables were not created";
    sqlx::raw_sql(TABLES).execute(store.writer()).await.map_err(sql(DOING))?;
    let began = Instant::now();
    for first in (0..ACCOUNTS).step_by(ACCOUNTS_AT_ONCE) {
        let mut tx = begin(store).await?;
        for account in first..first + ACCOUNTS_AT_ONCE as u64 {
            let insert = sqlx::query("INSERT INTO account (id) VALUES (?)").bind(account_id(account));
            insert.execute(&mut *tx).await.map_err(sql(DOING))?;
        }
        tx.commit().await.map_err(sql(DOING))?;
    }
    let commits = ACCOUNTS as f64 / ACCOUNTS_AT_ONCE as f64;
    Ok(commits / began.elapsed().as_secs_f64())
}

/// Begins a transaction. SQLite has one writer and no queue for it: a process may wait in vain while others write
/// without a pause, and asks again.
async fn begin(store: &SqliteStore) -> Result<Transaction<'static, Sqlite>> {
    let mut tries = BEGIN_TRIES;
    loop {
        tries -= 1;
        match store.writer().begin_with("BEGIN IMMEDIATE").await {
            Err(sqlx::Error::Database(error)) if tries > 0 && error.code().as_deref() == Some(SQLITE_BUSY) => {}
            begun => return begun.map_err(sql(DOING)),
        }
    }
}

fn account_id(number: u64) -> String {
    format!("account-{number:03}")
}

/// How fast the producers work.
#[derive(Debug)]
pub struct Pace {
    events: u64,
    batch: u64,
    /// From one transaction of a producer to its next.
    pause: Duration,
}

impl Pace {
    /// So many events within about `PRODUCING`, if the disk can.
    pub fn of(events: u64) -> Self {
        let batch = (events / 200).clamp(1, BATCH_MAX);
        let committing = 1.0 - 1.0 / f64::from(ROLLBACK_ONE_IN);
        let transactions = events as f64 / batch as f64 / committing;
        Self { events, batch, pause: PRODUCING.mul_f64(PRODUCERS as f64 / transactions).max(PAUSE_MIN) }
    }

    /// A few events a second, without end.
    pub fn trickle() -> Self {
        Self { events: u64::MAX, batch: 2, pause: Duration::from_millis(400) }
    }
}

/// The producers while they work.
pub struct Shop {
    tasks: JoinSet<Result<()>>,
}

impl Shop {
    /// Starts producers; `stop` ends them early.
    pub fn open(store: &SqliteStore, pace: &Pace, stop: &CancellationToken) -> Self {
        let left = Arc::new(AtomicU64::new(pace.events));
        let mut tasks = JoinSet::new();
        for _ in 0..PRODUCERS {
            let producer = Producer {
                store: store.clone(),
                outbox: Outbox::new().source("demo"),
                left: left.clone(),
                batch: pace.batch,
                forsaken: Vec::new(),
            };
            tasks.spawn(producer.run(pace.pause, stop.clone()));
        }
        Self { tasks }
    }

    /// Whether all producers are done; an error of one of them.
    pub fn check(&mut self) -> Result<bool> {
        while let Some(ended) = self.tasks.try_join_next() {
            ended.map_err(|error| Error::new(Kind::Other, "a producer ended unexpectedly").with_source(error))??;
        }
        Ok(self.tasks.is_empty())
    }

    /// Waits for the producers' end.
    pub async fn close(mut self) -> Result<()> {
        while let Some(ended) = self.tasks.join_next().await {
            ended.map_err(|error| Error::new(Kind::Other, "a producer ended unexpectedly").with_source(error))??;
        }
        Ok(())
    }
}

struct Producer {
    store: SqliteStore,
    outbox: Outbox,
    left: Arc<AtomicU64>,
    batch: u64,
    /// Events of rolled-back transactions, to be named in the next one that commits.
    forsaken: Vec<String>,
}

impl Producer {
    async fn run(mut self, pause: Duration, stop: CancellationToken) -> Result<()> {
        let mut pace = tokio::time::interval(pause);
        pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = pace.tick() => {}
            }
            let is_rolled_back = fastrand::u32(0..ROLLBACK_ONE_IN) == 0;
            let count = if is_rolled_back { self.batch } else { self.take() };
            if count == 0 {
                break;
            }
            self.transact(count, is_rolled_back).await?;
        }
        self.transact(0, false).await
    }

    /// Takes the next events out of those that are left.
    fn take(&self) -> u64 {
        let take = |left: u64| Some(left.saturating_sub(self.batch));
        let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or(0);
        left.min(self.batch)
    }

    /// Changes accounts and appends their events, in one transaction.
    async fn transact(&mut self, count: u64, is_rolled_back: bool) -> Result<()> {
        let mut tx = begin(&self.store).await?;
        let mut events = Vec::new();
        for _ in 0..count {
            events.push(change(&mut tx).await?);
        }
        self.outbox.append_all(&mut tx, &events).await?;
        if is_rolled_back {
            tx.rollback().await.map_err(sql(DOING))?;
            self.forsaken.extend(events.iter().map(|event| event.id().to_string()));
            return Ok(());
        }
        for id in self.forsaken.drain(..) {
            let insert = sqlx::query("INSERT INTO rolled_back (event_id) VALUES (?)").bind(id);
            insert.execute(&mut *tx).await.map_err(sql(DOING))?;
        }
        tx.commit().await.map_err(sql(DOING))
    }
}

/// One business change, and its event.
async fn change(tx: &mut Transaction<'_, Sqlite>) -> Result<Event> {
    let (account, amount) = (account_id(fastrand::u64(0..ACCOUNTS)), fastrand::i64(-500..=500));
    let version: i64 = sqlx::query_scalar(
        "UPDATE account SET version = version + 1, balance = balance + ? WHERE id = ? RETURNING version",
    )
    .bind(amount)
    .bind(&account)
    .fetch_one(&mut **tx)
    .await
    .map_err(sql(DOING))?;
    let event = Event::of(&Change { account: account.clone(), version, amount })?;
    sqlx::query("INSERT INTO ledger (event_id, account, version, amount) VALUES (?, ?, ?, ?)")
        .bind(event.id().to_string())
        .bind(account)
        .bind(version)
        .bind(amount)
        .execute(&mut **tx)
        .await
        .map_err(sql(DOING))?;
    Ok(event)
}
