//! Leases: who does what, decided by the database's clock and fenced by an epoch.
//!
//! A *group* is a piece of work cut into numbered slots (`relay/default` into lanes, `consumer/billing` into slots).
//! Instances join a group as members; each slot has at most one holder. A holder proves with the [`Lease::epoch`] that
//! it still holds the slot: every write that matters compares it, so that an instance that slept through its lease
//! cannot overwrite its successor.
//!
//! [`Share`] is the one loop that joins a group, renews, takes free slots up to a fair share and gives back the rest.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::error::{Error, Kind, Result};
use crate::pulse::{Heart, Pulses, Tally};
use crate::task;

/// The right to work on one slot of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lease {
    /// The work that is shared, `relay/default`.
    pub group: String,
    /// Which part of it.
    pub slot: u32,
    /// The instance that holds it.
    pub owner: String,
    /// Rises with every change of holder. A write with an old epoch is refused.
    pub epoch: i64,
}

/// What a member sees when it calls in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roll {
    /// Of the leases it named, those that are still its own; they were renewed.
    pub held: Vec<Lease>,
    /// Slots with a living holder, its own included.
    pub taken: Vec<u32>,
    /// How many members are alive, itself included.
    pub members: u32,
}

/// A lease as `status` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseView {
    /// The lease.
    pub lease: Lease,
    /// How long it still lasts, by the database's clock; `None` when it has expired or was given back.
    pub remaining: Option<Duration>,
}

/// The store's side of leases. All methods are safe to call concurrently from many instances.
#[async_trait]
pub trait Leases: Pulses {
    /// Joins the group as `owner` (or stays in it) and renews `held`, all for `ttl` from the database's now.
    /// A lease that has expired but that nobody took is renewed too: its epoch has not changed.
    async fn call_in(&self, group: &str, owner: &str, held: &[Lease], ttl: Duration) -> Result<Roll>;

    /// Takes a slot whose lease is free or has expired. Success means that the new epoch is on disk. `None`: somebody
    /// else has it.
    async fn take(&self, group: &str, slot: u32, owner: &str, ttl: Duration) -> Result<Option<Lease>>;

    /// Gives a lease back at once. Without effect when it is not ours any more.
    async fn give_back(&self, lease: &Lease) -> Result<()>;

    /// Leaves the group, so that the others need not wait for our membership to expire.
    async fn leave(&self, group: &str, owner: &str) -> Result<()>;

    /// All slots and their holders, for people.
    async fn leases(&self) -> Result<Vec<LeaseView>>;
}

/// How long a lease lasts, and how often its holder calls in.
#[derive(Debug, Clone, Copy)]
pub struct LeaseTimes {
    /// After this long without a sign of life the slot is free. With the call-in interval below it bounds takeover.
    pub ttl: Duration,
}

impl Default for LeaseTimes {
    fn default() -> Self {
        // Expiry 5 s + one call-in interval of a stand-by (1.7 s) keeps takeover well below 10 s.
        Self { ttl: Duration::from_secs(5) }
    }
}

impl LeaseTimes {
    /// How often to call in: three chances within one lease.
    pub fn interval(&self) -> Duration {
        self.ttl / 3
    }
}

/// What changed at one call-in.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Slots that are ours from now on.
    pub gained: Vec<Lease>,
    /// Slots to stop working on: taken by others, or expired while the database was away.
    pub lost: Vec<Lease>,
    /// Slots that are still ours but more than our share: stop, then give them back.
    pub excess: Vec<Lease>,
}

/// One instance's part in a group.
pub struct Share {
    leases: Arc<dyn Leases>,
    group: String,
    owner: String,
    slots: u32,
    times: LeaseTimes,
    held: Vec<Lease>,
    /// Until when our leases last at least, by our own monotonic clock: measured from before the last successful
    /// call-in was sent, so it can only be too early.
    valid_until: Instant,
    heart: Option<Heart>,
}

impl Share {
    /// A member-to-be of `group`; nothing happens before the first [`Share::run_once`].
    pub fn new(
        leases: Arc<dyn Leases>,
        group: impl Into<String>,
        owner: impl Into<String>,
        slots: u32,
        times: LeaseTimes,
    ) -> Self {
        Self {
            leases,
            group: group.into(),
            owner: owner.into(),
            slots,
            times,
            held: Vec::new(),
            valid_until: Instant::now(),
            heart: None,
        }
    }

    /// Lets the store know, while [`Share::run`] runs, that this member lives, what it has counted in `tally`, and `why`
    /// nothing goes through at the moment, if so.
    #[must_use]
    pub fn heart(mut self, tally: Arc<Tally>, why: impl Fn() -> Option<String> + Send + Sync + 'static) -> Self {
        self.heart = Some(Heart::new(self.leases.clone(), self.group.clone(), self.owner.clone(), tally, why));
        self
    }

