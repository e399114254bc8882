//! What the relay is compared with: a publisher that has its events in memory and does nothing but publish them.
//!
//! It sends what the relay sends (persistent, mandatory, the same headers and size) and keeps [`IN_FLIGHT`] messages
//! unconfirmed. It hands messages over in bunches, because awaiting each `basic_publish` by itself would cost lapin a
//! wake-up per message, and the comparison should be with a good publisher.

use std::collections::VecDeque;
use std::time::Instant;

use chrono::{SecondsFormat, Utc};
use futures_util::future::try_join_all;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Confirmation, Connection, ConnectionProperties, PublisherConfirm};
use uuid::Uuid;

use super::bed::{TOPIC, TYPE, key, payload};
use super::queue::Queue;
use crate::testbed::{Result, cpu};

/// Messages that the broker has not confirmed yet, at most.
const IN_FLIGHT: usize = 2000;
/// Messages that are handed to lapin at once.
const BUNCH: usize = 100;
/// The publisher's own exchange.
const EXCHANGE: &str = "bare";

/// What publishing came to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Published {
    /// Events per second that arrived.
    pub rate: f64,
    /// CPU time of this process meanwhile, in seconds: the least that a publisher with this client costs.
    pub cpu_s: f64,
}

/// Publishes that many events to a fresh queue.
pub(super) async fn drain(url: &str, events: u64) -> Result<Published> {
    let queue = Queue::create(url, EXCHANGE).await?;
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let payload = payload(0);

    let (started, cpu_before) = (Instant::now(), cpu(std::process::id())?);
    let publish = async {
        let mut waiting: VecDeque<PublisherConfirm> = VecDeque::with_capacity(IN_FLIGHT);
        let mut number = 0;
        while number < events {
            let end = (number + BUNCH as u64).min(events);
            let options = BasicPublishOptions { mandatory: true, immediate: false };
            let bunch = (number..end).map(|number| {
                channel.basic_publish(EXCHANGE.into(), TOPIC.into(), options, payload.as_bytes(), properties(number))
            });
            waiting.extend(try_join_all(bunch).await?);
            number = end;
            while waiting.len() > IN_FLIGHT - BUNCH {
                // The last of the oldest bunch is usually confirmed last; then the others are there.
                for confirm in waiting.drain(..BUNCH).rev() {
                    confirmed(confirm).await?;
                }
            }
        }
        for confirm in waiting.into_iter().rev() {
            confirmed(confirm).await?;
        }
        Result::Ok(())
    };
    tokio::try_join!(publish, queue.fill_up(events))?;
    let rate = events as f64 / started.elapsed().as_secs_f64();
    let cpu_s = cpu(std::process::id())?.saturating_sub(cpu_before).as_secs_f64();

    connection.close(200, "done".into()).await?;
    queue.delete().await?;
    Ok(Published { rate, cpu_s })
}

async fn confirmed(confirm: PublisherConfirm) -> Result<()> {
    match confirm.await? {
        Confirmation::Ack(None) => Ok(()),
        other => Err(format!("the broker did not take a message: {other:?}").into()),
    }
}

/// The headers and properties that the relay gives an event.
pub(super) fn properties(number: u64) -> BasicProperties {
    let (id, now) = (Uuid::now_v7().to_string(), Utc::now());
    let time = now.to_rfc3339_opts(SecondsFormat::Micros, true);
    let mut headers = FieldTable::default();
    let mut put = |name: &'static str, value: &str| {
        headers.insert(ShortString::from(name), AMQPValue::LongString(value.into()));
    };
    put("cloudEvents:specversion", "1.0");
    put("cloudEvents:id", &id);
    put("cloudEvents:source", "postrider");
    put("cloudEvents:type", TYPE);
    put("cloudEvents:time", &time);
    put("cloudEvents:partitionkey", &key(number));
    headers.insert("postrider-slot".into(), AMQPValue::LongLongInt((number % 64) as i64));
    BasicProperties::default()
        .with_headers(headers)
        .with_delivery_mode(2)
        .with_message_id(ShortString::from(id))
        .with_timestamp(u64::try_from(now.timestamp()).unwrap_or_default())
        .with_type(TYPE.into())
        .with_content_type("application/json".into())
}
