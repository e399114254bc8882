//! The relay: carries committed events from a source to a broker.
//!
//! Instances share the lanes of a destination by leases. Each lane has one task (`lane`) around a pure state machine
//! (`pipeline`): pages are read ahead, batches are published in parallel, and the position moves forward when
//! everything before it was confirmed or parked.
//!
//! What must hold, whenever the process dies:
//! - The position on disk never passes an event that is neither confirmed nor parked.
//! - Two events of one key are never in flight together, unless the broker takes batches whole.
//! - An event of a key with parked events is never published before them.
//!
//! So after a crash events may be published again, from the position on, in order; none is lost or overtaken.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

use crate::broker::{Batching, Broker};
use crate::error::Result;
use crate::lease::{LeaseTimes, Leases, Share};
use crate::metrics::{self, RelayMeter};
use crate::recovery::Witness;
use crate::source::Source;

mod backoff;
mod breaker;
mod lane;
mod nap;
mod pipeline;

pub use backoff::Backoff;
pub use breaker::{Breaker, BreakerSettings, BreakerState, Permit};

/// More lanes than this cost more connections than they bring; each has a task and a connection of its own.
pub const LANES_MAX: u32 = 64;

/// How a relay works. Every figure has a default that fits a small server and a busy one.
#[derive(Debug, Clone)]
pub struct RelaySettings {
    /// Into how many lanes the outbox is cut; at most this many instances work at once.
    pub lanes: u32,
    /// The longest wait between two looks at the outbox.
    pub poll: Duration,
    /// Rows per read.
    pub page: usize,
    /// Events per publish call.
    pub batch: usize,
    /// Publish calls under way at once, per lane.
    pub in_flight: usize,
    /// Publishing an event is tried this often before it is `failed`.
    pub attempts_max: u32,
    /// Waits between the attempts of one event.
    pub backoff: Backoff,
    /// When to leave the destination alone.
    pub breaker: BreakerSettings,
    /// How long a lane's lease lasts.
    pub lease: LeaseTimes,
}

impl RelaySettings {
    /// Publish calls that may be under way at once: one after the other where batches are taken whole.
    pub(crate) fn calls_max(&self, batching: Batching) -> usize {
        match batching {
            Batching::Independent => self.in_flight.max(1),
            Batching::Atomic => 1,
        }
    }
}

impl Default for RelaySettings {
    fn default() -> Self {
        Self {
            lanes: 1,
            poll: Duration::from_millis(100),
            page: 1000,
            batch: 128,
            in_flight: 16,
            attempts_max: 10,
            backoff: Backoff::default(),
            breaker: BreakerSettings::default(),
            lease: LeaseTimes::default(),
        }
    }
}

/// Carries the events of one outbox to one destination.
pub struct Relay {
    destination: String,
    source: Arc<dyn Source>,
    leases: Arc<dyn Leases>,
    broker: Arc<dyn Broker>,
    settings: RelaySettings,
    owner: String,
    gate: Gate,
    meter: RelayMeter,
    witness: Witness,
}

impl Relay {
    /// A relay; nothing happens before [`Relay::run`]. `source` must have been made for the same destination and
    /// number of lanes.
    pub fn new(
        destination: impl Into<String>,
        source: Arc<dyn Source>,
        leases: Arc<dyn Leases>,
        broker: Arc<dyn Broker>,
        settings: RelaySettings,
    ) -> Self {
        let destination = destination.into();
        let gate = Gate::new(&destination, settings.breaker);
        let meter = RelayMeter::new(&destination);
        Self {
            destination,
            source,
            leases,
            broker,
            settings,
            owner: crate::lease::instance_name(),
            gate,
            meter,
            witness: Witness::default(),
        }
    }

