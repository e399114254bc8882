//! What goes wrong on MariaDB: crashes, deadlocks, migrations that end half-way.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::event::Event;
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::inbox::{Admission, Inbox};
use postrider::lease::LeaseTimes;
use postrider::migrate::Migrate;
use postrider::newest::{Change, Newest, Stamp};
use postrider::outbox::{Outbox, OutboxStore};
use postrider::relay::{Backoff, Relay, RelaySettings};
use postrider::source::Settlement;
use postrider::store::Store;
use postrider::store::mysql::SCHEMA;
use postrider::upkeep::Upkeep;
use postrider::{Kind, Route};
use postrider_testkit::conformance::bed::{Bed, MysqlBed, event, name};
use postrider_testkit::faults::{Answer, ScriptedBroker};
use postrider_testkit::testbed::MariaDb;
use sqlx::{AssertSqlSafe, Connection, MySql, MySqlConnection, Transaction};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(60);

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(tokio::time::Instant::now() < deadline, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

mod own_servers {
    use super::*;

    /// Producers, a relay and a server that is killed twice and restarted: everything that was committed arrives, in order.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nothing_is_lost_or_reordered_when_the_server_dies() {
        const KEYS: u32 = 4;
        let mut server = MariaDb::start_private().await.expect("a server");
        let bed = MysqlBed::on(&server).await;
        bed.migrate().await;
        let broker = ScriptedBroker::new(|_, _| Answer::Confirm);
        let settings = RelaySettings {
            poll: Duration::from_millis(20),
            page: 16,
            batch: 4,
            lease: LeaseTimes { ttl: Duration::from_millis(900) },
            lanes: 2,
            ..RelaySettings::default()
        };
        let store = Arc::new(bed.store().clone());
        let relay =
            Relay::new("default", store.source(&Route::all("default"), 2), store.clone(), broker.clone(), settings);
        let stop = CancellationToken::new();
        let relay = tokio::spawn(relay.run(stop.clone()));

        let producing = CancellationToken::new();
        let producers: Vec<_> = (0..KEYS)
            .map(|key| {
                let (store, producing) = (store.clone(), producing.clone());
                tokio::spawn(async move {
                    let mut committed = Vec::new();
                    for n in 0.. {
                        if producing.is_cancelled() {
                            break;
                        }
                        let name = format!("{key}/{n:05}");
                        // While the server is away this fails; whether a commit that failed took place is not known.
                        match store.enqueue(&[event(&key.to_string(), &name)]).await {
                            Ok(()) => committed.push(name),
                            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                        }
                    }
                    committed
                })
            })
            .collect();
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_millis(700)).await;
            server.kill().await.expect("killed");
            tokio::time::sleep(Duration::from_millis(200)).await;
            server.restart().await.expect("restarted");
            // Life goes on before the next blow.
            let before = broker.arrived().len();
            until("publishing after the restart", async || broker.arrived().len() > before + 20).await;
        }
        producing.cancel();
        let mut committed = Vec::new();
        for producer in producers {
            committed.extend(producer.await.expect("no panic"));
        }
        until("draining", async || {
            let arrived: HashSet<String> = broker.arrived().iter().map(name).collect();
            committed.iter().all(|name| arrived.contains(name))
        })
        .await;
        until("settling", async || {
            store.backlog(&Route::all("default")).await.is_ok_and(|backlog| backlog.pending == 0)
        })
        .await;
        stop.cancel();
        relay.await.expect("no panic").expect("stops well");

        let mut seen = HashSet::new();
        let mut by_key: HashMap<String, Vec<String>> = HashMap::new();
        for event in broker.arrived() {
            if seen.insert(event.id()) {
                by_key.entry(event.key().unwrap_or_default().to_owned()).or_default().push(name(&event));
            }
        }
        assert_eq!(by_key.len(), KEYS as usize);
        for names in by_key.values() {
            assert!(names.is_sorted(), "overtaken within a key: {names:?}");
        }
        assert!(committed.len() > 50, "only {} events were committed", committed.len());
    }
}

/// Ends as the victim of a deadlock at its first attempt, does not care, and writes on.
struct Victim {
    attempts: Arc<AtomicU32>,
    has_locked: Arc<Notify>,
    rival_waits: Arc<Notify>,
}

