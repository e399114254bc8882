//! The plot: events flow, the working relay is killed, then a consumer, and each time another process goes on.

use std::time::Instant;

use postrider::lease::{LeaseView, Leases};
use postrider::store::sqlite::SqliteStore;
use serde::Serialize;

use super::count::Counts;
use super::crew::Crew;
use super::names::{BILLING, RELAYS};
use super::view::View;
use crate::cli::failure::Result;
use crate::config::DESTINATION;

/// Who was killed, and who went on.
#[derive(Debug, Clone, Serialize)]
pub struct Takeover {
    /// The process that was killed.
    pub killed: &'static str,
    /// The one that has its work now.
    pub successor: &'static str,
    /// From the kill until the successor had the lease.
    pub seconds: f64,
}

enum Act {
    /// The relay works until a third of the events are committed.
    Relaying,
    RelayKilled(Killed),
    /// The consumers work until half of the events are applied.
    Consuming,
    ConsumerKilled(Killed),
    Over,
}

struct Killed {
    name: &'static str,
    at: Instant,
}

/// Where the story stands.
pub struct Story {
    act: Act,
    events: u64,
    /// What has happened.
    pub takeovers: Vec<Takeover>,
}

impl Story {
    /// A story of so many events.
    pub fn new(events: u64) -> Self {
        Self { act: Act::Relaying, events, takeovers: Vec::new() }
    }

    /// Whether both crashes are survived.
    pub fn is_over(&self) -> bool {
        matches!(self.act, Act::Over)
    }

    /// Looks at what has been reached, and does what is next.
    pub async fn step(&mut self, counts: &Counts, store: &SqliteStore, crew: &mut Crew, view: &View) -> Result<()> {
        let relays = postrider::relay::group(DESTINATION);
        let consumers = format!("consumer/{}", BILLING.name);
        match &self.act {
            Act::Relaying if counts.relayed > 0 && counts.committed >= self.events / 3 => {
                if let Some(killed) = kill(&relays, &RELAYS, store, crew, view).await? {
                    self.act = Act::RelayKilled(killed);
                }
            }
            Act::Consuming if counts.billing >= self.events / 2 => {
                if let Some(killed) = kill(&consumers, BILLING.members, store, crew, view).await? {
                    self.act = Act::ConsumerKilled(killed);
                }
            }
            Act::RelayKilled(killed) => {
                if let Some(takeover) = taken_over(killed, &relays, &RELAYS, store).await? {
                    self.survived(takeover, "from the last settled event", crew, view)?;
                    self.act = Act::Consuming;
                }
            }
            Act::ConsumerKilled(killed) => {
                if let Some(takeover) = taken_over(killed, &consumers, BILLING.members, store).await? {
                    self.survived(takeover, "from the last committed effect", crew, view)?;
                    self.act = Act::Over;
                }
            }
            Act::Relaying | Act::Consuming | Act::Over => {}
        }
        Ok(())
    }

    fn survived(&mut self, takeover: Takeover, from: &str, crew: &mut Crew, view: &View) -> Result<()> {
        let Takeover { killed, successor, seconds } = &takeover;
        view.say(&format!("{successor} took over after {seconds:.1} s, {from}"));
        crew.restart(killed)?;
        self.takeovers.push(takeover);
        Ok(())
    }
}

/// Who holds which slot of the group now.
async fn holders(group: &str, names: &[&'static str], store: &SqliteStore) -> Result<Vec<Option<&'static str>>> {
    let slots = store.leases().await?.into_iter().filter(|view| view.lease.group == group);
    let holder = |view: LeaseView| {
        let is_alive = view.remaining.is_some();
        names.iter().copied().find(|name| is_alive && *name == view.lease.owner)
    };
    Ok(slots.map(holder).collect())
}

/// Kills the holder of the group's first slot, if there is one.
async fn kill(
    group: &str,
    names: &[&'static str],
    store: &SqliteStore,
    crew: &mut Crew,
    view: &View,
) -> Result<Option<Killed>> {
    let Some(name) = holders(group, names, store).await?.into_iter().next().flatten() else { return Ok(None) };
    let at = Instant::now();
    let id = crew.kill(name).await?;
    view.say(&format!("{name} killed with SIGKILL (process {id}) in the middle of its work"));
    Ok(Some(Killed { name, at }))
}

/// Whether all slots of the group are in other hands.
async fn taken_over(
    killed: &Killed,
    group: &str,
    names: &[&'static str],
    store: &SqliteStore,
) -> Result<Option<Takeover>> {
    let holders = holders(group, names, store).await?;
    let is_taken = holders.iter().all(|holder| holder.is_some_and(|name| name != killed.name));
    let Some(successor) = holders.into_iter().flatten().next().filter(|_| is_taken) else { return Ok(None) };
    let seconds = killed.at.elapsed().as_secs_f64();
    // A tenth is as exact as we look.
    Ok(Some(Takeover { killed: killed.name, successor, seconds: (seconds * 10.0).round() / 10.0 }))
}
