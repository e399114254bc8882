//! RabbitMQ: a private node, and a virtual host on it.

use std::sync::Arc;

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::rabbitmq::RabbitMqSettings;

use super::super::store::Ledger;
use super::BrokerServer;
use crate::testbed::{RabbitMq, Result};

pub(super) struct Server {
    node: RabbitMq,
    url: String,
}

impl Server {
    pub(super) async fn start() -> Result<Server> {
        let node = RabbitMq::start_private().await?;
        let url = node.vhost("crash").await?;
        Ok(Server { node, url })
    }

    /// Name, ready, unacked, consumers of every queue.
    async fn queues(&self) -> Result<String> {
        let vhosts = self.node.ctl(&["list_vhosts", "--no-table-headers"]).await?;
        let vhost = vhosts.lines().find(|name| name.starts_with("crash")).ok_or("the virtual host is gone")?;
        let columns = ["name", "messages_ready", "messages_unacknowledged", "consumers"];
        let mut arguments = vec!["list_queues", "--no-table-headers", "-p", vhost];
        arguments.extend(columns);
        self.node.ctl(&arguments).await
    }
}

#[async_trait(?Send)]
impl BrokerServer for Server {
    fn url(&self) -> &str {
        &self.url
    }

    fn pid(&self) -> Option<u32> {
        self.node.pid().ok()
    }

    async fn kill(&mut self) -> Result<()> {
        self.node.kill().await
    }

    async fn stop(&mut self) -> Result<()> {
        self.node.stop().await
    }

    async fn restart(&mut self) -> Result<()> {
        self.node.restart().await
    }

    async fn left_over(&self, _: &dyn Ledger) -> Result<Option<String>> {
        let queues = self.queues().await?;
        // The places for dead letters are to be read by people.
        let is_empty = |line: &&str| {
            line.split('\t').next().is_some_and(|name| name.ends_with("_error"))
                || line.split('\t').skip(1).take(2).all(|count| count == "0")
        };
        Ok((!queues.lines().all(|line| is_empty(&line))).then(|| format!("queues are not empty:\n{queues}")))
    }

    async fn state(&self, _: &dyn Ledger) -> Result<String> {
        Ok(format!("queues (ready, unacked, consumers):\n{}", self.queues().await?))
    }
}

pub(super) fn client(url: &str) -> Result<Arc<dyn Broker>> {
    Ok(Arc::new(postrider::broker::rabbitmq::RabbitMq::new(RabbitMqSettings::new(url))?))
}
