//! A consumer: receives from RabbitMQ, applies each event once to PostgreSQL, and answers with an event of its own.
//!
//!     cargo run -p postrider --example consumer --features rabbitmq -- postgres://localhost/shop amqp://localhost
//!
//! Start as many as you like: they share the four slots of the consumer `invoices`.

use std::sync::Arc;

use async_trait::async_trait;
use postrider::broker::rabbitmq::{RabbitMq, RabbitMqSettings};
use postrider::handler::HandlerError;
use postrider::migrate::Migrate;
use postrider::store::postgres::PostgresStore;
use postrider::{Consumer, ConsumerSpec, Event, Handler, Outbox};
use serde::{Deserialize, Serialize};
use sqlx::{Postgres, Transaction};
use tokio_util::sync::CancellationToken;

#[derive(Deserialize)]
struct OrderPaid {
    order: String,
    total: u64,
}

#[derive(Serialize)]
struct InvoiceWritten {
    order: String,
    total: u64,
}

struct WriteInvoice {
    outbox: Outbox,
}

#[async_trait]
impl Handler<Transaction<'static, Postgres>> for WriteInvoice {
    async fn handle(&self, tx: &mut Transaction<'static, Postgres>, event: &Event) -> Result<(), HandlerError> {
        let OrderPaid { order, total } = event.decode()?;
        sqlx::query("INSERT INTO invoices (order_id, total) VALUES ($1, $2)")
            .bind(&order)
            .bind(i64::try_from(total)?)
            .execute(&mut **tx)
            .await?;
        let key = order.clone();
        let written =
            event.follow("invoices.written", "invoice.written").key(key).json(&InvoiceWritten { order, total })?;
        self.outbox.append(tx, &written.build()?).await?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(postgres), Some(rabbitmq)) = (arguments.next(), arguments.next()) else {
        return Err("usage: consumer <PostgreSQL URL> <RabbitMQ URL>".into());
    };
    let store = PostgresStore::connect(&postgres).await?;
    store.schema().await?.require()?;
    let create = "CREATE TABLE IF NOT EXISTS invoices (order_id text NOT NULL, total bigint NOT NULL)";
    sqlx::query(create).execute(store.pool()).await?;

    let broker = Arc::new(RabbitMq::new(RabbitMqSettings::new(rabbitmq))?);
    let spec = ConsumerSpec { slots: 4, ..ConsumerSpec::new("invoices", &["orders.paid"]) };
    let handler = WriteInvoice { outbox: Outbox::new().source("invoices") };
    // The store has two roles: the inbox, and the place where instances agree on who has which slot.
    let consumer = Consumer::new(spec, broker, Arc::new(store.clone()), Arc::new(store), handler)?;

    let stop = CancellationToken::new();
    let token = stop.clone();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            token.cancel();
        }
    });
    println!("waiting for orders.paid; Ctrl-C ends");
    consumer.run(stop).await?;
    Ok(())
}
