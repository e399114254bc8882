//! The watch: one instance at a time, chosen by a lease, measures every few seconds, asks the rules what is wrong, and
//! writes down which alerts that opens and resolves. Telling is another task's business ([`deliver`]), so that a sink that
//! hangs delays nothing here.
//!
//! Whatever dies here, the next instance goes on from what stands in the store. Only that the store itself is away cannot
//! stand there: [`local`] tells it from memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postrider::alert::{Alert, Condition, Steady, Thresholds, Urgency, evaluate};
use postrider::lease::{Lease, Leases};
use postrider::store::Store;
use postrider::{Error, Kind, Result};
use tokio::sync::{Mutex, Notify, OwnedMutexGuard, watch};
use tokio_util::sync::CancellationToken;

use crate::config::Config;

mod certificates;
mod deliver;
mod local;
mod measure;
mod plan;

pub use deliver::Deliverer;
pub use local::Local;

use measure::Measurer;
use plan::Plan;

/// The lease of the one who watches: group and time.
const GROUP: &str = "watch";
const LEASE: Duration = Duration::from_secs(15);
/// How often it looks.
const EVERY: Duration = Duration::from_secs(5);
/// A look that takes longer has found out that the store does not answer.
const LOOK_WAIT: Duration = Duration::from_secs(20);
/// More open alerts than this are not taken over from a predecessor.
const OPEN_MAX: usize = 1000;

/// One instance's part in the watch.
pub struct Watch {
    state: Arc<Mutex<State>>,
    local: Local,
}

struct State {
    store: Arc<dyn Store>,
    owner: String,
    lease: Option<Lease>,
    thresholds: Thresholds,
    sinks: Vec<String>,
    measurer: Measurer,
    plan: Plan,
    /// There while we watch.
    steady: Option<Steady>,
    is_watching: watch::Sender<bool>,
    wake: Arc<Notify>,
}

impl Watch {
    /// A watcher-to-be, and the one who delivers what it finds.
    pub fn new(config: &Config, store: Arc<dyn Store>, owner: &str, local: Local) -> (Self, Deliverer) {
        let (is_watching, wake) = (watch::Sender::new(false), Arc::new(Notify::new()));
        let sinks = local.sinks().to_vec();
        let deliverer = Deliverer::new(config, store.clone(), sinks.clone(), is_watching.subscribe(), wake.clone());
        let state = State {
            measurer: Measurer::new(config),
            plan: Plan::new(config),
            store,
            owner: owner.to_owned(),
            lease: None,
            thresholds: config.alerts.thresholds.clone(),
            sinks: sinks.into_iter().map(|sink| sink.name).collect(),
            steady: None,
            is_watching,
            wake,
        };
        (Self { state: Arc::new(Mutex::new(state)), local }, deliverer)
    }

    /// Looks again and again until `stop`, then lets another instance watch.
    pub async fn run(self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let asked_at = Instant::now();
            match self.look().await {
                Ok(()) => self.local.answered(),
                Err(error) => self.local.failed(asked_at, &error),
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(EVERY) => {}
            }
        }
        if let Ok(mut state) = self.state.try_lock() {
            state.end().await;
        }
    }

    /// One look, in a task of its own: when the store hangs, the waiting ends and the call does not.
    async fn look(&self) -> Result<()> {
        let late = || Error::new(Kind::Unavailable, format!("no answer within {} s", LOOK_WAIT.as_secs()));
        // The look before is still waiting for its answer.
        let Ok(state) = self.state.clone().try_lock_owned() else { return Err(late()) };
        match tokio::time::timeout(LOOK_WAIT, tokio::spawn(look(state))).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => Err(Error::new(Kind::Other, "the watch ended unexpectedly").with_source(error)),
            Err(_) => Err(late()),
        }
    }
}

