//! Bad input on the whole way, PostgreSQL to RabbitMQ: one clear message that names the thing and the remedy, nothing
//! is lost, other events flow on.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::sync::Arc;
use std::time::Duration;

use postrider::Route;
use postrider::broker::Broker;
use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
use postrider::event::Event;
use postrider::handler::ConsumerSpec;
use postrider::lease::{Lease, Leases};
use postrider::migrate::Migrate;
use postrider::outbox::{Outbox, OutboxStore};
use postrider::relay::{Backoff, Relay, RelaySettings};
use postrider::store::Store;
use postrider::store::postgres::PostgresStore;
use postrider::upkeep::Upkeep;
use postrider::{Error, Kind};
use postrider_testkit::conformance::bed::{Bed, PostgresBed, event, name};
use postrider_testkit::testbed;
use tokio_util::sync::CancellationToken;

fn lease(consumer: &str) -> Lease {
    Lease { group: format!("consumer/{consumer}"), slot: 0, owner: "test".to_owned(), epoch: 1 }
}

async fn vhost() -> String {
    testbed::rabbitmq().await.vhost(&testbed::unique("bad")).await.expect("a fresh virtual host")
}

/// A relay that runs until it is dropped.
struct Running {
    stop: CancellationToken,
    task: Option<tokio::task::JoinHandle<postrider::Result<()>>>,
}

impl Running {
    fn start(store: &PostgresStore, broker: Arc<dyn Broker>) -> Self {
        let backoff =
            Backoff { base: Duration::from_millis(100), max: Duration::from_millis(500), jitter: Duration::ZERO };
        let settings = RelaySettings { backoff, ..RelaySettings::default() };
        let leases: Arc<dyn Leases> = Arc::new(store.clone());
        let relay = Relay::new("default", store.source(&Route::all("default"), 1), leases, broker, settings);
        let stop = CancellationToken::new();
        Self { task: Some(tokio::spawn(relay.run(stop.clone()))), stop }
    }

    async fn stop(mut self) {
        self.stop.cancel();
        if let Some(task) = self.task.take() {
            task.await.expect("no panic").expect("stops well");
        }
    }
}

async fn failure(store: &PostgresStore, id: uuid::Uuid) -> Option<(String, String)> {
    sqlx::query_as("SELECT status, coalesce(last_error, '') FROM postrider.outbox_status WHERE event_id = $1")
        .bind(id)
        .fetch_optional(store.pool())
        .await
        .expect("the view answers")
}

