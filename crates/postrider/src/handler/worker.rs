//! Works on one message, or on a batch: applies, holds, buries, tries again.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::attempt::{self, Outcome, Way};
use super::desk::{KeyState, Message, Work};
use super::slot::SlotRun;
use super::verdict::{Verdict, failed};
use crate::broker::Origin;
use crate::error::{Error, Result};
use crate::event::{Event, id_of_hash};
use crate::inbox::{Admission, Body, DeadLetter, Failed, Held, Inbox, Why};

/// What a piece of work came to.
#[derive(Default)]
pub(super) struct Finished {
    /// Keys whose next message may be worked on, and what became of them. After a stop nothing is known of a key, and
    /// nothing more of it is worked on.
    pub keys: Vec<(String, KeyState)>,
    /// What may be acked.
    pub tags: Vec<u64>,
    /// The held message that was tried, and whether it was a suspect.
    pub tried: Option<(i64, bool)>,
    pub was_batch: bool,
}

impl Finished {
    fn one(key: Option<&str>, tag: Option<u64>, state: Option<KeyState>) -> Self {
        let Some(state) = state else { return Self::default() };
        let keys = key.map(|key| (key.to_owned(), state)).into_iter().collect();
        Self { keys, tags: tag.into_iter().collect(), ..Self::default() }
    }
}

pub(super) async fn do_work<I: Inbox>(
    run: Arc<SlotRun<I>>,
    turns: Arc<Semaphore>,
    work: Work,
    over: CancellationToken,
) -> Finished {
    // The semaphore is never closed, so there is always a turn. Whoever has it uses one connection of the store at most.
    let _turn = turns.acquire().await;
    let worker = Worker { run, over };
    let received = |message: &Message, state| Finished::one(message.event.key(), Some(message.tag), state);
    match work {
        // A stop came first: it is delivered again, or found again.
        _ if worker.over.is_cancelled() => Finished::default(),
        Work::Apply(message) => received(&message, worker.apply(&message).await),
        Work::ApplyAll(messages) => worker.apply_all(&messages).await,
        Work::HoldBehind(message) => received(&message, worker.hold(&message, Why::Behind).await),
        Work::HoldSuspect(message) => received(&message, worker.hold(&message, Why::Suspect).await),
        Work::Try(held) => {
            let held = Arc::new(*held);
            let state = worker.retry(&held).await;
            Finished { tried: Some((held.id, held.is_suspect)), ..Finished::one(held.event.key(), None, state) }
        }
        Work::Bury { tag, undecodable, origin } => {
            worker.run.meter.undecodable();
            let kind = undecodable.error.kind().as_str();
            let failed = failed(kind, &undecodable.error);
            let body = Body::Raw(&undecodable.raw);
            let is_buried = worker.bury(body, undecodable.raw.id_at(&origin), &failed, &origin, None).await;
            Finished { tags: is_buried.map(|()| tag).into_iter().collect(), ..Finished::default() }
        }
    }
}

/// A call of the store.
type Call<'f, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'f>>;

struct Worker<I: Inbox> {
    run: Arc<SlotRun<I>>,
    over: CancellationToken,
}

impl<I: Inbox> Worker<I> {
    /// Applies messages together; when that fails, one by one.
    async fn apply_all(&self, messages: &[Message]) -> Finished {
        let Some(admissions) = self.attempt_all(messages).await else {
            return Finished { was_batch: true, ..Finished::default() };
        };
        let mut tags = Vec::with_capacity(messages.len());
        let mut states: HashMap<&str, Option<KeyState>> = HashMap::new();
        for (n, message) in messages.iter().enumerate() {
            let key = message.event.key();
            // A stop came while an earlier message of the key was worked on.
            if key.is_some_and(|key| states.get(key) == Some(&None)) {
                continue;
            }
            let state = match admissions.as_ref().map(|admissions| admissions[n]) {
                Some(Admission::New) => Some(KeyState::Free),
                Some(Admission::Done) => {
                    self.run.meter.duplicate();
                    Some(KeyState::Free)
                }
                Some(Admission::Behind) => self.hold(message, Why::Behind).await,
                Some(Admission::Forged) => self.bury_forged(message).await,
                None => self.apply(message).await,
            };
            tags.extend(state.map(|_| message.tag));
            if let Some(key) = key {
                states.insert(key, state);
            }
        }
        let known = states.into_iter().filter_map(|(key, state)| Some((key.to_owned(), state?)));
        Finished { keys: known.collect(), tags, tried: None, was_batch: true }
    }

    /// The admissions of messages that were applied together; `Some(None)` when that failed. None when a stop came first.
    async fn attempt_all(&self, messages: &[Message]) -> Option<Option<Vec<Admission>>> {
        let Way::Together { batch, .. } = self.run.way.as_ref() else { return Some(None) };
        let events: Arc<[Arc<Event>]> = messages.iter().map(|message| message.event.clone()).collect();
        let mut failures = 0;
        while !self.over.is_cancelled() {
            let attempt = attempt::many(self.run.clone(), batch.clone(), events.clone());
            match tokio::spawn(attempt.boxed()).await {
                Ok(Ok(admissions)) => return Some(Some(admissions)),
                Ok(Err(Outcome::Away(error))) => {
                    failures += 1;
                    self.is_away("apply events", &error, failures);
                    self.run.backoff.wait(failures, &self.over).await;
                }
                // Each says for itself what is wrong with it.
                Ok(Err(_)) | Err(_) => return Some(None),
            }
        }
        None
    }

