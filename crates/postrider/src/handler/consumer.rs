//! One instance of a consumer: takes its share of the slots and runs each.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::slot::{SlotRun, run_slot};
use super::{ConsumerSpec, Handler};
use crate::broker::Broker;
use crate::error::Result;
use crate::inbox::Inbox;
use crate::lease::{LeaseTimes, Leases, Share};
use crate::relay::Backoff;

/// Runs a handler on every message of a consumer, each once in effect.
pub struct Consumer<I: Inbox> {
    spec: ConsumerSpec,
    broker: Arc<dyn Broker>,
    inbox: Arc<I>,
    leases: Arc<dyn Leases>,
    handler: Arc<dyn Handler<I::Tx>>,
    owner: String,
    times: LeaseTimes,
    backoff: Backoff,
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
        spec.validate()?;
        Ok(Self {
            spec,
            broker,
            inbox,
            leases,
            handler: Arc::new(handler),
            owner: crate::lease::instance_name(),
            times: LeaseTimes::default(),
            backoff: Backoff::default(),
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

    /// Runs until `stop` is cancelled; then finishes what is in hand, acks it and gives the slots back.
    pub async fn run(self, stop: CancellationToken) -> Result<()> {
        let share = Share::new(self.leases.clone(), self.spec.group(), self.owner.clone(), self.spec.slots, self.times);
        share
            .run(stop, |lease, token| {
                let run = SlotRun {
                    spec: self.spec.clone(),
                    lease,
                    broker: self.broker.clone(),
                    inbox: self.inbox.clone(),
                    handler: self.handler.clone(),
                    backoff: self.backoff,
                };
                tokio::spawn(run_slot(run, token))
            })
            .await
    }
}
