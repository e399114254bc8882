//! The broker of a run: the server that faults are done to, and the client that consumers and duplicates use.
//!
//! A broker is a variant of [`BrokerKind`], a file here with its [`BrokerServer`], and a line in [`start`] and in [`client`].

mod embedded;
mod kafka;
mod nats;
mod rabbitmq;
mod redis;

use std::sync::Arc;

use async_trait::async_trait;
use clap::ValueEnum;
use postrider::broker::Broker;
use postrider::store::Store;

use super::store::Ledger;
use crate::testbed::Result;

/// Which broker carries the events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum BrokerKind {
    /// A RabbitMQ node.
    #[default]
    #[value(name = "rabbitmq")]
    RabbitMq,
    /// The log in the database of the outbox.
    Embedded,
    /// The mock cluster of librdkafka.
    Kafka,
    /// A NATS server with JetStream.
    Nats,
    /// Streams of a Redis server.
    Redis,
}

impl BrokerKind {
    /// Its name in what the run says.
    pub(super) fn title(self) -> &'static str {
        match self {
            BrokerKind::RabbitMq => "RabbitMQ",
            BrokerKind::Embedded => "the embedded broker",
            BrokerKind::Kafka => "Kafka",
            BrokerKind::Nats => "NATS",
            BrokerKind::Redis => "Redis",
        }
    }

    /// What can be done to its server.
    pub(super) fn outages(self) -> Outages {
        match self {
            BrokerKind::RabbitMq | BrokerKind::Nats | BrokerKind::Redis => Outages::KillAndStop,
            BrokerKind::Kafka => Outages::Stop,
            BrokerKind::Embedded => Outages::None,
        }
    }

    /// What must be known of a run on it.
    pub(super) fn note(self) -> Option<&'static str> {
        match self {
            BrokerKind::Embedded => Some("the embedded broker is a log in the database, and is killed with it"),
            BrokerKind::Kafka => Some(
                "Kafka is librdkafka's mock cluster in memory, which cannot be killed: all its brokers go down and come up again",
            ),
            _ => None,
        }
    }

    /// The word on the command line.
    pub(super) fn word(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// What can be done to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outages {
    /// It is killed and stopped in turn.
    KillAndStop,
    /// It can only be stopped.
    Stop,
    /// There is no server.
    None,
}

/// A broker's server. Its futures stay on their thread, as those of the testbed do.
#[async_trait(?Send)]
pub(super) trait BrokerServer: Send {
    /// The address for relays and consumers.
    fn url(&self) -> &str;

    /// Lines for `[broker]` of the relays, beside the address.
    fn settings(&self) -> &'static str {
        ""
    }

    /// Its process, if it has one that runs.
    fn pid(&self) -> Option<u32>;

    /// `kill -9`.
    async fn kill(&mut self) -> Result<()>;

    /// The orderly shutdown.
    async fn stop(&mut self) -> Result<()>;

    /// Starts it again with what it had.
    async fn restart(&mut self) -> Result<()>;

    /// What consumers have not acked yet, in words.
    async fn left_over(&self, ledger: &dyn Ledger) -> Result<Option<String>>;

    /// What it holds, for a person who wonders why nothing moves.
    async fn state(&self, ledger: &dyn Ledger) -> Result<String>;
}

/// Starts a server.
pub(super) async fn start(kind: BrokerKind) -> Result<Box<dyn BrokerServer>> {
    Ok(match kind {
        BrokerKind::RabbitMq => Box::new(rabbitmq::Server::start().await?),
        BrokerKind::Embedded => Box::new(embedded::Server),
        BrokerKind::Kafka => Box::new(kafka::Server::start().await?),
        BrokerKind::Nats => Box::new(nats::Server::start().await?),
        BrokerKind::Redis => Box::new(redis::Server::start().await?),
    })
}

/// A client of it. `store` is where the embedded broker's log is.
pub(super) fn client(kind: BrokerKind, url: &str, store: Arc<dyn Store>) -> Result<Arc<dyn Broker>> {
    match kind {
        BrokerKind::RabbitMq => rabbitmq::client(url),
        BrokerKind::Embedded => Ok(embedded::client(store)),
        BrokerKind::Kafka => kafka::client(url),
        BrokerKind::Nats => nats::client(url),
        BrokerKind::Redis => redis::client(url),
    }
}
