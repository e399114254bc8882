//! PostgreSQL: a private server that waits for its disk.

mod ledger;
mod teller;

use async_trait::async_trait;
use postrider::handler::HandlerError;
use postrider::{Event, Handler};
use sqlx::{Postgres as Database, Transaction};

use super::super::consumer::{Change, Recorder};
use super::StoreServer;
use crate::testbed::{Postgres, Result};

pub(super) use ledger::PostgresLedger;

pub(super) struct Server {
    postgres: Postgres,
    url: String,
}

impl Server {
    pub(super) async fn start() -> Result<Server> {
        let postgres = Postgres::start_private().await?;
        let url = postgres.database("crash").await?;
        Ok(Server { postgres, url })
    }
}

#[async_trait(?Send)]
impl StoreServer for Server {
    fn url(&self) -> &str {
        &self.url
    }

    fn pid(&self) -> Option<u32> {
        self.postgres.pid().ok()
    }

    async fn kill(&mut self) -> Result<()> {
        self.postgres.kill().await
    }

    async fn restart(&mut self) -> Result<()> {
        self.postgres.restart().await
    }
}

/// The effect of an event. The row of `head` stays locked until the commit, so that `seq` rises in the order of the
/// effects of a key.
const APPLY: &str = "WITH h AS ( \
       UPDATE crash.head SET previous = version, version = $4 WHERE consumer = $1 AND key = $3 RETURNING previous \
     ) INSERT INTO crash.effect (consumer, event_id, key, version, previous) SELECT $1, $2, $3, $4, previous FROM h";

#[async_trait]
impl Handler<Transaction<'static, Database>> for Recorder {
    async fn handle(&self, tx: &mut Transaction<'static, Database>, event: &Event) -> Result<(), HandlerError> {
        let change: Change = event.decode()?;
        let applied = sqlx::query(APPLY)
            .bind(self.group())
            .bind(event.id())
            .bind(event.key())
            .bind(change.version)
            .execute(&mut **tx)
            .await?;
        self.judge(event, &change, applied.rows_affected())
    }
}
