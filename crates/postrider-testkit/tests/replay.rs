//! Ten thousand dead letters, replayed by the real program beside a consumer that runs.

#![allow(clippy::expect_used, reason = "a test that cannot go on must panic")]

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::handler::{Consumer, ConsumerSpec, Handler, HandlerError};
use postrider::{Event, Result};
use postrider_testkit::conformance::bed::{Bed, PostgresBed, Tx, event, name};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

const LETTERS: usize = 10_000;
const KEYS: usize = 500;
/// Everything that should happen soon happens within this, also on a busy machine.
const SOON: Duration = Duration::from_secs(120);

struct Book {
    is_open: Arc<AtomicBool>,
}

#[async_trait]
impl Handler<Tx<PostgresBed>> for Book {
    async fn handle(&self, tx: &mut Tx<PostgresBed>, event: &Event) -> Result<(), HandlerError> {
        if !self.is_open.load(Ordering::SeqCst) {
            return Err(HandlerError::reject("the book is closed"));
        }
        PostgresBed::write_effect(tx, "billing", &name(event)).await
    }
}

async fn count(bed: &PostgresBed, of: &str) -> usize {
    let query = sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {of}"));
    sqlx::query_scalar::<_, i64>(query).fetch_one(bed.store().pool()).await.expect("counted") as usize
}

async fn until(bed: &PostgresBed, of: &str, is_so: impl Fn(usize) -> bool) {
    let deadline = Instant::now() + SOON;
    loop {
        let now = count(bed, of).await;
        if is_so(now) {
            return;
        }
        assert!(Instant::now() < deadline, "{now} in {of}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_are_replayed_in_stages_cancelled_and_resumed() {
    let bed = PostgresBed::new().await;
    let store = Arc::new(bed.store().clone());
    let broker = Arc::new(Embedded::new(store.clone()));
    let events: Vec<Arc<Event>> =
        (0..LETTERS).map(|n| Arc::new(event(&format!("k-{}", n % KEYS), &format!("{:03}/{n:05}", n % KEYS)))).collect();
    for batch in events.chunks(1000) {
        assert!(broker.publish(batch).await.iter().all(Result::is_ok));
    }
    let (is_open, stop) = (Arc::new(AtomicBool::new(false)), CancellationToken::new());
    let handler = Book { is_open: is_open.clone() };
    let consumer = Consumer::new(ConsumerSpec::new("billing", &["#"]), broker, store.clone(), store, handler);
    let consumer = tokio::spawn(consumer.expect("valid").run(stop.clone()));
    until(&bed, "postrider.dead_letter", |dead| dead == LETTERS).await;

    is_open.store(true, Ordering::SeqCst);
    let replay = || {
        let postrider = PathBuf::from(env!("CARGO_BIN_EXE_crash")).with_file_name("postrider");
        let mut command = Command::new(postrider);
        command.args(["dead", "replay", "--all", "--rate", "4000", "--json"]).env("POSTRIDER__STORE__URL", &bed.url);
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("`make test` builds postrider first")
    };
    let began = Instant::now();
    let first = replay();
    until(&bed, "effect", |effects| effects >= LETTERS / 2).await;
    let interrupted = Command::new("kill").args(["-INT", &first.id().to_string()]).status().expect("kill runs");
    assert!(interrupted.success());
    let output = tokio::task::spawn_blocking(move || first.wait_with_output()).await.expect("waits").expect("ends");
    let cancelled: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    println!("cancelled after {:.1} s: {cancelled}", began.elapsed().as_secs_f64());
    assert_eq!((output.status.code(), &cancelled["stopped"]), (Some(1), &"cancelled".into()));
    assert!(count(&bed, "postrider.dead_letter").await > 0, "it was cancelled half-way");

    let began = Instant::now();
    let second = replay();
    let output = tokio::task::spawn_blocking(move || second.wait_with_output()).await.expect("waits").expect("ends");
    let resumed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    println!("resumed, {:.1} s: {resumed}", began.elapsed().as_secs_f64());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(count(&bed, "postrider.dead_letter").await, 0);
    assert_eq!(count(&bed, "postrider.held").await, 0);

    let mut effects = bed.effects("billing").await;
    assert_eq!(effects.len(), LETTERS, "each once");
    effects.sort_by_key(|name| name[..3].to_owned());
    assert!(effects.is_sorted(), "the oldest of a key first");
    effects.dedup();
    assert_eq!(effects.len(), LETTERS);
    stop.cancel();
    consumer.await.expect("no panic").expect("stops well");
}
