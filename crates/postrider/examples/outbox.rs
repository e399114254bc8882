//! A producer: a business change and its event in one transaction, on PostgreSQL.
//!
//!     cargo run -p postrider --example outbox -- postgres://localhost/shop

use postrider::migrate::Migrate;
use postrider::store::postgres::PostgresStore;
use postrider::{Event, Outbox, Payload};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct OrderPaid {
    order: String,
    total: u64,
}

impl Payload for OrderPaid {
    const TYPE: &'static str = "order.paid";
    const TOPIC: &'static str = "orders.paid";

    fn key(&self) -> Option<String> {
        Some(self.order.clone())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("usage: outbox <PostgreSQL URL>")?;
    let store = PostgresStore::connect(&url).await?;
    // A service usually finds the tables there: `postrider migrate` has made them.
    store.migrate().await?;
    let pool = store.pool();
    sqlx::query("CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, state text NOT NULL)").execute(pool).await?;

    let outbox = Outbox::new().source("shop");
    let paid = OrderPaid { order: "o-1".to_owned(), total: 120 };

    let mut tx = pool.begin().await?;
    sqlx::query("INSERT INTO orders VALUES ($1, 'paid') ON CONFLICT (id) DO UPDATE SET state = 'paid'")
        .bind(&paid.order)
        .execute(&mut *tx)
        .await?;
    let event = Event::of(&paid)?;
    outbox.append(&mut tx, &event).await?;
    tx.commit().await?;

    println!("order {} is paid, event {} is in the outbox", paid.order, event.id());
    Ok(())
}
