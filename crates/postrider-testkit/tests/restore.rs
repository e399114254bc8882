//! The runbook's restore: dump, more events, restore into another server; the relay stops and explains, the commands of the
//! runbook bring the consumer right, and the checker agrees.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::broker::embedded::Embedded;
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::lease::{LeaseTimes, Leases};
use postrider::outbox::OutboxStore as _;
use postrider::pulse::Pulses as _;
use postrider::recovery::Witness;
use postrider::store::Store as _;
use postrider::store::postgres::PostgresStore;
use postrider::{Event, Relay, RelaySettings, Route};
use postrider_testkit::checker::{Committed, Effect, History};
use postrider_testkit::conformance::bed::{Bed, PostgresBed, Tx};
use postrider_testkit::testbed::Postgres;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const KEYS: i64 = 5;

/// Writes down what it got.
struct Book;

#[async_trait]
impl Handler<Tx<PostgresBed>> for Book {
    async fn handle(&self, tx: &mut Tx<PostgresBed>, event: &Event) -> Result<(), HandlerError> {
        let version: i64 = event.decode()?;
        let line = format!("{} {} {version}", event.id(), event.key().unwrap_or_default());
        PostgresBed::write_effect(tx, "book", &line).await
    }
}

struct Running {
    stop: CancellationToken,
    task: JoinHandle<postrider::Result<()>>,
}

impl Running {
    fn start(work: impl FnOnce(CancellationToken) -> JoinHandle<postrider::Result<()>>) -> Self {
        let stop = CancellationToken::new();
        Self { task: work(stop.clone()), stop }
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.expect("no panic").expect("stops well");
    }
}

