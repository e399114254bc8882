//! Brokers other than RabbitMQ, each with a bare publisher that keeps the same promise.
//!
//! A broker is a file here with its [`Carrier`], and a line in [`all`].

mod embedded;
mod kafka;
mod nats;
mod redis;

use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{SecondsFormat, Utc};
use uuid::Uuid;

use super::bed::{Bed, TYPE, key};
use crate::testbed::Result;

/// How often a broker is asked how much it holds.
const POLL_EVERY: Duration = Duration::from_millis(20);
/// Nothing has arrived for this long: it never will.
const STALL: Duration = Duration::from_secs(60);

/// Messages that the bare publishers have under way, at most.
const IN_FLIGHT: usize = 2000;

/// The envelope that the relay gives an event.
fn attributes(number: u64) -> [(&'static str, String); 6] {
    [
        ("specversion", "1.0".to_owned()),
        ("id", Uuid::now_v7().to_string()),
        ("source", "postrider".to_owned()),
        ("type", TYPE.to_owned()),
        ("time", Utc::now().to_rfc3339_opts(SecondsFormat::Micros, true)),
        ("partitionkey", key(number)),
    ]
}

/// A broker that the relay carries events to. Its futures stay on their thread, as those of the testbed do.
#[async_trait(?Send)]
pub(super) trait Carrier {
    /// Its name in the table.
    fn name(&self) -> &'static str;

    /// Lines for `[broker]` of the relay.
    fn config(&self) -> String;

    /// CPU time that its server has used, or none where that is a part of what others use.
    fn cpu(&self) -> Option<Duration>;

    /// Tells it which database the relay reads.
    fn set_database(&mut self, _database: &str) {}

    /// Publishes that many events like the relay's to a place of their own, confirmed, and returns when all are there: how
    /// many events per second.
    async fn bare(&self, events: u64) -> Result<f64>;

    /// How many events it has got from the relay since the last [`Carrier::empty`]. More than there were means that some
    /// were published twice.
    async fn count(&self) -> Result<u64>;

    /// Removes all that it holds.
    async fn empty(&self) -> Result<()>;
}

/// Starts all of them.
pub(super) async fn all(bed: &Bed) -> Result<Vec<Box<dyn Carrier>>> {
    Ok(vec![
        Box::new(embedded::Log::new(bed)),
        Box::new(kafka::Cluster::start().await?),
        Box::new(nats::Server::start().await?),
        Box::new(redis::Server::start().await?),
    ])
}

/// Waits until it has got that many events.
pub(super) async fn fill_up(carrier: &dyn Carrier, events: u64) -> Result<()> {
    let (mut held, mut moved) = (0, Instant::now());
    loop {
        let now = carrier.count().await?;
        if now > events {
            return Err(format!("{} holds {now} events, {events} were expected", carrier.name()).into());
        }
        if now == events {
            return Ok(());
        }
        if now != held {
            (held, moved) = (now, Instant::now());
        }
        if moved.elapsed() > STALL {
            return Err(format!("no event has come for {} s; {held} of {events} are there", STALL.as_secs()).into());
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}
