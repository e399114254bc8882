//! A relay and a consumer on SQLite, with a claim check between them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use postrider::Route;
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::claim::{ClaimCheck, Claims, Hash, Object, Objects};
use postrider::dead::{DeadDetail, DeadFilter, DeadLetters};
use postrider::event::Event;
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::outbox::OutboxStore;
use postrider::relay::{Backoff, BreakerSettings, Relay, RelaySettings};
use postrider::store::Store;
use postrider::upkeep::{Backlog, Upkeep};
use postrider_testkit::conformance::bed::{Bed, SqliteBed, Tx};
use tokio_util::sync::CancellationToken;

/// Everything that should happen soon happens within this, also on a busy machine.
pub const SOON: Duration = Duration::from_secs(30);
/// Payloads above this are claimed in these tests.
pub const ABOVE: usize = 1_000;

/// What the handler was given, and how often it still fails.
#[derive(Default)]
pub struct Seen {
    pub events: Mutex<Vec<Event>>,
    pub failures_left: AtomicU32,
}

#[derive(Clone)]
struct Keep(Arc<Seen>);

#[async_trait]
impl Handler<Tx<SqliteBed>> for Keep {
    async fn handle(&self, tx: &mut Tx<SqliteBed>, event: &Event) -> Result<(), HandlerError> {
        SqliteBed::write_effect(tx, "c", &event.id().to_string()).await?;
        let left = &self.0.failures_left;
        if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err(HandlerError::retry("not yet"));
        }
        self.0.events.lock().expect("no panic").push(event.clone());
        Ok(())
    }
}

/// A storage whose calls are counted, failed ones too.
struct Counted {
    objects: Arc<dyn Objects>,
    calls: Arc<AtomicU32>,
}

#[async_trait]
impl Objects for Counted {
    async fn put(&self, path: &str, content: Bytes, hash: &Hash) -> postrider::Result<()> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.objects.put(path, content, hash).await
    }

    async fn get(&self, path: &str, bytes_max: usize) -> postrider::Result<Option<Bytes>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.objects.get(path, bytes_max).await
    }

    async fn delete(&self, path: &str) -> postrider::Result<()> {
        self.objects.delete(path).await
    }

    async fn list(&self, under: &str, after: &str, limit: usize) -> postrider::Result<Vec<Object>> {
        self.objects.list(under, after, limit).await
    }

    fn place(&self) -> String {
        self.objects.place()
    }
}

pub struct ClaimBed {
    pub bed: SqliteBed,
    calls: Arc<AtomicU32>,
    pub claims: Arc<Claims>,
    pub seen: Arc<Seen>,
}

/// What runs, until it is stopped.
pub struct Crew {
    stop: CancellationToken,
    tasks: Vec<tokio::task::JoinHandle<postrider::Result<()>>>,
}

impl Crew {
    pub async fn stop(self) {
        self.stop.cancel();
        for task in self.tasks {
            task.await.expect("no panic").expect("stops well");
        }
    }
}

impl ClaimBed {
    pub async fn new(objects: Arc<dyn Objects>) -> Self {
        let calls = Arc::new(AtomicU32::new(0));
        let claims = Claims::new(Arc::new(Counted { objects, calls: calls.clone() }));
        let claims = Arc::new(claims.prefix("shop/orders").expect("a prefix"));
        Self { bed: SqliteBed::new().await, calls, claims, seen: Arc::default() }
    }

    /// The same storage, and everything else fresh.
    pub async fn again(&self) -> Self {
        let (calls, claims) = (self.calls.clone(), self.claims.clone());
        Self { bed: SqliteBed::new().await, calls, claims, seen: Arc::default() }
    }

    /// Waits until the storage was asked so many times more.
    pub async fn asked(&self, times: u32) {
        let from = self.calls.load(Ordering::SeqCst);
        soon("the storage is asked", async || self.calls.load(Ordering::SeqCst) >= from + times).await;
    }

    pub fn embedded(&self) -> Arc<dyn Broker> {
        Arc::new(Embedded::new(Arc::new(self.bed.store().clone())))
    }

    pub fn over(&self, broker: Arc<dyn Broker>) -> Arc<dyn Broker> {
        Arc::new(ClaimCheck::new(broker, self.claims.clone()).above_bytes(ABOVE))
    }

    /// A relay to the broker and a consumer of it.
    pub fn start(&self, broker: &Arc<dyn Broker>) -> Crew {
        let mut crew = self.relay(broker);
        crew.tasks.extend(self.consumer(broker, Some(self.claims.clone()), &crew.stop));
        crew
    }