async fn look(mut state: OwnedMutexGuard<State>) -> Result<()> {
    let asked_at = Instant::now();
    let has_lease = state.hold_lease().await?;
    state.is_watching.send_if_modified(|is_watching| std::mem::replace(is_watching, has_lease) != has_lease);
    if !has_lease {
        state.rest();
        return Ok(());
    }
    state.watch(asked_at).await
}

impl State {
    /// Renews the lease, or takes it if it is free.
    async fn hold_lease(&mut self) -> Result<bool> {
        if let Some(lease) = self.lease.take() {
            let roll = self.store.call_in(GROUP, &self.owner, std::slice::from_ref(&lease), LEASE).await;
            match roll {
                Ok(roll) if roll.held.contains(&lease) => self.lease = Some(lease),
                Ok(_) => tracing::info!("another instance watches now"),
                Err(error) => {
                    // Whether it is still ours is found out at the next look.
                    self.lease = Some(lease);
                    return Err(error);
                }
            }
        }
        if self.lease.is_none() {
            self.lease = self.store.take(GROUP, 0, &self.owner, LEASE).await?;
            if self.lease.is_some() {
                tracing::info!("this instance watches");
            }
        }
        Ok(self.lease.is_some())
    }

    fn rest(&mut self) {
        self.steady = None;
        self.measurer.forget();
        self.plan.forget();
        postrider::metrics::watching(false);
    }

    async fn watch(&mut self, asked_at: Instant) -> Result<()> {
        let now = Instant::now();
        if self.steady.is_none() {
            let open = self.store.alerts(true, None, OPEN_MAX).await?;
            self.steady = Some(Steady::new(open.into_iter().map(condition_of).collect(), now));
        }
        let Some(steady) = &mut self.steady else { return Ok(()) };
        let open = steady.open().cloned().collect();
        let seen = self.measurer.measure(self.store.as_ref(), open).await?;
        let conditions = steady.take(evaluate(&seen, &self.thresholds), now);
        // Who took long to measure may have been replaced meanwhile, and knows less than the successor.
        if asked_at.elapsed() >= LEASE {
            let message = format!("measuring took {} s, longer than the watch is held", asked_at.elapsed().as_secs());
            return Err(Error::new(Kind::Unavailable, message));
        }
        let changed = self.store.alerts_update(&conditions, &self.sinks).await?;
        changed.iter().for_each(log);
        if !changed.is_empty() {
            self.wake.notify_one();
        }
        postrider::metrics::watching(true);
        self.plan.look(&self.store, seen.now);
        Ok(())
    }

    /// Gives the lease back, so that another instance need not wait for its end.
    async fn end(&mut self) {
        let _ = self.is_watching.send(false);
        self.plan.end().await;
        if let Some(lease) = self.lease.take() {
            let given = self.store.give_back(&lease).await;
            if let Err(error) = given.and(Leases::leave(self.store.as_ref(), GROUP, &self.owner).await) {
                tracing::debug!(%error, "the watch was not given back; its lease expires by itself");
            }
        }
    }
}

fn condition_of(alert: Alert) -> Condition {
    let Alert { rule, subject, urgency, summary, remedy, .. } = alert;
    Condition { rule, subject, urgency, summary, remedy }
}

/// The log is always told.
fn log(alert: &Alert) {
    let Alert { id, rule, subject, summary, remedy, silenced, .. } = alert;
    match (alert.resolved_at, alert.urgency) {
        (Some(_), _) => tracing::info!(alert = id, rule, subject, summary, silenced, "alert resolved"),
        (None, _) if *silenced => {
            tracing::info!(alert = id, rule, subject, summary, remedy, silenced, "alert firing");
        }
        (None, Urgency::Warning) => {
            tracing::warn!(error_type = "alert", alert = id, rule, subject, summary, remedy, "alert firing");
        }
        (None, Urgency::Critical) => {
            tracing::error!(error_type = "alert", alert = id, rule, subject, summary, remedy, "alert firing");
        }
    }
}
