//! Reads what the rules look at.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use postrider::Route;
use postrider::adopt::{AdoptedTable, Mapping};
use postrider::alert::{FreeSlot, HOUR, Measurements, OutboxMeasure, Since, groups};
use postrider::lease::LeaseView;
use postrider::pulse::{Metric, Width};
use postrider::store::Store;
use postrider::upkeep::Backlog;
use postrider::{Result, integrity::ReportView};

use super::certificates::Certificates;
use crate::config::Config;
use crate::wire;

/// What the rules count.
const METRICS: [Metric; 6] =
    [Metric::Published, Metric::PublishFailed, Metric::Applied, Metric::Failed, Metric::Dead, Metric::Latency];
/// The last report that has ended is among these.
const REPORTS: usize = 10;

/// Measures, and remembers since when things are so.
pub struct Measurer {
    routes: Vec<Route>,
    mappings: Vec<Mapping>,
    /// Adopted tables by group, once they could be opened.
    adopted: HashMap<String, Box<dyn AdoptedTable>>,
    /// How many slots every group that we know of has.
    slots: Vec<(String, u32)>,
    stalled_after: std::time::Duration,
    waiting: Since,
    free: Since,
    certificates: Certificates,
}

impl Measurer {
    /// What this configuration knows of.
    pub fn new(config: &Config) -> Self {
        let routes = config.destination_routes();
        let relays = routes.iter().map(|route| (format!("relay/{}", route.destination), config.relay.lanes));
        let consumers = config.consumers.iter().map(|consumer| (consumer.spec.group(), consumer.spec.slots));
        let relays = relays.filter(|_| config.relay.enabled);
        Self {
            slots: relays.chain(consumers).collect(),
            routes,
            mappings: config.outboxes.iter().map(|outbox| outbox.mapping.clone()).collect(),
            adopted: HashMap::new(),
            stalled_after: config.alerts.thresholds.stalled_after,
            waiting: Since::default(),
            free: Since::default(),
            certificates: Certificates::new(config),
        }
    }

    /// Another instance watches: what was seen says nothing when it is our turn again.
    pub fn forget(&mut self) {
        (self.waiting, self.free) = (Since::default(), Since::default());
    }

    /// Everything that the rules want to know now.
    pub async fn measure(&mut self, store: &dyn Store, open: HashSet<(String, String)>) -> Result<Measurements> {
        let backlogs = self.backlogs(store).await?;
        let (now, buckets) = store.buckets(Width::Minute, HOUR, &METRICS).await?;
        let leases = store.leases().await?;
        let moment = Instant::now();
        let busy = backlogs.iter().filter(|(_, backlog)| backlog.pending > 0).map(|(group, _)| group.clone());
        let waiting = self.waiting.look(moment, busy);
        let outbox = |(group, backlog): (String, Backlog)| {
            let waiting = waiting.get(&group).copied().unwrap_or_default();
            OutboxMeasure { group, backlog, waiting }
        };
        Ok(Measurements {
            now,
            outboxes: backlogs.into_iter().map(outbox).collect(),
            consumers: store.consumers().await?,
            instances: store.instances().await?,
            groups: groups(now, &buckets, self.stalled_after),
            free_slots: self.free_slots(moment, &leases),
            certificates: self.certificates.known(),
            report: last(store.reports(None, REPORTS).await?),
            open,
        })
    }

    async fn backlogs(&mut self, store: &dyn Store) -> Result<Vec<(String, Backlog)>> {
        let mut backlogs = Vec::new();
        for route in &self.routes {
            backlogs.push((format!("relay/{}", route.destination), store.backlog(route).await?));
        }
        for mapping in &self.mappings {
            let group = format!("relay/{}", mapping.name);
            // A table of somebody else's that is gone must not keep us from watching the rest.
            match adopted(&mut self.adopted, store, &group, mapping).await {
                Ok(backlog) => backlogs.push((group, backlog)),
                Err(error) => {
                    tracing::debug!(group, error_type = error.kind().as_str(), %error, "an adopted table cannot be read");
                    self.adopted.remove(&group);
                }
            }
        }
        Ok(backlogs)
    }

    fn free_slots(&mut self, moment: Instant, leases: &[LeaseView]) -> Vec<FreeSlot> {
        let is_held = |group: &str, slot: u32| {
            let mut held = leases.iter().filter(|view| view.remaining.is_some()).map(|view| &view.lease);
            held.any(|lease| lease.group == group && lease.slot == slot)
        };
        let all = self.slots.iter().flat_map(|(group, slots)| (0..*slots).map(move |slot| (group, slot)));
        let free: Vec<(&String, u32)> = all.filter(|(group, slot)| !is_held(group, *slot)).collect();
        let name = |group: &str, slot: u32| format!("{group}#{slot}");
        let times = self.free.look(moment, free.iter().map(|(group, slot)| name(group, *slot)));
        let free = free.into_iter().map(|(group, slot)| FreeSlot {
            group: group.clone(),
            slot,
            free: times.get(&name(group, slot)).copied().unwrap_or_default(),
        });
        free.collect()
    }
}

async fn adopted(
    known: &mut HashMap<String, Box<dyn AdoptedTable>>,
    store: &dyn Store,
    group: &str,
    mapping: &Mapping,
) -> Result<Backlog> {
    if !known.contains_key(group) {
        known.insert(group.to_owned(), wire::adopted_tables(store)?.adopt(mapping).await?);
    }
    match known.get(group) {
        Some(table) => table.backlog().await,
        None => Ok(Backlog::default()),
    }
}

/// The newest that has ended.
fn last(reports: Vec<ReportView>) -> Option<ReportView> {
    reports.into_iter().find(|report| report.ended_at.is_some())
}
