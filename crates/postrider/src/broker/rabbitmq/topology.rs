//! Exchanges, queues and bindings: declared idempotently, which is also how AMQP lets them be compared.
//!
//! A consumer with one slot has one queue of its name, bound to the topic exchange. With several slots the topic
//! exchange feeds a headers exchange `<consumer>.slots`, which deals the messages out to `<consumer>.<n>` by the header
//! `postrider-slot`. A message without that header (a foreign one) reaches the first queue through the alternate
//! exchange `<consumer>.unslotted.<slots>`.
//!
//! A consumer whose number of slots was changed would leave queues behind that still fill, and bindings that mix up the
//! order. AMQP cannot list either, but it refuses to declare an exchange with another kind or alternate exchange than it
//! has. So `<consumer>.slots` exists for every consumer (a fanout that nothing is bound to when there is one slot), and
//! a change is noticed before a message goes the wrong way.
//!
//! Every queue has a single active consumer: when a slot changes hands, its messages still come one after the other.

use std::sync::Arc;

use lapin::options::{ExchangeBindOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, ExchangeKind};

use super::error::{explain, is_missing};
use super::link::Live;
use super::message::{SLOT_HEADER, slot_value};
use super::settings::{QueueType, RabbitMqSettings};
use crate::error::{Error, Kind, Result};
use crate::handler::{ConsumerSpec, SLOTS_MAX};

/// Quorum queues drop a message after 20 deliveries from RabbitMQ 4 on. Ours count attempts in the inbox, and a lost
/// connection is no attempt, so the broker's limit is set out of reach.
const DELIVERY_LIMIT: i64 = 1_000_000_000;

/// As long as the store keeps dead letters by default.
const PLACE_TTL_MS: i64 = 14 * 24 * 60 * 60 * 1000;

/// The queue that a slot of a consumer reads.
pub(super) fn queue_name(consumer: &ConsumerSpec, slot: u32) -> String {
    if consumer.slots == 1 { consumer.name.clone() } else { format!("{}.{slot}", consumer.name) }
}

fn slots_name(consumer: &ConsumerSpec) -> String {
    format!("{}.slots", consumer.name)
}

/// Of exchanges that only other exchanges publish to.
const INTERNAL: ExchangeDeclareOptions =
    ExchangeDeclareOptions { durable: true, internal: true, passive: false, auto_delete: false, nowait: false };

/// Declares over one connection. An error closes an AMQP channel, and with it the rest of the declaration.
pub(super) struct Topology<'a> {
    pub live: &'a Arc<Live>,
    pub settings: &'a RabbitMqSettings,
    pub shown: &'a str,
}

