//! What the console shows at a glance. It is read once for all who look, at most every few seconds, and not at all while
//! nobody looks.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use postrider::Result;
use postrider::alert::Alert;
use postrider::dead::DeadCount;
use postrider::pulse::Instance;
use postrider::pulse::figures::{Errors, Series, Summary, Target, Window, targets};
use postrider::store::Store;
use postrider::upkeep::{BACKLOG_COUNT_MAX, Backlog, ConsumerView};
use serde::Serialize;

use super::cached::Cached;
use crate::config::Config;
use crate::status::{self, LeaseLine, Outbox, Status};

/// Counting a backlog costs the most.
const BACKLOG_KEPT: Duration = Duration::from_secs(5);
/// What changes while one looks.
const KEPT: Duration = Duration::from_secs(2);
/// Counts come every five seconds.
const FIGURES_KEPT: Duration = Duration::from_secs(5);
/// What is about many days hardly changes in a minute.
const MENDED_KEPT: Duration = Duration::from_secs(60);
/// Open alerts that are shown; more than this are one big trouble.
const ALERTS_MAX: usize = 100;

/// The cached parts.
pub struct Board {
    config: Arc<Config>,
    backlogs: Cached<Backlogs>,
    consumers: Cached<Vec<ConsumerView>>,
    crew: Cached<Crew>,
    alerts: Cached<Vec<Alert>>,
    mended: Cached<Option<Duration>>,
    hour: Cached<Measured>,
    day: Cached<Measured>,
    errors: [Cached<Errors>; 3],
    status: Cached<Status>,
    dead: Cached<Vec<DeadCount>>,
}

/// The backlogs, in the order of the outboxes; none of one that could not be read.
struct Backlogs {
    read_at: DateTime<Utc>,
    backlogs: Vec<Option<Backlog>>,
}

/// Who works, and on what.
pub struct Crew {
    /// All that are known.
    pub instances: Vec<InstanceView>,
    /// Every slot.
    pub leases: Vec<LeaseLine>,
}

/// The figures of a window.
pub struct Measured {
    /// The database's time.
    pub now: DateTime<Utc>,
    /// Over all of it.
    pub summary: Summary,
    /// Step by step.
    pub series: Series,
}

/// An instance, and whether it is lost.
#[derive(Debug, Clone, Serialize)]
pub struct InstanceView {
    #[serde(flatten)]
    instance: Instance,
    is_lost: bool,
}

/// An outbox with all that is known about it.
#[derive(Debug, Serialize)]
pub struct OutboxView {
    #[serde(flatten)]
    outbox: Outbox,
    group: String,
    backlog: Option<Backlog>,
    read_at: DateTime<Utc>,
    pending_is_capped: bool,
    #[serde(flatten)]
    breaker: Breaker,
    lanes: Vec<LeaseLine>,
}

/// A consumer with all that is known about it.
#[derive(Debug, Serialize)]
pub struct ConsumerLine {
    #[serde(flatten)]
    consumer: ConsumerView,
    group: String,
    #[serde(flatten)]
    breaker: Breaker,
    instances: usize,
    slots: Vec<LeaseLine>,
}

/// Why nothing is let through, and for how long already.
#[derive(Debug, Default, Serialize)]
struct Breaker {
    breaker: Option<String>,
    breaker_secs: Option<u64>,
}

impl Board {
    /// Nothing was read yet.
    pub fn new(config: Arc<Config>) -> Self {
        Self {
            config,
            backlogs: Cached::new(BACKLOG_KEPT),
            consumers: Cached::new(BACKLOG_KEPT),
            crew: Cached::new(KEPT),
            alerts: Cached::new(KEPT),
            mended: Cached::new(MENDED_KEPT),
            hour: Cached::new(FIGURES_KEPT),
            day: Cached::new(MENDED_KEPT),
            errors: [FIGURES_KEPT, MENDED_KEPT, MENDED_KEPT].map(Cached::new),
            status: Cached::new(KEPT),
            dead: Cached::new(KEPT),
        }
    }

    /// The outboxes of the configuration.
    pub async fn outboxes(&self, store: &Arc<dyn Store>) -> Result<Vec<OutboxView>> {
        let outboxes = status::outboxes(&self.config);
        let (read, asked) = (store.clone(), outboxes.clone());
        let backlogs = self.backlogs.get(|| async move { read_backlogs(read.as_ref(), &asked).await });
        let (backlogs, crew) = tokio::join!(backlogs, self.crew(store));
        let (backlogs, crew) = (backlogs?, crew?);
        let view = |(outbox, backlog): (Outbox, &Option<Backlog>)| {
            let group = format!("relay/{}", outbox.name);
            OutboxView {
                backlog: backlog.clone(),
                read_at: backlogs.read_at,
                pending_is_capped: backlog.as_ref().is_some_and(|backlog| backlog.pending >= BACKLOG_COUNT_MAX),
                breaker: crew.breaker(&group),
                lanes: crew.slots(&group),
                outbox,
                group,
            }
        };
        Ok(outboxes.into_iter().zip(&backlogs.backlogs).map(view).collect())
    }

