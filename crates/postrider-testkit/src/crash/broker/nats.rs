//! NATS: a private server with JetStream.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use postrider::broker::Broker;
use postrider::broker::nats::NatsSettings;

use super::super::store::Ledger;
use super::BrokerServer;
use crate::testbed::{Nats, Result};

/// The stream that the settings name by default.
const STREAM: &str = "postrider";

pub(super) struct Server(Nats);

impl Server {
    pub(super) async fn start() -> Result<Server> {
        Ok(Server(Nats::start_private().await?))
    }

    /// Every durable consumer with what is before it and what it has not acked.
    async fn consumers(&self) -> Result<Vec<(String, u64)>> {
        let context = async_nats::jetstream::new(async_nats::connect(self.0.url()).await?);
        let infos: Vec<_> = context.get_stream(STREAM).await?.consumers().try_collect().await?;
        Ok(infos.into_iter().map(|info| (info.name, info.num_pending + info.num_ack_pending as u64)).collect())
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
        let consumers = self.consumers().await?;
        let behind = consumers.iter().filter(|(_, left)| *left > 0);
        let lines: Vec<_> = behind.map(|(name, left)| format!("{name} has {left} messages before it")).collect();
        Ok((!lines.is_empty()).then(|| lines.join("\n")))
    }

    async fn state(&self, _: &dyn Ledger) -> Result<String> {
        Ok(format!("durable consumers and what is before them: {:?}", self.consumers().await?))
    }
}

pub(super) fn client(url: &str) -> Result<Arc<dyn Broker>> {
    Ok(Arc::new(postrider::broker::nats::Nats::new(NatsSettings::new(url))?))
}
