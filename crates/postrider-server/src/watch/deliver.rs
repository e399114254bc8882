//! Takes deliveries that are due and tells the sinks. Every sink is told by a task of its own: one that hangs or fails
//! holds up nobody else, and what it did not take is due again later.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use postrider::alert::Delivery;
use postrider::metrics::alert_told;
use postrider::relay::Backoff;
use postrider::store::Store;
use postrider::{Error, Kind, Result};
use tokio::sync::{Notify, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{AlertsConfig, Config};
use crate::sink::{Message, Named};

/// How often it looks without being woken.
const EVERY: Duration = Duration::from_secs(5);
/// Deliveries taken at a time. A sink that takes ten seconds for each of them is done within `HOLD`.
const BATCH: usize = 10;
const HOLD: Duration = Duration::from_secs(120);
/// Tasks at once.
const TASKS_MAX: usize = 16;
/// Waits between tries.
const AGAIN: Backoff =
    Backoff { base: Duration::from_secs(5), max: Duration::from_secs(300), jitter: Duration::from_secs(1) };
/// With those waits this takes a day; who has not listened for so long is not told any more.
const FAILURES_MAX: u32 = 290;

/// Tells the sinks while this instance watches.
pub struct Deliverer {
    telling: Telling,
    is_watching: watch::Receiver<bool>,
    wake: Arc<Notify>,
}

#[derive(Clone)]
struct Telling {
    store: Arc<dyn Store>,
    sinks: Arc<Vec<Named>>,
    service: String,
    alerts: AlertsConfig,
}

impl Deliverer {
    /// Works while `is_watching` says so; `wake` spares it the wait.
    pub fn new(
        config: &Config,
        store: Arc<dyn Store>,
        sinks: Vec<Named>,
        is_watching: watch::Receiver<bool>,
        wake: Arc<Notify>,
    ) -> Self {
        let (service, alerts) = (config.log.service.clone(), config.alerts.clone());
        Self { telling: Telling { store, sinks: Arc::new(sinks), service, alerts }, is_watching, wake }
    }

    /// Delivers until `stop`; what is being told then is told to its end.
    pub async fn run(self, stop: CancellationToken) {
        let (tasks, places) = (TaskTracker::new(), Arc::new(Semaphore::new(TASKS_MAX)));
        while !stop.is_cancelled() && !self.telling.sinks.is_empty() {
            if *self.is_watching.borrow() {
                self.deliver(&tasks, &places, &stop).await;
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = self.wake.notified() => {}
                () = tokio::time::sleep(EVERY) => {}
            }
        }
        tasks.close();
        tasks.wait().await;
    }

    /// Everything that is due.
    async fn deliver(&self, tasks: &TaskTracker, places: &Arc<Semaphore>, stop: &CancellationToken) {
        loop {
            // Never closed, so this waits for a place at most.
            let Ok(place) = places.clone().acquire_owned().await else { return };
            let due = match self.telling.store.deliveries_due(BATCH, HOLD).await {
                Ok(due) => due,
                Err(error) => {
                    return tracing::debug!(error_type = error.kind().as_str(), %error, "deliveries cannot be read");
                }
            };
            drop(place);
            let has_more = due.len() == BATCH;
            let mut by_sink: BTreeMap<String, Vec<Delivery>> = BTreeMap::new();
            for delivery in due {
                by_sink.entry(delivery.sink.clone()).or_default().push(delivery);
            }
            for (sink, deliveries) in by_sink {
                let (telling, stop, places) = (self.telling.clone(), stop.clone(), places.clone());
                let tell = async move {
                    let _place = places.acquire_owned().await;
                    telling.tell(&sink, deliveries, &stop).await;
                };
                tasks.spawn(tell.boxed());
            }
            if !has_more || stop.is_cancelled() {
                return;
            }
        }
    }
}

impl Telling {
    /// Tells one sink, in order. When it fails, the rest is not tried: it would wait as long for each.
    async fn tell(&self, name: &str, deliveries: Vec<Delivery>, stop: &CancellationToken) {
        let sink = self.sinks.iter().find(|sink| sink.name == name);
        let mut failed: Option<String> = None;
        for delivery in deliveries {
            // What was taken and not tried is due again when its hold is over.
            if stop.is_cancelled() {
                return;
            }
            let result = match (&failed, sink) {
                (Some(reason), _) => Err(Error::new(Kind::Unavailable, reason.clone())),
                (None, Some(sink)) => sink.tell(&self.message(&delivery)).await,
                (None, None) => Err(Error::new(Kind::Missing, "this configuration has no such sink")),
            };
            if let Err(error) = self.settle(&delivery, result, &mut failed).await {
                tracing::debug!(sink = name, error_type = error.kind().as_str(), %error,
                    "what became of a delivery was not written; it is told again");
            }
        }
    }

    async fn settle(&self, delivery: &Delivery, result: Result<()>, failed: &mut Option<String>) -> Result<()> {
        let sink = delivery.sink.as_str();
        let Err(error) = result else {
            alert_told(sink, "told");
            return self.store.delivered(delivery.id).await;
        };
        let failures = delivery.failures.saturating_add(1);
        let (kind, rule) = (error.kind().as_str(), &delivery.alert.rule);
        if failures >= FAILURES_MAX {
            tracing::error!(sink, rule, error_type = kind, %error, causes = ?error.causes(), remedy = error.remedy(),
                "an alert could not be told for a day and is given up");
            alert_told(sink, "given_up");
            return self.store.delivered(delivery.id).await;
        }
        let is_first = failed.is_none();
        if is_first && failures == 1 {
            tracing::warn!(sink, rule, error_type = kind, %error, causes = ?error.causes(), remedy = error.remedy(),
                "an alert was not told, trying again");
        }
        alert_told(sink, "failed");
        let reason = error.message().to_owned();
        let delay = AGAIN.delay_with(failures, &mut fastrand::Rng::new());
        self.store.delivery_failed(delivery.id, &reason, delay).await?;
        failed.get_or_insert(reason);
        Ok(())
    }

    fn message(&self, delivery: &Delivery) -> Message {
        Message::of(format!("alert-{}", delivery.id), &delivery.alert, true, &self.service, &self.alerts)
    }
}
