//! Faults at our own traits: reject, fail after the write, hold, slow.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use postrider::broker::{Batching, Broker, Delivery, Subscription};
use postrider::doctor::Finding;
use postrider::error::{Error, Kind, Result};
use postrider::event::Event;
use postrider::handler::ConsumerSpec;
use postrider::inbox::{Admission, Held, Inbox, Retries};
use postrider::lease::Lease;

/// An inbox whose first commits fail: everything is rolled back and the caller gets an error.
pub struct FailingCommits<I> {
    inner: Arc<I>,
    left: AtomicU32,
}

impl<I> FailingCommits<I> {
    /// Fails `times` commits.
    pub fn new(inner: Arc<I>, times: u32) -> Self {
        Self { inner, left: AtomicU32::new(times) }
    }
}

#[async_trait]
impl<I: Inbox> Inbox for FailingCommits<I> {
    type Tx = I::Tx;

    async fn begin(&self) -> Result<I::Tx> {
        self.inner.begin().await
    }
    async fn admit(&self, tx: &mut I::Tx, consumer: &str, event: &Event) -> Result<Admission> {
        self.inner.admit(tx, consumer, event).await
    }
    async fn admit_held(&self, tx: &mut I::Tx, held: &Held) -> Result<Admission> {
        self.inner.admit_held(tx, held).await
    }
    async fn has_applied(&self, held: &Held) -> Result<bool> {
        self.inner.has_applied(held).await
    }
    async fn look(&self, consumer: &str, event: &Event) -> Result<Admission> {
        self.inner.look(consumer, event).await
    }
    async fn skip(&self, tx: &mut I::Tx, consumer: &str, event: &Event) -> Result<()> {
        self.inner.skip(tx, consumer, event).await
    }
    async fn commit(&self, tx: I::Tx) -> Result<()> {
        if self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            self.inner.rollback(tx).await?;
            return Err(Error::new(Kind::Unavailable, "the commit was lost"));
        }
        self.inner.commit(tx).await
    }
    async fn rollback(&self, tx: I::Tx) -> Result<()> {
        self.inner.rollback(tx).await
    }
    fn retries(&self) -> &dyn Retries {
        self.inner.retries()
    }
}

/// A broker whose first subscriptions end with an error after one message.
pub struct EndingSubscriptions {
    inner: Arc<dyn Broker>,
    left: AtomicU32,
}

impl EndingSubscriptions {
    /// Ends `times` subscriptions.
    pub fn new(inner: Arc<dyn Broker>, times: u32) -> Self {
        Self { inner, left: AtomicU32::new(times) }
    }
}

struct EndingSubscription {
    inner: Box<dyn Subscription>,
    delivered: u32,
}

#[async_trait]
impl Subscription for EndingSubscription {
    async fn next(&mut self) -> Result<Delivery> {
        if self.delivered == 1 {
            return Err(Error::new(Kind::Unavailable, "the connection was lost"));
        }
        let delivery = self.inner.next().await?;
        self.delivered += 1;
        Ok(delivery)
    }
    async fn ack(&mut self, tag: u64) -> Result<()> {
        self.inner.ack(tag).await
    }
}

#[async_trait]
impl Broker for EndingSubscriptions {
    fn batching(&self) -> Batching {
        self.inner.batching()
    }
    fn check(&self, event: &Event) -> Result<()> {
        self.inner.check(event)
    }
    async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<()>> {
        self.inner.publish(batch).await
    }
    fn blocked(&self) -> Option<String> {
        self.inner.blocked()
    }
    async fn subscribe(&self, consumer: &ConsumerSpec, lease: &Lease) -> Result<Box<dyn Subscription>> {
        let inner = self.inner.subscribe(consumer, lease).await?;
        match self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) {
            Ok(_) => Ok(Box::new(EndingSubscription { inner, delivered: 0 })),
            Err(_) => Ok(inner),
        }
    }
    async fn inspect(&self) -> Result<Vec<Finding>> {
        self.inner.inspect().await
    }
}

/// What a scripted broker does with an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Takes it.
    Confirm,
    /// Refuses it for its own sake.
    Refuse(Kind),
    /// Cannot be reached; the event did not arrive.
    Down,
    /// Takes it, but the confirmation is lost.
    DownAfterWrite,
}

/// What to answer to an event at its n-th attempt.
type Script = Box<dyn Fn(&Event, u32) -> Answer + Send + Sync>;

/// A broker in memory that answers as it is told, and remembers what arrived, in order.
pub struct ScriptedBroker {
    batching: Batching,
    answer: Script,
    arrived: Mutex<Vec<Event>>,
    attempts: Mutex<std::collections::HashMap<uuid::Uuid, u32>>,
    calls: AtomicU32,
    blocked: AtomicBool,
}

impl ScriptedBroker {
    /// `answer` is asked for every event with the number of the attempt, from 1.
    pub fn new(answer: impl Fn(&Event, u32) -> Answer + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            batching: Batching::Independent,
            answer: Box::new(answer),
            arrived: Mutex::default(),
            attempts: Mutex::default(),
            calls: AtomicU32::new(0),
            blocked: AtomicBool::new(false),
        })
    }

    /// Everything that arrived, in order, duplicates included.
    pub fn arrived(&self) -> Vec<Event> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many publish calls there were.
    pub fn calls(&self) -> u32 {
        self.calls.load(Ordering::SeqCst)
    }

    /// Asks publishers to stop, or not any more.
    pub fn set_blocked(&self, is_blocked: bool) {
        self.blocked.store(is_blocked, Ordering::SeqCst);
    }
}

#[async_trait]
impl Broker for ScriptedBroker {
    fn batching(&self) -> Batching {
        self.batching
    }

    fn check(&self, event: &Event) -> Result<()> {
        event.validate()
    }

    async fn publish(&self, batch: &[Arc<Event>]) -> Vec<Result<()>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let mut results = Vec::with_capacity(batch.len());
        for event in batch {
            // So that batches overlap.
            tokio::task::yield_now().await;
            let attempt = {
                let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
                let attempt = attempts.entry(event.id()).or_default();
                *attempt += 1;
                *attempt
            };
            let answer = (self.answer)(event, attempt);
            if matches!(answer, Answer::Confirm | Answer::DownAfterWrite) {
                self.arrived.lock().unwrap_or_else(PoisonError::into_inner).push(event.as_ref().clone());
            }
            results.push(match answer {
                Answer::Confirm => Ok(()),
                Answer::Refuse(kind) => Err(Error::new(kind, "refused by script")),
                Answer::Down | Answer::DownAfterWrite => Err(Error::new(Kind::Unavailable, "down by script")),
            });
        }
        results
    }

    fn blocked(&self) -> Option<String> {
        self.blocked.load(Ordering::SeqCst).then(|| "blocked by script".to_owned())
    }

    async fn subscribe(&self, _consumer: &ConsumerSpec, _lease: &Lease) -> Result<Box<dyn Subscription>> {
        Err(Error::new(Kind::Other, "a scripted broker has no consumers"))
    }

    async fn inspect(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }
}
