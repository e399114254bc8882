//! MariaDB: a private server that waits for its disk.

mod ledger;
mod teller;

use async_trait::async_trait;
use postrider::handler::HandlerError;
use postrider::{Event, Handler};
use sqlx::{MySql, Transaction};

use super::super::consumer::{Change, Recorder};
use super::StoreServer;
use crate::testbed::{MariaDb, Result};

pub(super) use ledger::MysqlLedger;

pub(super) struct Server {
    mariadb: MariaDb,
    url: String,
}

impl Server {
    pub(super) async fn start() -> Result<Server> {
        let mariadb = MariaDb::start_private().await?;
        let url = mariadb.database("crash").await?;
        Ok(Server { mariadb, url })
    }
}

#[async_trait(?Send)]
impl StoreServer for Server {
    fn url(&self) -> &str {
        &self.url
    }

    fn pid(&self) -> Option<u32> {
        self.mariadb.pid().ok()
    }

    async fn kill(&mut self) -> Result<()> {
        self.mariadb.kill().await
    }

    async fn restart(&mut self) -> Result<()> {
        self.mariadb.restart().await
    }
}

/// The row of `head` stays locked until the commit, so that `seq` rises in the order of the effects of a key. Assignments
/// are made from left to right.
const MOVE_HEAD: &str = "UPDATE crash_head SET previous = version, version = ? WHERE consumer = ? AND `key` = ?";
const APPLY: &str = "INSERT INTO crash_effect (consumer, event_id, `key`, version, previous) \
     SELECT consumer, ?, `key`, version, previous FROM crash_head WHERE consumer = ? AND `key` = ?";

#[async_trait]
impl Handler<Transaction<'static, MySql>> for Recorder {
    async fn handle(&self, tx: &mut Transaction<'static, MySql>, event: &Event) -> Result<(), HandlerError> {
        let change: Change = event.decode()?;
        sqlx::query(MOVE_HEAD).bind(change.version).bind(self.group()).bind(event.key()).execute(&mut **tx).await?;
        let applied = sqlx::query(APPLY)
            .bind(event.id().to_string())
            .bind(self.group())
            .bind(event.key())
            .execute(&mut **tx)
            .await?;
        self.judge(event, &change, applied.rows_affected())
    }
}
