//! How the outboxes and leases stand, for `postrider status` and the API.

use postrider::adopt::Mapping;
use postrider::lease::LeaseView;
use postrider::store::Store;
use postrider::upkeep::Backlog;
use postrider::{Result, Route};
use serde::Serialize;

use crate::config::Config;
use crate::wire;

/// Schema, backlogs and leases.
#[derive(Serialize)]
pub struct Status {
    /// The store's address, without its password.
    pub store: String,
    /// The version of its tables.
    pub schema: i32,
    /// Of everything together.
    pub backlog: Backlog,
    /// Each outbox.
    pub outboxes: Vec<OutboxLine>,
    /// Each slot.
    pub leases: Vec<LeaseLine>,
}

/// The events of one outbox for one destination.
#[derive(Serialize)]
pub struct OutboxLine {
    /// Which.
    #[serde(flatten)]
    pub outbox: Outbox,
    /// How much waits.
    pub backlog: Backlog,
}

/// An outbox that is relayed to one destination.
#[derive(Debug, Clone, Serialize)]
pub struct Outbox {
    /// The destination's name; the adopted table's name in the configuration.
    pub name: String,
    /// The adopted table; none for Postrider's own outbox.
    pub table: Option<String>,
    /// Where its events go.
    pub destination: String,
    /// The broker's address, without its password.
    pub broker: String,
    #[serde(skip)]
    place: Place,
}

#[derive(Debug, Clone)]
enum Place {
    Own(Route),
    Adopted(Box<Mapping>),
}

impl Outbox {
    /// How much waits in it.
    pub async fn backlog(&self, store: &dyn Store) -> Result<Backlog> {
        match &self.place {
            Place::Own(route) => store.backlog(route).await,
            Place::Adopted(mapping) => wire::adopted_tables(store)?.adopt(mapping).await?.backlog().await,
        }
    }
}

/// A slot and its holder.
#[derive(Debug, Clone, Serialize)]
pub struct LeaseLine {
    /// The work that is shared: `relay/default`.
    pub group: String,
    /// Which part of it.
    pub slot: u32,
    /// Who holds it; none when nobody does.
    pub owner: Option<String>,
    /// Rises with every change of holder.
    pub epoch: i64,
    /// How long it still lasts.
    pub remaining_ms: Option<u64>,
}

impl LeaseLine {
    /// As the store has it.
    pub fn of(view: LeaseView) -> Self {
        let LeaseView { lease, remaining } = view;
        Self {
            group: lease.group,
            slot: lease.slot,
            owner: remaining.map(|_| lease.owner),
            epoch: lease.epoch,
            remaining_ms: remaining.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

/// All outboxes of the configuration.
pub fn outboxes(config: &Config) -> Vec<Outbox> {
    let own = config.destinations().into_iter().map(|(route, broker)| Outbox {
        name: route.destination.clone(),
        table: None,
        destination: route.destination.clone(),
        broker: broker.url.to_string(),
        place: Place::Own(route),
    });
    let broker_of = |name: &str| {
        let found = config.destinations().into_iter().find(|(route, _)| route.destination == name);
        found.map(|(_, broker)| broker.url.to_string()).unwrap_or_default()
    };
    let adopted = config.outboxes.iter().map(|outbox| Outbox {
        name: outbox.mapping.name.clone(),
        table: Some(outbox.mapping.table.to_string()),
        destination: outbox.destination.clone(),
        broker: broker_of(&outbox.destination),
        place: Place::Adopted(Box::new(outbox.mapping.clone())),
    });
    own.chain(adopted).collect()
}

/// Reads all of it.
pub async fn read(config: &Config, store: &dyn Store) -> Result<Status> {
    let mut lines = Vec::new();
    for outbox in outboxes(config) {
        let backlog = outbox.backlog(store).await?;
        lines.push(OutboxLine { outbox, backlog });
    }
    Ok(Status {
        store: config.store.to_string(),
        schema: store.schema().await?.found,
        backlog: sum(&lines),
        outboxes: lines,
        leases: store.leases().await?.into_iter().map(LeaseLine::of).collect(),
    })
}

fn sum(outboxes: &[OutboxLine]) -> Backlog {
    let mut sum = Backlog::default();
    for OutboxLine { backlog, .. } in outboxes {
        sum.pending += backlog.pending;
        sum.oldest_secs = sum.oldest_secs.max(backlog.oldest_secs);
        sum.retrying += backlog.retrying;
        sum.waiting += backlog.waiting;
        sum.failed += backlog.failed;
    }
    sum
}