    /// All consumers that the store has heard of.
    pub async fn consumers(&self, store: &Arc<dyn Store>) -> Result<Vec<ConsumerLine>> {
        let read = store.clone();
        let consumers = self.consumers.get(|| async move { read.consumers().await });
        let (consumers, crew) = tokio::join!(consumers, self.crew(store));
        let (consumers, crew) = (consumers?, crew?);
        let line = |consumer: &ConsumerView| {
            let group = format!("consumer/{}", consumer.name);
            ConsumerLine {
                consumer: consumer.clone(),
                breaker: crew.breaker(&group),
                instances: crew.alive(&group).count(),
                slots: crew.slots(&group),
                group,
            }
        };
        Ok(consumers.iter().map(line).collect())
    }

    /// Instances and leases.
    pub async fn crew(&self, store: &Arc<dyn Store>) -> Result<Arc<Crew>> {
        let read = store.clone();
        self.crew.get(|| async move { Crew::read(read.as_ref()).await }).await
    }

    /// Alerts that are open.
    pub async fn alerts(&self, store: &Arc<dyn Store>) -> Result<Arc<Vec<Alert>>> {
        let read = store.clone();
        self.alerts.get(|| async move { read.alerts(true, None, ALERTS_MAX).await }).await
    }

    /// A silence was set or ended: whoever did that wants to see it.
    pub async fn alerts_changed(&self) {
        self.alerts.clear().await;
    }

    /// The same as `postrider status`.
    pub async fn status(&self, store: &Arc<dyn Store>) -> Result<Arc<Status>> {
        let (read, config) = (store.clone(), self.config.clone());
        self.status.get(|| async move { status::read(&config, read.as_ref()).await }).await
    }

    /// Dead letters, counted.
    pub async fn dead(&self, store: &Arc<dyn Store>) -> Result<Arc<Vec<DeadCount>>> {
        let read = store.clone();
        self.dead.get(|| async move { read.dead_stats().await }).await
    }

    /// Some were given up for good, or given back: whoever did that wants to see it.
    pub async fn dead_changed(&self) {
        self.dead.clear().await;
    }

    /// The figures of an hour or a day.
    pub async fn measured(&self, store: &Arc<dyn Store>, window: Window) -> Result<Arc<Measured>> {
        let cached = if window == Window::Hour { &self.hour } else { &self.day };
        let read = store.clone();
        let reading = cached.get(move || async move {
            let (now, buckets) = read.buckets(window.width(), window.length(), &[]).await?;
            let summary = Summary::of(window.begins(now), now, &buckets);
            Ok(Measured { now, summary, series: Series::of(now, window, &buckets) })
        });
        reading.await
    }

    /// What should be, and whether it is.
    pub async fn targets(&self, store: &Arc<dyn Store>, measured: &Measured) -> Result<[Target; 4]> {
        let read = store.clone();
        let mended = self.mended.get(|| async move { Ok(read.alerts_mended().await?.1) }).await?;
        Ok(targets(&measured.summary.all, *mended))
    }

    /// What failed.
    pub async fn errors(&self, store: &Arc<dyn Store>, window: Window) -> Result<Arc<Errors>> {
        let [hour, day, month] = &self.errors;
        let cached = match window {
            Window::Hour => hour,
            Window::Day => day,
            Window::Month => month,
        };
        let read = store.clone();
        let reading = cached.get(move || async move {
            let (width, length, metrics) = Errors::wanted(window);
            let (now, buckets) = read.buckets(width, length, metrics).await?;
            Ok(Errors::of(now, window, &buckets))
        });
        reading.await
    }
}

/// One outbox that cannot be read, such as an adopted table that was dropped, must not hide the others.
async fn read_backlogs(store: &dyn Store, outboxes: &[Outbox]) -> Result<Backlogs> {
    let mut backlogs = Vec::with_capacity(outboxes.len());
    for outbox in outboxes {
        match outbox.backlog(store).await {
            Ok(backlog) => backlogs.push(Some(backlog)),
            Err(error) if outbox.table.is_none() => return Err(error),
            Err(error) => {
                tracing::debug!(error_type = error.kind().as_str(), %error, outbox = outbox.name, "not read");
                backlogs.push(None);
            }
        }
    }
    Ok(Backlogs { read_at: Utc::now(), backlogs })
}

impl Crew {
    async fn read(store: &dyn Store) -> Result<Self> {
        let instances = store.instances().await?;
        let instances =
            instances.into_iter().map(|instance| InstanceView { is_lost: instance.is_lost(), instance }).collect();
        let leases = store.leases().await?.into_iter().map(LeaseLine::of).collect();
        Ok(Self { instances, leases })
    }

    fn alive<'a>(&'a self, group: &'a str) -> impl Iterator<Item = &'a Instance> {
        let alive = self.instances.iter().filter(|view| !view.is_lost).map(|view| &view.instance);
        alive.filter(move |instance| instance.group == group)
    }

    /// Of those that hold something first: the others have nothing to publish.
    fn breaker(&self, group: &str) -> Breaker {
        let mut closed: Vec<&Instance> = self.alive(group).filter(|instance| instance.breaker.is_some()).collect();
        closed.sort_by_key(|instance| instance.slots.is_empty());
        closed.first().map_or_else(Breaker::default, |instance| Breaker {
            breaker: instance.breaker.clone(),
            breaker_secs: instance.breaker_secs,
        })
    }

    fn slots(&self, group: &str) -> Vec<LeaseLine> {
        self.leases.iter().filter(|lease| lease.group == group).cloned().collect()
    }
}
