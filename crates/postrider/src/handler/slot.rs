//! One slot of a consumer: receives, dispatches by key, acks after the commit, tries again what is held.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::desk::{Desk, KeyState, Message, Work};
use super::verdict::{HandlerError, Verdict, failed};
use super::{ConsumerSpec, Handler};
use crate::broker::{Broker, Delivery, Origin, Subscription};
use crate::error::{Error, Kind, Result};
use crate::event::{Event, id_of_hash};
use crate::inbox::{Admission, Body, DeadLetter, Failed, Held, Inbox, Part, Why};
use crate::lease::Lease;
use crate::metrics;
use crate::relay::Backoff;
use crate::task;

/// Held messages are looked at this often while there are some.
const DUE_EVERY: Duration = Duration::from_millis(200);
/// And this often while none is known of: a person may have asked for a dead letter again.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Held messages taken at once.
const DUE_LIMIT: usize = 100;

pub(super) struct SlotRun<I: Inbox> {
    pub spec: ConsumerSpec,
    pub lease: Lease,
    pub broker: Arc<dyn Broker>,
    pub inbox: Arc<I>,
    pub handler: Arc<dyn Handler<I::Tx>>,
    /// The waits between attempts to reach broker and store.
    pub backoff: Backoff,
}

impl<I: Inbox> SlotRun<I> {
    fn part(&self) -> Part<'_> {
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
            metrics::subscription_lost(&run.spec.name);
            tracing::warn!(consumer = %run.spec.name, slot = run.lease.slot, error_type = error.kind().as_str(), %error,
                remedy = error.remedy(), "subscription ended, subscribing again");
            run.backoff.wait(failures, &stop).await;
        }
    }
}

/// What a piece of work came to.
struct Finished {
    key: Option<String>,
    /// What may be acked.
    tag: Option<u64>,
    /// The held message that was tried, and whether it was a suspect.
    tried: Option<(i64, bool)>,
    /// None when a stop came first: nothing is known, and nothing more of the key is worked on.
    state: Option<KeyState>,
}