impl Topology<'_> {
    /// The topic exchange, declared or, without the right to declare, found.
    pub async fn exchange(&self) -> Result<()> {
        let channel = self.channel().await?;
        let options = ExchangeDeclareOptions { durable: true, passive: !self.settings.declare, ..Default::default() };
        self.declare_exchange(&channel, &self.settings.exchange, ExchangeKind::Topic, options, FieldTable::default())
            .await
    }

    /// Compares the topic exchange, which must exist, with what is needed.
    pub async fn redeclare_exchange(&self) -> Result<()> {
        let channel = self.channel().await?;
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        self.declare_exchange(&channel, &self.settings.exchange, ExchangeKind::Topic, options, FieldTable::default())
            .await
    }

    /// Whether the topic exchange is there, whatever its kind.
    pub async fn has_exchange(&self) -> Result<bool> {
        let name = &self.settings.exchange;
        let channel = self.channel().await?;
        let options = ExchangeDeclareOptions { passive: true, ..Default::default() };
        match channel.exchange_declare(short(name)?, ExchangeKind::Topic, options, FieldTable::default()).await {
            Ok(()) => Ok(true),
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) => Err(self.classify(error, format!("look for the exchange {name:?}"))),
        }
    }

    /// Everything a consumer needs.
    pub async fn consumer(&self, consumer: &ConsumerSpec) -> Result<()> {
        self.exchange().await?;
        if !self.settings.declare {
            for slot in 0..consumer.slots {
                let name = queue_name(consumer, slot);
                if !self.has_queue(&name).await? {
                    return Err(Error::new(
                        Kind::Missing,
                        format!("the queue {name:?} of consumer {:?} does not exist on {}", consumer.name, self.shown),
                    )
                    .with_remedy("create and bind it, or let Postrider declare it (declare = true)"));
                }
            }
            return Ok(());
        }
        if consumer.slots == 1 { self.one_queue(consumer).await } else { self.slot_queues(consumer).await }
    }

    /// The queue of a place for what consumers could not apply. One that is there is taken as it is.
    pub async fn place(&self, name: &str) -> Result<()> {
        if self.has_queue(name).await? {
            return Ok(());
        }
        if !self.settings.declare {
            return Err(Error::new(
                Kind::Missing,
                format!("the queue {name:?} for what a consumer could not apply does not exist on {}", self.shown),
            )
            .with_remedy("create it, name another one, or let Postrider declare it (declare = true)"));
        }
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        let mut arguments = FieldTable::default();
        // Nobody may ever read it; it must not fill the disk.
        arguments.insert("x-message-ttl".into(), AMQPValue::LongLongInt(PLACE_TTL_MS));
        if self.settings.queue_type == QueueType::Quorum {
            arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        }
        let channel = self.channel().await?;
        let declared = channel.queue_declare(short(name)?, options, arguments).await;
        declared.map(drop).map_err(|error| self.classify(error, format!("declare the queue {name:?}")))
    }

    async fn one_queue(&self, consumer: &ConsumerSpec) -> Result<()> {
        let channel = self.channel().await?;
        self.declare_slots(&channel, consumer, ExchangeKind::Fanout, FieldTable::default()).await?;
        let queue = queue_name(consumer, 0);
        self.declare_queue(&channel, &queue).await?;
        for pattern in &consumer.topics {
            self.bind_queue(&channel, &queue, &self.settings.exchange, pattern, FieldTable::default()).await?;
        }
        Ok(())
    }

    async fn slot_queues(&self, consumer: &ConsumerSpec) -> Result<()> {
        let channel = self.channel().await?;
        let slots = slots_name(consumer);
        let unslotted = format!("{}.unslotted.{}", consumer.name, consumer.slots);
        let mut arguments = FieldTable::default();
        arguments.insert("alternate-exchange".into(), AMQPValue::LongString(unslotted.as_str().into()));
        self.declare_slots(&channel, consumer, ExchangeKind::Headers, arguments).await?;
        self.declare_exchange(&channel, &unslotted, ExchangeKind::Fanout, INTERNAL, FieldTable::default()).await?;

        for n in 0..consumer.slots {
            let queue = queue_name(consumer, n);
            self.declare_queue(&channel, &queue).await?;
            for slot in (0..SLOTS_MAX).filter(|slot| slot % consumer.slots == n) {
                let mut arguments = FieldTable::default();
                arguments.insert("x-match".into(), AMQPValue::LongString("all".into()));
                arguments.insert(SLOT_HEADER.into(), slot_value(slot));
                self.bind_queue(&channel, &queue, &slots, "", arguments).await?;
            }
        }
        self.bind_queue(&channel, &queue_name(consumer, 0), &unslotted, "", FieldTable::default()).await?;
        // Last, so that no message comes before every slot has its queue.
        for pattern in &consumer.topics {
            let binding = channel.exchange_bind(
                short(&slots)?,
                short(&self.settings.exchange)?,
                short(pattern)?,
                ExchangeBindOptions::default(),
                FieldTable::default(),
            );
            binding
                .await
                .map_err(|error| self.classify(error, format!("bind the exchange {slots:?} to {pattern:?}")))?;
        }
        Ok(())
    }

    async fn declare_slots(
        &self,
        channel: &Channel,
        consumer: &ConsumerSpec,
        kind: ExchangeKind,
        arguments: FieldTable,
    ) -> Result<()> {
        let name = slots_name(consumer);
        self.declare_exchange(channel, &name, kind, INTERNAL, arguments).await.map_err(|error| {
            if error.kind() != Kind::Mismatch {
                return error;
            }
            Error::new(
                Kind::Mismatch,
                format!(
                    "consumer {:?} has slots = {}, but the exchange {name:?} was declared for another number of slots",
                    consumer.name, consumer.slots
                ),
            )
            .with_remedy(format!(
                "set slots back; or let the consumer's queues run empty, delete them and the exchange {name:?}, and \
                 they are declared anew"
            ))
            .with_source(error)
        })
    }

    async fn declare_exchange(
        &self,
        channel: &Channel,
        name: &str,
        kind: ExchangeKind,
        options: ExchangeDeclareOptions,
        arguments: FieldTable,
    ) -> Result<()> {
        let doing = if options.passive { "find" } else { "declare" };
        channel
            .exchange_declare(short(name)?, kind, options, arguments)
            .await
            .map_err(|error| self.classify(error, format!("{doing} the exchange {name:?}")))
    }

    async fn declare_queue(&self, channel: &Channel, name: &str) -> Result<()> {
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        let mut arguments = FieldTable::default();
        arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
        if self.settings.queue_type == QueueType::Quorum {
            arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
            arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(DELIVERY_LIMIT));
        }
        channel
            .queue_declare(short(name)?, options, arguments)
            .await
            .map(drop)
            .map_err(|error| self.classify(error, format!("declare the queue {name:?}")))
    }

    async fn bind_queue(
        &self,
        channel: &Channel,
        queue: &str,
        exchange: &str,
        pattern: &str,
        arguments: FieldTable,
    ) -> Result<()> {
        channel
            .queue_bind(short(queue)?, short(exchange)?, short(pattern)?, QueueBindOptions::default(), arguments)
            .await
            .map_err(|error| self.classify(error, format!("bind the queue {queue:?} to {pattern:?}")))
    }

    async fn has_queue(&self, name: &str) -> Result<bool> {
        let channel = self.channel().await?;
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        match channel.queue_declare(short(name)?, options, FieldTable::default()).await {
            Ok(_) => Ok(true),
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) => Err(self.classify(error, format!("look for the queue {name:?}"))),
        }
    }

    async fn channel(&self) -> Result<Channel> {
        self.live.channel().await.map_err(|error| self.classify(error, "open a channel".to_owned()))
    }

    fn classify(&self, error: lapin::Error, doing: String) -> Error {
        explain(error, doing, self.shown, self.settings)
    }
}

fn short(name: &str) -> Result<ShortString> {
    ShortString::try_new(name)
        .map_err(|error| Error::new(Kind::Config, "a name is too long for RabbitMQ").with_source(error))
}
