//! Redis Streams, compared with a program that sends pipelines of 100 `XADD`, several at once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use redis::Pipeline;
use redis::aio::MultiplexedConnection;
use uuid::Uuid;

use super::super::bed::{TOPIC, payload};
use super::{Carrier, IN_FLIGHT, attributes};
use crate::testbed::{Redis, Result, cpu};

/// Streams, of the relay and of the bare publisher.
const SHARDS: u64 = 32;
/// Entries of one pipeline.
const BUNCH: u64 = 100;

pub(super) struct Server {
    redis: Redis,
    connection: MultiplexedConnection,
}

impl Server {
    pub(super) async fn start() -> Result<Server> {
        let redis = Redis::start_private().await?;
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(60)));
        let client = redis::Client::open(redis.url())?;
        let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Server { redis, connection })
    }

    /// Asks this of every stream of a prefix.
    async fn of_all(&self, prefix: &str, ask: impl Fn(&mut Pipeline, &str)) -> Result<Vec<u64>> {
        let mut pipe = redis::pipe();
        (0..SHARDS).for_each(|shard| ask(&mut pipe, &format!("{{{prefix}}}:{shard:02}")));
        Ok(pipe.query_async(&mut self.connection.clone()).await?)
    }

    async fn count_of(&self, prefix: &str) -> Result<u64> {
        let count = |pipe: &mut Pipeline, stream: &str| {
            pipe.cmd("XLEN").arg(stream);
        };
        Ok(self.of_all(prefix, count).await?.iter().sum())
    }

    async fn empty_all(&self, prefix: &str) -> Result<()> {
        let trim = |pipe: &mut Pipeline, stream: &str| {
            pipe.cmd("XTRIM").arg(stream).arg("MAXLEN").arg(0);
        };
        self.of_all(prefix, trim).await?;
        Ok(())
    }
}

#[async_trait(?Send)]
impl Carrier for Server {
    fn name(&self) -> &'static str {
        "Redis Streams"
    }

    fn config(&self) -> String {
        format!("url = \"{}\"\n", self.redis.url())
    }

    fn cpu(&self) -> Option<Duration> {
        cpu(self.redis.pid().ok()?).ok()
    }

    async fn bare(&self, events: u64) -> Result<f64> {
        const PREFIX: &str = "bare";
        let payload = payload(0);
        let started = Instant::now();
        let mut waiting = VecDeque::new();
        let mut number = 0;
        while number < events {
            if waiting.len() as u64 * BUNCH >= IN_FLIGHT as u64
                && let Some(next) = waiting.pop_front()
            {
                added(next).await?;
            }
            let end = (number + BUNCH).min(events);
            let mut pipe = redis::pipe();
            for number in number..end {
                let command = pipe.cmd("XADD").arg(format!("{{{PREFIX}}}:{:02}", number % SHARDS)).arg("*");
                command.arg("topic").arg(TOPIC).arg("id").arg(Uuid::now_v7().to_string());
                command.arg("content_type").arg("application/json");
                for (name, value) in attributes(number) {
                    command.arg(format!("ce_{name}")).arg(value);
                }
                command.arg("data").arg(&payload);
            }
            let mut connection = self.connection.clone();
            waiting.push_back(tokio::spawn(async move { pipe.query_async::<Vec<String>>(&mut connection).await }));
            number = end;
        }
        for next in waiting {
            added(next).await?;
        }
        let rate = events as f64 / started.elapsed().as_secs_f64();
        let held = self.count_of(PREFIX).await?;
        self.empty_all(PREFIX).await?;
        if held == events { Ok(rate) } else { Err(format!("the streams hold {held} of {events} entries").into()) }
    }

    async fn count(&self) -> Result<u64> {
        self.count_of("postrider").await
    }

    async fn empty(&self) -> Result<()> {
        self.empty_all("postrider").await
    }
}

async fn added(waiting: tokio::task::JoinHandle<redis::RedisResult<Vec<String>>>) -> Result<()> {
    waiting.await??;
    Ok(())
}