async fn until_status(store: &PostgresStore, id: uuid::Uuid, status: &str) -> String {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let found = failure(store, id).await;
        if let Some((found, error)) = &found
            && found == status
        {
            return error.clone();
        }
        assert!(tokio::time::Instant::now() < deadline, "event {id} is {found:?}, not {status}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn topic(topic: &str, key: &str, text: &str) -> Event {
    Event::builder(topic, "t").key(key).json(text).expect("JSON").build().expect("valid")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_sent_is_set_aside_and_everything_else_flows() {
    let bed = PostgresBed::new().await;
    let store = bed.store();
    let settings = RabbitMqSettings { payload_bytes_max: 1_000, ..RabbitMqSettings::new(vhost().await) };
    let broker = Arc::new(RabbitMq::new(settings).expect("valid settings"));
    let spec = ConsumerSpec::new("orders", &["orders.*"]);
    let mut orders = broker.subscribe(&spec, &lease("orders")).await.expect("subscribes");
    let relay = Running::start(store, broker.clone());

    let large = topic("orders.created", "large", &"x".repeat(2_000));
    let lonely = topic("nobody.listens", "lonely", "lonely");
    store.enqueue(&[large.clone(), lonely.clone()]).await.expect("enqueued");
    let bad_header: uuid::Uuid = sqlx::query_scalar(
        "INSERT INTO postrider.outbox (topic, key, type, payload, headers) \
         VALUES ('orders.created', 'header', 't', '{}', '{\"x-count\": 7}') RETURNING event_id",
    )
    .fetch_one(store.pool())
    .await
    .expect("a plain insert takes any object");
    store.enqueue(&[topic("orders.created", "fine", "fine")]).await.expect("enqueued");

    let delivery = orders.next().await.expect("the good event flows");
    assert_eq!(name(&delivery.event.expect("an event")), "fine");

    let error = until_status(store, large.id(), "failed").await;
    assert!(error.contains("1000") && error.contains("smaller payload"), "limit and remedy: {error}");
    let error = until_status(store, bad_header, "failed").await;
    assert!(error.contains("x-count"), "names the header: {error}");
    let error = until_status(store, lonely.id(), "retrying").await;
    assert!(error.contains("nobody.listens") && error.contains("postrider"), "names topic and exchange: {error}");
    assert!(error.contains("binding"), "says what to do: {error}");

    // The remedy works: with a queue the event goes out by itself.
    let late = ConsumerSpec::new("late", &["nobody.*"]);
    let mut late = broker.subscribe(&late, &lease("late")).await.expect("subscribes");
    let delivery = tokio::time::timeout(Duration::from_secs(20), late.next()).await.expect("in time").expect("lives");
    assert_eq!(name(&delivery.event.expect("an event")), "lonely");
    until_status(store, lonely.id(), "published").await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_exchange_stops_nothing_but_its_destination() {
    let bed = PostgresBed::new().await;
    let url = vhost().await;
    let settings =
        RabbitMqSettings { declare: false, exchange: "absent".to_owned(), ..RabbitMqSettings::new(url.clone()) };
    let broker = Arc::new(RabbitMq::new(settings).expect("valid settings"));
    let results = broker.publish(&[Arc::new(event("k", "a"))]).await;
    let error = results[0].as_ref().expect_err("there is no exchange");
    assert_eq!(error.kind(), Kind::Missing);
    assert!(error.to_string().contains("absent"), "names the exchange: {error}");
    assert!(!error.kind().belongs_to_event(), "it costs the event no attempt");

    // Once it is there everything flows, without a restart.
    let declaring = RabbitMqSettings { exchange: "absent".to_owned(), ..RabbitMqSettings::new(url) };
    let declaring = RabbitMq::new(declaring).expect("valid settings");
    let _queue = declaring.subscribe(&ConsumerSpec::new("c", &["#"]), &lease("c")).await.expect("subscribes");
    let relay = Running::start(bed.store(), broker);
    let event = event("k", "b");
    bed.store().enqueue(std::slice::from_ref(&event)).await.expect("enqueued");
    until_status(bed.store(), event.id(), "published").await;
    relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_said_without_the_password() {
    let url = vhost().await.replacen("guest:guest", "guest:wrong-secret", 1);
    let broker = RabbitMq::new(RabbitMqSettings::new(url)).expect("valid settings");
    let results = broker.publish(&[Arc::new(event("k", "a"))]).await;
    let error = results[0].as_ref().expect_err("the broker refuses us");
    assert_eq!(error.kind(), Kind::Denied, "{error}");
    assert!(!format!("{error} {error:?} {:?}", error.causes()).contains("wrong-secret"), "the password leaks");
}

fn refused(result: postrider::Result<PostgresStore>) -> Error {
    result.err().expect("PostgreSQL refuses us")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_database_or_address_is_named() {
    let bed = PostgresBed::bare().await;
    let missing = format!("{}_missing", bed.url);
    let error = refused(PostgresStore::connect(&missing).await);
    assert_eq!(error.kind(), Kind::Missing, "{error}");
    assert!(error.to_string().contains("_missing"), "{error}");
    let error = refused(PostgresStore::connect("postgres://postgres@127.0.0.1:1/none").await);
    assert_eq!(error.kind(), Kind::Unavailable, "{error}");
    let error = refused(PostgresStore::connect("postgres//oops").await);
    assert_eq!(error.kind(), Kind::Config, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_does_not_fit_is_refused() {
    let bed = PostgresBed::bare().await;
    let store = bed.store();
    let error = store.schema().await.expect("answers").require().expect_err("nothing is migrated");
    assert_eq!(error.kind(), Kind::NotMigrated);
    assert!(error.remedy().contains("postrider migrate"));
    let error = store.enqueue(&[event("k", "a")]).await.expect_err("no table");
    assert_eq!(error.kind(), Kind::NotMigrated, "{error}");

    let all = postrider::store::postgres::SCHEMA.migrations.len();
    assert_eq!(store.migrate().await.expect("migrates").len(), all);
    assert!(store.migrate().await.expect("migrates again").is_empty(), "idempotent");
    store.schema().await.expect("answers").require().expect("fits");

    sqlx::query("INSERT INTO postrider.migration (version, name) VALUES (99, 'from the future')")
        .execute(store.pool())
        .await
        .expect("inserted");
    assert_eq!(store.migrate().await.expect_err("refused").kind(), Kind::SchemaNewer);
    assert_eq!(store.schema().await.expect("answers").require().expect_err("refused").kind(), Kind::SchemaNewer);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_database_is_named() {
    let bed = PostgresBed::new().await;
    let name = bed.url.rsplit('/').next().expect("a name").to_owned();
    let sql = format!("ALTER DATABASE {name} SET default_transaction_read_only = on");
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(bed.store().pool()).await.expect("altered");
    let store = PostgresStore::connect(&bed.url).await.expect("connects");
    let error = store.enqueue(&[event("k", "a")]).await.expect_err("read-only");
    assert_eq!(error.kind(), Kind::ReadOnly, "{error}");
    assert!(
        store
            .inspect()
            .await
            .expect("answers")
            .iter()
            .any(|finding| finding.check == "postgres.writable"
                && finding.severity == postrider::doctor::Severity::Error)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_event_never_enters_the_outbox() {
    let bed = PostgresBed::new().await;
    let invalid = [
        ("topic is empty", Event::builder("", "t").json("x").expect("JSON").build()),
        ("topic has 300 bytes", Event::builder("t".repeat(300), "t").json("x").expect("JSON").build()),
        ("type is empty", Event::builder("t", "").json("x").expect("JSON").build()),
        ("key has 256 bytes", Event::builder("t", "t").key("k".repeat(256)).json("x").expect("JSON").build()),
        ("not valid JSON", Event::builder("t", "t").payload("application/json", "{bad").build()),
        ("header name \"a b\"", Event::builder("t", "t").header("a b", "x").json("x").expect("JSON").build()),
        ("header \"h\"", Event::builder("t", "t").header("h", "a\u{0}b").json("x").expect("JSON").build()),
        ("control character", Event::builder("a\u{0}b", "t").json("x").expect("JSON").build()),
    ];
    for (what, result) in invalid {
        let error = result.expect_err(what);
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.to_string().contains(what), "{error} does not say {what}");
    }
    // The same rules hold for the caller's transaction, which stays usable.
    let mut tx = bed.store().pool().begin().await.expect("begins");
    let good = event("k", "good");
    Outbox::new().append(&mut tx, &good).await.expect("appended");
    tx.commit().await.expect("commits");
    assert_eq!(bed.store().backlog(&Route::all("default")).await.expect("answers").pending, 1);
}

/// sqlx 0.9.0 hands the connection of a cancelled `begin()` back with an open transaction; the next user would write
/// into it without a commit. Nothing of ours is ever cancelled there; this shows that nothing is lost even when the
/// application does it on the same pool.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_begins_of_the_application_lose_no_event() {
    let bed = PostgresBed::new().await;
    let store = bed.store();
    for round in 0..2_000u64 {
        let begin = store.pool().begin();
        let _ = tokio::time::timeout(Duration::from_micros(round % 400), begin).await;
    }
    for n in 0..50 {
        store.enqueue(&[event("k", &format!("{n:02}"))]).await.expect("enqueued");
    }
    let seen: i64 = sqlx::query_scalar("SELECT count(*) FROM postrider.outbox")
        .fetch_one(PostgresStore::connect(&bed.url).await.expect("connects").pool())
        .await
        .expect("answers");
    assert_eq!(seen, 50, "an enqueue that succeeded is not visible to others");
}
