//! The consumer process of the run: the library's consumer with a handler that writes down what it does.

use std::sync::Arc;
use std::time::Duration;

use postrider::handler::HandlerError;
use postrider::inbox::Inbox;
use postrider::lease::{Lease, LeaseTimes};
use postrider::relay::Backoff;
use postrider::store::Store;
use postrider::store::mysql::MysqlStore;
use postrider::store::postgres::PostgresStore;
use postrider::{Consumer, ConsumerSpec, Event, Handler};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::broker::{self, BrokerKind};
use super::store::{self, StoreKind};
use crate::testbed::Result;

/// Quicker than the default, so that the run does not wait for minutes after an outage.
const BACKOFF: Backoff =
    Backoff { base: Duration::from_millis(200), max: Duration::from_secs(2), jitter: Duration::from_millis(200) };
/// How often a process that starts without a database tries to reach it.
const CONNECT_EVERY: Duration = Duration::from_millis(300);

/// What a consumer process is told.
#[derive(Debug, Clone)]
pub struct ConsumeOptions {
    /// Its group.
    pub group: String,
    /// The group's number of slots.
    pub slots: u32,
    /// The database with inbox, leases and effects.
    pub store: StoreKind,
    /// Where it is.
    pub store_url: String,
    /// The broker.
    pub broker: BrokerKind,
    /// Where it is.
    pub broker_url: String,
    /// How long its slots' leases last.
    pub lease: Duration,
    /// Of so many attempts, one fails; none when 0.
    pub failing_in: u32,
}

impl ConsumeOptions {
    fn spec(&self) -> ConsumerSpec {
        ConsumerSpec { slots: self.slots, ..ConsumerSpec::new(&self.group, &["accounts.#"]) }
    }
}

/// The payload of an event.
#[derive(serde::Deserialize)]
pub(super) struct Change {
    pub version: i64,
    pub is_poison: bool,
}

/// The handler. Each store has its own way to write an effect down.
pub(super) struct Recorder {
    group: String,
    failing_in: u32,
}

impl Recorder {
    /// Who it is.
    pub(super) fn group(&self) -> &str {
        &self.group
    }

    /// What comes of an attempt whose effect has changed so many rows.
    pub(super) fn judge(&self, event: &Event, change: &Change, rows: u64) -> Result<(), HandlerError> {
        if change.is_poison {
            std::process::abort();
        }
        if self.failing_in > 0 && fastrand::u32(..self.failing_in) == 0 {
            return Err(HandlerError::retry("bad luck"));
        }
        if rows != 1 {
            return Err(HandlerError::retry(format!("no account {:?}", event.key())));
        }
        Ok(())
    }
}

/// Consumes until SIGTERM.
pub async fn consume(options: ConsumeOptions) -> Result<()> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let stopper = stop.clone();
    tokio::spawn(async move {
        terminate.recv().await;
        stopper.cancel();
    });
    match options.store {
        StoreKind::Postgres => work(&options, stop, async |url| PostgresStore::connect(url).await).await,
        StoreKind::Mysql => work(&options, stop, async |url| MysqlStore::connect(url).await).await,
    }
}

async fn work<S>(
    options: &ConsumeOptions,
    stop: CancellationToken,
    connect: impl AsyncFn(&str) -> postrider::Result<S>,
) -> Result<()>
where
    S: Store + Inbox + 'static,
    Recorder: Handler<S::Tx>,
{
    let store = loop {
        match connect(&options.store_url).await {
            Ok(store) => break Arc::new(store),
            Err(error) => tracing::warn!(%error, "no database yet"),
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(CONNECT_EVERY) => {}
        }
    };
    let broker = broker::client(options.broker, &options.broker_url, store.clone())?;
    let handler = Recorder { group: options.group.clone(), failing_in: options.failing_in };
    let consumer = Consumer::new(options.spec(), broker, store.clone(), store, handler)?
        .lease_times(LeaseTimes { ttl: options.lease })
        .backoff(BACKOFF);
    Ok(consumer.run(stop).await?)
}

/// Declares the queues of a group, so that events find them before its first process runs.
pub async fn declare(options: ConsumeOptions) -> Result<()> {
    let spec = options.spec();
    let lease = Lease { group: spec.group(), slot: 0, owner: "declare".to_owned(), epoch: 0 };
    let store = store::open(options.store, &options.store_url).await?;
    let broker = broker::client(options.broker, &options.broker_url, store)?;
    broker.subscribe(&spec, &lease).await?.close().await?;
    Ok(())
}