    /// Calls in once and says what changed. When the database cannot be reached, leases are lost only after their
    /// time is over by our own clock.
    pub async fn run_once(&mut self) -> Result<Change> {
        let asked_at = Instant::now();
        let roll = match self.call_in().await {
            Ok(roll) => roll,
            Err(error) => {
                if Instant::now() >= self.valid_until && !self.held.is_empty() {
                    let lost = std::mem::take(&mut self.held);
                    return Ok(Change { lost, ..Change::default() });
                }
                return Err(error);
            }
        };
        self.valid_until = asked_at + self.times.ttl;

        let mut change = Change::default();
        let (held, lost): (Vec<_>, Vec<_>) = self.held.drain(..).partition(|lease| roll.held.contains(lease));
        self.held = held;
        change.lost = lost;

        let fair = self.slots.div_ceil(roll.members.max(1)) as usize;
        while self.held.len() > fair {
            if let Some(lease) = self.held.pop() {
                change.excess.push(lease);
            }
        }
        for slot in (0..self.slots).filter(|slot| !roll.taken.contains(slot)) {
            if self.held.len() + change.excess.len() >= fair {
                break;
            }
            match self.leases.take(&self.group, slot, &self.owner, self.times.ttl).await {
                Ok(Some(lease)) => {
                    self.held.push(lease.clone());
                    change.gained.push(lease);
                }
                Ok(None) => {}
                // What changed so far must be reported; the rest is tried at the next call-in.
                Err(error) => {
                    tracing::warn!(group = %self.group, slot, %error, "cannot take a slot");
                    break;
                }
            }
        }
        Ok(change)
    }

    /// Bounded, so that a database that hangs cannot keep us from noticing that our leases are over.
    async fn call_in(&self) -> Result<Roll> {
        let (leases, group, owner) = (self.leases.clone(), self.group.clone(), self.owner.clone());
        let (held, ttl) = (self.held.clone(), self.times.ttl);
        let call = task::start(async move { leases.call_in(&group, &owner, &held, ttl).await });
        match tokio::time::timeout(self.times.ttl, call).await {
            Ok(result) => result,
            Err(_) => Err(Error::new(Kind::Unavailable, "the database did not renew our leases in time")),
        }
    }

    /// Runs one task per held slot until `stop`: starts it when the slot is gained, cancels it when the slot is lost or
    /// more than our share, and gives slots back only after their task has ended. A task that ends by itself frees its
    /// slot for anyone.
    pub async fn run(
        mut self,
        stop: CancellationToken,
        mut start: impl FnMut(Lease, CancellationToken) -> JoinHandle<()>,
    ) -> Result<()> {
        let heart = self.heart.take().map(Heart::start);
        let mut running: HashMap<Lease, (CancellationToken, JoinHandle<()>)> = HashMap::new();
        // Tasks that were told to end. Nothing here waits for them: the other leases must be renewed meanwhile.
        let mut ending: Vec<(Lease, JoinHandle<()>)> = Vec::new();
        while !stop.is_cancelled() {
            ending
                .extend(running.extract_if(|_, (_, task)| task.is_finished()).map(|(lease, (_, task))| (lease, task)));
            for (lease, _) in ending.extract_if(.., |(_, task)| task.is_finished()) {
                self.free(&lease).await;
            }
            match self.run_once().await {
                Ok(change) => {
                    for lease in change.lost.iter().chain(&change.excess) {
                        tracing::info!(group = %self.group, slot = lease.slot, epoch = lease.epoch, "lease ends");
                        if let Some((token, task)) = running.remove(lease) {
                            token.cancel();
                            ending.push((lease.clone(), task));
                        }
                    }
                    for lease in change.gained {
                        tracing::info!(group = %self.group, slot = lease.slot, epoch = lease.epoch, "lease taken");
                        let token = CancellationToken::new();
                        let task = start(lease.clone(), token.clone());
                        running.insert(lease, (token, task));
                    }
                }
                Err(error) => tracing::warn!(group = %self.group, error_type = error.kind().as_str(), %error,
                    causes = ?error.causes(), remedy = error.remedy(), "cannot renew leases"),
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(self.times.interval()) => {}
            }
        }
        for (lease, (token, task)) in running {
            token.cancel();
            ending.push((lease, task));
        }
        let deadline = tokio::time::Instant::now() + STOP_WAIT;
        for (lease, task) in ending {
            // Still working at the deadline: the lease is left to expire, so that nobody takes over too early.
            if tokio::time::timeout_at(deadline, task).await.is_ok() {
                self.free(&lease).await;
            }
        }
        // After the tasks, so that the last pulse has all that they have counted.
        if let Some(heart) = heart {
            heart.end().await;
        }
        self.leases.leave(&self.group, &self.owner).await
    }

    /// Gives one slot back after its task has ended.
    async fn free(&mut self, lease: &Lease) {
        self.held.retain(|held| held != lease);
        if let Err(error) = self.leases.give_back(lease).await {
            tracing::debug!(%error, "a lease was not given back; it expires by itself");
        }
    }
}

/// How long a stop waits for the tasks. Whatever they have not finished by then is done again by the next holder.
const STOP_WAIT: Duration = Duration::from_secs(20);

/// A name for this process that no other has: host, process id and a random part.
pub fn instance_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "host",
        host => host,
    };
    format!("{host}-{}-{:06x}", std::process::id(), fastrand::u32(0..0x0100_0000))
}