#[async_trait]
impl Handler<Transaction<'static, MySql>> for Victim {
    async fn handle(&self, tx: &mut Transaction<'static, MySql>, event: &Event) -> Result<(), HandlerError> {
        if self.attempts.fetch_add(1, Ordering::SeqCst) == 0 {
            MysqlBed::write_effect(tx, "c", "before").await?;
            sqlx::raw_sql("UPDATE account SET n = n + 1 WHERE id = 1").execute(&mut **tx).await?;
            self.has_locked.notify_one();
            self.rival_waits.notified().await;
            let error = sqlx::raw_sql("UPDATE account SET n = n + 1 WHERE id = 2").execute(&mut **tx).await;
            assert!(error.expect_err("the victim").to_string().contains("1213"));
            // On a session without a transaction, each of these would commit by itself.
            MysqlBed::write_effect(tx, "c", "after").await?;
            let next = event.follow("t", "t").json(&"after").expect("json").build().expect("valid");
            Outbox::new().append(tx, &next).await.map_err(|error| HandlerError::retry(error.to_string()))?;
            return Ok(());
        }
        MysqlBed::write_effect(tx, "c", "whole").await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_swallows_a_deadlock_commits_nothing_and_is_not_acked() {
    let bed = MysqlBed::new().await;
    sqlx::raw_sql(
        "CREATE TABLE account (id INT PRIMARY KEY, n INT) ENGINE = InnoDB; INSERT INTO account VALUES (1, 0), (2, 0); \
         CREATE TABLE filler (id BIGINT AUTO_INCREMENT PRIMARY KEY, n INT) ENGINE = InnoDB",
    )
    .execute(bed.store().pool())
    .await
    .expect("made");
    let store = Arc::new(bed.store().clone());
    let broker = Arc::new(Embedded::new(store.clone()));
    let sent = event("k", "a");
    assert!(broker.publish(&[Arc::new(sent.clone())]).await.iter().all(Result::is_ok));
    let attempts = Arc::new(AtomicU32::new(0));
    let (has_locked, rival_waits) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler =
        Victim { attempts: attempts.clone(), has_locked: has_locked.clone(), rival_waits: rival_waits.clone() };
    let backoff = Backoff { base: Duration::from_millis(5), max: Duration::from_millis(20), jitter: Duration::ZERO };
    let spec = ConsumerSpec { backoff, ..ConsumerSpec::new("c", &["#"]) };
    let consumer = Consumer::new(spec, broker, store.clone(), store.clone(), handler).expect("valid");

    // The rival has written more, so the server ends the other one.
    let mut rival = bed.store().pool().begin().await.expect("a transaction");
    let rows = vec!["(1)"; 200].join(", ");
    let fill = format!("INSERT INTO filler (n) VALUES {rows}; UPDATE account SET n = n + 10 WHERE id = 2");
    sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut *rival).await.expect("locked");
    let stop = CancellationToken::new();
    let task = tokio::spawn(consumer.run(stop.clone()));
    tokio::time::timeout(PATIENCE, has_locked.notified()).await.expect("the handler has its lock");
    let crossing = tokio::spawn(async move {
        sqlx::raw_sql("UPDATE account SET n = n + 10 WHERE id = 1")
            .execute(&mut *rival)
            .await
            .expect("waits, then has it");
        rival.commit().await.expect("commits");
    });
    until("the rival waits", async || {
        // The server makes this table anew only when nobody has looked for a tenth of a second.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let waiting: i64 =
            sqlx::query_scalar("SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
                .fetch_one(bed.store().pool())
                .await
                .expect("answers");
        waiting > 0
    })
    .await;
    rival_waits.notify_one();
    crossing.await.expect("no panic");
    until("an effect", async || !bed.effects("c").await.is_empty()).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    stop.cancel();
    task.await.expect("no panic").expect("stops well");

    assert_eq!(bed.effects("c").await, ["whole"], "half an effect was committed");
    assert_eq!(attempts.load(Ordering::SeqCst), 2);
    let start = bed.store().position(true).await.expect("answers");
    assert!(bed.store().tail(&start, 10).await.expect("answers").rows.is_empty(), "an event of no effect was appended");
    let n: i32 =
        sqlx::query_scalar("SELECT n FROM account WHERE id = 1").fetch_one(bed.store().pool()).await.expect("ok");
    assert_eq!(n, 10);
    assert_eq!(bed.store().look("c", &sent).await.expect("answers"), Admission::Done);
}

/// DDL commits what was admitted; that must be noticed, not acked.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_ended_in_the_handler_is_an_error() {
    let bed = MysqlBed::new().await;
    let store = bed.store();
    for ending in ["CREATE TABLE x (id INT)", "ROLLBACK", "COMMIT"] {
        let mut tx = Inbox::begin(store).await.expect("begins");
        assert_eq!(store.admit(&mut tx, "c", &event("k", ending)).await.expect("answers"), Admission::New);
        sqlx::raw_sql(ending).execute(&mut *tx).await.expect("runs");
        MysqlBed::write_effect(&mut tx, "c", "after").await.expect("written");
        let error = store.commit(tx).await.expect_err("the transaction has ended");
        assert_eq!(error.kind(), Kind::Other, "{error}");
    }
    assert!(bed.effects("c").await.is_empty());
    // The connections are as good as new.
    let mut tx = Inbox::begin(store).await.expect("begins");
    MysqlBed::write_effect(&mut tx, "c", "well").await.expect("written");
    store.commit(tx).await.expect("commits");
    assert_eq!(bed.effects("c").await, ["well"]);
}

