//! One slot of a consumer: receives, dispatches by key, acks after the commit, tries again what is held.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::ConsumerSpec;
use super::attempt::Way;
use super::desk::{Desk, Message};
use super::sending::send_dead_letters;
use super::worker::{Finished, do_work};
use crate::broker::{Broker, Delivery, Subscription};
use crate::claim::Claims;
use crate::error::{Kind, Result};
use crate::inbox::{Held, Inbox, Part};
use crate::lease::Lease;
use crate::metrics::ConsumerMeter;
use crate::relay::Backoff;
use crate::task::{self, Call};

/// Held messages are looked at this often while there are some.
const DUE_EVERY: Duration = Duration::from_millis(200);
/// And this often while none is known of: a person may have asked for a dead letter again.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A message that waits for one that is gone waits for this long at most.
const SWEEP_EVERY: Duration = Duration::from_secs(5);
/// Held messages taken at once.
const DUE_LIMIT: usize = 100;
/// The wait before dead letters are sent again that the broker did not take.
const SEND_AGAIN: Duration = Duration::from_secs(5);

pub(super) struct SlotRun<I: Inbox> {
    pub spec: ConsumerSpec,
    pub lease: Lease,
    pub broker: Arc<dyn Broker>,
    pub inbox: Arc<I>,
    pub way: Arc<Way<I::Tx>>,
    /// The waits between attempts to reach broker and store.
    pub backoff: Backoff,
    /// Where large payloads are.
    pub claims: Option<Arc<Claims>>,
    /// Whether dead letters may lie in the store that the broker's own place does not have yet.
    pub has_unsent: AtomicBool,
    pub meter: ConsumerMeter,
}

impl<I: Inbox> SlotRun<I> {
    pub fn part(&self) -> Part<'_> {
        Part { consumer: &self.spec.name, slot: self.lease.slot, slots: self.spec.slots }
    }
}

/// Subscribes, and subscribes again after every loss of connection, until told to stop.
pub(super) async fn run_slot<I: Inbox>(run: SlotRun<I>, stop: CancellationToken) {
    let run = Arc::new(run);
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
            run.meter.subscription_lost();
            tracing::warn!(consumer = %run.spec.name, slot = run.lease.slot, error_type = error.kind().as_str(), %error,
                remedy = error.remedy(), "subscription ended, subscribing again");
            run.backoff.wait(failures, &stop).await;
        }
    }
}

/// Works until the subscription ends or a stop is asked for; handlers that run are always waited for.
async fn consume<I: Inbox>(
    run: &Arc<SlotRun<I>>,
    subscription: &mut dyn Subscription,
    stop: &CancellationToken,
) -> Result<()> {
    let opening = run.clone();
    let opening = task::start(async move { opening.inbox.retries().open(opening.part()).await });
    let held = match opening.await {
        Ok(held) => held,
        Err(error) => {
            // Not dropped: that would cancel it first, see `Subscription::close` of RabbitMQ's.
            let _ = subscription.close().await;
            return Err(error);
        }
    };
    let mut desk = Desk::new(held);
    let mut works: JoinSet<Finished> = JoinSet::new();
    let turns = Arc::new(Semaphore::new(usize::from(run.spec.concurrency)));
    let mut looking: Option<Call<Vec<Held>>> = None;
    let mut next_look = Instant::now();
    let mut next_sweep = Instant::now() + SWEEP_EVERY;
    let mut sending: Option<Call<()>> = None;
    let mut next_send = Instant::now();
    // How many batches are under way; more messages are waited for otherwise.
    let mut batches = 0;
    let batch_max = matches!(*run.way, Way::Together { .. }).then_some(usize::from(run.spec.batch));
    // Ends the waits for the store when the subscription ends: what is not applied is delivered again.
    let over = stop.child_token();
    let outcome = loop {
        while let Some(work) = match batch_max {
            None => desk.next(),
            Some(max) => desk.next_of_batches(if batches < run.spec.concurrency { max } else { 0 }),
        } {
            batches += u16::from(work.is_batch());
            works.spawn(do_work(run.clone(), turns.clone(), work, over.clone()).boxed());
        }
        if sending.is_none() && Instant::now() >= next_send && run.has_unsent.swap(false, Ordering::Relaxed) {
            sending = Some(task::start(send_dead_letters(run.clone())));
        }
        if looking.is_none() && Instant::now() >= next_look {
            let run = run.clone();
            // Also while none is known of: one that was held by another instance is not known of here.
            let is_sweep = next_sweep <= Instant::now();
            if is_sweep {
                next_sweep = Instant::now() + SWEEP_EVERY;
            }
            looking = Some(task::start(async move {
                if is_sweep {
                    run.inbox.retries().free_stranded(run.part()).await?;
                }
                run.inbox.retries().due(run.part(), DUE_LIMIT).await
            }));
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break Ok(()),
            Some(finished) = works.join_next() => match finished {
                Ok(finished) => {
                    if finished.tried.is_some() {
                        next_look = Instant::now();
                    }
                    batches -= u16::from(finished.was_batch);
                    if let Err(error) = settle(&mut desk, subscription, finished).await {
                        break Err(error);
                    }
                }
                Err(error) => break Err(task::ended(error)),
            },
            found = task::join(&mut looking) => {
                looking = None;
                next_look = Instant::now() + if desk.has_held() { DUE_EVERY } else { LOOK_EVERY };
                match found {
                    Ok(found) => found.into_iter().for_each(|held| desk.found(held)),
                    // Without the store nothing else works either, and the others say so.
                    Err(error) => tracing::debug!(consumer = %run.spec.name, %error, "held messages cannot be read"),
                }
            }
            sent = task::join(&mut sending) => {
                sending = None;
                if let Err(error) = sent {
                    run.has_unsent.store(true, Ordering::Relaxed);
                    next_send = Instant::now() + SEND_AGAIN;
                    tracing::warn!(consumer = %run.spec.name, error_type = error.kind().as_str(), %error,
                        remedy = error.remedy(), "dead letters cannot be sent to the broker, trying again");
                }
            }
            delivery = subscription.next() => match delivery {
                Ok(Delivery { tag, event: Ok(event), is_redelivered, origin }) => {
                    desk.receive(Message { tag, event: Arc::new(event), origin, is_redelivered });
                }
                Ok(Delivery { tag, event: Err(undecodable), origin, .. }) => {
                    desk.undecodable(tag, undecodable, origin);
                }
                Err(error) => break Err(error),
            },
            () = tokio::time::sleep_until(next_look.into()), if looking.is_none() => {}
        }
    };
    over.cancel();
    // Effects that commit now are acked if the subscription still lives; otherwise the inbox knows them.
    while let Some(finished) = works.join_next().await {
        if let Ok(finished) = finished {
            let _ = settle(&mut desk, subscription, finished).await;
        }
    }
    outcome.and(subscription.close().await)
}

async fn settle(desk: &mut Desk, subscription: &mut dyn Subscription, finished: Finished) -> Result<()> {
    if let Some((id, was_suspect)) = finished.tried {
        desk.tried(id, was_suspect);
    }
    for (key, state) in finished.keys {
        desk.finished(&key, state);
    }
    match finished.tags.as_slice() {
        [] => Ok(()),
        [tag] => subscription.ack(*tag).await,
        tags => subscription.ack_all(tags).await,
    }
}
