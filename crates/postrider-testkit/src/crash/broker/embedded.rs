//! The embedded broker: no server of its own, the database's faults are its faults.

use std::sync::Arc;

use async_trait::async_trait;
use postrider::broker::Broker;
use postrider::broker::embedded::Embedded;
use postrider::store::Store;

use super::super::store::Ledger;
use super::BrokerServer;
use crate::testbed::Result;

pub(super) struct Server;

/// Why nobody asks for its outages: the plan has none.
const NO_SERVER: &str = "the embedded broker has no server";

#[async_trait(?Send)]
impl BrokerServer for Server {
    fn url(&self) -> &str {
        "embedded"
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    async fn kill(&mut self) -> Result<()> {
        Err(NO_SERVER.into())
    }

    async fn stop(&mut self) -> Result<()> {
        Err(NO_SERVER.into())
    }

    async fn restart(&mut self) -> Result<()> {
        Err(NO_SERVER.into())
    }

    async fn left_over(&self, ledger: &dyn Ledger) -> Result<Option<String>> {
        let slots = ledger.unread().await?;
        Ok((!slots.is_empty()).then(|| slots.join("\n")))
    }

    async fn state(&self, ledger: &dyn Ledger) -> Result<String> {
        let slots = ledger.unread().await?;
        Ok(if slots.is_empty() { "the log is read".to_owned() } else { slots.join("\n") })
    }
}

pub(super) fn client(store: Arc<dyn Store>) -> Arc<dyn Broker> {
    Arc::new(Embedded::new(store))
}