/// The statements of all migrations, one by one.
fn statements() -> Vec<String> {
    let mut statements = Vec::new();
    for migration in SCHEMA.migrations {
        let sql: Vec<&str> = migration.sql.lines().filter(|line| !line.trim_start().starts_with("--")).collect();
        let sql = sql.join("\n");
        statements.extend(sql.split(";\n").map(|one| one.trim().trim_end_matches(';').to_owned()));
    }
    statements.retain(|statement| !statement.is_empty());
    statements
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_ended_half_way_is_resumed() {
    let statements = statements();
    assert!(statements.len() > 14, "{statements:?}");
    for done in [1, 5, statements.len() - 1, statements.len()] {
        let bed = MysqlBed::bare().await;
        // One connection, as a migration has: some statements are made from what the connection remembers.
        let mut connection = bed.store().pool().acquire().await.expect("a connection");
        for statement in &statements[..done] {
            sqlx::raw_sql(AssertSqlSafe(statement.clone())).execute(&mut *connection).await.expect(statement);
        }
        drop(connection);
        assert_eq!(bed.store().schema().await.expect("answers").found, 0);
        assert_eq!(bed.store().migrate().await.expect("resumed").len(), SCHEMA.migrations.len());
        assert!(bed.store().migrate().await.expect("answers").is_empty());
        bed.store().enqueue(&[event("k", "a")]).await.expect("works");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_that_migrate_at_once_take_turns() {
    let bed = MysqlBed::bare().await;
    let others = futures_util::future::join_all((0..4).map(|_| bed.open_again())).await;
    let applied = futures_util::future::join_all(others.iter().map(|store| store.migrate())).await;
    let applied: Vec<usize> = applied.into_iter().map(|result| result.expect("migrated").len()).collect();
    assert_eq!(applied.iter().sum::<usize>(), SCHEMA.migrations.len(), "{applied:?}");
    sqlx::raw_sql("INSERT INTO postrider_migration (version, name) VALUES (99, 'future')")
        .execute(bed.store().pool())
        .await
        .expect("inserted");
    assert_eq!(bed.store().migrate().await.expect_err("newer").kind(), Kind::SchemaNewer);
}

/// What `migrate --print` prints is a script for the client, without another delimiter.
#[tokio::test(flavor = "multi_thread")]
async fn the_printed_script_runs_in_the_client() {
    let bed = MysqlBed::bare().await;
    let (place, database) = bed.url.rsplit_once('/').expect("a database");
    let place = place.rsplit_once("://").map_or(place, |(_, place)| place);
    let (login, place) = place.rsplit_once('@').unwrap_or(("root", place));
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    let (host, port) = place.rsplit_once(':').unwrap_or((place, "3306"));
    let mut client = std::process::Command::new("mariadb")
        .args(["--no-defaults", "-h", host, "-P", port, "-u", user, "--protocol=tcp", database])
        .env("MYSQL_PWD", password)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("the client is installed");
    let mut input = client.stdin.take().expect("a pipe");
    input.write_all(SCHEMA.script().as_bytes()).expect("written");
    drop(input);
    assert!(client.wait().expect("ends").success());
    assert_eq!(bed.store().schema().await.expect("answers").found, SCHEMA.needed());
    assert!(bed.store().migrate().await.expect("answers").is_empty());
    let collations: Vec<String> = sqlx::query_scalar(
        "SELECT DISTINCT table_collation FROM information_schema.tables \
         WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND table_name <> 'postrider_migration'",
    )
    .fetch_all(bed.store().pool())
    .await
    .expect("answers");
    assert!(
        matches!(collations[..], [ref one] if one == "utf8mb4_nopad_bin" || one == "utf8mb4_0900_bin"),
        "{collations:?}"
    );
    bed.store().enqueue(&[event("k", "a")]).await.expect("works");
}

/// A producer with the servers' default isolation, an old snapshot and no patience.
async fn producer(bed: &MysqlBed) -> MySqlConnection {
    let mut connection = MySqlConnection::connect(&bed.url).await.expect("connects");
    sqlx::raw_sql(
        "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ; SET SESSION innodb_lock_wait_timeout = 1; \
         START TRANSACTION; SELECT COUNT(*) FROM postrider_outbox; SELECT COUNT(*) FROM postrider_newest",
    )
    .execute(&mut connection)
    .await
    .expect("begins");
    connection
}

#[tokio::test(flavor = "multi_thread")]
async fn producers_at_repeatable_read_and_the_relay_wait_for_nobody() {
    let bed = MysqlBed::new().await;
    let (mut one, mut other) = (producer(&bed).await, producer(&bed).await);
    let (source, lease) = (bed.source(1), bed.lease(0).await);
    let mut position = source.open(&lease).await.expect("opens").position;
    for round in 0..5 {
        Outbox::new().append(&mut one, &event("one", &format!("one {round}"))).await.expect("waits for nobody");
        bed.store().enqueue(&[event("k", &format!("quick {round}"))]).await.expect("waits for nobody");
        Outbox::new().append(&mut other, &event("other", &format!("other {round}"))).await.expect("waits for nobody");
        let page = source.read(&lease, &position, 10).await.expect("reads");
        assert_eq!(page.rows.len(), 1);
        position = page.next;
        let settlement = Settlement { position: Some(position.clone()), ..Settlement::default() };
        tokio::time::timeout(Duration::from_secs(5), source.settle(&lease, &settlement))
            .await
            .expect("waits for nobody")
            .expect("settles");
    }
    for connection in [&mut other, &mut one] {
        sqlx::raw_sql("COMMIT").execute(connection).await.expect("commits");
        assert_eq!(source.read(&lease, &position, 10).await.expect("reads").rows.len() % 5, 0);
    }
    assert_eq!(source.read(&lease, &position, 100).await.expect("reads").rows.len(), 10);
}

/// An old snapshot must not decide what is newest.
#[tokio::test(flavor = "multi_thread")]
async fn newest_wins_whatever_the_isolation() {
    let bed = MysqlBed::new().await;
    let newest = Newest::of("c", "customer");
    let stamp = |version| Stamp { version: Some(version), at: chrono::DateTime::UNIX_EPOCH };
    let mut late = producer(&bed).await;
    let mut tx = Inbox::begin(bed.store()).await.expect("begins");
    assert!(newest.admit(&mut tx, "a", stamp(2), Change::Upsert).await.expect("answers"));
    bed.store().commit(tx).await.expect("commits");
    assert!(
        !newest.admit(&mut late, "a", stamp(1), Change::Upsert).await.expect("answers"),
        "older than what is there"
    );
    assert!(newest.admit(&mut late, "a", stamp(3), Change::Upsert).await.expect("answers"));
}