    pub fn relay(&self, broker: &Arc<dyn Broker>) -> Crew {
        let stop = CancellationToken::new();
        let store = self.bed.store();
        let breaker = BreakerSettings { open: Duration::from_millis(200), ..BreakerSettings::default() };
        let settings = RelaySettings { breaker, attempts_max: 1, ..RelaySettings::default() };
        let relay = Relay::new(
            "default",
            store.source(&Route::all("default"), 1),
            Arc::new(store.clone()),
            broker.clone(),
            settings,
        );
        let tasks = vec![tokio::spawn(relay.run(stop.clone()))];
        Crew { stop, tasks }
    }

    /// A consumer alone, perhaps without the storage.
    pub fn consume(&self, broker: &Arc<dyn Broker>, claims: Option<Arc<Claims>>) -> Crew {
        let stop = CancellationToken::new();
        let tasks = self.consumer(broker, claims, &stop);
        Crew { stop, tasks }
    }

    fn consumer(
        &self,
        broker: &Arc<dyn Broker>,
        claims: Option<Arc<Claims>>,
        stop: &CancellationToken,
    ) -> Vec<tokio::task::JoinHandle<postrider::Result<()>>> {
        let wait = Duration::from_millis(20);
        let backoff = Backoff { base: wait, max: wait, jitter: Duration::ZERO };
        let spec = ConsumerSpec { backoff, ..ConsumerSpec::new("c", &["#"]) };
        let store = Arc::new(self.bed.store().clone());
        let handler = Keep(self.seen.clone());
        let mut consumer =
            Consumer::new(spec, broker.clone(), store.clone(), store, handler).expect("a valid consumer");
        if let Some(claims) = claims {
            consumer = consumer.claims(claims);
        }
        vec![tokio::spawn(consumer.backoff(backoff).run(stop.clone()))]
    }

    pub async fn send(&self, events: &[Event]) {
        self.bed.store().enqueue(events).await.expect("enqueued");
    }

    /// Waits until so many events were applied, and returns them.
    pub async fn applied(&self, count: usize) -> Vec<Event> {
        soon("events are applied", async || self.bed.effects("c").await.len() >= count).await;
        let ids = self.bed.effects("c").await;
        assert_eq!(ids.len(), count, "once each");
        let seen = self.seen.events.lock().expect("no panic").clone();
        ids.iter().map(|id| seen.iter().find(|event| event.id().to_string() == *id).expect("seen").clone()).collect()
    }

    /// Waits until there is a dead letter, and returns it.
    pub async fn dead(&self) -> DeadDetail {
        let (store, all) = (self.bed.store(), DeadFilter::default());
        soon("a dead letter", async || !store.dead_list(&all, 0, 10).await.expect("listed").is_empty()).await;
        let listed = store.dead_list(&all, 0, 10).await.expect("listed");
        assert_eq!(listed.len(), 1);
        store.dead_show(listed[0].id).await.expect("answers").expect("is there")
    }

    pub async fn no_dead_letters(&self) {
        let listed = self.bed.store().dead_list(&DeadFilter::default(), 0, 10).await.expect("listed");
        assert!(listed.is_empty(), "{listed:?}");
    }

    pub async fn replay(&self) {
        let replayed = self.bed.store().dead_replay(&DeadFilter::default(), 10, "a test").await.expect("replayed");
        assert_eq!(replayed.len(), 1);
    }

    /// The attempts and payload sizes of held messages.
    pub async fn held(&self) -> Vec<(i64, i64)> {
        sqlx::query_as("SELECT attempts, length(payload) FROM held ORDER BY id")
            .fetch_all(self.bed.store().reader())
            .await
            .expect("held messages are read")
    }

    pub async fn backlog(&self) -> Backlog {
        self.bed.store().backlog(&Route::all("default")).await.expect("the backlog is read")
    }
}

/// Waits for something at the edge.
pub async fn soon(what: &str, is_so: impl AsyncFn() -> bool) {
    let deadline = tokio::time::Instant::now() + SOON;
    while !is_so().await {
        assert!(tokio::time::Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// An event with a JSON payload of about so many bytes.
pub fn event(key: &str, bytes: usize) -> Event {
    let text = "postrider ".repeat(bytes / 10 + 1);
    let builder = Event::builder("test.created", "created").key(key).header("region", "eu").tenant("acme");
    builder.json(&serde_json::json!({ "text": text[..bytes] })).expect("JSON").build().expect("a valid event")
}
