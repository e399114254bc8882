//! Producers: overlapping transactions that change accounts, append events, and now and then change their mind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use postrider::{Event, Outbox};
use sqlx::{Connection, PgConnection};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::testbed::Result;

/// One transaction in so many is rolled back by its producer.
const ROLLBACK_IN: u32 = 10;
/// One in so many stays open for a while, so that later ones commit before it.
const HOLD_IN: u32 = 20;
/// For how long.
const HOLD_MS: std::ops::RangeInclusive<u64> = 1..=50;
/// One in so many writes several events.
const SEVERAL_IN: u32 = 8;
/// How many then.
const SEVERAL: std::ops::RangeInclusive<usize> = 2..=5;
/// Producers wait when consumers are this many events behind, so that faults hit all parts of the way at work, until
/// the end.
const AHEAD_MAX: u64 = 20_000;
/// How often a producer tries to reach a database that is away.
const RECONNECT_EVERY: Duration = Duration::from_millis(100);
/// The size of the usual event.
const PAYLOAD_BYTES: usize = 300;

/// What the producers share with the run.
#[derive(Debug)]
pub(super) struct Production {
    pub url: String,
    pub keys: usize,
    /// Of so many events, one is poison; none when 0.
    pub poison_in: u32,
    /// How many events to commit.
    pub target: u64,
    pub consumers: u64,
    /// Set when the run has failed.
    pub stop: CancellationToken,
    /// Events of transactions that are committed for certain.
    pub committed: AtomicU64,
    /// About how many effects there are, as the run sees it.
    pub effects: AtomicU64,
    /// Transactions whose commit was sent but not answered.
    pub unknown: AtomicU64,
    /// Transactions that an error ended before their commit.
    pub failed: AtomicU64,
}

impl Production {
    fn is_done(&self) -> bool {
        self.stop.is_cancelled() || self.committed.load(Ordering::Relaxed) >= self.target
    }

    fn is_ahead(&self) -> bool {
        let applied = self.effects.load(Ordering::Relaxed) / self.consumers.max(1);
        self.committed.load(Ordering::Relaxed).saturating_sub(applied) > AHEAD_MAX
    }
}

/// What became of a transaction.
enum End {
    Committed,
    RolledBack,
    /// The connection was lost while committing: only the ledger knows.
    Unknown,
}

/// Runs one producer to the end and returns the events that were rolled back for certain.
pub(super) async fn produce(production: Arc<Production>, mut rng: fastrand::Rng) -> Vec<Uuid> {
    let mut rolled_back = Vec::new();
    let mut connection: Option<PgConnection> = None;
    while !production.is_done() {
        if production.is_ahead() {
            tokio::time::sleep(RECONNECT_EVERY / 5).await;
            continue;
        }
        let Some(open) = &mut connection else {
            match PgConnection::connect(&production.url).await {
                Ok(new) => connection = Some(new),
                Err(_) => tokio::time::sleep(RECONNECT_EVERY).await,
            }
            continue;
        };
        let mut ids = Vec::new();
        match transact(open, &production, &mut rng, &mut ids).await {
            Ok(End::Committed) => {
                production.committed.fetch_add(ids.len() as u64, Ordering::Relaxed);
            }
            Ok(End::RolledBack) => rolled_back.append(&mut ids),
            Ok(End::Unknown) => {
                production.unknown.fetch_add(1, Ordering::Relaxed);
                connection = None;
            }
            // The commit was not even sent.
            Err(_) => {
                production.failed.fetch_add(1, Ordering::Relaxed);
                rolled_back.append(&mut ids);
                connection = None;
            }
        }
    }
    rolled_back
}

async fn transact(
    connection: &mut PgConnection,
    production: &Production,
    rng: &mut fastrand::Rng,
    ids: &mut Vec<Uuid>,
) -> Result<End> {
    let count = if rng.u32(..SEVERAL_IN) == 0 { rng.usize(SEVERAL) } else { 1 };
    let mut accounts: Vec<usize> = (0..count).map(|_| rng.usize(..production.keys)).collect();
    // Everybody locks accounts in the same order, so nobody waits in a circle.
    accounts.sort_unstable();
    let hold = (rng.u32(..HOLD_IN) == 0).then(|| Duration::from_millis(rng.u64(HOLD_MS)));
    let is_held_first = rng.bool();
    let is_regretted = rng.u32(..ROLLBACK_IN) == 0;

    let mut tx = connection.begin().await?;
    if let (Some(hold), true) = (hold, is_held_first) {
        // An old transaction id on young events: whoever orders by it gets them wrong.
        sqlx::query("SELECT pg_current_xact_id()").execute(&mut *tx).await?;
        tokio::time::sleep(hold).await;
    }
    let (mut events, mut keys, mut versions, mut poisons) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for account in accounts {
        let key = format!("account-{account}");
        let version: i64 =
            sqlx::query_scalar("UPDATE crash.account SET version = version + 1 WHERE key = $1 RETURNING version")
                .bind(&key)
                .fetch_one(&mut *tx)
                .await?;
        let is_poison = production.poison_in > 0 && rng.u32(..production.poison_in) == 0;
        let event = event(Uuid::now_v7(), &key, version, is_poison)?;
        ids.push(event.id());
        poisons.push(is_poison);
        events.push(event);
        keys.push(key);
        versions.push(version);
    }
    Outbox::new().append_all(&mut *tx, &events).await?;
    sqlx::query(
        "INSERT INTO crash.ledger (event_id, key, version, is_poison) \
         SELECT * FROM unnest($1::uuid[], $2::text[], $3::bigint[], $4::boolean[])",
    )
    .bind(&*ids)
    .bind(keys)
    .bind(versions)
    .bind(poisons)
    .execute(&mut *tx)
    .await?;
    if let (Some(hold), false) = (hold, is_held_first) {
        tokio::time::sleep(hold).await;
    }
    if is_regretted {
        // Rolled back also when the answer does not come.
        tx.rollback().await?;
        return Ok(End::RolledBack);
    }
    Ok(if tx.commit().await.is_ok() { End::Committed } else { End::Unknown })
}

pub(super) fn event(id: Uuid, key: &str, version: i64, is_poison: bool) -> Result<Event> {
    let padding = "x".repeat(PAYLOAD_BYTES - 60);
    let payload = serde_json::json!({ "version": version, "is_poison": is_poison, "padding": padding });
    Ok(Event::builder("accounts.changed", "account.changed").id(id).key(key).json(&payload)?.build()?)
}
