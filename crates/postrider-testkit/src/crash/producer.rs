//! Producers: overlapping transactions that change accounts, append events, and now and then change their mind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use postrider::Event;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::store::{Draft, End, Entry, Ledger, Teller};
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
/// The topic of all events.
pub(super) const TOPIC: &str = "accounts.changed";
/// The size of the usual event.
const PAYLOAD_BYTES: usize = 300;

/// What the producers share with the run.
pub(super) struct Production {
    pub ledger: Arc<dyn Ledger>,
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

/// Runs one producer to the end and returns the events that were rolled back for certain.
pub(super) async fn produce(production: Arc<Production>, mut rng: fastrand::Rng) -> Vec<Uuid> {
    let mut rolled_back = Vec::new();
    let mut teller: Option<Box<dyn Teller>> = None;
    while !production.is_done() {
        if production.is_ahead() {
            tokio::time::sleep(RECONNECT_EVERY / 5).await;
            continue;
        }
        let Some(open) = &mut teller else {
            match production.ledger.teller().await {
                Ok(new) => teller = Some(new),
                Err(_) => tokio::time::sleep(RECONNECT_EVERY).await,
            }
            continue;
        };
        let draft = draft(&production, &mut rng);
        let ids = draft.entries.iter().map(|entry| entry.id);
        match open.transact(&draft).await {
            Ok(End::Committed) => {
                production.committed.fetch_add(ids.len() as u64, Ordering::Relaxed);
            }
            Ok(End::RolledBack) => rolled_back.extend(ids),
            Ok(End::Unknown) => {
                production.unknown.fetch_add(1, Ordering::Relaxed);
                teller = None;
            }
            // The commit was not even sent.
            Err(_) => {
                production.failed.fetch_add(1, Ordering::Relaxed);
                rolled_back.extend(ids);
                teller = None;
            }
        }
    }
    rolled_back
}

fn draft(production: &Production, rng: &mut fastrand::Rng) -> Draft {
    let count = if rng.u32(..SEVERAL_IN) == 0 { rng.usize(SEVERAL) } else { 1 };
    let mut accounts: Vec<usize> = (0..count).map(|_| rng.usize(..production.keys)).collect();
    // Everybody locks accounts in the same order, so nobody waits in a circle.
    accounts.sort_unstable();
    let hold = (rng.u32(..HOLD_IN) == 0).then(|| Duration::from_millis(rng.u64(HOLD_MS)));
    let is_held_first = rng.bool();
    let is_regretted = rng.u32(..ROLLBACK_IN) == 0;
    let entries = accounts.into_iter().map(|account| Entry {
        id: Uuid::now_v7(),
        key: format!("account-{account}"),
        is_poison: production.poison_in > 0 && rng.u32(..production.poison_in) == 0,
    });
    Draft { entries: entries.collect(), hold, is_held_first, is_regretted }
}

pub(super) fn event(id: Uuid, key: &str, version: i64, is_poison: bool) -> Result<Event> {
    let padding = "x".repeat(PAYLOAD_BYTES - 60);
    let payload = serde_json::json!({ "version": version, "is_poison": is_poison, "padding": padding });
    Ok(Event::builder(TOPIC, "account.changed").id(id).key(key).json(&payload)?.build()?)
}
