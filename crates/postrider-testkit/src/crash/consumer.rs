//! The consumer process of the run: the library's consumer with a handler that writes down what it does.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
use postrider::handler::HandlerError;
use postrider::lease::{Lease, LeaseTimes};
use postrider::relay::Backoff;
use postrider::store::postgres::PostgresStore;
use postrider::{Consumer, ConsumerSpec, Event, Handler};
use sqlx::{Postgres, Transaction};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::ledger::APPLY;
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
    pub postgres: String,
    /// The broker.
    pub rabbit: String,
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

#[derive(serde::Deserialize)]
struct Payload {
    version: i64,
    is_poison: bool,
}

struct Recorder {
    group: String,
    failing_in: u32,
}

#[async_trait]
impl Handler<Transaction<'static, Postgres>> for Recorder {
    async fn handle(&self, tx: &mut Transaction<'static, Postgres>, event: &Event) -> Result<(), HandlerError> {
        let Payload { version, is_poison } = event.decode()?;
        let applied = sqlx::query(APPLY)
            .bind(&self.group)
            .bind(event.id())
            .bind(event.key())
            .bind(version)
            .execute(&mut **tx)
            .await?;
        if is_poison {
            std::process::abort();
        }
        if self.failing_in > 0 && fastrand::u32(..self.failing_in) == 0 {
            return Err(HandlerError::retry("bad luck"));
        }
        if applied.rows_affected() != 1 {
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
    let store = loop {
        match PostgresStore::connect(&options.postgres).await {
            Ok(store) => break Arc::new(store),
            Err(error) => tracing::warn!(%error, "no database yet"),
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(CONNECT_EVERY) => {}
        }
    };
    let broker = Arc::new(RabbitMq::new(RabbitMqSettings::new(&options.rabbit))?);
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
    RabbitMq::new(RabbitMqSettings::new(&options.rabbit))?.subscribe(&spec, &lease).await?.close().await?;
    Ok(())
}