    /// Applies a message that nothing is known against. None when a stop came first.
    async fn apply(&self, message: &Message) -> Option<KeyState> {
        let (event, origin) = (&message.event, &message.origin);
        let said = match self.attempt(event, None).await? {
            Outcome::Done => return Some(KeyState::Free),
            Outcome::Behind => return self.hold(message, Why::Behind).await,
            Outcome::Forged => return self.bury_forged(message).await,
            Outcome::Delivered { is_skipped } => return self.delivered(message, is_skipped).await,
            Outcome::Said(said) => said,
            Outcome::Away(_) => return None,
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
            // `attempt` has turned them into something else.
            Verdict::Skip | Verdict::Away(_) => None,
        }
    }

    async fn bury_forged(&self, message: &Message) -> Option<KeyState> {
        let event = &message.event;
        // The other one was applied; this one needs an id of its own to be kept beside it.
        let fingerprint = event.fingerprint().unwrap_or_default().cast_unsigned();
        let id = id_of_hash(event.id().as_u128() ^ u128::from(fingerprint));
        let error = format!("another event with the id {} was applied before", event.id());
        let failed = Failed::new("forged", error, Vec::new());
        self.bury(Body::Event(event), id, &failed, &message.origin, None).await?;
        Some(KeyState::Free)
    }

    /// The effect has happened elsewhere; only the inbox must still learn of it.
    async fn delivered(&self, message: &Message, is_skipped: bool) -> Option<KeyState> {
        match self.record(&message.event, None, is_skipped).await? {
            // Earlier messages of the key came back meanwhile. It comes again after them; the other side knows its id.
            Admission::Behind => self.hold(message, Why::Behind).await,
            Admission::Forged => self.bury_forged(message).await,
            Admission::New | Admission::Done => Some(KeyState::Free),
        }
    }

    async fn record(&self, event: &Event, held: Option<&Held>, is_skipped: bool) -> Option<Admission> {
        let record = || -> Call<'_, Admission> { Box::pin(attempt::record(&self.run, event, held, is_skipped)) };
        self.insist("note what was delivered", record).await
    }

    /// Tries a held message. None when a stop came first.
    async fn retry(&self, held: &Arc<Held>) -> Option<KeyState> {
        let spec = &self.run.spec;
        let event = Arc::new(held.event.clone());
        // A redelivery counts as an attempt, and may be none; without retries it gets one all the same.
        if held.attempts > spec.retries.max(1) {
            let failed = Failed::new("crash", "the process ended whenever it had the message", Vec::new());
            self.bury_held(held, &failed).await?;
            return self.key_state(event.key()).await;
        }
        let begin = || self.run.inbox.retries().begin_attempt(held);
        if !self.insist("count an attempt", begin).await? {
            return self.key_state(event.key()).await;
        }
        let attempts = held.attempts + 1;
        let said = match self.attempt(&event, Some(held)).await {
            Some(Outcome::Said(said)) => said,
            Some(Outcome::Delivered { is_skipped }) => {
                self.record(&event, Some(held), is_skipped).await?;
                return self.key_state(event.key()).await;
            }
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
            Verdict::Skip | Verdict::Away(_) => None,
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
            let attempt = attempt::one(self.run.clone(), event.clone(), held.cloned());
            let outcome = match tokio::spawn(attempt.boxed()).await {
                Ok(outcome) => outcome,
                Err(panic) => Outcome::Said(attempt::retry("panic", panicked(panic))),
            };
            let Outcome::Away(error) = outcome else { return Some(outcome) };
            failures += 1;
            self.is_away("apply an event", &error, failures);
            if !self.run.backoff.wait(failures, &self.over).await {
                return None;
            }
        }
    }

    async fn hold(&self, message: &Message, why: Why<'_>) -> Option<KeyState> {
        let Message { event, origin, .. } = message;
        let hold = || self.run.inbox.retries().hold(&self.run.spec.name, event, origin, why);
        self.insist("hold a message", hold).await?;
        self.run.meter.held();
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
        self.run.has_unsent.store(true, Ordering::Relaxed);
        self.run.meter.failed(&failed.error_type);
        self.run.meter.buried(&failed.error_type);
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
                    self.is_away(doing, &error, failures);
                    if !self.run.backoff.wait(failures, &self.over).await {
                        return None;
                    }
                }
            }
        }
    }

    fn is_away(&self, doing: &str, error: &Error, failures: u32) {
        tracing::warn!(consumer = %self.run.spec.name, failures, error_type = error.kind().as_str(), %error,
            causes = ?error.causes(), remedy = error.remedy(), "cannot {doing}, trying again");
    }

    fn told(&self, event: &Event, attempts: u32, failed: &Failed) {
        self.run.meter.failed(&failed.error_type);
        tracing::warn!(consumer = %self.run.spec.name, event = %event.id(), r#type = event.kind(), attempts,
            error_type = %failed.error_type, error = %failed.error, causes = ?failed.causes,
            "the effect was rolled back and is tried again later");
    }
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
