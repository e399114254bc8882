//! A durable classic queue that takes everything that is published to an exchange.

use std::time::{Duration, Instant};

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};

use crate::testbed::{Result, unique};

/// How often the queue is asked how much it holds.
const POLL_EVERY: Duration = Duration::from_millis(20);
/// Nothing has arrived for this long: it never will.
const STALL: Duration = Duration::from_secs(60);
/// After a large queue was deleted the broker frees memory and files; the next round should not pay for it.
const REST: Duration = Duration::from_secs(2);

pub(super) struct Queue {
    connection: Connection,
    channel: Channel,
    name: ShortString,
}

impl Queue {
    /// A fresh queue, bound with `#` to the durable topic exchange, which is declared too.
    pub async fn create(url: &str, exchange: &str) -> Result<Queue> {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        channel.exchange_declare(exchange.into(), ExchangeKind::Topic, durable, FieldTable::default()).await?;
        let name = ShortString::from(unique("bench"));
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(name.clone(), durable, FieldTable::default()).await?;
        let everything = QueueBindOptions::default();
        channel.queue_bind(name.clone(), exchange.into(), "#".into(), everything, FieldTable::default()).await?;
        Ok(Queue { connection, channel, name })
    }

    /// The channel that it was declared on, and its name.
    pub fn parts(&self) -> (&Channel, ShortString) {
        (&self.channel, self.name.clone())
    }

    /// How many messages it holds.
    pub async fn count(&self) -> Result<u64> {
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        let queue = self.channel.queue_declare(self.name.clone(), passive, FieldTable::default()).await?;
        Ok(queue.message_count().into())
    }

    /// Waits until it holds `count` messages. More than that is an error: something was published twice.
    pub async fn fill_up(&self, count: u64) -> Result<()> {
        let (mut held, mut moved) = (0, Instant::now());
        loop {
            let now = self.count().await?;
            if now > count {
                return Err(format!("the queue holds {now} messages, {count} were expected").into());
            }
            if now == count {
                return Ok(());
            }
            if now != held {
                (held, moved) = (now, Instant::now());
            }
            if moved.elapsed() > STALL {
                let secs = STALL.as_secs();
                return Err(format!("no message has come for {secs} s; {held} of {count} are there").into());
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }

    /// Deletes it with all that it holds.
    pub async fn delete(self) -> Result<()> {
        self.channel.queue_delete(self.name.clone(), QueueDeleteOptions::default()).await?;
        self.connection.close(200, "done".into()).await?;
        tokio::time::sleep(REST).await;
        Ok(())
    }
}
