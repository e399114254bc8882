//! `postrider dead` beside a consumer that runs.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::handler::HandlerError;
use postrider::store::sqlite::SqliteStore;
use postrider::{Consumer, ConsumerSpec, Event, Handler};
use serde_json::Value;
use sqlx::{Sqlite, Transaction};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::harness::{Place, SOON, finish};

pub const EVENTS: usize = 60;

/// Writes one row for each event, while it is not broken.
struct Book {
    is_broken: Arc<AtomicBool>,
}

#[async_trait]
impl Handler<Transaction<'static, Sqlite>> for Book {
    async fn handle(&self, tx: &mut Transaction<'static, Sqlite>, event: &Event) -> Result<(), HandlerError> {
        if self.is_broken.load(Ordering::SeqCst) {
            return Err(HandlerError::retry("the book is closed"));
        }
        sqlx::query("INSERT INTO effect (event) VALUES (?)").bind(event.id().to_string()).execute(&mut **tx).await?;
        Ok(())
    }
}

/// A consumer in this process, and what it needs.
pub struct Bed {
    pub place: Place,
    store: SqliteStore,
    pub is_broken: Arc<AtomicBool>,
    stop: CancellationToken,
    consumer: Mutex<Option<JoinHandle<postrider::Result<()>>>>,
}

impl Bed {
    pub async fn new() -> Self {
        let place = Place::migrated();
        let store = SqliteStore::open(&place.path("postrider.db")).await.unwrap();
        sqlx::query("CREATE TABLE effect (event TEXT)").execute(store.writer()).await.unwrap();
        let broker = Arc::new(Embedded::new(Arc::new(store.clone())));
        let batch: Vec<Arc<Event>> = (0..EVENTS)
            .map(|n| {
                let builder = Event::builder("orders.paid", "order.paid").key(format!("o-{}", n % 7));
                Arc::new(builder.payload("application/json", format!(r#"{{"secret":{n}}}"#)).build().unwrap())
            })
            .collect();
        assert!(broker.publish(&batch).await.iter().all(Result::is_ok));
        let (is_broken, stop) = (Arc::new(AtomicBool::new(true)), CancellationToken::new());
        let spec = ConsumerSpec { retries: 0, ..ConsumerSpec::new("billing", &["#"]) };
        let handler = Book { is_broken: is_broken.clone() };
        let consumer = Consumer::new(spec, broker, Arc::new(store.clone()), Arc::new(store.clone()), handler).unwrap();
        let consumer = Mutex::new(Some(tokio::spawn(consumer.run(stop.clone()))));
        let bed = Self { place, store, is_broken, stop, consumer };
        bed.wait_for_dead(EVENTS).await;
        bed
    }

    pub async fn wait_for_dead(&self, count: usize) {
        let deadline = tokio::time::Instant::now() + SOON;
        while self.count("dead_letter WHERE state = 'dead'").await != count {
            assert!(tokio::time::Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub async fn count(&self, of: &str) -> usize {
        let query = sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {of}"));
        sqlx::query_scalar::<_, i64>(query).fetch_one(self.store.reader()).await.unwrap() as usize
    }

    /// Ends the consumer.
    pub async fn stop(&self) {
        self.stop.cancel();
        let consumer = self.consumer.lock().unwrap().take().unwrap();
        consumer.await.unwrap().unwrap();
    }

    /// Runs a command while the consumer goes on.
    async fn run(&self, args: &'static [&'static str]) -> crate::harness::Ran {
        let mut command = self.place.command(args);
        tokio::task::spawn_blocking(move || finish(&mut command, None)).await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_seen_without_their_payload() {
    let bed = Bed::new().await;
    let listed = bed.run(&["dead", "list", "--consumer", "billing", "--json"]).await.json();
    assert_eq!(listed.as_array().unwrap().len(), EVENTS);
    assert_eq!(listed[0]["error"], "the book is closed");
    assert_eq!(bed.run(&["dead", "list", "--key", "o-1", "--json"]).await.json().as_array().unwrap().len(), 9);
    assert_eq!(bed.run(&["dead", "list", "--consumer", "'; --", "--json"]).await.json(), Value::Array(vec![]));

    let shown = bed.run(&["dead", "show", "1"]).await.ok();
    assert!(shown.contains("the book is closed") && !shown.contains("secret"), "{shown}");
    let shown = bed.run(&["dead", "show", "1", "--payload", "--json"]).await.json();
    assert!(shown["payload"].as_str().unwrap().starts_with(r#"{"secret":"#), "{shown}");
    assert_eq!(bed.count("audit WHERE action = 'payload'").await, 1);
    assert_eq!(shown["stage"], "consumer");
    assert_eq!(shown["history"].as_array().unwrap().len(), 1);
    assert_eq!(shown["origin"]["queue"], "billing");

    bed.run(&["dead", "discard", "1", "--reason", " ", "--yes"]).await.fails(1, &["reason"]);
    bed.run(&["dead", "discard", "1", "--reason", "a test"]).await.fails(1, &["--yes"]);
    assert_eq!(
        bed.run(&["dead", "discard", "1", "--reason", "a test", "--yes", "--json"]).await.json()["discarded"],
        1
    );
    let stats = bed.run(&["dead", "stats", "--json"]).await.json();
    assert_eq!((&stats[0]["state"], &stats[0]["count"]), (&"dead".into(), &(EVENTS - 1).into()));
    assert_eq!(bed.count("audit WHERE action = 'discard'").await, 1);
    bed.stop.cancel();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_stops_is_cancelled_and_goes_on() {
    let bed = Bed::new().await;
    bed.run(&["dead", "replay"]).await.fails(1, &["no dead letter is named", "--all"]);
    let dry = bed.run(&["dead", "replay", "--all", "--dry-run", "--json"]).await.json();
    assert_eq!(dry.as_array().unwrap().len(), EVENTS);
    // Still broken: the first stage fails, and the other events are left alone.
    bed.run(&["dead", "replay", "--all"]).await.fails(1, &["failed again"]);
    assert_eq!(bed.count("audit WHERE action = 'replay'").await, 1);
    bed.wait_for_dead(EVENTS).await;

    bed.is_broken.store(false, Ordering::SeqCst);
    let mut command = bed.place.command(&["dead", "replay", "--all", "--rate", "10", "--json"]);
    let replay = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while bed.count("effect").await < 5 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let sent = Command::new("kill").args(["-INT", &replay.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = tokio::task::spawn_blocking(move || replay.wait_with_output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let cancelled: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(cancelled["stopped"], "cancelled", "{cancelled}");
    assert!(bed.count("dead_letter").await > 0, "cancelled half-way");

    bed.run(&["dead", "replay", "--all", "--rate", "1000"]).await.ok();
    assert_eq!(bed.count("dead_letter").await, 0);
    assert_eq!((bed.count("effect").await, bed.count("(SELECT DISTINCT event FROM effect)").await), (EVENTS, EVENTS));
    bed.stop.cancel();
}
