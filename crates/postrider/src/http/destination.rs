//! What the client knows of each destination: its breaker and its retry budget.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::budget::Budget;
use super::error::Failure;
use super::settings::HttpSettings;
use crate::error::Error;
use crate::metrics::http as metrics;
use crate::metrics::labels::DESTINATIONS;
use crate::relay::{Breaker, BreakerState, Permit};

/// More destinations than this are not remembered at once; the one that was not called for longest is forgotten, and
/// starts anew with a closed breaker.
const DESTINATIONS_MAX: usize = 1000;

/// One destination, shared by all calls to it.
pub(super) struct Destination {
    name: String,
    pub label: String,
    state: Mutex<State>,
}

struct State {
    breaker: Breaker,
    budget: Budget,
    /// Whether the gauge counts this breaker as open.
    is_shown_open: bool,
}

impl Destination {
    fn new(name: &str, settings: &HttpSettings, now: Instant) -> Self {
        let label = DESTINATIONS.of(name);
        // The series appears with the first call, not with the first outage.
        metrics::breakers_open(&label, 0.0);
        let state = State {
            breaker: Breaker::new(settings.breaker),
            budget: Budget::new(settings.budget, now),
            is_shown_open: false,
        };
        Self { name: name.to_owned(), label, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The methods of breaker and budget do not panic half-way, so a poisoned lock still guards a whole value.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the breaker for one try, whose end must be reported.
    pub fn permit(&self, now: Instant) -> Result<(), Failure> {
        let mut state = self.lock();
        match state.breaker.permit(now) {
            Permit::All | Permit::Probe => Ok(()),
            Permit::None(until) => Err(Failure::Open {
                reason: state.breaker.reason(),
                probe_in: until.map(|until| until.saturating_duration_since(now)),
            }),
        }
    }

    /// Whether the breaker would let nothing pass.
    pub fn is_open(&self) -> bool {
        self.lock().breaker.state() != BreakerState::Closed
    }

    pub fn breaker(&self) -> BreakerState {
        self.lock().breaker.state()
    }

    /// Why calls are held up, if so.
    pub fn trouble(&self, now: Instant) -> Option<String> {
        self.lock().breaker.trouble(now)
    }

    /// The destination answered, whatever it said.
    pub fn succeeded(&self) {
        let mut state = self.lock();
        state.breaker.succeeded();
        if state.is_shown_open {
            state.is_shown_open = false;
            metrics::breakers_open(&self.label, -1.0);
            tracing::info!(destination = %self.name, "calls resumed");
        }
    }

    /// A try that began at `began` failed because of the destination.
    pub fn failed(&self, began: Instant, now: Instant, error: &Error) {
        let mut state = self.lock();
        // With its causes: who is refused later reads why.
        state.breaker.failed(began, now, error.duplicate().message());
        if !state.is_shown_open && state.breaker.reason().is_some() {
            state.is_shown_open = true;
            metrics::breakers_open(&self.label, 1.0);
            tracing::error!(destination = %self.name, error_type = error.kind().as_str(), %error,
                causes = ?error.causes(), remedy = error.remedy(), "calls stopped: the breaker is open");
        }
    }

    /// A call, not a retry, was sent.
    pub fn called(&self, now: Instant) {
        self.lock().budget.called(now);
    }

    /// Takes one retry out of the budget, and says whether there was one.
    pub fn take_retry(&self, now: Instant) -> bool {
        self.lock().budget.take(now)
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        if self.lock().is_shown_open {
            metrics::breakers_open(&self.label, -1.0);
        }
    }
}

/// All destinations of a client.
pub(super) struct Destinations {
    max: usize,
    known: Mutex<HashMap<String, Known>>,
}

struct Known {
    destination: Arc<Destination>,
    used_at: Instant,
}

impl Destinations {
    pub fn new() -> Self {
        Self { max: DESTINATIONS_MAX, known: Mutex::new(HashMap::new()) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The destination with this name, new if it was not called before.
    pub fn get(&self, name: &str, settings: &HttpSettings, now: Instant) -> Arc<Destination> {
        let mut known = self.lock();
        if let Some(known) = known.get_mut(name) {
            known.used_at = now;
            return known.destination.clone();
        }
        if known.len() >= self.max {
            let idle = known.iter().min_by_key(|(_, known)| known.used_at).map(|(name, _)| name.clone());
            idle.and_then(|name| known.remove(&name));
        }
        let destination = Arc::new(Destination::new(name, settings, now));
        known.insert(name.to_owned(), Known { destination: destination.clone(), used_at: now });
        destination
    }

    /// The state of a destination's breaker, if it was called before.
    pub fn breaker(&self, name: &str) -> Option<BreakerState> {
        self.lock().get(name).map(|known| known.destination.breaker())
    }

    /// Why calls to a destination are held up, if so.
    pub fn trouble(&self, name: &str, now: Instant) -> Option<String> {
        self.lock().get(name).and_then(|known| known.destination.trouble(now))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::Kind;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn five_failures_open_the_breaker_and_a_good_probe_closes_it() {
        let start = Instant::now();
        let destination = Destination::new("h:80", &HttpSettings::default(), start);
        let error = Error::new(Kind::Unavailable, "down");
        for _ in 0..5 {
            destination.permit(start).unwrap();
            destination.failed(start, start, &error);
        }
        let refused = destination.permit(start + SECOND).unwrap_err();
        assert_eq!(refused, Failure::Open { reason: Some("down".to_owned()), probe_in: Some(59 * SECOND) });
        assert!(destination.is_open() && destination.lock().is_shown_open);

        destination.permit(start + 60 * SECOND).unwrap();
        let refused = destination.permit(start + 60 * SECOND).unwrap_err();
        assert_eq!(refused, Failure::Open { reason: None, probe_in: None }, "only one probe");
        destination.failed(start + 60 * SECOND, start + 60 * SECOND, &error);
        assert!(destination.lock().is_shown_open, "counted once");

        destination.permit(start + 120 * SECOND).unwrap();
        destination.succeeded();
        destination.permit(start + 120 * SECOND).unwrap();
        assert!(!destination.is_open() && !destination.lock().is_shown_open);
    }

    #[test]
    fn each_destination_has_a_breaker_of_its_own() {
        let destinations = Destinations::new();
        let settings = HttpSettings::default();
        let now = Instant::now();
        for _ in 0..5 {
            destinations.get("bad:80", &settings, now).failed(now, now, &Error::new(Kind::Unavailable, "down"));
        }
        assert!(destinations.get("bad:80", &settings, now).is_open());
        assert!(!destinations.get("good:80", &settings, now).is_open());
        assert!(matches!(destinations.breaker("bad:80"), Some(BreakerState::Open { .. })));
        assert_eq!(destinations.breaker("good:80"), Some(BreakerState::Closed));
        assert_eq!(destinations.breaker("unknown:80"), None);
    }

    #[test]
    fn the_destination_that_was_not_called_for_longest_is_forgotten() {
        let destinations = Destinations { max: 2, known: Mutex::new(HashMap::new()) };
        let settings = HttpSettings::default();
        let start = Instant::now();
        destinations.get("a:80", &settings, start);
        destinations.get("b:80", &settings, start + SECOND);
        destinations.get("a:80", &settings, start + 2 * SECOND);
        destinations.get("c:80", &settings, start + 3 * SECOND);
        let mut names: Vec<String> = destinations.lock().keys().cloned().collect();
        names.sort();
        assert_eq!(names, ["a:80", "c:80"]);
    }
}
