//! Injects the planned faults, and measures how long a slot was without a holder.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::broker::BrokerServer;
use super::fleet::{Fleet, RELAYS};
use super::plan::{Fault, Planned};
use super::store::{Ledger, Slot, StoreServer};
use crate::testbed::Result;

/// How often the leases are looked at after a kill.
const WATCH_EVERY: Duration = Duration::from_millis(50);
/// A slot that nobody has taken after this long counts as not taken over.
const WATCH_MAX: Duration = Duration::from_secs(60);

/// What was done, and what came of it.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// Events that were published once more.
    pub duplicates: u64,
    /// How often poison has ended a consumer.
    pub aborts: u64,
    pub relay_kills: usize,
    pub consumer_kills: usize,
    pub freezes: usize,
    pub broker_kills: usize,
    pub broker_stops: usize,
    pub store_kills: usize,
    /// How long a slot whose holder was killed or frozen was without one, where the database was there all the time.
    pub takeovers: Vec<(String, Duration)>,
}

/// The servers and processes that faults are done to.
pub(super) struct Faults {
    pub fleet: Fleet,
    pub ledger: Arc<dyn Ledger>,
    /// What the broker and the database are called.
    pub titles: (&'static str, &'static str),
    pub store: Mutex<Box<dyn StoreServer>>,
    pub broker: Mutex<Box<dyn BrokerServer>>,
    pub record: Mutex<Record>,
}

impl Faults {
    /// Does it, and brings back what was ended.
    pub(super) async fn inject(self: Arc<Self>, planned: Planned) -> Result<()> {
        let Planned { fault, down, at } = planned;
        let percent = (at * 100.0) as u32;
        match fault {
            Fault::Kill(index) => {
                eprintln!("  {percent:>2} %: kill -9 {} for {down:?}", self.fleet.name(index));
                let watch = self.watch(index).await;
                let (killed, ()) = tokio::join!(self.fleet.kill(index, down), self.takeover(watch));
                killed?;
                let mut record = self.record.lock().await;
                *(if index < RELAYS { &mut record.relay_kills } else { &mut record.consumer_kills }) += 1;
            }
            Fault::Freeze => {
                let index = self.holder().await;
                eprintln!("  {percent:>2} %: SIGSTOP {} for {down:?}", self.fleet.name(index));
                let watch = self.watch(index).await;
                let (frozen, ()) = tokio::join!(self.fleet.freeze(index, down), self.takeover(watch));
                frozen?;
                self.record.lock().await.freezes += 1;
            }
            Fault::KillBroker | Fault::StopBroker => {
                let mut broker = self.broker.lock().await;
                if fault == Fault::KillBroker {
                    eprintln!("  {percent:>2} %: kill -9 {} for {down:?}", self.titles.0);
                    broker.kill().await?;
                    self.record.lock().await.broker_kills += 1;
                } else {
                    eprintln!("  {percent:>2} %: {} stops for {down:?}", self.titles.0);
                    broker.stop().await?;
                    self.record.lock().await.broker_stops += 1;
                }
                tokio::time::sleep(down).await;
                broker.restart().await?;
            }
            Fault::KillStore => {
                eprintln!("  {percent:>2} %: kill -9 {} for {down:?}", self.titles.1);
                let mut store = self.store.lock().await;
                store.kill().await?;
                self.record.lock().await.store_kills += 1;
                tokio::time::sleep(down).await;
                store.restart().await?;
            }
        }
        Ok(())
    }

    /// A relay that holds a lane, or the first.
    async fn holder(&self) -> usize {
        let slots = self.ledger.slots().await.unwrap_or_default();
        for index in 0..RELAYS {
            let pid = self.fleet.pid(index).await;
            if pid.is_some() && slots.iter().any(|slot| slot.pid() == pid) {
                return index;
            }
        }
        0
    }

    /// What the process holds at this moment.
    async fn watch(&self, index: usize) -> (Instant, Vec<Slot>) {
        let pid = self.fleet.pid(index).await;
        let mut slots = self.ledger.slots().await.unwrap_or_default();
        slots.retain(|slot| pid.is_some() && slot.pid() == pid);
        (Instant::now(), slots)
    }

    /// Waits until others hold what it held, and records how long that took. An outage of the database in between makes
    /// the figure worthless.
    async fn takeover(&self, (since, mut slots): (Instant, Vec<Slot>)) {
        while !slots.is_empty() && since.elapsed() < WATCH_MAX {
            tokio::time::sleep(WATCH_EVERY).await;
            if self.store.try_lock().is_err() {
                return;
            }
            let Ok(now) = self.ledger.slots().await else { return };
            let is_taken = |slot: &Slot| {
                now.iter().any(|new| new.group == slot.group && new.slot == slot.slot && new.epoch > slot.epoch)
            };
            let (taken, left): (Vec<_>, Vec<_>) = slots.into_iter().partition(is_taken);
            slots = left;
            self.note(taken, since.elapsed()).await;
        }
        self.note(slots, since.elapsed()).await;
    }

    async fn note(&self, slots: Vec<Slot>, took: Duration) {
        let named = slots.into_iter().map(|slot| (format!("{} slot {}", slot.group, slot.slot), took));
        self.record.lock().await.takeovers.extend(named);
    }
}