/// Works until the subscription ends or a stop is asked for; handlers that run are always waited for.
async fn consume<I: Inbox>(
    run: &Arc<SlotRun<I>>,
    subscription: &mut dyn Subscription,
    stop: &CancellationToken,
) -> Result<()> {
    let opening = run.clone();
    let opening = task::start(async move { opening.inbox.retries().open(opening.part()).await });
    let mut desk = Desk::new(task::join(&mut Some(opening)).await?);
    let mut works: JoinSet<Finished> = JoinSet::new();
    let turns = Arc::new(Semaphore::new(usize::from(run.spec.concurrency)));
    let mut looking: Option<JoinHandle<Result<Vec<Held>>>> = None;
    let mut next_look = Instant::now();
    // Ends the waits for the store when the subscription ends: what is not applied is delivered again.
    let over = stop.child_token();
    let outcome = loop {
        while let Some(work) = desk.next() {
            works.spawn(do_work(run.clone(), turns.clone(), work, over.clone()));
        }
        if looking.is_none() && Instant::now() >= next_look {
            let run = run.clone();
            looking = Some(task::start(async move { run.inbox.retries().due(run.part(), DUE_LIMIT).await }));
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break Ok(()),
            Some(finished) = works.join_next() => match finished {
                Ok(finished) => {
                    if finished.tried.is_some() {
                        next_look = Instant::now();
                    }
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
    if let Some(state) = finished.state {
        desk.finished(finished.key.as_deref(), state);
    }
    match finished.tag {
        Some(tag) => subscription.ack(tag).await,
        None => Ok(()),
    }
}

async fn do_work<I: Inbox>(
    run: Arc<SlotRun<I>>,
    turns: Arc<Semaphore>,
    work: Work,
    over: CancellationToken,
) -> Finished {
    // The semaphore is never closed, so there is always a turn. Whoever has it uses one connection of the store at most.
    let _turn = turns.acquire().await;
    let worker = Worker { run, over };
    match work {
        // A stop came first: it is delivered again, or found again.
        _ if worker.over.is_cancelled() => Finished { key: None, tag: None, tried: None, state: None },
        Work::Apply(message) => {
            let state = worker.apply(&message).await;
            worker.received(message, state)
        }
        Work::HoldBehind(message) => {
            let state = worker.hold(&message, Why::Behind).await;
            worker.received(message, state)
        }
        Work::HoldSuspect(message) => {
            let state = worker.hold(&message, Why::Suspect).await;
            worker.received(message, state)
        }
        Work::Try(held) => {
            let held = Arc::new(*held);
            let state = worker.retry(&held).await;
            let key = held.event.key().map(str::to_owned);
            Finished { key, tag: None, tried: Some((held.id, held.is_suspect)), state }
        }
        Work::Bury { tag, undecodable, origin } => {
            metrics::undecodable(&worker.run.spec.name);
            let kind = undecodable.error.kind().as_str();
            let failed = failed(kind, &undecodable.error);
            let body = Body::Raw(&undecodable.raw);
            let is_buried = worker.bury(body, undecodable.raw.id(), &failed, &origin, None).await;
            Finished { key: None, tag: is_buried.map(|()| tag), tried: None, state: None }
        }
    }
}

/// What one attempt came to.
enum Outcome {
    Done,
    Behind,
    Forged,
    /// The handler said so.
    Said(Verdict),
    /// The store could not be used; it is not the event's fault.
    Store(Error),
}

/// A call of the store.
type Call<'f, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'f>>;

struct Worker<I: Inbox> {
    run: Arc<SlotRun<I>>,
    over: CancellationToken,
}

impl<I: Inbox> Worker<I> {
    fn received(&self, message: Message, state: Option<KeyState>) -> Finished {
        let key = message.event.key().map(str::to_owned);
        Finished { key, tag: state.map(|_| message.tag), tried: None, state }
    }

    /// Applies a message that nothing is known against. None when a stop came first.
    async fn apply(&self, message: &Message) -> Option<KeyState> {
        let (event, origin) = (&message.event, &message.origin);
        let said = match self.attempt(event, None).await? {
            Outcome::Done => return Some(KeyState::Free),
            Outcome::Behind => return self.hold(message, Why::Behind).await,
            Outcome::Forged => {
                // The other one was applied; this one needs an id of its own to be kept beside it.
                let id = id_of_hash(event.id().as_u128() ^ u128::from(event.fingerprint().cast_unsigned()));
                let failed = Failed {
                    error_type: "forged".to_owned(),
                    error: format!("another event with the id {} was applied before", event.id()),
                    causes: Vec::new(),
                };
                self.bury(Body::Event(event), id, &failed, origin, None).await?;
                return Some(KeyState::Free);
            }
            Outcome::Said(said) => said,
            Outcome::Store(_) => return None,
        };
        let spec = &self.run.spec;
        match said {
            Verdict::Retry { failed, after } if spec.retries > 0 => {
                let delay = after.unwrap_or_else(|| spec.backoff.delay_with(1, &mut fastrand::Rng::new()));
                self.told(event, 1, &failed);
                self.hold(message, Why::Failed { delay, attempts: 1, failure: Some(&failed) }).await
            }
            Verdict::Snooze(delay) => self.hold(message, Why::Failed { delay, attempts: 0, failure: None }).await,
            Verdict::Retry { failed, .. } | Verdict::Reject(failed) => {
                self.bury(Body::Event(event), event.id(), &failed, origin, None).await?;
                Some(KeyState::Free)
            }
            Verdict::Skip => Some(KeyState::Free),
        }
    }

    /// Tries a held message. None when a stop came first.
    async fn retry(&self, held: &Arc<Held>) -> Option<KeyState> {
        let spec = &self.run.spec;
        let event = Arc::new(held.event.clone());
        if held.attempts > spec.retries {
            let failed = Failed {
                error_type: "crash".to_owned(),
                error: "the process ended whenever it had the message".to_owned(),
                causes: Vec::new(),
            };
            self.bury_held(held, &failed).await?;
            return self.key_state(event.key()).await;
        }
        self.insist("count an attempt", || self.run.inbox.retries().begin_attempt(held)).await?;
        let attempts = held.attempts + 1;
        let said = match self.attempt(&event, Some(held)).await {
            Some(Outcome::Said(said)) => said,
            Some(_) => return self.key_state(event.key()).await,
            // Not tried at all, because a stop came first.
            None => Verdict::Snooze(Duration::ZERO),
        };
        match said {
            Verdict::Retry { failed, after } if attempts <= spec.retries => {
                let delay = after.unwrap_or_else(|| spec.backoff.delay_with(attempts, &mut fastrand::Rng::new()));
                self.told(&event, attempts, &failed);
                self.later(held, Some(&failed), delay).await?;
                Some(KeyState::Held)
            }
            Verdict::Snooze(delay) => {
                self.later(held, None, delay).await?;
                Some(KeyState::Held)
            }
            Verdict::Retry { failed, .. } | Verdict::Reject(failed) => {
                self.bury_held(held, &failed).await?;
                self.key_state(event.key()).await
            }
            Verdict::Skip => self.key_state(event.key()).await,
        }
    }

    async fn later(&self, held: &Held, failed: Option<&Failed>, delay: Duration) -> Option<()> {
        self.insist("write a failure", || self.run.inbox.retries().failed(held, failed, delay)).await
    }

    async fn bury_held(&self, held: &Held, failed: &Failed) -> Option<()> {
        self.bury(Body::Event(&held.event), held.event.id(), failed, &held.origin, Some(held.id)).await
    }

    async fn key_state(&self, key: Option<&str>) -> Option<KeyState> {
        let Some(key) = key else { return Some(KeyState::Free) };
        let has_key = || self.run.inbox.retries().has_key(&self.run.spec.name, key);
        let is_held = self.insist("look for held messages", has_key).await?;
        Some(if is_held { KeyState::Held } else { KeyState::Free })
    }

    /// One attempt, and more while the store cannot be used. None when a stop came first.
    async fn attempt(&self, event: &Arc<Event>, held: Option<&Arc<Held>>) -> Option<Outcome> {
        let mut failures = 0;
        loop {
            if self.over.is_cancelled() {
                return None;
            }
            // A task of its own, so that a panic in a handler is one more failure.
            let outcome = match tokio::spawn(apply_once(self.run.clone(), event.clone(), held.cloned())).await {
                Ok(outcome) => outcome,
                Err(panic) => Outcome::Said(retry("panic", panicked(panic))),
            };
            let Outcome::Store(error) = outcome else { return Some(outcome) };
            failures += 1;
            self.store_failed("apply an event", &error, failures);
            if !self.run.backoff.wait(failures, &self.over).await {
                return None;
            }
        }
    }

    async fn hold(&self, message: &Message, why: Why<'_>) -> Option<KeyState> {
        let Message { event, origin, .. } = message;
        let hold = || self.run.inbox.retries().hold(&self.run.spec.name, event, origin, why);
        self.insist("hold a message", hold).await?;
        metrics::held(&self.run.spec.name);
        Some(KeyState::Held)
    }

    async fn bury(
        &self,
        message: Body<'_>,
        id: Uuid,
        failed: &Failed,
        origin: &Origin,
        held: Option<i64>,
    ) -> Option<()> {
        let consumer = self.run.spec.name.as_str();
        let dead = DeadLetter { consumer, message, id, failed, origin, held };
        self.insist("write a dead letter", || self.run.inbox.retries().bury(&dead)).await?;
        metrics::buried(consumer, &failed.error_type);
        tracing::error!(consumer, event = %id, topic = %origin.topic, error_type = %failed.error_type,
            error = %failed.error, causes = ?failed.causes, remedy = "look at `postrider dead list`",
            "a message is given up and kept as a dead letter");
        Some(())
    }

    /// Until the store does it, or a stop comes.
    async fn insist<'f, T>(&self, doing: &str, call: impl Fn() -> Call<'f, T> + Send) -> Option<T> {
        let mut failures = 0;
        loop {
            match call().await {
                Ok(value) => return Some(value),
                Err(error) => {
                    failures += 1;
                    self.store_failed(doing, &error, failures);
                    if !self.run.backoff.wait(failures, &self.over).await {
                        return None;
                    }
                }
            }
        }
    }

    fn store_failed(&self, doing: &str, error: &Error, failures: u32) {
        tracing::warn!(consumer = %self.run.spec.name, failures, error_type = error.kind().as_str(), %error,
            causes = ?error.causes(), remedy = error.remedy(), "cannot {doing}, trying again");
    }

    fn told(&self, event: &Event, attempts: u32, failed: &Failed) {
        metrics::handler_failed(&self.run.spec.name);
        tracing::warn!(consumer = %self.run.spec.name, event = %event.id(), r#type = event.kind(), attempts,
            error_type = %failed.error_type, error = %failed.error, causes = ?failed.causes,
            "the effect was rolled back and is tried again later");
    }
}

fn retry(error_type: &str, error: String) -> Verdict {
    let failed = Failed { error_type: error_type.to_owned(), error, causes: Vec::new() };
    Verdict::Retry { failed, after: None }
}

fn panicked(panic: tokio::task::JoinError) -> String {
    let said = match panic.try_into_panic() {
        Ok(said) => said,
        Err(_) => return "the handler was stopped".to_owned(),
    };
    let text = said.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| said.downcast_ref::<String>().cloned());
    text.map_or_else(|| "the handler panicked".to_owned(), |text| format!("the handler panicked: {text}"))
}

async fn apply_once<I: Inbox>(run: Arc<SlotRun<I>>, event: Arc<Event>, held: Option<Arc<Held>>) -> Outcome {
    match try_apply(&run, &event, held.as_deref()).await {
        Ok(outcome) => outcome,
        // What the store says about the place is not the event's fault. The rest is: a constraint that is checked at the
        // commit, or a handler that went on after a failed statement.
        Err(error) if is_of_place(error.kind()) => Outcome::Store(error),
        Err(error) => Outcome::Said(Verdict::Retry { failed: failed(error.kind().as_str(), &error), after: None }),
    }
}

fn is_of_place(kind: Kind) -> bool {
    !kind.belongs_to_event() && kind != Kind::Other
}

async fn try_apply<I: Inbox>(run: &SlotRun<I>, event: &Event, held: Option<&Held>) -> Result<Outcome> {
    let consumer = run.spec.name.as_str();
    let mut tx = run.inbox.begin().await?;
    let admission = match held {
        Some(held) => run.inbox.admit_held(&mut tx, held).await?,
        None => run.inbox.admit(&mut tx, consumer, event).await?,
    };
    match admission {
        Admission::New => {}
        Admission::Done => {
            // A held message that was applied before leaves the store.
            match held {
                Some(_) => run.inbox.commit(tx).await?,
                None => run.inbox.rollback(tx).await?,
            }
            metrics::duplicate(consumer);
            return Ok(Outcome::Done);
        }
        Admission::Behind => {
            run.inbox.rollback(tx).await?;
            return Ok(Outcome::Behind);
        }
        Admission::Forged => {
            run.inbox.rollback(tx).await?;
            return Ok(Outcome::Forged);
        }
    }
    // The handler's own time: waiting for a connection, or for SQLite's one writer, is not its fault.
    let timeout = run.spec.handler_timeout;
    let Ok(answer) = tokio::time::timeout(timeout, run.handler.handle(&mut tx, event)).await else {
        // In the middle of whatever it did; the driver rolls back when the connection answers again.
        drop(tx);
        return Ok(Outcome::Said(retry("timeout", format!("the handler did not answer within {timeout:?}"))));
    };
    match answer {
        Ok(()) => {
            run.inbox.commit(tx).await?;
            metrics::applied(consumer, event);
        }
        Err(HandlerError(Verdict::Skip)) => {
            run.inbox.skip(&mut tx, consumer, event).await?;
            run.inbox.commit(tx).await?;
            metrics::skipped(consumer);
        }
        Err(HandlerError(said)) => {
            run.inbox.rollback(tx).await?;
            return Ok(Outcome::Said(said));
        }
    }
    Ok(Outcome::Done)
}
