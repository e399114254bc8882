//! The whole way in one process, with nothing to install: outbox, relay, embedded broker, consumer, on one SQLite file.
//!
//!     cargo run -p postrider --example all_in_one --features sqlite

use std::sync::Arc;

use async_trait::async_trait;
use postrider::broker::embedded::Embedded;
use postrider::handler::HandlerError;
use postrider::migrate::Migrate;
use postrider::store::Store;
use postrider::store::sqlite::SqliteStore;
use postrider::{Consumer, ConsumerSpec, Event, Handler, Outbox, Relay, RelaySettings, Route};
use sqlx::{Sqlite, Transaction};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

struct Print {
    seen: mpsc::UnboundedSender<String>,
}

#[async_trait]
impl Handler<Transaction<'static, Sqlite>> for Print {
    async fn handle(&self, _tx: &mut Transaction<'static, Sqlite>, event: &Event) -> Result<(), HandlerError> {
        // Only what is written through `_tx` happens once; this may happen again after a crash.
        self.seen.send(format!("{} {}", event.topic(), String::from_utf8_lossy(event.payload())))?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::temp_dir().join(format!("postrider-example-{}.db", std::process::id()));
    let store = Arc::new(SqliteStore::open(&path).await?);
    store.migrate().await?;
    let stop = CancellationToken::new();

    let broker = Arc::new(Embedded::new(store.clone()));
    let settings = RelaySettings::default();
    let source = store.source(&Route::all("default"), settings.lanes);
    let relay = Relay::new("default", source, store.clone(), broker.clone(), settings);
    let relay = tokio::spawn(relay.run(stop.clone()));

    let (seen, mut received) = mpsc::unbounded_channel();
    let spec = ConsumerSpec::new("printer", &["orders.#"]);
    let consumer = Consumer::new(spec, broker, store.clone(), store.clone(), Print { seen })?;
    let consumer = tokio::spawn(consumer.run(stop.clone()));

    let outbox = Outbox::new();
    for state in ["created", "paid", "sent"] {
        let payload = serde_json::json!({ "order": "o-1", "state": state });
        let event =
            Event::builder(format!("orders.{state}"), format!("order.{state}")).key("o-1").json(&payload)?.build()?;
        // A service writes its own tables in the same transaction.
        let mut tx = store.writer().begin_with("BEGIN IMMEDIATE").await?;
        outbox.append(&mut tx, &event).await?;
        tx.commit().await?;
    }
    for _ in 0..3 {
        println!("{}", received.recv().await.ok_or("the consumer has ended")?);
    }

    stop.cancel();
    relay.await??;
    consumer.await??;
    store.close().await;
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{suffix}", path.display()));
    }
    Ok(())
}
