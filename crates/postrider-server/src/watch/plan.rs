//! When the integrity check is due, and running it beside the watch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use futures_util::FutureExt;
use postrider::integrity::ABANDONED_AFTER;
use postrider::store::Store;
use tokio::task::JoinHandle;

use crate::config::Config;
use crate::integrity::Check;
use crate::schedule::Daily;

/// A check that was missed for longer than this is left to the next day.
const LATE_MAX: TimeDelta = TimeDelta::hours(20);
/// Who begins to watch after the time of the check waits for this long: upkeep, leases and consumers that start with it
/// come first, and findings about a system that is just starting help nobody.
const SETTLE: Duration = Duration::from_secs(60);
/// A check that another has begun is looked after this often: whoever began it may have died.
const AGAIN: Duration = ABANDONED_AFTER;

/// The schedule of the check.
pub struct Plan {
    check: Arc<Check>,
    daily: Option<Daily>,
    began: Option<(Instant, DateTime<Utc>)>,
    /// The last time that was tried, and when.
    tried: Option<(DateTime<Utc>, Instant)>,
    running: Option<JoinHandle<postrider::Result<()>>>,
}

impl Plan {
    /// As configured.
    pub fn new(config: &Config) -> Self {
        let check = Arc::new(Check::new(config));
        Self { check, daily: config.check.daily.clone(), began: None, tried: None, running: None }
    }

    /// Another instance watches.
    pub fn forget(&mut self) {
        self.began = None;
    }

    /// Runs the check if it is due and nobody has run it. Returns at once.
    pub fn look(&mut self, store: &Arc<dyn Store>, now: DateTime<Utc>) {
        let (began, began_at) = *self.began.get_or_insert((Instant::now(), now));
        if self.running.as_ref().is_some_and(|running| !running.is_finished()) {
            return;
        }
        // One that could not even begin, because the store was away, is begun again.
        if let Some(Some(Ok(Err(_)))) = self.running.take().map(FutureExt::now_or_never) {
            self.tried = None;
        }
        let Some(due) = self.daily.as_ref().and_then(|daily| daily.previous(now)) else { return };
        let is_settled = due >= began_at || began.elapsed() >= SETTLE;
        let is_tried = self.tried.is_some_and(|(tried, at)| tried == due && at.elapsed() < AGAIN);
        if is_tried || now - due > LATE_MAX || !is_settled {
            return;
        }
        self.tried = Some((due, Instant::now()));
        let (store, check) = (store.clone(), self.check.clone());
        self.running = Some(tokio::spawn(async move { run(store.as_ref(), &check, due).await }));
    }

    /// Waits for a check that runs. It is bounded by the time-outs of its queries, and cut short with the process.
    pub async fn end(&mut self) {
        if let Some(running) = self.running.take() {
            let _ = tokio::time::timeout(SETTLE / 2, running).await;
        }
    }
}

async fn run(store: &dyn Store, check: &Check, due: DateTime<Utc>) -> postrider::Result<()> {
    let result = async {
        let Some(id) = check.begin(store, "schedule", Some(due)).await? else { return Ok(()) };
        tracing::info!(report = id, scheduled_for = %due.to_rfc3339(), "the integrity check begins");
        let report = check.finish(store, id).await?;
        let (checks, warnings, errors) = (report.view.checks, report.view.warnings, report.view.errors);
        tracing::info!(report = id, checks, warnings, errors, "the integrity check is done");
        Ok(())
    };
    let result: postrider::Result<()> = result.await;
    if let Err(error) = &result {
        tracing::error!(error_type = error.kind().as_str(), %error, causes = ?error.causes(), remedy = error.remedy(),
            "the integrity check was not done; run it with `postrider check`");
    }
    result
}
