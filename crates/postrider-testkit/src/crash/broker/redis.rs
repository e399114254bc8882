//! Redis Streams: a private server that writes to disk before it confirms.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::redis::{RedisStreamSettings, RedisStreams};
use redis::Value;

use super::super::store::Ledger;
use super::BrokerServer;
use crate::testbed::{Redis, Result};

/// The streams, by the prefix that the settings have by default.
const STREAMS: &str = "{postrider}:[0-9][0-9]";

pub(super) struct Server(Redis);

impl Server {
    pub(super) async fn start() -> Result<Server> {
        Ok(Server(Redis::start_private().await?))
    }

    /// Groups whose position is not the end of their stream, in words.
    async fn unread(&self) -> Result<Vec<String>> {
        let mut connection = redis::Client::open(self.0.url())?.get_multiplexed_async_connection().await?;
        let mut lines = Vec::new();
        let streams: Vec<String> = redis::cmd("KEYS").arg(STREAMS).query_async(&mut connection).await?;
        for stream in streams {
            let ask = |what| {
                let mut command = redis::cmd("XINFO");
                command.arg(what).arg(&stream);
                command
            };
            let info: HashMap<String, Value> = ask("STREAM").query_async(&mut connection).await?;
            let groups: Vec<HashMap<String, Value>> = ask("GROUPS").query_async(&mut connection).await?;
            let text = |fields: &HashMap<String, Value>, name: &str| -> Result<String> {
                let value = fields.get(name).ok_or_else(|| format!("XINFO does not say {name}"))?;
                Ok(redis::from_redis_value_ref(value)?)
            };
            let end = text(&info, "last-generated-id")?;
            for group in groups {
                let (name, done) = (text(&group, "name")?, text(&group, "last-delivered-id")?);
                if done != end {
                    lines.push(format!("{name} is at {done} of {end} in {stream}"));
                }
            }
        }
        Ok(lines)
    }
}

#[async_trait(?Send)]
impl BrokerServer for Server {
    fn url(&self) -> &str {
        self.0.url()
    }

    fn pid(&self) -> Option<u32> {
        self.0.pid().ok()
    }

    async fn kill(&mut self) -> Result<()> {
        self.0.kill().await
    }

    async fn stop(&mut self) -> Result<()> {
        self.0.stop().await
    }

    async fn restart(&mut self) -> Result<()> {
        self.0.restart().await
    }

    async fn left_over(&self, _: &dyn Ledger) -> Result<Option<String>> {
        let lines = self.unread().await?;
        Ok((!lines.is_empty()).then(|| lines.join("\n")))
    }

    async fn state(&self, _: &dyn Ledger) -> Result<String> {
        Ok(format!("groups that are not at the end of their stream:\n{}", self.unread().await?.join("\n")))
    }
}

pub(super) fn client(url: &str) -> Result<Arc<dyn Broker>> {
    Ok(Arc::new(RedisStreams::new(RedisStreamSettings::new(url))?))
}
