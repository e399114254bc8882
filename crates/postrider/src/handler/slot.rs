//! One slot of a consumer: receives, dispatches by key, acks after the commit.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{ConsumerSpec, Handler};
use crate::broker::{Broker, Delivery, Subscription};
use crate::error::{Error, Kind, Result};
use crate::event::Event;
use crate::inbox::Inbox;
use crate::lease::Lease;
use crate::metrics;
use crate::relay::Backoff;
use crate::task;

pub(super) struct SlotRun<I: Inbox> {
    pub spec: ConsumerSpec,
    pub lease: Lease,
    pub broker: Arc<dyn Broker>,
    pub inbox: Arc<I>,
    pub handler: Arc<dyn Handler<I::Tx>>,
    pub backoff: Backoff,
}

impl<I: Inbox> Clone for SlotRun<I> {
    fn clone(&self) -> Self {
        Self {
            spec: self.spec.clone(),
            lease: self.lease.clone(),
            broker: self.broker.clone(),
            inbox: self.inbox.clone(),
            handler: self.handler.clone(),
            backoff: self.backoff,
        }
    }
}

/// Subscribes, and subscribes again after every loss of connection, until told to stop.
pub(super) async fn run_slot<I: Inbox>(run: SlotRun<I>, stop: CancellationToken) {
    let mut failures = 0u32;
    while !stop.is_cancelled() {
        let result = match run.broker.subscribe(&run.spec, &run.lease).await {
            Ok(mut subscription) => {
                failures = 0;
                consume(&run, subscription.as_mut(), &stop).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            if error.kind() == Kind::LeaseLost {
                return;
            }
            failures += 1;
            metrics::subscription_lost(&run.spec.name);
            tracing::warn!(consumer = %run.spec.name, slot = run.lease.slot, error_type = error.kind().as_str(), %error,
                remedy = error.remedy(), "subscription ended, subscribing again");
            run.backoff.wait(failures, &stop).await;
        }
    }
}

type Finished = (Option<String>, u64, bool);

/// Works until the subscription ends or a stop is asked for; handlers that run are always waited for.
async fn consume<I: Inbox>(
    run: &SlotRun<I>,
    subscription: &mut dyn Subscription,
    stop: &CancellationToken,
) -> Result<()> {
    let mut desk = Desk::default();
    let mut handlers: JoinSet<Finished> = JoinSet::new();
    let turns = Arc::new(Semaphore::new(usize::from(run.spec.concurrency)));
    // Ends the waits between attempts when the subscription ends: what is not applied is delivered again.
    let over = stop.child_token();
    let outcome = loop {
        // At most `prefetch` of them; how many handlers run at once is the semaphore's business, so that events that wait
        // for their next attempt take no turn away from others.
        while let Some((tag, event)) = desk.next() {
            handlers.spawn(apply(run.clone(), turns.clone(), tag, event, over.clone()));
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break Ok(()),
            Some(finished) = handlers.join_next() => {
                if let Err(error) = settle(&mut desk, subscription, finished).await {
                    break Err(error);
                }
            }
            delivery = subscription.next() => match delivery {
                Ok(Delivery { tag, event: Ok(event), .. }) => desk.receive(tag, event),
                Ok(Delivery { event: Err(error), .. }) => {
                    // It stays unacked: nothing is lost, and it counts against the prefetch until someone looks.
                    metrics::undecodable(&run.spec.name);
                    tracing::error!(consumer = %run.spec.name, error_type = error.kind().as_str(), %error,
                        remedy = error.remedy(), "a message that is no event is kept unacked");
                }
                Err(error) => break Err(error),
            },
        }
    };
    over.cancel();
    // Effects that commit now are acked if the subscription still lives; otherwise the inbox knows them.
    while let Some(finished) = handlers.join_next().await {
        let _ = settle(&mut desk, subscription, finished).await;
    }
    outcome.and(subscription.close().await)
}

async fn settle(
    desk: &mut Desk,
    subscription: &mut dyn Subscription,
    finished: Result<Finished, tokio::task::JoinError>,
) -> Result<()> {
    let (key, tag, is_applied) = finished.map_err(task::ended)?;
    if is_applied {
        desk.finished(key);
        subscription.ack(tag).await?;
    }
    Ok(())
}

/// Gives the event to the handler until it succeeds or a stop is asked for. The boolean says whether the effect is
/// committed.
async fn apply<I: Inbox>(
    run: SlotRun<I>,
    turns: Arc<Semaphore>,
    tag: u64,
    event: Event,
    stop: CancellationToken,
) -> Finished {
    let key = event.key.clone();
    let event = Arc::new(event);
    let mut attempts = 0u32;
    loop {
        // The semaphore is never closed, so there is always a turn.
        let turn = turns.acquire().await;
        if stop.is_cancelled() {
            return (key, tag, false);
        }
        // A task of its own, so that a panic in a handler is one more error.
        let attempt = tokio::spawn(apply_once(run.clone(), event.clone())).await;
        drop(turn);
        let error = match attempt {
            Ok(Ok(())) => return (key, tag, true),
            Ok(Err(error)) => error,
            Err(panic) => Error::new(Kind::Handler, "the handler panicked").with_source(panic),
        };
        attempts += 1;
        metrics::handler_failed(&run.spec.name);
        tracing::warn!(consumer = %run.spec.name, event = %event.id(), r#type = event.kind(), attempts,
            error_type = error.kind().as_str(), %error, causes = ?error.causes(), remedy = error.remedy(),
            "the effect was rolled back, trying again");
        if !run.backoff.wait(attempts, &stop).await {
            return (key, tag, false);
        }
    }
}

async fn apply_once<I: Inbox>(run: SlotRun<I>, event: Arc<Event>) -> Result<()> {
    let mut tx = run.inbox.begin().await?;
    if !run.inbox.admit(&mut tx, &run.spec.name, &event).await? {
        run.inbox.rollback(tx).await?;
        metrics::duplicate(&run.spec.name);
        return Ok(());
    }
    if let Err(error) = run.handler.handle(&mut tx, &event).await {
        let error = Error::new(Kind::Handler, error.to_string()).with_source(error);
        run.inbox.rollback(tx).await?;
        return Err(error);
    }
    run.inbox.commit(tx).await?;
    metrics::applied(&run.spec.name, &event);
    Ok(())
}

/// Messages in hand: per key in order, one at a time; messages without a key in any order.
#[derive(Default)]
struct Desk {
    ready: VecDeque<(u64, Event)>,
    /// Keys that are ready or running, with what waits behind.
    behind: HashMap<String, VecDeque<(u64, Event)>>,
}

impl Desk {
    fn receive(&mut self, tag: u64, event: Event) {
        if let Some(key) = event.key() {
            if let Some(waiting) = self.behind.get_mut(key) {
                waiting.push_back((tag, event));
                return;
            }
            self.behind.insert(key.to_owned(), VecDeque::new());
        }
        self.ready.push_back((tag, event));
    }

    fn next(&mut self) -> Option<(u64, Event)> {
        self.ready.pop_front()
    }

    fn finished(&mut self, key: Option<String>) {
        let Some(key) = key else { return };
        if let Some(waiting) = self.behind.get_mut(&key) {
            match waiting.pop_front() {
                Some(next) => self.ready.push_back(next),
                None => {
                    self.behind.remove(&key);
                }
            }
        }
    }
}