    /// Chooses the name under which this instance holds leases.
    #[must_use]
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = owner.into();
        self
    }

    /// Gives the relay what an earlier process has seen. It goes on remembering there what it publishes.
    #[must_use]
    pub fn witness(mut self, witness: Witness) -> Self {
        self.witness = witness;
        self
    }

    /// The breaker of the destination, shared by all lanes of this instance.
    pub fn gate(&self) -> Gate {
        self.gate.clone()
    }

    /// Runs until `stop` is cancelled; then publishes what was read, settles and gives the lanes back.
    pub async fn run(self, stop: CancellationToken) -> Result<()> {
        let group = group(&self.destination);
        let (gate, tally) = (self.gate.clone(), self.meter.tally());
        Share::new(self.leases.clone(), group, self.owner.clone(), self.settings.lanes, self.settings.lease)
            .heart(tally, move || gate.trouble())
            .run(stop, |lease, token| {
                let lane = lane::Lane {
                    destination: self.destination.clone(),
                    lease,
                    source: self.source.clone(),
                    broker: self.broker.clone(),
                    settings: self.settings.clone(),
                    gate: self.gate.clone(),
                    meter: self.meter.clone(),
                    witness: self.witness.clone(),
                };
                tokio::spawn(lane.run(token).boxed())
            })
            .await
    }
}

/// The lease group of a destination's lanes.
pub fn group(destination: &str) -> String {
    format!("relay/{destination}")
}

/// A destination's breaker, shared between lanes.
#[derive(Debug, Clone)]
pub struct Gate {
    destination: String,
    breaker: Arc<Mutex<Breaker>>,
}

impl Gate {
    pub(crate) fn new(destination: &str, settings: BreakerSettings) -> Self {
        metrics::breaker(destination, false);
        Self { destination: destination.to_owned(), breaker: Arc::new(Mutex::new(Breaker::new(settings))) }
    }

    fn lock(&self) -> MutexGuard<'_, Breaker> {
        // The breaker's methods do not panic half-way, so a poisoned lock still guards a whole value.
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why nothing is published at the moment, if so.
    pub fn closed_because(&self) -> Option<String> {
        self.lock().reason()
    }

    /// Why events are held up, if so: see [`Breaker::trouble`].
    pub fn trouble(&self) -> Option<String> {
        let trouble = self.lock().trouble(Instant::now());
        // A breaker learns of the end of an outage only when there is something to send.
        metrics::breaker(&self.destination, trouble.is_some());
        trouble
    }

    /// Takes over what the broker says about being blocked.
    pub(crate) fn set_blocked(&self, blocked: Option<String>) {
        let mut breaker = self.lock();
        let was_closed = breaker.reason().is_some();
        breaker.set_blocked(blocked, Instant::now());
        if let (false, Some(reason)) = (was_closed, breaker.reason()) {
            tracing::error!(destination = %self.destination, error_type = "blocked", reason,
                "publishing stopped: the broker asked for it");
            metrics::breaker(&self.destination, true);
        }
    }

    /// Nothing is published until a person has looked: the database is not the one that the relay knows.
    pub(crate) fn halt(&self, reason: &str) {
        self.lock().set_blocked(Some(reason.to_owned()), Instant::now());
        metrics::breaker(&self.destination, true);
    }

    pub(crate) fn permit(&self) -> Permit {
        self.lock().permit(Instant::now())
    }

    pub(crate) fn succeeded(&self) {
        let mut breaker = self.lock();
        if breaker.state() != BreakerState::Closed {
            tracing::info!(destination = %self.destination, "publishing resumed");
            metrics::breaker(&self.destination, false);
        }
        breaker.succeeded();
    }

    /// Records a failure and returns how many there were in a row.
    pub(crate) fn failed(&self, began: Instant, error: &crate::Error) -> u32 {
        let mut breaker = self.lock();
        let was_open = breaker.reason().is_some();
        breaker.failed(began, Instant::now(), &error.to_string());
        if !was_open && breaker.reason().is_some() {
            tracing::error!(destination = %self.destination, error_type = error.kind().as_str(), %error,
                causes = ?error.causes(), remedy = error.remedy(), "publishing stopped: the breaker is open");
            metrics::breaker(&self.destination, true);
        }
        breaker.failures_in_a_row()
    }
}
