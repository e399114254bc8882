//! The one alert that cannot stand in the store: that the store does not answer. Each instance tells it by itself, from
//! memory; with several instances several are told.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::Utc;
use futures_util::FutureExt;
use postrider::Error;
use postrider::alert::{Alert, STORE_UNREACHABLE, store_unreachable};
use postrider::relay::Backoff;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{AlertsConfig, Config};
use crate::sink::{Message, Named};

/// A store that restarts is away for less than this.
const AWAY: Duration = Duration::from_secs(10);
/// Waits between tries to tell a sink.
const AGAIN: Backoff =
    Backoff { base: Duration::from_secs(5), max: Duration::from_secs(300), jitter: Duration::from_secs(1) };

/// Whether the store answers, and telling when it does not.
#[derive(Clone)]
pub struct Local {
    owner: String,
    sinks: Vec<Named>,
    /// Since when it does not answer.
    away: Arc<Mutex<Option<Instant>>>,
    alert: Arc<watch::Sender<Option<Alert>>>,
}

impl Local {
    /// Nothing is wrong at first. Tells until `stop`, one task for each sink.
    pub fn new(config: &Config, owner: &str, sinks: Vec<Named>, tasks: &TaskTracker, stop: &CancellationToken) -> Self {
        let alert = Arc::new(watch::Sender::new(None));
        for sink in &sinks {
            let teller = Teller {
                sink: sink.clone(),
                service: config.log.service.clone(),
                alerts: config.alerts.clone(),
                alert: alert.subscribe(),
            };
            tasks.spawn(teller.run(stop.clone()).boxed());
        }
        Self { owner: owner.to_owned(), sinks, away: Arc::new(Mutex::new(None)), alert }
    }

    /// Everybody who is told.
    pub fn sinks(&self) -> &[Named] {
        &self.sinks
    }

    /// The store answered.
    pub fn answered(&self) {
        *self.away.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let was_raised = self.alert.send_if_modified(|alert| alert.take().is_some());
        if was_raised {
            tracing::info!(rule = STORE_UNREACHABLE, subject = self.owner, "alert resolved");
        }
    }

    /// The store did not answer what it was asked at `asked_at`.
    pub fn failed(&self, asked_at: Instant, error: &Error) {
        let since = *self.away.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(asked_at);
        if since.elapsed() < AWAY {
            return;
        }
        let raised = self.alert.send_if_modified(|alert| {
            if alert.is_some() {
                return false;
            }
            *alert = Some(of(&self.owner, error));
            true
        });
        if raised {
            tracing::error!(error_type = "alert", rule = STORE_UNREACHABLE, subject = self.owner, summary = error.message(),
                causes = ?error.causes(), remedy = error.remedy(), "alert firing");
        }
    }
}

fn of(owner: &str, error: &Error) -> Alert {
    let condition = store_unreachable(owner, error);
    Alert {
        id: 0,
        rule: condition.rule,
        subject: condition.subject,
        urgency: condition.urgency,
        summary: condition.summary,
        remedy: condition.remedy,
        fired_at: Utc::now(),
        resolved_at: None,
        silenced: false,
    }
}

/// Tells one sink.
struct Teller {
    sink: Named,
    service: String,
    alerts: AlertsConfig,
    alert: watch::Receiver<Option<Alert>>,
}

impl Teller {
    async fn run(mut self, stop: CancellationToken) {
        let mut told: Option<Alert> = None;
        let mut failures = 0;
        loop {
            let now = self.alert.borrow_and_update().clone();
            let next = match (&told, now) {
                (None, Some(alert)) => Some(alert),
                (Some(alert), None) => Some(Alert { resolved_at: Some(Utc::now()), ..alert.clone() }),
                // What is over before anybody was told is not worth telling.
                _ => None,
            };
            let mut wait = Duration::MAX;
            if let Some(alert) = next {
                match self.sink.tell(&self.message(&alert)).await {
                    Ok(()) => {
                        failures = 0;
                        told = Some(alert).filter(|alert| alert.resolved_at.is_none());
                    }
                    Err(error) => {
                        failures += 1;
                        wait = AGAIN.delay_with(failures, &mut fastrand::Rng::new());
                        tracing::warn!(sink = self.sink.name, error_type = error.kind().as_str(), %error,
                            causes = ?error.causes(), remedy = error.remedy(), "an alert was not told, trying again");
                    }
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                changed = self.alert.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    fn message(&self, alert: &Alert) -> Message {
        let state = if alert.resolved_at.is_some() { "resolved" } else { "firing" };
        let id = format!("{}-{}-{state}", alert.subject, alert.fired_at.timestamp_millis());
        Message::of(id, alert, false, &self.service, &self.alerts)
    }
}