/// One event of each key, with its version.
async fn produce(store: &PostgresStore, versions: std::ops::Range<i64>) -> Vec<Event> {
    let mut events = Vec::new();
    for version in versions {
        for key in 0..KEYS {
            let builder = Event::builder("book.changed", "changed").key(format!("k{key}"));
            events.push(builder.json(&version).expect("a number is JSON").build().expect("valid"));
        }
    }
    store.enqueue(&events).await.expect("enqueued");
    events
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while !is_so().await {
        assert!(tokio::time::Instant::now() < deadline, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The relay of the shop: from its database to a log in the book's.
fn relay(shop: &PostgresStore, book: &PostgresStore, witness: &Witness) -> (postrider::relay::Gate, Running) {
    let settings = RelaySettings { lease: LeaseTimes { ttl: Duration::from_secs(2) }, ..RelaySettings::default() };
    let leases: Arc<dyn Leases> = Arc::new(shop.clone());
    let broker = Arc::new(Embedded::new(Arc::new(book.clone())));
    let relay = Relay::new("default", shop.source(&Route::all("default"), 1), leases, broker, settings);
    let relay = relay.witness(witness.clone());
    (relay.gate(), Running::start(|stop| tokio::spawn(relay.run(stop))))
}

fn postrider(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_crash")).with_file_name("postrider");
    let output =
        Command::new(program).args(args).current_dir(folder).output().expect("`make test` builds postrider first");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    println!("$ postrider {}\n{}{}", args.join(" "), text(&output.stdout), text(&output.stderr));
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

fn client(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().expect("PostgreSQL's clients are installed");
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

async fn history(bed: &PostgresBed, committed: &[Event]) -> History {
    let committed = committed.iter().map(|event| Committed {
        id: event.id(),
        key: event.key().unwrap_or_default().to_owned(),
        version: event.decode().expect("a number"),
    });
    let effects = bed.effects("book").await.into_iter().map(|line| {
        let parts: Vec<&str> = line.split(' ').collect();
        Effect {
            consumer: "book".to_owned(),
            id: parts[0].parse().expect("an id"),
            key: parts[1].to_owned(),
            version: parts[2].parse().expect("a version"),
            previous: None,
        }
    });
    History {
        consumers: vec!["book".to_owned()],
        committed: committed.collect(),
        effects: effects.collect(),
        ..History::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_database_is_noticed_and_its_consumer_made_right() {
    let (shop, book) = (PostgresBed::new().await, PostgresBed::new().await);
    // The new server counts from its own beginning; positions of the old one are far ahead of it.
    sqlx::raw_sql("DO $$ BEGIN FOR n IN 1..3000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")
        .execute(shop.store().pool())
        .await
        .expect("numbers are drawn");
    let store = Arc::new(book.store().clone());
    let embedded = Arc::new(Embedded::new(store.clone()));
    let consumer =
        Consumer::new(ConsumerSpec::new("book", &["#"]), embedded, store.clone(), store, Book).expect("valid");
    let consumer = Running::start(|stop| tokio::spawn(consumer.run(stop)));

    // Published, then committed and not published, then the dump, then published and lost.
    let witness = Witness::default();
    let (_, running) = relay(shop.store(), book.store(), &witness);
    let mut kept = produce(shop.store(), 1..5).await;
    until("applying", async || book.effects("book").await.len() == kept.len()).await;
    running.end().await;
    kept.extend(produce(shop.store(), 5..6).await);
    let folder = tempfile::tempdir().expect("a folder");
    let dump = folder.path().join("shop.sql");
    let dump = dump.to_str().expect("a path");
    client("pg_dump", &["--no-owner", "--file", dump, &shop.url]);
    let (_, running) = relay(shop.store(), book.store(), &witness);
    let lost = produce(shop.store(), 6..9).await;
    until("applying", async || book.effects("book").await.len() == kept.len() + lost.len()).await;
    running.end().await;
    let mark = witness.mark().expect("it remembers");
    assert_eq!(mark.event_id, lost.last().expect("some").id());

    // The disaster: another server, and the dump.
    let server = Postgres::fast().await.expect("another server");
    let url = server.database("shop").await.expect("a fresh database");
    client("psql", &["--quiet", "--set", "ON_ERROR_STOP=1", "--output", "/dev/null", "--file", dump, &url]);
    let restored = PostgresStore::connect(&url).await.expect("it answers");
    let before = book.effects("book").await.len();
    // Producers may go on; they know nothing of what was lost, and draw the same numbers.
    let last = kept.len();
    kept.extend(produce(&restored, 6..7).await);
    let (gate, running) = relay(&restored, book.store(), &witness);
    until("standing still", async || gate.closed_because().is_some()).await;
    let why = gate.closed_because().expect("a reason");
    println!("{why}");
    assert!(why.contains("the database was restored") && why.contains(&format!("up to number {}", mark.id)), "{why}");
    assert!(why.contains(&format!("after number {last} ")), "{why}");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(book.effects("book").await.len(), before, "nothing is published");
    // Only this relay remembers; `recover` hears of it through the store.
    let tells = async || restored.instances().await.expect("read").iter().any(|one| one.breaker.is_some());
    until("telling the store", tells).await;

    // The runbook.
    let config = |name: &str, url: &str| {
        let text = format!("[store]\nurl = {}\n[relay]\nwitness = \"shop.witness\"\n", json!(url));
        std::fs::write(folder.path().join(name), text).expect("written");
    };
    config("shop.toml", &url);
    config("book.toml", &book.url);
    let (code, said, _) = postrider(folder.path(), &["--config", "shop.toml", "outbox", "recover"]);
    assert_eq!(code, 1, "nothing is changed without --yes");
    assert!(said.contains("the database was restored"), "{said}");
    let (code, said, _) = postrider(folder.path(), &["--config", "shop.toml", "outbox", "recover", "--yes", "--json"]);
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((code, &said["begun"]["life"]), (0, &json!(1)), "{said}");
    assert_eq!(said["begun"]["moved"], json!(2 * KEYS), "those that waited in the dump, and those since");
    // The relay goes on by itself: the new events come, those that were published before are known to the inbox.
    until("going on", async || book.effects("book").await.len() == before + KEYS as usize).await;
    until("telling", async || gate.closed_because().is_none()).await;
    running.end().await;

    // The book has applied events that the shop does not know any more: made anew from what the shop has.
    sqlx::raw_sql("TRUNCATE effect").execute(book.store().pool()).await.expect("emptied");
    let range = ["--from", "2000-01-01T00:00:00Z", "--to", "2100-01-01T00:00:00Z"];
    let mut args = vec!["--config", "shop.toml", "outbox", "republish", "--consumer", "book", "--into", "book.toml"];
    args.extend(range);
    args.extend(["--rate", "10000", "--again", "--yes", "--json"]);
    let (code, _, complaint) = postrider(folder.path(), &args);
    assert!(code != 0 && complaint.contains("--topic"), "its code has the topics, the config does not: {complaint}");
    args.extend(["--topic", "#"]);
    let (code, said, _) = postrider(folder.path(), &args);
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((code, &said["applied"], &said["failed"]), (0, &json!(kept.len()), &json!(0)), "{said}");
    let (_, running) = relay(&restored, book.store(), &witness);
    kept.extend(produce(&restored, 7..9).await);
    until("applying", async || book.effects("book").await.len() >= kept.len()).await;
    running.end().await;
    consumer.end().await;
    let now = witness.mark().expect("it remembers");
    assert!((now.life, now.id > mark.id) == (1, true), "numbers are not drawn again: {now:?} after {mark:?}");
    let report = history(&book, &kept).await.check();
    println!("{report}");
    assert!(report.is_clean(), "{report}");
}
