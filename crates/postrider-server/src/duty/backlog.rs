//! The backlog as metrics, and the alert for events that wait too long (R10).

use std::sync::Arc;
use std::time::{Duration, Instant};

use postrider::adopt::AdoptedTable;
use postrider::store::Store;
use postrider::upkeep::Backlog;
use postrider::{Result, Route};

use super::Duty;

/// The alert is a log line at most this often.
const ALERT_EVERY: Duration = Duration::from_secs(60);

/// What is looked at.
pub enum Outbox {
    /// The store's outbox, for one destination.
    Own(Arc<dyn Store>, Route),
    /// An adopted table, and its name.
    Adopted(String, Arc<dyn AdoptedTable>),
}

impl Outbox {
    fn name(&self) -> &str {
        match self {
            Outbox::Own(_, route) => &route.destination,
            Outbox::Adopted(name, _) => name,
        }
    }

    async fn backlog(&self) -> Result<Backlog> {
        match self {
            Outbox::Own(store, route) => store.backlog(route).await,
            Outbox::Adopted(_, table) => table.backlog().await,
        }
    }
}

/// Reads the backlog and raises or ends the alert.
pub struct BacklogDuty {
    outbox: Outbox,
    alarm: Alarm,
}

impl BacklogDuty {
    /// The backlog of one outbox; an event that waits longer than `stale_after` is stale.
    pub fn new(outbox: Outbox, stale_after: Duration) -> Self {
        Self { outbox, alarm: Alarm { stale_after, last: None } }
    }
}

impl Duty for BacklogDuty {
    const EVERY: Duration = Duration::from_secs(10);

    async fn run_once(&mut self) {
        let backlog = match self.outbox.backlog().await {
            Ok(backlog) => backlog,
            // The probe tells that the store is away; a second line would say nothing new.
            Err(error) => {
                return tracing::debug!(error_type = error.kind().as_str(), %error, "the backlog cannot be read");
            }
        };
        let destination = self.outbox.name();
        postrider::metrics::backlog(destination, &backlog, self.alarm.is_stale(&backlog));
        match self.alarm.next(&backlog, Instant::now()) {
            Some(Change::Raised) => tracing::warn!(
                error_type = "stale",
                destination,
                oldest_s = backlog.oldest_secs.unwrap_or_default(),
                stale_after_s = self.alarm.stale_after.as_secs(),
                pending = backlog.pending,
                retrying = backlog.retrying,
                waiting = backlog.waiting,
                failed = backlog.failed,
                remedy = "look at `postrider status` and at the broker",
                "events wait too long"
            ),
            Some(Change::Over) => tracing::info!(destination, "no event waits too long any more"),
            None => {}
        }
    }
}

/// When the alert is told.
struct Alarm {
    stale_after: Duration,
    last: Option<Instant>,
}

#[derive(Debug, PartialEq)]
enum Change {
    Raised,
    Over,
}

impl Alarm {
    fn is_stale(&self, backlog: &Backlog) -> bool {
        backlog.oldest_secs.is_some_and(|secs| secs >= self.stale_after.as_secs())
    }

    fn next(&mut self, backlog: &Backlog, now: Instant) -> Option<Change> {
        if !self.is_stale(backlog) {
            return self.last.take().map(|_| Change::Over);
        }
        if self.last.is_some_and(|last| now.duration_since(last) < ALERT_EVERY) {
            return None;
        }
        self.last = Some(now);
        Some(Change::Raised)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_event_is_told_once_a_minute_and_when_it_is_over() {
        let mut alarm = Alarm { stale_after: Duration::from_secs(3600), last: None };
        let waits = |secs| Backlog { oldest_secs: Some(secs), ..Backlog::default() };
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        assert_eq!(alarm.next(&waits(3599), at(0)), None);
        assert_eq!(alarm.next(&waits(3600), at(10)), Some(Change::Raised));
        assert_eq!(alarm.next(&waits(3610), at(20)), None);
        assert_eq!(alarm.next(&waits(3660), at(70)), Some(Change::Raised));
        assert_eq!(alarm.next(&Backlog::default(), at(80)), Some(Change::Over));
        assert_eq!(alarm.next(&Backlog::default(), at(90)), None);
    }
}
