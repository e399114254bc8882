//! One instance of a consumer: takes its share of the slots and runs each.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

use super::attempt::Way;
use super::slot::{SlotRun, run_slot};
use super::{BatchHandler, ConsumerSpec, Handler, RemoteHandler};
use crate::broker::Broker;
use crate::claim::Claims;
use crate::error::Result;
use crate::inbox::Inbox;
use crate::lease::{LeaseTimes, Leases, Share};
use crate::metrics::ConsumerMeter;
use crate::relay::Backoff;

/// Waits between attempts to reach broker and store. Not long, because nothing else tells that they are back.
const AWAY: Backoff =
    Backoff { base: Duration::from_secs(1), max: Duration::from_secs(30), jitter: Duration::from_secs(1) };

/// Runs a handler on every message of a consumer, each once in effect.
pub struct Consumer<I: Inbox> {
    spec: ConsumerSpec,
    broker: Arc<dyn Broker>,
    inbox: Arc<I>,
    leases: Arc<dyn Leases>,
    way: Arc<Way<I::Tx>>,
    owner: String,
    times: LeaseTimes,
    backoff: Backoff,
    claims: Option<Arc<Claims>>,
}

impl<I: Inbox> Consumer<I> {
    /// A consumer; `leases` is the store in which its instances agree who has which slot.
    pub fn new(
        spec: ConsumerSpec,
        broker: Arc<dyn Broker>,
        inbox: Arc<I>,
        leases: Arc<dyn Leases>,
        handler: impl Handler<I::Tx> + 'static,
    ) -> Result<Self> {
        Self::of(spec, broker, inbox, leases, Way::Inside(Arc::new(handler)))
    }

    /// A consumer that applies many events in one transaction: up to [`ConsumerSpec::batch`] of those at hand, and
    /// [`ConsumerSpec::concurrency`] such batches at once, of which a few are enough. `prefetch` bounds what is at hand.
    pub fn batched(
        spec: ConsumerSpec,
        broker: Arc<dyn Broker>,
        inbox: Arc<I>,
        leases: Arc<dyn Leases>,
        handler: impl BatchHandler<I::Tx> + 'static,
    ) -> Result<Self> {
        Self::of(spec, broker, inbox, leases, Way::together(handler))
    }

    /// A consumer whose effects happen elsewhere.
    pub fn remote(
        spec: ConsumerSpec,
        broker: Arc<dyn Broker>,
        inbox: Arc<I>,
        leases: Arc<dyn Leases>,
        handler: impl RemoteHandler + 'static,
    ) -> Result<Self> {
        Self::of(spec, broker, inbox, leases, Way::Outside(Arc::new(handler)))
    }

    fn of(
        spec: ConsumerSpec,
        broker: Arc<dyn Broker>,
        inbox: Arc<I>,
        leases: Arc<dyn Leases>,
        way: Way<I::Tx>,
    ) -> Result<Self> {
        spec.validate()?;
        Ok(Self {
            spec,
            broker,
            inbox,
            leases,
            way: Arc::new(way),
            owner: crate::lease::instance_name(),
            times: LeaseTimes::default(),
            backoff: AWAY,
            claims: None,
        })
    }

    /// Chooses the name under which this instance holds leases.
    #[must_use]
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = owner.into();
        self
    }

    /// Chooses how long leases last.
    #[must_use]
    pub fn lease_times(mut self, times: LeaseTimes) -> Self {
        self.times = times;
        self
    }

    /// Chooses the waits between attempts to reach the broker and the store. Those of failing events are the spec's.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Where large payloads are, which [`crate::claim::ClaimCheck`] has stored: the same storage, and the same prefix or
    /// one above it. Without it an event that refers to one is a dead letter.
    #[must_use]
    pub fn claims(mut self, claims: Arc<Claims>) -> Self {
        self.claims = Some(claims);
        self
    }

    /// Runs until `stop` is cancelled; then finishes what is in hand, acks it and gives the slots back.
    pub async fn run(self, stop: CancellationToken) -> Result<()> {
        let (meter, way) = (ConsumerMeter::new(&self.spec.name), self.way.clone());
        Share::new(self.leases.clone(), self.spec.group(), self.owner.clone(), self.spec.slots, self.times)
            .heart(meter.tally(), move || way.trouble())
            .run(stop, |lease, token| {
                let run = SlotRun {
                    spec: self.spec.clone(),
                    lease,
                    broker: self.broker.clone(),
                    inbox: self.inbox.clone(),
                    way: self.way.clone(),
                    backoff: self.backoff,
                    has_unsent: AtomicBool::new(true),
                    claims: self.claims.clone(),
                    meter: meter.clone(),
                };
                tokio::spawn(run_slot(run, token).boxed())
            })
            .await
    }
}
