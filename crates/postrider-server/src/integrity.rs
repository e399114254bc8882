//! The integrity check of a configuration: the store, adopted tables, and the user's queries.

use std::time::Duration;

use chrono::{DateTime, Utc};
use postrider::Result;
use postrider::adopt::Mapping;
use postrider::doctor::Finding;
use postrider::integrity::{self, Checks, Limits, Report};
use postrider::store::Store;

use crate::config::Config;
use crate::wire;

/// What is checked.
pub struct Check {
    checks: Checks,
    mappings: Vec<Mapping>,
}

impl Check {
    /// As configured.
    pub fn new(config: &Config) -> Self {
        let limits = Limits {
            stale_after: config.relay.stale_after,
            routes: config.destination_routes(),
            retention: config.retention,
            consumers: config.consumers.iter().map(|consumer| consumer.spec.name.clone()).collect(),
        };
        let mappings = config.outboxes.iter().map(|outbox| outbox.mapping.clone()).collect();
        Self { checks: Checks { limits, queries: config.check.queries.clone() }, mappings }
    }

    /// Begins a report and returns its number; `None` if it was scheduled and somebody has begun it before.
    pub async fn begin(
        &self,
        store: &dyn Store,
        actor: &str,
        scheduled_for: Option<DateTime<Utc>>,
    ) -> Result<Option<i64>> {
        integrity::begin(store, actor, scheduled_for).await
    }

    /// Checks everything and ends the report.
    pub async fn finish(&self, store: &dyn Store, id: i64) -> Result<Report> {
        let mut more = Vec::new();
        for mapping in &self.mappings {
            more.extend(self.adopted(store, mapping).await);
        }
        let mut checks = self.checks.clone();
        if !checks.limits.consumers.is_empty() {
            // Services in Rust have consumers that no configuration names; those that live are no orphans.
            let instances = store.instances().await?;
            let groups = instances.iter().filter_map(|instance| instance.group.strip_prefix("consumer/"));
            checks.limits.consumers.extend(groups.map(str::to_owned));
        }
        integrity::finish(store, id, &checks, more).await
    }

    /// What is wrong with an adopted table.
    async fn adopted(&self, store: &dyn Store, mapping: &Mapping) -> Vec<Finding> {
        let name = format!("adopted.{}", mapping.name);
        let look = async {
            let table = wire::adopted_tables(store)?.adopt(mapping).await?;
            Ok((table.inspect().await?, table.backlog().await?))
        };
        let look: Result<_> = look.await;
        let (mut findings, backlog) = match look {
            Ok(seen) => seen,
            Err(error) => return vec![Finding::of(name, &error)],
        };
        let stale_after = self.checks.limits.stale_after;
        let oldest = Duration::from_secs(backlog.oldest_secs.unwrap_or_default());
        findings.push(match oldest >= stale_after {
            true => Finding::error(
                format!("{name}.stale"),
                format!("the oldest of {} rows that wait has waited for {} s", backlog.pending, oldest.as_secs()),
                "look at `postrider status` and at the broker",
            ),
            false => Finding::ok(format!("{name}.stale"), "no row waits too long"),
        });
        findings
    }
}
